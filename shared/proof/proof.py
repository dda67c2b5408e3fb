"""State a proof: the runs that it covers, its assumptions, what is open."""

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
from .sources import (
    ADDRESSES,
    CLOCK,
    ENVIRONMENT,
    SYSTEM,
    TORCHS_SEED,
    Results,
    Source,
)

MODES = {False: "eval", True: "train"}
FINITE = (
    "numbers are finite, and scores smaller than 2e+36, or than 3e+04 after "
    "a mask in float16"
)
HALF = 0.5  # a mask hides scores smaller than this share of its value
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
    ADDRESSES: "addresses and the numbers of processes and threads",
    ENVIRONMENT: "branches on environment variables",
}
UNLIKE = CLOCK, ADDRESSES, ENVIRONMENT  # sources that no seed changes
# Tests that recognise a case, with its name in the sentence of a proof.
ALSO: tuple[tuple[Callable[[Case], bool], str], ...] = (
    (lambda c: c.rows > 1, "with two rows"),
    (lambda c: c.visible is not None and not c.given, "with attention masks"),
    (lambda c: c.targets and not (c.given or c.losses), "with targets"),
    (
        lambda c: c.losses,
        "in train mode by the loss that targets give",
    ),
    (lambda c: c.grad and not c.training, "with gradients recorded"),
    (
        lambda c: c.training and not (c.grad or c.losses),
        "in train mode without gradients",
    ),
    (lambda c: c.pieces is not None, "in two pieces with a cache"),
    (lambda c: c.own and not c.given, "in the model's own call"),
    (lambda c: c.within == INFERENCE.within, "in inference mode"),
    (lambda c: c.within == AUTOCAST.within, "under autocast in bfloat16"),
    (lambda c: c.frozen, "with frozen weights"),
    (lambda c: c.crowd, "in a call of more than 4,096 tokens"),
    (lambda c: c.dtype == torch.bfloat16, "in bfloat16"),
    (lambda c: c.dtype == torch.float16, "in float16"),
    (lambda c: c.dtype == torch.float64, "in float64"),
)


