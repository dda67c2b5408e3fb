"""Which line computes what, and where two implementations part."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...invariants.context import one_run
from ...invariants.errors import UnknownSize
from ...invariants.model.calling import IN_ARRAYS
from ...invariants.notebooks import Progress
from ...invariants.subject import Subject
from .findings import findings
from .given import (
    Model,
    as_tokens,
    require_fit,
    require_rows_first,
    size_of,
    subject_of,
    subjects_of,
    tokens_of_both,
)
from .gradients import first_difference
from .matching import ROUNDING_OF_RECORDINGS, Matches, match
from .naming import pair_by_name
from .recording import Recording, out_of_order, scores_of
from .side import Side, run_in_one_dtype, unit_of
from .value_diff import ValueDiff
from .weights import WeightMatch, match_weights


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
    which they were computed, the scores among them. Beside a model it stands
    on the right, and the model runs in its dtype. A function written in arrays
    of NumPy or JAX stands there, too; its scores alone are compared.

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
            that raises, or one of which nothing can be recorded.
    """
    return diff_sides(
        left,
        right,
        tokens,
        vocab_size=vocab_size,
        names=names,
        dtype=dtype,
        tolerance=tolerance,
        gradients=gradients,
        ignore=ignore,
        scores=scores,
        table=table,
    )[0]


@one_run
def diff_sides(
    left: Model | Path,
    right: Model | Path,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    names: tuple[str, str] | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = False,
    ignore: Sequence[str] = (),
    scores: str | None = None,
    table: Mapping[str, str] | None = None,
    **bounds: Any,
) -> tuple[ValueDiff, tuple[Side, Side]]:
    """Return what diff_by_value does, and both sides.

    These can be run again, for the values of some lines.
    """
    bounds["named"] = [*(table or {}).items()]
    if isinstance(left, Path) and not isinstance(right, Path):
        left, right, names = right, left, names and names[::-1]
        bounds["named"] = [pair[::-1] for pair in bounds["named"]]
    given = None if tokens is None else as_tokens(tokens)
    if (ignore or scores) and not isinstance(right, Path):
        raise ValueError(
            "arrays of a recording alone can be ignored or hold the scores"
        )
    if isinstance(right, Path):
        recording = Recording(right, None, ignore, scores)
        files = [recording]
        if given is not None and not torch.equal(given, recording.tokens):
            raise ValueError(f"{right} was recorded from other tokens")
        if isinstance(left, Path):
            files.append(Recording(left, None, ignore, scores))
        for word in ignore:
            if not any(word in file.ignored for file in files):
                raise ValueError(f"there is no array {word!r} to be ignored")
        if scores and not any(file.named_scores for file in files):
            raise ValueError(f"there is no array {scores!r} to hold scores")
        if isinstance(left, Path):
            if gradients:
                raise ValueError("gradients of two files are not compared")
            if not torch.equal(recording.tokens, files[1].tokens):
                raise ValueError(f"{left} and {right} have other tokens")
            names = names or (str(left), str(right))
            widths = [file.width or sys.maxsize for file in files]
            vocab_size = vocab_size or min(widths)
            if vocab_size not in widths[1:]:  # on the right: without scores
                files, names = files[::-1], names[::-1]
                bounds["named"] = [pair[::-1] for pair in bounds["named"]]
            files[1].lay_out(None, vocab_size)
            files[0].lay_out(files[1], vocab_size)
            sides: tuple[Side, Side] = files[1], files[0]
            return _diff_recording(names, sides, **bounds), sides
        subject = beside_scores(left, recording, vocab_size)
        names = names or (subject.name, str(right))
        sides = run_beside(subject, recording, dtype)
        found = _diff_recording(names, sides, **bounds)
        if not found.same and dtype is None:
            hint = _hint_at_dtype(names, subject, recording, **bounds)
            found = replace(found, notes=[*found.notes, *hint])
        gradients = gradients or bool(recording.stored)
        return _with_weights(found, sides, gradients), sides
    assert not isinstance(left, Path)  # a file alone stands on the right
    subjects = subjects_of((left, right), size_of(given), vocab_size)
    names = names or (subjects[0].name, subjects[1].name)
    given = tokens_of_both(subjects, names, given)
    if subjects[0].in_arrays and not subjects[1].in_arrays:
        subjects, names = subjects[::-1], names[::-1]
    if subjects[1].in_arrays:
        sides = run_beside(subjects[0], scores_of(subjects[1], given), dtype)
        found = _diff_recording(names, sides, **bounds)
        return _with_weights(found, sides, gradients), sides
    with Progress() as line:
        line.show(f"comparing {names[0]} with {names[1]}")
        found, sides = _diff_models(subjects, given, names, dtype, **bounds)
    if found.same and sides[0].dtype != torch.float64 and dtype is not None:
        finer, exact = _diff_models(subjects, given, names, None, **bounds)
        if not finer.same and exact[0].dtype == torch.float64:
            kind = str(dtype).removeprefix("torch.")
            hidden = f"run in float64: in {kind} rounding hides this"
            found = replace(finer, notes=[*finer.notes, hidden])
            sides = exact
    return _with_weights(found, sides, gradients), sides


