"""pytest --gpt-duet TARGET: the checks of a model, without a test file.

Each check is an item. Without a target, those of [tool.gpt-duet] in
pyproject.toml run. Nothing but pytest is imported until the option is given.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .cli.checking import Job
    from .invariants.runner import Run

OPTION = "--gpt-duet"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("gpt-duet").addoption(
        OPTION,
        action="append",
        nargs="?",
        const="",
        metavar="TARGET",
        help="check a language model: my_pkg.model:build; without a target "
        "those of [tool.gpt-duet] in pyproject.toml",
    )


@pytest.hookimpl(tryfirst=True)  # before -k leaves some out
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add an item for each check of each target."""
    given = config.getoption(OPTION)
    if given is None:
        return
    from pathlib import Path

    from typer.main import get_command

    from .cli import build_app
    from .cli.check import job_of
    from .project import read_project
    from .targets import parse_target

    command: Any = get_command(build_app())
    context = command.commands["check"].make_context("check", [])
    try:
        project = read_project(Path.cwd())
        targets = list(dict.fromkeys(name for name in given if name))
        targets = targets or list(project)
        if not targets:
            raise ValueError(
                "name what builds a model, as --gpt-duet my_pkg.model:build, "
                "or list targets in pyproject.toml"
            )
        for target in targets:
            parse_target(target)
            job = job_of(context, target, project.get(target, {}))
            made = {"name": target, "nodeid": target, "job": job}
            if job.scorer:
                items.append(ScorerItem.from_parent(session, **made))
            else:
                items += Checks.from_parent(session, **made).collect()
    except ValueError as error:
        raise pytest.UsageError(f"gpt-duet: {error}") from None


class Checks(pytest.Collector):
    """The checks of one target."""

    def __init__(self, job: "Job", **given: Any):
        super().__init__(**given)
        self.job = job

    def collect(self) -> "list[CheckItem]":
        """Return an item for each check."""
        items = []
        for name in self.job.settings["checks"]:
            items.append(CheckItem.from_parent(self, name=name))
            reason = self.job.settings["expected_failures"].get(name)
            if reason is not None:
                items[-1].add_marker(pytest.mark.xfail(reason=reason))
        return items


class CheckItem(pytest.Item):
    """One check of one target."""

    parent: Checks

    def runtest(self) -> None:
        """Run the check; a skip is pytest's own."""
        __tracebackhide__ = True
        from .invariants.parametrize import BoundCheck

        check: BoundCheck = BoundCheck(self.name, lambda _: _run(self.parent))
        check(_run)  # which stands for the model

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo, style: Any = None
    ) -> Any:
        """Return the message, and where the user's own code raised."""
        error = excinfo.value
        if not isinstance(error, AssertionError | ValueError):
            return super().repr_failure(excinfo, style)
        lines = [str(error), *getattr(error, "__notes__", [])]
        if (cause := error.__cause__) is not None:
            import traceback

            lines += traceback.format_exception(cause, chain=False)
        return "\n".join(lines)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return where the item is, as pytest prints it."""
        return self.nodeid.partition("::")[0], None, self.nodeid


class ScorerItem(CheckItem):
    """All checks of a scorer."""

    def __init__(self, job: "Job", **given: Any):
        super().__init__(**given)
        self.job = job

    def runtest(self) -> None:
        """Run them."""
        __tracebackhide__ = True
        from .cli.checking import check_here

        check_here(self.job, lambda report: None).raise_for_failures()


@lru_cache(maxsize=1)  # the checks of a target share it
def _run(checks: Checks) -> "Run":
    from .invariants.runner import Run
    from .targets import load_makers, load_target

    job, settings = checks.job, dict(checks.job.settings)
    ours = ("checks", "budget", "threads", "require_proof", "allow_routing")
    first = [settings.pop(name) for name in ours]
    del settings["expected_failures"], settings["debug"]
    model = load_target(
        job.target, settings["vocab_size"], settings["block_size"]
    )
    settings |= load_makers(job.cache, job.inputs, job.documents)
    return Run(model, *first, **settings)
