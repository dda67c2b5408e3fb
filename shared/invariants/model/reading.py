"""How scores are found and read in whatever a model answers."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from ..errors import ModelRaised
from .calling import as_tensor, is_array

SPARE = 128  # scores beyond the vocabulary, to pad it to a multiple
SCORES = ("logits", "log_probs")
LOSSES = ("loss",)

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Form:
    """The axes of scores, by what they count."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"({', '.join(self.axes)})"

    def shape(self, batch: int, time: int, vocab: int) -> tuple[int, ...]:
        """Return the shape that an answer of this form has."""
        sizes = {"batch": batch, "time": time, "vocab": vocab}
        sizes["batch * time"] = batch * time
        return tuple(sizes[axis] for axis in self.axes)

    def read(
        self, answer: Shaped[Tensor, "..."], batch: int, time: int
    ) -> Float[Tensor, "batch time vocab"]:
        """Return scores in the common form."""
        if len(self.axes) == 2:
            return answer.unflatten(0, (batch, time))
        return answer.permute([self.axes.index(a) for a in BATCH_FIRST.axes])


BATCH_FIRST = Form(("batch", "time", "vocab"))
TIME_FIRST = Form(("time", "batch", "vocab"))
FORMS = (  # the likeliest first
    Form(("batch * time", "vocab")),
    BATCH_FIRST,
    Form(("batch", "vocab", "time")),
    TIME_FIRST,
)


@dataclass(frozen=True)
class Reader:
    """Reads the scores in each answer of one model."""

    path: Path = ()  # to the scores in an answer
    form: Form = BATCH_FIRST  # of their axes
    width: int = 0  # scores at a position, as many as ids or more
    vocab_size: int = 0  # number of ids
    alike: int = 1  # how many tensors in an answer could be the scores

    @property
    def rounded(self) -> bool:
        """Whether the head has as many scores as ids, or a round number."""
        spare = self.width - self.vocab_size
        return not spare or (0 < spare < SPARE and self.width % 8 == 0)

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
        if strict and not self.rounded:
            raise ModelRaised(
                f"the scores are {self.width} wide, the vocabulary has "
                f"{self.vocab_size} ids"
            )
        shape = self.form.shape(batch, time, self.width)
        found = follow(answer, self.path)
        if isinstance(found, Tensor) and not strict:
            sizes = [[n for n in x if n != 1] for x in (found.shape, shape)]
            if sizes[0] == sizes[1]:
                found = found.reshape(shape)
        if not isinstance(found, Tensor) or found.shape != shape:
            places = find_scores(answer, batch, time, self.width)
            paths = [path for path, form in places if form == self.form]
            if not paths:
                raise ModelRaised(
                    f"the scores for tokens of shape {(batch, time)} should "
                    f"have shape {(batch, time, self.vocab_size)}, got "
                    f"{describe(answer)}"
                )
            found = follow(answer, paths[0])
        return self.form.read(found, batch, time)[..., : self.vocab_size]


def find_scores(
    answer: Any, batch: int, time: int, vocab: int
) -> list[tuple[Path, Form]]:
    """Return where in an answer there are scores, the likeliest first."""
    return [
        (path, form)
        for path, tensor in tensors_in(answer)
        for form in FORMS
        if tensor.shape == form.shape(batch, time, vocab)
        and tensor.is_floating_point()
    ]


def tensors_in(answer: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of an answer; those called scores come first."""
    if is_array(answer):
        answer = as_tensor(answer)
    if isinstance(answer, Tensor):
        yield path, answer
    elif len(path) < 3:
        for key, value in sorted(
            _items(answer), key=lambda item: item[0] not in SCORES
        ):
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
    """Return what is at a path, an array as a tensor, or None."""
    found = reach(answer, path)
    return as_tensor(found) if is_array(found) else found


def reach(answer: Any, path: Path) -> Any:
    """Return what is at a path as it is, or None."""
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


def describe(answer: Any) -> str:
    """Return the shapes in an answer, in a few words."""
    if isinstance(answer, Tensor):
        return f"shape {tuple(answer.shape)}"
    shapes = [tuple(tensor.shape) for _, tensor in tensors_in(answer)]
    kind = type(answer).__name__
    if not shapes:
        return f"a {kind} without tensors"
    return f"a {kind} of shapes {', '.join(map(str, shapes[:4]))}"
