"""A side that is a file, written by a port in any language, or of a run.

A file has the tokens, and arrays in the order in which they were computed:
in an .npz the order of its members; in a .safetensors the numbers that all
names start with, else the order of the data.
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...files import replace_file
from ...running.context import isolated, one_run
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
from ...tracing.value import statistics as of_value
from .given import Model, as_tokens, fitting, size_of, subject_of
from .rows import Row
from .side import Side

TOKENS = "tokens"
ENGINES = ("token_ids", "hidden_states")  # names in an engine's file
NO_DUMP = "a program that dumps no arrays"
TOP = "ids"  # of the k likeliest tokens, whose log-probabilities are given
GRADIENT = "gradient "  # names of gradients start so, the weight's follows
WALKED = 2**16  # objects that are looked at for a function's weights
SCORES = re.compile(r"(?i)logits|scores|probs|\b(lm_)?head$")  # in their name


class Recording(Side):
    """A side that is a file: nothing of it can be run again.

    An .npz or a .safetensors, or arrays in its place, the tokens among them.
    Ignored ones are left out, by name or one word of it; scores names the
    array that holds them, None where it is to be found.

    Raises:
        ValueError: in one line, for a file that is none of them, or that
            holds no tokens or no arrays of numbers.
    """

    of_a_function = False  # whether the scores of a function are all it has

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
        self.named = {scores} & arrays.keys()  # of the words given
        for name in [*arrays]:
            words = {name, *re.split(r"[\W_]+", name)} & {*ignored}
            self.named |= words
            if words:
                del arrays[name]
        if TOKENS not in arrays:
            raise ValueError(
                f"{path} has no array {TOKENS!r}: the ids that it was "
                f"computed from"
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
        # five numbers of each, as record_values keeps of large models
        self.statistics = {a.shape for a in self.arrays.values()} == {(5,)}
        self.reduce = of_one_size if self.statistics else None
        self.by_heads, self.nudgeable, self.scripted = False, False, []
        self.coarse, self.detached = set[int](), []
        self.doubled = self.dtype == torch.float64

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest that an array is stored in."""
        kinds = {array.dtype for array in self.arrays.values()}
        return max(kinds, key=lambda kind: torch.finfo(kind).eps)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary of the last array whose name says it has scores."""
        for name, array in reversed(self.arrays.items()):
            least = int(self.tokens.max()) + 1
            fits = self._may_be_scores(name, array, least)
            if fits and self._says_scores(name):
                return array.size(-1)
        return None

    def _says_scores(self, name: str) -> bool:
        return name == self.named_scores or SCORES.search(name) is not None

    def _may_be_scores(self, name: str, array: Tensor, vocab: int) -> bool:
        """Whether an array has the size of scores, perhaps padded as in C."""
        return (
            not self.statistics
            and array.numel() == self.tokens.numel() * array.size(-1)
            and array.size(-1) >= vocab
            and self.named_scores in (None, name)
        )

    def may_be_of(self, kind: torch.dtype) -> bool:
        """Whether float32 arrays may hold 16 bits.

        Log-probabilities may, whatever their numbers are; of statistics
        least and most are numbers of the values.
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
        """Make values of the arrays: by layers where one holds them all.

        The other side has run, and has so many tokens.

        Raises:
            ValueError: where the array named holds no scores, or where there
                are none and no other array that could be recognised.
        """
        others = () if other is None else other.values
        if self.top is not None:
            self._fill_in(self.top, other)
        sizes = {math.prod(value.shape) for value in others}
        layers = len({value.place.layer for value in others} - {None})
        pieces: list[tuple[str, int | None, Tensor]] = []
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
        self.tensors: list[Tensor] = []
        self.values: list[Value] = []
        shape = *self.tokens.shape, vocab_size
        wide = {
            i: array[..., :vocab_size].reshape(shape)
            for i, (name, _, array) in enumerate(pieces)
            if self._may_be_scores(name, array, vocab_size)
        }
        like: list[int] = []
        if other is not None and other.scored:
            log_probs = other.values[other.normalised].digest
            like = [
                i
                for i, array in wide.items()
                if log_probs.distance(digest(_log_probs(array)[0]))
                < RECORDED_SCORES_SHARE * log_probs.size
            ]
        if not like and self.named_scores is None:
            # a wider one is padded, as in C, or an inner value
            wide = {
                i: array
                for i, array in wide.items()
                for name, _, whole in [pieces[i]]
                if whole.size(-1) == vocab_size or self._says_scores(name)
                if not _is_inner(whole, other)
            }
        scores = max(like or wide, default=-1)  # others may follow
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
            size = " x ".join(map(str, shape))
            raise ValueError(
                f"{self.path} has no scores{of}: an array of {size}"
            )

    def _fill_in(self, top: Tensor, other: Side | None) -> None:
        """Give the k log-probabilities the other side's for other tokens."""
        (name, given), *more = self.arrays.items()
        if more or other is None or top.shape != given.shape:
            raise ValueError(
                f"{self.path}: {TOP!r} go with one array of their shape, "
                f"{tuple(top.shape)}, beside a model"
            )
        rows, count = len(self.tokens), given.size(-1)
        filled = other.keep([other.normalised])[other.normalised].clone()
        given, top = (a.view(rows, -1, count) for a in (given, top))
        # an engine may leave out the last position, which predicts no token
        filled[:, : given.size(1)].scatter_(-1, top.long(), given.double())
        self.arrays = {name: filled.to(given.dtype)}

    def _written_part(self, array: Tensor, others: Sequence[Value]) -> Tensor:
        """Return scores without what llm.c leaves above the diagonal."""
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
        """Whether an array holds a value of each layer."""
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
        """A recording has no weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the stored gradients by the names of their weights."""
        return self.stored

    def record(self) -> None:
        """A recording has what it has."""

    def visit(
        self,
        numbers: Iterable[int],
        visitor: Callable[[int, Tensor], None],
        size: float = 0.0,
    ) -> None:
        """Hand out arrays with their numbers."""
        for number in sorted(numbers):
            visitor(number, self.tensors[number])


