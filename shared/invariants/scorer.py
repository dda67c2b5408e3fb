"""Checks of a scorer: what computes a perplexity, or bits per byte.

A scorer may train on what it has scored, and take documents in another order
than they stand: what counts is the order in which it scores.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch

from .budget import DEFAULT, Budget
from .context import few_threads, isolated, one_run
from .errors import SkipCheck, UnusableModel
from .report import CheckResult, Report
from .rounding import dtype_name
from .scores import (
    Score,
    Scorer,
    ScorerRaised,
    Scores,
    Text,
    rounding_of,
)
from .tokens import SPLITS, draw, others, spans, splits_to_try

LENGTH = 64  # of the longest text, by default
FEW = 8  # ids of the text that repeats itself
LITTLE = 0.5  # of the probability, left to all candidates but a mark
ALL = 128  # scores up to which every split is tried
SMALL = 0.5  # seconds of the first calls up to which one thread is enough
SLACK = 16  # bounds by which fresh scorers may part: training adds rounding
NOT_SEEN = (
    "not seen: a model that was trained on the text beforehand, bytes that "
    "are counted wrongly, windows longer than the texts here (block_size)"
)


@dataclass
class Scoring(Scorer):
    """A scorer under its checks: the texts, and the scores of the first."""

    vocab_size: int = 0
    bos: int | None = None
    mark: int | None = None  # between documents
    kept: bool = False  # whether state is meant to stay
    time: int = LENGTH
    slight: float = 0.0  # how far scores moved, as rounding may
    blocked: str = ""  # the failed property without which none has a verdict

    def __post_init__(self) -> None:
        marks, time = (self.bos, self.mark), self.time
        self.ids = torch.tensor(
            [i for i in range(self.vocab_size) if i not in marks]
        )
        self.generator = torch.Generator().manual_seed(self.seed)
        self.text, self.other = self._draw(time), self._draw(time)
        self.repeating = self._draw(max(2, time // 4), FEW).repeat(5)[:time]
        for text in (self.text, self.other, self.repeating):
            if self.mark is not None:  # three documents, the longest first
                text[[time // 2, time * 4 // 5]] = self.mark
            if self.bos is not None:
                text[0] = self.bos
        self.scores = self.meet(self.text)

    def _draw(self, time: int, few: int | None = None) -> Text:
        known = self.ids[:few]
        return known[draw(len(known), 1, time, self.generator)[0]]

    def fixed(self, text: Text, at: int) -> bool:
        """Whether a position holds a mark of documents, or bos."""
        return int(text[at]) == self.mark or (at == 0 and self.bos is not None)

    def change(self, text: Text, at: Iterable[int]) -> Text:
        """Return the text with other ids at these positions."""
        chosen = [i for i in at if not self.fixed(text, i)]
        old = torch.searchsorted(self.ids, text[chosen])
        text = text.clone()
        text[chosen] = self.ids[others(old, len(self.ids), self.generator)]
        return text

    def differ(self, one: Scores, two: Scores, bounds: int = 1) -> bool:
        """Whether scores are further apart than rounding explains."""
        far = max(one.moved(two), default=0.0)
        return far > bounds * self.bound(one)


def scorer_coverage(scoring: Scoring) -> str:
    """Each position is scored once, and none is left out."""
    time = scoring.time
    lengths = {1, 2, 3, 5, 16, 17, time // 2, time * 2 // 3, time - 1, time}
    lengths = {n for n in lengths if 0 < n <= time}
    refused, first = set(), True
    for length in sorted(lengths, reverse=True):
        text = scoring.text[:length]
        try:
            scores = scoring.fresh(text)
        except ScorerRaised:
            refused.add(length)
            continue
        words = f"{len(scores.values)} scores for {length} tokens"
        if scores.positions is None:
            scoring.blocked = "scorer_coverage"
            raise AssertionError(
                f"{words}; pairs (position, log-probability) say which"
            )
        count = Counter(scores.positions)
        first &= not count[0]
        if count[0] and scoring.bos is not None:
            raise AssertionError(
                f"{words}: position 0 is scored, which is bos"
            )
        if twice := [at for at in count if count[at] > 1]:
            raise AssertionError(
                f"{words}: positions {spans(twice)} are scored twice or more"
            )
        marks = [at for at in range(length) if text[at] == scoring.mark]
        # without context are a document's first token, or its mark
        excused = {0, *marks, *(at + 1 for at in marks)}
        if missing := {*range(length)} - {*count} - excused:
            raise AssertionError(
                f"{words}: positions {spans(missing)} are not scored"
            )
    said = (
        f"each position is scored once, at lengths {spans(lengths - refused)}"
    )
    if first:
        why = "has no context" if scoring.bos is None else "is bos"
        said += f"; position 0 is not scored: it {why}"
    return said + (f"; lengths {spans(refused)} raised" if refused else "")


def scorer_repeats(scoring: Scoring) -> str:
    """Two fresh scorers give a text the same scores."""
    first = scoring.scores
    scoring.fresh(scoring.other)
    again = scoring.fresh(scoring.text)
    if scoring.differ(first, again, SLACK):
        scoring.blocked = "scorer_repeats"
        raise AssertionError(
            f"a second scorer of make_score gives other "
            f"scores{_by(first, again)}: it goes on where "
            f"the first one ended, or draws random numbers"
        )
    other = scoring.fresh(scoring.text, scoring.seed + 1)
    drawn = scoring.differ(first, other, SLACK)
    scoring.noise = max(first.moved(again), default=0.0)
    if drawn:
        raise AssertionError(
            f"with another random seed the scores differ{_by(first, other)}: "
            f"dropout is on, or weights are drawn and not loaded"
        )
    return f"two fresh scorers agree, to {scoring.noise:.2g}"


def scorer_state(scoring: Scoring) -> str:
    """What one text leaves behind does not move the scores of the next."""
    score = scoring.make()
    texts = scoring.text, scoring.other, scoring.text
    first, _, again = (scoring.call(score, text) for text in texts)
    if not scoring.differ(first, again):
        return "a text has the same scores behind another text"
    words = f"behind another text a text's scores differ{_by(first, again)}"
    if scoring.kept:
        return f"{words}, as declared"
    raise AssertionError(f'{words}: reset the state, or declare state="kept"')


def scorer_causality(scoring: Scoring) -> str:
    """No score that was made before a token was scored changes with it."""
    tried, found, leak, where = 0, 0, "", "that of the text"
    for share, text in ((0.5, scoring.text), (1.0, scoring.repeating)):
        with scoring.budget.part("the splits", share=share):
            scores = scoring.fresh(text)
            order, bound = scores.order, scoring.bound(scores)
            if order != sorted(order):
                where = "not that of the text"
            count = len(order) if len(order) <= ALL else SPLITS
            for k in splits_to_try(len(order), scoring.generator, count):
                before = Scores(order[:k], scores.values[:k])
                later = [*dict.fromkeys(order[k:])]
                later = [at for at in later if at not in order[:k]]
                changed = scoring.change(text, later)
                if torch.equal(changed, text):
                    continue
                tried += 1
                other = scoring.fresh(changed)
                if (size := max(before.moved(other))) <= bound:
                    scoring.slight = max(scoring.slight, size)
                    continue
                found += 1
                with scoring.budget.overtime():
                    leak = leak or _leak(scoring, text, before, later, other)
    if not tried:
        raise SkipCheck("no time, or no score that another one comes behind")
    if leak:
        hint = (
            "; if scores are not made from left to right, return pairs "
            "(position, log-probability) in the order in which they are"
        )
        raise AssertionError(
            f"{leak}; {found} of {tried} splits show such a leak"
            f"{hint * (where == 'that of the text')}"
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
    with suppress(ScorerRaised, UnusableModel), scoring.budget.overtime():
        alone = scoring.fresh(start)
        if scoring.differ(alone, scoring.scores):
            said += (
                f"; the first {len(start)} tokens alone have other "
                f"scores{_by(alone, scoring.scores)}: the length moves them"
            )
    return said


def _leak(
    scoring: Scoring,
    text: Text,
    before: Scores,
    later: list[int],
    other: Scores,
) -> str:
    """Say which scores move, with one token if it is enough."""
    one, at = scoring.change(text, later[:1]), later[0]
    alone, bound = scoring.fresh(one), scoring.bound(before)
    words = "it and all that is scored behind it change"
    if scoring.differ(before, alone):
        other, words = alone, f"it changes from {text[at]} to {one[at]}"
    count = sum(size > bound for size in before.moved(other))
    return (
        f"in a text of {len(text)} tokens, {count} of the "
        f"{len(before.order)} scores made before that of token {at} move when "
        f"{words},{_by(before, other)}"
    )


def _by(first: Scores, other: Scores) -> str:
    """Say by how much and where scores differ most."""
    far = first.moved(other)
    at = max(range(len(far)), key=far.__getitem__)
    return f" by up to {far[at]:.2g} (position {first.order[at]})"


def scorer_normalised(scoring: Scoring) -> str:
    """The probabilities of all candidates of a token sum to 1."""
    cases = []
    for text, first in ((scoring.text, 0.0), (scoring.repeating, 0.6)):
        with scoring.budget.overtime():
            order = scoring.fresh(text).order
        order = [at for at in order if not scoring.fixed(text, at)]
        last = len(order) - 1
        ends = sorted({int(first * last), last})
        cases += [(text, order[k]) for k in ends if order]
    said, rests = list[str](), list[float]()
    for number, (text, at) in enumerate(cases):
        drawn = torch.randperm(scoring.vocab_size, generator=scoring.generator)
        found: dict[int, float] = {}
        share = 1 / (len(cases) - number)
        with scoring.budget.part("the candidates", share=share):
            for token in dict.fromkeys([*text.tolist(), *drawn.tolist()]):
                changed = text.clone()
                changed[at] = token
                scores = scoring.fresh(changed).by_key()
                found[token] = scores.get((at, 0), -math.inf)
        if found:
            repeats = " of a text with repeats" * (text is scoring.repeating)
            apart = scoring.mark in found and _splits(scoring, text, at)
            words = _sum(scoring, found, f"position {at}{repeats}", apart)
            said.append(words[0])
            rests.append(words[1])
    if not said:
        raise SkipCheck("no time, or no score")
    if max(rests) < LITTLE:
        raise AssertionError(
            f"the mark would have more than half of the probability "
            f"everywhere: that of a token's candidates sums to "
            f"{', '.join(said)}"
        )
    return (
        f"the probabilities of a token's candidates sum to {', '.join(said)}"
    )


def _splits(scoring: Scoring, text: Text, at: int) -> bool:
    """Whether a mark at a position is not scored from what is before it."""
    text = text.clone()
    text[at] = int(scoring.mark or 0)
    with scoring.budget.overtime():
        scores = scoring.fresh(text)
        other = scoring.fresh(scoring.change(text, range(at)))
    one, two = (s.by_key().get((at, 0), -math.inf) for s in (scores, other))
    # weights that are kept carry what is before it
    return (
        scoring.kept or one == two or abs(one - two) <= scoring.bound(scores)
    )


def _sum(
    scoring: Scoring, found: dict[int, float], where: str, apart: bool
) -> tuple[str, float]:
    """Return what a token's candidates sum to, in words and without a mark.

    Raises:
        AssertionError: where it is not 1, and a mark does not explain it.
    """
    shares = {token: math.exp(min(s, 99.0)) for token, s in found.items()}
    total, size = sum(shares.values()), scoring.vocab_size
    said = f"{total:.4f} at {where}"
    slack = rounding_of(scoring.unit) * (
        1 + sum(p * abs(found[t]) for t, p in shares.items() if p)
    )
    slack += (scoring.noise + scoring.slight) * total
    if len(found) < size:
        said += f" (over {len(found):,} of {size:,})"
        total = max(total, 1.0)
    if abs(total - 1) <= slack:
        return said, 1.0
    if scoring.mark in [*shares]:
        own = shares[int(scoring.mark or 0)]
        rest = total - own
        # behind what is split off, chunks may begin elsewhere
        if rest <= 1 + slack and (apart or total + own >= 1 - slack):
            return (
                f"{said} ({rest:.4f} without the mark {scoring.mark}, which "
                f"splits the text: no verdict on the rest)"
            ), rest
    hint = ""
    factor = 1 / math.log(2) if scoring.bits else math.log(2)
    if min(found.values()) > 0:
        hint = ": above 0 are losses, and no log-probabilities"
    elif abs(sum(math.exp(factor * s) for s in found.values()) - 1) <= slack:
        unit = "nats" if scoring.bits else "bits (bits=True)"
        hint = f": read as {unit} they sum to 1"
    side = "much" if total > 1 else "little"
    raise AssertionError(
        f"the probabilities of a token's {size:,} candidates sum to "
        f"{total:.6g} at {where}, {abs(total - 1):.4g} too "
        f"{side}{hint}"
    )


def scorer_documents(scoring: Scoring) -> str:
    """No token of a document moves a score of another one."""
    text, scores = scoring.text, scoring.scores
    numbers = text.eq(scoring.mark or 0).cumsum(0).tolist()
    inside = {
        at: n for at, n in enumerate(numbers) if not scoring.fixed(text, at)
    }
    said = f"{numbers[-1] + 1} documents do not move each other"
    for document in range(numbers[-1] + 1):
        own = [at for at in inside if inside[at] == document]
        sizes = scores.moved(scoring.fresh(scoring.change(text, own)))
        moved = {
            at: size
            for at, size in zip(scores.order, sizes, strict=True)
            if size > scoring.bound(scores)
            and inside.get(at, document) != document
        }
        behind = {at for at in moved if int(text[at - 1]) == scoring.mark}
        if moved.keys() - behind:
            at = max(moved, key=moved.__getitem__)
            words = (
                f"the document at positions {spans(own)} moves {len(moved)} "
                f"scores of other documents, by up to {moved[at]:.2g} "
                f"(position {at})"
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


PROPERTIES = (
    scorer_coverage,
    scorer_repeats,
    scorer_state,
    scorer_causality,
    scorer_normalised,
    scorer_documents,
)
BRIEF = ("scorer_coverage", "scorer_repeats")  # may take all seconds left


@one_run
def check_scorer(
    make_score: Callable[[], Score],
    *,
    vocab_size: int,
    bos: int | None = None,
    documents: int | None = None,
    bits: bool = False,
    state: Literal["fresh", "kept"] = "fresh",
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
        if token is not None and not (
            type(token) is int and 0 <= token < vocab_size
        ):
            raise ValueError(
                f"{name} must be an id from 0 to {vocab_size - 1}, "
                f"got {token!r}"
            )
    if vocab_size < 4:
        raise ValueError(f"vocab_size must be at least 4, got {vocab_size}")
    if block_size < 8:
        raise ValueError(f"block_size must be at least 8, got {block_size}")
    if state not in ("fresh", "kept"):
        raise ValueError(f'state must be "fresh" or "kept", got {state!r}')
    printed = io.StringIO()
    start, count = perf_counter(), torch.get_num_threads()
    with isolated(seed), redirect_stdout(printed), few_threads(0, 0, 1):
        kept = state == "kept"
        sizes = vocab_size, bos, documents, kept, block_size
        scoring = Scoring(make_score, bits, seed, *sizes)
    if perf_counter() - start < SMALL:
        count = 1
    chosen = PROPERTIES[: -1 if documents is None else None]
    names = [function.__name__ for function in chosen]
    name = getattr(make_score, "__name__", type(make_score).__name__)
    report = Report(name, vocab_size, block_size, names, notes=[NOT_SEEN])
    scoring.budget = clock = Budget(DEFAULT if budget is None else budget)
    on_progress(report)
    for number, (name, function) in enumerate(zip(names, chosen, strict=True)):
        done = clock.calls
        clock.start(name, 1.0 if name in BRIEF else 1 / (len(names) - number))
        with (
            isolated(seed),
            redirect_stdout(printed),
            few_threads(0, 0, count),
        ):
            status, message = _judge(scoring, function, debug)
        cut = clock.not_tried if status == "passed" else ""
        message += f"; not tried: {cut}" if cut else ""
        calls = clock.calls - done
        report.results.append(
            CheckResult(
                name, status, message, clock.elapsed, calls, not_tried=cut
            )
        )
        on_progress(report)
    return report


def _judge(
    scoring: Scoring,
    function: Callable[[Scoring], str],
    debug: bool,
) -> tuple[str, str]:
    """Return the status of a property, and what is said of it."""
    if scoring.blocked:
        return "skipped", f"see {scoring.blocked}"
    try:
        return "passed", function(scoring)
    except SkipCheck as error:
        return "skipped", str(error)
    except AssertionError as error:
        return "failed", str(error)
    except (ScorerRaised, UnusableModel) as error:
        if debug:
            raise
        return "error", f"no verdict: {error}"
