"""Checks of a scorer: what computes a perplexity, or bits per byte.

A scorer may train on what it has scored, and take documents in another order
than they stand: what counts is the order in which it scores.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, starmap
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from ..invariants.report import CheckResult, Report
from ..running.budget import DEFAULT, Budget
from ..running.context import during, few_threads, isolated, one_run, seed_all
from ..running.errors import ModelRaised, SkipCheck, UnusableModel, places_in
from ..running.model.calling import as_tensor, is_array
from ..running.operations import operations_through
from ..running.rounding import Inside, floor_of
from ..running.tokens import SPLITS, draw, others, spans, splits_to_try
from ..running.tolerances import FRESH_SCORER_BOUNDS
from ..validation import dtype_name

Text = Int[Tensor, "time"]
Score = Callable[[Text], Any]
CountBytes = Callable[[str], Iterable[float]]
K = TypeVar("K")

LN_2 = math.log(2)
LENGTH = 64  # of the longest text, by default
REPEATED_IDS = 8  # ids of the text that repeats itself
LITTLE = 0.5  # of the probability, left to all candidates but a mark
ALL = 128  # scores up to which every split is tried
SMALL = 0.5  # seconds of the first calls up to which one thread is enough
TEXTS = (  # whose bytes are counted
    *("The cat  sat, on a mat.", "one\n\ntwo\n", "naïve café", "日本語"),
    "a 🙂 b",
)
GOES_ON = "it goes on where the first one ended, or draws random numbers"
DRAWN = "dropout is on, or weights are drawn and not loaded"
NOT_SEEN = (
    "not seen: a model that was trained on the text beforehand, windows "
    "longer than the texts here (block_size)"
)
UNCOUNTED = ", bytes that are counted wrongly (bytes_per_token)"


# --- Scores ------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a text's tokens, in the order of scoring."""

    # in nats, by position and how often it was scored before
    table: dict[tuple[int, int], float]
    dtype: torch.dtype = torch.float64  # that they came in
    unplaced: int = 0  # too many or too few: their positions are not known

    @property
    def order(self) -> list[int]:
        """The positions; one that is scored twice stands there twice."""
        return [at for at, _ in self.table]

    def bound(self, share: float) -> float:
        """Return a share of the largest score, or of 1."""
        finite = filter(math.isfinite, self.table.values())
        return share * max(1.0, *map(abs, finite), 0.0)


def differences(
    one: Mapping[K, float], two: Mapping[K, float]
) -> dict[K, float]:
    """Return how far numbers are apart; from one not there, infinitely."""
    pairs = [(key, x, two.get(key, math.inf)) for key, x in one.items()]
    return {key: 0.0 if x == y else abs(x - y) for key, x, y in pairs}


def read_scores(answer: Any, time: int, bits: bool = False) -> Scores:
    """Read what a scorer returned for so many tokens.

    Args:
        answer: (time,), or (time - 1,) without the first token, or pairs
            (position, score). NaN, or 0 for the first token, is no score.
        time: number of tokens.
        bits: whether scores are in bits.

    Raises:
        UnusableModel: for anything else, and a position outside the text.
    """
    found = _numbers(answer)
    shape = () if found is None else tuple(found.shape)
    pairs = shape[1:] == (2,)
    if found is None or not (len(shape) == 1 or pairs):
        raise UnusableModel(
            f"score returned {type(answer).__name__}"
            f"{f' of shape {shape}' if shape else ''} for {time} tokens; "
            f"return a log-probability for each, or pairs (position, "
            f"log-probability)"
        )
    dtype = found.dtype if found.is_floating_point() else torch.float64
    values = found.double().tolist()
    if not pairs:
        if len(values) not in (time, time - 1):
            return Scores({}, dtype, len(values))
        values = [*enumerate(values, time - len(values))]
        if values[:1] == [(0, 0.0)]:
            del values[0]
    table, seen, unit = {}, Counter[int](), math.log(2) if bits else 1
    for at, value in values:
        if not 0 <= at < time:
            raise UnusableModel(
                f"score returned position {at:g} for {time} tokens"
            )
        if not math.isnan(value):
            table[int(at), seen[at]] = value * unit
            seen[at] += 1
    return Scores(table, dtype)


