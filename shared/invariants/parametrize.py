"""The checks as tests of pytest."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from .checks import CHECKS
from .errors import SkipCheck
from .model.randomness import isolated
from .model.subject import Model, Subject
from .runner import choose_checks


class BoundCheck:
    """A check and the settings of its subject: call it with a model.

    Args:
        name: of the check.
        settings: of the Subject.
    """

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
    vocab_size: int | None = None,
    block_size: int | None = None,
    outputs: str = "auto",
    checks: Collection[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Callable[[Any], Any]:
    """Decorate a test with arguments model and check, once for each pair.

    Args:
        models: models or, better, factories, as for check_model.
        vocab_size: as for check_model, for all models.
        block_size: as for check_model.
        outputs: as for check_model.
        checks: names; None: all but the slow one.
        expected_failures: reasons by name; such tests are marked xfail.
        seed: as for check_model.
        device: as for check_model.

    Example:
        >>> @parametrize_with_checks([build_a, build_b])
        ... def test_my_gpt(model, check):
        ...     check(model)

    Raises:
        ValueError: for an unknown check.
    """
    import pytest

    names = choose_checks(checks)
    expected = dict(expected_failures or {})
    choose_checks(expected)
    settings = {
        "vocab_size": vocab_size,
        "block_size": block_size,
        "outputs": outputs,
        "seed": seed,
        "device": device,
    }
    parameters = []
    for index, model in enumerate(models):
        label = name_of(model) or f"model{index}"
        for name in names:
            marks = []
            if name in expected:
                marks = [pytest.mark.xfail(reason=expected[name])]
            parameters.append(
                pytest.param(
                    model,
                    BoundCheck(name, settings),
                    id=f"{label}-{name}",
                    marks=marks,
                )
            )
    return pytest.mark.parametrize(("model", "check"), parameters)


def name_of(model: Model) -> str | None:
    """Return a readable name without building the model, if there is one.

    Of a lambda, the first class or function that it calls.
    """
    if isinstance(model, torch.nn.Module):
        return type(model).__name__
    function = inspect.unwrap(getattr(model, "func", model))
    name = getattr(function, "__name__", None)
    if name != "<lambda>":
        return name or type(model).__name__
    inside = inspect.getclosurevars(function)
    known = {**inside.globals, **inside.nonlocals}
    called = [n for n in known if callable(known[n])]
    attributes = [n for n in function.__code__.co_names if n not in known]
    return (called or attributes or [None])[0]
