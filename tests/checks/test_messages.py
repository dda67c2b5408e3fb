"""Findings and messages of checks for unusual models, one model per row."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from broken_models import BROKEN
from correct_models import CORRECT
from known_gpts import GPTConfig, NanoGPT
from odd_models import EachThirdCall
from rows import slow_unless
from small_gpt import (
    BLOCK,
    GPT,
    MLP,
    VOCAB,
    Attention,
    Block,
    CachedGPT,
    CacheWithMask,
    Mixer,
    NoPositions,
    Padded,
    TrainableGPT,
    Unlimited,
)
from small_gpt import cross_entropy as mean
from torch import nn

from gpt_duet.invariants import check_model

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    # most of these models raise an exception; shape checks would raise earlier
    pytest.mark.unhooked,
]


BUILDS = {model.name: model.build for model in (*CORRECT, *BROKEN)}
ZOO = [*BUILDS.values()]
NO_MASK = BUILDS["no_mask"].keywords["mixer"]
SHARP = BUILDS["times_the_root"]
FORGETS = BUILDS["window_undeclared"]


def gpt(base=GPT, **parts):
    """Return a subclass of a model, with some attributes replaced."""
    return type("Odd", (base,), parts)


def counted(self, tokens, attention_mask=None, position_ids=None):
    self.given = position_ids
    return Padded.forward(self, tokens, attention_mask)


def positions_of_the_mask(self, tokens):
    x = self.token_vectors(tokens)
    at = torch.arange(tokens.size(1)) if self.given is None else self.given
    return x + self.wpe(at)


def chunks(scores, ids, size):
    """Return the cross-entropy of each chunk of `size` targets."""
    pairs = zip(
        scores.flatten(0, 1).split(size),
        ids.flatten().split(size),
        strict=True,
    )
    return torch.stack([F.cross_entropy(*pair) for pair in pairs])


class FifthsCounted(TrainableGPT):
    """A fused loss takes full chunks of 5 targets and drops the rest."""

    def forward(self, tokens, targets=None):
        scores = GPT.forward(self, tokens)
        if targets is None:
            return scores, None
        size = max(targets.numel() // 5 * 5, 1)
        flat = scores.flatten(0, 1)[:size], targets.flatten()[:size]
        return None, F.cross_entropy(*flat)


class Unscaled(Attention):
    def scores(self, q, k):
        return q @ k.mT


class Inverted(Attention):
    """An added mask hides the past; attention scores are far too large."""

    def make_parts(self, dim):
        super().make_parts(dim)
        self.qkv.weight.data *= 6

    def hide(self, scores, mask):
        return 8 * scores + (mask * -1e9).to(scores)


class MeanOfRows(Attention):
    def attend(self, q, k, v, mask):
        y = super().attend(q, k, v, mask)
        return y.mean(0).expand_as(y)


class Unused(MLP):
    def make_parts(self, dim):
        super().make_parts(dim)
        self.unused = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


class RowsFrozen(MLP):
    """A hook gives five rows of a weight no gradient, which is not a fault."""

    def add_parts(self, dim):
        trained = (torch.arange(2 * dim) > 4).unsqueeze(1)
        self.up.weight.register_hook(lambda grad: grad * trained)


class Sleeping(MLP):
    """Four hidden units are 0 in all texts, but not with other weights."""

    def add_parts(self, dim):
        with torch.no_grad():
            self.up.weight[:4] *= 1e-3
            self.up.bias[:4] = -0.7

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class OneOfFive(GPT):
    """The positions use only the first of five tables in one tensor."""

    count = 5

    def add_parts(self, dim):
        self.wpe = None
        self.tables = nn.Parameter(torch.randn(self.count, BLOCK, dim))

    def position_vectors(self, ids):
        return self.tables[0][torch.arange(ids.size(1))]


class HalfOfExperts(MLP):
    """The router's bias sends all tokens to one half of stacked experts."""

    def make_parts(self, dim):
        self.router = nn.Linear(dim, 40)
        self.up, self.down = (
            nn.Parameter(torch.randn(40, dim) / 3) for _ in range(2)
        )
        self.register_buffer("bias", torch.linspace(9, -9, 40).sign() * 9)

    def forward(self, x):
        scores = self.router(x) + self.bias
        best, ids = scores.topk(1, -1)
        shares = torch.zeros_like(scores).scatter(-1, ids, best.sigmoid())
        return F.gelu(x @ self.up.T) * shares @ self.down


class UnitsBesideChoices(GPT):
    """Ten hidden units are multiplied by 0; other lines sort scores."""

    mlp = BUILDS["units_cut_off"].keywords["mlp"]

    def scores(self, x):
        scores = super().scores(x)
        self.best = scores.topk(2).indices
        return scores + x.sort(1).values[..., :1] * 1e-3


class UnitsOfOneLength(GPT):
    """Ten hidden units are multiplied by 0; shorter texts are refused."""

    mlp = BUILDS["units_cut_off"].keywords["mlp"]

    def forward(self, ids):
        if ids.size(1) < BLOCK:
            raise ValueError(f"{ids.size(1)} tokens are less than {BLOCK}")
        return super().forward(ids)


def within_limit(ids):
    if ids.size(1) > BLOCK:
        raise ValueError(f"{ids.size(1)} tokens > {BLOCK}")
    return ids