def _numbers(answer: Any) -> Tensor | None:
    """Return an answer as a tensor on the CPU; None: it holds no numbers."""
    if isinstance(answer, Tensor):
        return answer.detach().cpu()
    if is_array(answer):
        return as_tensor(answer)
    with suppress(TypeError, ValueError):
        rows = [
            [*map(float, row)] if isinstance(row, tuple | list) else float(row)
            for row in answer
        ]
        return torch.tensor(rows, dtype=torch.float64)
    return None


def rounding_of(dtype: torch.dtype) -> float:
    """Return the share of a score that is rounding in a dtype, or float32."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return floor_of(dtype) * eps


@dataclass
class Scorer:
    """Fresh scorers of a text, each with the same random numbers."""

    make_score: Callable[[], Score]  # builds one
    bits: bool = False  # whether its scores are in bits
    seed: int = 0  # of the random numbers
    unit = torch.float32  # the coarsest dtype that a scorer computes in
    budget: Budget = field(default_factory=Budget, init=False)

    def fresh(self, *texts: Text, seed: int | None = None) -> Scores:
        """Return a fresh scorer's scores of a text, behind other texts."""
        seed = self.seed if seed is None else seed
        seed_all(seed)
        with during("", "make_score"):
            score = self.make_score()
        if not callable(score):
            raise UnusableModel(
                f"make_score must return score(tokens), got "
                f"{type(score).__name__}"
            )
        for text in texts:
            self.budget.call()
            seed_all(seed)
            with during("", f"score of {len(text)} tokens"):
                answer = score(text.clone())
                answer = [*answer] if isinstance(answer, Iterator) else answer
        return read_scores(answer, len(text), self.bits)

    def meet(self, text: Text) -> Scores:
        """Return the scores of a first text, and note how it rounds.

        Raises:
            UnusableModel: where there are none; its cause is the user's own.
        """
        try:
            scores = self.fresh(text)
        except ModelRaised as error:
            raise UnusableModel(str(error)) from error.__cause__
        inside = Inside()  # compiled code runs in no mode
        with suppress(ModelRaised), operations_through(inside):
            self.fresh(text)
        # 8 bits hold weights, which are what they are
        found = {*inside.dtypes, scores.dtype, torch.float32}
        inside.dtypes = {d for d in found if torch.finfo(d).bits > 8}
        self.unit = inside.coarsest
        return scores


