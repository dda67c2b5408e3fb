"""Models that are broken on purpose, each in one way, to test the checks.

A fault is a method that replaces a sound method of the small GPT, or a class
if one method is not enough. Its docstring explains the fault in a sentence.
Its decorator names the check that must catch it. `only` marks a fault that no
other check can see.
"""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from correct_models import (
    BiasByDistance,
    DoubledRoom,
    Fused,
    FusedWithZLoss,
    OneFactorZero,
    Resettable,
    TakesAll,
    TakesEnds,
)
from small_gpt import (
    BLOCK,
    DIM,
    GPT,
    INF,
    MLP,
    VOCAB,
    Attention,
    Block,
    CachedGPT,
    CacheInside,
    CacheInTheCall,
    CacheWithMask,
    Mixer,
    Model,
    NoPositions,
    Packed,
    Padded,
    Past,
    TrainableGPT,
    Unlimited,
    angles,
    collect,
    cross_entropy,
    earlier_mean,
    positions,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

BROKEN: list[Model] = []
# the check that trains the model; other checks only call it
SLOW = "check_entropy_bound"


def broken(check, *owner, **details):
    """Return a decorator that adds a model and the check that it must fail."""
    return collect(BROKEN, *owner, check=check, **details)


def as_parameters(models):
    """Return the models as test parameters, with the check in each id.

    Runs with --check-shapes use only one model for each check.
    """
    parameters, seen = [], set()
    for model in models:
        marks = [pytest.mark.unhooked] if model.check in seen else []
        seen.add(model.check)
        parameters.append(pytest.param(model, id=str(model), marks=marks))
    return parameters


class Norm(nn.LayerNorm):
    part = "norm"


# --- Shape -----------------------------------------------------------------


@broken("check_shape", GPT, "forward", only=True)
def full_row_flattened(self, tokens):
    """In train mode, a single row of full length loses its batch axis."""
    scores = GPT.forward(self, tokens)
    packed = self.training and tokens.shape == (1, self.block_size)
    return scores.squeeze(0) if packed else scores


@broken("check_shape", GPT, "forward")
def padded_to_kernel(self, tokens):
    """Texts of fewer than 4 tokens are padded to 4, a kernel's size, and the
    scores are not cut back."""
    missing = max(4 - tokens.size(1), 0)
    return GPT.forward(self, F.pad(tokens, (0, missing)))


@broken("check_shape", GPT, "token_vectors", only=True)
def strides_ignored(self, tokens):
    """A sliced tensor of ids is read as if its rows were contiguous."""
    return self.wte(tokens.as_strided(tokens.shape, (tokens.size(1), 1)))


@broken("check_shape", GPT, "token_vectors", only=True)
def rows_of_a_stride(self, tokens):
    """A transposed tensor of ids is read as if it were a slice."""
    rows = tokens.stride(0) if tokens.size(0) > 1 else tokens.size(1)
    return self.wte(tokens.as_strided(tokens.shape, (rows, 1)))


# --- NaN and infinity ------------------------------------------------------


@broken("check_finite", Attention, "hide")
def dropout_before_softmax(self, scores, mask):
    """In train mode dropout multiplies -inf by 0, which is NaN. (GPT from
    Scratch, listing 5)"""
    return F.dropout(Attention.hide(self, scores, mask), 0.1, self.training)


@broken("check_finite", only=True)
class RootOfZero(GPT):
    """A parameter starts at 0, so the gradient of its square root is NaN."""

    def add_parts(self, dim):
        self.gate = nn.Parameter(torch.zeros(1))

    def scores(self, x):
        return super().scores(x * (1 + (self.gate * self.gate).sqrt()))


@broken("check_finite", GPT, "mask")
def padding_hides_first(self, tokens):
    """Id 0 is padding. If it comes first, it sees nothing and gets NaN."""
    return GPT.mask(self, tokens) & (tokens != 0).unsqueeze(1)


@broken("check_finite", GPT, "embed")
def norm_without_eps(self, tokens):
    """A difference of neighbours is divided by its norm, which may be 0."""
    x = self.wte(tokens)
    step = (x - F.pad(x, (0, 0, 1, -1))).detach()
    return GPT.embed(self, tokens) + step / step.norm(dim=-1, keepdim=True)


@broken("check_finite", GPT, "embed")
def sample_deviation(self, tokens):
    """The sum of squared deviations is divided by n - 1, which is 0 at
    position 0."""
    x = GPT.embed(self, tokens)
    n = 1 + positions(tokens).view(1, -1, 1)
    spread = (x - earlier_mean(x)).square().cumsum(1) / (n - 1)
    return x / (1 + spread)


@broken("check_finite", Attention, "weights")
def softmax_without_maximum(self, scores, mask):
    """A hand-written softmax overflows once a score exceeds 88."""
    shares = self.hide(scores, mask).exp()
    return shares / shares.sum(-1, keepdim=True)


@broken("check_finite", Attention, "weights")
def softmax_masked_by_zeros(self, scores, mask):
    """A hand-written softmax multiplies exponentials by the mask; infinity
    times 0 is NaN."""
    shares = scores.exp() * mask
    return shares / shares.sum(-1, keepdim=True)


# --- Causality: the mask ---------------------------------------------------


@broken("check_causality", Attention, "hide")
def no_mask(self, scores, mask):
    """Every position sees every other position. (keras-team/keras#23038)"""
    return scores


@broken("check_causality", GPT, "sees")
def mask_one_too_far(self, i, j):
    """The mask is one place too wide: each position sees the next token."""
    return j <= i + 1


@broken("check_causality", GPT, "sees")
def mask_transposed(self, i, j):
    """The mask shows only the future. (rasbt/LLMs-from-scratch#1062)"""
    return j >= i


@broken("check_causality", Attention, "hide")
def mask_too_weak(self, scores, mask):
    """The mask adds only -1e4, so a large score wins. (karpathy/minGPT#75)"""
    return scores + torch.where(mask, 0.0, -1e4).to(scores.dtype)


class Weak(GPT):
    mixer = type("Weak", (Attention,), {"hide": mask_too_weak})


@broken("check_causality", only=True)
class WeakInAFrozenModel(Weak):
    """The mask adds only -1e4, and no weight is trainable."""

    def add_parts(self, dim):
        self.requires_grad_(False)


@broken("check_causality", only=True)
class WeakWithBareWeights(Mixer):
    """The mask adds only -1e4, and the weights are in a ParameterDict."""

    def add_parts(self, dim):
        self.weights = nn.ParameterDict(
            {name: torch.randn(dim, dim) / 8 for name in "qkvo"}
        )

    def forward(self, x, mask):
        q, k, v = (x @ self.weights[name] for name in "qkv")
        scores = q @ k.mT / 4 + torch.where(mask, 0.0, -1e4).to(x)
        return scores.softmax(-1) @ v @ self.weights["o"]


@broken("check_causality")
class WeakWithAMaskedId(Weak):
    """The mask adds only -1e4, and one id's score is always -inf."""

    def scores(self, x):
        hidden = torch.arange(VOCAB, device=x.device) == 3
        return super().scores(x).masked_fill(hidden, -INF)


@broken("check_causality", Attention, "weights")
def faint_in_single(self, scores, mask):
    """A softmax in float32 gives the future 1e-5 of the attention."""
    faint = torch.where(mask, 0.0, math.log(1e-5)).to(scores)
    return (scores + faint).float().softmax(-1).to(scores.dtype)


@broken("check_causality", Attention, "weights")
def leak_in_bfloat16(self, scores, mask):
    """The softmax is computed in bfloat16, and its mask is dropped."""
    return scores.bfloat16().softmax(-1).to(scores.dtype)


@broken("check_causality", GPT, "mask", only=True)
def packed_row_unmasked(self, tokens):
    """In train mode a batch of one row of full length has no mask."""
    packed = self.training and tokens.shape == (1, self.block_size)
    return GPT.mask(self, tokens) | packed


@broken("check_causality", GPT, "mask", vocab_size=709)
def padding_id_untold(self, tokens):
    """Id 500 is undeclared padding; a text that ends in two has no mask."""
    padded = (tokens[:, -2:] == 500).all(1).view(-1, 1, 1)
    return GPT.mask(self, tokens) | padded


@broken("check_causality", GPT, "mask", block_size=80)
def tile_in_training(self, tokens):
    """In train mode a text of 64 tokens, exactly one tile, has no mask."""
    filled = self.training and tokens.size(1) == 64
    return GPT.mask(self, tokens) | filled


@broken("check_causality", Attention, "attend", only=True)
def fast_kernel_in_bfloat16(self, q, k, v, mask):
    """In bfloat16 a fast kernel runs without its causal flag."""
    if q.dtype == torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v)
    return Attention.attend(self, q, k, v, mask)


@broken("check_causality", Attention, "attend")
def fast_kernel_in_single(self, q, k, v, mask):
    """In any dtype but float64, a fast kernel runs without a causal flag."""
    if q.dtype != torch.float64:
        return F.scaled_dot_product_attention(q, k, v)
    return Attention.attend(self, q, k, v, mask)


@broken("check_causality", GPT, "mask", block_size=140)
def tile_begun_unmasked(self, tokens):
    """A tile has 64 tokens. A text of 65, which has just begun a second tile,
    has no mask."""
    return GPT.mask(self, tokens) | (tokens.size(1) == 65)


