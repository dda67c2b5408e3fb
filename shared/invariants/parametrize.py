"""The checks as tests of pytest."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .checks import CHECKS
from .errors import SkipCheck
from .model.building import Model, name_of
from .model.randomness import isolated
from .model.subject import Subject
from .runner import choose_checks


class BoundCheck:
    """A check and the settings of its Subject: call it with a model."""

    def __init__(self, name: str, settings: Mapping[str, Any]):
        self.__name__ = name
        self._settings = dict(settings)

    def __call__(self, model: Model) -> str:
        """Run the check; a skip is pytest's own."""
        import pytest

        seed = self._settings.get("seed", 0)
        with isolated(seed):
            subject = Subject(model, **self._settings)
            try:
                return CHECKS[self.__name__](subject)
            except SkipCheck as skip:
                pytest.skip(str(skip))

    def __repr__(self) -> str:
        return self.__name__


def parametrize_with_checks(
    models: Iterable[Model],
    *,
    checks: Collection[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    **settings: Any,
) -> Callable[[Any], Any]:
    """Decorate a test with arguments model and check, once for each pair.

    Args:
        models: models or, better, factories, as for check_model.
        checks: names; None: all but the slow one.
        expected_failures: reasons by name; such tests are marked xfail.
        **settings: vocab_size, block_size, outputs, seed and device, as for
            check_model, for all models.

    Example:
        >>> @parametrize_with_checks([build_a, build_b])
        ... def test_my_gpt(model, check):
        ...     check(model)

    Raises:
        ValueError: for an unknown check.
        TypeError: for an unknown setting.
    """
    import pytest

    names = choose_checks(checks)
    expected = dict(expected_failures or {})
    choose_checks(expected)
    inspect.signature(Subject).bind(None, **settings)
    parameters = []
    for index, model in enumerate(models):
        label = name_of(model) or _called_in(model) or f"model{index}"
        for name in names:
            marks = []
            if name in expected:
                marks = [pytest.mark.xfail(reason=expected[name])]
            check = BoundCheck(name, settings)
            parameters.append(
                pytest.param(model, check, id=f"{label}-{name}", marks=marks)
            )
    return pytest.mark.parametrize(("model", "check"), parameters)


def _called_in(function: Any) -> str | None:
    """Return the first class or function that a lambda calls."""
    function = inspect.unwrap(getattr(function, "func", function))
    inside = inspect.getclosurevars(function)
    known = {**inside.globals, **inside.nonlocals}
    called = [n for n in known if callable(known[n])]
    attributes = [n for n in function.__code__.co_names if n not in known]
    return (called or attributes or [None])[0]