@dataclass
class Scoring(Scorer):
    """A scorer under its checks: the texts, and the scores of the first."""

    vocab_size: int = 0
    bos: int | None = None
    mark: int | None = None  # between documents
    kept: bool = False  # whether state is meant to stay
    time: int = LENGTH
    count: CountBytes = str.encode  # of each of a text's tokens
    noise: float = 0.0  # how far two fresh scorers are apart
    slight: float = 0.0  # how far scores moved, as rounding may

    def __post_init__(self) -> None:
        time = self.time
        self.fixed = dict[int, int]()  # the ids at some positions
        if self.mark is not None:  # three documents, the longest first
            self.fixed = dict.fromkeys((time // 2, time * 4 // 5), self.mark)
        self.marks = {*self.fixed}
        if self.bos is not None:
            self.fixed[0] = self.bos
        ids = {*range(self.vocab_size)} - {self.bos, self.mark}
        self.ids = torch.tensor(sorted(ids))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.text, self.other = self._draw(time), self._draw(time)
        repeated = self._draw(max(2, time // 4), REPEATED_IDS)
        self.repeating = repeated.repeat(5)[:time]
        for text in (self.text, self.other, self.repeating):
            for at, token in self.fixed.items():
                text[at] = token
        self.scores = self.meet(self.text)

    def _draw(self, time: int, few: int | None = None) -> Text:
        known = self.ids[:few]
        return known[draw(len(known), 1, time, self.generator)[0]]

    def change(self, text: Text, at: Iterable[int]) -> Text:
        """Return the text with other ids at these positions, but for marks."""
        chosen, text = sorted({*at} - self.fixed.keys()), text.clone()
        old = torch.searchsorted(self.ids, text[chosen])
        text[chosen] = self.ids[others(old, len(self.ids), self.generator)]
        return text

    def moved(
        self,
        base: Scores,
        *texts: Text,
        seed: int | None = None,
        bounds: int = 1,
    ) -> dict[int, float]:
        """Return how far a fresh scorer's are from the base, by position.

        What may be rounding is left out, and kept as slight.
        """
        far = differences(base.table, self.fresh(*texts, seed=seed).table)
        least = base.bound(rounding_of(self.unit)) + 4 * self.noise
        small = [size for size in far.values() if size <= bounds * least]
        self.slight = max([self.slight, *small])
        return {k[0]: n for k, n in far.items() if n > bounds * least}


def most(moved: dict[int, float]) -> str:
    """Say by how much scores moved, and where most."""
    at = max(moved, key=moved.__getitem__)
    return f"by up to {moved[at]:.2g} (position {at})"


def scorer_coverage(scoring: Scoring) -> str:
    """Each position is scored once, and none is left out."""
    time, scored = scoring.time, dict[int, Scores]()
    lengths = {1, 2, 3, 5, 16, 17, time // 2, time * 2 // 3, time - 1, time}
    for length in sorted(lengths & {*range(time + 1)}, reverse=True):
        with suppress(ModelRaised):
            scored[length] = scoring.fresh(scoring.text[:length])
    first = " but the first"
    for length, scores in scored.items():
        count = Counter(scores.order)
        words = (
            f"{scores.unplaced or count.total()} scores for {length} tokens"
        )
        if scores.unplaced:
            raise AssertionError(
                f"{words}; pairs (position, log-probability) say which"
            )
        # without context are a document's first token, or its mark
        excused = {0, *scoring.marks, *(at + 1 for at in scoring.marks)}
        bos = {0} & {*count} if scoring.bos is not None else set()
        for wrong, what in (
            ({at for at in count if count[at] > 1}, "scored twice or more"),
            ({*range(length)} - {*count} - excused, "not scored"),
            (bos, "scored, and hold bos"),
        ):
            if wrong:
                raise AssertionError(
                    f"{words}: positions {spans(wrong)} are {what}"
                )
        first = first * (not count[0])
    said = f"each position{first} is scored once, at lengths {spans(scored)}"
    raised = lengths & {*range(time)} - {*scored}
    return said + f"; lengths {spans(raised)} raised" * bool(raised)


def scorer_repeats(scoring: Scoring) -> str:
    """Two fresh scorers give a text the same scores."""
    scoring.fresh(scoring.other)
    for seed, words, why in (
        (scoring.seed, "a second scorer of make_score", GOES_ON),
        (scoring.seed + 1, "with another random seed a scorer", DRAWN),
    ):
        if moved := scoring.moved(
            scoring.scores, scoring.text, seed=seed, bounds=FRESH_SCORER_BOUNDS
        ):
            raise AssertionError(
                f"{words} gives other scores {most(moved)}: {why}"
            )
        if seed == scoring.seed:  # draws of another seed are no rounding
            scoring.noise = scoring.slight
        scoring.slight = 0.0
    return f"two fresh scorers agree, to {scoring.noise:.2g}"


def scorer_state(scoring: Scoring) -> str:
    """What one text leaves behind does not move the scores of the next."""
    text = scoring.text
    moved = scoring.moved(scoring.scores, text, scoring.other, text)
    if not moved:
        return "a text has the same scores behind another text"
    words = f"behind another text a text's scores differ {most(moved)}"
    if scoring.kept:
        return f"{words}, as declared"
    raise AssertionError(f'{words}: reset the state, or declare state="kept"')


def scorer_causality(scoring: Scoring) -> str:
    """No score that was made before a token was scored changes with it."""
    tried, leaks, where = 0, list[str](), "that of the text"
    for share, text in ((0.5, scoring.text), (1.0, scoring.repeating)):
        with scoring.budget.part("the splits", share=share):
            scores = scoring.fresh(text)
            order = scores.order
            if order != sorted(order):
                where = "not that of the text"
            count = len(order) if len(order) <= ALL else SPLITS
            for k in splits_to_try(len(order), scoring.generator, count):
                later = [at for at in order[k:] if at not in order[:k]]
                changed = scoring.change(text, later)
                if torch.equal(changed, text):
                    continue
                tried += 1
                first = dict(islice(scores.table.items(), k))
                made = replace(scores, table=first)
                if moved := scoring.moved(made, changed):
                    leaks.append(
                        f"{len(moved)} of the {k} scores made before that of "
                        f"token {later[0]} of {len(text)} move when it and "
                        f"all that is scored behind it change, {most(moved)}"
                    )
    if not tried:
        raise SkipCheck("no time, or no score that another one comes behind")
    if leaks:
        raise AssertionError(
            f"{leaks[-1]}; {len(leaks)} of {tried} splits show such a leak"
            f"; pairs (position, log-probability) say another order of scoring"
        )
    said = (
        f"no score moves with a token that is scored later: {tried} splits "
        f"of 2 texts of {scoring.time} tokens; the order of scoring is {where}"
    )
    if scoring.slight:
        said += (
            f"; scores move by up to {scoring.slight:.2g}, as rounding in "
            f"{dtype_name(scoring.unit)} may: a smaller leak is not seen"
        )
    start = scoring.text[: scoring.time // 2 + 1]
    with suppress(ModelRaised, UnusableModel), scoring.budget.overtime():
        if moved := scoring.moved(scoring.fresh(start), scoring.text):
            said += (
                f"; the first {len(start)} tokens alone have other scores "
                f"{most(moved)}: the length moves them"
            )
    return said


def scorer_normalised(scoring: Scoring) -> str:
    """The probabilities of all candidates of a token sum to 1."""
    said, rests = list[str](), list[float]()
    texts = [*[scoring.text] * 2, *[scoring.repeating] * 2]
    for parts, text, share in zip(
        (4, 3, 2, 1), texts, (0, 1, 0.6, 1), strict=True
    ):
        with scoring.budget.overtime():
            order = scoring.fresh(text).order
        order = [at for at in order if at not in scoring.fixed]
        if not order:
            continue
        at = order[int(share * (len(order) - 1))]
        found: dict[int, float] = {}
        drawn = torch.randperm(scoring.vocab_size, generator=scoring.generator)
        with scoring.budget.part("the candidates", share=1 / parts):
            for token in dict.fromkeys([*text.tolist(), *drawn.tolist()]):
                found[token] = _candidate(scoring, text, at, token)
        if found:
            words, rest = _sum(scoring, text, at, found)
            said.append(words)
            rests.append(rest)
    if not said:
        raise SkipCheck("no time, or no score")
    words = f"of a token's candidates sum to {', '.join(said)}"
    if max(rests) < LITTLE:
        raise AssertionError(
            f"the mark would have more than half of the probability "
            f"everywhere: the probabilities {words}"
        )
    return f"the probabilities {words}"


def _candidate(scoring: Scoring, text: Text, at: int, token: int) -> float:
    """Return the score of a token that is put at a position."""
    text = text.clone()
    text[at] = token
    return scoring.fresh(text).table.get((at, 0), -math.inf)


def _splits(scoring: Scoring, text: Text, at: int, mark: int) -> bool:
    """Whether a mark at a position is not scored from what is before it."""
    texts = text, scoring.change(text, range(at))
    with scoring.budget.overtime():
        one, two = (_candidate(scoring, each, at, mark) for each in texts)
    share = rounding_of(scoring.unit)
    same = math.isclose(
        one, two, rel_tol=share, abs_tol=share + 4 * scoring.noise
    )
    return same or scoring.kept  # weights carry what is before it


def _sum(
    scoring: Scoring, text: Text, at: int, found: dict[int, float]
) -> tuple[str, float]:
    """Return what a token's candidates sum to, in words and without a mark.

    Raises:
        AssertionError: where it is not 1, and a mark does not explain it.
    """
    where = f"at position {at}"
    where += " of a text with repeats" * (text is scoring.repeating)
    logs = torch.tensor([*found.values()], dtype=torch.float64).clamp(max=99)
    total, size = float(logs.exp().sum()), scoring.vocab_size
    said = f"{total:.4f} {where}"
    weighted = float((logs.exp() * logs.abs()).nansum())
    slack = rounding_of(scoring.unit) * (1 + weighted)
    slack += (scoring.noise + scoring.slight) * total
    if len(found) < size:
        said += f" (over {len(found):,} of {size:,})"
        total = max(total, 1.0)
    if abs(total - 1) <= slack:
        return said, 1.0
    if (mark := scoring.mark) is not None and mark in found:
        own = math.exp(min(found[mark], 99.0))
        rest = total - own
        # behind what is split off, chunks may begin elsewhere
        whole = total + own >= 1 - slack
        if rest <= 1 + slack and (whole or _splits(scoring, text, at, mark)):
            return (
                f"{said} ({rest:.4f} without the mark {mark}, which splits "
                f"the text: no verdict on the rest)"
            ), rest
    hint = ""
    other = ("nats", 1 / LN_2) if scoring.bits else ("bits (bits=True)", LN_2)
    for words, factor in (("losses", -1.0), other):
        if abs(float((factor * logs).exp().sum()) - 1) <= slack:
            hint = f": read as {words} they sum to 1"
    side = "much" if total > 1 else "little"
    raise AssertionError(
        f"the probabilities of a token's {size:,} candidates sum to "
        f"{total:.6g} {where}, {abs(total - 1):.4g} too {side}{hint}"
    )


def scorer_documents(scoring: Scoring) -> str:
    """No token of a document moves a score of another one."""
    starts = [0, *sorted(scoring.marks), scoring.time]
    said = f"{len(starts) - 1} documents do not move each other"
    for own in starmap(range, pairwise(starts)):
        changed = scoring.change(scoring.text, own)
        moved = {
            at: size
            for at, size in scoring.moved(scoring.scores, changed).items()
            if at not in own and at not in scoring.fixed
        }
        behind = {at for at in moved if at - 1 in scoring.marks}
        if moved.keys() - behind:
            words = (
                f"the document at positions {spans(own)} moves {len(moved)} "
                f"scores of other documents, {most(moved)}"
            )
            if not scoring.kept:
                raise AssertionError(words)
            said = f"{words}: it is kept, as declared"
        elif behind:
            said += (
                f"; the first token behind a mark is scored from the document "
                f"before it (position {min(behind)})"
            )
    return said


def scorer_bytes(scoring: Scoring) -> str:
    """The bytes that are counted for a text's tokens are the text's."""
    counted = dict[str, list[float]]()
    for text in TEXTS:
        try:
            with during("", f"bytes_per_token of {text!r}"):
                counted[text] = [*map(float, scoring.count(text))]
        except ModelRaised:  # letters that a tokenizer does not know
            if text == TEXTS[0]:
                raise
    for text, sizes in counted.items():
        total, size = sum(sizes), len(text.encode())
        if total != size:
            raise AssertionError(
                f"the {len(sizes)} tokens of {text!r} are counted as "
                f"{total:g} bytes, and the text has {size}"
            )
    count = f"{len(counted)} of {len(TEXTS)}"
    return f"the tokens of {count} texts have their bytes"


PROPERTIES = (
    scorer_coverage,
    scorer_repeats,
    scorer_state,
    scorer_causality,
    scorer_normalised,
    scorer_documents,
    scorer_bytes,
)
BRIEF = 2  # of these may take all seconds left


@one_run
def check_scorer(
    make_score: Callable[[], Score],
    *,
    vocab_size: int,
    bos: int | None = None,
    documents: int | None = None,
    bits: bool = False,
    state: Literal["fresh", "kept"] = "fresh",
    bytes_per_token: CountBytes | None = None,
    block_size: int = LENGTH,
    seed: int = 0,
    budget: float | None = None,
    debug: bool = False,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Check that a scorer's log-probabilities are those of a code.

    Args:
        make_score: builds fresh state and returns score(tokens), which takes
            ids (time,) and returns a log-probability for each, (time,), for
            all but the first, (time - 1,), or pairs (position,
            log-probability) in the order of scoring.
        vocab_size: number of ids.
        bos: an id that all texts begin with, which is not scored.
        documents: an id that separates documents, which must then not move
            each other's scores.
        bits: whether scores are in bits; False: in nats.
        state: "kept" where one text is meant to move the scores of the next.
        bytes_per_token: from a text to the bytes that are counted for each of
            its tokens: lambda text: table[tokenizer.encode(text)].
        block_size: tokens of the longest text tried.
        seed: of texts and of the scorer's random numbers.
        budget: seconds; None: 225.
        debug: let an exception that the scorer raises end the run.
        on_progress: called with the report before the first property, and
            as each one ends.

    Returns:
        The report, one result for each property.

    Raises:
        ValueError: for a scorer that cannot be built, called or read, and
            for ids outside the vocabulary.
    """
    for name, token in {"bos": bos, "documents": documents}.items():
        if token is not None and token not in range(vocab_size):
            raise ValueError(
                f"{name} must be an id from 0 to {vocab_size - 1}, "
                f"got {token!r}"
            )
    for name, size, least in (
        ("vocab_size", vocab_size, 4),
        ("block_size", block_size, 8),
    ):
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    if state not in ("fresh", "kept"):
        raise ValueError(f'state must be "fresh" or "kept", got {state!r}')
    hush, blocked = redirect_stdout(io.StringIO()), ""
    start, count = perf_counter(), torch.get_num_threads()
    with isolated(seed), hush, few_threads(0, 0, 1):
        scoring = Scoring(
            *(make_score, bits, seed, vocab_size, bos, documents),
            *(state == "kept", block_size, bytes_per_token or str.encode),
        )
    if perf_counter() - start < SMALL:
        count = 1
    given = {scorer_documents: documents, scorer_bytes: bytes_per_token}
    chosen = [f for f in PROPERTIES if given.get(f, f) is not None]
    report = Report(
        getattr(make_score, "__name__", type(make_score).__name__),
        vocab_size,
        block_size,
        [function.__name__ for function in chosen],
        notes=[NOT_SEEN + UNCOUNTED * (bytes_per_token is None)],
    )
    scoring.budget = clock = Budget(DEFAULT if budget is None else budget)
    on_progress(report)
    for number, function in enumerate(chosen):
        calls, name, status = clock.calls, function.__name__, "passed"
        places: list[dict[str, Any]] = []
        clock.start(name, 1 / (1 if number < BRIEF else len(chosen) - number))
        try:
            if blocked:
                raise SkipCheck(f"see {blocked}")
            with isolated(seed), hush, few_threads(0, 0, count):
                message = function(scoring)
        except (SkipCheck, AssertionError, UnusableModel) as error:
            message, places = str(error), places_in(error)
            status = "skipped" if isinstance(error, SkipCheck) else "failed"
            if isinstance(error, ModelRaised | UnusableModel):
                if debug:
                    raise
                status, message = "error", f"no verdict: {message}"
        # without these no other property has a verdict
        doubtful = scoring.scores.unplaced or function is scorer_repeats
        blocked = name if status == "failed" and doubtful else blocked
        cut = clock.not_tried if status == "passed" else ""
        message += f"; not tried: {cut}" if cut else ""
        took = clock.elapsed, clock.calls - calls
        report.results.append(
            CheckResult(
                name, status, message, *took, not_tried=cut, places=places
            )
        )
        on_progress(report)
    return report
