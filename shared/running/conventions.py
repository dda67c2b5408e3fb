"""How models decode with a cache: conventions found by signature and state.

A way is found where a second piece of text is answered and its scores depend
on the piece before; whether the scores are right is the check's own matter.
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
    """Where a cache is, and who calls the model with it."""

    INSIDE = "kept in the model"
    ARGUMENT = "an argument of the model's call"
    STEP = "an argument of the user's step(model, tokens, cache)"
    DECODE = "init_cache and decode"
    WITH_CACHE = "init_cache and decode of with_cache()"
    LINES = "the lines reset and feed"


class Empty(Enum):
    """What an argument takes as the cache of a first piece, in words."""

    LEFT_OUT = ""
    CALL = "={}()"  # what a maker returns
    CALLS = "=[{}(), ...]"  # one of a maker for each layer
    NONES = "=[None, ...]"  # for each layer
    LIST = "=[]"
    DICT = "={{}}"

    @property
    def guessed(self) -> bool:
        """Whether nothing in the model names it."""
        return self not in (Empty.LEFT_OUT, Empty.CALL)


@dataclass(frozen=True)
class First:
    """The cache of a first piece: its kind, and the name of what makes it."""

    empty: Empty
    maker: str = ""


@dataclass(frozen=True)
class Way:
    """What tells one way to decode from the others of a model.

    Ways are compared as records; only `says` has words.
    """

    setup: Setup = Setup.INSIDE
    cache: str | None = None  # the argument that takes it
    first: First = First(Empty.LEFT_OUT)
    methods: tuple[str, ...] = ()  # called before a text: resets, then setups
    step: str = ""  # the call of the user's step
    flags: tuple[str, ...] = ()  # arguments that are True at each call
    position: str | None = None  # the argument that says where a piece starts
    # a position that may be given as well: right where it is, wrong if not
    omitted: str | None = field(default=None, compare=False)

    def without_position(self) -> "Way":
        """Return the way in which the model counts positions itself."""
        return replace(self, position=None)

    @property
    def makes_room(self) -> bool:
        """Whether setup_caches() makes room: a mask goes over all of it."""
        return "setup_caches" in (*self.methods, self.first.maker)

    @property
    def says(self) -> str:
        """The words of a report."""
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
    """One way to call a model piece by piece."""

    subject: Subject
    way: Way
    begin: Callable[[int], Any]  # return an empty cache for so many rows
    function: Callable[..., Any]  # takes the pieces
    # each call takes all of the text so far, and a later piece is one token
    whole: bool = False
    strong: bool = True  # it is for a cache, or for nothing
    apart: bool = True  # texts do not share a state
    # the user's maker of its cache, if no dtype is given to it
    without_dtype: str = ""
    # starts again by resets, without setups; None where there are not both
    reset: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        """Read the signature."""
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
        """The words of a report."""
        return self.way.says

    @property
    def cache(self) -> str | None:
        """The argument that takes the cache; None: it is inside."""
        return self.way.cache

    @property
    def position(self) -> str | None:
        """The argument that says where a piece starts."""
        return self.way.position

    @property
    def flags(self) -> dict[str, Any]:
        """The arguments that ask for a cache, with their values."""
        return dict.fromkeys(self.way.flags, True)

    @property
    def optional(self) -> list[str]:
        """The positions that a model counts itself where none are given."""
        taken = [name for name in POSITIONS if name in self.arguments]
        return [name for name in taken if self.arguments[name].default is None]


class Text:
    """A text that is decoded piece by piece."""

    def __init__(self, convention: Convention, rows: int):
        self.convention = convention
        self.seen = torch.empty(rows, 0, dtype=torch.long)
        self.returned = False  # whether a cache came back
        with during("for an empty cache"), torch.no_grad():
            self.cache = convention.begin(rows)

    def feed(self, piece: Tensor, **mask: Tensor) -> Any:
        """Return the model's answer to the next piece."""
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
            # a mask over all the room that was made
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
        """Find the cache in an answer; without one, the given one is kept."""
        name, old = self.convention.cache, self.cache
        found = answer.get(name) if isinstance(answer, Mapping) else None
        found = getattr(answer, name or "", found)
        if found is None and name is not None:
            if isinstance(answer, Mapping):
                answer = [*answer.values()]
            parts = answer[1:] if isinstance(answer, list | tuple) else []
            parts = [part for part in parts if _may_be_cache(part)]
            # a hidden state, a tensor, may come with a cache of several
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
    """Yield the ways to decode that a model's signature offers."""
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
    flags = tuple(n for n in own.arguments if FLAG.fullmatch(n))
    if "return_intermediates" in flags:
        flags = ("return_intermediates",)
    starts = [n for n in STARTS if n in own.arguments]
    # positions that a model with a cache may also count itself
    positions = [*starts, None, *(n for n in POSITIONS if n in own.arguments)]
    caches = [
        (name, _first_caches(own, name))
        for name in (*STRONG, *WEAK)
        if name in own.arguments
    ]
    user, without_dtype = subject.make_cache, ""
    if user is not None:
        title = getattr(user, "__name__", type(user).__name__)
        taken = [*inspect.signature(user).parameters]
        of_step = [n for n in taken[2:] if n in (*STRONG, *WEAK)]
        if len(taken) > 2 and taken[1] in TOKENS:
            of_step = of_step or taken[2:3]
        if taken[:1] == ["model"] and of_step:
            yield replace(  # step(model, tokens, cache), None at first
                own,
                function=partial(user, model),
                way=Way(
                    Setup.STEP,
                    of_step[0],
                    step=f"{title}({', '.join(taken)})",
                ),
            )
        else:
            named = [name for name, _ in caches]
            named = named or [n for n in own.arguments if CACHED.search(n)]
            named = named or _unknown_arguments(own)
            made = First(Empty.CALL, title)
            caches = [(n, {made: user}) for n in named] + caches
            without_dtype = "" if {*taken} & {"dtype", "model"} else title

    def reset(rows: int, maker: Callable[..., Any]) -> Any:
        for method in resets.values():
            fill(method, subject, model, rows)
        return fill(maker, subject, model, rows)

    for name, makers in caches:
        memory = "mem" in name  # a flag of mems is one of no other cache
        used = tuple(n for n in flags if memory or "mems" not in n)
        for position, (first, maker) in product(positions, makers.items()):
            sure = name in STRONG and not first.empty.guessed
            yield replace(
                own,
                way=Way(
                    Setup.ARGUMENT, name, first, flags=used, position=position
                ),
                begin=partial(reset, maker=maker),
                whole="return_intermediates" in used,
                strong=sure or maker is user,
                without_dtype=without_dtype if maker is user else "",
            )

    made_for = 0  # rows

    def begin(rows: int) -> None:
        nonlocal made_for
        anew, made_for = bool(setups) and rows != made_for, rows
        if subject.keeps_state or anew or not (setups or resets or starts):
            start_again()
        for method in resets.values():
            with suppress(Exception) if setups else nullcontext():
                fill(method, subject, model, rows)  # there may be no room yet
        for method in setups.values():
            fill(method, subject, model, rows)

    # what clears a cache may give its room back
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


