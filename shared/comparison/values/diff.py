"""Which line computes what, and where two implementations part."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...notebooks import progress
from ...running.context import one_run
from ...running.errors import UnknownSize
from ...running.program import Program
from ...running.subject import Subject
from ...running.tolerances import PRINTED_UNITS
from ...tracing.value import reduced
from ...validation import dtype_name
from .findings import findings
from .given import (
    Model,
    as_tokens,
    fitting,
    require_rows_first,
    size_of,
    subject_of,
    tokens_of_both,
)
from .recording import Recording, scores_of
from .side import Side, run_in_one_dtype, unit_of
from .value_diff import ValueDiff
from .weights import WeightMatch, first_difference, match_weights


@one_run
def diff_by_value(
    left: Model | Path,
    right: Model | Path,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    names: tuple[str, str] | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float = 0.0,
    gradients: bool = False,
    ignore: Sequence[str] = (),
    scores: str | None = None,
    table: Mapping[str, str] | None = None,
) -> ValueDiff:
    """Pair the lines of two models by the values they compute.

    Both run in eval mode on the same tokens, in float64 where both can.
    Each brings its own weights. A side may be a recording: the path of an
    .npz or a .safetensors with the tokens, and with arrays in the order in
    which they were computed, the scores among them, or with five numbers of
    each: mean, deviation, least, most and norm. Next to a model it stands on
    the right, and the model runs in its dtype. A function written in arrays
    of NumPy or JAX stands there as well; its scores alone are compared.

    Args:
        left: a model, any callable from (batch, time) ids to scores, or a
            function without arguments that builds one.
        right: another.
        tokens: ids; None: 16 drawn from a seed.
        vocab_size: number of tokens, where a model does not declare it.
        names: what to call the two; None: as their classes.
        dtype: to run both in; None: float64, or that of a recording. Two
            models that rounding hides from each other in less than float64
            are told apart in float64.
        tolerance: share of a value's largest number that passes as rounding
            in any case.
        gradients: whether to compare the gradients of the weights, too, of
            the mean cross-entropy of the next tokens.
        ignore: names of arrays of recordings that are left out, whole or one
            word: "preatt" for "layer 0 preatt" and "012_preatt".
        scores: name of the array of a recording that holds the scores; None:
            it is found. A recording without scores is judged by its values.
        table: names of values on the left, and on the right: of an array, of
            a module whose output is meant, or "layer 0 model.py:43 ln_1";
            "{i}" stands for the number of each layer.

    Raises:
        ValueError: for two vocabularies, tokens that do not fit, a model
            that raises, or a model in which no value can be recorded.
    """
    given: Any = None if tokens is None else as_tokens(tokens)
    sides: list[Any] = [
        Recording(side, None, ignore, scores)
        if isinstance(side, Path)
        else side
        for side in (left, right)
    ]
    files = [side for side in sides if isinstance(side, Recording)]
    for word in (*ignore, *filter(None, [scores])):
        if not any(word in file.named for file in files):
            raise ValueError(f"there is no array {word!r} in a recording")
    for file in files:
        given = file.tokens if given is None else given
        if not given.equal(file.tokens):
            raise ValueError(f"{file.name} was recorded from other tokens")
    for file in files:
        if not file.statistics and any(f.statistics for f in files):
            file.reduce = reduced
    if len(files) == 2 and gradients:
        raise ValueError("gradients of two files are not compared")
    pair = subjects_of(sides, size_of(given), vocab_size)
    if len(files) == 2 and vocab_size is None:
        vocab_size = min(file.vocab_size or sys.maxsize for file in files)
    both = names or (pair[0].name, pair[1].name)
    named = [*(table or {}).items()]
    if _place(pair[0], vocab_size) > _place(pair[1], vocab_size):
        pair, both = pair[::-1], both[::-1]
        named = [two[::-1] for two in named]
    if not files:
        given = tokens_of_both(pair, both, given)
    one, other = pair
    printed: list[str] = []
    if isinstance(other, Subject) and other.in_arrays:
        program, other = other.builder.given, scores_of(other, given)
        if isinstance(program, Program):
            tolerance = max(tolerance, PRINTED_UNITS * program.share)
            printed = program.notes

    def compare(dtype: torch.dtype | None) -> ValueDiff:
        ran = _run(one, other, given, dtype, vocab_size or 0)
        return findings(both, ran, named, tolerance)

    with progress() as line:
        line.set_description_str(f"comparing {both[0]} with {both[1]}")
        found = compare(dtype)
    found = replace(found, notes=[*found.notes, *printed])
    if isinstance(other, Recording) and not found.same and dtype is None:
        hints = [*_hints_at_dtype(compare, other)]
        found = replace(found, notes=[*found.notes, *hints])
    coarse = dtype not in (None, torch.float64)
    if isinstance(other, Subject) and found.same and coarse:
        finer = compare(None)
        if not finer.same and finer.sides[0].dtype == torch.float64:
            kind = found.sides[0].dtype
            hidden = f"in {dtype_name(kind)} rounding hides this"
            notes = [*finer.notes, f"run in float64: {hidden}"]
            found = replace(finer, notes=notes)
    stored = isinstance(other, Recording) and bool(other.stored)
    return _with_weights(found, gradients or stored)


def _place(side: Subject | Recording, vocab_size: int | None) -> int:
    """Return a key of order: scores alone stand on the right."""
    if isinstance(side, Subject):
        return int(side.in_arrays)
    return 2 + (side.vocab_size != vocab_size)


def _run(
    one: Subject | Recording,
    other: Subject | Recording,
    tokens: Int[Tensor, "batch time"],
    dtype: torch.dtype | None,
    vocab_size: int,
) -> tuple[Side, Side]:
    """Run two sides in one dtype, None for float64 or a recording's."""
    if isinstance(other, Subject):
        assert isinstance(one, Subject)
        models = Side.run(one, tokens, dtype), Side.run(other, tokens, dtype)
        run_in_one_dtype(models)
        return models
    other = copy(other)
    if isinstance(one, Subject):
        return run_beside(one, other, dtype)
    one.lay_out(None, vocab_size)
    other.lay_out(one, vocab_size)
    return one, other