@broken("check_causality", Padded, "padded", only=True)
def right_padding_only(self, mask, shown):
    """A padding mask that hides the end replaces the causal mask."""
    return mask & shown if shown[0, 0, -1] else shown


@broken("check_causality", Padded, "padded", only=True)
def padding_in_training(self, mask, shown):
    """In train mode a padding mask replaces the causal mask."""
    return shown if self.training and not shown.all() else mask & shown


@broken("check_causality", Padded, "padded")
def padded_row_alone(self, mask, shown):
    """In a batch of one row, a padding mask replaces the causal mask."""
    alone = len(shown) == 1 and not shown.all()
    return shown if alone else mask & shown


@broken("check_causality", only=True)
class PaddedByNumbers(Padded):
    """If the padding mask hides the end, the causal mask adds only -1e4."""

    class mixer(Attention):
        def hide(self, scores, mask):
            numbers = mask.is_floating_point()
            return scores + mask if numbers else super().hide(scores, mask)

    def padded(self, mask, shown):
        if shown[0, 0, -1]:
            return mask & shown
        return torch.where(mask & shown, 0.0, -1e4).to(self.wte.weight)


@broken("check_causality", Attention, "weights")
def mask_after_softmax(self, scores, mask):
    """The softmax includes the future; the mask is applied to its results."""
    return scores.softmax(-1) * mask


@broken("check_causality", Attention, "hide")
def mask_of_first_row(self, scores, mask):
    """Only the first row of the batch has a mask."""
    first = Attention.hide(self, scores[:1], mask)
    return torch.cat([first, scores[1:]])


@broken("check_causality", Attention, "hide")
def mask_of_first_head(self, scores, mask):
    """Only the first head has a mask."""
    first = Attention.hide(self, scores[:, :1], mask)
    return torch.cat([first, scores[:, 1:]], 1)


@broken("check_causality", Attention, "hide")
def mask_only_in_eval(self, scores, mask):
    """Train mode has no mask, so evaluation looks sound."""
    return scores if self.training else Attention.hide(self, scores, mask)


@broken("check_causality", Attention, "hide")
def mask_only_in_training(self, scores, mask):
    """Eval mode has no mask."""
    return Attention.hide(self, scores, mask) if self.training else scores


@broken("check_causality", Attention, "attend")
def mask_only_with_grad(self, q, k, v, mask):
    """Without gradients, a fast path for inference omits the mask."""
    if torch.is_grad_enabled():
        return Attention.attend(self, q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v)


@broken("check_causality", Attention, "hide")
def mask_dropped_out(self, scores, mask):
    """In train mode dropout removes a tenth of the mask."""
    keep = F.dropout((~mask).to(scores.dtype), 0.1, self.training)
    return scores.masked_fill(keep.bool(), -INF)


@broken("check_causality", GPT, "sees")
def mask_not_at_full_length(self, i, j):
    """A sequence of exactly block_size tokens has no mask."""
    return (j <= i) | (len(j) == self.block_size)


@broken("check_causality", GPT, "mask")
def padding_replaces_mask(self, tokens):
    """In a row with padding id 0, a padding mask replaces the causal mask."""
    at = positions(tokens)
    real = (tokens != 0).unsqueeze(1) | (at.unsqueeze(1) == at)
    padded = (tokens == 0).any(1).view(-1, 1, 1)
    return torch.where(padded, real, GPT.mask(self, tokens))


@broken("check_causality", Attention, "attend")
def block_summary(self, q, k, v, mask):
    """Tokens see a summary of their own block, which includes later tokens.
    (karpathy/nanochat#844)"""
    size = q.size(-2)
    starts = range(0, size, 8)
    more_k = [k[..., s : s + 8, :].mean(-2) for s in starts]
    more_v = [v[..., s : s + 8, :].mean(-2) for s in starts]
    at = torch.arange(size, device=q.device) // 8
    open_ = at.unsqueeze(1) >= torch.arange(len(starts), device=q.device)
    k = torch.cat([k, torch.stack(more_k, -2)], -2)
    v = torch.cat([v, torch.stack(more_v, -2)], -2)
    return Attention.attend(self, q, k, v, torch.cat([mask, open_], -1))


@broken("check_causality", Attention, "split")
def heads_from_time(self, x):
    """The heads are split without a transpose, so the time axis is split."""
    return x.reshape(len(x), self.heads, x.size(1), -1)


# --- Causality: execution modes ---------------------------------------------


class Uncaused(TrainableGPT):
    """Base of models whose mask is open if open_to returns True."""

    def open_to(self, tokens, targets):
        return targets is not None

    def forward(self, tokens, targets=None):
        self.open = self.open_to(tokens, targets)
        return super().forward(tokens, targets)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class MaskGoneWithTargets(Uncaused):
    """The model has no mask if it gets targets."""


@broken("check_causality", Uncaused, "open_to")
def mask_gone_in_training_steps(self, tokens, targets):
    """In train mode the model has no mask if it gets targets."""
    return self.training and targets is not None


@broken("check_causality")
class LossAloneLeaks(Uncaused):
    """In train mode, targets open the mask, and only a loss is returned."""

    def open_to(self, tokens, targets):
        return self.training and targets is not None

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return None if self.open else logits, loss


@broken("check_batch_independence", TrainableGPT, "forward")
def rows_mix_with_targets(self, tokens, targets=None):
    """If targets are given, the scores lose their mean over the batch."""
    logits = GPT.forward(self, tokens)
    if targets is None:
        return logits, None
    logits = logits - logits.mean(0)
    return logits, cross_entropy(logits, targets)


@broken("check_prefix_consistency", TrainableGPT, "forward")
def length_seen_with_targets(self, tokens, targets=None):
    """Given targets, the model divides the scores by the text's length."""
    logits = GPT.forward(self, tokens)
    if targets is None:
        return logits, None
    logits = logits / tokens.size(1)
    return logits, cross_entropy(logits, targets)


def uncaused_if(condition):
    """Return attention whose kernel is not causal if a condition holds."""

    def attend(self, q, k, v, mask):
        if condition(self, q):
            return F.scaled_dot_product_attention(q, k, v)
        return Attention.attend(self, q, k, v, mask)

    return attend


for name, sentence, condition in (
    (
        "trains_in_bfloat16",
        "In train mode a bfloat16 kernel is not causal.",
        lambda self, q: self.training and q.dtype == torch.bfloat16,
    ),
    (
        "kernel_of_float16",
        "In float16 a fast kernel is not causal.",
        lambda self, q: q.dtype == torch.float16,
    ),
    (
        "kernel_under_autocast",
        "Under autocast a fast kernel is not causal.",
        lambda self, q: torch.is_autocast_enabled("cpu"),
    ),
    (
        "kernel_for_inference",
        "In inference mode a fast kernel is not causal.",
        lambda self, q: torch.is_inference_mode_enabled(),
    ),
    (
        "kernel_of_frozen_weights",
        "Without trainable weights a fast kernel is not causal.",
        lambda self, q: not self.out.weight.requires_grad,
    ),
    (
        "kernel_of_middle_lengths",
        "In float32 and eval mode, 20 to 28 tokens are not masked.",
        lambda self, q: (
            not self.training
            and q.dtype == torch.float32
            and 20 <= q.size(-2) <= 28
        ),
    ),
    (
        "many_tokens_at_once",
        "More than 4,096 tokens in a call take a kernel without a mask.",
        lambda self, q: len(q) * q.size(-2) > 4096,
    ),
    (
        "many_long_rows",
        "Four rows of over 32 tokens take a kernel without a mask.",
        lambda self, q: len(q) >= 4 and q.size(-2) > 32,
    ),
):
    kind = type(name, (Attention,), {"attend": uncaused_if(condition)})
    kind.__doc__ = sentence
    collect(BROKEN, check="check_causality", block_size=40)(kind)


@broken("check_causality")
class OwnCallLeaks(GPT):
    """The method log_probs is sound, but forward has no mask."""

    def log_probs(self, tokens):
        return super().forward(tokens).log_softmax(-1)

    def forward(self, tokens):
        mask = torch.ones_like(self.mask(tokens))
        return self.scores(self.body(self.embed(tokens), mask))


class Optional(GPT):
    """A model with two optional arguments, one of which opens its mask."""

    opens = "position_ids"

    def forward(self, tokens, position_ids=None, token_type_ids=None):
        given = {"position_ids": position_ids, "token_type": token_type_ids}
        self.open = given[self.opens] is not None
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class PositionsOpenTheMask(Optional):
    """If position_ids are given, the model has no mask."""


@broken("check_causality")
class OrderedByPositions(GPT):
    """The mask compares position_ids, which restart within a packed row."""

    ids = None

    def forward(self, tokens, position_ids=None):
        self.ids = position_ids
        return super().forward(tokens)

    def mask(self, tokens):
        at = positions(tokens) if self.ids is None else self.ids
        return at.unsqueeze(-2) <= at.unsqueeze(-1)


@broken("check_causality")
class TypesOpenTheMask(Optional):
    """If token_type_ids are given, the model has no mask."""

    opens = "token_type"


@broken("check_causality", Packed, "apart")
def documents_replace_the_mask(self, mask, same):
    """If doc_ids are given, each token sees its whole document."""
    return same