def _diff_models(
    subjects: Sequence[Subject],
    given: Int[Tensor, "batch time"],
    names: tuple[str, str],
    dtype: torch.dtype | None,
    **bounds: Any,
) -> tuple[ValueDiff, tuple[Side, Side]]:
    """Compare two models of torch in one dtype, None for float64."""
    sides = (
        Side(subjects[0], given, dtype),
        Side(subjects[1], given, dtype),
    )
    single = [
        name
        for name, side in zip(names, sides, strict=True)
        if not side.doubled and dtype is None
    ]
    run_in_one_dtype(sides)
    return findings(names, sides, _match(sides, **bounds), single), sides


def _match(
    sides: tuple[Side, Side],
    named: Sequence[tuple[str, str]],
    tolerance: float = 0.0,
) -> Matches:
    """Find the values that are on both sides, or that a table pairs."""
    return match(*sides, tolerance, pair_by_name(sides, named))


def _with_weights(
    found: ValueDiff, sides: tuple[Side, Side], gradients: bool
) -> ValueDiff:
    """Add which weights are whose, and the first gradient that differs."""
    left, right = sides
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


def beside_scores(
    model: Model, recording: Recording, vocab_size: int | None
) -> Subject:
    """Meet a model; one that says no vocabulary has the recording's."""
    at = size_of(recording.tokens)
    try:
        return subject_of(model, at, vocab_size)
    except UnknownSize as error:
        if recording.width is None:
            raise
        try:
            return subject_of(model, at, recording.width)
        except ValueError:  # it is padded, or none of the model's
            raise error from None


def _hint_at_dtype(
    names: tuple[str, str],
    subject: Subject,
    recording: Recording,
    **bounds: Any,
) -> list[str]:
    """Say where 16 bits explain what a file of float32 differs by.

    An engine that runs in 16 bits may write its log-probabilities wider.
    """
    for kind in (torch.bfloat16, torch.float16):
        if not recording.may_be_of(kind):
            continue
        with suppress(ValueError):  # the model may not run in it
            sides = run_beside(subject, copy(recording), kind)
            if _diff_recording(names, sides, **bounds).same:
                name = str(kind).removeprefix("torch.")
                return [
                    f"rounding in {name} explains the difference: if "
                    f"{names[1]} was computed in it, give --dtype {name}"
                ]
    return []


def run_beside(
    subject: Subject,
    recording: Recording,
    dtype: torch.dtype | None,
    kind: type[Side] = Side,
) -> tuple[Side, Recording]:
    """Run a model beside a file or scores, in the dtype of these."""
    tokens = recording.tokens
    require_fit(tokens, subject.block_size, subject.vocab_size)
    if dtype is None and not recording.doubled:
        dtype = recording.dtype
    if subject.in_arrays:
        side: Side = scores_of(subject, tokens)
    else:
        side = kind(subject, tokens, dtype)
    recording.lay_out(side, subject.vocab_size)
    return side, recording


def _diff_recording(
    names: tuple[str, str], sides: tuple[Side, Side], **bounds: Any
) -> ValueDiff:
    """Compare two sides, the right of which is a file or scores."""
    found = findings(names, sides, _match(sides, **bounds), [])
    kind = str(sides[0].dtype).removeprefix("torch.")
    notes = [
        f"{name} is {IN_ARRAYS}, and its scores alone are compared"
        for name, one in zip(names, sides, strict=True)
        if one.only_scores
    ]
    if isinstance(sides[0], Recording) and not sides[0].only_scores:
        units = ROUNDING_OF_RECORDINGS
        notes.append(f"{units} units of rounding of {kind} pass, unmeasured")
    else:
        notes.append(f"run in {kind}, that of {names[1]}")
    if late := out_of_order(found.pairs, sides[0].values):
        notes.append(
            f"{late[1]} is computed before {late[0]} and stands behind it in "
            f"{names[1]}: arrays are meant in the order of computation"
        )
    if found.same and torch.finfo(sides[0].dtype).bits == 16:
        limit = f" as far as {kind} tells: it cannot tell exact GELU from"
        limit += " tanh's, nor an eps of 1e-6 from 1e-5"
        found = replace(found, coarse=limit)
    if found.only_scores:
        found = replace(found, alone={"left": [], "right": []})
    return replace(found, notes=[*found.notes, *notes])


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