class Stretches(NoPositions, Unlimited):
    """If a text is longer than `trained_on`, its vectors are scaled down."""

    block_size, trained_on = None, 0

    def add_parts(self, dim):
        super().add_parts(dim)
        self.block_size, self.trained_on = None, 999

    def forward(self, tokens):
        self.require_length(tokens.size(1))
        return self.scores(self.scale(self.embed(tokens)))

    def scale(self, x):
        if x.size(1) > self.trained_on:
            x = x * self.trained_on / x.size(1)
        return x + x.cumsum(1)


def scored(change):
    """Return a model that applies `change` to its scores."""
    return gpt(scores=lambda self, x: change(GPT.scores(self, x)))


def within(change):
    """Return a model that applies `change` to the output of its blocks."""
    return gpt(scores=lambda self, x: GPT.scores(self, change(x)))


def answering(change):
    """Return a model whose answer is a function of its ids and scores."""

    def forward(self, ids):
        return change(ids, GPT.forward(self, ids))

    return gpt(forward=forward)


def at(i, x):
    """Return a column that is 1 at one position and 0 elsewhere."""
    return (torch.arange(x.size(1)) == i).unsqueeze(1).to(x)


def others_in_first(self, x):
    """In train mode, add the mean of all rows to the first row."""
    first = (torch.arange(len(x)) == 0).view(-1, 1, 1)
    return x + self.training * first * x.mean((0, 1))


def losing(loss):
    """Return a model whose loss is a function of scores and targets."""
    return gpt(TrainableGPT, loss=lambda self, *given: loss(*given))


class RectifiedTwice(GPT):
    """How many random numbers the first rrelu draws depends on its input."""

    def embed(self, ids):
        return F.rrelu(super().embed(ids), training=self.training)

    def scores(self, x):
        return super().scores(F.rrelu(x, training=self.training))


def too_large(scores, targets):
    raise OverflowError("no room")


def detached(self, ids, targets=None):
    x, loss = TrainableGPT.forward(self, ids, targets)
    return x.detach(), loss


def by_index(x, ids):
    shares = -x.log_softmax(-1).flatten(0, 1)
    return shares[range(ids.numel()), ids.flatten()].mean()


def loss_alone(self, ids, targets=None):
    x = GPT.forward(self, ids)
    return x if targets is None else mean(x, targets)


def shifted(x, ids):
    return mean(x[:, :-1], ids[:, 1:])


def scores_with_targets(self, ids, targets=None):
    x = GPT.forward(self, ids)
    return (
        (x, None) if targets is None else (1.01 * x, mean(1.01 * x, targets))
    )


def shifted_in_training(self, x, ids):
    return (shifted if self.training else mean)(x, ids)


class MixesRows(GPT):
    def scores(self, x):
        return super().scores(x - x.mean(0))


class SecondHead(TrainableGPT):
    """The loss uses a second head, for the token after the next one."""

    def add_parts(self, dim):
        self.second = nn.Linear(VOCAB, VOCAB)

    def loss(self, logits, targets):
        second = mean(self.second(logits)[:, :-1], targets[:, 1:])
        return mean(logits, targets) + second


class Refused(torch.autograd.Function):
    """A function whose backward pass raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no way back")


class LossWithoutWayBack(SecondHead):
    """The loss uses a second head, but its backward pass raises."""

    def forward(self, tokens, targets=None):
        scores, loss = super().forward(tokens, targets)
        return scores, None if loss is None else Refused.apply(loss)


class RoundedSums(NoPositions):
    """A running sum over the past is rounded at each token."""

    def body(self, x, mask):
        sums = [x[:, 0]]
        for part in x.unbind(1)[1:]:
            sums.append((sums[-1] + part).bfloat16().to(x))
        return torch.stack(sums, 1)


def late(loss):
    """Return a loss that is wrong only for texts of 13 or more tokens."""
    return lambda x, ids: (loss if x.size(1) > 12 else mean)(x, ids)


def near(by):
    """Return a model whose scores are log-probabilities plus a constant."""
    return scored(lambda x: x.log_softmax(-1) + by)


def declared(by):
    """Return a model whose log_probs adds a constant."""
    return gpt(log_probs=lambda self, ids: self(ids).log_softmax(-1) + by)


def folded(x):
    """Return x with small kinks and a wrong gradient."""
    x = x + (x * 3e4 % 1 - 0.5).abs() / 3e4
    return 1.5 * x - 0.5 * x.detach()


def sized(function, block_size=BLOCK):
    """Declare the sizes of a plain function, and return it."""
    function.vocab_size, function.block_size = VOCAB, block_size
    return function


def function():
    model = GPT()
    return sized(lambda ids: model(ids).log_softmax(-1))


def builtin():
    """Return torch.embedding, which has no signature, with a fixed table."""
    return sized(partial(torch.embedding, torch.randn(VOCAB, VOCAB)))


def fading(lost=None):
    """Return a function whose state decays to a fifth at each step."""
    table = torch.randn(VOCAB, VOCAB, dtype=torch.float64)

    def fading(ids):
        states, state = [], 0
        vectors = (F.one_hot(ids, VOCAB).double() @ table).unbind(1)
        for i, x in enumerate(vectors):
            states.append(state := 0.2 * state + x * (i != lost))
        return torch.stack(states, 1)

    return sized(fading, BLOCK + 8)


def trained():
    model = GPT()
    model.head.weight.data *= 100
    return model


class FadesFast(Mixer):
    def forward(self, x, mask):
        at = torch.arange(x.size(1), dtype=x.dtype)
        share = 0.1 ** (at.unsqueeze(1) - at)
        return share.masked_fill(~mask, 0.0) @ x


class Earlier(Attention):
    """Attention only to earlier positions, with a softmax in float32."""

    def weights(self, scores, mask):
        mask = mask.tril(-1)
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest).float()
        return (scores.softmax(-1) * mask).to(self.out.weight)


class InPlace(Block):
    def forward(self, x, mask):
        x += self.mixer(self.norm_1(x), mask)
        x += self.mlp(self.norm_2(x))
        return x


class Rounding(Block):
    """A block adds the sum of all positions, then subtracts it again."""

    def forward(self, x, mask):
        x = super().forward(x, mask)
        total = 1e3 * x.sum(1, keepdim=True)
        return x + ((x + total) - total - x)


class LeaksLater(GPT):
    layers, block = 2, Rounding

    def add_parts(self, dim):
        self.blocks[1] = Block(NO_MASK, self.mlp, self.norm, dim)


class Optional(GPT):
    def forward(self, input_ids=None, head_mask=None, scale=1.0):
        return super().forward(input_ids) * scale


class Draws(GPT):
    """In train mode, the tokens decide how many random numbers are drawn."""

    def embed(self, ids):
        if self.training:
            places = torch.arange(1, ids.size(1) + 1)
            torch.rand(int((ids * places**2).sum()) % 997)
        return F.dropout(super().embed(ids), 0.1, self.training)


class Faint(nn.LayerNorm):
    """The norm's input affects its output by less than float32 resolves."""

    def forward(self, x):
        return self.weight + 1e-9 * super().forward(x)


