"""Check a scorer, a function that computes perplexity or bits per byte.

A scorer may train on tokens that it has scored, and may score documents in any
order. So "later" in this file refers to the order of scoring.
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
from ..running.budget import DEFAULT_SECONDS, Budget
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
LENGTH = 64  # tokens of the longest text by default
REPEATED_IDS = 8  # number of different ids in the repeating text
LITTLE = 0.5  # least sum of all candidates' probabilities without the mark
ALL = 128  # up to so many scores, every split of a text is tried
SMALL = 0.5  # seconds: if the first call is shorter, one thread is used
TEXTS = (  # texts with which byte counts are tested
    *("The cat  sat, on a mat.", "one\n\ntwo\n", "naïve café", "日本語"),
    "a 🙂 b",
)
GOES_ON = "it keeps the state of the first scorer, or draws random numbers"
DRAWN = "dropout is on, or weights are drawn and not loaded"
NOT_SEEN = (
    "not tested: whether the model was trained on the text beforehand, "
    "windows longer than the texts here (block_size)"
)
UNCOUNTED = ", the number of bytes (bytes_per_token)"


# --- Scores ------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a text's tokens, in the order of scoring."""

    # in nats; keys: a position, and how often it was scored before
    table: dict[tuple[int, int], float]
    dtype: torch.dtype = torch.float64  # dtype of the scorer's answer
    # number of scores in an answer that does not tell their positions
    unplaced: int = 0

    @property
    def order(self) -> list[int]:
        """Return positions in the order of scoring, repeated if rescored."""
        return [at for at, _ in self.table]

    def bound(self, share: float) -> float:
        """Return a share of the largest absolute score, or of 1 if larger."""
        finite = filter(math.isfinite, self.table.values())
        return share * max(1.0, *map(abs, finite), 0.0)


def differences(
    one: Mapping[K, float], two: Mapping[K, float]
) -> dict[K, float]:
    """Return the distance of scores by key; inf where a score is missing."""
    pairs = [(key, x, two.get(key, math.inf)) for key, x in one.items()]
    return {key: 0.0 if x == y else abs(x - y) for key, x, y in pairs}


