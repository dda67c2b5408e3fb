"""Find how a model decodes with a cache, from its signature and state.

A convention is a way to pass a text to a model piece by piece. The kit accepts
a convention if the model's scores of a second piece depend on the first piece.
check_cache then tests whether these scores are right. Names of arguments that
take a cache, a position or a flag are in model/inputs.py. A test model for a
new convention belongs in tests/zoo/cache_conventions.py.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..validation import is_installed
from .context import during
from .model.calling import MASK, TOKENS, maker_of, tensors_in, token_argument
from .model.inputs import CACHED, FLAG, NUMBERS, STARTS, STRONG, WEAK
from .model.sizes import CONFIGS, declared
from .program import Program
from .subject import Subject

POSITIONS = ("cache_position", "position_ids", "positions")


class Setup(Enum):
    """Where a model keeps its cache, and how it is called with that cache."""

    INSIDE = "kept in the model"
    ARGUMENT = "an argument of the model's call"
    STEP = "an argument of the user's step(model, tokens, cache)"
    DECODE = "init_cache and decode"
    WITH_CACHE = "init_cache and decode of with_cache()"
    LINES = "the lines reset and feed"


class Empty(Enum):
    """The empty cache that a call gets with the first piece of a text."""

    LEFT_OUT = ""
    CALL = "={}()"  # result of a maker, which makes an empty cache
    CALLS = "=[{}(), ...]"  # a maker's result for each layer
    NONES = "=[None, ...]"  # None for each layer
    LIST = "=[]"
    DICT = "={{}}"

    @property
    def guessed(self) -> bool:
        """Return whether the kit only guesses that the model takes it."""
        return self not in (Empty.LEFT_OUT, Empty.CALL)


@dataclass(frozen=True)
class First:
    """The cache given with a text's first piece, and its maker's name."""

    empty: Empty
    maker: str = ""


@dataclass(frozen=True)
class Way:
    """A record that distinguishes a convention from a model's others.

    The code compares these records; `says` describes one for a report.
    """

    setup: Setup = Setup.INSIDE
    cache: str | None = None  # the argument that takes the cache
    first: First = First(Empty.LEFT_OUT)
    methods: tuple[str, ...] = ()  # called before each text: resets, set-ups
    step: str = ""  # the user's step function, as a call in words
    flags: tuple[str, ...] = ()  # arguments that are True at each call
    position: str | None = None  # the argument for a piece's first position
    # an optional position argument, without which the model decodes wrongly
    omitted: str | None = field(default=None, compare=False)

    def without_position(self) -> "Way":
        """Return the convention in which the model itself counts positions."""
        return replace(self, position=None)

    @property
    def makes_room(self) -> bool:
        """Return whether masks must cover all memory of setup_caches()."""
        return "setup_caches" in (*self.methods, self.first.maker)

    @property
    def says(self) -> str:
        """Return the convention in words, for a report."""
        if self.setup is Setup.ARGUMENT:
            words = self.first.empty.value.format(self.first.maker)
            parts = [f"{self.cache}{words}"]
        elif self.setup is Setup.STEP:
            parts = [self.step]
        elif self.setup is Setup.INSIDE:
            parts = [f"{name}()" for name in self.methods]
        else:
            parts = [self.setup.value]
        said = " and ".join([*parts, *(f"{f}=True" for f in self.flags)])
        if self.omitted is not None:
            said += f", {self.omitted} left out; right where given"
        at = [] if self.position is None else [self.position]
        return " and ".join(filter(None, [said, *at]))


@dataclass
class Convention:
    """A way to give a model a text piece by piece, with its cache."""

    subject: Subject
    way: Way
    begin: Callable[[int], Any]  # returns an empty cache for a number of rows
    function: Callable[..., Any]  # the function that is called with the pieces
    # whether each call gets the whole text so far; then later pieces are
    # single tokens
    whole: bool = False
    strong: bool = True  # whether its arguments can only be for a cache
    apart: bool = True  # whether each text has its own cache
    # name of the user's function that makes the cache, if it takes no dtype
    without_dtype: str = ""
    # begins a text by the model's reset methods only, without its set-up
    # methods; None if the model lacks either kind of method
    reset: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        """Derive from the function's signature how to call it."""
        self.arguments, name = token_argument(self.function)
        required = [
            n for n, p in self.arguments.items() if p.default is p.empty
        ]
        self.caller = replace(
            self.subject.caller,
            method=None,
            token_name=name,
            given={n: make for n in required if (make := maker_of(n))},
            compared=False,
            shifts=False,
        )

    @property
    def says(self) -> str:
        """Return the convention in words, for a report."""
        return self.way.says

    @property
    def cache(self) -> str | None:
        """Return the argument for the cache; None if the model holds it."""
        return self.way.cache

    @property
    def position(self) -> str | None:
        """Return the argument that takes the first position of a piece."""
        return self.way.position

    @property
    def flags(self) -> dict[str, Any]:
        """Return the arguments that request a cache, with their values."""
        return dict.fromkeys(self.way.flags, True)

    @property
    def optional(self) -> list[str]:
        """Return the position arguments that a call may leave out."""
        taken = [name for name in POSITIONS if name in self.arguments]
        return [name for name in taken if self.arguments[name].default is None]


