"""Cache the answers of rules: equal questions have equal answers.

A rule computes the codes (see codes.py) of an operation's results. The
question is what the rule may read: the codes of the arguments, and the values
of known numbers. So identical layers ask the same question, in eval and in
train mode. A rule is first called with tensors that hold no data. Its answer
is stored unless the rule tries to read a number that may vary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .codes import KNOWN, Codes, Shadow, bytes_of, is_hidden

MOST_ANSWERS = 1 << 13  # most answers kept for one model
MOST_BYTES = 1 << 20  # most bytes of known numbers in a question

Question = tuple[Any, ...]
Noted = tuple[str, float, str]  # field of Notes, mask's value, operation


class NeedsNumbers(Exception):
    """Raised when a rule reads numbers that may vary between calls."""


@dataclass(frozen=True)
class Answer:
    """Dependency codes of an operation's results, and how they were found.

    Attributes:
        codes: the codes of each result.
        steps: the operations that ran while the codes were found.
        notes: what the rules noted, each as a `Noted`.
    """

    codes: list[Codes]
    steps: tuple[Any, ...] = ()
    notes: tuple[Noted, ...] = ()


NEW = Answer([])  # marks a question that has no stored answer yet


# an answer is None if a rule read a number that may vary
Answers = dict[Question, Answer | None]


def keep(answers: Answers, question: Question, answer: Answer | None) -> None:
    """Store an answer; if the cache is full, first empty it."""
    if len(answers) >= MOST_ANSWERS:
        answers.clear()
    answers[question] = answer


# --- Questions ---------------------------------------------------------------


@dataclass(slots=True)
class Given:
    """The arguments of an operation, and the tensors that it returned.

    Attributes:
        func: the operation; args, kwargs: the operation's arguments.
        shadows: the shadow of each tensor among the arguments, by tensor id.
        codes: the codes of each tensor that the operation read or wrote, by
            tensor id.
        before: the numbers that the operation overwrote, by tensor id.
        outs: the tensors that the operation returned.
        hides: whether a mask may hide some number of the arguments.
        special: whether some number of the arguments may be hidden or known.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shadows: dict[int, tuple[Tensor, Shadow]]
    codes: dict[int, Tensor]
    before: dict[int, Tensor]
    outs: list[Tensor]
    hides: bool = False
    special: bool = False

    def codes_of(self, key: int) -> Tensor:
        """Return the dependency codes of the tensor with this id."""
        if key not in self.codes:
            tensor, shadow = self.shadows[key]
            self.codes[key] = shadow.view(tensor)
        return self.codes[key]

    def question(self) -> Question | None:
        """Return a cache key, or None if the answer cannot be cached."""
        asked: list[Any] = [self.func, self.hides, self.special]
        for out in self.outs:
            if not (out.is_cpu and out.is_floating_point()):
                return None  # later operations may index by integers
            asked += out.size(), out.dtype
        seen = dict[int, int]()
        try:
            for value in self.args:
                self._ask(asked, value, seen)
            for name, value in self.kwargs.items():
                asked.append(name)
                self._ask(asked, value, seen)
            question = tuple(asked)
            hash(question)
        except (NeedsNumbers, TypeError):
            return None
        return question

    def _ask(self, asked: list[Any], value: Any, seen: dict[int, int]) -> None:
        """Add to the cache key `asked` what a rule may read of `value`."""
        if isinstance(value, Tensor):
            key, count = id(value), len(seen)
            asked.append(seen.setdefault(key, count))
            if len(seen) > count:
                self._ask_tensor(asked, key, value)
        elif isinstance(value, list | tuple):
            asked += type(value), len(value)
            for each in value:
                self._ask(asked, each, seen)
        elif isinstance(value, torch.ScriptObject):
            raise NeedsNumbers  # packed weights of a library have no codes
        else:
            asked += type(value), value

    def _ask_tensor(self, asked: list[Any], key: int, tensor: Tensor) -> None:
        shadow = self.shadows[key][1]
        asked += shadow.digest, shadow.size, shadow.stride
        asked += tensor.size(), tensor.stride(), tensor.storage_offset()
        asked.append(tensor.dtype)
        known = shadow.low == KNOWN
        if not (known or tensor.is_floating_point()):
            raise NeedsNumbers
        if known or self.hides:
            values = self.before.get(key, tensor)
            asked.append(_numbers(values, shadow, self.codes_of(key)))


def _numbers(values: Tensor, shadow: Shadow, codes: Tensor) -> bytes:
    """Return as bytes the entries that are known or minus infinity."""
    whole = shadow.top == KNOWN
    known = hidden = codes == KNOWN
    if not whole:
        hidden = is_hidden(codes)
        if not bool((known | hidden).any()):
            return b""
        whole = bool(known.all())
    if values.nbytes > MOST_BYTES or values.is_complex():
        raise NeedsNumbers
    if whole:
        return bytes_of(values)
    if not values.is_floating_point():
        raise NeedsNumbers
    low = hidden & (values == -torch.inf)
    values = torch.where(known, values, 0.0).masked_fill(low, -torch.inf)
    return bytes_of(values)


# --- Rules that read no numbers that may vary --------------------------------


class Unread(Call):
    """A call of an operation, without the tensor entries that may vary.

    If a rule tries to read such an entry, NeedsNumbers is raised.

    Args:
        call: the operation.
        note: records a note, as in a Call.
    """

    def __init__(self, call: Call, note: Callable[[str, float], None]):
        self._call = call
        self._made = dict[int, Tensor]()  # by the argument's id
        args, kwargs = call.positional
        args = tuple(self._emptied(value) for value in args)
        kwargs = {name: self._emptied(v) for name, v in kwargs.items()}
        codes = {id(made): call.given[key] for key, made in self._made.items()}
        before = {
            id(self._made[key]): self._without(value, call.given[key])
            for key, value in call.before.items()
            if key in self._made
        }
        outs = [torch.empty_like(out, device="meta") for out in call.outs]
        super().__init__(call.func, args, kwargs, codes, before, outs, note)
        self.device = call.device
        self.hides, self.special = call.hides, call.special

    def _emptied(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._emptied(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            written = id(value) in self._call.before
            codes = None if written else self._call.given[id(value)]
            self._made[id(value)] = self._without(value, codes)
        return self._made[id(value)]

    def _without(self, value: Tensor, codes: Tensor | None) -> Tensor:
        """Return the tensor if all of it is known, else one without data."""
        if codes is None:  # the operation overwrote this tensor
            codes = torch.zeros(1)
        if self._call.special and bool((codes == KNOWN).all()):
            return value
        if not value.is_floating_point():
            raise NeedsNumbers  # a rule must not read an unset index
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta"
        )

    @property
    def whole(self) -> Call:
        """Return the call with all of its numbers."""
        return self._call

    def result(self) -> Tensor:
        """Raise NeedsNumbers, because the result's numbers vary."""
        raise NeedsNumbers

    def value(self, name: str) -> Tensor:
        """Return an argument if it is known, otherwise raise NeedsNumbers.

        Operations on a tensor without data would import much of torch.
        """
        value = super().value(name)
        if value.is_meta:
            raise NeedsNumbers
        return value

    def where(
        self, name: str, codes: Tensor, test: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the result of Call.where, which tests only known numbers."""
        return self._call.where(name, codes, test)
