"""Dtypes and devices."""

import re
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ....running.errors import FailureAt, ModelRaised, NotFinite, sentence
from ....running.model.building import CASTS, cast
from ....running.operations import (
    functions_through,
    operations_through,
    quantised,
)
from ....running.places import Place, find_place
from ....running.ranks import current
from ....running.rounding import gaps
from ....running.variant import (
    Variant,
    changeable,
    doubled,
    redraw_zeros,
)
from ....running.ways import TRAIN
from ....validation import dtype_name
from ...check import Subject, check
from .other_device import NAME as ELSEWHERE
from .other_device import elsewhere

# An operation that lacks a dtype altogether; mixed dtypes read otherwise.
NO_KERNEL = re.compile(
    r"not implemented for '|to be Float32, BFloat16 or Float16|"
    r"Unsupported (?:input )?dtype|MPS framework doesn't support float64"
)
NONE = "no kernel for"  # a dtype: the limit of PyTorch
NARROW = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
UNIQUE = 257  # whole numbers from 0 that differ in bfloat16


@check(needs="weights")
def check_dtype(subject: Subject) -> str:
    """.double(), .bfloat16(), .half() work; .to(device) moves everything.

    Why: a tensor that is not a buffer stays behind, in another dtype or on
    another device; float16 has no -1e9 for a mask, and bfloat16 no 257th
    position.
    How: a forward in each dtype, in bfloat16 of up to 300 tokens, where
    consecutive positions must stay different; one on the given device, or on
    an emulated one; and one in float64, whose first line that casts to 16
    bits fails a model that is built in float64.
    Reports: torch.arange(T) without the device ("Let's build GPT", cell 82);
    huggingface/transformers 29285, rotary positions in bfloat16.
    """
    tokens = subject.draw(subject.fit_rows(2), 5)
    answers = {dtype: _answer_in(subject, dtype, tokens) for dtype in CASTS}
    fixed = answers[torch.bfloat16]
    notes = []
    for dtype, answer in answers.items():
        name = dtype_name(dtype)
        if answer == NONE:
            subject.budget.give_up(f"in {name}", "PyTorch has no kernel")
            continue
        if isinstance(answer, str):
            name = f"{answer} {name}"
        elif answer != dtype:
            name += f" answers in {dtype_name(answer)}"
            # always float32: a decision, as in many models' heads
            least = min(_bits(dtype), 32 if answer == fixed else 64)
            if _bits(answer) < least:
                raise AssertionError(f"a model in {name}")
        notes.append(name)
    notes.append(_check_device(subject, tokens))
    return ", ".join(notes) + _require_width(subject, tokens)


def _require_width(subject: Subject, tokens: Tensor) -> str:
    """Return which line computes in 16 bits inside a wider model, or raise.

    A model that is built in float64 is meant to be as precise.
    """
    variant = changeable(subject)
    meant = variant.double
    doubled(subject, variant.model)
    kinds = {p.dtype for p in variant.parameters if p.is_floating_point()}
    if quantised(variant.model) or not kinds or min(map(_bits, kinds)) < 32:
        return ""
    redraw_zeros(variant.model, subject.generator())  # behind them none moves
    with operations_through(Casts()) as seen:
        scores = variant.scores(tokens)
    if seen.first is None:
        return _width_in_training(variant, tokens)
    place, narrow = seen.first
    words = f"{place} computes in {narrow} inside a {dtype_name(*kinds)} call"
    with suppress(ModelRaised), operations_through(Casts(widen=True)):
        size = float(gaps(scores, variant.scores(tokens)).max())
        words += f": scores move by {size:.2g}"
    if meant:
        raise FailureAt(words, place)
    return f"; {words}"


def _width_in_training(variant: Variant, tokens: Tensor) -> str:
    """Return which line casts to 16 bits only in train mode, or raise.

    One that casts to float16, whose range is small, fails.
    """
    with (
        suppress(ModelRaised),
        operations_through(Casts()) as seen,
        functions_through(Autocast()) as autocast,
    ):
        variant.run_as(TRAIN).scores(tokens)
    if seen.first is None or autocast.inside:
        return ""
    place, narrow = seen.first
    kinds = {p.dtype for p in variant.parameters if p.is_floating_point()}
    words = (
        f"in train mode {place} computes in {narrow} inside a "
        f"{dtype_name(*kinds)} call; in eval mode it does not"
    )
    if narrow == dtype_name(torch.float16):
        raise FailureAt(words, place)
    return f"; {words}"