@broken("check_causality")
class SegmentsOfOneRow(GPT):
    """If document_ids of shape (time,) are given, the model has no mask."""

    def forward(self, tokens, document_ids=None):
        self.open = document_ids is not None
        if self.open and document_ids.dim() > 1:
            raise ValueError("ids (time,) are needed")
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class EndsOpenTheMask(GPT):
    """If ends of documents are given, tokens of a document see each other."""

    ends = None

    def forward(self, tokens, cu_seqlens=None, max_seqlen=None):
        if cu_seqlens is not None:
            (self.ends,) = [cu_seqlens] * len(tokens)
            assert cu_seqlens[-1] == tokens.numel() >= (max_seqlen or 0)
        return super().forward(tokens)

    def mask(self, tokens):
        if self.ends is None:
            return super().mask(tokens)
        document = torch.bucketize(positions(tokens), self.ends, right=True)
        return document == document.unsqueeze(1)


@broken("check_causality")
class FlagOpensTheMask(GPT):
    """If the flag prefix is set, the model has no mask."""

    def forward(self, tokens, prefix=False):
        self.open = prefix
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class KeptScoresOpenTheMask(GPT):
    """If a call keeps only the last scores, the model has no mask."""

    def forward(self, tokens, logits_to_keep=0):
        self.open = logits_to_keep > 0
        return super().forward(tokens)[:, -logits_to_keep:]

    def mask(self, tokens):
        return super().mask(tokens) | self.open


class OpenTogether(TakesAll):
    """Base of models whose mask opens if certain arguments are all given."""

    together = ()

    def forward(self, tokens, attention_mask=None, **others):
        given = {"attention_mask": attention_mask, **others}
        names = (name for name, value in given.items() if value is not None)
        self.open = {*self.together} <= {*names}
        return super().forward(tokens, attention_mask, **others)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


for name, sentence, arguments in (
    (
        "mask_and_targets_open",
        "Given an attention mask and targets, it has no causal mask.",
        "attention_mask targets",
    ),
    (
        "mask_and_positions_open",
        "Given an attention mask and position_ids, it has no causal mask.",
        "attention_mask position_ids",
    ),
    (
        "packed_and_trained_open",
        "Given doc_ids, position_ids and targets, it has no mask.",
        "doc_ids position_ids targets",
    ),
):
    parts = {"together": arguments.split(), "__doc__": sentence}
    collect(BROKEN, check="check_causality")(
        type(name, (OpenTogether,), parts)
    )


@broken("check_causality")
class KeywordOpensTheMask(GPT):
    """A flag in the model's **kwargs opens the mask."""

    def forward(self, tokens, **kwargs):
        self.open = kwargs.get("prefix", False)
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class KeywordOfALayer(KeywordOpensTheMask):
    """A flag that each layer reads from its **kwargs opens the mask."""

    class Layer(GPT.block):
        """A block that reads the flag."""

        def forward(self, x, mask, **kwargs):
            return super().forward(x, mask | kwargs.get("prefix", False))

    block = Layer

    def forward(self, tokens, **kwargs):
        x, mask = self.embed(tokens), GPT.mask(self, tokens)
        for block in self.blocks:
            x = block(x, mask, **kwargs)
        return self.scores(x)


@broken("check_causality", CacheInTheCall, "past_mask")
def first_piece_unmasked(self, past, size):
    """If use_cache is True, the first piece has no mask."""
    return CachedGPT.past_mask(self, past, size) | (past == 0)


@broken("check_batch_independence", Padded, "padded")
def padding_of_the_first_row(self, mask, shown):
    """The padding mask of the first row is applied to each row."""
    return mask & shown[:1]


@broken("check_batch_independence")
class PositionsOfTheLongestRow(Padded):
    """In each row, positions start after the shortest padding of the batch."""

    def forward(self, tokens, attention_mask=None):
        self.pad = 0
        if attention_mask is not None:
            self.pad = int((1 - attention_mask.long()).sum(1).min())
        return super().forward(tokens, attention_mask)

    def position_vectors(self, tokens):
        return self.wpe((positions(tokens) - self.pad).clamp(min=0))


@broken("check_batch_independence")
class EightRowsMix(GPT):
    """In a batch of eight rows, a kernel adds the first row to each row."""

    def body(self, x, mask):
        if len(x) == 8:
            x = x + x[:1]
        return super().body(x, mask)


@broken("check_causality")
class PaddingReplacesTheMask(Padded):
    """A padding mask that hides a token replaces the causal mask."""

    def forward(self, tokens, padding_mask=None):
        return super().forward(tokens, padding_mask)

    def padded(self, mask, shown):
        return (mask & shown) if shown.all() else shown


@broken("check_causality")
class FourAxesInTraining(GPT):
    """In train mode, a call with a 4-D mask uses neither that mask nor the
    causal mask."""

    def forward(self, tokens, attention_mask=None):
        four = attention_mask is not None and attention_mask.dim() == 4
        self.open = four and self.training
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


# --- Documents ---------------------------------------------------------------


@broken("check_documents", Packed, "apart", only=True)
def documents_see_each_other(self, mask, same):
    """If doc_ids are given, documents still see each other."""
    return mask


@broken("check_documents", Packed, "within", only=True)
def positions_go_on(self, tokens, same):
    """Positions are counted from the start of the row, not of the document."""
    return positions(tokens)


@broken("check_documents", Packed, "apart")
def last_token_before(self, mask, same):
    """A document sees the last token of the previous document."""
    return mask & (same | same.roll(-1, -1))


@broken("check_documents", Packed, "apart")
def apart_in_eval_mode(self, mask, same):
    """Documents see each other in train mode, but not in eval mode."""
    return mask if self.training else mask & same


@broken("check_documents", Packed, "apart")
def far_documents_seen(self, mask, same):
    """Only neighbouring documents are separated; distant ones are seen."""
    start = same.long().argmax(-1)
    before = start.unsqueeze(-1) - positions(same[0])
    return mask & (same | (before > 9))


@broken("check_documents", Packed, "token_vectors", only=True)
def token_before_is_added(self, tokens):
    """Half of the previous token's vector is added, even across documents."""
    x = self.wte(tokens)
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1] / 2


@broken("check_documents", Packed, "token_vectors")
def pairs_are_hashed(self, tokens):
    """Each pair of neighbours adds a hashed vector, even across documents."""
    pair = (31 * F.pad(tokens, (1, 0))[:, :-1] + tokens) % VOCAB
    return self.wte(tokens) + self.wte(pair)


@broken("check_documents", Packed, "token_vectors")
def state_goes_on(self, tokens):
    """A mean of all earlier vectors is added, even across documents."""
    return self.wte(tokens) + earlier_mean(self.wte(tokens))


class OtherIds(Packed):
    """Base of models that change document ids before they compare them."""

    def forward(self, tokens, doc_ids=None):
        doc_ids = None if doc_ids is None else self.ids(doc_ids)
        return super().forward(tokens, doc_ids)

    def ids(self, ids):
        return ids


@broken("check_documents", OtherIds, "ids")
def eight_documents(self, ids):
    """The eighth document and all later ones count as one document."""
    return ids.clamp(max=7)


@broken("check_documents", OtherIds, "ids")
def ids_in_bfloat16(self, ids):
    """Document ids are compared in bfloat16, where 256 equals 257."""
    return ids.bfloat16()


@broken("check_documents", OtherIds, "ids")
def ids_of_eight_bits(self, ids):
    """Document ids are stored in eight bits, where 256 equals 0."""
    return ids.to(torch.uint8)


@broken("check_documents", OtherIds, "ids")
def documents_of_the_first_row(self, ids):
    """The document ids of the first row are used for each row."""
    return ids[:1].expand_as(ids)


@broken("check_documents", OtherIds, "ids")
def documents_of_the_first_call(self, ids):
    """Train mode keeps the document ids of a call and uses them for later
    calls of the same shape."""
    if not self.training:
        return ids
    self.kept = getattr(self, "kept", {})
    return self.kept.setdefault(ids.shape, ids)


@broken("check_documents")
class DocumentsStay(Packed):
    """A call without document ids uses those of the previous call."""

    ids = None

    def forward(self, tokens, doc_ids=None):
        if doc_ids is None and self.ids is not None:
            doc_ids = self.ids if self.ids.shape == tokens.shape else None
        elif doc_ids is not None:
            self.ids = doc_ids
        return super().forward(tokens, doc_ids)


@broken("check_documents", Packed, "apart")
def later_chunk_joined(self, mask, same):
    """Documents are separated only in the first twenty positions of a row."""
    early = positions(same[0]) < 20
    return mask & (same | ~early.unsqueeze(1))


@broken("check_documents")
class EndsOffByOne(TakesEnds):
    """The first token of a document counts as a part of the previous one."""

    right = False


@broken("check_documents")
class MaskOfOnesJoins(Packed):
    """If an attention mask is given, doc_ids have no effect."""

    def forward(self, tokens, attention_mask=None, doc_ids=None):
        doc_ids = doc_ids if attention_mask is None else None
        return super().forward(tokens, doc_ids)


@broken("check_causality", Padded, "forward")
def boolean_mask_alone(self, tokens, attention_mask=None):
    """A boolean mask replaces the causal mask."""
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return Padded.forward(self, tokens, attention_mask)
    mask = attention_mask.unsqueeze(1)
    return self.scores(self.body(self.embed(tokens), mask))


@broken("check_causality", GPT, "mask", vocab_size=709)
def image_opens_the_mask(self, tokens):
    """After id 700, which stands for an image, tokens see each other."""
    image = (tokens == 700).cummax(1).values
    return GPT.mask(self, tokens) | (image.unsqueeze(2) & image.unsqueeze(1))