def read_scores(answer: Any, time: int, bits: bool = False) -> Scores:
    """Read the answer of a scorer for a text.

    Args:
        answer: (time,); or (time - 1,) without the first token; or pairs
            (position, score). NaN means that the token is not scored; so does
            0 for the first token.
        time: number of tokens of the text.
        bits: whether scores are in bits.

    Raises:
        UnusableModel: for any other answer, or a position outside the text.
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
    """Return an answer as a CPU tensor; None if it has no numbers."""
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
    """Return how far rounding in a dtype may move a score, as a share.

    The share is at least float32's.
    """
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return floor_of(dtype) * eps


@dataclass
class Scorer:
    """A maker of fresh scorers, which all draw the same random numbers."""

    # the user's function that builds a fresh scorer
    make_score: Callable[[], Score]
    bits: bool = False  # whether scores are in bits
    seed: int = 0  # random seed
    unit = torch.float32  # the coarsest dtype in which a scorer computes
    budget: Budget = field(default_factory=Budget, init=False)

    def fresh(self, *texts: Text, seed: int | None = None) -> Scores:
        """Score texts in turn with a fresh scorer; return the last scores."""
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
        """Return the scores of a first text; record the coarsest dtype.

        Raises:
            UnusableModel: if the scorer raises, with its exception as the
                cause.
        """
        try:
            scores = self.fresh(text)
        except ModelRaised as error:
            raise UnusableModel(str(error)) from error.__cause__
        # records dtypes, except in compiled code, which ignores the mode
        inside = Inside()
        with suppress(ModelRaised), operations_through(inside):
            self.fresh(text)
        # dtypes of results; not 8 bits, which are only for weights
        found = {*inside.dtypes, scores.dtype, torch.float32}
        inside.dtypes = {d for d in found if torch.finfo(d).bits > 8}
        self.unit = inside.coarsest
        return scores


@dataclass
class Scoring(Scorer):
    """A scorer with its test texts, and the scores of the first text.

    `moved` compares a fresh scorer's scores with earlier scores. A property is
    a function that takes a Scoring. It returns a message, or raises
    AssertionError. To add a property, write such a function and list it in
    PROPERTIES.
    """

    vocab_size: int = 0
    bos: int | None = None
    mark: int | None = None  # the id that separates documents
    # whether a text is meant to change the scores of later texts
    kept: bool = False
    time: int = LENGTH
    # function that counts the bytes of each token of a text
    count: CountBytes = str.encode
    noise: float = 0.0  # distance between the scores of two fresh scorers
    slight: float = 0.0  # largest change so far that counted as rounding

    def __post_init__(self) -> None:
        time = self.time
        self.fixed = dict[int, int]()  # ids that never change, by position
        # two marks: three documents, the longest first
        if self.mark is not None:
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
        """Change the ids at these positions, except where ids are fixed."""
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
        """Return how far a fresh scorer's scores differ from the base scores.

        The result is by position. Differences that may be rounding are left
        out. The largest of them is kept in `slight`.
        """
        far = differences(base.table, self.fresh(*texts, seed=seed).table)
        least = base.bound(rounding_of(self.unit)) + 4 * self.noise
        small = [size for size in far.values() if size <= bounds * least]
        self.slight = max([self.slight, *small])
        return {k[0]: n for k, n in far.items() if n > bounds * least}


def most(moved: dict[int, float]) -> str:
    """Return the largest change of a score and its place, in words."""
    at = max(moved, key=moved.__getitem__)
    return f"by up to {moved[at]:.2g} (position {at})"


def scorer_coverage(scoring: Scoring) -> str:
    """Each position is scored exactly once."""
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
                f"{words}; return pairs (position, log-probability) to say "
                f"which"
            )
        # need not be scored: a document's first token, which has no context,
        # and the mark before it
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
        (scoring.seed + 1, "with another random seed, a scorer", DRAWN),
    ):
        if moved := scoring.moved(
            scoring.scores, scoring.text, seed=seed, bounds=FRESH_SCORER_BOUNDS
        ):
            raise AssertionError(
                f"{words} gives other scores {most(moved)}: {why}"
            )
        # not for another seed: its draws are not rounding
        if seed == scoring.seed:
            scoring.noise = scoring.slight
        scoring.slight = 0.0
    return f"two fresh scorers agree, to {scoring.noise:.2g}"


def scorer_state(scoring: Scoring) -> str:
    """A text does not change the scores of the next text."""
    text = scoring.text
    moved = scoring.moved(scoring.scores, text, scoring.other, text)
    if not moved:
        return "a text has the same scores after another text"
    words = f"after another text, a text's scores differ {most(moved)}"
    if scoring.kept:
        return f"{words}, as declared"
    raise AssertionError(f'{words}: reset the state, or declare state="kept"')


def scorer_causality(scoring: Scoring) -> str:
    """A token does not change scores that are made before its own."""
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
                        f"token {later[0]} of {len(text)} change when it and "
                        f"the tokens scored after it change, {most(moved)}"
                    )
    if not tried:
        raise SkipCheck("no time, or no score that comes before another one")
    if leaks:
        raise AssertionError(
            f"{leaks[-1]}; {len(leaks)} of {tried} splits show such a leak; "
            f"if scoring has another order, return pairs (position, "
            f"log-probability)"
        )
    said = (
        f"no score changes with a token that is scored later: {tried} splits "
        f"of 2 texts of {scoring.time} tokens; the order of scoring is {where}"
    )
    if scoring.slight:
        said += (
            f"; scores change by up to {scoring.slight:.2g}, which rounding "
            f"in {dtype_name(scoring.unit)} can cause: a smaller leak would "
            f"not show"
        )
    start = scoring.text[: scoring.time // 2 + 1]
    with suppress(ModelRaised, UnusableModel), scoring.budget.overtime():
        if moved := scoring.moved(scoring.fresh(start), scoring.text):
            said += (
                f"; without the rest of the text, the scores of the first "
                f"{len(start)} tokens differ {most(moved)}: they depend on "
                f"the length"
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
            f"the mark has more than half of the probability at each "
            f"position: the probabilities {words}"
        )
    return f"the probabilities {words}"


def _candidate(scoring: Scoring, text: Text, at: int, token: int) -> float:
    """Return the score that a token has if it is put at a position."""
    text = text.clone()
    text[at] = token
    return scoring.fresh(text).table.get((at, 0), -math.inf)


def _splits(scoring: Scoring, text: Text, at: int, mark: int) -> bool:
    """Return whether the separator's score ignores the text before it."""
    texts = text, scoring.change(text, range(at))
    with scoring.budget.overtime():
        one, two = (_candidate(scoring, each, at, mark) for each in texts)
    share = rounding_of(scoring.unit)
    same = math.isclose(
        one, two, rel_tol=share, abs_tol=share + 4 * scoring.noise
    )
    return same or scoring.kept  # a kept state depends on that text


