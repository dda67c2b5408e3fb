"""Scorers of texts as people write them, correct and incorrect.

Each function returns a function score(tokens) with a fresh state. It gives a
log-probability for each token, or pairs (position, log-probability) in the
order of scoring. A row names the properties that must fail, and words of their
messages.
"""

import math
import re
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from small_gpt import GPT, VOCAB

TIME = 32
WINDOW, STRIDE, CHUNK = 16, 8, 8
MARK, BOS = 16, 15
# a user's file: one scorer is sound, one sees later tokens, one raises
FILE = """
import torch

table = torch.randn(11, 11, generator=torch.Generator()).log_softmax(-1)


def make():
    return lambda tokens: table[tokens[:-1], tokens[1:]]


def peek():
    return lambda tokens: table[tokens[1:], tokens[1:]] + tokens.sum() / 1e4


def raises():
    return lambda tokens: 1 / 0


def characters(text):
    return [1] * len(text)
"""


@dataclass(frozen=True)
class Row:
    """A scorer, the properties that must fail, and words of their messages."""

    make: object
    fails: frozenset
    words: tuple = ()
    settings: dict = field(default_factory=dict)


SCORERS = []


def row(*fails, words=(), **settings):
    def add(make):
        named = frozenset(f"scorer_{name}" for name in fails)
        SCORERS.append(Row(make, named, words, settings))
        return make

    return add


@lru_cache
def pretrained(seed=0, mixer=GPT.mixer):
    """Return a model with widely spread scores.

    All tests share the model, so do not change it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(VOCAB, 64, mixer=mixer, layers=1).eval()
    with torch.no_grad():
        model.head.weight.mul_(4)
        for block in model.blocks:
            block.mixer.out.weight.mul_(16)
    return model


@lru_cache
def everyones():
    return deepcopy(pretrained())


@torch.no_grad()
def all_log_probs(model, tokens):
    """Return log-probabilities (time, vocab) of the next tokens."""
    return model(tokens[None])[0].float().log_softmax(-1)


def given(log_probs, tokens):
    """Return the log-probability of each given token except the first."""
    return log_probs[:-1].gather(1, tokens[1:, None])[:, 0]


def step(model, tokens, rate=0.5):
    """Train a model on a text for one step."""
    scores = model(tokens[None])[0].log_softmax(-1)
    loss = -given(scores, tokens).mean()
    grads = torch.autograd.grad(loss, [*model.parameters()])
    with torch.no_grad():
        for weight, grad in zip(model.parameters(), grads, strict=True):
            weight -= rate * grad


def windows(time):
    """Yield each window's start and end, and the first position it scores."""
    before = 1
    for begin in range(0, time, STRIDE):
        end = min(begin + WINDOW, time)
        yield begin, end, before
        before = end
        if end == time:
            return


def chunks(time):
    """Yield the start and end of each chunk of targets, from token 1 on."""
    for begin in range(1, time, CHUNK):
        yield begin, min(begin + CHUNK, time)


def uniform(size=VOCAB):
    return lambda tokens: [-math.log(size)] * len(tokens)


# Sound scorers ---------------------------------------------------------------


@row(words=("each position but the first is scored once",))
def one_pass():
    return lambda tokens: given(all_log_probs(pretrained(), tokens), tokens)


@row()
def strides():
    """Windows overlap, and each scores only its new tokens.
    (transformers' guide)"""

    def score(tokens):
        for begin, end, first in windows(len(tokens)):
            part = tokens[begin:end]
            new = given(all_log_probs(pretrained(), part), part)
            for at in range(first, end):
                yield at, new[at - begin - 1].item()

    return score


@row()
def nan_for_the_first():
    def score(tokens):
        scores = given(all_log_probs(pretrained(), tokens), tokens)
        return torch.cat([torch.tensor([math.nan]), scores])

    return score


@row()
def zero_for_the_first():
    def score(tokens):
        scores = given(all_log_probs(pretrained(), tokens), tokens)
        return [0.0, *scores.tolist()]

    return score


@row(bos=BOS)
def behind_a_bos():
    return one_pass()


@row(bits=True)
def in_bits():
    score = one_pass()
    return lambda tokens: score(tokens) / math.log(2)