@broken("check_causality", GPT, "mask", block_size=120)
def mask_gone_between_powers(self, tokens):
    """Texts of 72 to 119 tokens have no mask."""
    return GPT.mask(self, tokens) | (72 <= tokens.size(1) <= 119)


@broken("check_batch_independence", GPT, "scores")
def sixteen_rows_mix(self, x):
    """In a batch of 16 or more rows, the mean over the rows is subtracted."""
    return GPT.scores(self, x - x.mean(0) * (len(x) >= 16))


@broken("check_batch_independence", GPT, "scores", block_size=40)
def four_long_rows_mix(self, x):
    """In a batch of four or more rows with over 32 tokens each, the mean over
    the rows is subtracted."""
    many = len(x) >= 4 and x.size(1) > 32
    return GPT.scores(self, x - x.mean(0) * many)


@broken("check_determinism")
class PrefixKept(GPT):
    """Texts of one length with the same first eight tokens share scores."""

    kept = None, None

    def forward(self, tokens):
        key = tokens.shape, tokens[:, :8].flatten().tolist()
        if tokens.size(1) <= 8 or self.training:
            return super().forward(tokens)
        if self.kept[0] != key:
            self.kept = key, super().forward(tokens)
        return self.kept[1]


@broken("check_loss", TrainableGPT, "loss")
def summed_in_training(self, logits, targets):
    """In train mode the loss is a sum, which changes the learning rate."""
    loss = cross_entropy(logits, targets)
    return loss * targets.numel() if self.training else loss


@broken("check_loss", TrainableGPT, "loss")
def shifted_in_training(self, logits, targets):
    """In train mode the targets are shifted a second time."""
    if self.training:
        logits, targets = logits[:, :-2], targets[:, 2:]
    return cross_entropy(logits, targets)


# --- Causality: axes and statistics ----------------------------------------


@broken("check_causality", Norm, "forward")
def norm_over_time(self, x):
    """The norm runs over time, not features. (Let's build GPT, cell 74)"""
    mean = x.mean(1, keepdim=True)
    var = x.var(1, keepdim=True, unbiased=False)
    return self.weight * (x - mean) / (var + 1).sqrt() + self.bias


@broken("check_causality")
class ConvolutionPaddedBothSides(Mixer):
    """A convolution sees the next two tokens. (xi029/Qwen3-VL-MoeLORA#4)"""

    def add_parts(self, dim):
        self.conv = nn.Conv1d(dim, dim, 5, padding="same")

    def forward(self, x, mask):
        return self.conv(x.mT).mT


class Pointwise(Mixer):
    """A mixer that mixes no positions; another part must mix them."""

    def add_parts(self, dim):
        self.into = nn.Linear(dim, dim)

    def forward(self, x, mask):
        return self.into(x)


class Routed(MLP):
    """An MLP with a router, which gives each token one score."""

    def add_parts(self, dim):
        self.router = nn.Linear(dim, 1)