def _is_inner(array: Tensor, other: Side | None) -> bool:
    """Whether an array may be a value on the other side's way to scores."""
    known = digest(array)
    return other is not None and any(
        value.digest.distance(known) < RECORDED_SCORES_SHARE * known.size
        for value in other.values
        if value.number not in (other.last, other.normalised)
        and not value.digest.trivial
    )


def _log_probs(scores: Tensor) -> tuple[Tensor, str]:
    """Return log-probabilities, and what made them of the scores, or ""."""
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
    """Return an array and the one behind it that it is computed from."""
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
    """Return what is seen of a function written in arrays: its scores."""
    name, variant = subject.name, own(subject)
    try:
        with isolated(subject.seed):
            scores = variant.scores(tokens)
    except ModelRaised as error:
        raise ValueError(f"{name}: {error}") from error.__cause__
    if _kinds_of(variant.model) == {"float32"}:
        scores = scores.float()  # NumPy's float64 of float32 weights
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
    """Return the arrays that a program dumps, without its scores."""
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
    """Return the floating dtypes of the arrays that a function refers to."""
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
        ValueError: in one line, for a file that is none.
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
    """Return the arrays of an engine's file of hidden states, one a layer.

    It has token_ids, and hidden_states (tokens, layers, width): the layers
    that the engine was asked for, in their order.
    """
    ids, states = (arrays.get(name) for name in ENGINES)
    if ids is None or states is None or TOKENS in arrays:
        return arrays
    ids = ids.flatten()
    if states.ndim != 3 or len(states) != len(ids):
        raise ValueError(
            f"hidden_states of shape {tuple(states.shape)} with "
            f"{len(ids)} token_ids: (tokens, layers, width) is expected"
        )
    found = {TOKENS: ids.unsqueeze(0)}
    for i in range(states.size(1)):
        found[f"hidden_states {i}"] = states[:, i].unsqueeze(0).contiguous()
    others = {n: a for n, a in arrays.items() if n not in ENGINES}
    return found | others


@one_run
def record_values(
    model: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None,
    path: Path | str,
    *,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = False,
    statistics: bool = False,
) -> int:
    """Write each value that a model computes to a file.

    Names are "0012 layer 1 block.py:43 ln_1": number, layer, line, and the
    module or the operation; the metadata has file, line, operation, layer
    and shape of each as JSON. "tokens" are the ids.

    Args:
        model: as for diff_by_value.
        tokens: ids; None: 16 drawn from a seed.
        path: of the .safetensors.
        vocab_size: number of tokens, where the model does not declare it.
        dtype: to run in; None: that of the model's weights.
        gradients: whether to add "gradient NAME" of each parameter, of the
            mean cross-entropy of the next tokens.
        statistics: whether to write of each value its mean, deviation, least,
            most and norm alone, for models too large to keep.

    Returns:
        How many values were written.

    Raises:
        ValueError: for tokens that do not fit, a model that raises, or a
            model in which no value can be recorded.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"a recording is a .safetensors, got {path}")
    if statistics and gradients:
        raise ValueError("statistics have no gradients")
    given = None if tokens is None else as_tokens(tokens)
    subject = subject_of(model, size_of(given), vocab_size)
    given = fitting(given, subject.block_size, subject.vocab_size)
    weights = own(subject).parameters
    kinds = [w.dtype for w in weights if w.is_floating_point()]
    dtype = dtype or next(iter(kinds), torch.float32)
    side = Side.run(subject, given, dtype, of_value if statistics else None)
    # a norm may be too large for float16
    stored = torch.promote_types(dtype, torch.bfloat16)
    lines = [
        value
        for value in side.values
        if not value.place.inside or value.number == side.last
    ]
    names = {v.number: f"{v.number:04} {name_of(v.place)}" for v in lines}
    arrays: dict[str, Tensor] = {}

    def keep(number: int, value: Tensor) -> None:
        found = real(value.detach().cpu()).clone().contiguous()
        arrays[names[number]] = found.to(stored) if statistics else found

    side.visit(names, keep)
    metadata = {
        names[value.number]: json.dumps(
            value.place.to_dict() | {"shape": list(value.shape)}
        )
        for value in lines
    }
    for name, gradient in (side.gradients() if gradients else {}).items():
        arrays[GRADIENT + name] = gradient.contiguous()
    arrays[TOKENS] = given.contiguous()
    with replace_file(path) as beside:
        save_file(arrays, beside, metadata)
    return len(lines)
