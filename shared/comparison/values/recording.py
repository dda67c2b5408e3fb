"""Read a side of a comparison from a file of arrays.

record_values writes such a file, or a port does. The file has the tokens, and
the arrays in the order in which they were computed. In an .npz this is the
order of its members. In a .safetensors, all names may begin with a number that
gives the order. Otherwise it is the order of the data.
"""

import gc
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor

from ...running.context import isolated
from ...running.errors import ModelRaised
from ...running.places import Place
from ...running.program import Program
from ...running.subject import Subject
from ...running.tolerances import (
    NORMALISED_NATS,
    RECORDED_SCORES_SHARE,
    SUM_SHARE_IN_16_BITS,
)
from ...running.variant import own
from ...tracing.value import Value, digest, of_one_size, real
from .given import as_tokens
from .rows import Row
from .side import Side

TOKENS = "tokens"
# names of the arrays in an inference engine's file
ENGINES = ("token_ids", "hidden_states")
NO_DUMP = "a program that dumps no arrays"
TOP = "ids"  # name of the k likeliest ids, if only these have scores
GRADIENT = "gradient "  # a gradient's name is this and its weight's name
WALKED = 2**16  # most objects to search for the arrays that a function uses
# names of scores
SCORES = re.compile(r"(?i)logits|scores|probs|\b(lm_)?head$")

# an array's name, its layer (None if it was not split by layer), its entries
Piece = tuple[str, int | None, Tensor]


