"""Read sizes that a model declares, and lengths in its code."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from numbers import Integral
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn

from ..errors import OtherVocabulary, UnknownSize, UnusableModel
from ..places import lines_of_code
from ..program import Program

VOCABULARY = (
    *("vocab_size", "n_vocab", "vocabulary_size", "num_tokens"),
    "padded_vocab_size",
)
# Names of the longest length. block_size comes last: in a config with another
# of these names, it is the size of attention's tiles.
LENGTH = (
    *("max_position_embeddings", "n_positions", "max_target_positions"),
    *("n_ctx", "context_length", "max_seq_len", "max_seq_length"),
    *("max_seqlen", "max_sequence_length", "max_len", "seq_len", "seq_length"),
    *("sequence_len", "sequence_length", "ctx_len", "block_size"),
)
GIVEN_WINDOW = "given_window"  # attribute that holds the user's window
WINDOW = (
    *(
        GIVEN_WINDOW,
        "window",
        "window_size",
        "sliding_window",
        "sliding_window_size",
    ),
    *("attention_window", "attention_window_size", "local_window"),
    *("local_window_size", "local_attn_window_size", "receptive_field"),
    "attention_chunk_size",
)
# Names of tile sizes: lengths at which a kernel may take another path.
TILES = (
    *("kernel_size", "conv_kernel", "chunk_size", "block_length"),
    "block_size",
)
PADDING = ("pad_token_id", "padding_idx", "pad_id", "pad_idx", "padding_id")
SPECIAL = re.compile(r"(token|[be]os|eot|sep|cls|mask|pad)\w*_(id|ind?e?x)$")
IDS_IN_CODE = 32  # most integers in code that are tried as special ids
ROWS = ("max_batch_size", "max_bsz")
CONFIGS = ("config", "cfg", "args", "params", "hparams")


@dataclass(frozen=True)
class Declared:
    """A size that the model declares, with the attribute's name."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class Lengths:
    """The lengths that a model accepts: the multiples of `step` in a range."""

    least: int
    step: int
    longest: int

    def accepts(self, time: int) -> bool:
        """Return whether the model accepts a length."""
        inside = self.least <= time <= self.longest
        return inside and time % self.step == 0

    def fit(self, time: int) -> int:
        """Return the longest accepted length up to `time`, else the least."""
        time = min(time, self.longest)
        return max(time - time % self.step, self.least)

    def __str__(self) -> str:
        if self.step == 1:
            return f"lengths from {self.least} to {self.longest}"
        return f"multiples of {self.step} from {self.least} to {self.longest}"


def choose_sizes(
    model: object,
    name: str,
    vocab_size: int | None,
    block_size: int | None,
) -> tuple[int, int, list[str]]:
    """Return vocab_size and block_size, as given or declared; and notes.

    Raises:
        UnusableModel: if a size is neither given nor declared, or a given
            vocab_size contradicts the model's.
        ValueError: if a size is not a positive number.
    """
    for what, size in (("vocab_size", vocab_size), ("block_size", block_size)):
        if size is not None and not _is_size(size):
            raise ValueError(f"{what} must be a positive number, got {size!r}")
    known, longest = declared(model, VOCABULARY), declared(model, LENGTH)
    vocab = vocab_size or (known.value if known else None)
    block = block_size or (longest.value if longest else None)
    if vocab is None or block is None:
        missing = {}
        if vocab is None:
            missing["vocabulary"] = "vocab_size (in the shell --vocab-size)"
        if block is None:
            missing["longest sequence"] = "block_size (--block-size)"
        names = VOCABULARY[0] if vocab is None else LENGTH[-1]
        raise UnknownSize(
            f"{name} does not say its {' and '.join(missing)}: give "
            f"{' and '.join(missing.values())}; the model, its "
            f"{', '.join(CONFIGS)}, and its attributes that are a dataclass, "
            f"a dict or a namespace have no {names} or similar"
        )
    if known is not None and known.value != vocab:
        raise OtherVocabulary(
            f"vocab_size={vocab} was given", f"{name} has {known}"
        )
    if vocab < 2:
        raise UnusableModel(
            f"vocab_size must be at least 2 for one token to differ from "
            f"another, got {vocab}"
        )
    notes = []
    if longest is not None and longest.value < block:
        notes.append(
            f"block_size={block} was given; the model declares {longest}, "
            f"which is used"
        )
        block = longest.value
    return int(vocab), int(block), notes