def _with_weights(found: ValueDiff, gradients: bool) -> ValueDiff:
    """Add which weights are whose, and the first gradient that differs."""
    left, right = found.sides
    ours, theirs = left.module(), right.module()
    for side, module in ((left, ours), (right, theirs)):
        if not found.same and module is not None:
            require_rows_first(side.subject)
    matches: list[WeightMatch] = []
    if ours is not None and theirs is not None:
        matches = match_weights(ours, theirs)
    elif ours is not None and gradients:  # a recording has the left's names
        matches = [WeightMatch(n, "equal", (n,)) for n in right.gradients()]
    found = replace(found, weights=matches)
    if not gradients or not found.same:
        return found
    unit = min(unit_of(left, right), 2.0**-16)
    first, count = first_difference(
        left.gradients(), right.gradients(), matches, right.detached, unit
    )
    return replace(found, gradient=first, gradients=count)


def subjects_of(
    models: Sequence[Any],
    at: tuple[int, int],
    vocab_size: int | None,
) -> list[Any]:
    """Return models as subjects; the other, or a file, may say how wide."""
    found: dict[int, Subject | Recording] = {}
    for i, model in enumerate(models):
        with suppress(UnknownSize):
            recorded = isinstance(model, Recording)
            found[i] = model if recorded else subject_of(model, at, vocab_size)
    sizes = (side.vocab_size for side in found.values())
    known = next(filter(None, sizes), None)
    for i in sorted({0, 1} - found.keys()):  # of none: what is unknown
        try:
            found[i] = subject_of(models[i], at, known)
        except ValueError as error:
            words = f"; is --vocab-size not {known}?" * (known is not None)
            raise ValueError(f"{error}{words}") from error.__cause__
    return [found[0], found[1]]


def _hints_at_dtype(
    compare: Callable[[torch.dtype], ValueDiff], recording: Recording
) -> Iterator[str]:
    """Say where 16 bits explain what a file of float32 differs by.

    An engine that runs in 16 bits may write its log-probabilities wider.
    """
    for kind in (torch.bfloat16, torch.float16):
        with suppress(ValueError):  # the model may not run in it
            if recording.may_be_of(kind) and compare(kind).same:
                name = dtype_name(kind)
                yield (
                    f"rounding in {name} explains the difference: if "
                    f"{recording.name} was computed in it, give --dtype {name}"
                )
                return


def run_beside(
    subject: Subject,
    recording: Recording,
    dtype: torch.dtype | None,
    kind: type[Side] = Side,
) -> tuple[Side, Recording]:
    """Run a model next to a file or scores, in the dtype of these."""
    if recording.statistics and kind is not Side:
        raise ValueError("statistics are compared on one process")
    tokens = fitting(recording.tokens, subject.block_size, subject.vocab_size)
    if dtype is None and not recording.doubled:
        dtype = recording.dtype
    if subject.in_arrays:
        side: Side = scores_of(subject, tokens)
    else:
        reduce = reduced if recording.statistics else None
        side = kind.run(subject, tokens, dtype, reduce)
    recording.lay_out(side, subject.vocab_size)
    return side, recording


def assert_same_values(
    left: Model | Path,
    right: Model | Path,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    **settings: Any,
) -> None:
    """Raise AssertionError where two models are not one function.

    The message names the first line that parts. The arguments are those of
    diff_by_value, and so are its errors.
    """
    found = diff_by_value(left, right, tokens, **settings)
    if not found.same:
        raise AssertionError(found.sentence)