class TwoTables(GPT):
    """Each token has a row in a table of 30 and in a table of 20 rows."""

    def add_parts(self, dim):
        self.wte, self.more = nn.Embedding(30, dim), nn.Embedding(20, dim)

    def token_vectors(self, ids):
        return self.wte(ids) + self.more(ids)


class Seldom(GPT):
    """In train mode, only one call in five uses the parameter `gain`."""

    def add_parts(self, dim):
        self.gain = nn.Parameter(torch.ones(dim))

    def scores(self, x):
        often = self.training and torch.rand(()) < 0.8
        return super().scores(x if often else x * self.gain)


class RoundsABranch(Block):
    """The mixer's input is rounded, and the gradient ignores this."""

    def forward(self, x, mask):
        return x + self.mixer(x + (x.round() - x).detach(), mask)


class GrowsInTraining(GPT):
    def add_parts(self, dim):
        self.register_buffer("steps", torch.ones(()))

    def scores(self, x):
        self.steps += self.training
        return super().scores(x) * self.steps


class IdsFirstInTraining(GPT):
    def forward(self, ids):
        scores = super().forward(ids)
        return (ids, scores) if self.training else scores


class WholeInTraining(GPT):
    def scores(self, x):
        scores = super().scores(x)
        return scores.long() if self.training else scores


class Small(GPT):
    """The scores are spoilt if a weight is larger than 0.3."""

    def scores(self, x):
        scores = self.head(x)
        return self.spoilt(scores) if self.head.weight.max() > 0.3 else scores

    def spoilt(self, scores):
        raise OverflowError("too large")


class LosesInEval(TrainableGPT):
    def loss(self, logits, targets):
        return None if self.training else mean(logits, targets)


class HeadOfZeros(losing(shifted)):
    """The head starts at 0, so the first loss does not depend on the text."""

    def add_parts(self, dim):
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)


class AllInAList(nn.Module):
    vocab_size, block_size = VOCAB, BLOCK

    def __init__(self):
        super().__init__()
        self.weights = [torch.randn(VOCAB, VOCAB, requires_grad=True)]

    def forward(self, ids):
        return self.weights[0][ids]


class KeepsAndLeaks(GPT):
    calls = 0

    def add_parts(self, dim):
        self.register_buffer("moved", torch.zeros(1))

    def sees(self, i, j):
        return j <= i + 1

    def scores(self, x):
        self.calls += 1
        self.moved += 1
        return super().scores(x) + self.calls


class KeysDetached(Attention):
    def attend(self, q, k, v, mask):
        return super().attend(q, k.detach(), v, mask)


class FusedAttention(Attention):
    def attend(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)


class Asks(GPT):
    def forward(self, input_ids, attention_mask, scale=1.0, past=None):
        assert attention_mask.shape == input_ids.shape
        assert attention_mask.all()
        return super().forward(input_ids) * scale


class LastOnly(GPT):
    """A call returns the last position only, unless it gets the next ids."""

    def forward(self, idx, next_ids=None):
        scores = super().forward(idx)
        return scores if next_ids is not None else scores[:, -1]


class OnceOnly(GPT):
    def forward(self, ids):
        if hasattr(self, "called"):
            raise RuntimeError("called again")
        self.called = True
        return super().forward(ids)


class PartLeaks(GPT):
    """The method log_probs leaks; it runs neither forward nor hooks."""

    def log_probs(self, ids):
        x = self.embed(ids)
        x = self.body(x + x.roll(-1, 1), self.mask(ids))
        return self.scores(x).log_softmax(-1)