def declared(model: object, names: tuple[str, ...]) -> Declared | None:
    """Return the first size under these names that a model or config has."""
    sizes = all_declared(model, names)
    return sizes[0] if sizes else None


def all_declared(model: object, names: tuple[str, ...]) -> list[Declared]:
    """Return all sizes under these names that a model or config has."""
    places = [model, *_configs(model)]
    found = []
    for name in names:
        for place in places:
            value = _get(place, name)
            if isinstance(value, list | tuple):  # a size per layer or side
                several = [*filter(_is_size, value)]
                value = max(several, default=None)
                if names is LENGTH and several:  # lengths of nested patches
                    value = math.prod(several)
            if _is_size(value):
                found.append(Declared(name, int(value)))
                break
    return found


def _configs(model: object) -> list[object]:
    """Return a model's config objects, known by their names or kinds.

    Known kinds are dicts, namespaces and dataclasses.
    """
    named = [_get(model, config) for config in CONFIGS]
    held = {
        name: value
        for name, value in getattr(model, "__dict__", {}).items()
        if not name.startswith("_") and name not in CONFIGS
    }
    kinds = Mapping | SimpleNamespace
    others = [
        value
        for value in held.values()
        if isinstance(value, kinds) or is_dataclass(value)
    ]
    return named + others


def _is_size(value: Any) -> bool:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return int(value) > 0


def _get(place: object, name: str) -> Any:
    try:
        if isinstance(place, Mapping):
            return place.get(name)
        return getattr(place, name, None)
    except Exception:  # a property of the user's may raise anything
        return None


def _embeddings(model: object) -> list[nn.Embedding]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [m for m in modules if isinstance(m, nn.Embedding)]


def padding_ids(model: object) -> list[int]:
    """Return the padding ids that a model or its tables declare."""
    held = [table.padding_idx for table in _embeddings(model)]
    said = [size.value for size in all_declared(model, PADDING)]
    return sorted({i for i in (*held, *said) if i is not None})


def special_ids(model: object, vocab_size: int) -> list[int]:
    """Return the ids that a model may treat differently.

    They are the first and the last id, the ids that the model or its config
    names, and a few integers in the model's code.
    """
    named = [*padding_ids(model), 0, vocab_size - 1]
    for place in (model, *(_get(model, config) for config in CONFIGS)):
        for name, value in getattr(place, "__dict__", {}).items():
            if type(value) is int and SPECIAL.search(name):
                named.append(value)
    named += numbers_in_code(model)[:IDS_IN_CODE]
    return sorted({*named} & {*range(vocab_size)})


def before_first_position(model: object, count: int) -> int:
    """Return how many rows of a position table come before position 0."""
    tables = [t for t in _embeddings(model) if t.num_embeddings == count]
    at = [t.padding_idx for t in tables if t.padding_idx is not None]
    return max(at, default=-1) + 1


def has_position_table(model: object, count: int, vocab_size: int) -> bool:
    """Return whether a module has a table with this many positions.

    Without such a table, a declared limit may be only the training length. The
    table is as wide as the token table, unlike a table of biases by distance.
    """
    if not isinstance(model, nn.Module):
        return False
    found = _embeddings(model)
    rows = range(count, count + 3)  # a table may have rows for padding
    widths = {m.embedding_dim for m in found if m.num_embeddings not in rows}
    tables = [m.weight for m in found if m.num_embeddings != vocab_size]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tables += [t for name, t in tensors if "pos" in name or "wpe" in name]
    return any(
        n in rows and (not widths or widths & {*shape[:i], *shape[i + 1 :]})
        for shape in (tuple(table.shape) for table in tables)
        for i, n in enumerate(shape)
    )


