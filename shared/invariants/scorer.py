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
from .errors import ModelRaised, SkipCheck, UnusableModel, during
from .report import CheckResult, Report
from .rounding import dtype_name
from .scores import Score, Scorer, Scores, Text, rounding_of
from .tokens import SPLITS, draw, others, spans, splits_to_try

LENGTH = 64  # of the longest text, by default
FEW = 8  # ids of the text that repeats itself
LITTLE = 0.5  # of the probability, left to all candidates but a mark
ALL = 128  # scores up to which every split is tried
SMALL = 0.5  # seconds of the first calls up to which one thread is enough
SLACK = 16  # bounds by which fresh scorers may part: training adds rounding
CountBytes = Callable[[str], Iterable[float]]
TEXTS = (  # whose bytes are counted
    *("The cat  sat, on a mat.", "one\n\ntwo\n", "naïve café", "日本語"),
    "a 🙂 b",
)
COUNTED = "bytes that are counted wrongly (bytes_per_token), "
NOT_SEEN = (
    "not seen: a model that was trained on the text beforehand, {}windows "
    "longer than the texts here (block_size)"
)


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

    def least(self, scores: Scores) -> float:
        """Return the size up to which a difference of scores is rounding."""
        return scores.bound(rounding_of(self.unit)) + 4 * self.noise

    def apart(self, one: Scores, two: Scores, bounds: int = 1) -> str:
        """Say by how much scores differ most, and where; "": by rounding."""
        far = one.moved(two)
        at = max(far, key=far.__getitem__, default=None)
        if at is None or not far[at] > bounds * self.least(one):
            return ""
        return f" by up to {far[at]:.2g} (position {at[0]})"


