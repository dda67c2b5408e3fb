"""pytest --gpt-duet TARGET: the checks of a model, without a test file.

Each check is an item. Without a target, those of [tool.gpt-duet] in
pyproject.toml run. Nothing but pytest is imported until the option is given.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
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

    from .project import read_project
    from .targets import parse_target

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
            own = project.get(target, {})
            made = {"name": target, "nodeid": target, "own": own}
            if "scorer" in own:
                items.append(ScorerItem.from_parent(session, **made))
                continue
            items += Checks.from_parent(session, **made).items()
    except ValueError as error:
        raise pytest.UsageError(f"gpt-duet: {error}") from None


class Checks(pytest.Collector):
    """The checks of one target."""

    def __init__(self, own: dict[str, Any], **given: Any):
        super().__init__(**given)
        from .invariants.checks import choose_checks
        from .project import as_arguments

        self.settings = as_arguments(own)
        self.names = choose_checks(self.settings.pop("checks", None))
        self.expected = self.settings.pop("expected_failures", {})

    def items(self) -> "list[CheckItem]":
        """Return an item for each check."""
        return [CheckItem.from_parent(self, name=n) for n in self.names]

    collect = items


class CheckItem(pytest.Item):
    """One check of one target."""

    parent: Checks

    def __init__(self, **given: Any):
        super().__init__(**given)
        if self.name in self.parent.expected:
            reason = self.parent.expected[self.name]
            self.add_marker(pytest.mark.xfail(reason=reason))

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
        return self.parent.name, None, f"{self.parent.name}::{self.name}"


class ScorerItem(CheckItem):
    """All checks of a scorer."""

    def __init__(self, own: dict[str, Any], **given: Any):
        pytest.Item.__init__(self, **given)
        self.own = own

    def runtest(self) -> None:
        """Run them."""
        __tracebackhide__ = True
        from .invariants import check_scorer
        from .project import as_arguments
        from .targets import load_scorer

        settings = as_arguments(self.own)
        make, settings = load_scorer(settings.pop("scorer"), settings)
        check_scorer(make, **settings).raise_for_failures()

    def reportinfo(self) -> tuple[str, None, str]:
        """Return where the item is, as pytest prints it."""
        return self.name, None, self.name


@lru_cache(maxsize=1)  # the checks of a target share it
def _run(checks: Checks) -> "Run":
    from .invariants.runner import Run
    from .targets import load_makers, load_target

    settings = dict(checks.settings)
    sizes = settings.get("vocab_size"), settings.get("block_size")
    named = ("cache", "inputs", "documents")
    settings |= load_makers(*(settings.get(name) for name in named))
    ours = ("budget", "threads", "require_proof", "allow_routing")
    first = [settings.pop(name, None) for name in ours]
    model = load_target(checks.name, *sizes)
    budget, threads, proof, routing = first
    return Run(
        model,
        checks.names,
        budget,
        threads,
        bool(proof),
        bool(routing),
        **settings,
    )