class Recording(Side):
    """A side of a comparison that is a file of arrays: it cannot run again.

    It implements the methods of `Side` with the stored arrays. `lay_out`
    turns the arrays into `values` and `tensors`, as if a run had recorded
    them. For another file format, extend `read_arrays`; for another layout
    of the arrays, extend `lay_out`.

    Args:
        path: an .npz or a .safetensors file.
        arrays: the file's arrays, including the tokens; None reads the file.
        ignored: names of arrays to leave out, each in full or as one word of
            it.
        scores: name of the array that holds the scores; None finds it.

    Raises:
        ValueError: if the file cannot be read, or if it has no tokens or no
            floating-point arrays.
    """

    of_a_function = False  # whether these are only the scores of a function

    def __init__(
        self,
        path: Path,
        arrays: dict[str, Tensor] | None = None,
        ignored: Sequence[str] = (),
        scores: str | None = None,
    ):
        self.path, self.name = path, str(path)
        arrays = read_arrays(path) if arrays is None else arrays
        arrays = _by_layers(arrays)
        self.named_scores = scores if scores in arrays else None
        self.named = {scores} & arrays.keys()  # arrays that the user names
        for name in [*arrays]:
            words = {name, *re.split(r"[\W_]+", name)} & {*ignored}
            self.named |= words
            if words:
                del arrays[name]
        if TOKENS not in arrays:
            raise ValueError(
                f"{path} has no array {TOKENS!r}, the ids from which it was "
                f"computed"
            )
        ids = as_tokens(arrays.pop(TOKENS), f"{TOKENS} in {path}")
        self.tokens: Int[Tensor, "batch time"] = ids
        self.stored = {
            name.removeprefix(GRADIENT): arrays.pop(name)
            for name in [*arrays]
            if name.startswith(GRADIENT)
        }
        self.top = arrays.pop(TOP, None)
        self.arrays = {
            name: array
            for name, array in arrays.items()
            if array.is_floating_point() and array.numel() > 1
        }
        if not self.arrays:
            raise ValueError(f"{path} has no arrays of floating numbers")
        # whether there are only five statistics of each value, as
        # record_values writes for a large model
        self.statistics = {a.shape for a in self.arrays.values()} == {(5,)}
        self.reduce = of_one_size if self.statistics else None
        self.by_heads, self.nudgeable, self.scripted = False, False, []
        self.coarse, self.detached = set[int](), []
        self.doubled = self.dtype == torch.float64

    @property
    def dtype(self) -> torch.dtype:
        """Return the coarsest dtype of the stored arrays."""
        kinds = {array.dtype for array in self.arrays.values()}
        return max(kinds, key=lambda kind: torch.finfo(kind).eps)

    @property
    def vocab_size(self) -> int | None:
        """Return the vocabulary size of the last array named like scores."""
        for name, array in reversed(self.arrays.items()):
            least = int(self.tokens.max()) + 1
            fits = self._may_be_scores(name, array, least)
            if fits and self._says_scores(name):
                return array.size(-1)
        return None

    def _says_scores(self, name: str) -> bool:
        return name == self.named_scores or SCORES.search(name) is not None

    def _may_be_scores(self, name: str, array: Tensor, vocab: int) -> bool:
        """Return whether an array has the size of scores, perhaps padded."""
        return (
            not self.statistics
            and array.numel() == self.tokens.numel() * array.size(-1)
            and array.size(-1) >= vocab
            and self.named_scores in (None, name)
        )

    def may_be_of(self, kind: torch.dtype) -> bool:
        """Return whether float32 arrays could come from a run in 16 bits.

        Log-probabilities are not tested, because any run may compute them in
        float32. Of statistics, only least and most are tested, because only
        these are entries of the value itself.
        """
        arrays = [
            array[2:4] if self.statistics else array
            for array in self.arrays.values()
            if self.top is None
            and not bool(
                (array.logsumexp(-1).abs() < SUM_SHARE_IN_16_BITS).all()
            )
        ]
        return self.dtype == torch.float32 and all(
            array.equal(array.to(kind).to(array.dtype)) for array in arrays
        )

    def lay_out(self, other: Side | None, vocab_size: int) -> None:
        """Turn the arrays into values, and find the scores among them.

        An array that has one value for every layer is split by layer. The
        other side must have run. `vocab_size` is its number of tokens.

        Raises:
            ValueError: if the array that the user named is not scores; or if
                no array is scores and no other array is recognisable.
        """
        others = () if other is None else other.values
        if self.top is not None:
            self._fill_in(self.top, other)
        pieces = self._pieces(others)
        wide, scores = self._find_scores(pieces, other, vocab_size)
        self.tensors: list[Tensor] = []
        self.values: list[Value] = []
        for i, (name, layer, array) in enumerate(pieces):
            array = wide[i] if i == scores else array
            self._add(name, layer, self._written_part(array, others))
        self.last = self.normalised = scores
        self.dtypes = {self.dtype: (self.values[0].place, False)}
        self.scored = bool(wide)
        if wide:
            log_probs, step = _log_probs(self.tensors[scores])
            if step and self.top is None:
                name = self.values[scores].place.function
                self._add(f"{name} ({step})", None, log_probs)
                self.normalised = len(self.values) - 1
        elif self.named_scores or all(v.digest.trivial for v in self.values):
            of = f" in {self.named_scores!r}" if self.named_scores else ""
            size = " x ".join(map(str, (*self.tokens.shape, vocab_size)))
            raise ValueError(
                f"{self.path} has no scores{of}: an array of {size}"
            )

    def _pieces(self, others: Sequence[Value]) -> list[Piece]:
        """Return the arrays; split those with a value for each layer."""
        sizes = {math.prod(value.shape) for value in others}
        layers = len({value.place.layer for value in others} - {None})
        pieces: list[Piece] = []
        for layered, group in groupby(
            self.arrays.items(),
            key=lambda item: self._holds(item[1], layers, sizes),
        ):
            members = [*group]
            if not layered:
                pieces += [(name, None, array) for name, array in members]
                continue
            for i in range(layers):
                pieces += [(name, i, array[i]) for name, array in members]
        return pieces

    def _find_scores(
        self, pieces: Sequence[Piece], other: Side | None, vocab_size: int
    ) -> tuple[dict[int, Tensor], int]:
        """Return the pieces that may be scores, and the index of the best.

        Scores have the shape (batch, time, vocab). The index is -1 if no piece
        has this shape. If several pieces have it, the last one is taken.
        """
        shape = *self.tokens.shape, vocab_size
        wide = {
            i: array[..., :vocab_size].reshape(shape)
            for i, (name, _, array) in enumerate(pieces)
            if self._may_be_scores(name, array, vocab_size)
        }
        if like := _alike(wide, other):
            return wide, max(like)
        if self.named_scores is None:
            # prefer arrays of just the vocabulary's width: a wider array is an
            # inner value, or scores that C code has padded
            wide = {
                i: array
                for i, array in wide.items()
                for name, _, whole in [pieces[i]]
                if whole.size(-1) == vocab_size or self._says_scores(name)
                if not _is_inner(whole, other)
            }
        return wide, max(wide, default=-1)

    def _fill_in(self, top: Tensor, other: Side | None) -> None:
        """Take the other side's scores for all but the k likeliest tokens."""
        (name, given), *more = self.arrays.items()
        if more or other is None or top.shape != given.shape:
            raise ValueError(
                f"{self.path}: {TOP!r} require exactly one other array, of "
                f"shape {tuple(top.shape)}, and a model as the other side"
            )
        rows, count = len(self.tokens), given.size(-1)
        filled = other.keep([other.normalised])[other.normalised].clone()
        given, top = (a.view(rows, -1, count) for a in (given, top))
        # an engine may omit the last position, after which it predicts nothing
        filled[:, : given.size(1)].scatter_(-1, top.long(), given.double())
        self.arrays = {name: filled.to(given.dtype)}

    def _written_part(self, array: Tensor, others: Sequence[Value]) -> Tensor:
        """Mask attention scores above the diagonal, if the other side does.

        llm.c never writes the entries above the diagonal.
        """
        time = self.tokens.size(1)
        if array.dim() < 3 or array.shape[-2:] != (time, time) or time == 1:
            return array
        above = torch.ones(time, time, dtype=torch.bool).triu(1)
        below = array.masked_fill(above, -torch.inf)

        def far(array: Tensor) -> float:
            known = digest(array)
            return min((o.digest.distance(known) for o in others), default=0.0)

        return below if far(below) < far(array) else array

    def _holds(self, array: Tensor, layers: int, sizes: set[int]) -> bool:
        """Return whether an array holds one value for each layer."""
        rows_too = layers == len(self.tokens) and array.numel() in sizes
        scores = array.numel() == self.tokens.numel() * array.size(-1)
        return (
            len(array) == layers > 1
            and not self.statistics
            and array.numel() // layers in sizes
            and not (scores or rows_too)
        )

    def _add(self, name: str, layer: int | None, array: Tensor) -> None:
        number = len(self.values)
        said = re.search(r"\blayer (\d+)\b", name)
        if layer is None and said is not None:
            layer = int(said[1])
        place = Place(str(self.path), 0, "", name, layer=layer)
        array = array if self.reduce is None else self.reduce(array)
        shape, stack = tuple(real(array).shape), ((name, number),)
        kind, known = array.dtype, digest(array)
        self.values.append(
            Value(number, number, place, shape, kind, known, stack)
        )
        self.tensors.append(array)

    def module(self) -> None:
        """Return None, because a recording has no weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the stored gradients by their weights' names."""
        return self.stored

    def record(self) -> None:
        """Do nothing, because the values are in the file."""

    def visit(
        self,
        numbers: Iterable[int],
        visitor: Callable[[int, Tensor], None],
        size: float = 0.0,
    ) -> None:
        """Call a visitor with each array whose number is given."""
        for number in sorted(numbers):
            visitor(number, self.tensors[number])