def numbers_in_code(model: object) -> list[int]:
    """Return the integers in a model's code, in order.

    They come from its functions, from functions of the same file that these
    call, from the file's globals, and from attributes of its modules.
    """
    if isinstance(model, Program):
        return []  # a program's code is not Python
    modules = model.modules() if isinstance(model, nn.Module) else [model]
    found: list[object] = []
    seen: set[int] = set()
    for part in modules:
        kinds = {k: k.__module__.split(".")[0] for k in type(part).__mro__}
        own = [k for k in kinds if kinds[k] not in ("torch", "builtins")]
        if own:
            held = getattr(part, "__dict__", {})
            found += [v for n, v in held.items() if n not in VOCABULARY]
        functions = [f for kind in own for f in vars(kind).values()]
        functions.append(part)
        while functions:
            function = functions.pop()
            if callable(function):
                function = inspect.unwrap(function)
            if isinstance(function, FunctionType) and id(function) not in seen:
                seen.add(id(function))
                values = [*_constants(function.__code__)]
                for name in function.__code__.co_names:
                    value = function.__globals__.get(name)
                    home = getattr(value, "__module__", None)
                    if home in (None, function.__module__):
                        values.append(value)
                functions += values
                found += values
    numbers = [value for value in found if type(value) is int]
    return [number for number in dict.fromkeys(numbers) if number > 0]


def _constants(code: CodeType) -> Iterator[object]:
    """Yield the constants in a code object and in functions inside it."""
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _constants(value)
        else:
            yield value


# --- Branches for longer texts -----------------------------------------------

BRANCHES = (ast.If, ast.IfExp, ast.While)
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
A_LENGTH = (
    r"\b([tTnNLS]|time|seq\w*|\w*len(gth)?|position\w*)\b|\.(size|shape)\b"
)


def branches_on_length(
    model: object, longest: int
) -> Iterator[tuple[int, str, int, str]]:
    """Yield where modules compare a length with an integer over `longest`.

    Each place has the integer, the file, the line and the comparison. Branches
    that only raise are left out.
    """
    for part in model.modules() if isinstance(model, nn.Module) else ():
        kinds = [k for k in type(part).__mro__ if "forward" in vars(k)]
        own = [k for k in kinds if not k.__module__.startswith("torch.")]
        for method in (m for kind in own for m in vars(kind).values()):
            if isinstance(method, FunctionType):
                file = method.__code__.co_filename
                for line, test in _comparisons(method):
                    if (number := _number(part, test)) > longest:
                        yield number, file, line, ast.unparse(test)


@cache
def _comparisons(method: FunctionType) -> list[tuple[int, ast.Compare]]:
    """Return the comparisons on which a method's branches depend."""
    code = inspect.unwrap(method).__code__
    lines, first = lines_of_code(code), code.co_firstlineno
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError:
        return []
    nodes = (node for node in ast.walk(tree) if isinstance(node, BRANCHES))
    return [
        (first + part.lineno - 1, part)
        for node in nodes
        if not (
            isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        )
        for part in ast.walk(node.test)
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ORDER)
    ]


def _number(part: nn.Module, test: ast.Compare) -> int:
    """Return the integer that a test compares a length with, or 0.

    The integer is a literal, or an attribute of the module.
    """
    sides = [test.left, test.comparators[0]]
    for side, other in (sides, sides[::-1]):
        value = getattr(side, "value", None)
        if isinstance(side, ast.Attribute):
            own = ast.unparse(side.value) == "self"
            value = vars(part).get(side.attr) if own else None
        if type(value) is int and re.search(A_LENGTH, ast.unparse(other)):
            return value
    return 0
