"""The checks as tests of pytest."""

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

LONGEST = 60  # characters of an expression in a test's name


class Target:
    """A model with settings of its own, for `parametrize_with_checks`.

    Args:
        model: a model or, better, a factory, as for check_model.
        **settings: checks, expected (reasons by name of a check that is
            expected to fail), budget, threads, vocab_size, block_size,
            outputs, seed, device, layout, cache, inputs, documents and
            compile; each goes before that of `parametrize_with_checks`.

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
    """A check and what makes its Run: call it with a model."""

    def __init__(self, name: str, run_of: Callable[[Model], Run]):
        self.__name__ = name
        self._run_of = run_of

    @one_run
    def __call__(self, model: Model) -> str:
        """Run the check; a skip is pytest's own.

        Of a failure pytest shows the line of the test, the message, and
        where the model's own code raised, if it did.
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
    """Decorate a test with arguments model and check, once for each pair.

    Args:
        models: models or, better, factories, as for check_model; a Target
            has settings of its own, which go before those for all models.
        expected_failures: reasons by name of a check, or a function that
            returns them for one of the models; such tests are marked xfail.
        strict: whether one that passes after all fails; None: as pytest's
            own xfail_strict says.
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

    @lru_cache(maxsize=1)  # the checks of a model share it
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