def _sum(
    scoring: Scoring, text: Text, at: int, found: dict[int, float]
) -> tuple[str, float]:
    """Return the sum of the probabilities of a token's candidates, in words.

    Also return the sum as a number, without the mark (the separator of
    documents) if the mark splits the text.

    Raises:
        AssertionError: if the sum is not 1, and no mark explains it.
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
        # if a document was split off, chunks may begin at other places
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
    """No token of a document changes a score of another document."""
    starts = [0, *sorted(scoring.marks), scoring.time]
    said = f"{len(starts) - 1} documents do not change each other's scores"
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
                f"the document at positions {spans(own)} changes "
                f"{len(moved)} scores of other documents, {most(moved)}"
            )
            if not scoring.kept:
                raise AssertionError(words)
            said = f"{words}: its state is kept, as declared"
        elif behind:
            said += (
                f"; the first token after a mark is scored from the document "
                f"before it (position {min(behind)})"
            )
    return said


def scorer_bytes(scoring: Scoring) -> str:
    """The byte counts of a text's tokens sum to the bytes of the text."""
    counted = dict[str, list[float]]()
    for text in TEXTS:
        try:
            with during("", f"bytes_per_token of {text!r}"):
                counted[text] = [*map(float, scoring.count(text))]
        except ModelRaised:  # a small tokenizer may not know these letters
            if text == TEXTS[0]:
                raise
    for text, sizes in counted.items():
        total, size = sum(sizes), len(text.encode())
        if total != size:
            raise AssertionError(
                f"the {len(sizes)} tokens of {text!r} are counted as "
                f"{total:g} bytes, but the text has {size}"
            )
    count = f"{len(counted)} of {len(TEXTS)}"
    return f"the byte counts of {count} texts are right"


PROPERTIES = (
    scorer_coverage,
    scorer_repeats,
    scorer_state,
    scorer_causality,
    scorer_normalised,
    scorer_documents,
    scorer_bytes,
)
BRIEF = 2  # the first so many properties may each use all remaining seconds


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
    """Check that a scorer's log-probabilities are valid predictions.

    No score may depend on a token that is scored later, and the probabilities
    of all candidates for a token must sum to 1.

    Args:
        make_score: builds fresh state and returns score(tokens), which takes
            ids (time,). score returns a log-probability for each id, (time,),
            or for all but the first, (time - 1,). It may also return pairs
            (position, log-probability) in the order of scoring.
        vocab_size: number of ids.
        bos: an id with which all texts begin, and which is not scored.
        documents: an id that separates documents; documents must then not
            change each other's scores.
        bits: whether scores are in bits; False means nats.
        state: "kept" if one text is meant to change the scores of the next.
        bytes_per_token: returns the number of bytes of each token of a text:
            lambda text: table[tokenizer.encode(text)].
        block_size: tokens of the longest text to try.
        seed: random seed of texts and of the scorer.
        budget: seconds; None means 225.
        debug: whether an exception of the scorer ends the run.
        on_progress: called with the report before the first property, and when
            each property ends.

    Returns:
        The report, with one result for each property.

    Raises:
        ValueError: if the scorer cannot be built, called or read, or if an
            id is outside the vocabulary.
    """
    _require_settings(vocab_size, block_size, state, bos, documents)
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
    scoring.budget = clock = Budget(
        DEFAULT_SECONDS if budget is None else budget
    )
    on_progress(report)
    for number, function in enumerate(chosen):
        left = 1 if number < BRIEF else len(chosen) - number
        clock.start(function.__name__, 1 / left)
        with hush, few_threads(0, 0, count):
            result = _result(function, scoring, blocked, debug)
        # if positions are unknown or scores do not repeat, no other property
        # can be judged
        doubtful = scoring.scores.unplaced or function is scorer_repeats
        if result.status == "failed" and doubtful:
            blocked = result.name
        report.results.append(result)
        on_progress(report)
    return report


def _require_settings(
    vocab_size: int,
    block_size: int,
    state: str,
    bos: int | None,
    documents: int | None,
) -> None:
    """Require possible sizes of texts, and ids in the vocabulary."""
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


def _result(
    function: Callable[[Scoring], str],
    scoring: Scoring,
    blocked: str,
    debug: bool,
) -> CheckResult:
    """Test a property, unless `blocked` names a failed property before it."""
    clock, status = scoring.budget, "passed"
    calls = clock.calls
    places: list[dict[str, Any]] = []
    try:
        if blocked:
            raise SkipCheck(f"see {blocked}")
        with isolated(scoring.seed):
            message = function(scoring)
    except (SkipCheck, AssertionError, UnusableModel) as error:
        message, places = str(error), places_in(error)
        status = "skipped" if isinstance(error, SkipCheck) else "failed"
        if isinstance(error, ModelRaised | UnusableModel):
            if debug:
                raise
            status, message = "error", f"no verdict: {message}"
    cut = clock.not_tried if status == "passed" else ""
    message += f"; not tried: {cut}" if cut else ""
    return CheckResult(
        function.__name__,
        status,
        message,
        clock.elapsed,
        clock.calls - calls,
        not_tried=cut,
        places=places,
    )
