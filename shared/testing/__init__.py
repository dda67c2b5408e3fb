"""Plant faults in models, and draw models with hypothesis.

A check that never fails shows nothing. This module plants a fault in a model
and requires that the fault's check reports it:

    from gpt_duet.testing import Fault, plant

    FAULTS: list[Fault] = []

    @plant(FAULTS, "causality", MyGPT, "mask", vocab_size=65, block_size=32)
    def no_mask(self, tokens):
        \"\"\"Every position sees all of them.\"\"\"
        return tokens.new_ones(tokens.size(1), tokens.size(1)).bool()

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    def test_the_check_reports_the_fault(fault):
        fault.assert_caught()

`gpt_duet.testing.strategies` has hypothesis strategies for configs, tokens
and small models; it needs `pip install "gpt-duet[testing]"`.
"""

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from ..invariants import check_model
from ..invariants.report import Report
from ..running.model.building import Model

__all__ = ["Fault", "name_in_words", "plant", "replaced"]

Change = TypeVar("Change", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fault:
    """A wrong model, and the check that must fail for it.

    Attributes:
        name: the fault's name, in lower case with underscores.
        build: a function that makes a fresh model.
        sentence: a sentence that describes the fault.
        check: the check that must fail, such as "check_causality"; "" for a
            sound model, for which no check may fail.
        vocab_size: passed to `check_model`, as are block_size and outputs.
        block_size: the longest text.
        outputs: the kind of the scores.
    """

    name: str
    build: Model
    sentence: str
    _: KW_ONLY
    check: str = ""
    vocab_size: int | None = None
    block_size: int | None = None
    outputs: str = "auto"

    def __str__(self) -> str:
        """Return the name and the check, as the id of a test."""
        return f"{self.name}-{self.check}".removesuffix("-")

    def report(self, **settings: Any) -> Report:
        """Run `check_model` on a fresh model.

        By default only the check that must catch this fault runs.

        Args:
            **settings: settings of `check_model`, such as checks or budget.
        """
        own: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "block_size": self.block_size,
            "outputs": self.outputs,
        }
        if self.check:
            own["checks"] = [self.check]
        return check_model(self.build, **own | settings)

    def assert_caught(self, **settings: Any) -> Report:
        """Run the fault's own check; return the report in which it fails.

        Raises:
            AssertionError: if the check does not fail.
        """
        report = self.report(**settings)
        if report.failed != [self.check]:
            raise AssertionError(f"{self.check} passes {self.name}\n{report}")
        return report


def plant(
    into: list[Fault],
    check: str,
    owner: type | None = None,
    method: str = "",
    **sizes: Any,
) -> Callable[[Change], Change]:
    """Decorate a wrong method or class, and add its `Fault` to a list.

    A decorated method replaces a method of the owner. Its name becomes the
    fault's name, and its docstring becomes the sentence. A decorated class is
    itself a wrong model.

    Args:
        into: the list that receives the fault.
        check: the check that must fail, with or without "check_".
        owner: the class of a sound model; it is not changed.
        method: the name of the method that is replaced.
        **sizes: vocab_size, block_size, outputs.
    """

    def add(change: Change) -> Change:
        name, sentence = name_in_words(change)
        build = replaced(owner, method, change) if owner else change
        full = f"check_{check.removeprefix('check_')}"
        into.append(Fault(name, build, sentence, check=full, **sizes))
        return change

    return add


def replaced(owner: type, method: str, change: Callable[..., Any]) -> type:
    """Return a subclass with a changed method, named after the change.

    Raises:
        AttributeError: if the owner has no such method.
    """
    if not hasattr(owner, method):
        raise AttributeError(f"{owner.__name__} has no {method!r} to replace")
    return type(change.__name__, (owner,), {method: change})


def name_in_words(change: Callable[..., Any]) -> tuple[str, str]:
    """Return the name with underscores, and the docstring as one line.

    Raises:
        ValueError: if the object has no docstring.
    """
    if not change.__doc__:
        raise ValueError(f"{change.__name__} needs a docstring: its sentence")
    words = r"(?<!^)(?=[A-Z][a-z]|(?<=[a-z])[A-Z])"  # "InAList": in_a_list
    name = re.sub(words, "_", change.__name__).lower()
    return name, " ".join(change.__doc__.split())