def _answer_in(
    subject: Subject, dtype: torch.dtype, tokens: Tensor
) -> torch.dtype | str:
    """Return the dtype of the scores of a model cast to a dtype.

    A text names a failure that is not the model's fault: PyTorch has no
    kernel for the dtype, or the range of the dtype is too small.
    """
    variant = changeable(subject, "a function has no dtype to change")
    time, seen, autocast = subject.lengths.fit(300), Casts(), Autocast()
    if dtype == torch.bfloat16 and time > UNIQUE:
        tokens, seen = subject.draw(1, time), Casts(time)
    try:
        with operations_through(seen), functions_through(autocast):
            cast(variant.model, dtype)
            scores = variant.scores(tokens)
    except (ModelRaised, TypeError) as error:
        if NO_KERNEL.search(str(error)):
            return NONE
        if any(p.is_complex() for p in variant.model.parameters()):
            return "complex weights stay as they are in"
        if quantised(variant.model):
            return "quantised weights refuse"
        if autocast.inside:
            return "autocast inside refuses"
        words = f"in {dtype_name(dtype)} {error}"
        raise AssertionError(words) from error.__cause__
    if not bool(torch.isfinite(scores).all()):
        if dtype == torch.float16:
            return "NaN or infinite in"
        raise NotFinite(f"in {dtype_name(dtype)} scores are NaN or infinite")
    if seen.same:
        raise AssertionError(
            f"in bfloat16 the positions {seen.same} of {tokens.size(1)} "
            f"are one number: count them as integers or in float32"
        )
    return scores.dtype


class Autocast:
    """Notes whether a forward chooses dtypes by autocast."""

    inside = False

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function, and note whether autocast is on."""
        self.inside |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **kwargs)


class Casts:
    """Sees the first line that casts to 16 bits, and positions that meet.

    Args:
        positions: how many are to differ in bfloat16.
        widen: whether casts of wider floats to 16 bits change nothing.
    """

    NAMES = ("arange", "_to_copy", "copy_", "mul", "div", "add", "sub")

    def __init__(self, positions: int = 0, widen: bool = False):
        self.count, self.widen = positions, widen
        self.first: tuple[Place, str] | None = None
        self.same: tuple[int, int] | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and note a cast to 16 bits."""
        dtype = kwargs.get("dtype")
        if name == "copy_":  # into room of another dtype
            dtype, source = args[0].dtype, args[1].dtype
        else:
            source = getattr(args[0], "dtype", None) if args else None
        casts = name in ("_to_copy", "copy_")
        if casts and dtype in NARROW and source in WIDE:
            self.first = self.first or (find_place(name), dtype_name(dtype))
            if self.widen and name == "_to_copy":
                kwargs = kwargs | {"dtype": source}
        answer = func(*args, **kwargs)
        if self.count and name in self.NAMES:
            for x in (*args, answer):
                if isinstance(x, Tensor) and answer.dtype == torch.bfloat16:
                    self._look(x)
        return answer

    def _look(self, x: Tensor) -> None:
        """Record the first two positions that are equal in bfloat16."""
        if x.numel() != self.count or self.same:
            return
        x = x.flatten()
        rounded = torch.arange(self.count, device=x.device).to(torch.bfloat16)
        if bool((x.to(torch.bfloat16) - x[0] == rounded).all()):
            first = int((rounded[1:] == rounded[:-1]).nonzero()[0])
            self.same = first, first + 1


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _check_device(subject: Subject, tokens: Tensor) -> str:
    variant = changeable(subject, "a function is on no device")
    if subject.device is not None and subject.device.type != "cpu":
        scores = variant.scores(tokens)
        if scores.device.type != subject.device.type:
            raise AssertionError(
                f"on {subject.device} the answer is on {scores.device}"
            )
        return str(scores.device)
    if current() is not None:
        return "no other device: the ranks are on this one"
    try:
        with elsewhere(), torch.no_grad():
            moved = variant.model.to(ELSEWHERE).eval()
            answer = subject.caller.call(moved, tokens.to(ELSEWHERE))
            scores = subject.read(answer, *tokens.shape)
    except Exception as error:
        if isinstance(error, RuntimeError) and "same device" in str(error):
            raise AssertionError(
                f"not everything moves with .to(device): {sentence(error)}"
            ) from error
        return f"no other device here ({sentence(error)})"
    if scores.device.type != ELSEWHERE:
        raise AssertionError(
            f"moved to another device, the model answers on {scores.device}"
        )
    return "another device"