def generates(answer):
    """Return a model whose own generate repeats the first token."""

    def generate(self, idx, max_new_tokens, use_cache=True):
        return answer(idx[:, :1].repeat(1, max_new_tokens), use_cache)

    return gpt(generate=generate)


class LastAlone(CachedGPT):
    def decode(self, ids, cache):
        scores, cache = super().decode(ids, cache)
        return scores[:, -1], cache


class HandedBack(GPT):
    """A model that accepts a cache but never reads it."""

    def init_cache(self, rows):
        return [torch.zeros(rows, 2)]

    def decode(self, ids, cache):
        return self(ids), cache


class GoesOn(CachedGPT, Unlimited):
    """The table has positions for two more tokens than the model declares."""

    def add_parts(self, dim):
        self.wpe = nn.Embedding(BLOCK + 2, dim)


NAN = math.nan
PASSED = [
    (
        GPT,
        "shape",
        "block_size=300 was given; the model declares block_size=32",
    ),
    (
        function,
        "causality",
        "; not tried: larger weights .a function has no weights",
    ),
    (
        Small,
        "causality",
        "not tried: larger weights .the model raised OverflowE",
    ),
    (
        gpt(Small, spoilt=lambda self, scores: scores / 0),
        "causality",
        "; not tried: larger weights .the scores are not finite",
    ),
    (gpt(FORGETS, local_attn_window_size=6), "context_use", ""),
    (gpt(FORGETS, attention_window=[4, 6]), "context_use", ""),
    (lambda: GPT(50257, 64, dim=2), "vocabulary", r"^540 of 50257 ids$"),
    (gpt(mixer=Earlier), "causality", "in float64 the scores are NaN or in"),
    (Draws, "causality", "shape of random draws depends on the tokens"),
    (Optional, "causality", "^never given: head_mask, scale; proved"),
    (Draws, "batch_independence", "random draws depend on the tokens"),
    (fading, "context_use", "memory fades below rounding"),
    (SHARP(), "signal", "may have decided"),
    (gpt(mixer=Unscaled), "signal", r"by 1 where 1/sqrt\(8\) is usual$"),
    (
        gpt(forward=lambda self, ids: GPT.forward(self, within_limit(ids))),
        "length_limit",
        f"^{BLOCK + 1} tokens: ValueError: {BLOCK + 1} tokens > {BLOCK}$",
    ),
    (lambda: GPT(dim=4, mixer=SHARP.mixer), "signal", "chooses? positions"),
    (
        gpt(token_vectors=lambda self, ids: self.wte(ids * 2**30 % 13)),
        "shape",
        "int32 ids have other scores",
    ),
    (
        gpt(
            token_vectors=lambda self, ids: (
                F.one_hot(ids, VOCAB).float() @ self.wte.weight
            )
        ),
        "shape",
        "int32 ids are refused .RuntimeError: one_hot",
    ),
    (IdsFirstInTraining, "shape", ""),
    (
        answering(lambda i, x: x.transpose(0, 1)),
        "shape",
        r"^\(time, batch, vocab\), which holds in that reading; also int",
    ),
    (MixesRows, "causality", "; rows depend on .* check_batch_independence$"),
    (builtin, "shape", ""),
    (gpt(forward=lambda self, *given: GPT.forward(self, *given)), "shape", ""),
    (gpt(config=property(lambda self: 1 / 0)), "shape", ""),
    (function, "normalised", ""),
    (declared(1e-14), "normalised", ""),
    (GrowsInTraining, "causality", ""),
    (answering(lambda i, x: x.transpose(0, 1)), "causality", "time, b"),
    (Asks, "determinism", ""),
    (LastOnly, "causality", "called with next_ids, all 0"),
    (lambda: NanoGPT(GPTConfig()), "causality", "called with targets, all 0"),
    (
        gpt(add_parts=lambda self, dim: self.wpe.requires_grad_(False)),
        "gradient_flow",
        "; frozen: wpe.weight$",
    ),
    (
        gpt(
            TrainableGPT,
            add_parts=lambda self, dim: self.add_module(
                "gate", nn.Linear(dim, 1, False)
            ),
            loss=lambda self, x, ids: (
                mean(x, ids) + self.gate.weight.square().sum()
            ),
        ),
        "gradient_flow",
        "; only the returned loss, and no score, .* for 1: gate.weight$",
    ),
    (
        Stretches,
        "prefix_consistency",
        r"^prefixes of lengths 2 to 300; not tried: lengths past 999, where "
        r"test_messages\.py:\d+ `x\.size\(1\) > self\.trained_on` branches$",
    ),
    (
        gpt(KeepsAndLeaks, mixer=FusedAttention),
        "batch_independence",
        "; tested: alone, reordered",  # the fused kernel draws no numbers
    ),
    (scored(lambda x: x.float()), "dtype", "bfloat16 answers in float32"),
    (BUILDS["behind_padding"], "shape", "^7 sizes, the longest of 32; "),
    (BUILDS["behind_padding"], "length_limit", "^34 tokens are declared, 32 "),
    (BUILDS["padded_tables"], "loss", "given over the 64 scores of a padded"),
    (BUILDS["balance_added"], "loss", "plus .*, which targets do not change"),
    (
        BUILDS["positions_to_spare"],
        "gradient_flow",
        r"; not reached by these texts: 32 of 64 rows of wpe\.weight, 32 of 6",
    ),
    (
        gpt(mlp=HalfOfExperts),
        "gradient_flow",
        r"; not reached by these texts: 20 of 40 rows of \S+up, 20 of 40 rows",
    ),
    (gpt(mlp=RowsFrozen), "gradient_flow", "; rows not judged, as a hook may"),
    (Seldom, "gradient_flow", ""),
    (SecondHead, "gradient_flow", ""),
    (
        gpt(block=RoundsABranch),
        "gradients",
        "piecewise-constant operations are est",
    ),
    (
        gpt(add_parts=lambda self, dim: self.wte.weight.data[9:].fill_(0.5)),
        "vocabulary",  # ids from 9 on start with equal rows, as added ids do
        "^17 of 17 ids$",
    ),
    (BUILDS["one_score_at_zero"], "vocabulary", "of id 16 never moves"),
    (
        scored(lambda x: F.pad(x[..., 2:], (0, 2), value=-1e30)),
        "vocabulary",
        "^17 of 17 ids$",
    ),
    (BUILDS["masked_ids_and_zeros"], "vocabulary", "^17 of 17 ids$"),
    (TwoTables, "vocabulary", "table has 3 rows to spare"),
    (function, "length_limit", ""),
    (gpt(mixer=FadesFast), "context_use", r"to 32$"),
    (within(torch.round), "context_use", r"to 32$"),
    (
        within(lambda x: x + torch.det(torch.eye(2, dtype=x.dtype))),
        "dtype",
        r"^float64, another device; not tried: in bfloat16 \(PyTorch has no",
    ),
    (
        BUILDS["softmax_in_bfloat16"],
        "dtype",
        r"correct_models\.py:\d+ `.*bfloat16\(\)` computes in bfloat16 "
        r"inside a float64 call: scores move by 0\.00\d+$",
    ),
    (
        gpt(
            add_parts=lambda self, dim: nn.init.zeros_(self.head.weight),
            scores=lambda self, x: GPT.scores(self, x.half().to(x)),
        ),
        "dtype",
        r"computes in float16 inside .*: scores move by 0\.00\d+$",
    ),
    (lambda: GPT(block_size=300), "dtype", "float64, bfloat16, float16, an"),
    (within(lambda x: x * 1e5 / 1e5), "dtype", "or infinite in float16"),
    (
        gpt(CacheWithMask, hide=lambda self, mask, shown: 1 / 0),
        "cache",
        "; not with a mask: .*ZeroDivisionError",
    ),
    (
        Padded,
        "batch_independence",
        r"after masked padding .*: by \d.\d+: do positions count the padding",
    ),
    (
        gpt(Padded, embed=positions_of_the_mask, forward=counted),
        "batch_independence",
        r": by \d.\d+, not with position_ids from the mask$",
    ),
    (GoesOn, "cache", ""),
    (BUILDS["cache_behind_the_loss"], "cache", "kv_cache: lengths to"),
    (BUILDS["one_at_a_time"], "cache", "one token at a time only: the"),
    (BUILDS["cache_inside"], "cache", "start_pos: lengths to 32"),
    (LastAlone, "cache", "init_cache and decode: lengths to 32"),
    *(
        (
            generates(answer),
            "cache",
            "^decoding: generate with use_cache=True and use_cache=False, 8 "
            "new tokens: the same ids$",
        )
        for answer in (
            lambda new, cached: (new, None),
            lambda new, cached: [*new.unbind(1)],
            lambda new, cached: (ids for ids in new.unbind(1)),
            lambda new, cached: new.tolist(),
        )
    ),
    (HeadOfZeros, "loss", "of targets shifted by one inside,"),
    (losing(lambda *given: None), "loss", "targets, returns no loss of one"),
    (gpt(forward=loss_alone), "loss", "of targets as given, -100 left out$"),
    (losing(by_index), "loss", "targets as given$"),
    (
        losing(lambda x, i: None if i.min() < 0 else mean(x, i)),
        "loss",
        "targets as given$",
    ),
    (LosesInEval, "loss", ""),
    (gpt(TrainableGPT, forward=detached), "loss", ""),
    (lambda: TrainableGPT().requires_grad_(False), "loss", ""),
    (
        losing(lambda scores, targets: mean(scores, targets).detach()),
        "gradient_flow",
        "^18 parameters",
    ),
    (RectifiedTwice, "causality", "no rule for rrelu_with_noise"),
    (gpt(mlp=Sleeping), "gradient_flow", "^18 parameters$"),
]
SKIPPED = [
    (fading, "gradients", "^a function has no weights$"),
    (scored(lambda x: x.detach()), "gradients", "^the scores have no gradi"),
    (gpt(CachedGPT, can_cache_kv=False), "cache", "says can_cache_kv=False$"),
    (lambda: GPT(block_size=1), "causality", "^one token has no future$"),
    (
        gpt(CachedGPT, embed=lambda self, i: F.dropout(GPT.embed(self, i))),
        "cache",
        "and differ by size: see check_determinism",
    ),
    (builtin, "signal", "no part and no attention can be seen"),
    (within(lambda x: x + (x * 0).sqrt()), "causal_gradients", "see check_fi"),
    (
        gpt(embed=lambda self, ids: GPT.embed(self, ids).detach()),
        "causal_gradients",
        "no embedding of the tokens can be found",
    ),
    (lambda: GPT().requires_grad_(False), "gradient_flow", "every param"),
    (lambda: GPT(block_size=4097), "length_limit", "is too long to try"),
    (near(2e-3), "normalised", "logits"),
    (
        gpt(forward=lambda self, ids, kv_cache=None: GPT.forward(self, ids)),
        "cache",
        "no kv_cache comes with the scores",
    ),
    (GPT, "cache", "no cache was found: give the model init_cache"),
    (RoundedSums, "order_sensitivity", "as rounding inside the model may"),
    (trained(), "initial_loss", "the model may be trained"),
    (lambda: TrainableGPT(block_size=2), "loss", "needs three tokens"),
    (
        gpt(RoundedSums, scores=lambda self, x: GPT.scores(self, x) / 100),
        "order_sensitivity",
        "as rounding inside the model may",
    ),
]
FAILED = [
    (HandedBack, "cache", "init_cache and decode.*, position 1 of 7"),
    (gpt(FORGETS, kernel_size=6), "context_use", ""),
    (gpt(FORGETS, chunk_size=6), "context_use", ""),
    (partial(fading, 9), "context_use", "never change with token 9$"),
    (
        FORGETS,
        "context_use",
        "tokens 0, 1; .*; if a window is meant, set sliding_window on the "
        r"model or its config, or give window=(\d+) \(in the shell --wind"
        r"ow \1\)$",
    ),
    (
        BUILDS["no_mask"],
        "causality",
        r"^position 0 sees token 1: small_gpt\.py:\d+ `.*softmax\(-1\)` lets "
        r"it through, at length 2, by [\d.e-]+; token 1 changed from (\d+) to "
        r"\d+ in the ids \d+ \1; rounding there is [\de-]+ \(float64\); "
        r"first seen at \S+ `.*` \(blocks\.0\.\w+\); way: small_gpt\.py:.*`$",
    ),
    (
        BUILDS["mask_one_too_far"],
        "causality",
        r"^position 0 sees token 1: .*\(blocks\.0\.mixer\)",
    ),
    (  # only the first head has a mask
        BUILDS["mask_of_first_head"],
        "causality",
        r"^position 0 sees token 1: .*\(blocks\.0\.mixer\)",
    ),
    (
        BUILDS["block_summary"],
        "causality",
        r"^position 0 sees token 1: .*\(blocks\.0\.mixer\)",
    ),
    (
        BUILDS["mask_too_weak"],
        "causality",
        r"^position 0 sees .*weights scaled up.*\(blocks\.0\.mixer\)",
    ),
    (KeepsAndLeaks, "determinism", ""),
    (KeepsAndLeaks, "causality", r"\(moved\), .* start each call from the st"),
    (EachThirdCall, "determinism", r"of the next one \(calls\), which ch"),
    (
        gpt(BUILDS["positions_in_place"], mixer=NO_MASK, block=InPlace),
        "causality",
        r"first seen at .*` \(blocks\.0\.mixer\)",
    ),
    (
        gpt(mask=lambda self, i: GPT.mask(self, i) | (i.size(1) > 14)),
        "causality",
        "at length 15,",
    ),
    (
        gpt(
            BUILDS["loss_alone_leaks"],
            loss=lambda self, x, i: F.cross_entropy(x.mT, i, ignore_index=-1),
        ),
        "causality",
        "position 0 sees token 1",
    ),
    # the message names the first line that depends on a later token, even if
    # its value cancels out
    (LeaksLater, "causality", r"first seen at \S+ `x \+ total` \(blocks\.0\)"),
    (answering(lambda i, x: "text"), "shape", "a str without tensors"),
    (answering(lambda i, x: [[[[x]]]]), "shape", "without tensors"),
    (scored(lambda x: F.pad(x, (0, 3))), "shape", "scores are 20 wide, the"),
    (gpt(log_probs=lambda self, i: self(i)[:, 0]), "shape", r"e \(2, 6, 17\)"),
    (WholeInTraining, "shape", "scores have dtype torch.int64"),
    (within(lambda x: x * NAN), "causality", "compared are NaN"),
    (
        gpt(
            Padded,
            padded=lambda self, mask, shown: (
                mask & shown if self.training or shown.all() else shown
            ),
        ),
        "causality",
        "with a left-padded attention mask",
    ),
    (within(lambda x: x * 0), "causality", "no change of any token moves any"),
    (
        gpt(sees=lambda self, i, j: (j <= i) | (j == i + 2)),
        "causality",
        r"^position 0 sees token 2: .*rounding there is \S+ \(.*\); first",
    ),
    (
        answering(
            lambda ids, x: x.masked_fill(
                (ids[:, :1] == VOCAB - 1)[..., None] * at(5, x).bool(), NAN
            )
        ),
        "finite",
        "% of the scores are NaN or infinite at length .* at position 5 of",
    ),
    (BUILDS["mask_only_in_eval"], "causal_gradients", "in train mode"),
    (gpt(mixer=Inverted), "signal", r"multiplied by 2\.\d*, where 1 / sq"),
    (gpt(sees=lambda self, i, j: i == j), "order_sensitivity", "past is not"),
    (PartLeaks, "causality", r"first seen at \S+ `x\.roll\(-1, 1\)`"),
    (
        within(lambda x: torch.empty_like(x).copy_(x.roll(-1, 1))),
        "causality",
        r"token 1: \S+ `x\.roll\(.*first seen at \S+ `x\.roll\(-1, 1\)`",
    ),
    (
        scored(lambda x: x + at(3, x) * x.mean((0, 1))),
        "batch_independence",
        r"row \d of a batch of 5 depends .* position 3 move by",
    ),
    (
        gpt(scores=lambda self, x: GPT.scores(self, others_in_first(self, x))),
        "batch_independence",
        "row 0 .* with the other rows replaced .* in train mode",
    ),
    (
        gpt(mixer=MeanOfRows),
        "batch_independence",
        r"; let through at test_messages\.py:\d+ `y\.mean\(0\)`$",
    ),
    *(
        (
            scored(mixed),
            "batch_independence",
            r"; let through at test_messages\.py:\d+ `x \+ x\[.*1.*\]`$",
        )
        for mixed in (lambda x: x + x[:1], lambda x: x + x[-1:])
    ),
    (
        within(lambda x: x.transpose(0, 1).reshape(x.shape)),
        "batch_independence",
        r"; let through at \S+ `x\.transpose\(0, 1\)\.reshape\(x\.shape\)`$",
    ),
    (
        scored(lambda x: F.pad(x[:, :-1], (0, 0, 1, 0))),
        "context_use",
        "with token 1, the newest: do they come a step late.; no operation",
    ),
    (
        scored(lambda x: x.float() if x.dtype == torch.double else x),
        "dtype",
        "a model in float64 answers in float32",
    ),
    (
        scored(lambda x: x * (torch.arange(VOCAB) > 5)),
        "vocabulary",
        r"^the scores of ids 0, 1, 2, 3 \(of 6\) are the same for all",
    ),
    (
        generates(lambda new, cached: new[:, : 8 - cached]),
        "cache",
        r"of shapes \(4, 8\) and \(4, 7\), without first$",
    ),
    (
        generates(lambda new, cached: new + at(3, new)[:, 0].long() * cached),
        "cache",
        r"new token 3 of row 0 is \d+ with the cache and \d+ without, behind",
    ),
    (OnceOnly, "determinism", "the model raised RuntimeError: called again"),
    (scored(lambda x: x.softmax(-1)), "normalised", "are probabilities"),
    (
        scored(lambda x: x.log_softmax(-1) + 5e-4 * at(3, x)),
        "normalised",
        r"of position 3 sum to 1\.0005\d*: in logarithms 0\.0005 from 0 ",
    ),
    (near(1e-12), "normalised", "in logarithms 1e-12 from 0"),
    (declared(2e-3), "normalised", "in logarithms 0.002 from 0"),
    (within(folded), "gradients", r"stops at test_messages.py:\d+ `x.detach"),
    (scored(lambda x: x.detach()), "gradient_flow", "carry no gradient"),
    (AllInAList, "gradient_flow", "the model has no trainable parameter"),
    (
        gpt(mixer=KeysDetached),
        "gradient_flow",
        r"^16 of 48 rows of \S+ move scores and never get a gradient: some",
    ),
    (OneOfFive, "gradient_flow", "^4 of 5 rows of tables never move a score$"),
    *(
        (
            build,
            "gradient_flow",
            r"^10 of 32 rows of blocks\.0\.mlp\.up\.weight, .* never move a s",
        )
        for build in (UnitsOfOneLength, UnitsBesideChoices)
    ),
    (gpt(mlp=Unused), "gradient_flow", r"^6 of .*unused.1.bias and 2 more$"),
    (LossWithoutWayBack, "gradient_flow", "no way back.* pass of the loss"),
    (scored(lambda x: x / (x.dtype != torch.bfloat16)), "dtype", "NaN"),
    (gpt(norm=Faint), "signal", r"norm_1 \(Faint\) puts out the sa"),
    (scored(lambda x: x.cpu()), "dtype", "the model answers on cpu"),
    (
        answering(lambda i, x: x.masked_fill((i == 5)[..., None], NAN)),
        "vocabulary",
        "id 5 gives scores that are NaN",
    ),
    (
        gpt(
            forward=lambda self, ids: GPT.forward(self, ids.clamp(0, 16))[
                :, : -1 if (ids > 16).any() else None
            ]
        ),
        "vocabulary",
        "should have shape",
    ),
    (
        gpt(load_state_dict=lambda self, *state, **how: 1 / 0),
        "state_dict",
        "a copy does not load the state: ZeroDivisionError",
    ),
    (losing(lambda *given: mean(*given) * NAN), "loss", "the loss is nan"),
    (
        losing(lambda *given: shifted(*given) * 1.0001),
        "loss",
        r" is (\S{4})\d*, but .* or \1\d* shifted by one; no sum",
    ),
    (SecondHead, "loss", "shifted by one; no sum, second shift or mean over"),
    (
        losing(lambda x, i: mean(x, i) + 0.1 * mean(x / 2, i)),
        "loss",
        "gives it, nor a term added to the mean that targets do not chan",
    ),
    (losing(late(lambda *x: None)), "loss", "no loss for 1 x 13 targets"),
    *(
        (losing(loss), "loss", f"it is the loss {words}$")
        for words, loss in (
            ("in bits", lambda x, i: mean(x, i) / math.log(2)),
            (
                "of targets transposed",
                lambda x, i: mean(x, i.mT.reshape(i.shape)),
            ),
            (
                "of chunks of 9, the mean of their means",
                lambda x, i: chunks(x, i, 9).mean(),
            ),
            (
                "3 times as large, as a sum over 3 chunks",
                lambda x, i: chunks(x, i, 8).sum(),
            ),
            (
                "of chunks of 4 along time, the mean of their means",
                lambda x, i: (
                    mean(x[:, :4], i[:, :4]) / 2 + mean(x[:, 4:], i[:, 4:]) / 2
                ),
            ),
            (
                "that leaves the last position out",
                lambda x, i: mean(x[:, :-1], i[:, :-1]),
            ),
        )
    ),
    (gpt(TrainableGPT, loss=shifted_in_training), "loss", "ifted by one insi"),
    (
        gpt(TrainableGPT, forward=scores_with_targets),
        "loss",
        r"^the scores with targets are [\d.]+ from those without$",
    ),
    (losing(late(shifted)), "loss", "and for 1 x 13 of them shifted by one"),
    (
        losing(too_large),
        "loss",
        r"OverflowError: no room .* in eval mode, with targets$",
    ),
    (
        gpt(OneOfFive, count=4),
        "gradient_flow",
        "^3 of 4 rows of tables never move a score$",
    ),
]