def scorer_coverage(scoring: Scoring) -> str:
    """Each position is scored once, and none is left out."""
    time = scoring.time
    shares = time // 2, time * 2 // 3, time - 1, time
    lengths = {n for n in (1, 2, 3, 5, 16, 17, *shares) if n <= time}
    refused, first = set(), True
    for length in sorted(lengths, reverse=True):
        text = scoring.text[:length]
        try:
            scores = scoring.fresh(text)
        except ModelRaised:
            refused.add(length)
            continue
        count = Counter(scores.order)
        total = scores.unplaced or count.total()
        words = f"{total} scores for {length} tokens"
        if scores.unplaced:
            scoring.blocked = "scorer_coverage"
            raise AssertionError(
                f"{words}; pairs (position, log-probability) say which"
            )
        first &= not count[0]
        marks = [at for at in range(length) if text[at] == scoring.mark]
        # without context are a document's first token, or its mark
        excused = {0, *marks, *(at + 1 for at in marks)}
        for what, wrong in (
            ("are scored twice or more", {k for k in count if count[k] > 1}),
            ("are not scored", {*range(length)} - {*count} - excused),
        ):
            if wrong:
                raise AssertionError(
                    f"{words}: positions {spans(wrong)} {what}"
                )
        if count[0] and scoring.bos is not None:
            raise AssertionError(
                f"{words}: position 0 is scored, which is bos"
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
    if by := scoring.apart(first, again, SLACK):
        scoring.blocked = "scorer_repeats"
        raise AssertionError(
            f"a second scorer of make_score gives other scores{by}: it goes "
            f"on where the first one ended, or draws random numbers"
        )
    other = scoring.fresh(scoring.text, seed=scoring.seed + 1)
    if by := scoring.apart(first, other, SLACK):
        raise AssertionError(
            f"with another random seed the scores differ{by}: dropout is on, "
            f"or weights are drawn and not loaded"
        )
    scoring.noise = max(first.moved(again).values(), default=0.0)
    return f"two fresh scorers agree, to {scoring.noise:.2g}"


def scorer_state(scoring: Scoring) -> str:
    """What one text leaves behind does not move the scores of the next."""
    again = scoring.fresh(scoring.text, scoring.other, scoring.text)
    by = scoring.apart(scoring.scores, again)
    if not by:
        return "a text has the same scores behind another text"
    words = f"behind another text a text's scores differ{by}"
    if scoring.kept:
        return f"{words}, as declared"
    raise AssertionError(f'{words}: reset the state, or declare state="kept"')


def scorer_causality(scoring: Scoring) -> str:
    """No score that was made before a token was scored changes with it."""
    tried, leaks, where = 0, [], "that of the text"
    for share, text in ((0.5, scoring.text), (1.0, scoring.repeating)):
        with scoring.budget.part("the splits", share=share):
            scores = scoring.fresh(text)
            order, least = scores.order, scoring.least(scores)
            if order != sorted(order):
                where = "not that of the text"
            count = len(order) if len(order) <= ALL else SPLITS
            for k in splits_to_try(len(order), scoring.generator, count):
                later = [at for at in order[k:] if at not in order[:k]]
                changed = scoring.change(text, dict.fromkeys(later))
                if torch.equal(changed, text):
                    continue
                tried += 1
                before, other = scores.first(k), scoring.fresh(changed)
                size = max(before.moved(other).values())
                if size > least:
                    leaks.append((text, before, later, other))
                else:
                    scoring.slight = max(scoring.slight, size)
    if not tried:
        raise SkipCheck("no time, or no score that another one comes behind")
    if leaks:
        hint = (
            "; if scores are not made from left to right, return pairs "
            "(position, log-probability) in the order in which they are"
        )
        raise AssertionError(
            f"{_leak(scoring, *leaks[0])}; {len(leaks)} of {tried} splits "
            f"show such a leak{hint * (where == 'that of the text')}"
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
        if by := scoring.apart(scoring.fresh(start), scoring.scores):
            said += (
                f"; the first {len(start)} tokens alone have other scores{by}"
                f": the length moves them"
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
    at, words = later[0], "it and all that is scored behind it change"
    one = scoring.change(text, [at])
    with scoring.budget.overtime():
        alone = scoring.fresh(one)
    if by := scoring.apart(before, alone):
        other, words = alone, f"it changes from {text[at]} to {one[at]}"
    by = by or scoring.apart(before, other)
    sizes, least = before.moved(other).values(), scoring.least(before)
    return (
        f"in a text of {len(text)} tokens, {sum(s > least for s in sizes)} of "
        f"the {len(sizes)} scores made before that of token {at} move when "
        f"{words},{by}"
    )


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
    sums = list[tuple[str, float]]()
    for number, (text, at) in enumerate(cases):
        drawn = torch.randperm(scoring.vocab_size, generator=scoring.generator)
        found: dict[int, float] = {}
        share = 1 / (len(cases) - number)
        with scoring.budget.part("the candidates", share=share):
            for token in dict.fromkeys([*text.tolist(), *drawn.tolist()]):
                found[token] = _candidate(scoring, text, at, token)
        if found:
            sums.append(_sum(scoring, text, at, found))
    if not sums:
        raise SkipCheck("no time, or no score")
    said = ", ".join(words for words, _ in sums)
    if max(rest for _, rest in sums) < LITTLE:
        raise AssertionError(
            f"the mark would have more than half of the probability "
            f"everywhere: that of a token's candidates sums to {said}"
        )
    return f"the probabilities of a token's candidates sum to {said}"


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
    # weights that are kept carry what is before it
    same = one == two or abs(one - two) <= scoring.least(scoring.scores)
    return scoring.kept or same


def _sum(
    scoring: Scoring, text: Text, at: int, found: dict[int, float]
) -> tuple[str, float]:
    """Return what a token's candidates sum to, in words and without a mark.

    Raises:
        AssertionError: where it is not 1, and a mark does not explain it.
    """
    repeats = " of a text with repeats" * (text is scoring.repeating)
    where = f"position {at}{repeats}"
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
    mark = scoring.mark
    if mark is not None and mark in shares:
        rest = total - shares[mark]
        # behind what is split off, chunks may begin elsewhere
        whole = total + shares[mark] >= 1 - slack
        if rest <= 1 + slack and (whole or _splits(scoring, text, at, mark)):
            return (
                f"{said} ({rest:.4f} without the mark {mark}, which splits "
                f"the text: no verdict on the rest)"
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
        f"{total:.6g} at {where}, {abs(total - 1):.4g} too {side}{hint}"
    )


def scorer_documents(scoring: Scoring) -> str:
    """No token of a document moves a score of another one."""
    text, scores = scoring.text, scoring.scores
    numbers = text.eq(scoring.mark or 0).cumsum(0).tolist()
    said = f"{numbers[-1] + 1} documents do not move each other"
    least = scoring.least(scores)
    inside = [k for k in range(len(text)) if not scoring.fixed(text, k)]
    for document in range(numbers[-1] + 1):
        own = [at for at in inside if numbers[at] == document]
        sizes = scores.moved(scoring.fresh(scoring.change(text, own)))
        moved = {
            at: size
            for (at, _), size in sizes.items()
            if size > least and at in {*inside} - {*own}
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


def scorer_bytes(scoring: Scoring) -> str:
    """The bytes that are counted for a text's tokens are the text's."""
    refused = 0
    for text in TEXTS:
        try:
            with during("", f"bytes_per_token of {text!r}"):
                counted = [*map(float, scoring.count(text))]
        except ModelRaised:
            refused += 1  # letters that a tokenizer does not know
            if refused == len(TEXTS):
                raise
            continue
        total, size = sum(counted), len(text.encode())
        if total != size:
            raise AssertionError(
                f"the {len(counted)} tokens of {text!r} are counted as "
                f"{total:g} bytes, and the text has {size}"
            )
    said = f"the tokens of {len(TEXTS) - refused} texts have their bytes"
    return said + (f"; {refused} texts raised" if refused else "")


PROPERTIES = (
    scorer_coverage,
    scorer_repeats,
    scorer_state,
    scorer_causality,
    scorer_normalised,
    scorer_documents,
    scorer_bytes,
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
        scoring = Scoring(
            make_score,
            bits,
            seed,
            vocab_size,
            bos,
            documents,
            state == "kept",
            block_size,
            bytes_per_token or str.encode,
        )
    if perf_counter() - start < SMALL:
        count = 1
    without = {scorer_documents} if documents is None else set()
    without |= {scorer_bytes} if bytes_per_token is None else set()
    chosen = [each for each in PROPERTIES if each not in without]
    report = Report(
        getattr(make_score, "__name__", type(make_score).__name__),
        vocab_size,
        block_size,
        [function.__name__ for function in chosen],
        notes=[NOT_SEEN.format(COUNTED * (scorer_bytes in without))],
    )
    scoring.budget = clock = Budget(DEFAULT if budget is None else budget)
    on_progress(report)
    for number, function in enumerate(chosen):
        done, name = clock.calls, function.__name__
        left = 1 if name in BRIEF else len(chosen) - number
        clock.start(name, 1 / left)
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
    except (ModelRaised, UnusableModel) as error:
        if debug:
            raise
        return "error", f"no verdict: {error}"
    except AssertionError as error:
        return "failed", str(error)
