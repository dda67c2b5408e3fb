"""Numbers that are none."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..cases import EXTREME, TRAIN, TRAIN_WITHOUT_GRADIENTS, WITH_GRADIENTS
from ..check import Subject, check
from ..errors import NotFinite, during
from ..losses import cross_entropy
from ..operations import Operations, quantised
from ..places import Place, find_place
from ..ranks import local
from ..variant import Variant, own, scale_up

GRADIENTS = 256  # tokens: a backward pass of longer texts takes much memory


@check(share=1)
def check_finite(subject: Subject) -> str:
    """Neither scores nor gradients are ever NaN or infinite.

    Why: one NaN, after one step of an optimiser, is in every weight.
    How: random ids, id 0 first, all ids equal; one token and up to the
    longest; eval mode and, with several dropout masks, train mode. Where
    exponentials are divided by their sum, weights grow until these overflow.
    Reports: dropout on masked scores turns -inf into NaN in one of ten
    passes in train mode ("GPT from Scratch", listing 5).
    """
    generator = subject.generator()
    for variant, time, rows, calls in _sizes(subject):
        with subject.budget.part(variant.case.name, time, 1 / 3):
            tokens = _texts(subject, time, generator)[:rows]
            for seed in range(calls):
                _try(variant, tokens, seed)
    _require_softmax(subject)
    return f"lengths 1 to {subject.budget.reached}, eval and train mode"


def _require_softmax(subject: Subject) -> None:
    """Require that no softmax overflows for want of its maximum."""
    if not (subject.is_module and subject.builder.can_copy):
        return
    variant = own(subject)
    if quantised(variant.model):
        return
    tokens = subject.draw(2, 8)
    for size in (0.0, *EXTREME[::-1]):
        if size:
            scale_up(variant.model, size)
        with _Softmaxes() as seen:
            scores = variant.scores(tokens)
        if seen.place is None:
            return
        if size and seen.largest == math.inf and not scores.isfinite().all():
            raise NotFinite(
                f"scores are NaN or infinite with weights scaled up to "
                f"activations of {size:.0f}: {seen.place} is divided by its "
                f"sum, and overflows: subtract the largest number first"
            )


HIDES = ("tril", "mul", "masked_fill")  # how exponentials are masked


class _Softmaxes(Operations):
    """Finds exponentials that are divided by their sum over the last axis.

    Those of numbers up to 0 are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, Place] = {}  # by the memory of exponentials
        self.sums: dict[int, Tensor] = {}  # by the memory of sums
        self.kept: list[Tensor] = []  # so that no memory is used again
        self.place: Place | None = None
        self.largest = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        if name == "exp" and float(args[0].max()) > 0:  # and none is NaN
            self.places[answer.data_ptr()] = find_place(name)
            self.kept.append(answer)
        elif name in HIDES and args[0].data_ptr() in self.places:
            self.places[answer.data_ptr()] = self.places[args[0].data_ptr()]
            self.kept.append(answer)
        elif name == "sum" and args[0].data_ptr() in self.places:
            self.sums[answer.data_ptr()] = args[0]
            self.kept.append(answer)
        elif name in ("div", "div_") and isinstance(args[1], Tensor):
            whole = self.sums.get(args[1].data_ptr())
            if whole is not None and whole.data_ptr() == args[0].data_ptr():
                self.place = self.places[whole.data_ptr()]
                most = whole.nan_to_num(math.inf, math.inf).max()  # inf * 0
                self.largest = max(self.largest, float(most))
        return answer


def _sizes(subject: Subject) -> Iterator[tuple[Variant, int, int, int]]:
    """Yield variants, lengths, rows and calls, each with its dropout mask."""
    variant = own(subject)
    back = subject.is_module and subject.builder.can_copy
    longest = subject.block_size
    lengths = [*subject.fit(1, 16), longest, *subject.fit(2, 3)]
    for time in dict.fromkeys(lengths):
        grads = back and time <= GRADIENTS
        large = time * subject.vocab_size >= 1 << 22
        rows = 5 if time <= 16 else 1 if large else 2
        yield variant, time, rows, 1
        if grads:
            yield variant.run_as(WITH_GRADIENTS), time, rows, 1
        train = TRAIN if grads else TRAIN_WITHOUT_GRADIENTS
        yield variant.run_as(train), time, rows, 4 if 3 < time <= 16 else 1


def _texts(
    subject: Subject, time: int, generator: torch.Generator
) -> Int[Tensor, "5 time"]:
    tokens = subject.draw(5, time, generator)
    tokens[1, 0] = 0
    tokens[2], tokens[3] = 0, subject.vocab_size - 1
    tokens[4] = tokens[4, 0].clone()
    return tokens


def _try(
    variant: Variant, tokens: Int[Tensor, "rows time"], seed: int
) -> None:
    """Require numbers of a forward, and of a backward pass if there is one."""
    model, time, mode = variant.model, tokens.size(1), variant.case.mode
    grad = variant.case.grad
    if grad:
        model.zero_grad()
    scores = variant.scores(tokens, seed=seed, grad=grad)
    _require_finite(scores.detach(), time, mode)
    if not scores.requires_grad:
        return
    with during(f"in the backward pass {mode}, at length {time}"):
        cross_entropy(scores.float(), tokens.roll(1, 0)).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if not local(gradient).to_dense().isfinite().all():
            raise AssertionError(
                f"the gradient of {name} is NaN or infinite at length {time} "
                f"{mode}, while the scores are finite"
            )


def _require_finite(
    scores: Float[Tensor, "batch time vocab"], time: int, mode: str
) -> None:
    bad = ~torch.isfinite(scores)
    if bad.any():
        row, position = bad.any(-1).nonzero()[0].tolist()
        raise NotFinite(
            f"{float(bad.double().mean()):.2%} of the scores are NaN or "
            f"infinite at length {time} {mode}, first at position {position} "
            f"of row {row}"
        )
