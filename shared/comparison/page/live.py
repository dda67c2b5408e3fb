"""Answer the live page's questions about a text, for both styles.

`Live` has a method for each kind of question. A question contains its text,
and its answer depends on no earlier question. The page's view of a forward
pass, step by step, is called the walk.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...agreement import largest_difference, rounding_bound
from ...generation import Sampler
from ...generation import text_of as whole_text
from ...running.context import few_threads
from ...running.variant import precise
from ...tokenization.tokenizers import Tokenizer
from ...tracing.moved import influence_of
from ...validation import dtype_name, is_number
from ..styles import Pair
from ..text import token_text
from ..values import diff_by_value
from ..values.given import subject_of
from ..values.side import Side
from .breaking import (
    PARTS,
    Change,
    Edit,
    breaks_of,
    broken_copy,
    changes_of,
)
from .cache_steps import read_in_pieces
from .glossaries import text_of
from .value_maps import (
    COLUMNS,
    Factors,
    ValueMaps,
    find_operands,
    influence_maps,
    multiplied,
)
from .walk import (
    WALK_PARAMETERS,
    Layout,
    Run,
    data_of,
    described,
    lay_out,
    next_tokens,
)

MOST_TOKENS = 64  # most tokens of the text in a question
MOST_CHARACTERS = 10_000  # most characters of a typed text
FIRST_TOKENS = 16  # most tokens of the command's text to begin the page with
MAP_TOKENS = 32  # most tokens of an influence map
# most features of a step's value to send for each position; a small model has
# fewer, so the page gets all of them
READ_NUMBERS = 1024
LIKELIEST = 8  # how many likely next tokens get a bar
# without a part, this many of the whole model's likeliest tokens also get a
# bar
VANISHED = 3
EXAMPLES = {  # texts for a reader to try, by what they show
    "Python\u2019s syntax": "for x in y:\n    pass\nelse",
    "Python\u2019s documentation": "If the argument is not a string, a "
    '"TypeError" exception is',
    "another kind of text": "Once upon a time",
    "the future, if you take the mask out": "Changed in version 3.",
    "raw bytes": "na\u00efve caf\u00e9",
}


@dataclass(frozen=True)
class Verdict:
    """The result of a check of a model."""

    status: str  # "passed", "failed", ...
    headline: str  # the verdict in a few words
    sentence: str  # the check's own message, with all details


Judge = Callable[[nn.Module], Verdict]
Scores = list[Float[Tensor, "time vocab"]]  # log-probabilities of each model


@dataclass(frozen=True)
class Models:
    """The models of both styles, whole or with a part removed."""

    models: tuple[Any, Any]
    # the recorded runs of both; empty for a large model
    sides: tuple[Side, ...] = ()
    # for each side: a value's number in the whole model's run -> its number in
    # this side's run
    numbers: tuple[Mapping[int, int], ...] = ()


@dataclass(frozen=True)
class Steps:
    """The steps of the walk (a forward pass step by step) of both models.

    Attributes:
        layout: the steps.
        first: each model's values on the command's text, by number.
        operands: each model's queries and keys, by their scores' numbers.
    """

    layout: Layout
    first: Sequence[Mapping[int, Tensor]]
    operands: Sequence[Mapping[int, tuple[int, int]]]


class Live:
    """Answer questions about a text, on both styles.

    Each method in `questions` takes a question (a dict from the page), and
    returns an answer that is ready for JSON. It raises ValueError for an
    invalid question. For another kind of question, add such a method to
    `questions`.

    Args:
        pair: both styles from one set of weights.
        tokenizer: tokenizer of the texts.
        first: ids of the command's text; the page begins with at most the
            first 16 of them (FIRST_TOKENS).
        judge: a function that returns the verdict of check_causality on a
            model.
    """

    def __init__(
        self,
        pair: Pair,
        tokenizer: Tokenizer,
        first: Sequence[int],
        judge: Judge,
    ):
        self.pair, self.tokenizer, self.judge = pair, tokenizer, judge
        self.most = min(MOST_TOKENS, pair.config.block_size)
        self.first = [*first[: min(FIRST_TOKENS, self.most)]]
        self.piece_of = partial(token_text, tokenizer)
        self.size = sum(tensor.numel() for tensor in pair.state.values())
        self.verdicts: dict[tuple[str, int], dict[str, Any]] = {}
        breaks = [breaks_of(style) for style in pair.styles]
        self.edits: dict[str, list[Sequence[Edit]]] = {
            part: [own[part] for own in breaks]
            for part in PARTS
            if all(part in own for own in breaks)
        }
        self.changes = {
            part: [
                changes_of(style, edits)
                for style, edits in zip(pair.styles, both, strict=True)
            ]
            for part, both in self.edits.items()
        }
        self.whole, self.steps = self._prepare()
        self.broken: tuple[str, Models] = ("", self.whole)

    def _prepare(self) -> tuple[Models, Steps | None]:
        """Return both whole models, and their steps if they are small."""
        if self.size > WALK_PARAMETERS:
            return Models(self.pair.models), None
        # convert before loading, so that a style scales its weights in float64
        doubled = {n: t.cpu().double() for n, t in self.pair.state.items()}
        left, right = (
            style.from_gpt2(doubled, self.pair.config).eval()
            for style in self.pair.styles
        )
        tokens = torch.tensor([self.first])
        found = diff_by_value(
            left, right, tokens, names=self.pair.names, quick=True
        )
        if found.shares_nothing:
            return Models((left, right)), None
        layout, values = lay_out(found)
        operands = [
            find_operands(side, {n: own[n] for n in layout.scores(i)})[0]
            for i, (side, own) in enumerate(
                zip(found.sides, values, strict=True)
            )
        ]
        numbers = [
            {n: n for n in layout.wanted(i)}
            | {n: n for two in operands[i].values() for n in two}
            for i in range(2)
        ]
        models = Models((left, right), found.sides, tuple(numbers))
        return models, Steps(layout, values, operands)

    @property
    def questions(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """Return the methods that answer questions, by request path."""
        answers = (self.read, self.write, self.influence, self.causality,
                   self.cache)  # fmt: skip
        return {f"/{answer.__name__}": answer for answer in answers}

    def describe(self) -> dict[str, Any]:
        """Return the data for the page's template, except the pass's steps."""
        return {
            "text": whole_text(self.tokenizer, self.first),
            "most": self.most,
            "examples": {
                name: text
                for name, text in EXAMPLES.items()
                if self._can_run(text)
            },
            "parts": {part: PARTS[part] for part in self.edits},
            "map_tokens": MAP_TOKENS,
        }

    def walk(self) -> dict[str, Any] | None:
        """Return the steps on the first text, or None for a large model."""
        if self.steps is None:
            return None
        answer = self.read({"ids": self.first})
        about = described(self.steps.layout, self.steps.first[0])
        texts = answer["walk"]["tokens"]
        return about | {"tokens": texts, "data": answer["walk"]}

    # --- Questions -----------------------------------------------------------

    def read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run a text; return the likeliest next tokens, and all steps."""
        started = time.perf_counter()
        ids, count = self._ids_of(asked)
        part, sampler = self._part_of(asked), _sampler(asked)
        with self._running(len(ids)):
            models = self._models(part)
            scores = _log_probs(models.models, ids)
            bars = self._bars(scores, ids, part, sampler)
            walk = self._walk(models, ids, part)
            agreement = _agreement(models, ids, scores)
        return {
            "ids": ids,
            "count": count,
            "text": whole_text(self.tokenizer, ids),
            "tokens": [*map(self.piece_of, ids)],
            "raw": [i for i, token in enumerate(ids) if self._is_raw(token)],
            "bars": bars,
            "walk": walk,
            "part": part,
            "changes": self._changes(part, walk),
            "agreement": agreement,
            "seconds": time.perf_counter() - started,
        }

    def write(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Draw a next token with each style; append the left style's."""
        ids, _ = self._ids_of(asked)
        part = self._part_of(asked)
        if len(ids) >= self.most:
            raise ValueError(f"the text has all {self.most} tokens")
        sampler, seed = _sampler(asked), _natural(asked, "seed")
        with self._running(len(ids)):
            models = self._models(part)
            chosen = []
            for log_probs in _log_probs(models.models, ids):
                # seeded for each style, so that both draw the same random
                # numbers
                draws = torch.Generator().manual_seed(seed + len(ids))
                last = log_probs[-1:].cpu()
                chosen.append(int(sampler.choose(last, draws)))
            longer = [*ids, chosen[0]]
            scores = _log_probs(models.models, longer)
            bars = self._bars(scores, longer, part, sampler, last=True)
        return {
            "ids": longer,
            "text": whole_text(self.tokenizer, longer),
            "pieces": [*map(self.piece_of, chosen)],
            "agree": chosen[0] == chosen[1],
            "raw": self._is_raw(chosen[0]),
            "bars": bars,
        }

    def influence(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each token in turn; return which predictions change."""
        ids, _ = self._ids_of(asked)
        part = self._part_of(asked)
        ids = ids[:MAP_TOKENS]
        with self._running(len(ids) ** 2):
            sides = self._models(part).sides
            maps = [
                influence_of(precise(side.subject), torch.tensor(ids), 1)
                for side in sides
            ]
        if not maps:
            raise ValueError(self._too_large)
        return influence_maps(maps) | {"tokens": [*map(self.piece_of, ids)]}

    def causality(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of check_causality for one model."""
        part, side = self._part_of(asked), _natural(asked, "side") % 2
        if self.size > WALK_PARAMETERS:
            raise ValueError(self._too_large)
        key = part, side
        if key not in self.verdicts:
            with self._running(1):
                started = time.perf_counter()
                model = self._models(part).models[side]
                self.verdicts[key] = {
                    **asdict(self.judge(model)),
                    "seconds": time.perf_counter() - started,
                }
        return self.verdicts[key] | {"name": self.pair.names[side]}

    def cache(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Read a text in pieces with the cache of each style."""
        ids, _ = self._ids_of(asked)
        if len(ids) < 3:
            raise ValueError(
                f"two pieces and one token require at least 3 tokens, got "
                f"{len(ids)}"
            )
        with self._running(len(ids)):
            answer = read_in_pieces(self.pair, ids)
        return answer | {"tokens": [*map(self.piece_of, ids)]}

    # --- Steps in answering a question ---------------------------------------

    @property
    def _too_large(self) -> str:
        return (
            f"the model has {self.size:,} parameters: maps and checks of the "
            f"page support at most {WALK_PARAMETERS:,}"
        )

    def _can_run(self, text: str) -> bool:
        """Return whether the tokenizer has an id for all parts of a text."""
        try:
            self._ids_of({"text": text})
        except ValueError:
            return False
        return True

    def _is_raw(self, token: int) -> bool:
        """Return whether a token is only some of a character's bytes."""
        try:
            self.tokenizer.decode_bytes([token]).decode()
        except UnicodeDecodeError:
            return True
        except ValueError:  # this id stands for no text
            pass
        return False

    def _running(self, tokens: int) -> Any:
        return few_threads(self.size, tokens)

    def _ids_of(self, asked: Mapping[str, Any]) -> tuple[list[int], int]:
        """Return the ids to run, and how many ids the question has."""
        text = asked.get("text")
        if isinstance(text, str):
            if len(text) > MOST_CHARACTERS:
                raise ValueError(
                    f"a text has at most {MOST_CHARACTERS:,} characters, got "
                    f"{len(text):,}"
                )
            text.encode()  # raises ValueError for half of a surrogate pair
            ids = self.tokenizer.encode(text)
        else:
            ids = asked.get("ids")  # type: ignore[assignment]
            if not isinstance(ids, list) or not all(
                type(i) is int for i in ids
            ):
                raise ValueError("a question has a text or a list of ids")
            if len(ids) > self.most:
                raise ValueError(
                    f"at most {self.most} ids are run, got {len(ids)}"
                )
        if not ids:
            raise ValueError("the text is empty: type a few words")
        vocab = self.pair.config.vocab_size
        if not all(0 <= i < vocab for i in ids):
            raise ValueError(f"an id is outside the vocabulary of {vocab:,}")
        return ids[: self.most], len(ids)

    def _part_of(self, asked: Mapping[str, Any]) -> str:
        part = asked.get("part", "")
        if part and part not in [*self.edits]:
            raise ValueError(f"the parts are {', '.join(self.edits)}")
        return part or ""

    def _models(self, part: str) -> Models:
        """Return the whole models, or copies that lack a part.

        Only the copies for the last part asked for are kept.
        """
        if not part:
            return self.whole
        if self.broken[0] != part:
            self.broken = part, self._break(part)
        return self.broken[1]

    def _break(self, part: str) -> Models:
        left, right = (
            broken_copy(model, style, edits).eval()
            for model, style, edits in zip(
                self.whole.models,
                self.pair.styles,
                self.edits[part],
                strict=True,
            )
        )
        if self.steps is None:
            return Models((left, right))
        size = 1, len(self.first)
        sides = tuple(
            Side.run(
                subject_of(model, size, self.pair.config.vocab_size),
                torch.tensor([self.first]),
            )
            for model in (left, right)
        )
        whole = zip(self.whole.sides, sides, self.whole.numbers, strict=True)
        numbers = tuple(_counterparts(*each) for each in whole)
        return Models((left, right), sides, numbers)

    def _bars(
        self,
        scores: Scores,
        ids: list[int],
        part: str,
        sampler: Sampler,
        last: bool = False,
    ) -> list[list[list[Any]]]:
        """Return the likeliest next tokens after each position.

        Each entry has: the token's text; the probability with which the
        sampler draws it, in each style and in each whole model; and whether
        the token is raw bytes. Tokens that the sampler never draws are left
        out.
        """
        before = _log_probs(self.whole.models, ids) if part else scores
        picked = scores[0].topk(min(LIKELIEST, scores[0].size(1))).indices
        if part:
            few = before[0].topk(min(VANISHED, scores[0].size(1))).indices
            picked = torch.cat([picked, few], dim=1)
        probs = [
            sampler.probabilities(each).gather(1, picked).tolist()
            for each in (*scores, *before)
        ]
        rows = []
        for position in range(len(ids) - 1 if last else 0, len(ids)):
            found = {}
            for rank, token in enumerate(picked[position].tolist()):
                shares = [side[position][rank] for side in probs]
                if any(share != 0 for share in shares):
                    found[token] = [
                        self.piece_of(token),
                        *map(_finite, shares),
                        self._is_raw(token),
                    ]
            rows.append([*found.values()])
        return rows

    def _walk(
        self, models: Models, ids: list[int], part: str
    ) -> dict[str, Any] | None:
        """Return the data of a text's steps, as the page's script reads it."""
        if self.steps is None:
            return None
        tokens, layout = torch.tensor([ids]), self.steps.layout
        values = [
            _values(side, numbers, tokens)
            for side, numbers in zip(models.sides, models.numbers, strict=True)
        ]
        factors = [
            _factors(own, pairs)
            for own, pairs in zip(values, self.steps.operands, strict=True)
        ]
        texts = [*map(self.piece_of, ids)]
        run = Run(ids, texts, values, factors, measured=True)
        drawn = max(COLUMNS, self.pair.config.n_head * len(ids))
        maps = ValueMaps(len(ids), len(ids), drawn, READ_NUMBERS)
        log_probs = values[0][self.whole.sides[0].normalised]
        following = next_tokens(log_probs, ids, len(ids))
        data = data_of(layout, run, maps, following, self.piece_of)
        marks = [self._marks(part, side, layout) for side in range(2)]
        return data | {
            "marks": marks,
            "shapes": _shapes(layout, values),
            "without": self._without(part),
        }

    def _changes(
        self, part: str, walk: Mapping[str, Any] | None
    ) -> list[list[Any]]:
        """Return the changed lines.

        Each entry has the side, the place, the old text, the new text, and the
        name of the step that shows the line ("" if the page has no steps).
        """
        changes = [
            (side, each)
            for side, own in enumerate(self.changes.get(part, ()))
            for each in own
        ]
        steps = [walk and _step_of(walk, side, each) for side, each in changes]
        other = next(filter(None, steps), "")  # "" for a line without a step
        return [
            [
                side,
                f"{each.file}:{each.line}",
                each.old,
                each.new,
                step or other,
            ]
            for (side, each), step in zip(changes, steps, strict=True)
        ]

    def _without(self, part: str) -> dict[str, list[str]]:
        """Return texts about both styles without the part, by kind of step."""
        told = [
            text_of(style, "WITHOUT").get(part, {})
            for style in self.pair.styles
        ]
        kinds = dict.fromkeys(kind for own in told for kind in own)
        gone = "The line is taken out."
        return {kind: [own.get(kind, gone) for own in told] for kind in kinds}

    def _marks(self, part: str, side: int, layout: Layout) -> list[list[Any]]:
        """Return the changed lines in the functions that the page shows.

        Each entry has the number of the function, the number of the line, and
        the line's new text.
        """
        if not part:
            return []
        sources = enumerate(layout.sources[side].items())
        return [
            [number, change.line, change.new]
            for number, ((path, _), source) in sources
            for change in self.changes[part][side]
            if path == change.path
            and change.line in [line.number for line in source["lines"]]
        ]


def _log_probs(models: Sequence[Any], ids: Sequence[int]) -> Scores:
    """Return each model's log-probabilities of a text."""
    with torch.no_grad():
        device = next(models[0].parameters()).device
        tokens = torch.tensor([[*ids]], device=device)
        return [model.log_probs(tokens)[0] for model in models]


def _agreement(
    models: Models, ids: Sequence[int], scores: Scores
) -> dict[str, Any]:
    """Return the largest difference of both styles' scores, and its bound.

    The bound is the largest difference that rounding explains. It comes from a
    run in float64; it is None if the model cannot run in float64.
    """
    bound = None
    if scores[1].dtype == torch.float64:
        tokens = torch.tensor([[*ids]])
        bound = rounding_bound(models.models[1], tokens, scores[1])
    return {
        "apart": _finite(largest_difference(*scores)),
        "bound": bound,
        "dtype": dtype_name(scores[1].dtype),
    }


def _step_of(walk: Mapping[str, Any], side: int, change: Change) -> str:
    """Return the name of the step that a changed line computes, or "".

    A step that only one style has is never returned. Among several steps,
    prefer one that the copy without the part does not compute.
    """
    sources = [
        number
        for number, *mark in walk["marks"][side]
        if mark == [change.line, change.new]
    ]
    found = []
    for step, shape in zip(walk["steps"], walk["shapes"], strict=True):
        if all(step["places"]):
            source, first, last = step["places"][side]
            if source in sources and first <= change.line <= last:
                found.append((shape != "", step["name"]))
    return min(found, key=lambda each: each[0], default=(True, ""))[1]


def _values(
    side: Side, numbers: Mapping[int, int], tokens: Int[Tensor, "1 time"]
) -> dict[int, Tensor]:
    """Return a model's values on a text, by their numbers in the whole model.

    The model of this side runs the text. If its operations then differ from
    the recorded ones, the model is recorded again on this text.
    """
    again = copy(side)
    again.tokens, again.kept = tokens, None
    found = again.keep({*numbers.values()})
    shape = found[side.normalised].shape if side.normalised in found else ()
    time, vocab = tokens.size(1), side.scores.size(-1)
    if shape != (1, time, vocab) or not _normalised(found[side.normalised]):
        again = Side.run(side.subject, tokens)
        own = _counterparts(side, again, {n: n for n in numbers.values()})
        kept = again.keep({*own.values()})
        found = {n: kept[i] for n, i in own.items()}
    return {
        whole: found[here] for whole, here in numbers.items() if here in found
    }


def _normalised(log_probs: Tensor) -> bool:
    return bool((log_probs.logsumexp(-1).abs() < 1e-6).all())


def _counterparts(
    whole: Side, other: Side, numbers: Mapping[int, int]
) -> dict[int, int]:
    """Map the numbers of values in one run of a model to those in another run.

    The counterpart of a value has the same operation, line and layer. Values
    of a line that was taken out have no counterpart.
    """
    found: list[dict[Any, list[int]]] = []
    for side in (whole, other):
        by_line = defaultdict(list)
        for value in side.values:
            place = value.place
            key = place.path, place.line, place.op, place.inside, place.layer
            by_line[key].append(value.number)
        found.append(by_line)
    pairs = {
        ours: theirs
        for key, own in found[0].items()
        if len(own) == len(found[1].get(key, ()))
        for ours, theirs in zip(own, found[1][key], strict=True)
    }
    pairs[whole.normalised] = other.normalised
    return {n: pairs[n] for n in numbers if n in pairs}


def _factors(
    values: Mapping[int, Tensor], pairs: Mapping[int, tuple[int, int]]
) -> dict[int, Factors]:
    """Return the query and key of attention scores, by the scores' numbers."""
    found = {}
    for number, (query, key) in pairs.items():
        if {number, query, key} <= values.keys():
            made = multiplied(values[number], values[query], values[key])
            if made is not None:
                found[number] = made
    return found


def _shapes(
    layout: Layout, values: Sequence[Mapping[int, Tensor]]
) -> list[str]:
    """Return the shape of each step's value as text, "" without a value."""
    return [
        next(
            (
                "\u00d7".join(map(str, own[number].shape))
                for own, number in zip(values, step.row.order, strict=True)
                if number in own
            ),
            "",
        )
        for step in layout.every
    ]


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None


def _sampler(asked: Mapping[str, Any]) -> Sampler:
    """Return the settings with which a question draws tokens.

    By default, tokens are drawn from the model's distribution.
    """
    temperature = asked.get("temperature", 1.0)
    if not is_number(temperature) or not 0 <= temperature <= 2:
        raise ValueError(
            f"temperature must be a number from 0 to 2, got {temperature!r}"
        )
    return Sampler(float(temperature), _natural(asked, "top_k") or None)


def _natural(asked: Mapping[str, Any], name: str) -> int:
    number = asked.get(name, 0)
    if type(number) is not int or not 0 <= number < 2**31:
        raise ValueError(f"{name} must be a whole number of at least 0")
    return number