PROVING = ("causality", "batch_independence")  # these take seconds to pass


def is_quick(status, build, check, words):
    """Return whether a row runs on each push.

    A model of the zoo that must fail is left out, because other tests run it.
    """
    if status == "failed":
        return build not in ZOO
    return check not in PROVING


@pytest.mark.parametrize(
    ("status", "build", "check", "words"),
    slow_unless(
        is_quick,
        [
            pytest.param(status, *row, id=f"{status}-{row[1]}-{row[2]}-{i}")
            for status, rows in (
                ("passed", PASSED),
                ("skipped", SKIPPED),
                ("failed", FAILED),
            )
            for i, row in enumerate(rows)
        ],
    ),
)
def test_a_check_states_its_finding(status, build, check, words):
    # a small block size for causality, for which few lengths are enough
    size = 16 if check == "causality" else 300
    report = check_model(build, checks=[check], block_size=size)
    result = report.results[0]
    assert result.status == status, str(report)
    said = [result.message, *report.notes]
    assert any(re.search(words, text) for text in said), said


class Whole(CachedGPT, TrainableGPT):
    """A sound model with a loss and a cache."""


GOLDEN = Path(__file__).with_name("report_of_a_sound_model.txt")


@pytest.mark.slow
def test_the_report_of_a_sound_model_is_as_written(monkeypatch):
    monkeypatch.setattr(GPT, "layers", 2)
    report = check_model(Whole, budget=math.inf)
    found = [result.message for result in report.results]
    assert found == GOLDEN.read_text("utf-8").splitlines()