class Text:
    """A text that is decoded piece by piece."""

    def __init__(self, convention: Convention, rows: int):
        self.convention = convention
        self.seen = torch.empty(rows, 0, dtype=torch.long)
        self.returned = False  # whether the model has returned a cache
        with during("for an empty cache"), torch.no_grad():
            self.cache = convention.begin(rows)

    def feed(self, piece: Tensor, **mask: Tensor) -> Any:
        """Feed the next piece to the model, and return its answer."""
        way, start = self.convention, self.seen.size(1)
        self.seen = torch.cat([self.seen.to(piece.device), piece], 1)
        tokens = self.seen.clone() if way.whole else piece.clone()
        given: dict[str, Any] = way.flags | mask
        if way.position in NUMBERS:
            given[way.position] = start
        elif way.position is not None:
            at = torch.arange(start, self.seen.size(1), device=tokens.device)
            if way.position == "position_ids":
                at = at.expand(len(tokens), -1).clone()
            given[way.position] = at
        if "mask" in way.arguments and way.way.makes_room:
            # the mask must cover the whole memory reserved for the cache
            room = torch.arange(way.subject.block_size, device=tokens.device)
            seen = room <= room[start : self.seen.size(1)].unsqueeze(1)
            given["mask"] = seen.expand(len(tokens), -1, -1)
        if way.cache is not None:
            given[way.cache] = self.cache
        what = f"decoding, on tokens of shape {tuple(piece.shape)} after "
        with during(f"{what}{start}"), torch.no_grad():
            answer = way.caller.call(way.function, tokens, given)
        self._keep(answer)
        if isinstance(self.cache, InferenceParams):
            self.cache.seqlen_offset += piece.size(1)
        return answer

    def _keep(self, answer: Any) -> None:
        """Keep the cache that an answer returns, or else the given one."""
        name, old = self.convention.cache, self.cache
        found = answer.get(name) if isinstance(answer, Mapping) else None
        found = getattr(answer, name or "", found)
        if found is None and name is not None:
            if isinstance(answer, Mapping):
                answer = [*answer.values()]
            parts = answer[1:] if isinstance(answer, list | tuple) else []
            parts = [part for part in parts if _may_be_cache(part)]
            # a hidden state, a tensor, may be returned next to a cache
            several = [p for p in parts if not isinstance(p, Tensor)]
            found = (several or parts or [None])[-1]
            kinds = list | tuple if isinstance(old, list) else type(old)
            if old is not None and not isinstance(found, kinds):
                found = None
        self.returned |= found is not None
        self.cache = old if found is None else found


