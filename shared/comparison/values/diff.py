"""Which line computes what, and where two implementations part."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...notebooks import progress
from ...running.context import one_run
from ...running.errors import UnknownSize
from ...running.subject import Subject
from ...tracing.value import reduced
from ...validation import dtype_name
from .given import (
    Model,
    as_tokens,
    require_rows_first,
    size_of,
    subject_of,
    tokens_of_both,
)
from .pair import Pair
from .recording import Recording
from .side import unit_of
from .value_diff import ValueDiff
from .weights import WeightMatch, first_difference, match_weights
from .widening import widen


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
    quick: bool = False,
) -> ValueDiff:
    """Pair the lines of two models by the values they compute.

    Both run in eval mode on the same tokens, in float64 where both can.
    Each brings its own weights. A side may be a recording: the path of an
    .npz or a .safetensors with the tokens, and with arrays in the order in
    which they were computed, the scores among them, or with five numbers of
    each: mean, deviation, least, most and norm. Next to a model it stands on
    the right, and the model runs in its dtype. A function written in arrays
    of NumPy or JAX stands there as well; its scores alone are compared.

    Two models that agree on the first text are compared in more ways: scores
    of longer texts, special ids and rows; with zeros and ones redrawn and
    matrices scaled up on both sides; in train mode. The sentence and `scope`
    say what was compared. A recording has one text.

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
        quick: whether to compare the first text only.

    Raises:
        ValueError: for two vocabularies, tokens that do not fit, a model
            that raises, or a model in which no value can be recorded.
    """
    started = perf_counter()
    files, sides = _files_among((left, right), ignore, scores)
    given = _tokens_of(tokens, files)
    if len(files) == 2 and gradients:
        raise ValueError("gradients of two files are not compared")
    pair = _pair_of(sides, given, vocab_size, names, table)
    pair = replace(pair, tolerance=tolerance)
    if not files:
        given = tokens_of_both(pair.subjects, pair.names, given)
    with progress() as line:
        line.set_description_str("comparing {} with {}".format(*pair.names))
        found = pair.at(given, dtype)
        notes = pair.program.notes if pair.program else []
        found = replace(found, notes=[*found.notes, *notes])
        found, dtype = _in_doubt(found, pair, given, dtype)
        found = _with_weights(found, gradients)
        if not (quick or files) and found.same:
            found = widen(found, pair, dtype, perf_counter() - started)
    return found


def _files_among(
    given: Sequence[Any], ignore: Sequence[str], scores: str | None
) -> tuple[list[Recording], list[Any]]:
    """Return the recordings among two sides, and both sides with them.

    Raises:
        ValueError: for a name that is in no recording.
    """
    sides: list[Any] = [
        Recording(side, None, ignore, scores)
        if isinstance(side, Path)
        else side
        for side in given
    ]
    files = [side for side in sides if isinstance(side, Recording)]
    for word in (*ignore, *filter(None, [scores])):
        if not any(word in file.named for file in files):
            raise ValueError(f"there is no array {word!r} in a recording")
    for file in files:
        if not file.statistics and any(f.statistics for f in files):
            file.reduce = reduced
    return files, sides


def _tokens_of(
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None,
    files: Sequence[Recording],
) -> Any:
    """Return the ids that are given or recorded, None where none are.

    Raises:
        ValueError: for a recording of other tokens.
    """
    given = None if tokens is None else as_tokens(tokens)
    for file in files:
        given = file.tokens if given is None else given
        if not given.equal(file.tokens):
            raise ValueError(f"{file.name} was recorded from other tokens")
    return given


def _pair_of(
    sides: Sequence[Any],
    given: Int[Tensor, "batch time"] | None,
    vocab_size: int | None,
    names: tuple[str, str] | None,
    table: Mapping[str, str] | None,
) -> Pair:
    """Return two sides in the order in which they are compared."""
    one, other = subjects_of(sides, size_of(given), vocab_size)
    files = [side for side in sides if isinstance(side, Recording)]
    if len(files) == 2 and vocab_size is None:
        vocab_size = min(file.vocab_size or sys.maxsize for file in files)
    both = names or (one.name, other.name)
    named = [*(table or {}).items()]
    if _place(one, vocab_size) > _place(other, vocab_size):
        one, other, both = other, one, both[::-1]
        named = [two[::-1] for two in named]
    return Pair((one, other), both, named, vocab_size=vocab_size or 0)


def _place(side: Subject | Recording, vocab_size: int | None) -> int:
    """Return a key of order: scores alone stand on the right."""
    if isinstance(side, Subject):
        return int(side.in_arrays)
    return 2 + (side.vocab_size != vocab_size)


def _in_doubt(
    found: ValueDiff,
    pair: Pair,
    tokens: Int[Tensor, "batch time"],
    dtype: torch.dtype | None,
) -> tuple[ValueDiff, torch.dtype | None]:
    """Add what another dtype says where it may decide, and return it."""
    other = found.sides[1]
    if isinstance(other, Recording):
        if not found.same and dtype is None:
            compare = partial(pair.at, tokens)
            hints = [*_hints_at_dtype(compare, other)]
            found = replace(found, notes=[*found.notes, *hints])
        return found, dtype
    if found.same and dtype not in (None, torch.float64):
        finer = pair.at(tokens)
        if not finer.same and finer.sides[0].dtype == torch.float64:
            kind = found.sides[0].dtype
            hidden = f"in {dtype_name(kind)} rounding hides this"
            notes = [*finer.notes, f"run in float64: {hidden}"]
            return replace(finer, notes=notes), None
    return found, dtype


def _with_weights(found: ValueDiff, gradients: bool) -> ValueDiff:
    """Add which weights are whose, and the first gradient that differs.

    Gradients that a recording has are compared in any case.
    """
    left, right = found.sides
    gradients |= isinstance(right, Recording) and bool(right.stored)
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
