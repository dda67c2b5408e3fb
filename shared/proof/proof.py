"""A proof: the runs that it covers, its assumptions, what is open."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..notebooks import as_html
from ..running.context import PYTHON
from ..running.places import Place
from ..running.tokens import runs
from ..running.variant import Variant
from ..running.ways import AUTOCAST, INFERENCE, TRAIN, Case
from ..validation import dtype_name
from .codes import FREE
from .shadows import Notes
from .sources import CLOCK, SYSTEM, TORCHS_SEED

MODES = {False: "eval", True: "train"}
HALF = 0.5  # of a mask's number: as long as scores stay below
DECLARED = "no operation lets a token reach a score that {} forbids"
CLAIMS = {
    "positions": "no operation lets a later token reach an earlier score",
    "rows": "no operation lets one row reach another",
    "documents": "no operation lets one document reach another",
}

DRAWN = {
    PYTHON: "Python's random numbers",
    "NumPy": "NumPy's random numbers",
    SYSTEM: "the system's random numbers",
    CLOCK: "readings of the clock",
    TORCHS_SEED: "branches on torch's seed",
}
# The other ways that were followed, as a reader needs to know them.
ALSO: tuple[tuple[Callable[[Case], bool], str], ...] = (
    (lambda c: c.rows > 1, "with two rows"),
    (lambda c: c.visible is not None and not c.given, "with attention masks"),
    (lambda c: c.targets and not (c.given or c.losses), "with targets"),
    (
        lambda c: c.losses,
        "in train mode by the loss alone that targets give",
    ),
    (lambda c: c.grad and not c.training, "with gradients recorded"),
    (
        lambda c: c.training and not (c.grad or c.losses),
        "in train mode without gradients",
    ),
    (lambda c: c.pieces is not None, "in two pieces with a cache"),
    (lambda c: c.own and not c.given, "in the model's own call"),
    (lambda c: c.within == INFERENCE.within, "in inference mode"),
    (lambda c: c.within == AUTOCAST.within, "under autocast"),
    (lambda c: c.frozen, "with frozen weights"),
    (lambda c: c.crowd, "in a call of more than 4,096 tokens"),
    (lambda c: c.dtype == torch.bfloat16, "in bfloat16"),
    (lambda c: c.dtype == torch.float16, "in float16"),
    (lambda c: c.dtype == torch.float64, "in float64"),
)


@dataclass(frozen=True)
class Open:
    """One thing that keeps a proof open, and where it is."""

    sentence: str
    place: Place | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what a reader of JSON needs."""
        found: dict[str, Any] = {"sentence": self.sentence}
        if self.place:
            found |= {"file": self.place.path, "line": self.place.line}
            found |= {"operation": self.place.op, "code": self.place.code}
        return found


def leaves_torch(place: Place, name: str = "") -> Open:
    """Return what is open where numbers leave torch."""
    how = " as sparse ones" if "sparse" in name else ""
    return Open(f"numbers leave torch at {place}{how}", place)