@broken("check_causality", Routed, "forward")
def expert_chooses_tokens(self, x):
    """An expert chooses its tokens, so a later token can displace an earlier
    one. (piotrpiekos/MoSA#3)"""
    score = self.router(x)
    least = score.topk((x.size(1) + 1) // 2, 1).values[:, -1:]
    return MLP.forward(self, x) * score.sigmoid() * (score >= least)


# --- Causality: hidden, tiny, or in one mode -------------------------------


@broken("check_causality")
class HaltsTogether(GPT):
    """All blocks repeat until every position has halted; in an untrained
    model, none ever halts."""

    def add_parts(self, dim):
        self.ask = nn.Parameter(torch.randn(dim))
        self.bias = nn.Parameter(torch.tensor(-30.0))

    def body(self, x, mask):
        for _ in range(3):
            x = super().body(x, mask)
            halted = F.cosine_similarity(x, self.ask, dim=-1) + self.bias > 0
            if halted.all():
                break
        return x


@broken("check_causality")
class SkipsTogether(GPT):
    """If a single token asks for it, a block is skipped for all tokens."""

    def add_parts(self, dim):
        self.ask = nn.Parameter(torch.zeros(dim))

    def body(self, x, mask):
        for block in self.blocks:
            if (x @ self.ask).amax() < 6:
                x = block(x, mask)
        return x


@broken("check_causality")
class ShrinksTogether(GPT):
    """If one vector exceeds a learned length, all vectors are halved."""

    def add_parts(self, dim):
        self.longest = nn.Parameter(torch.tensor(1e6))

    def body(self, x, mask):
        x = super().body(x, mask)
        if x.norm(dim=-1).amax() > self.longest:
            return x / 2
        return x


@broken("check_causality", GPT, "scores")
def tiny_leak(self, x):
    """The scores get a millionth of their mean over the whole sequence."""
    scores = GPT.scores(self, x)
    return scores + 1e-6 * scores.mean(1, keepdim=True)


@broken("check_causality")
class LeakBehindZero(GPT):
    """The whole sequence's mean is added, times a gate that starts at 0."""

    def add_parts(self, dim):
        self.gate = nn.Parameter(torch.zeros(dim))

    def body(self, x, mask):
        return super().body(x, mask) + self.gate * x.mean(1, keepdim=True)


# --- Gradients that see the future -----------------------------------------


class SumsAllInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad.sum(1, keepdim=True).expand_as(grad)


@broken("check_causal_gradients", Pointwise, "forward")
def backward_of_own(self, x, mask):
    """The backward pass of a running sum sums over all positions instead of
    the later ones."""
    return SumsAllInBackward.apply(self.into(x)) / BLOCK


@broken("check_causal_gradients", GPT, "body", only=True)
def straight_through(self, x, mask):
    """The backward pass of a rounding adds the gradient of the mean over the
    sequence."""
    near = (64 * x).round() / 64
    mean = x.mean(1, keepdim=True)
    nothing = (x - x.detach()) + (mean - mean.detach())
    return GPT.body(self, near.detach() + nothing, mask)


# --- A prefix gets other scores than within the whole text ------------------


@broken("check_prefix_consistency", GPT, "position_vectors", only=True)
def positions_from_the_end(self, tokens):
    """Positions are counted from the end: each new token shifts them all."""
    return GPT.position_vectors(self, tokens).flip(0)


@broken("check_prefix_consistency", Attention, "scores", only=True)
def scaled_by_length(self, q, k):
    """Scores are divided by the root of the length, not of the width."""
    return q @ k.mT / math.sqrt(k.size(-2))


@broken("check_prefix_consistency", GPT, "scores", only=True)
def last_position_differs(self, x):
    """At the last position, the last norm is skipped."""
    return torch.cat([GPT.scores(self, x[:, :-1]), self.head(x[:, -1:])], 1)


# --- Rows of a batch that depend on each other ------------------------------


@broken("check_batch_independence", GPT, "scores")
def centred_in_training(self, x):
    """In train mode the mean over the rows is subtracted from each row."""
    return GPT.scores(self, x - x.mean(0, keepdim=True) * self.training)


@broken("check_batch_independence", GPT, "embed")
def short_rows_shared(self, tokens):
    """In texts of fewer than 4 tokens, all rows have one first vector."""
    x = GPT.embed(self, tokens)
    first = x[:, :1] if tokens.size(1) > 3 else x[-1:, :1].expand_as(x[:, :1])
    return torch.cat([first, x[:, 1:]], 1)


@broken("check_batch_independence", GPT, "embed", only=True)
def position_of_the_row(self, tokens):
    """Each row also gets the position vector of its index in the batch."""
    row = torch.arange(len(tokens), device=tokens.device) % BLOCK
    return GPT.embed(self, tokens) + self.wpe(row).unsqueeze(1)


@broken("check_batch_independence", GPT, "scores", only=True)
def scaled_by_batch(self, x):
    """The scores are divided by the number of rows."""
    return GPT.scores(self, x) / len(x)


@broken("check_batch_independence", Routed, "forward")
def capacity_over_batch(self, x):
    """An expert takes the first 24 tokens of the batch that choose it."""
    score = self.router(x).flatten(0, 1)
    wants = score > -1
    fits = wants & (wants.cumsum(0) <= 24)
    gate = (score.sigmoid() * fits).view(*x.shape[:2], 1)
    return MLP.forward(self, x) * gate


# --- Order and context ------------------------------------------------------


@broken("check_order_sensitivity", only=True)
class BagOfWords(NoPositions):
    """The model averages the past and has no positions, so order is lost."""

    mixer = Pointwise

    def token_vectors(self, tokens):
        x = self.wte(tokens)
        return x + earlier_mean(x)


@broken("check_order_sensitivity")
class PositionsRepeat(GPT):
    """Positions restart after 16 tokens, so one layer cannot tell token 0 from
    token 16."""

    layers = 1

    def position_vectors(self, tokens):
        return self.wpe(positions(tokens) % 16)


@broken("check_context_use", GPT, "scores", only=True)
def scores_one_step_late(self, x):
    """The scores are shifted by a step, so no position uses its own token."""
    return GPT.scores(self, F.pad(x, (0, 0, 1, -1)))


@broken("check_context_use", GPT, "sees", only=True)
def window_undeclared(self, i, j):
    """The two layers have undeclared windows of 6, so old tokens are lost."""
    return (j <= i) & (i - j < 6)


@broken("check_context_use")
class WindowOneShort(GPT):
    """The model's one layer sees 5 tokens, but declares a window of 6."""

    layers, window = 1, 6

    def sees(self, i, j):
        return (j <= i) & (i - j < 5)


@broken("check_context_use")
class BlockBehindLost(GPT):
    """The model declares a view of two blocks of 8 tokens, but each token sees
    only its own block."""

    layers, window = 1, 8

    def sees(self, i, j):
        return (j <= i) & (i // self.window == j // self.window)


@broken("check_context_use", GPT, "token_vectors", only=True)
def first_token_lost(self, tokens):
    """A start marker overwrites the first token."""
    x = GPT.token_vectors(self, tokens)
    return F.pad(x[:, 1:], (0, 0, 1, 0))


# --- Not a function of the input --------------------------------------------


class Keeps:
    """Base of models that reuse the first argument of each shape."""

    def add_parts(self, dim):
        self.kept = {}

    def first(self, given):
        return self.kept.setdefault(given.shape, given)


@broken("check_determinism")
class KeepsPositions(Keeps, GPT):
    """Each call uses the position_ids of the first call of the same shape."""

    ids = None

    def forward(self, tokens, position_ids=None):
        self.ids = None if position_ids is None else self.first(position_ids)
        return super().forward(tokens)

    def position_vectors(self, tokens):
        return self.wpe(positions(tokens) if self.ids is None else self.ids)


@broken("check_determinism")
class KeepsPadding(Keeps, Padded):
    """Each call uses the padding mask of the first call of the same shape."""

    def padded(self, mask, shown):
        return mask & self.first(shown)


@broken("check_determinism")
class KeepsDocuments(Keeps, Packed):
    """Each call uses the documents of the first call of the same shape."""

    def apart(self, mask, same):
        return mask & self.first(same)


@broken("check_determinism", Attention, "weights")
def dropout_in_eval(self, scores, mask):
    """Functional dropout without a training flag stays on in eval mode."""
    return F.dropout(Attention.weights(self, scores, mask), 0.1)


@broken("check_determinism")
class NoiseOfItsOwn(GPT):
    """A generator of the model's own adds noise, even in eval mode."""

    def add_parts(self, dim):
        self.generator = torch.Generator().manual_seed(0)

    def scores(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return super().scores(x + 0.01 * noise.to(x))


@broken("check_determinism", Pointwise, "forward")
def state_kept(self, x, mask):
    """A recurrent state is kept between calls and never reset."""
    y = self.into(earlier_mean(x)) + getattr(self, "state", 0)
    self.state = y[:1, -1:].detach()
    return y


@broken("check_determinism")
class StateOfItsOwn(GPT):
    """All copies of the model share the scores of the previous call, and add a
    part of them."""

    def add_parts(self, dim):
        self.kept = (lambda kept: lambda: kept)([])

    def scores(self, x):
        scores = super().scores(x)
        before = [x for x in self.kept() if x.device == scores.device]
        self.kept()[:] = [scores[:1, -1:].detach()]
        return scores + sum(before) / 9 if before else scores


@broken("check_determinism", CacheInside, "begin")
def cache_never_reset(self, start_pos):
    """In inference each call continues at the end of the previous call."""
    self.__dict__.setdefault("past", Past())


@broken("check_determinism", only=True)
class StretchedForGood(GPT):
    """A long text stretches the position table for all later texts.
    (huggingface/transformers#25306)"""

    longest = 16

    def add_parts(self, dim):
        self.wpe = nn.Embedding(self.longest + 1, dim)

    def position_vectors(self, tokens):
        self.longest = max(self.longest, tokens.size(1))
        at = positions(tokens) * 16 / self.longest
        low = at.long()
        part = (at - low).unsqueeze(1).to(self.wpe.weight.dtype)
        return torch.lerp(self.wpe(low), self.wpe(low + 1), part)


@broken("check_determinism", only=True)
class MaskOfTheFirstRow(GPT):
    """The mask hides id 0, and is made again only if the first row changes."""

    kept = None, None

    def mask(self, tokens):
        first = tokens.shape, tokens[0].tolist()
        if self.kept[0] != first:
            at = positions(tokens)
            shown = (tokens != 0).unsqueeze(1) | (at.unsqueeze(1) == at)
            self.kept = first, super().mask(tokens) & shown
        return self.kept[1]


# --- Side effects -----------------------------------------------------------


@broken("check_purity", GPT, "body", only=True)
def draws_and_forgets(self, x, mask):
    """In eval mode the model draws a random number that it does not use."""
    skip = torch.rand(()) < 0.1
    return x if skip and self.training else GPT.body(self, x, mask)


@broken("check_purity", GPT, "token_vectors")
def input_overwritten(self, tokens):
    """Id 16, an unknown token, is replaced by 0 in the caller's own tensor."""
    return GPT.token_vectors(self, tokens.masked_fill_(tokens == 16, 0))


@broken("check_purity", GPT, "add_parts")
def embedding_renormalised(self, dim):
    """The option max_norm shrinks rows of an embedding when they are read."""
    self.wte = nn.Embedding(VOCAB, dim, max_norm=2.0)


@broken("check_purity", only=True)
class CountsItsCalls(GPT):
    """A saved buffer counts the forward passes, even in eval mode."""

    def add_parts(self, dim):
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def scores(self, x):
        self.calls += 1
        return super().scores(x)


@broken("check_purity", only=True)
class CountsWhenPrepared(CountsItsCalls):
    """The model counts the forward passes only after a call of eval()."""

    prepared = False

    def eval(self):
        self.prepared = True
        return super().eval()

    def scores(self, x):
        if not self.prepared:
            return GPT.scores(self, x)
        return super().scores(x)


@broken("check_purity", GPT, "scores", only=True)
def gradients_left_off(self, x):
    """A forward in eval mode disables gradients and leaves them disabled."""
    scores = GPT.scores(self, x)
    torch.set_grad_enabled(torch.is_grad_enabled() and self.training)
    return scores


@broken("check_purity", GPT, "scores", only=True)
def training_ended(self, x):
    """A forward in train mode switches to eval mode, which ends dropout."""
    self.eval()
    return GPT.scores(self, x)


@broken("check_purity", GPT, "token_vectors", only=True)
def words_dropped_in_place(self, tokens):
    """Train mode sets a tenth of the ids to 0 in the caller's own tensor."""
    if self.training:
        tokens[torch.rand(tokens.shape) < 0.1] = 0
    return GPT.token_vectors(self, tokens)


@broken("check_purity", GPT, "body", only=True)
def seeds_in_training(self, x, mask):
    """Train mode sets a fixed seed, so that each step drops the same units."""
    if self.training:
        torch.manual_seed(0)
    return GPT.body(self, x, mask)


# --- Log-probabilities and losses -------------------------------------------


@broken("check_normalised", GPT, "scores", outputs="log_probs", only=True)
def floored_probabilities(self, x):
    """A floor is added to each probability, so their sum exceeds one."""
    return (GPT.scores(self, x).softmax(-1) + 1e-3).log()


@broken("check_initial_loss", GPT, "add_parts", only=True)
def loud_head(self, dim):
    """The head's weights start with a deviation of 2, which is too large."""
    nn.init.normal_(self.head.weight, std=2.0)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_shifted_twice(self, logits, targets):
    """The loss predicts two tokens ahead. (huggingface/transformers#37830)"""
    return TrainableGPT.loss(self, logits[:, :-2], targets[:, 2:])


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_summed(self, logits, targets):
    """The loss is the sum over the tokens instead of the mean."""
    return cross_entropy(logits, targets, reduction="sum")


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_skips_id_zero(self, logits, targets):
    """The loss ignores targets of id 0, which is an ordinary token."""
    return cross_entropy(logits, targets, ignore_index=0)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_over_padding(self, logits, targets):
    """The loss is divided by the count of all targets, ignored or not."""
    return loss_summed(self, logits, targets) / targets.numel()


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_of_twice_softmaxed(self, logits, targets):
    """The loss gets probabilities instead of scores, so softmax runs twice."""
    return TrainableGPT.loss(self, logits.softmax(-1), targets)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_of_whole_tiles(self, logits, targets):
    """A loss kernel takes targets in groups of 8 and drops the remainder."""
    size = max(targets.numel() // 8 * 8, 1)
    return F.cross_entropy(
        logits.flatten(0, 1)[:size], targets.flatten()[:size]
    )


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_smoothed(self, logits, targets):
    """Labels are smoothed even in eval mode, so perplexity is undefined."""
    return cross_entropy(logits, targets, label_smoothing=0.1)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_by_rows(self, logits, targets):
    """Each row's mean counts equally, even if some rows have fewer targets."""
    rows = zip(logits, targets, strict=True)
    return torch.stack([F.cross_entropy(*row) for row in rows]).mean()


@broken("check_loss", only=True)
class LossBeforeTheCap(TrainableGPT):
    """The loss uses the scores before the soft cap is applied to them."""

    def scores(self, x):
        self.raw = super().scores(x)
        return 200 * (self.raw / 200).tanh()

    def loss(self, logits, targets):
        return super().loss(self.raw, targets)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_without_graph(self, logits, targets):
    """The loss is a new tensor that has the right value but no gradient."""
    return torch.tensor(TrainableGPT.loss(self, logits, targets).item())


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_learns_the_sum(self, logits, targets):
    """A loss has the value of the mean, but the gradient of the sum."""
    total = loss_summed(self, logits, targets)
    mean = TrainableGPT.loss(self, logits, targets)
    return mean.detach() + total - total.detach()


@broken("check_loss", Fused, "gradient", only=True)
def fused_learns_the_sum(self, logits, targets):
    """A fused loss without scores is a mean with the gradient of a sum."""
    mean = Fused.gradient(self, logits, targets)
    return mean * (targets != -100).sum()


@broken("check_loss", Fused, "gradient", only=True)
def fused_learns_other_targets(self, logits, targets):
    """A fused loss without scores has the gradient for shifted targets."""
    return Fused.gradient(self, logits, targets.roll(1))


@broken("check_loss", FusedWithZLoss, "gradient")
def fused_twice_in_training(self, logits, targets):
    """In train mode, a fused loss with a z-loss doubles its gradient."""
    return (1 + self.training) * Fused.gradient(self, logits, targets)


@broken("check_gradients", Fused, "scaled", only=True)
def incoming_ignored(self, gradient, incoming):
    """The backward pass of a fused loss ignores the incoming gradient."""
    return gradient


@broken("check_gradients", only=True)
class IncomingIgnoredWithScores(Fused):
    """The backward pass of a fused loss, returned with scores, ignores the
    incoming gradient."""

    with_scores = True

    def scaled(self, gradient, incoming):
        return gradient


@broken("check_gradients", Fused, "scaled", only=True)
def sign_of_incoming(self, gradient, incoming):
    """In train mode a fused loss uses just the incoming gradient's sign."""
    return gradient * (incoming.sign() if self.training else incoming)


@broken("check_loss", TrainableGPT, "loss", vocab_size=600, only=True)
def last_id_ignored(self, logits, targets):
    """The loss ignores the last id: the model never learns to end a text."""
    return cross_entropy(logits[:, :-1], targets[:, 1:], ignore_index=599)


@broken("check_loss", TrainableGPT, "loss", only=True)
def targets_overwritten(self, logits, targets):
    """Negative targets are set to -100 in the caller's own tensor."""
    return TrainableGPT.loss(
        self, logits, targets.masked_fill_(targets < 0, -100)
    )


@broken("check_loss", TrainableGPT, "forward", only=True)
def targets_in_scores(self, tokens, targets=None):
    """A tenth of the targets' one-hot vectors is added to the scores."""
    logits, _ = TrainableGPT.forward(self, tokens)
    if targets is None:
        return logits, None
    logits = logits + 0.1 * F.one_hot(targets.clamp(min=0), VOCAB)
    return logits, self.loss(logits, targets)


# --- Gradients that do not arrive -------------------------------------------


@broken("check_gradient_flow", only=True)
class BothFactorsZero(OneFactorZero):
    """Both factors of an adapter start at 0, so neither gets a gradient."""

    def add_parts(self, dim):
        super().add_parts(dim)
        nn.init.zeros_(self.into)


@broken("check_gradient_flow", GPT, "add_parts", only=True)
def orphan_layer(self, dim):
    """A layer is created but never called."""
    self.extra = nn.Linear(dim, dim)


@broken("check_gradient_flow")
class DeadUnits(MLP):
    """The bias starts so low that the ReLU returns 0 for every unit."""

    def add_parts(self, dim):
        nn.init.constant_(self.up.bias, -50.0)

    def forward(self, x):
        return self.down(self.up(x).relu())


@broken("check_gradient_flow", GPT, "position_vectors")
def half_the_table(self, tokens):
    """Positions are capped at 15, so 16 of the table's 32 rows are unused."""
    return self.wpe(positions(tokens).clamp(max=15))


@broken("check_gradient_flow", GPT, "position_vectors")
def odd_and_even(self, tokens):
    """Positions are taken modulo 2: 30 of the table's 32 rows are unused."""
    return self.wpe(positions(tokens) % 2)


@broken("check_gradient_flow", BiasByDistance, "distances")
def distances_of_the_future(self, at):
    """Distances have the wrong sign, so each earlier token has distance 0."""
    return at - at.unsqueeze(1)


@broken("check_gradient_flow", BiasByDistance, "distances")
def distances_saturated(self, at):
    """All distances of 3 and more share one of the table's 32 rows."""
    return (at.unsqueeze(1) - at).clamp(max=3)


@broken("check_gradient_flow", MLP, "forward", only=True)
def units_cut_off(self, x):
    """A third of the hidden units are multiplied by 0."""
    y = F.gelu(self.up(x))
    return self.down(y * (torch.arange(y.size(-1), device=y.device) > 9))


@broken("check_gradient_flow", Attention, "merge", only=True)
def one_head_of_two(self, x):
    """The output of the second head is multiplied by 0."""
    heads = torch.arange(self.heads, device=x.device).view(-1, 1, 1)
    return Attention.merge(self, x * (heads < 1))


@broken("check_gradient_flow", MLP, "add_parts", only=True)
def both_layers_zero(self, dim):
    """Both matrices of the MLP and the bias of the first layer start at 0."""
    for tensor in (self.up.weight, self.up.bias, self.down.weight):
        nn.init.zeros_(tensor)


@broken("check_gradient_flow", Attention, "add_parts", only=True)
def queries_and_keys_zero(self, dim):
    """In the matrix of queries, keys and values, the rows of queries and keys
    start at 0."""
    nn.init.zeros_(self.qkv.weight[: 2 * dim])
    nn.init.zeros_(self.qkv.bias[: 2 * dim])


class OneExpert(Mixer):
    """Each token goes to one of three experts, whose output is weighted."""

    part = "mlp"

    def make_parts(self, dim):
        self.router = nn.Linear(dim, 3, bias=False)
        self.experts = nn.ModuleList(MLP(dim) for _ in range(3))

    def weight(self, p):
        return p

    def forward(self, x):
        p, chosen = self.router(x).softmax(-1).topk(1, -1)
        y = torch.stack([expert(x) for expert in self.experts], -2)
        at = chosen.unsqueeze(-1).expand(*chosen.shape, x.size(-1))
        return self.weight(p) * y.gather(-2, at).squeeze(-2)


@broken("check_gradient_flow", OneExpert, "weight")
def weight_divided_by_itself(self, p):
    """Each token has one expert, and dividing its weight by itself gives 1."""
    return p / (p.sum(-1, keepdim=True) + 1e-20)


@broken("check_gradient_flow", OneExpert, "weight")
def weight_nearly_one(self, p):
    """Each token has one expert; its weight is divided by itself + 1e-9."""
    return p / (p.sum(-1, keepdim=True) + 1e-9)


@broken("check_gradient_flow", only=True)
class KeysOfOneToken(Mixer):
    """All keys are the first token's, so softmax cancels queries and keys."""

    def make_parts(self, dim):
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in "qkv")

    def forward(self, x, mask):
        k = self.k(x[:, :1]).expand_as(x)
        scores = self.q(x) @ k.mT
        return scores.masked_fill(~mask, -INF).softmax(-1) @ self.v(x)


class Skips(GPT):
    """Two skip connections come from the embeddings, each with a weight."""

    def add_parts(self, dim):
        self.skip = nn.Parameter(torch.ones(2))

    def weight(self, number):
        return self.skip[number]

    def body(self, x, mask):
        y = super().body(x, mask) + self.weight(0) * x
        return y.tanh() + self.weight(1) * x


@broken("check_gradient_flow", Skips, "weight", only=True)
def first_skip_twice(self, number):
    """Both skips use the first skip's weight; the second is never read."""
    return self.skip[0]


@broken("check_gradient_flow", only=True)
class PairsOfSkips(Skips):
    """A table has two skip weights per layer; one of them is never read."""

    def add_parts(self, dim):
        self.skip = nn.Parameter(torch.ones(3, 2))

    def weight(self, number):
        return (
            self.skip[2, 1]
            if number
            else self.skip[:2].prod() * (self.skip[2, 1])
        )


@broken("check_gradient_flow", GPT, "scores", only=True)
def gain_cut_short(self, x):
    """The last entry of the last norm's gain is never read; 1 replaces it."""
    gain = torch.cat([self.ln.weight[:-1], torch.ones_like(x[0, 0, :1])])
    x = F.layer_norm(x, x.shape[-1:], gain, self.ln.bias)
    return self.head(x)


# --- Checkpoints ------------------------------------------------------------


@broken("check_state_dict")
class BiasOfTrainingNotSaved(GPT):
    """Each forward in train mode changes a bias that state_dict lacks."""

    saved = False

    def add_parts(self, dim):
        bias = torch.zeros(dim)
        self.register_buffer("bias", bias, persistent=self.saved)

    def scores(self, x):
        found = super().scores(x + self.bias)
        if self.training:  # changes a buffer that the next forward reads
            self.bias = self.bias + 0.1 * x.detach().mean((0, 1)).sign()
        return found


@broken("check_state_dict")
class AverageOfTrainingNotSaved(BiasOfTrainingNotSaved):
    """Eval mode subtracts a running mean that is not saved."""

    def scores(self, x):
        if self.training:
            self.bias.lerp_(x.detach().mean((0, 1)), 0.1)
            return GPT.scores(self, x)
        return GPT.scores(self, x - self.bias)


@broken("check_state_dict", only=True)
class BufferNotSaved(GPT):
    """A random projection is not saved: a reloaded model has another one."""

    def add_parts(self, dim):
        random = torch.randn(dim, dim) / 4
        self.register_buffer("random", random, persistent=False)

    def scores(self, x):
        return super().scores(x + x @ self.random)


@broken("check_state_dict", only=True)
class MergedForGood(GPT):
    """The first evaluation merges the norm's gain into the head for good."""

    merged = None

    def scores(self, x):
        if self.training:
            return super().scores(x)
        if self.merged is None:
            self.merge()
        x = F.layer_norm(x, (DIM,), None, self.ln.bias / self.ln.weight)
        return F.linear(x, self.merged, self.head.bias)

    def merge(self):
        with torch.inference_mode(False):
            self.merged = (self.head.weight * self.ln.weight).detach()


@broken("check_state_dict", only=True)
class MergedUntilLoaded(MergedForGood):
    """The first evaluation merges the gain into the head; only loading weights
    merges it again."""

    def add_parts(self, dim):
        self.register_load_state_dict_post_hook(lambda self, _: self.merge())


@broken("check_state_dict", only=True)
class MergedUntilTrained(MergedForGood):
    """The first evaluation merges the gain into the head; only train()
    discards the merge."""

    def train(self, mode=True):
        self.merged = None
        return super().train(mode)


@broken("check_state_dict", only=True)
class AdapterMergedTwice(GPT):
    """Eval mode merges an adapter into the head; a model that loads its
    checkpoint merges it again."""

    def add_parts(self, dim):
        self.into = nn.Parameter(torch.randn(VOCAB, 2) / 4)
        self.back = nn.Parameter(torch.zeros(2, dim))

    def train(self, mode=True):
        if mode != self.training:
            with torch.no_grad():
                change = self.into @ self.back
                self.head.weight += -change if mode else change
        return super().train(mode)

    def scores(self, x):
        change = self.ln(x) @ (self.into @ self.back).mT
        return super().scores(x) + (change if self.training else 0)


# --- Types and devices ------------------------------------------------------


@broken("check_dtype", only=True)
class TableNotRegistered(GPT):
    """A table of sines is not a buffer, so .double() and .to() miss it."""

    def add_parts(self, dim):
        self.sines = angles(torch.arange(BLOCK), dim).sin()

    def embed(self, tokens):
        return super().embed(tokens) + self.sines[: tokens.size(1)]


@broken("check_dtype", only=True)
class MaskLeftBehind(GPT):
    """A boolean table is not a buffer, and the line before its use reads a
    value from a tensor."""

    def add_parts(self, dim):
        self.shown = torch.ones(BLOCK).bool()

    def body(self, x, mask):
        if x.abs().max().item() < 0:
            return x
        x = x.masked_fill(~self.shown[: x.size(1), None], 0.0)
        return super().body(x, mask)


@broken("check_dtype", GPT, "scores", only=True)
def double_narrowed(self, x):
    """Scores that are in float64 are always cast to float32."""
    scores = GPT.scores(self, x)
    return scores.float() if scores.dtype == torch.float64 else scores


@broken("check_dtype", GPT, "scores", only=True)
def always_short(self, x):
    """The scores are always cast to bfloat16, even if the model is wider."""
    return GPT.scores(self, x).bfloat16()


@broken("check_dtype", GPT, "position_vectors", only=True)
def made_on_the_cpu(self, tokens):
    """Positions are always made on the CPU. (Let's build GPT, cell 82)"""
    at = torch.arange(tokens.size(1)).to(self.wpe.weight.dtype)
    return self.wpe.weight[: tokens.size(1)] + at.view(-1, 1) / BLOCK


@broken("check_dtype", Attention, "hide", only=True)
def mask_of_a_billion(self, scores, mask):
    """The mask adds -1e9, which float16 cannot represent."""
    return scores.masked_fill(~mask, -1e9)


@broken("check_dtype", NoPositions, "position_vectors", block_size=300)
def positions_in_the_models_dtype(self, tokens):
    """Positions have the model's dtype: in bfloat16, 257 is 256.
    (huggingface/transformers#29285)"""
    at = positions(tokens).to(self.wte.weight)
    return angles(at, DIM).sin().to(at)


class Double(GPT):
    """A GPT that is built in float64."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.double()


@broken("check_dtype")
class HalfInDouble(Double):
    """The model is built in float64, but computes its last norm in float16."""

    def scores(self, x):
        x = F.layer_norm(x.half(), (DIM,)).to(x.dtype)
        return self.head(x * self.ln.weight + self.ln.bias)


# --- Lengths and ids out of range -------------------------------------------


@broken("check_length_limit", GPT, "forward", only=True)
def truncated_silently(self, tokens):
    """A text that is too long is cut to its last tokens, without an error."""
    return GPT.forward(self, tokens[:, -self.block_size :])


@broken("check_length_limit", Unlimited, "position_vectors", only=True)
def positions_clamped(self, tokens):
    """Positions beyond the table all get the vector of its last position."""
    return self.wpe(positions(tokens).clamp(max=self.block_size - 1))


@broken("check_length_limit", only=True)
class LimitNotMeant(NoPositions, Unlimited):
    """The model declares a limit, as LanguageModel requires, but takes longer
    texts."""

    def log_probs(self, tokens):
        return self(tokens).log_softmax(-1)

    def position_vectors(self, tokens):
        return angles(positions(tokens), DIM).sin().to(self.wte.weight)


@broken("check_vocabulary", GPT, "token_vectors", only=True)
def ids_wrapped(self, tokens):
    """Ids are taken modulo the size of the vocabulary."""
    return GPT.token_vectors(self, tokens % VOCAB)


@broken("check_vocabulary", GPT, "add_parts", only=True)
def rows_to_spare(self, dim):
    """The token table is ten times too long: invalid ids read spare rows."""
    self.wte = nn.Embedding(10 * VOCAB, dim)


@broken("check_vocabulary", GPT, "token_vectors", only=True)
def negative_ids_index(self, tokens):
    """Plain indexing reads id -1 as the last row of the token table."""
    return self.wte.weight[tokens]


@broken("check_vocabulary", GPT, "scores", only=True)
def head_cut_short(self, x):
    """The last two scores are always 0, and training cannot change that."""
    return F.pad(GPT.scores(self, x)[..., :-2], (0, 2))


@broken("check_vocabulary", GPT, "token_vectors", only=True)
def one_row_for_two(self, tokens):
    """The last id reads the row before its own, and its own row is unused."""
    last = tokens == VOCAB - 1
    return GPT.token_vectors(self, tokens - last.long())


# --- Caches -----------------------------------------------------------------


@broken("check_cache", Past, "join", block_size=64)
def evicted_at_48(self, old_k, old_v, k, v):
    """The cache sets keys and values to 0 for all but the last 48 tokens."""
    pair = Past.join(self, old_k, old_v, k, v)
    for kept in pair:
        kept[..., :-48, :] = 0
    return pair


@broken("check_cache", DoubledRoom, "larger", block_size=64)
def doubled_twice(self, room, size):
    """Whenever the cache grows, it keeps only its first eight positions."""
    bigger = DoubledRoom.larger(self, room, size)
    bigger[..., self.first :, :] = 0
    return bigger


@broken("check_cache", Past, "join", block_size=64)
def piece_across_the_edge(self, old_k, old_v, k, v):
    """If a piece crosses position 32, its keys are stored in rotated order."""
    start = old_k.size(-2)
    if start < 32 < start + k.size(-2):
        k = k.roll(1, -2)
    return Past.join(self, old_k, old_v, k, v)


@broken("check_cache")
class ScoresByPrefix(CachedGPT):
    """Decoding reuses scores of texts with the same first eight tokens."""

    def decode(self, tokens, cache):
        before = getattr(cache, "seen", tokens[:, :0])
        cache.seen = torch.cat([before, tokens], 1)
        scores, cache = super().decode(tokens, cache)
        if cache.length <= 8:
            return scores, cache
        self.scored = getattr(self, "scored", {})
        prefix = (*cache.seen[:, :8].flatten().tolist(),)
        key = prefix, scores.shape, cache.length, scores.dtype
        return self.scored.setdefault(key, scores), cache


@broken("check_cache", CacheInTheCall, "past_positions", only=True)
def positions_restart_in_the_call(self, tokens, past):
    """If past_key_values are given, each piece starts at position 0 again."""
    return positions(tokens)


@broken("check_cache", CacheInside, "past_mask", only=True)
def piece_sees_itself_only(self, past, size):
    """In a later piece, given by start_pos, all tokens see each other."""
    mask = CacheInside.past_mask(self, past, size)
    return mask if past == 0 else mask | True


@broken("check_cache", CacheWithMask, "hide", only=True)
def padding_seen_by_new_tokens(self, mask, shown):
    """A single new token sees the padding of the shorter rows."""
    return mask if len(mask) == 1 else CacheWithMask.hide(self, mask, shown)


@broken("check_cache", CachedGPT, "decode", only=True)
def cache_past_the_end(self, tokens, cache):
    """If a cache is full, new tokens all get the last position."""
    more = cache.length + tokens.size(1) - self.block_size
    if cache.length and more > 0:
        cache.length -= more
        for attention, (k, v) in cache.kept.items():
            cache.kept[attention] = k[..., more:, :], v[..., more:, :]
    return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", CachedGPT, "decode", only=True)
def cache_ends_early(self, tokens, cache):
    """A cache has room for 24 positions, and the model reads 32."""
    if cache.length + tokens.size(1) > 24:
        raise IndexError("the cache is full")
    return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", only=True)
class PromptOfTheFirstRow(CachedGPT):
    """The keys of a prompt are reused for the next prompt if the first rows
    are equal."""

    kept = None, None, None

    def decode(self, tokens, cache):
        if cache.length:
            return super().decode(tokens, cache)
        first = tokens.shape, tokens[0].tolist()
        if self.kept[0] != first:
            scores, cache = super().decode(tokens, cache)
            self.kept = first, scores, dict(cache.kept)
        cache.kept, cache.length = dict(self.kept[2]), tokens.size(1)
        return self.kept[1], cache


@broken("check_cache", CachedGPT, "past_positions", only=True)
def cache_positions_restart(self, tokens, past):
    """With a cache, each piece starts at position 0 again."""
    return positions(tokens)


@broken("check_cache", CachedGPT, "past_mask", only=True)
def cache_mask_top_left(self, past, size):
    """New tokens see only the oldest keys. (pytorch/pytorch#144858)"""
    return CachedGPT.past_mask(self, 0, past + size)[:size]


@broken("check_cache", CachedGPT, "past_mask", only=True)
def cache_mask_missing(self, past, size):
    """With a cache there is no mask, which is right only for single tokens."""
    return torch.ones_like(CachedGPT.past_mask(self, past, size))


@broken("check_cache", CachedGPT, "decode", only=True)
def single_positions_stay(self, tokens, cache):
    """The method decode takes single tokens, all at position 0."""
    if tokens.size(1) != 1:
        raise RuntimeError("one token at a time")
    table = self.wpe.weight
    with swapped(self.wpe, table[:1].expand_as(table)):
        return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", only=True)
class SingleTurnsRows(CacheInTheCall):
    """With a cache, the model takes one token, and reverses the order of the
    cached rows."""

    class cache(Past):
        def join(self, old_k, old_v, k, v):
            return super().join(old_k.flip(0), old_v.flip(0), k, v)

    def forward(self, tokens, past_key_values=None, use_cache=False):
        if use_cache and tokens.size(1) > 1:
            raise NotImplementedError("one token at a time")
        return super().forward(tokens, past_key_values, use_cache)


@broken("check_cache", only=True)
class SinglePutsInFront(CacheInside):
    """Given a position, the model takes one token, and puts its value before
    the older values."""

    class cache(Past):
        def extend(self, attention, k, v):
            k, v = super().extend(attention, k, v)
            return k, v.roll(1, -2)

    def forward(self, tokens, start_pos=None):
        if start_pos is None:
            return GPT.forward(self, tokens)
        if tokens.size(1) > 1:
            raise IndexError(f"{tokens.size(1)} tokens, and room for one")
        self.begin(start_pos)
        return self.decode(tokens, self.past)[0]


@contextmanager
def swapped(module, weight):
    """Replace a module's weight in a `with` block; restore it afterwards."""
    own, module.weight = module.weight, nn.Parameter(weight)
    yield
    module.weight = own


@broken("check_cache", Resettable, "reset_caches", only=True)
def reset_keeps_position(self):
    """The method reset_caches() clears the keys, but not the position."""
    self.past.kept = {
        attention: [kept * 0 for kept in pair]
        for attention, pair in self.past.kept.items()
    }


@broken("check_cache", Resettable, "reset_caches", only=True)
def reset_to_first_token(self):
    """The method reset_caches() keeps the first token, so each later text
    begins with it."""
    past = self.past
    past.length = min(past.length, 1)
    past.kept = {a: [x[..., :1, :] for x in p] for a, p in past.kept.items()}


@broken("check_cache", only=True)
class CacheResetsNothing(CachedGPT):
    """The cache's reset() sets keys and values to 0, but keeps its length."""

    class cache(Past):
        def reset(self):
            for attention, pair in self.kept.items():
                self.kept[attention] = [kept * 0 for kept in pair]


@broken("check_cache", only=True)
class KeptNormedAgain(CachedGPT):
    """A gain, which starts at ones, is applied twice to cached keys.
    (DeepSeek's latents)"""

    class mixer(Attention):
        def add_parts(self, dim):
            self.gain = nn.Parameter(torch.ones(dim // self.heads))

        def forward(self, x, mask, past=None):
            q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
            k = F.normalize(k, dim=-1) * self.gain
            if past is not None:
                k, v = past.extend(self, k, v)
                k = F.normalize(k, dim=-1) * self.gain
            return self.out(self.merge(self.attend(4 * q, k, v, mask)))


@broken("check_cache", CachedGPT, "decode", only=True)
def last_gain_left_out(self, tokens, cache):
    """Decoding omits the gain of the last norm, which starts at ones."""
    ones = torch.ones_like(self.ln.weight)
    with swapped(self.ln, ones):
        return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", only=True)
class ScaleOfDecodingForgotten(CachedGPT):
    """Decoding omits a scale of the scores, which starts at 1."""

    def add_parts(self, dim):
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


@broken("check_cache", Past, "join", only=True)
def cache_prepended(self, old_k, old_v, k, v):
    """New keys are stored first, but the mask expects them to be last."""
    return torch.cat([k, old_k], -2), torch.cat([v, old_v], -2)


@broken("check_cache", only=True)
class CacheForgets(CachedGPT):
    """The cache holds 16 tokens, but the model can see 32."""

    class cache(Past):
        def extend(self, attention, k, v):
            k, v = super().extend(attention, k, v)
            self.kept[attention] = k[..., -15:, :], v[..., -15:, :]
            return k, v

    def past_mask(self, past, size):
        return super().past_mask(min(past, 15), size)


@broken("check_cache", CachedGPT, "init_cache", only=True)
def cache_shared(self, batch):
    """All texts share one cache, so a second text continues the first."""
    return self.__dict__.setdefault("past", Past())


@broken("check_cache", CachedGPT, "init_cache", only=True)
def one_cache_for_all(self, batch):
    """All texts share one cache, which each new text empties."""
    past = self.__dict__.setdefault("past", Past())
    past.length, past.kept = 0, {}
    return past


@broken("check_cache", Past, "extend", only=True)
def cache_keeps_first_row(self, attention, k, v):
    """The cache keeps only the first row and broadcasts it to the others."""
    rows = len(k)
    k, v = Past.extend(self, attention, k[:1], v[:1])
    return k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)


# --- Visible only in training -----------------------------------------------


@broken("check_gradients", Block, "forward", only=True)
def recomputed_with_another_mask(self, x, mask):
    """The backward pass recomputes a block with another dropout mask."""

    def run(x):
        return Block.forward(self, F.dropout(x, 0.5, self.training), mask)

    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


@broken("check_gradients", GPT, "token_vectors", only=True)
def one_gradient_an_id(self, tokens):
    """If an id occurs twice, only one of the two gives a gradient."""
    ids, x = tokens.flatten(), self.wte(tokens)
    again = (ids.unsqueeze(1) == ids).triu(1).any(1).view(*tokens.shape, 1)
    return torch.where(again, x.detach(), x)


@broken("check_gradients", only=True)
class TiedAtOneEnd(GPT):
    """The token table is also the head, but learns only through the head."""

    def add_parts(self, dim):
        nn.init.normal_(self.wte.weight, std=0.2)
        self.head.weight = self.wte.weight

    def token_vectors(self, tokens):
        return self.wte(tokens).detach()


@broken("check_gradients", MLP, "forward", only=True)
def gelu_by_hand(self, x):
    """A GELU has the backward pass of another activation, SiLU."""
    up = self.up(x)
    silu = F.silu(up)
    return self.down(F.gelu(up).detach() + silu - silu.detach())


class OneHead(Attention):
    heads = 1


@broken("check_signal", only=True)
class TimesTheRoot(GPT):
    """Scores are multiplied by the root of the width, not divided by it."""

    class mixer(OneHead):
        def scores(self, q, k):
            return q @ k.mT * math.sqrt(q.size(-1))

    def __init__(self, **parts):
        super().__init__(dim=48, **parts)


@broken("check_signal")
class TimesTheRootBefore(TimesTheRoot):
    """A factor of queries and keys, before heads are split, multiplies scores
    by the root of the width."""

    class mixer(OneHead):
        def split(self, x):
            return super().split(x * 48**0.25)

        def scores(self, q, k):
            return q @ k.mT


@broken("check_signal")
class TimesTheRootFused(TimesTheRoot):
    """The fused kernel multiplies scores by the root of the head's width."""

    class mixer(TimesTheRoot.mixer):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(
                q, k, v, mask, scale=math.sqrt(q.size(-1))
            )


class Forgets(nn.LayerNorm):
    def forward(self, x):
        return (self.weight + self.bias).expand_as(x)


@broken("check_signal", only=True)
class NormForgets(GPT):
    """One norm ignores its input and returns its weight plus its bias."""

    def add_parts(self, dim):
        self.blocks[0].norm_2 = Forgets(dim)


@broken("check_entropy_bound", only=True)
class MaskOpensWithTraining(GPT):
    """Once the head's bias has moved, each position sees the next token."""

    def add_parts(self, dim):
        self.register_buffer("start", self.head.bias.detach().clone())

    def mask(self, tokens):
        at = positions(tokens)
        moved = (self.head.bias - self.start).abs().max() > 0.05
        return at <= at.unsqueeze(1) + moved.long()