def _alike(arrays: dict[int, Tensor], other: Side | None) -> list[int]:
    """Return the arrays that equal the other side's log-probabilities."""
    if other is None or not other.scored:
        return []
    log_probs = other.values[other.normalised].digest
    return [
        i
        for i, array in arrays.items()
        if log_probs.distance(digest(_log_probs(array)[0]))
        < RECORDED_SCORES_SHARE * log_probs.size
    ]


def _is_inner(array: Tensor, other: Side | None) -> bool:
    """Return whether an array resembles an inner value of the other side."""
    known = digest(array)
    return other is not None and any(
        value.digest.distance(known) < RECORDED_SCORES_SHARE * known.size
        for value in other.values
        if value.number not in (other.last, other.normalised)
        and not value.digest.trivial
    )


def _log_probs(scores: Tensor) -> tuple[Tensor, str]:
    """Return log-probabilities, and the function that made them, or ""."""
    found = scores.double()
    near_1 = (found.sum(-1) - 1).abs() < SUM_SHARE_IN_16_BITS
    if bool((near_1 & (found >= 0).all(-1)).all()):
        return found.log(), "log"
    if bool((found.logsumexp(-1).abs() < NORMALISED_NATS).all()):
        return found, ""
    return found.log_softmax(-1), "log_softmax"


