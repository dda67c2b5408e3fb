"""How scores are found and read in whatever a model answers."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..errors import ModelRaised

SCORES = ("logits", "log_probs")
LOSSES = ("loss",)

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Form:
    """Where batch, time and vocabulary are in a tensor of scores.

    Attributes:
        axes: of batch, time and vocabulary; None where batch and time are
            one axis, followed by the vocabulary.
        ndim: number of axes; of one more than three the first is read.
    """

    axes: tuple[int, int, int] | None
    ndim: int

    @property
    def time_first(self) -> bool:
        """Whether time comes before the batch."""
        return self.axes is not None and self.axes[1] < self.axes[0]

    def __str__(self) -> str:
        if self.axes is None:
            return "(batch * time, vocab)"
        words = dict(zip(self.axes, ("batch", "time", "vocab"), strict=True))
        axes = [words.get(i, "head") for i in range(self.ndim)]
        return f"({', '.join(axes)})"

    def shape(self, batch: int, time: int, vocab: int) -> tuple[int, ...]:
        """Return the shape that an answer of this form has."""
        if self.axes is None:
            return (batch * time, vocab)
        sizes = dict(zip(self.axes, (batch, time, vocab), strict=True))
        return tuple(sizes.get(i, 1) for i in range(self.ndim))

    def read(
        self, answer: Shaped[Tensor, "..."], batch: int, time: int
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in the common form, or raise ValueError."""
        if self.axes is None:
            scores = answer.unflatten(0, (batch, time))
        else:
            if answer.ndim != self.ndim:
                raise ValueError(f"{answer.ndim} axes, not {self.ndim}")
            extra = [i for i in range(self.ndim) if i not in self.axes]
            scores = answer.permute(*self.axes, *extra)
            for _ in extra:
                scores = scores[..., 0]
        if scores.shape[:2] != (batch, time):
            raise ValueError(f"shape {tuple(answer.shape)}")
        return scores


@dataclass(frozen=True)
class Reader:
    """Reads the scores in each answer of one model.

    Attributes:
        path: to the scores in an answer.
        form: where batch, time and vocabulary are in them.
        dtype: theirs.
        width: number of scores at a position, as many as ids or more.
        vocab_size: number of ids.
    """

    path: Path
    form: Form
    dtype: torch.dtype
    width: int
    vocab_size: int

    def read(
        self, answer: Any, batch: int, time: int, strict: bool = False
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, in the common form.

        Unless strict, axes of size 1 that the model drops are put back, and
        scores of ids beyond its vocabulary are left out: they are the
        matter of check_shape, and no other check should stumble over them.

        Raises:
            ModelRaised: where there are none of the right shape.
        """
        if strict and self.width != self.vocab_size:
            raise ModelRaised(
                f"the scores are {self.width} wide, the vocabulary has "
                f"{self.vocab_size} ids"
            )
        found = follow(answer, self.path)
        if isinstance(found, Tensor):
            if not strict:
                shape = self.form.shape(batch, time, self.width)
                found = unsqueezed(found, shape)
            try:
                scores = self.form.read(found, batch, time)
            except (ValueError, RuntimeError):
                scores = None
            if scores is not None and scores.size(2) == self.width:
                return scores[..., : self.vocab_size]
        for path, form in find_scores(answer, batch, time, self.width):
            if form == self.form:
                scores = form.read(follow(answer, path), batch, time)
                return scores[..., : self.vocab_size]
        raise ModelRaised(
            f"the scores for tokens of shape {(batch, time)} should have "
            f"shape {(batch, time, self.vocab_size)}, got {describe(answer)}"
        )


def find_scores(
    answer: Any, batch: int, time: int, vocab: int
) -> list[tuple[Path, Form]]:
    """Return where in an answer there are scores, the likeliest first."""
    found = []
    for path, tensor in tensors_in(answer):
        for form in _forms(tensor.shape, batch, time, vocab):
            if tensor.is_floating_point():
                found.append((path, form))
    return found


def _forms(
    shape: torch.Size, batch: int, time: int, vocab: int
) -> Iterator[Form]:
    if shape == (batch * time, vocab):
        yield Form(None, 2)
    if len(shape) not in (3, 4):
        return
    orders = [axes for axes in permutations(range(len(shape)), 3)]
    # (batch, time, vocab) first, then (batch, vocab, time), time-first last
    orders.sort(key=lambda axes: (axes[0] > axes[1], axes[1] > axes[2]))
    for b, t, v in orders:
        fits = (shape[b], shape[t], shape[v]) == (batch, time, vocab)
        # the vocabulary is never the first axis of three
        if fits and v > b and not (v < t < b):
            yield Form((b, t, v), len(shape))


def tensors_in(answer: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of an answer; those called scores come first."""
    if isinstance(answer, Tensor):
        yield path, answer
        return
    if len(path) == 3:
        return
    items = _items(answer)
    items.sort(key=lambda item: item[0] not in SCORES)
    for key, value in items:
        yield from tensors_in(value, (*path, key))


def _items(answer: Any) -> list[tuple[Any, Any]]:
    if hasattr(answer, "_asdict"):  # a named tuple
        answer = answer._asdict()
    if isinstance(answer, Mapping):
        return list(answer.items())
    if isinstance(answer, list | tuple):
        return list(enumerate(answer))
    names = [*SCORES, *LOSSES]
    if dataclasses.is_dataclass(answer):
        names = [field.name for field in dataclasses.fields(answer)]
    return [(n, getattr(answer, n)) for n in names if hasattr(answer, n)]


def follow(answer: Any, path: Path) -> Any:
    """Return what is at a path, or None."""
    for key in path:
        if isinstance(answer, Mapping):
            answer = answer.get(key)
        elif isinstance(key, str):
            answer = getattr(answer, key, None)
        elif isinstance(answer, list | tuple) and key < len(answer):
            answer = answer[key]
        else:
            return None
    return answer


def find_loss(answer: Any) -> Float[Tensor, ""] | None:
    """Return the one number that an answer holds: the loss."""
    for _, tensor in sorted(
        tensors_in(answer), key=lambda item: LOSSES[0] not in item[0]
    ):
        if tensor.numel() == 1 and tensor.is_floating_point():
            return tensor.reshape(())
    return None


def unsqueezed(
    answer: Shaped[Tensor, "..."], shape: tuple[int, ...]
) -> Shaped[Tensor, "..."]:
    """Return a tensor in a shape from which axes of size 1 were dropped."""
    if [n for n in answer.shape if n != 1] != [n for n in shape if n != 1]:
        return answer
    return answer.reshape(shape)


def describe(answer: Any) -> str:
    """Return the shapes in an answer, in a few words."""
    if isinstance(answer, Tensor):
        return f"shape {tuple(answer.shape)}"
    shapes = [tuple(tensor.shape) for _, tensor in tensors_in(answer)]
    kind = type(answer).__name__
    if not shapes:
        return f"a {kind} without tensors"
    return f"a {kind} of shapes {', '.join(map(str, shapes[:4]))}"
