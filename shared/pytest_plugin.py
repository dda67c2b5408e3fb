"""pytest --gpt-duet TARGET: run the checks of a model without a test file.

Each check is an item of pytest. Without a target, the targets of
[tool.gpt-duet] in pyproject.toml are checked. Without the option, this module
imports only pytest.
"""

import traceback
from contextlib import chdir
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .cli.job import Job
    from .invariants.runner import Run

OPTION = "--gpt-duet"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --gpt-duet."""
    parser.getgroup("gpt-duet").addoption(
        OPTION,
        action="append",
        nargs="?",
        const="",
        metavar="TARGET",
        help="check a language model: my_pkg.model:build; without a target, "
        "check those of [tool.gpt-duet] in pyproject.toml",
    )


@pytest.hookimpl(tryfirst=True)  # runs before -k deselects items
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add an item for each check of each target."""
    given = config.getoption(OPTION)
    if given is None:
        return
    from typer.main import get_command

    from .cli import build_app
    from .cli.checking import settings_of
    from .cli.job import jobs_of

    command: Any = get_command(build_app())
    words = ["--", *filter(None, given)]
    context = command.commands["check"].make_context("check", words)
    try:
        for job in jobs_of(context):
            settings = settings_of(job)
            reasons = settings.get("expected_failures", {})
            for check in settings.get("checks", [""]):
                name = f"{job.target}::{check}" if check else job.target
                made = {"name": name, "nodeid": name, "job": job}
                items.append(CheckItem.from_parent(session, **made))
                if check in reasons:
                    marker = pytest.mark.xfail(reason=reasons[check])
                    items[-1].add_marker(marker)
    except ValueError as error:
        raise pytest.UsageError(f"gpt-duet: {error}") from None


class CheckItem(pytest.Item):
    """One check of a model, or all checks of a scorer."""

    def __init__(self, job: "Job", **given: Any):
        super().__init__(**given)
        self.job = job

    def runtest(self) -> None:
        """Run the check; a skipped check skips the item."""
        __tracebackhide__ = True
        with chdir(self.job.folder):
            self._check()

    def _check(self) -> None:
        __tracebackhide__ = True
        from .cli.checking import check_here
        from .invariants.parametrize import BoundCheck

        if self.job.scorer:
            check_here(self.job, True, lambda _: None).raise_for_failures()
            return
        name = self.name.rpartition("::")[2]
        check: BoundCheck = BoundCheck(name, lambda _: _run(self.job))
        # a check is called with a model; here any object will do, because the
        # lambda ignores it
        check(_run)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo, style: Any = None
    ) -> Any:
        """Return the message, and the traceback of the user's code."""
        error = excinfo.value
        if not isinstance(error, AssertionError | ValueError):
            return super().repr_failure(excinfo, style)
        lines = [str(error), *getattr(error, "__notes__", [])]
        if (cause := error.__cause__) is not None:
            lines += traceback.format_exception(cause, chain=False)
        return "\n".join(lines)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the location that pytest prints for the item."""
        return self.nodeid.partition("::")[0], None, self.nodeid


# kept for the next item: the checks of one target share a Run
@lru_cache(maxsize=1)
def _run(job: "Job") -> "Run":
    from .cli.checking import load, settings_of
    from .invariants.runner import Run

    model, settings = load(job, settings_of(job))
    del settings["expected_failures"], settings["debug"]
    return Run(model, **settings)