@dataclass(frozen=True)
class Open:
    """A reason why a proof is open, and the line of code that causes it."""

    sentence: str
    place: Place | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the reason as a dict, ready for JSON."""
        found: dict[str, Any] = {"sentence": self.sentence}
        if self.place:
            found |= {"file": self.place.path, "line": self.place.line}
            found |= {"operation": self.place.op, "code": self.place.code}
        return found


def leaves_torch(place: Place, name: str = "") -> Open:
    """Return a reason for an open proof: numbers leave torch at a place."""
    how = " as sparse ones" if "sparse" in name else ""
    return Open(f"numbers leave torch at {place}{how}", place)


@dataclass
class Proof:
    """A proof: the runs that it covers, its assumptions and open reasons.

    `prove` in prover.py fills the fields: `_take` adds proved cases, and
    `_take_open` adds the open case. `_prove_after` sets `worn`. `rest_on`
    below adds to `forks`. `prove_positions` in claims.py may change `at`. If a
    proof is open, its check uses these fields to find texts that show the
    leak.

    Attributes:
        holds: whether no token reaches a forbidden score, provided that the
            `conditions` hold.
        lengths: the lengths that are proved in eval and train mode.
        modes: names of the proved cases. Only eval and train mode are proved
            at all lengths.
        assumptions: a sentence for each assumption.
        open: the parts that were not understood, or that let a token through.
        culprit: the line that should have stopped such a token, if known.
        way: the culprit, with the lines before and after it, in words.
        in_chunks: whether the leak is in the chunks of a padded text. If so,
            two texts begin to differ only at a line after the culprit.
        at: the case and the length that are open; None if the length does not
            matter.
        position: a position with a score that a token reaches, if known.
        conditions: a sentence for each condition that some text may not meet.
        order: what must be independent: "positions" or "rows".
        sees: the name of the declaration of visibility; "" means causal.
        left_out: cases for which time ran out.
        given: the arguments that the cases give, in words.
        never_given: arguments that no case gives.
        without: other arguments that no case gives, such as caches and
            embeddings.
        scores: the path of the scores in the model's output, or the name of a
            function that returns them; "" if the output is a tensor.
        declared: arguments that the user declares as never given.
        states: the states of the model at the start, such as "as built" or
            "after 8 calls in train mode".
        cases: cases that were followed to the end.
        main: the cases in which each length is proved.
        program: "eager", and "compiled" if the compiled model was compared.
        dtype: dtype of the model as built.
        device: device on which the model ran.
        weights: whether the proof is for any weights. It is not if the model
            is a function, because then its weights are not known.
        rows: for each batch that was followed, how many rows it had.
        worn: the model after some calls, if the open case runs after them.
        forks: the lines where tokens choose the path of the code.
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
    without: list[str] = field(default_factory=list)
    scores: str = ""
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
    forks: list[Place] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        """Return whether the proof holds for all weights and texts."""
        return self.holds and not self.conditions

    @property
    def conditional(self) -> bool:
        """Return whether the proof holds, but only under a condition."""
        return self.holds and bool(self.conditions)

    @property
    def partial(self) -> bool:
        """Return whether time ran out before all cases were proved."""
        return bool(self.left_out)

    @property
    def complete(self) -> bool:
        """Return whether all is proved, for every case and argument."""
        return self.proved and not (self.partial or self.never_given)

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.holds:
            covers = "; ".join(covered_in_words(self.covers))
            lines += [f"covers: {covers}", f"rests on: {self._rests_on()}"]
        return "\n".join(lines)

    @property
    def covers(self) -> dict[str, Any]:
        """Return the covered runs as plain data.

        In all runs the ids have one dtype and layout, and all parts of the
        model are in one mode. "frozen" lists the frozen weights.
        """
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
            "scores": self.scores,
            "without": self.without,
            "lengths": self.lengths,
            "modes": modes_of(cases),
            "dtypes": [*dict.fromkeys(filter(None, [self.dtype, *dtypes]))],
            "device": self.device,
            "rows": sorted({*self.rows, *(c.rows for c in cases)}),
            "ids": "int64, contiguous",
            "parts": "all in one mode",
            "frozen": [
                words
                for frozen, words in ((False, "as built"), (True, "all"))
                if frozen in {c.frozen for c in cases} and self.weights
            ],
        }

    def _rests_on(self) -> str:
        grounds = [FINITE, *self.conditions, *self.assumptions]
        return "; ".join(grounds)

    @property
    def sentence(self) -> str:
        """Return the result as one paragraph."""
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
            cases = "these cases" if self.left_out[1:] else "this case"
            text += f"; no time for {cases}: {_few(self.left_out)}"
        if self.assumptions:
            text += f"; as long as {' and '.join(self.assumptions)}"
        return text

    __repr__ = __str__  # shown in notebooks and for a failed `assert proof`

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def to_json(self) -> str:
        """Return the proof as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain data."""
        names = "proved conditional conditions left_out given never_given "
        names += "lengths modes assumptions states rows covers"
        return {n: getattr(self, n) for n in names.split()} | {
            "sees": self.sees or "causal",
            "rests_on": [*self.conditions, *self.assumptions],
            "declared_never_given": self.declared,
            "open": [o.to_dict() for o in self.open],
        }

    def leave_open(self, *what: Open) -> None:
        """Add a reason why the proof is open."""
        self.holds = False
        self.open += what

    def keep(self, name: str) -> None:
        """Assume that a value stays as it is, although calls change it."""
        self.assumptions.append(f"{name}, which calls change, stays as it is")

    def keep_unread(self, name: str, kind: str) -> None:
        """Assume that an object whose state cannot be read holds no token."""
        self.assumptions.append(
            f"{name} ({kind}), which cannot be read, stays as it is"
        )

    def keep_extra_state(self, name: str) -> None:
        """Assume that a module's extra state does not change."""
        self.assumptions.append(
            f"the extra state of {name or 'the model'}, which a checkpoint "
            f"sets, stays as it is"
        )

    def keep_saved(self, constants: list[tuple[str, Tensor]]) -> None:
        """Assume that tensors that only a checkpoint sets keep their values.

        If one is a parameter, add a condition instead of an assumption.
        """
        names = [name for name, _ in constants]
        zero = not any(bool(value.any()) for _, value in constants)
        how = "stays 0" if zero else "stays as it is"
        text = f"{_few(names, 1)}, which a checkpoint sets, {how}"
        weights = any(isinstance(v, nn.Parameter) for _, v in constants)
        (self.conditions if weights else self.assumptions).append(text)

    def depend_on_draws(self, source: Source) -> None:
        """Make the proof depend on numbers that do not come from torch."""
        if isinstance(source, Results):
            what = f"results of {source.function}()"
        else:
            what = DRAWN.get(source, f"the random numbers of {source}")
        # two calls with equal seeds get different numbers from these sources
        unlike = isinstance(source, Results) or source in UNLIKE
        on = self.assumptions if unlike else self.conditions
        on.append(f"{what} take the same path")

    def keep_catching(self, name: str) -> None:
        """Assume that code continues as before if it catches an exception."""
        self.assumptions.append(
            f"{name}, which catches exceptions, takes the same path"
        )

    def rest_on(self, notes: Notes, is_module: bool) -> None:
        """Add the assumptions and conditions that the runs have noted."""
        say = self.assumptions.append
        for place, number in notes.masks.items():
            say(f"scores stay below {-number * HALF:.2g} in size ({place})")
        if notes.zeros:
            say(f"the factor 0 stays 0 ({_few(notes.zeros)})")
        on = self.conditions.append
        if notes.routed:
            on(f"tokens are routed as in this text ({_few(notes.routed)})")
        hides_all = notes.padding | (notes.nans if notes.voids else {})
        if hides_all:
            where = _few(hides_all)
            on(
                "no token, weight or random number hides all that a position "
                f"sees, or shows what a mask hides, there ({where})"
            )
        reads = [p for p in notes.reads if p not in notes.routed]
        tokens = [p for p in reads if notes.reads[p] > FREE]
        others = [p for p in reads if p not in tokens]
        if tokens:
            on(f"texts take the same path ({_few(tokens)})")
            self.forks += tokens
        if others:
            say(
                f"weights and random numbers take the same path "
                f"({_few(others)})"
            )
        self.weights = is_module
        if not is_module:
            say("the weights are these, as a function does not show its own")


