"""A model runs in other dtypes and on other devices."""

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

# Messages of an operation that lacks a kernel for a dtype. (Operands of mixed
# dtypes raise other messages.)
NO_KERNEL = re.compile(
    r"not implemented for '|to be Float32, BFloat16 or Float16|"
    r"Unsupported (?:input )?dtype|MPS framework doesn't support float64"
)
NONE = "no kernel for"  # start of a note that PyTorch lacks a kernel
NARROW = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
UNIQUE = 257  # bfloat16 represents all whole numbers below this


@check(needs="weights", weight=1.5)
def check_dtype(subject: Subject) -> str:
    """.double(), .bfloat16(), .half() work; .to(device) moves everything.

    Why: a tensor that is not a buffer keeps its dtype and its device. float16
    cannot represent a mask of -1e9, nor bfloat16 the position 257.
    How: a forward pass runs in each dtype, and on the given device or an
    emulated one. In bfloat16 the text has up to 300 tokens, whose position
    numbers must all differ. A forward in float64 finds lines that cast to 16
    bits. A model that is built in float64 must not have such lines.
    If it fails: a tensor that the forward makes itself needs the device and
    the dtype of its input. A tensor that the model keeps must be a buffer.
    Count positions as integers or in float32 (in bfloat16 256 and 257 are
    equal), and mask with minus infinity or torch.finfo(dtype).min. A line that
    casts to 16 bits inside a wider model is reported with its effect on
    scores. It fails only a model built in float64.
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
            # scores that are always float32 are the author's choice: many
            # heads cast them
            least = min(_bits(dtype), 32 if answer == fixed else 64)
            if _bits(answer) < least:
                raise AssertionError(f"a model in {name}")
        notes.append(name)
    notes.append(_check_device(subject, tokens))
    return ", ".join(notes) + _require_width(subject, tokens)


def _require_width(subject: Subject, tokens: Tensor) -> str:
    """Say which line of a wider model computes in 16 bits, or raise.

    A model that is built in float64 should compute in float64.
    """
    variant = changeable(subject)
    meant = variant.double
    doubled(subject, variant.model)
    kinds = {p.dtype for p in variant.parameters if p.is_floating_point()}
    if quantised(variant.model) or not kinds or min(map(_bits, kinds)) < 32:
        return ""
    # a weight of zeros would hide the lines before it
    redraw_zeros(variant.model, subject.generator())
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
    """Return the line that casts to 16 bits only in train mode, or raise.

    A cast to float16 always fails the check, because of float16's small range.
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
    """Return the dtype of the scores after a cast of the model to a dtype.

    A string instead names a failure that is not the model's fault: PyTorch
    has no kernel for the dtype, or the dtype's range is too small.
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
    """Records whether a forward chooses dtypes by autocast."""

    inside = False

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function, and record whether autocast is on."""
        self.inside |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **kwargs)


class Casts:
    """Records the first cast to 16 bits, and positions that it makes equal.

    Args:
        positions: how many positions must differ in bfloat16.
        widen: whether to undo casts of wider floats to 16 bits.
    """

    NAMES = ("arange", "_to_copy", "copy_", "mul", "div", "add", "sub")

    def __init__(self, positions: int = 0, widen: bool = False):
        self.count, self.widen = positions, widen
        self.first: tuple[Place, str] | None = None
        self.same: tuple[int, int] | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note a cast to 16 bits."""
        dtype = kwargs.get("dtype")
        if name == "copy_":  # copy_ converts to the dtype of the memory
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
        """Record the first two positions that bfloat16 makes equal."""
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