class Scales(GPT):
    """A model that favours one token, and learns only the scores' size."""

    def add_parts(self, dim):
        self.size = nn.Parameter(torch.zeros(()))

    def forward(self, ids):
        return F.one_hot(ids.roll(self.back, 1), VOCAB) * self.size * 20


@pytest.mark.parametrize(
    ("size", "back", "words"),
    [
        (6, 2, "^random 2.8.. of 2.773, repeated 0.[34]..$"),
        (64, 2, "^random 2.8.. of 2.773, repeated 0.3..$"),
        (64, 0, "stays at 2.8.. of ln.16. = 2.773: the model does not le"),
        (64, -1, "falls to 0.3.., below their entropy ln.16. = 2.773: the m"),
        (5, 2, "^needs sequences of 6 tokens$"),
    ],
)
def test_the_entropy_check_states_what_it_trained(
    size, back, words, monkeypatch
):
    monkeypatch.setattr("gpt_duet.invariants.checks.entropy_bound.STEPS", 100)
    build = partial(gpt(Scales, back=back), block_size=size)
    report = check_model(build, checks=["entropy_bound"])
    assert re.search(words, report.results[0].message), str(report)


class HiddenRows(Padded):
    """If a mask hides all keys of a position, its scores are NaN."""

    def padded(self, mask, shown):
        own = torch.eye(mask.size(-1)).bool()
        return mask & (shown & ~own | shown.all(-1, keepdim=True))


def test_nan_scores_name_the_mode_and_the_line():
    report = check_model(HiddenRows, checks=["causality"], block_size=8)
    said = report.results[0].message
    assert report.failed == ["check_causality"], said
    words = (
        r"scores that are compared are NaN.*, with a left-padded attention "
        r"mask.*, at length \d+; the first NaN is made at small_gpt\.py:\d+ "
        r"`.*softmax\(-1\)`; check_finite is about this"
    )
    assert re.search(words, said), said


class Moves(GPT):
    """Each call changes a buffer, in eval mode as well."""

    def add_parts(self, dim):
        self.register_buffer("mean", torch.zeros(dim))

    def scores(self, x):
        self.mean = self.mean + x.detach().mean((0, 1))
        return super().scores(x + self.mean)


def test_a_buffer_that_moves_is_one_failure():
    names = ["shape", "determinism"]
    report = check_model(Moves, checks=names, block_size=8)
    assert report.failed == ["check_determinism"], str(report)


def test_a_chunk_that_a_loss_drops_is_a_fault_of_check_loss_only():
    report = check_model(FifthsCounted, checks=["causality", "loss"])
    assert report.failed == ["check_loss"], str(report)
    assert "whose last one is dropped" in report.results[1].message