def modes_of(cases: Iterable[Case]) -> list[str]:
    """Return the modes, "eval" or "train", in which these cases run."""
    return [MODES[mode] for mode in sorted({c.training for c in cases})]


def covered_in_words(covers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the clauses that say what a certificate covers."""
    states = " and ".join(covers["states"])
    programs = " and the ".join(covers["program"])
    yield f"the {programs} program" + f" {states}" * bool(states)
    modes = " and ".join(covers["modes"])
    yield f"{lengths_in_words(covers['lengths'])} in {modes} mode"
    if covers["calls"]:
        yield f"at a few lengths {', '.join(covers['calls'])}"
    if covers["scores"]:
        yield f"the scores {covers['scores']} of an answer"
    if covers["without"]:
        yield f"calls without {', '.join(covers['without'])}"
    first, *others = covers["dtypes"] or ["the model's own dtype"]
    also = f", at a few lengths {', '.join(others)}" if others else ""
    yield f"{first}{also}, on {covers['device']}"
    rows = ", ".join(map(str, covers["rows"]))
    yield f"batches of {rows} row{'s' * (rows != '1')}"
    yield f"ids {covers['ids']}; parts {covers['parts']}"
    if covers["frozen"]:
        yield f"weights frozen {' or '.join(covers['frozen'])}"


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
