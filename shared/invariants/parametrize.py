"""Run the checks as tests of pytest."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, Unpack

from ..running.context import one_run
from ..running.errors import UnusableModel, with_their_frames
from ..running.model.building import Model, name_of
from ..settings import (
    RunSettings,
    TargetSettings,
    completed,
    settings_in,
    takes,
)
from .runner import Run, choose_checks, full_names

LONGEST = 60  # most characters of a target's expression in a test's name


class Target:
    """A model with its settings, for `parametrize_with_checks`.

    Args:
        model: a model or, better, a factory, as for check_model.
        **settings: checks, expected (reasons, by the name of a check that is
            expected to fail), budget, threads, vocab_size, block_size,
            outputs, seed, device, layout, cache, inputs, documents and
            compile. Each replaces that setting of `parametrize_with_checks`.

    Raises:
        TypeError: for an unknown setting.
    """

    def __init__(self, model: Model, **settings: Unpack[TargetSettings]):
        known = {one.name for one in settings_in(TargetSettings)}
        for name in settings.keys() - {*known, "expected"}:
            raise TypeError(f"Target has no setting {name!r}")
        self.model = model
        self.settings = settings


Expected = Mapping[str, str] | Callable[[Model], Mapping[str, str]]


class BoundCheck:
    """A check that a test calls with a model; `run_of` makes a model's Run."""

    def __init__(self, name: str, run_of: Callable[[Model], Run]):
        self.__name__ = name
        self._run_of = run_of

    @one_run
    def __call__(self, model: Model) -> str:
        """Run the check; if the check skips, skip the test.

        For a failure, pytest shows the line of the test, the message, and the
        line of the model's code that raised, if any.
        """
        __tracebackhide__ = True
        import pytest

        cause: BaseException | None
        try:
            result, error = self._run_of(model).check(self.__name__)
            status, message, cause = result.status, result.message, error
        except UnusableModel as unusable:
            status, message, cause = "failed", str(unusable), unusable
        if status == "passed":
            return message
        if status == "skipped":
            pytest.skip(message)
        if status == "error":
            raise RuntimeError(message) from cause
        failure = AssertionError(message)
        for note in getattr(cause, "__notes__", []):
            failure.add_note(note)
        if isinstance(cause, AssertionError | UnusableModel):
            cause = cause.__cause__
        raise failure from with_their_frames(cause)

    def __repr__(self) -> str:
        return self.__name__


@takes(RunSettings)
def parametrize_with_checks(
    models: Iterable[Model | Target],
    *,
    expected_failures: Expected | None = None,
    strict: bool | None = None,
    **settings: Unpack[RunSettings],
) -> Callable[[Any], Any]:
    """Decorate a test, to run it for each pair of a model and a check.

    Args:
        models: models or, better, factories, as for check_model. A Target has
            settings that replace the common ones.
        expected_failures: reasons by the name of a check, or a function that
            returns them for each model. Such tests are marked xfail.
        strict: whether an unexpected pass is a failure; None uses pytest's
            xfail_strict.
        **settings: checks (names; None: all but the slow one), budget
            (seconds for all checks of a model), threads, vocab_size,
            block_size, outputs, seed, device, layout, cache, inputs,
            documents and compile, as for check_model, for all models.

    Example:
        >>> @parametrize_with_checks([build_a, build_b])
        ... def test_my_gpt(model, check):
        ...     check(model)

    Raises:
        ValueError: for an unknown check.
        TypeError: for an unknown setting.

    Source: scikit-learn's parametrize_with_checks.
    """
    import pytest

    defaults = completed("parametrize_with_checks", RunSettings, settings)
    given: list[dict[str, Any]] = []

    # kept for the next test: the checks of one model share a Run
    @lru_cache(maxsize=1)
    def run_of(index: int, model: Model) -> Run:
        return Run(model, **given[index])

    how: Any = {} if strict is None else {"strict": strict}
    parameters, labels = [], Counter[str]()
    for index, target in enumerate(models):
        if not isinstance(target, Target):
            target = Target(target)
        model, own = target.model, defaults | dict(target.settings)
        expected = own.pop("expected", expected_failures)
        reasons = full_names(
            expected(model) if callable(expected) else expected
        )
        given.append(own | {"checks": choose_checks(own["checks"])})
        label = name_of(model) or f"model{index}"
        label = " ".join(label.split())[:LONGEST]
        labels[label] += 1
        if labels[label] > 1:
            label += f"#{labels[label]}"
        for name in given[index]["checks"]:
            marks = []
            if name in reasons:
                marks = [pytest.mark.xfail(reason=reasons[name], **how)]
            check = BoundCheck(name, partial(run_of, index))
            parameters.append(
                pytest.param(model, check, id=f"{label}-{name}", marks=marks)
            )
    return pytest.mark.parametrize(("model", "check"), parameters)