def out_of_order(
    pairs: Iterable[Row], left: Sequence[Value]
) -> tuple[Place | None, Place | None] | None:
    """Find an array that is stored before one of its inputs; return both."""
    ordered = sorted(pairs, key=lambda row: row.order[1])
    for first, second in pairwise(ordered):
        ours, theirs = first.order[0], second.order[0]
        before = {ours}
        for value in reversed(left[theirs + 1 : ours + 1]):
            before.update(value.inputs if value.number in before else ())
        if theirs < ours and theirs in before:
            return first.right, second.right
    return None


def name_of(place: Place) -> str:
    """Return the name of a value in a recording, without its number."""
    if place.recorded:
        return re.sub(r"^\d+[ _]", "", place.function)
    layer = "" if place.layer is None else f"layer {place.layer} "
    last = place.module.rpartition(".")[2]
    last = place.op if last.isdigit() or not last else last
    return f"{layer}{Path(place.path).name}:{place.line} {last}"


def scores_of(
    subject: Subject, tokens: Int[Tensor, "batch time"]
) -> Recording:
    """Run a function of arrays, or a program; return its scores and arrays."""
    name, variant = subject.name, own(subject)
    try:
        with isolated(subject.seed):
            scores = variant.scores(tokens)
    except ModelRaised as error:
        raise ValueError(f"{name}: {error}") from error.__cause__
    if _kinds_of(variant.model) == {"float32"}:
        scores = scores.float()  # NumPy has promoted float32 to float64
    arrays = {TOKENS: tokens}
    if isinstance(variant.model, Program) and variant.model.dumps:
        arrays |= _written_by(variant.model, tokens, scores)
    arrays[f"scores of {name}"] = scores
    side = Recording(Path(name), arrays)
    if isinstance(variant.model, Program):
        side.written = NO_DUMP
    side.of_a_function = True
    side.lay_out(None, subject.vocab_size)
    return side


def _written_by(
    program: Program, tokens: Int[Tensor, "batch time"], scores: Tensor
) -> dict[str, Tensor]:
    """Return the arrays that a program writes, except its scores."""
    rows = [program.dump(row) for row in tokens]
    arrays = {
        name: torch.stack([torch.from_numpy(row[name]) for row in rows])
        for name in rows[0]
    }
    known = scores.flatten()
    return {
        name: array
        for name, array in arrays.items()
        if not array.flatten().equal(known)
    }


def _kinds_of(function: object) -> set[str]:
    """Return the floating dtypes of the arrays that a function uses."""
    kinds, seen, todo = set[str](), set[int](), [function]
    while todo and len(seen) < WALKED:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            kinds |= {str(item.dtype)} if item.dtype.kind == "f" else set()
        elif isinstance(item, FunctionType):
            known = item.__globals__
            todo += [known.get(name) for name in item.__code__.co_names]
            todo += [item.__closure__, item.__defaults__]
        else:
            todo += gc.get_referents(item)
    return kinds


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a file in their order.

    Raises:
        ValueError: in one line, for a file that cannot be read.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as file:
                return {name: torch.from_numpy(file[name]) for name in file}
        arrays = load_file(path)
        with path.open("rb") as raw:
            header = json.loads(
                raw.read(int.from_bytes(raw.read(8), "little"))
            )
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read: {' '.join(str(error).split())}"
        ) from None
    names = sorted(arrays, key=lambda name: header[name]["data_offsets"])
    if all(re.match(r"\d", name) for name in arrays if name != TOKENS):
        names.sort()
    return {name: arrays[name] for name in names}


def _by_layers(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays, with the hidden states of an engine split by layer.

    The file of an engine has token_ids, and hidden_states of the shape
    (tokens, layers, width): the layers that the user requested, in that order.
    """
    ids, states = (arrays.get(name) for name in ENGINES)
    if ids is None or states is None or TOKENS in arrays:
        return arrays
    ids = ids.flatten()
    if states.ndim != 3 or len(states) != len(ids):
        raise ValueError(
            f"hidden_states of shape {tuple(states.shape)} with "
            f"{len(ids)} token_ids: expected (tokens, layers, width)"
        )
    found = {TOKENS: ids.unsqueeze(0)}
    for i in range(states.size(1)):
        found[f"hidden_states {i}"] = states[:, i].unsqueeze(0).contiguous()
    others = {n: a for n, a in arrays.items() if n not in ENGINES}
    return found | others