def _may_be_cache(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.dim() > 1
    return part is not None and not isinstance(part, int | float | str)


def sizes_of(cache: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a cache."""
    return [tuple(tensor.shape) for _, tensor in tensors_in(cache)]


def conventions(
    subject: Subject, model: Any, start_again: Callable[[], None]
) -> Iterator[Convention]:
    """Yield the conventions (ways to decode) that a model's signature offers.

    Each generator below yields the conventions of one or two Setups (places of
    the cache). The caller tries them in this order.
    """
    if isinstance(model, Program):
        yield from _by_lines(subject, model)
        return
    yield from _by_two_methods(subject, model)
    methods = methods_of(model)
    resets, setups = (
        {n: m for n, m in methods.items() if pattern.fullmatch(n)}
        for pattern in (RESET, SETUP)
    )
    own = Convention(
        subject, Way(), lambda rows: None, model, apart=not resets
    )
    yield from _by_step(own)
    yield from _by_argument(own, resets)
    yield from _by_state(own, resets, setups, start_again)


def _by_lines(subject: Subject, program: Program) -> Iterator[Convention]:
    """Yield the convention of a program that declares reset and feed.

    A program has one cache, which it uses for one text after another.
    """
    if program.has_cache:
        yield Convention(
            subject,
            Way(Setup.LINES),
            lambda rows: program.reset(),
            program.feed,
            apart=False,
        )


def _by_two_methods(subject: Subject, model: Any) -> Iterator[Convention]:
    """Yield the convention of init_cache and decode, or of with_cache()."""
    readers = [(Setup.DECODE, model)]
    with suppress(Exception):  # with_cache() may do something else
        readers.append((Setup.WITH_CACHE, model.with_cache()))
    for setup, reader in readers:
        both: list[Any] = [
            getattr(reader, name, 0) for name in ("init_cache", "decode")
        ]
        if all(map(callable, both)):
            way = Convention(subject, Way(setup), *both)
            name = way.caller.token_name
            names = [n for n in way.arguments if n not in (MASK, name)]
            if len(names) > (name is None):
                yield replace(way, way=Way(setup, names[name is None]))


def _by_step(own: Convention) -> Iterator[Convention]:
    """Yield the convention of a user's step(model, tokens, cache).

    With the first piece of a text, the step gets None as its cache.
    """
    user = own.subject.make_cache
    if user is not None and (name := _cache_of_step(user)):
        taken = ", ".join(inspect.signature(user).parameters)
        yield replace(
            own,
            function=partial(user, own.function),
            way=Way(Setup.STEP, name, step=f"{_title(user)}({taken})"),
        )


def _cache_of_step(user: Callable[..., Any]) -> str:
    """Return a step's cache argument; "" if `user` only makes a cache."""
    taken = [*inspect.signature(user).parameters]
    if taken[:1] != ["model"]:
        return ""
    names = [n for n in taken[2:] if n in (*STRONG, *WEAK)]
    if len(taken) > 2 and taken[1] in TOKENS:
        names.append(taken[2])  # after the tokens: the cache, of any name
    return names[0] if names else ""


def _title(user: Callable[..., Any]) -> str:
    return getattr(user, "__name__", type(user).__name__)


def _by_argument(
    own: Convention, resets: dict[str, Any]
) -> Iterator[Convention]:
    """Yield the conventions in which an argument of the call takes the cache.

    `resets` are the model's methods that empty its cache before each text.
    """
    subject, model, user = own.subject, own.function, own.subject.make_cache

    def begin(rows: int, maker: Callable[..., Any]) -> Any:
        for method in resets.values():
            fill(method, subject, model, rows)
        return fill(maker, subject, model, rows)

    # arguments for positions, even if the model also counts positions itself
    taken = [name for name in POSITIONS if name in own.arguments]
    positions = [*_starts_of(own), None, *taken]
    flags = _flags_of(own)
    for name, makers in _caches_of(own):
        memory = "mem" in name  # flags with "mems" in them are for these only
        used = tuple(n for n in flags if memory or "mems" not in n)
        for position, (first, maker) in product(positions, makers.items()):
            sure = name in STRONG and not first.empty.guessed
            yield replace(
                own,
                way=Way(
                    Setup.ARGUMENT, name, first, flags=used, position=position
                ),
                begin=partial(begin, maker=maker),
                whole="return_intermediates" in used,
                strong=sure or maker is user,
                without_dtype=_without_dtype(user) if maker is user else "",
            )


def _flags_of(own: Convention) -> tuple[str, ...]:
    """Return the arguments that request a cache."""
    flags = tuple(n for n in own.arguments if FLAG.fullmatch(n))
    alone = "return_intermediates"
    return (alone,) if alone in flags else flags


def _starts_of(own: Convention) -> list[str]:
    """Return the arguments that take the first position of a piece."""
    return [name for name in STARTS if name in own.arguments]


def _caches_of(
    own: Convention,
) -> list[tuple[str, dict[First, Callable[..., Any]]]]:
    """Return the arguments that take a cache, each with makers of a cache.

    The user's maker comes first. If no argument has a known name, the user's
    maker is tried for any argument that could be a cache.
    """
    caches = [
        (name, _first_caches(own, name))
        for name in (*STRONG, *WEAK)
        if name in own.arguments
    ]
    user = own.subject.make_cache
    if user is None or _cache_of_step(user):
        return caches
    names = [name for name, _ in caches]
    names = names or [n for n in own.arguments if CACHED.search(n)]
    names = names or _unknown_arguments(own)
    made = First(Empty.CALL, _title(user))
    return [(name, {made: user}) for name in names] + caches


def _without_dtype(user: Callable[..., Any]) -> str:
    """Return the name of a user's maker that takes no dtype, otherwise ""."""
    takes = inspect.signature(user).parameters.keys() & {"dtype", "model"}
    return "" if takes else _title(user)


def _unknown_arguments(own: Convention) -> list[str]:
    """Return the arguments of a call whose names do not show their use."""
    known = {
        *(*TOKENS, own.caller.target_name, MASK, "mask"),
        *(*POSITIONS, *STARTS, *own.caller.given),
    }
    none = None, inspect.Parameter.empty
    return [
        name
        for name, p in own.arguments.items()
        if name not in known and p.default in none
    ]


def _first_caches(
    own: Convention, name: str
) -> dict[First, Callable[..., Any]]:
    """Return possible makers of the empty cache for a text's first piece.

    `fill` calls them, and finds their arguments by name.
    """
    subject, model = own.subject, own.function
    found: dict[First, Callable[..., Any]] = {}
    if own.arguments[name].default is not inspect.Parameter.empty:
        found[First(Empty.LEFT_OUT)] = lambda: None
    layers = layers_of(model)
    for title, maker in makers_of(model).items():
        found[First(Empty.CALL, title)] = maker
        if isinstance(maker, type):
            found[First(Empty.CALLS, title)] = lambda rows, maker=maker: [
                fill(maker, subject, model, rows) for _ in range(layers)
            ]
    if name == "inference_params":
        found[First(Empty.CALL, "InferenceParams")] = InferenceParams
    found[First(Empty.NONES)] = lambda: [None] * layers
    return found | {
        First(Empty.LIST): lambda: [],
        First(Empty.DICT): lambda: {},
    }


def _by_state(
    own: Convention,
    resets: dict[str, Any],
    setups: dict[str, Any],
    start_again: Callable[[], None],
) -> Iterator[Convention]:
    """Yield the conventions in which the model itself holds the cache.

    Before each text the model's methods `resets` are called, then `setups`.
    """
    subject, model = own.subject, own.function
    starts, flags = _starts_of(own), _flags_of(own)
    made_for = 0  # number of rows that the cache was last set up for

    def begin(rows: int) -> None:
        nonlocal made_for
        anew, made_for = bool(setups) and rows != made_for, rows
        if subject.keeps_state or anew or not (setups or resets or starts):
            start_again()
        for method in resets.values():
            with suppress(Exception) if setups else nullcontext():
                fill(method, subject, model, rows)  # may raise before set-up
        for method in setups.values():
            fill(method, subject, model, rows)

    # methods named clear... are left out: they may free the cache's memory
    again = {n: m for n, m in resets.items() if n.startswith("reset")}

    def reset_only(rows: int) -> None:
        for method in again.values():
            fill(method, subject, model, rows)

    called = (*resets, *setups)
    for position in (*starts, None):
        if position or flags:
            yield replace(
                own,
                way=Way(methods=called, flags=flags, position=position),
                begin=begin,
                strong=bool(called),
                apart=False,
                reset=reset_only if again and setups else None,
            )


# --- Makers of an empty cache: methods, classes, their arguments ------------

# Names of methods that return an empty cache, reserve its memory or clear it.
WORD = r"_(kv_?)?(cache|caches|state|states|hidden|memory|mems)"
MAKES = re.compile(rf"(init|initial|make|new|create|empty|get){WORD}")
SETUP = re.compile(rf"(setup|set|init|enable|allocate|build|make){WORD}")
RESET = re.compile(rf"(reset|clear|empty|flush){WORD}")
# names of a cache's own method that empties it
EMPTIES = re.compile(r"reset\w*|clear(_cache)?|empty|flush")
# Names of arguments and attributes from which a cache gets its sizes.
SIZE_NAMES = (
    ("n_kv_head", "n_kv_heads", "num_kv_heads", "num_key_value_heads"),
    ("n_head", "n_heads", "num_heads", "heads", "num_attention_heads"),
    ("n_layer", "n_layers", "num_layers", "layers", "num_hidden_layers"),
    ("n_embd", "d_model", "dim", "emb_dim", "hidden_size", "embed_dim"),
)
ROW_NAMES = ("batch", "batch_size", "max_batch_size", "bsz", "rows")
LENGTH_NAMES = (
    *("length", "seq_len", "max_seq_len", "max_seq_length", "max_length"),
    *("max_seqlen", "decoder_max_seq_len"),
)
WIDTH_NAMES = ("size", "head_dim", "head_size", "d_head", "d_k", "dim_head")


@dataclass
class InferenceParams:
    """A cache that the caller makes, and whose tokens the caller counts."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None


def methods_of(model: Any) -> dict[str, Any]:
    """Return a model's methods that concern a cache."""
    found = {}
    for name in sorted(set(dir(type(model))) - set(dir(nn.Module))):
        if any(p.fullmatch(name) for p in (MAKES, SETUP, RESET)):
            with suppress(Exception):  # a property of the class may raise
                found[name] = getattr(model, name)
    return {name: m for name, m in found.items() if inspect.ismethod(m)}


def emptier_of(cache: Any) -> Any:
    """Return the method that empties a cache of the user's class.

    Return None if it has no such method, several, or one that takes arguments.
    """
    kind = type(cache)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or is_installed(file):
        return None
    names = [n for n in dir(kind) if EMPTIES.fullmatch(n)]
    method = getattr(cache, names[0]) if len(names) == 1 else None
    if not inspect.ismethod(method) or inspect.signature(method).parameters:
        return None
    return method


def makers_of(model: Any) -> dict[str, Any]:
    """Return makers of a cache: methods, and classes of the model's files.

    The classes are found in the globals of forward, even if `Alone`
    (shared/importing.py) has removed the module itself.
    """
    found = methods_of(model).items()
    makers = {name: m for name, m in found if MAKES.fullmatch(name)}
    for kind in reversed(type(model).__mro__):
        if not kind.__module__.startswith("torch."):
            names = getattr(vars(kind).get("forward"), "__globals__", {})
            makers |= {
                name: value
                for name, value in names.items()
                if isinstance(value, type) and "cache" in name.lower()
            }
    return makers


def layers_of(model: Any) -> int:
    """Return the number of layers: declared, or the longest ModuleList's."""
    said = declared(model, SIZE_NAMES[2])
    modules = model.modules() if isinstance(model, nn.Module) else ()
    lists = [len(m) for m in modules if isinstance(m, nn.ModuleList)]
    return said.value if said else max(lists, default=1)


def fill(function: Any, subject: Subject, model: Any, rows: int) -> Any:
    """Call a maker of a cache, with each argument filled by its name.

    Raises:
        ValueError: for an argument of unknown name without a default.
    """
    weights: Any = getattr(model, "parameters", list)()
    weight = next(iter(weights), torch.empty(0))
    known: dict[str, Any] = dict.fromkeys(ROW_NAMES, rows)
    known |= dict.fromkeys(LENGTH_NAMES, subject.block_size)
    known |= {"dtype": weight.dtype, "device": weight.device}
    known |= dict.fromkeys(SIZE_NAMES[2], layers_of(model)) | {"model": model}
    known |= {c: getattr(model, c) for c in CONFIGS if hasattr(model, c)}
    if heads := declared(model, SIZE_NAMES[1]):
        pairs = declared(model, SIZE_NAMES[0]) or heads
        known |= dict.fromkeys((*SIZE_NAMES[0], *SIZE_NAMES[1]), pairs.value)
        if width := declared(model, SIZE_NAMES[3]):
            known |= dict.fromkeys(WIDTH_NAMES, width.value // heads.value)
        if own := declared(model, WIDTH_NAMES[1:]):
            known |= dict.fromkeys(WIDTH_NAMES, own.value)
    given = {}
    for name, p in inspect.signature(function).parameters.items():
        if name in known and (
            p.default is p.empty
            or name in (*ROW_NAMES, *LENGTH_NAMES, "dtype")
        ):
            given[name] = known[name]
        elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            raise ValueError(
                f"{getattr(function, '__name__', function)} takes {name}, "
                f"whose value is not known"
            )
    return function(**given)
