"""How models decode with a cache: conventions found by signature and state.

A way is found where a second piece of text is answered and its scores depend
on the piece before; whether the scores are right is the check's own matter.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..context import during
from ..model.calling import MASK, TARGETS, maker_of, tensors_in, token_argument
from ..model.inputs import CACHED, FLAG, NUMBERS, STARTS, STRONG, WEAK
from ..subject import Subject
from .makers import (
    MAKES,
    RESET,
    SETUP,
    InferenceParams,
    classes_of,
    fill,
    layers_of,
    methods_of,
)

POSITIONS = ("cache_position", "position_ids", "positions")


@dataclass
class Convention:
    """One way to call a model piece by piece."""

    subject: Subject
    model: Any
    start_again: Callable[[], None]  # put back what the model held at first
    says: str  # in a report
    begin: Callable[[int], Any]  # return an empty cache for so many rows
    function: Callable[..., Any]  # takes the pieces
    cache: str | None = None  # the argument that takes it; None: inside
    position: str | None = None  # the argument that says where a piece starts
    flags: dict[str, Any] = field(default_factory=dict)
    whole: bool = False  # each call takes all of the text so far
    strong: bool = True  # it is for a cache, or for nothing
    apart: bool = True  # each text has a state of its own

    def __post_init__(self) -> None:
        """Read the signature."""
        self.arguments, self.token_name = token_argument(self.function)
        self.required = {
            name: make
            for name, p in self.arguments.items()
            if p.default is p.empty and (make := maker_of(name))
        }

    @property
    def takes_mask(self) -> bool:
        """Whether rows may begin with padding."""
        return MASK in self.arguments

    @property
    def may_leave_out(self) -> bool:
        """Whether a model that counts positions itself was given them."""
        name = self.position or ""
        return name in POSITIONS and self.arguments[name].default is None

    @property
    def room_is_masked(self) -> bool:
        """Whether a call takes a mask over all the room that was made."""
        return "mask" in self.arguments and "setup_caches()" in self.says

    @property
    def one_at_a_time(self) -> bool:
        """Whether a later piece is one token, by signature."""
        return self.whole and "cache_age" not in self.arguments


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
        given: dict[str, Any] = {
            n: make(tokens) for n, make in way.required.items()
        }
        given |= way.flags | mask
        if way.position in NUMBERS:
            given[way.position] = start
        elif way.position is not None:
            at = torch.arange(start, self.seen.size(1), device=tokens.device)
            given[way.position] = (
                at.expand(len(tokens), -1).clone()
                if way.position == "position_ids"
                else at
            )
        if way.room_is_masked:
            room = torch.arange(way.subject.block_size, device=tokens.device)
            end = self.seen.size(1)
            given["mask"] = (room <= room[start:end].unsqueeze(1)).expand(
                len(tokens), -1, -1
            )
        if way.cache is not None:
            given[way.cache] = self.cache
        if way.whole and start and not way.one_at_a_time:
            given["cache_age"] = piece.size(1)
        caller = way.subject.caller
        tokens = caller.handed(caller.arranged(tokens))
        for name in given:
            if name == MASK or TARGETS.fullmatch(name):
                given[name] = caller.arranged(given[name])
        given = {name: caller.handed(value) for name, value in given.items()}
        what = f"decoding, on tokens of shape {tuple(piece.shape)} after "
        with during(f"{what}{start}"), torch.no_grad():
            if way.token_name is None:
                answer = way.function(tokens, **given)
            else:
                answer = way.function(**{way.token_name: tokens}, **given)
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
            named = isinstance(answer, Mapping)
            values = [*answer.values()] if named else answer
            parts = [*values] if isinstance(values, list | tuple) else []
            parts = [part for part in parts[1:] if _may_be_cache(part)]
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
    readers = [("", model)]
    with suppress(Exception):  # it may be another thing of the model's
        readers.append((" of with_cache()", model.with_cache()))
    for words, reader in readers:
        both = (getattr(reader, name, 0) for name in ("init_cache", "decode"))
        if not all(map(callable, both)):
            continue
        arguments, token_name = token_argument(reader.decode)
        names = [name for name in arguments if name not in (MASK, token_name)]
        if len(names) > (token_name is None):
            yield Convention(
                subject,
                model,
                start_again,
                f"init_cache and decode{words}",
                reader.init_cache,
                reader.decode,
                names[token_name is None],
            )
    arguments, _ = token_argument(model)
    flags = {n: True for n in arguments if FLAG.fullmatch(n)}
    if "return_intermediates" in flags:
        flags = {"return_intermediates": True}
    methods = methods_of(model)
    resets = {n: m for n, m in methods.items() if RESET.fullmatch(n)}
    own = Convention(
        subject, model, start_again, "", _nothing, model, apart=not resets
    )
    if subject.make_cache is not None:
        yield from _named(own, arguments, flags)
    starts = [n for n in STARTS if n in arguments]
    # positions that a model with a cache may also count itself
    places = [*starts, None, *(n for n in POSITIONS if n in arguments)]
    for name in (*STRONG, *WEAK):
        if name in arguments:
            used = {n: v for n, v in flags.items() if _suits(n, name)}
            for position in places:
                each = replace(own, cache=name, flags=used, position=position)
                yield from _in_the_call(each, methods, resets)
    setups = {n: m for n, m in methods.items() if SETUP.fullmatch(n)}

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

    for position in (*starts, None):
        if position or flags:
            yield replace(
                own,
                says=_words(
                    [f"{n}()" for n in (*resets, *setups)], flags, position
                ),
                begin=begin,
                flags=flags,
                position=position,
                strong=bool(setups or resets),
                apart=False,
            )


def _nothing(rows: int) -> None:
    """Begin without a cache: the first piece makes one."""


def _named(
    own: Convention, arguments: Iterable[str], flags: dict[str, Any]
) -> Iterator[Convention]:
    """Yield ways with a cache that the user's function makes.

    Or with the user's own step: step(model, tokens, cache), whose cache is
    None at first, and which returns the scores and the cache.
    """
    subject, model = own.subject, own.model
    maker = subject.make_cache
    assert maker is not None
    title = getattr(maker, "__name__", type(maker).__name__)
    first, *others = [*inspect.signature(maker).parameters] or [""]
    of_step = [n for n in others[1:] if n in (*STRONG, *WEAK)]
    if first == "model" and of_step:
        yield replace(
            own,
            function=partial(maker, model),
            cache=of_step[0],
            says=f"{title}({', '.join((first, *others))})",
        )
        return
    known = {*STRONG, *WEAK} & {*arguments}
    for name in known or {n for n in arguments if CACHED.search(n)}:
        for position in [None, *(n for n in STARTS if n in arguments)]:
            yield replace(
                own,
                cache=name,
                says=_words([f"{name}={title}()"], flags, position),
                begin=lambda rows: fill(maker, subject, model, rows),
                flags=flags,
                position=position,
            )


def _words(
    parts: list[str], flags: Iterable[str], position: str | None
) -> str:
    """Return what a report calls a way."""
    flagged = [f"{flag}=True" for flag in flags]
    return " and ".join([*parts, *flagged, *([position] if position else [])])


def _suits(flag: str, cache: str) -> bool:
    """Whether a flag asks for a cache of this name, and not for another."""
    return "mem" in cache or "mems" not in flag


def _in_the_call(
    own: Convention, methods: dict[str, Any], resets: dict[str, Any]
) -> Iterator[Convention]:
    """Yield ways with a cache in the call, by what the first piece gets."""
    subject, model, name = own.subject, own.model, own.cache
    assert name is not None

    def way(
        words: str, make: Callable[[int], Any], strong: bool, **more: Any
    ) -> Convention:
        def begin(rows: int) -> Any:
            for method in resets.values():
                fill(method, subject, model, rows)
            return make(rows)

        says = _words([name + words], own.flags, own.position)
        strong = strong and name in STRONG
        return replace(own, says=says, begin=begin, strong=strong, **more)

    if own.arguments[name].default is not inspect.Parameter.empty:
        whole = "return_intermediates" in own.flags
        yield way("", _nothing, True, whole=whole)
    made = {n: m for n, m in methods.items() if MAKES.fullmatch(n)}
    made |= classes_of(model)
    if name == "inference_params":
        made[InferenceParams.__name__] = InferenceParams
    layers = layers_of(model)
    for title, maker in made.items():

        def make(rows: int, maker: Any = maker) -> Any:
            return fill(maker, subject, model, rows)

        yield way(f"={title}()", make, True)
        if isinstance(maker, type):

            def each(rows: int, make: Any = make) -> list[Any]:
                return [make(rows) for _ in range(layers)]

            yield way(f"=[{title}(), ...]", each, False)
    yield way("=[None, ...]", lambda rows: [None] * layers, False)
    yield way("=[]", lambda rows: [], False)
    yield way("={}", lambda rows: {}, False)