@dataclass
class Proof:
    """A proof: what it covers, and what it rests on.

    Attributes:
        holds: whether no token reaches a score that it must not reach, on
            condition that `conditions` hold.
        lengths: at which, in eval and train mode.
        modes: ways of running; those after eval and train mode were tried
            at some of the lengths.
        assumptions: what it rests on, a sentence each.
        open: what was not understood, or lets a token through.
        culprit: the line that should have stopped such a token, if known.
        way: it between the lines before and after, in words.
        in_chunks: whether it shows in chunks of a padded text, where two
            texts show only a line after it.
        at: the way of running and the length that are open.
        position: whose score a token reaches then, if known.
        conditions: what a text may break, a sentence each.
        order: "positions" or "rows".
        sees: the name of the declaration of who may see whom; "": causal.
        left_out: ways of running that the time did not allow.
        given: arguments that were given, in words.
        never_given: those that no way of running gives.
        declared: those that the user says are never given.
        states: of the model, from which it was followed: "as built", "after
            8 calls in train mode".
        cases: ways of running that were followed to the end.
        main: those of them that each length is proved in.
        program: "eager", and "compiled" where that was compared with it.
        dtype: of the model as it is built.
        device: on which it ran.
        weights: whether it holds for any weights: a function shows none.
        rows: numbers of rows of the batches that were followed.
        worn: the model after calls, in the way of running that is open.
    """

    holds: bool = True
    lengths: list[int] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    culprit: Place | None = None
    way: str = ""
    in_chunks: bool = False
    at: tuple[Case, int] | None = None
    position: int | None = None
    conditions: list[str] = field(default_factory=list)
    order: str = "positions"
    sees: str = ""
    left_out: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    never_given: list[str] = field(default_factory=list)
    declared: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    main: tuple[Case, ...] = ()
    program: list[str] = field(default_factory=lambda: ["eager"])
    dtype: str = ""
    device: str = "cpu"
    weights: bool = True
    rows: list[int] = field(default_factory=list)
    worn: Variant | None = None

    @property
    def proved(self) -> bool:
        """Whether it holds for all weights and texts, without a condition."""
        return self.holds and not self.conditions

    @property
    def conditional(self) -> bool:
        """Whether it holds, but not for each text."""
        return self.holds and bool(self.conditions)

    @property
    def partial(self) -> bool:
        """Whether the time did not allow some way of running."""
        return bool(self.left_out)

    @property
    def complete(self) -> bool:
        """Whether it is proved, and no case or argument is left out."""
        return self.proved and not (self.partial or self.never_given)

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.holds:
            covers = "; ".join(covered_in_words(self.covers))
            lines += [f"covers: {covers}", f"rests on: {self._rests_on()}"]
        return "\n".join(lines)

    @property
    def covers(self) -> dict[str, Any]:
        """Return the runs that it is about, as plain data."""
        cases = self.cases
        dtypes = [dtype_name(c.dtype) for c in cases if c.dtype is not None]
        return {
            "program": self.program,
            "states": self.states,
            "calls": [
                case.how
                for case in cases
                if case.how and case != TRAIN and not case.copy
                if case.rows == 1 or case.crowd
            ],
            "lengths": self.lengths,
            "modes": modes_of(cases),
            "dtypes": [*dict.fromkeys(filter(None, [self.dtype, *dtypes]))],
            "device": self.device,
            "rows": sorted({*self.rows, *(c.rows for c in cases)}),
        }

    def _rests_on(self) -> str:
        grounds = ["numbers are finite", *self.conditions, *self.assumptions]
        return "; ".join(grounds)

    @property
    def sentence(self) -> str:
        """Return what is proved, or what is open, in one paragraph."""
        text = ""
        if self.never_given:
            text = f"never given: {', '.join(self.never_given)}; "
        if self.declared:
            text += f"said to be never given: {', '.join(self.declared)}; "
        return text + self._proved()

    def _proved(self) -> str:
        if not self.holds:
            return f"not proved: {'; '.join(o.sentence for o in self.open)}"
        others = [case for case in self.cases if case not in self.main]
        also = [text for is_so, text in ALSO if any(map(is_so, others))]
        if self.given and self.order == "positions":
            also.append(f"with {_few(self.given, 9)}")
        words = " and ".join(modes_of(c for c in self.cases if c in self.main))
        text = "proved under a condition " if self.conditions else "proved "
        text += f"at {lengths_in_words(self.lengths)}, in {words} mode"
        text += " and three rows" * (self.order == "rows")
        free = ["weights"] * self.weights + ["tokens"] * self.proved
        claim = DECLARED.format(self.sees) if self.sees else CLAIMS[self.order]
        text += f": {claim}"
        text += f", whatever the {' and '.join(free)}" if free else ""
        if self.conditions:
            text += f", as long as {' and '.join(self.conditions)}"
        if also:
            text += f"; at some of them also {', '.join(also)}"
        if self.left_out:
            text += f"; no time for {_few(self.left_out)}"
        if self.assumptions:
            text += f"; as long as {' and '.join(self.assumptions)}"
        return text

    __repr__ = __str__  # in a notebook, and below `assert proof, proof`

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = "proved conditional conditions left_out given never_given "
        names += "lengths modes assumptions states rows covers"
        return {n: getattr(self, n) for n in names.split()} | {
            "sees": self.sees or "causal",
            "rests_on": [*self.conditions, *self.assumptions],
            "declared_never_given": self.declared,
            "open": [o.to_dict() for o in self.open],
        }

    def leave_open(self, *what: Open) -> None:
        """Say what keeps the proof open."""
        self.holds = False
        self.open += what

    def keep(self, name: str) -> None:
        """Assume that a value which calls change, and no tensor, stays."""
        self.assumptions.append(f"{name}, which calls change, stays as it is")

    def keep_unread(self, name: str, kind: str) -> None:
        """Assume that an object whose state cannot be read holds no token."""
        self.assumptions.append(
            f"{name} ({kind}), which cannot be read, stays as it is"
        )

    def keep_extra_state(self, name: str) -> None:
        """Assume that the extra state of a module stays."""
        self.assumptions.append(
            f"the extra state of {name or 'the model'}, which a checkpoint "
            f"sets, stays as it is"
        )

    def keep_saved(self, constants: list[tuple[str, Tensor]]) -> None:
        """Rest on saved numbers, which hide later tokens: they stay.

        Buffers are assumed to; of parameters it is a condition.
        """
        names = [name for name, _ in constants]
        zero = not any(bool(value.any()) for _, value in constants)
        how = "stays 0" if zero else "stays as it is"
        text = f"{_few(names, 1)}, which a checkpoint sets, {how}"
        weights = any(isinstance(v, nn.Parameter) for _, v in constants)
        (self.conditions if weights else self.assumptions).append(text)

    def depend_on_draws(self, name: str) -> None:
        """Make the proof conditional on draws that torch does not make."""
        what = DRAWN.get(name, f"the random numbers of {name}")
        on = self.assumptions if name == CLOCK else self.conditions
        on.append(f"{what} take the same path")

    def keep_catching(self, name: str) -> None:
        """Assume that code which catches exceptions goes on as it did."""
        self.assumptions.append(
            f"{name}, which catches exceptions, takes the same path"
        )

    def rest_on(self, notes: Notes, is_module: bool) -> None:
        """Say what the proof rests on."""
        say = self.assumptions.append
        for place, number in notes.masks.items():
            say(f"scores stay below {-number * HALF:.2g} in size ({place})")
        if notes.zeros:
            say(f"the factor 0 stays 0 ({_few(notes.zeros)})")
        on = self.conditions.append
        if notes.routed:
            on(f"tokens are routed as in this text ({_few(notes.routed)})")
        if notes.padding:
            where = _few(notes.padding)
            on(f"no token hides all that a position sees there ({where})")
        reads = [p for p in notes.reads if p not in notes.routed]
        tokens = [p for p in reads if notes.reads[p] > FREE]
        others = [p for p in reads if p not in tokens]
        if tokens:
            on(f"texts take the same path ({_few(tokens)})")
        if others:
            say(
                f"weights and random numbers take the same path "
                f"({_few(others)})"
            )
        self.weights = is_module
        if not is_module:
            say("the weights are these, as a function does not show its own")


