"""Pair the lines of two implementations by value; find where they differ."""

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

    Both models run in eval mode on the same tokens, with their own weights, in
    float64 if both can. Either side may be a recording instead: the path of an
    .npz or a .safetensors file. It has the tokens, and the arrays in the order
    in which they were computed, with the scores among them. A recording may
    have five statistics instead of each array: mean, deviation, least, most
    and norm. If the other side is a model, the recording becomes the right
    side, and the model runs in the recording's dtype. A function of NumPy or
    JAX arrays also becomes the right side; only its scores are compared.

    If two models agree on the first text, they are compared in more ways: on
    longer texts, special ids and several rows; with other weights; and in
    train mode. The result's `scope` says what was compared.

    Args:
        left: a model, any callable from (batch, time) ids to scores, or a
            function without arguments that builds one.
        right: the model, function or recording to compare it with.
        tokens: ids; None draws 16 random ids from a fixed seed.
        vocab_size: number of tokens, if a model does not declare it.
        names: names for the two models; None uses their classes' names.
        dtype: dtype to run both in; None means float64, or the dtype of a
            recording. Two models that agree in a coarser dtype are compared
            again in float64, because rounding may hide a difference.
        tolerance: differences up to this share of a value's largest entry
            always pass as rounding.
        gradients: whether to compare the gradients of the weights as well.
            The loss is the mean cross-entropy of the next tokens.
        ignore: names of arrays of recordings to leave out, each in full or as
            one word of it: "preatt" for "layer 0 preatt" and "012_preatt".
        scores: name of the array of a recording that holds the scores; None
            looks for it. A recording may lack scores.
        table: names of the values to pair, the left's before the right's. A
            name is that of an array, of a module (for its output), or of a
            line, as in "layer 0 model.py:43 ln_1". Write "{i}" for the layer's
            number.
        quick: whether to compare the first text only.

    Raises:
        ValueError: if the vocabularies differ, the tokens do not fit a model,
            a model raises, or no value of a model can be recorded.
    """
    started = perf_counter()
    files, sides = _files_among((left, right), ignore, scores)
    given = _tokens_of(tokens, files)
    if len(files) == 2 and gradients:
        raise ValueError("gradients cannot be compared between two files")
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
    """Read sides that are files; return the recordings, and both sides.

    Raises:
        ValueError: for the name of an array that no recording has.
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
            raise ValueError(f"no recording has an array {word!r}")
    for file in files:
        if not file.statistics and any(f.statistics for f in files):
            file.reduce = reduced
    return files, sides


def _tokens_of(
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None,
    files: Sequence[Recording],
) -> Any:
    """Return the ids that are given or recorded, otherwise None.

    Raises:
        ValueError: if a recording has different tokens.
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
    """Return both sides, with a function of arrays or a file on the right.

    If the sides change places, so do their names and the pairs in the table.
    """
    one, other = subjects_of(sides, size_of(given), vocab_size)
    files = [side for side in sides if isinstance(side, Recording)]
    if len(files) == 2 and vocab_size is None:
        vocab_size = min(file.vocab_size or sys.maxsize for file in files)
    both = names or (one.name, other.name)
    named = [*(table or {}).items()]
    if _rank(one, vocab_size) > _rank(other, vocab_size):
        one, other, both = other, one, both[::-1]
        named = [two[::-1] for two in named]
    return Pair((one, other), both, named, vocab_size=vocab_size or 0)


def _rank(side: Subject | Recording, vocab_size: int | None) -> int:
    """Return a key that sorts models before functions and files of arrays."""
    if isinstance(side, Subject):
        return int(side.in_arrays)
    return 2 + (side.vocab_size != vocab_size)


def _in_doubt(
    found: ValueDiff,
    pair: Pair,
    tokens: Int[Tensor, "batch time"],
    dtype: torch.dtype | None,
) -> tuple[ValueDiff, torch.dtype | None]:
    """Compare again in another dtype if rounding may hide a difference.

    Return the finding, with notes on that dtype, and the dtype for further
    runs (None means float64).
    """
    other = found.sides[1]
    if isinstance(other, Recording):
        if not found.same and dtype is None:
            compare = partial(pair.at, tokens)
            hints = [*_hints_at_dtype(compare, other)]
            found = replace(found, notes=[*found.notes, *hints])
        return found, dtype
    if found.same and dtype not in (None, torch.float64):
        finer = pair.at(tokens)  # in float64
        if not finer.same and finer.sides[0].dtype == torch.float64:
            kind = found.sides[0].dtype
            hidden = f"in {dtype_name(kind)} rounding hides this"
            notes = [*finer.notes, f"run in float64: {hidden}"]
            return replace(finer, notes=notes), None
    return found, dtype


def _with_weights(found: ValueDiff, gradients: bool) -> ValueDiff:
    """Add to a finding the pairs of weights, and the first gradient to differ.

    If a side is a recording, gradients are always compared.
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
    """Wrap models as subjects; one may take the other's vocabulary size."""
    found: dict[int, Subject | Recording] = {}
    for i, model in enumerate(models):
        with suppress(UnknownSize):
            recorded = isinstance(model, Recording)
            found[i] = model if recorded else subject_of(model, at, vocab_size)
    sizes = (side.vocab_size for side in found.values())
    known = next(filter(None, sizes), None)
    for i in sorted({0, 1} - found.keys()):  # models of unknown vocabulary
        try:
            found[i] = subject_of(models[i], at, known)
        except ValueError as error:
            words = f"; is --vocab-size not {known}?" * (known is not None)
            raise ValueError(f"{error}{words}") from error.__cause__
    return [found[0], found[1]]


def _hints_at_dtype(
    compare: Callable[[torch.dtype], ValueDiff], recording: Recording
) -> Iterator[str]:
    """Yield a note if 16-bit rounding explains a recording's difference.

    An engine that runs in 16 bits may write its log-probabilities in float32.
    """
    for kind in (torch.bfloat16, torch.float16):
        with suppress(ValueError):  # the model may not run in this dtype
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
    """Raise AssertionError unless two models compute the same function.

    The message names the first line that differs. Arguments and errors are
    those of diff_by_value.
    """
    found = diff_by_value(left, right, tokens, **settings)
    if not found.same:
        raise AssertionError(found.sentence)