def _by_lines(subject: Subject, program: Program) -> Iterator[Convention]:
    """Yield the lines reset and feed, where a program says that it has them.

    It has one cache, and its texts come one after another.
    """
    if program.has_cache:
        yield Convention(
            subject,
            Way(Setup.LINES),
            lambda rows: program.reset(),
            program.feed,
            apart=False,
        )


def _unknown_arguments(own: Convention) -> list[str]:
    """Return the arguments of a call whose names say nothing of their use."""
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


def _by_two_methods(subject: Subject, model: Any) -> Iterator[Convention]:
    """Yield init_cache and decode, of the model or of its with_cache()."""
    readers = [(Setup.DECODE, model)]
    with suppress(Exception):  # it may be another thing of the model's
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


def _first_caches(
    own: Convention, name: str
) -> dict[First, Callable[..., Any]]:
    """Return what may make the cache of a first piece.

    Arguments are filled by their names: see `fill`.
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


# --- What makes an empty cache: methods, classes, their arguments ------------

# Methods that return an empty cache, make room inside, or empty it again.
WORD = r"_(kv_?)?(cache|caches|state|states|hidden|memory|mems)"
MAKES = re.compile(rf"(init|initial|make|new|create|empty|get){WORD}")
SETUP = re.compile(rf"(setup|set|init|enable|allocate|build|make){WORD}")
RESET = re.compile(rf"(reset|clear|empty|flush){WORD}")
EMPTIES = re.compile(r"reset\w*|clear(_cache)?|empty|flush")  # of a cache
# Sizes that a cache is made with, by the names of arguments and attributes.
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
    """A cache that the caller makes, and counts the tokens of."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None


def methods_of(model: Any) -> dict[str, Any]:
    """Return a model's own methods that have to do with a cache."""
    found = {}
    for name in sorted(set(dir(type(model))) - set(dir(nn.Module))):
        if any(p.fullmatch(name) for p in (MAKES, SETUP, RESET)):
            with suppress(Exception):  # a property of the user's
                found[name] = getattr(model, name)
    return {name: m for name, m in found.items() if inspect.ismethod(m)}


def emptier_of(cache: Any) -> Any:
    """Return the method by which a cache of the user's own class is emptied.

    None where it has none, or several, or one that takes something.
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
    """Return what makes a cache: methods, and classes of the model's files.

    The classes may be defined or imported there. The names are those that its
    forward sees: the module itself may be put away (see `Alone`).
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
    """Return how many layers a model has: as it says, or its longest list."""
    said = declared(model, SIZE_NAMES[2])
    modules = model.modules() if isinstance(model, nn.Module) else ()
    lists = [len(m) for m in modules if isinstance(m, nn.ModuleList)]
    return said.value if said else max(lists, default=1)


def fill(function: Any, subject: Subject, model: Any, rows: int) -> Any:
    """Call what makes a cache, each argument filled by its name.

    Raises:
        ValueError: for an argument without a default that has no known name.
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