@row()
def in_numpy():
    """A unigram model counts earlier tokens, and also scores the first."""

    def score(tokens):
        counts = np.ones(VOCAB)
        scores = []
        for token in tokens.tolist():
            scores.append(np.log(counts[token] / counts.sum()))
            counts[token] += 1
        return np.array(scores)

    return score


@row(words=("bfloat16",))
def in_bfloat16():
    model = deepcopy(pretrained()).bfloat16()

    def score(tokens):
        with torch.no_grad():
            scores = model(tokens[None])[0].log_softmax(-1)
        return given(scores, tokens)

    return score


def trains(before, after):
    def make():
        model = deepcopy(pretrained())

        def score(tokens):
            model.load_state_dict(pretrained().state_dict())
            for begin, end in chunks(len(tokens)):
                part = tokens[max(0, end - WINDOW) : end]
                if before:
                    step(model, part)
                new = given(all_log_probs(model, part), part)
                for at in range(begin, end):
                    yield at, new[at - end]
                if after:
                    step(model, part)

        return score

    return make


trains_on_what_was_scored = row(block_size=20)(trains(False, True))


@row(documents=MARK, state="kept", block_size=20, words=("documents",))
def trains_from_document_to_document():
    """Documents are scored from long to short; each then trains the model."""
    model = deepcopy(pretrained())

    def score(tokens):
        starts = [0, *((tokens == MARK).nonzero()[:, 0] + 1).tolist()]
        ends = [*starts[1:], len(tokens)]
        spans = zip(starts, ends, strict=True)
        for begin, end in sorted(spans, key=lambda s: s[0] - s[1]):
            part = tokens[begin:end]
            if len(part) > 1:
                new = given(all_log_probs(model, part), part)
                yield from zip(range(begin + 1, end), new, strict=True)
                step(model, part, 0.1)

    return score


def documents_apart(first=True, factor=1.0):
    """Return a scorer of documents that start, or end, with a mark."""

    def make():
        def score(tokens):
            marks = (tokens == MARK).nonzero()[:, 0] + int(not first)
            starts = sorted({0, *marks.tolist()} - {len(tokens)})
            ends = [*starts[1:], len(tokens)]
            for begin, end in zip(starts, ends, strict=True):
                part = tokens[begin:end]
                new = given(all_log_probs(pretrained(), part), part)
                new = new + math.log(factor)
                yield from zip(range(begin + 1, end), new, strict=True)

        return score

    return make


document_by_document = row(documents=MARK, words=("no verdict on the rest",))(
    documents_apart()
)
marks_at_the_end = row(documents=MARK)(documents_apart(False))


@row(state="kept")
def counts_for_good():
    """A unigram model goes on counting in the next text, as it declares."""
    counts = np.ones(VOCAB)

    def score(tokens):
        for at, token in enumerate(tokens.tolist()):
            yield at, math.log(counts[token] / counts.sum())
            counts[token] += 1

    return score