def modes_of(cases: Iterable[Case]) -> list[str]:
    """Return the modes in which some cases run: eval, train."""
    return [MODES[mode] for mode in sorted({c.training for c in cases})]


def covered_in_words(covers: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a certificate covers, a clause each."""
    states = " and ".join(covers["states"])
    programs = " and the ".join(covers["program"])
    yield f"the {programs} program" + f" {states}" * bool(states)
    modes = " and ".join(covers["modes"])
    yield f"{lengths_in_words(covers['lengths'])} in {modes} mode"
    if covers["calls"]:
        yield f"at a few lengths {', '.join(covers['calls'])}"
    first, *others = covers["dtypes"] or ["the model's own dtype"]
    also = f", at a few lengths {', '.join(others)}" if others else ""
    yield f"{first}{also}, on {covers['device']}"
    rows = ", ".join(map(str, covers["rows"]))
    yield f"batches of {rows} row{'s' * (rows != '1')}"


def _few(what: Iterable[Place | str], most: int = 3) -> str:
    texts = list(map(str, what))
    more = f" and {len(texts) - most} others" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def lengths_in_words(lengths: Iterable[int]) -> str:
    """Return lengths in words: "lengths 1 to 16, 33 and 1,024"."""
    found = runs(lengths)
    texts = [" to ".join(f"{n:,}" for n in run) for run in found]
    if len(texts) < 2:
        return f"length{'s' * (len(found[0]) > 1)} {texts[0]}"
    return f"lengths {', '.join(texts[:-1])} and {texts[-1]}"