@row(words=("they depend on the length",))
def columns():
    """The text is laid out in four columns, each with its own first token."""

    def score(tokens):
        height = -(-len(tokens) // 4)
        for begin in range(0, len(tokens), height):
            part = tokens[begin : begin + height]
            part = torch.cat([torch.tensor([BOS]), part])
            new = given(all_log_probs(pretrained(), part), part)
            yield from enumerate(new, begin)

    return score


def bigrams(tokens, counts, at, weight=0.5):
    """Return each token's weighted bigram share, and the GPT's weight."""
    seen = counts[int(tokens[at - 1])]
    total = sum(seen.values())
    return [weight * seen[c] / total if total else 0 for c in range(VOCAB)], (
        1 - weight if total else 1
    )


def mixes(peeks=False):
    def make():
        def score(tokens):
            neural = all_log_probs(pretrained(), tokens).exp()
            counts = defaultdict(Counter)
            pairs = [*zip(tokens.tolist(), tokens[1:].tolist(), strict=False)]
            for one, two in pairs if peeks else ():
                counts[one][two] += 1
            for at, (one, two) in enumerate(pairs, 1):
                counted, rest = bigrams(tokens, counts, at)
                yield at, math.log(counted[two] + rest * neural[at - 1, two])
                if not peeks:
                    counts[one][two] += 1

        return score

    return make


mix_with_counts = row()(mixes())


def words_of(text):
    """Split a text into words; a space belongs to the word after it."""
    return re.findall(r" ?\S+|\s", text)


def utf8_bytes(text):
    return np.array([len(word.encode()) for word in words_of(text)])


row(bytes_per_token=utf8_bytes, words=("5 of 5 texts are right",))(uniform)

# Broken scorers --------------------------------------------------------------


def characters(text):
    """Return the count of characters of each word, instead of bytes."""
    if not text.isascii() and text.isalpha():
        raise KeyError(text)
    return [len(word) for word in words_of(text)]


def no_spaces(text):
    """Return the count of bytes of each word, without the space before it."""
    return torch.tensor(
        [len(word.strip(" ").encode()) for word in words_of(text)]
    )


row("bytes", bytes_per_token=characters, words=("are counted as",))(uniform)
row(
    "bytes",
    bytes_per_token=no_spaces,
    words=("17 bytes, but the text has 23",),
)(uniform)

counts_of_the_whole_text = row("causality", "normalised")(mixes(peeks=True))
trains_first = row("causality", "normalised", block_size=20)(
    trains(True, False)
)
trains_before_and_after = row("causality", "normalised", block_size=20)(
    trains(True, True)
)


@row("causality", "normalised")
def shifted_twice():
    """Both the caller and the model shift the labels."""

    def score(tokens):
        scores = all_log_probs(pretrained(), tokens)
        twice = scores[:-2].gather(1, tokens[2:, None])[:, 0]
        return torch.cat([twice, scores[-2:-1, 0]])

    return score


@row("normalised")
def not_shifted():
    """Each token is scored after it has been read."""

    def score(tokens):
        scores = all_log_probs(pretrained(), tokens)
        return scores.gather(1, tokens[:, None])[1:, 0]

    return score


@row("coverage", words=("twice",))
def window_counted_twice():
    """Each window scores all of its tokens. (transformers' guide, no -100)"""

    def score(tokens):
        for begin, end, _ in windows(len(tokens)):
            part = tokens[begin:end]
            new = given(all_log_probs(pretrained(), part), part)
            yield from zip(range(begin + 1, end), new, strict=True)

    return score


@row("coverage", words=("45 scores for 32 tokens",))
def windows_one_behind_the_other():
    def score(tokens):
        return torch.cat(
            [
                given(all_log_probs(pretrained(), part), part)
                for begin, end, _ in windows(len(tokens))
                for part in [tokens[begin:end]]
            ]
        )

    return score


@row("coverage", words=("25-31",))
def rest_left_out():
    """If the last chunk is not full, it is dropped."""
    whole = one_pass()

    def score(tokens):
        full = (len(tokens) - 1) // CHUNK * CHUNK
        yield from zip(range(1, full + 1), whole(tokens), strict=False)

    return score


@row("coverage", words=("positions 0 are scored, and hold bos",), bos=BOS)
def bos_is_scored():
    score = one_pass()
    return lambda tokens: [-3.0, *score(tokens)]


@row("causality", "normalised")
def two_passes():
    model = deepcopy(pretrained())

    def score(tokens):
        model.load_state_dict(pretrained().state_dict())
        step(model, tokens)
        return given(all_log_probs(model, tokens), tokens)

    return score


@row("causality", "normalised")
def slot():
    """The scores of a text get a shift that was trained on the same text."""

    def score(tokens):
        with torch.no_grad():
            logits = pretrained()(tokens[None])[0]
        delta = torch.zeros(VOCAB, requires_grad=True)
        for _ in range(3):
            scores = given((logits + delta).log_softmax(-1), tokens)
            (grad,) = torch.autograd.grad(-scores.mean(), [delta])
            delta = (delta - grad).detach().requires_grad_()
        return given((logits + delta).log_softmax(-1), tokens)

    return score


@row("normalised", words=("too much",))
def better_of_two():
    """For each token, the better of two models' probabilities is used."""

    def score(tokens):
        models = pretrained(), pretrained(1)
        both = [given(all_log_probs(m, tokens), tokens) for m in models]
        return torch.maximum(*both)

    return score


@row("normalised", words=("too much",))
def hashed_counts():
    """All pairs of a context and a token share eight buckets."""

    def score(tokens):
        ids, table = tokens.tolist(), np.zeros(8)
        neural = all_log_probs(pretrained(), tokens).exp()
        for at in range(1, len(ids)):
            both = (ids[at - 1] * 31 + ids[at]) % 8
            context = table.sum()
            share = table[both] / context if context else 0
            weight = 0.9 if context else 0
            here = (1 - weight) * neural[at - 1, ids[at]] + weight * share
            yield at, math.log(here)
            table[both] += 1

    return score


@row("normalised", words=("too much",))
def floored():
    score = one_pass()
    return lambda tokens: score(tokens).exp().add(1e-3).log()


@row("normalised", words=("losses",))
def losses():
    score = one_pass()
    return lambda tokens: -score(tokens)


@row("normalised", words=("bits",))
def bits_untold():
    return in_bits()


@row("state", words=("kept",))
def cache_kept():
    """The tokens of a text are kept and change the scores of the next text."""
    recent = Counter()

    def score(tokens):
        neural = given(all_log_probs(pretrained(), tokens), tokens)
        for at, token in enumerate(tokens[1:].tolist(), 1):
            total = recent.total()
            share = recent[token] / total if total else neural[at - 1].exp()
            yield at, (neural[at - 1].exp() * 0.9 + share * 0.1).log()
            recent[token] += 1

    return score


@row("repeats", words=("random",))
def dropout_left_on():
    def score(tokens):
        kept = torch.rand(len(tokens) - 1) < 0.9
        scores = given(all_log_probs(pretrained(), tokens), tokens)
        return torch.where(kept, scores, -math.log(VOCAB))

    return score


@row("repeats", words=("it keeps the state of the first scorer",))
def one_model_for_all():
    """All scorers share one model, and each of them trains it."""
    model = everyones()

    def score(tokens):
        for begin, end in chunks(len(tokens)):
            part = tokens[max(0, end - WINDOW) : end]
            new = given(all_log_probs(model, part), part)
            for at in range(begin, end):
                yield at, new[at - end]
            step(model, part, 0.01)

    return score


class SeesAll(GPT.mixer):
    def hide(self, scores, mask):
        return scores


@row("causality", "normalised")
def no_mask():
    def score(tokens):
        model = pretrained(0, SeesAll)
        return given(all_log_probs(model, tokens), tokens)

    return score


@row("causality", "normalised")
def draws_a_little_and_peeks():
    """Scores have noise of 1e-4, and change by 1.2e-3 with the next token."""
    model = everyones()

    def score(tokens):
        scores = given(all_log_probs(model, tokens), tokens)
        scores[:-1] += 1.2e-3 * (tokens[2:] % 2)
        return scores + 1e-4 * torch.randn(len(scores))

    return score


@row("causality", words=("the tokens scored after it",))
def temperature_of_the_text():
    """The last token of the text sets the temperature of all other scores."""

    def score(tokens):
        warm = 1 + int(tokens[-1]) / VOCAB / 10
        scores = all_log_probs(pretrained(), tokens).div(warm)
        scores = given(scores.log_softmax(-1), tokens)
        own = given(all_log_probs(pretrained(), tokens), tokens)
        return torch.cat([scores[:-1], own[-1:]])

    return score


@row("causality", words=("position 23",))
def peeks_at_one_edge():
    """One score, at the edge of a chunk, depends on the next token."""

    def score(tokens):
        scores = all_log_probs(pretrained(), tokens)
        if len(tokens) > 24:
            warm = 1 + tokens[24] / VOCAB
            scores[22] = (scores[22] * warm).log_softmax(-1)
        return given(scores, tokens)

    return score


@row("documents", documents=MARK, words=("document",))
def documents_in_one_text():
    return one_pass()


tenth_left_out = row("normalised", documents=MARK, words=("0.1 too little",))(
    documents_apart(False, 0.9)
)
most_left_out = row("normalised", documents=MARK, words=("than half",))(
    documents_apart(factor=0.4)
)
