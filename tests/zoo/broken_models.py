"""Models broken on purpose, each in one way, to test the checks with.

A fault is a method of the small GPT, or of one of its parts, that takes the
place of the sound one; or a class, where one method is not enough. Its
docstring is the sentence that explains it, its decorator names the check
that must catch it. `only` marks a fault that no other check can see.
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
SLOW = "check_entropy_bound"  # it trains; the other checks only ask


def broken(check, *owner, **details):
    """Put a model that a check must catch into the list."""
    return collect(BROKEN, *owner, check=check, **details)


def as_parameters(models):
    """Each as a parameter of a test that is named by its check, too.

    The pass of shape checks needs one model for each check.
    """
    parameters, seen = [], set()
    for model in models:
        slow = model.check == SLOW or model.vocab_size > 1e4
        slow |= model.block_size > 99 and model.check != "check_dtype"
        marks = [pytest.mark.slow] if slow else []
        marks += [pytest.mark.unhooked] if model.check in seen else []
        seen.add(model.check)
        name = f"{model.name}-{model.check}".removesuffix("-")
        parameters.append(pytest.param(model, id=name, marks=marks))
    return parameters


class Norm(nn.LayerNorm):
    part = "norm"


# --- Shape -----------------------------------------------------------------


@broken("check_shape", GPT, "forward", only=True)
def full_row_flattened(self, tokens):
    """In train mode one row of full length loses its batch axis."""
    scores = GPT.forward(self, tokens)
    packed = self.training and tokens.shape == (1, self.block_size)
    return scores.squeeze(0) if packed else scores


@broken("check_shape", GPT, "forward")
def padded_to_kernel(self, tokens):
    """Texts shorter than a kernel of 4 are padded and not cut back."""
    missing = max(4 - tokens.size(1), 0)
    return GPT.forward(self, F.pad(tokens, (0, missing)))


@broken("check_shape", GPT, "token_vectors", only=True)
def strides_ignored(self, tokens):
    """Ids of a slice are read as if its rows lay side by side in memory."""
    return self.wte(tokens.as_strided(tokens.shape, (tokens.size(1), 1)))


# --- NaN and infinity ------------------------------------------------------


@broken("check_finite", Attention, "hide")
def dropout_before_softmax(self, scores, mask):
    """-inf times 0 is NaN, in train mode. (GPT from Scratch, listing 5)"""
    return F.dropout(Attention.hide(self, scores, mask), 0.1, self.training)


@broken("check_finite", only=True)
class RootOfZero(GPT):
    """The root of a parameter that starts at 0: its gradient is NaN."""

    def add_parts(self, dim):
        self.gate = nn.Parameter(torch.zeros(1))

    def scores(self, x):
        return super().scores(x * (1 + (self.gate * self.gate).sqrt()))


@broken("check_finite", GPT, "mask")
def padding_hides_first(self, tokens):
    """Id 0 is padding: a first token of id 0 sees nothing, which is 0 / 0."""
    return GPT.mask(self, tokens) & (tokens != 0).unsqueeze(1)


@broken("check_finite", GPT, "embed")
def norm_without_eps(self, tokens):
    """A token's change is divided by its size: two equal ones give 0 / 0."""
    x = self.wte(tokens)
    step = (x - F.pad(x, (0, 0, 1, -1))).detach()
    return GPT.embed(self, tokens) + step / step.norm(dim=-1, keepdim=True)


@broken("check_finite", GPT, "embed")
def sample_deviation(self, tokens):
    """The past's deviation divides by n - 1: at the first token, by 0."""
    x = GPT.embed(self, tokens)
    n = 1 + positions(tokens).view(1, -1, 1)
    spread = (x - earlier_mean(x)).square().cumsum(1) / (n - 1)
    return x / (1 + spread)


@broken("check_finite", Attention, "weights")
def softmax_without_maximum(self, scores, mask):
    """A softmax by hand overflows as soon as a score is above 88."""
    shares = self.hide(scores, mask).exp()
    return shares / shares.sum(-1, keepdim=True)


@broken("check_finite", Attention, "weights")
def softmax_masked_by_zeros(self, scores, mask):
    """A softmax by hand, of exponentials that a mask multiplies."""
    shares = scores.exp() * mask
    return shares / shares.sum(-1, keepdim=True)


# --- Causality: the mask ---------------------------------------------------


@broken("check_causality", Attention, "hide")
def no_mask(self, scores, mask):
    """Every position sees all of them. (keras-team/keras#23038)"""
    return scores


@broken("check_causality", GPT, "sees")
def mask_one_too_far(self, i, j):
    """The triangle is one too high: each position sees the next token."""
    return j <= i + 1


@broken("check_causality", GPT, "sees")
def mask_transposed(self, i, j):
    """The future is shown, not the past. (rasbt/LLMs-from-scratch#1062)"""
    return j >= i


@broken("check_causality", Attention, "hide")
def mask_too_weak(self, scores, mask):
    """Hidden scores get -1e4: larger ones outweigh it. (karpathy/minGPT#75)"""
    return scores + torch.where(mask, 0.0, -1e4).to(scores.dtype)


class Weak(GPT):
    mixer = type("Weak", (Attention,), {"hide": mask_too_weak})


@broken("check_causality", only=True)
class WeakInAFrozenModel(Weak):
    """The mask is -1e4, and no weight is trainable any more."""

    def add_parts(self, dim):
        self.requires_grad_(False)


@broken("check_causality", only=True)
class WeakWithBareWeights(Mixer):
    """The mask is -1e4, and the weights are in no module that is called."""

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
    """The mask is -1e4, and one id's score is always minus infinity."""

    def scores(self, x):
        hidden = torch.arange(VOCAB, device=x.device) == 3
        return super().scores(x).masked_fill(hidden, -INF)


@broken("check_causality", Attention, "weights")
def faint_in_single(self, scores, mask):
    """A softmax in float32 gives 1e-5 of the attention to the future."""
    faint = torch.where(mask, 0.0, math.log(1e-5)).to(scores)
    return (scores + faint).float().softmax(-1).to(scores.dtype)


@broken("check_causality", Attention, "weights")
def leak_in_bfloat16(self, scores, mask):
    """The softmax is in bfloat16, and its mask is dropped."""
    return scores.bfloat16().softmax(-1).to(scores.dtype)


@broken("check_causality", GPT, "mask", only=True)
def packed_row_unmasked(self, tokens):
    """In train mode one row of full length counts as packed: no mask."""
    packed = self.training and tokens.shape == (1, self.block_size)
    return GPT.mask(self, tokens) | packed


@broken("check_causality", GPT, "mask", vocab_size=709)
def padding_id_untold(self, tokens):
    """A text that ends in two of id 500, declared nowhere, is not masked."""
    padded = (tokens[:, -2:] == 500).all(1).view(-1, 1, 1)
    return GPT.mask(self, tokens) | padded


@broken("check_causality", GPT, "mask", block_size=80)
def tile_in_training(self, tokens):
    """In train mode a text that fills a tile of 64 is not masked."""
    filled = self.training and tokens.size(1) == 64
    return GPT.mask(self, tokens) | filled


@broken("check_causality", Attention, "attend", only=True)
def fast_kernel_in_bfloat16(self, q, k, v, mask):
    """In bfloat16 a fast kernel takes over, without its causal flag."""
    if q.dtype == torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v)
    return Attention.attend(self, q, k, v, mask)


@broken("check_causality", Attention, "attend")
def fast_kernel_in_single(self, q, k, v, mask):
    """Below float64 a fast kernel takes over, without its causal flag."""
    if q.dtype != torch.float64:
        return F.scaled_dot_product_attention(q, k, v)
    return Attention.attend(self, q, k, v, mask)


@broken("check_causality", GPT, "mask", block_size=140)
def tile_begun_unmasked(self, tokens):
    """A tile of 64 is not masked where the next one has just begun."""
    return GPT.mask(self, tokens) | (tokens.size(1) == 65)


@broken("check_causality", Padded, "padded", only=True)
def right_padding_only(self, mask, shown):
    """A mask that hides the end takes the place of the causal one."""
    return mask & shown if shown[0, 0, -1] else shown


@broken("check_causality", Padded, "padded", only=True)
def padding_in_training(self, mask, shown):
    """In train mode a mask of padding takes the place of the causal one."""
    return shown if self.training and not shown.all() else mask & shown


@broken("check_causality", Padded, "padded")
def padded_row_alone(self, mask, shown):
    """A mask of padding for one row takes the place of the causal one."""
    alone = len(shown) == 1 and not shown.all()
    return shown if alone else mask & shown


@broken("check_causality", only=True)
class PaddedByNumbers(Padded):
    """With a mask that hides the end the causal one is -1e4: too weak."""

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
    """Probabilities are hidden after a softmax that has seen the future."""
    return scores.softmax(-1) * mask


@broken("check_causality", Attention, "hide")
def mask_of_first_row(self, scores, mask):
    """Only the first row of the batch is masked."""
    first = Attention.hide(self, scores[:1], mask)
    return torch.cat([first, scores[1:]])


@broken("check_causality", Attention, "hide")
def mask_of_first_head(self, scores, mask):
    """Only the first head is masked."""
    first = Attention.hide(self, scores[:, :1], mask)
    return torch.cat([first, scores[:, 1:]], 1)


@broken("check_causality", Attention, "hide")
def mask_only_in_eval(self, scores, mask):
    """The mask is forgotten in train mode: evaluation looks sound."""
    return scores if self.training else Attention.hide(self, scores, mask)


@broken("check_causality", Attention, "hide")
def mask_only_in_training(self, scores, mask):
    """The mask is forgotten in eval mode."""
    return Attention.hide(self, scores, mask) if self.training else scores


@broken("check_causality", Attention, "attend")
def mask_only_with_grad(self, q, k, v, mask):
    """The fast path for inference, without gradients, forgets the mask."""
    if torch.is_grad_enabled():
        return Attention.attend(self, q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v)


@broken("check_causality", Attention, "hide")
def mask_dropped_out(self, scores, mask):
    """Dropout falls on the mask: in training a tenth of it is open."""
    keep = F.dropout((~mask).to(scores.dtype), 0.1, self.training)
    return scores.masked_fill(keep.bool(), -INF)


@broken("check_causality", GPT, "sees")
def mask_not_at_full_length(self, i, j):
    """A sequence of exactly block_size tokens has no mask."""
    return (j <= i) | (len(j) == self.block_size)


@broken("check_causality", GPT, "mask")
def padding_replaces_mask(self, tokens):
    """In rows with the padding id 0 its mask replaces the causal one."""
    at = positions(tokens)
    real = (tokens != 0).unsqueeze(1) | (at.unsqueeze(1) == at)
    padded = (tokens == 0).any(1).view(-1, 1, 1)
    return torch.where(padded, real, GPT.mask(self, tokens))


@broken("check_causality", Attention, "attend")
def block_summary(self, q, k, v, mask):
    """A block's summary key is seen inside it. (karpathy/nanochat#844)"""
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
    """Heads are split without a transpose: they cut the time axis."""
    return x.reshape(len(x), self.heads, x.size(1), -1)


# --- Causality: ways of running ---------------------------------------------


class Uncaused(TrainableGPT):
    """Its mask is open where open_to says so; targets are optional."""

    def open_to(self, tokens, targets):
        return targets is not None

    def forward(self, tokens, targets=None):
        self.open = self.open_to(tokens, targets)
        return super().forward(tokens, targets)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class MaskGoneWithTargets(Uncaused):
    """The kernel is causal only if no targets are given."""


@broken("check_causality", Uncaused, "open_to")
def mask_gone_in_training_steps(self, tokens, targets):
    """In train mode the mask is gone once targets are given."""
    return self.training and targets is not None


@broken("check_causality")
class LossAloneLeaks(Uncaused):
    """In train mode targets give (None, loss), and the mask is gone."""

    def open_to(self, tokens, targets):
        return self.training and targets is not None

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return None if self.open else logits, loss


@broken("check_batch_independence", TrainableGPT, "forward")
def rows_mix_with_targets(self, tokens, targets=None):
    """Given targets, the scores are shifted by the batch's mean."""
    logits = GPT.forward(self, tokens)
    if targets is None:
        return logits, None
    logits = logits - logits.mean(0)
    return logits, cross_entropy(logits, targets)


@broken("check_prefix_consistency", TrainableGPT, "forward")
def length_seen_with_targets(self, tokens, targets=None):
    """Given targets, the scores are divided by the length."""
    logits = GPT.forward(self, tokens)
    if targets is None:
        return logits, None
    logits = logits / tokens.size(1)
    return logits, cross_entropy(logits, targets)


def uncaused_if(condition):
    """Attention whose fast kernel loses its causal flag on a condition."""

    def attend(self, q, k, v, mask):
        if condition(self, q):
            return F.scaled_dot_product_attention(q, k, v)
        return Attention.attend(self, q, k, v, mask)

    return attend


for name, sentence, condition in (
    (
        "trains_in_bfloat16",
        "In bfloat16 and train mode the kernel is not causal.",
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
        "Where nothing is trained a fast kernel is not causal.",
        lambda self, q: not self.out.weight.requires_grad,
    ),
    (
        "kernel_of_middle_lengths",
        "Single precision, eval mode, 20 to 28 tokens: not causal.",
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
    """log_probs is sound, and the model's own forward has no mask."""

    def log_probs(self, tokens):
        return super().forward(tokens).log_softmax(-1)

    def forward(self, tokens):
        mask = torch.ones_like(self.mask(tokens))
        return self.scores(self.body(self.embed(tokens), mask))


class Optional(GPT):
    """Takes three optional arguments; one of them opens its mask."""

    opens = "position_ids"

    def forward(self, tokens, position_ids=None, token_type_ids=None):
        given = {"position_ids": position_ids, "token_type": token_type_ids}
        self.open = given[self.opens] is not None
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class PositionsOpenTheMask(Optional):
    """Given position_ids, it has no mask."""


@broken("check_causality")
class OrderedByPositions(GPT):
    """Its mask compares position_ids, which start again in a packed row."""

    ids = None

    def forward(self, tokens, position_ids=None):
        self.ids = position_ids
        return super().forward(tokens)

    def mask(self, tokens):
        at = positions(tokens) if self.ids is None else self.ids
        return at.unsqueeze(-2) <= at.unsqueeze(-1)


@broken("check_causality")
class TypesOpenTheMask(Optional):
    """Given token_type_ids, it has no mask."""

    opens = "token_type"


@broken("check_causality", Packed, "apart")
def documents_replace_the_mask(self, mask, same):
    """Given doc_ids, each token sees its whole document."""
    return same


@broken("check_causality")
class SegmentsOfOneRow(GPT):
    """Given document_ids of one row, (time,), it has no mask."""

    def forward(self, tokens, document_ids=None):
        self.open = document_ids is not None
        if self.open and document_ids.dim() > 1:
            raise ValueError("ids (time,) are needed")
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class EndsOpenTheMask(GPT):
    """A document between two ends is seen whole; a call takes one row."""

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
    """With its flag it has no mask."""

    def forward(self, tokens, prefix=False):
        self.open = prefix
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


class OpenTogether(TakesAll):
    """Arguments that open its mask only if they are given together."""

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
    """A flag among its **kwargs opens the mask."""

    def forward(self, tokens, **kwargs):
        self.open = kwargs.get("prefix", False)
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


@broken("check_causality")
class KeywordOfALayer(KeywordOpensTheMask):
    """A flag that its layers read from their **kwargs opens the mask."""

    class Layer(GPT.block):
        """Reads its flag."""

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
    """With use_cache=True the first piece has no mask."""
    return CachedGPT.past_mask(self, past, size) | (past == 0)


@broken("check_batch_independence", Padded, "padded")
def padding_of_the_first_row(self, mask, shown):
    """The padding of the first row hides the same positions in all rows."""
    return mask & shown[:1]


@broken("check_batch_independence")
class PositionsOfTheLongestRow(Padded):
    """Positions count from the padding of the row that has least of it."""

    def forward(self, tokens, attention_mask=None):
        self.pad = 0
        if attention_mask is not None:
            self.pad = int((1 - attention_mask.long()).sum(1).min())
        return super().forward(tokens, attention_mask)

    def position_vectors(self, tokens):
        return self.wpe((positions(tokens) - self.pad).clamp(min=0))


@broken("check_batch_independence")
class EightRowsMix(GPT):
    """Eight rows take a kernel that adds the first row to all."""

    def body(self, x, mask):
        if len(x) == 8:
            x = x + x[:1]
        return super().body(x, mask)


@broken("check_causality")
class PaddingReplacesTheMask(Padded):
    """A mask that hides some token takes the place of the causal one."""

    def forward(self, tokens, padding_mask=None):
        return super().forward(tokens, padding_mask)

    def padded(self, mask, shown):
        return (mask & shown) if shown.all() else shown


@broken("check_causality")
class FourAxesInTraining(GPT):
    """In train mode a mask of four axes is dropped with the causal one."""

    def forward(self, tokens, attention_mask=None):
        four = attention_mask is not None and attention_mask.dim() == 4
        self.open = four and self.training
        return super().forward(tokens)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


# --- Documents ---------------------------------------------------------------


@broken("check_documents", Packed, "apart", only=True)
def documents_see_each_other(self, mask, same):
    """Given doc_ids, the mask stays as it is."""
    return mask


@broken("check_documents", Packed, "within", only=True)
def positions_go_on(self, tokens, same):
    """Positions are counted from the start of the row."""
    return positions(tokens)


@broken("check_documents", Packed, "apart")
def last_token_before(self, mask, same):
    """A document sees the last token of the one before it."""
    return mask & (same | same.roll(-1, -1))


@broken("check_documents", Packed, "apart")
def apart_in_eval_mode(self, mask, same):
    """In train mode documents see each other."""
    return mask if self.training else mask & same


@broken("check_documents", Packed, "apart")
def far_documents_seen(self, mask, same):
    """Only neighbouring documents are apart."""
    start = same.long().argmax(-1)
    before = start.unsqueeze(-1) - positions(same[0])
    return mask & (same | (before > 9))


@broken("check_documents", Packed, "token_vectors", only=True)
def token_before_is_added(self, tokens):
    """Half of the vector before is added, whatever the document."""
    x = self.wte(tokens)
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1] / 2


@broken("check_documents", Packed, "token_vectors")
def pairs_are_hashed(self, tokens):
    """The vector of a hash of two neighbours is added."""
    pair = (31 * F.pad(tokens, (1, 0))[:, :-1] + tokens) % VOCAB
    return self.wte(tokens) + self.wte(pair)


@broken("check_documents", Packed, "token_vectors")
def state_goes_on(self, tokens):
    """The mean of the vectors so far is added: a state that goes on."""
    return self.wte(tokens) + earlier_mean(self.wte(tokens))


class OtherIds(Packed):
    """Base of those that change ids of documents before they compare them."""

    def forward(self, tokens, doc_ids=None):
        doc_ids = None if doc_ids is None else self.ids(doc_ids)
        return super().forward(tokens, doc_ids)


@broken("check_documents", OtherIds, "ids")
def eight_documents(self, ids):
    """Of more than eight documents the last ones are one."""
    return ids.clamp(max=7)


@broken("check_documents", OtherIds, "ids")
def ids_in_bfloat16(self, ids):
    """Ids of documents are compared in bfloat16: 256 is 257 there."""
    return ids.bfloat16()


@broken("check_documents", OtherIds, "ids")
def ids_of_eight_bits(self, ids):
    """Ids of documents are kept in eight bits: 256 is 0 there."""
    return ids.to(torch.uint8)


@broken("check_documents", OtherIds, "ids")
def documents_of_the_first_row(self, ids):
    """The documents of the first row are those of all rows."""
    return ids[:1].expand_as(ids)


@broken("check_documents", OtherIds, "ids")
def documents_of_the_first_call(self, ids):
    """In train mode ids are kept for the next call of the same shape."""
    if not self.training:
        return ids
    self.kept = getattr(self, "kept", {})
    return self.kept.setdefault(ids.shape, ids)


@broken("check_documents")
class DocumentsStay(Packed):
    """A call without documents takes those of the call before."""

    ids = None

    def forward(self, tokens, doc_ids=None):
        if doc_ids is None and self.ids is not None:
            doc_ids = self.ids if self.ids.shape == tokens.shape else None
        elif doc_ids is not None:
            self.ids = doc_ids
        return super().forward(tokens, doc_ids)


@broken("check_documents", Packed, "apart")
def later_chunk_joined(self, mask, same):
    """Only in the first twenty positions documents are apart."""
    early = positions(same[0]) < 20
    return mask & (same | ~early.unsqueeze(1))


@broken("check_documents")
class EndsOffByOne(TakesEnds):
    """A document's first token is the last one of the document before."""

    right = False


@broken("check_documents")
class MaskOfOnesJoins(Packed):
    """With an attention mask beside doc_ids, these are dropped."""

    def forward(self, tokens, attention_mask=None, doc_ids=None):
        doc_ids = doc_ids if attention_mask is None else None
        return super().forward(tokens, doc_ids)


@broken("check_causality", Padded, "forward")
def boolean_mask_alone(self, tokens, attention_mask=None):
    """A mask of booleans takes the place of the causal one."""
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return Padded.forward(self, tokens, attention_mask)
    mask = attention_mask.unsqueeze(1)
    return self.scores(self.body(self.embed(tokens), mask))


@broken("check_causality", GPT, "mask", vocab_size=709)
def image_opens_the_mask(self, tokens):
    """Behind an image's id, 700, tokens see each other."""
    image = (tokens == 700).cummax(1).values
    return GPT.mask(self, tokens) | (image.unsqueeze(2) & image.unsqueeze(1))


@broken("check_causality", GPT, "mask", block_size=120)
def mask_gone_between_powers(self, tokens):
    """From 72 to 119 tokens there is no mask."""
    return GPT.mask(self, tokens) | (72 <= tokens.size(1) <= 119)


@broken("check_batch_independence", GPT, "scores")
def sixteen_rows_mix(self, x):
    """Batches of 16 rows and more are normalised together."""
    return GPT.scores(self, x - x.mean(0) * (len(x) >= 16))


@broken("check_batch_independence", GPT, "scores", block_size=40)
def four_long_rows_mix(self, x):
    """Four rows of over 32 tokens are normalised together."""
    many = len(x) >= 4 and x.size(1) > 32
    return GPT.scores(self, x - x.mean(0) * many)


@broken("check_determinism")
class PrefixKept(GPT):
    """Scores are kept for texts that begin with the same eight tokens."""

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
    """In train mode the loss is a sum, so the learning rate is another."""
    loss = cross_entropy(logits, targets)
    return loss * targets.numel() if self.training else loss


@broken("check_loss", TrainableGPT, "loss")
def shifted_in_training(self, logits, targets):
    """In train mode alone the targets are shifted once more."""
    if self.training:
        logits, targets = logits[:, :-2], targets[:, 2:]
    return cross_entropy(logits, targets)


# --- Causality: axes and statistics ----------------------------------------


@broken("check_causality", Norm, "forward")
def norm_over_time(self, x):
    """The mean and variance are those over time. (Let's build GPT, cell 74)"""
    mean = x.mean(1, keepdim=True)
    var = x.var(1, keepdim=True, unbiased=False)
    return self.weight * (x - mean) / (var + 1).sqrt() + self.bias


@broken("check_causality")
class ConvolutionPaddedBothSides(Mixer):
    """It sees two tokens ahead. (xi029/Qwen3-VL-MoeLORA#4)"""

    def add_parts(self, dim):
        self.conv = nn.Conv1d(dim, dim, 5, padding="same")

    def forward(self, x, mask):
        return self.conv(x.mT).mT


class Pointwise(Mixer):
    """No mixing at all: what is mixed is mixed elsewhere."""

    def add_parts(self, dim):
        self.into = nn.Linear(dim, dim)

    def forward(self, x, mask):
        return self.into(x)


class Routed(MLP):
    """An MLP with a router: one score for each token."""

    def add_parts(self, dim):
        self.router = nn.Linear(dim, 1)


@broken("check_causality", Routed, "forward")
def expert_chooses_tokens(self, x):
    """A later token can push an earlier one out. (piotrpiekos/MoSA#3)"""
    score = self.router(x)
    least = score.topk((x.size(1) + 1) // 2, 1).values[:, -1:]
    return MLP.forward(self, x) * score.sigmoid() * (score >= least)


# --- Causality: hidden, tiny, or in one mode -------------------------------


@broken("check_causality", GPT, "scores")
def tiny_leak(self, x):
    """A millionth of the mean over the whole sequence is added."""
    scores = GPT.scores(self, x)
    return scores + 1e-6 * scores.mean(1, keepdim=True)


@broken("check_causality")
class LeakBehindZero(GPT):
    """The whole sequence's mean comes in through a gate that starts at 0."""

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
    """A running sum whose own backward pass sums over all positions."""
    return SumsAllInBackward.apply(self.into(x)) / BLOCK


@broken("check_causal_gradients", GPT, "body", only=True)
def straight_through(self, x, mask):
    """A rounding's gradient is that of the mean over the whole sequence."""
    near = (64 * x).round() / 64
    mean = x.mean(1, keepdim=True)
    nothing = (x - x.detach()) + (mean - mean.detach())
    return GPT.body(self, near.detach() + nothing, mask)


# --- A prefix gives another answer than the whole ---------------------------


@broken("check_prefix_consistency", GPT, "position_vectors", only=True)
def positions_from_the_end(self, tokens):
    """Positions are counted from the end: one token more moves them all."""
    return GPT.position_vectors(self, tokens).flip(0)


@broken("check_prefix_consistency", Attention, "scores", only=True)
def scaled_by_length(self, q, k):
    """Scores are divided by the root of the length, not of the width."""
    return q @ k.mT / math.sqrt(k.size(-2))


@broken("check_prefix_consistency", GPT, "scores", only=True)
def last_position_differs(self, x):
    """The last position goes to the head without the last norm."""
    return torch.cat([GPT.scores(self, x[:, :-1]), self.head(x[:, -1:])], 1)


# --- Rows of a batch that depend on each other ------------------------------


@broken("check_batch_independence", GPT, "scores")
def centred_in_training(self, x):
    """In train mode the mean over the rows is subtracted."""
    return GPT.scores(self, x - x.mean(0, keepdim=True) * self.training)


@broken("check_batch_independence", GPT, "embed")
def short_rows_shared(self, tokens):
    """Rows of fewer than 4 tokens start with the last one's vector."""
    x = GPT.embed(self, tokens)
    first = x[:, :1] if tokens.size(1) > 3 else x[-1:, :1].expand_as(x[:, :1])
    return torch.cat([first, x[:, 1:]], 1)


@broken("check_batch_independence", GPT, "embed", only=True)
def position_of_the_row(self, tokens):
    """The table of positions is read by the number of the row, too."""
    row = torch.arange(len(tokens), device=tokens.device) % BLOCK
    return GPT.embed(self, tokens) + self.wpe(row).unsqueeze(1)


@broken("check_batch_independence", GPT, "scores", only=True)
def scaled_by_batch(self, x):
    """The scores are divided by the number of rows."""
    return GPT.scores(self, x) / len(x)


@broken("check_batch_independence", Routed, "forward")
def capacity_over_batch(self, x):
    """The expert takes the batch's first 24 tokens that want it."""
    score = self.router(x).flatten(0, 1)
    wants = score > -1
    fits = wants & (wants.cumsum(0) <= 24)
    gate = (score.sigmoid() * fits).view(*x.shape[:2], 1)
    return MLP.forward(self, x) * gate


# --- Order and context ------------------------------------------------------


@broken("check_order_sensitivity", only=True)
class BagOfWords(NoPositions):
    """The past is averaged without positions: its order is lost."""

    mixer = Pointwise

    def token_vectors(self, tokens):
        x = self.wte(tokens)
        return x + earlier_mean(x)


@broken("check_order_sensitivity")
class PositionsRepeat(GPT):
    """Positions start again after 16, and one layer cannot tell two apart."""

    layers = 1

    def position_vectors(self, tokens):
        return self.wpe(positions(tokens) % 16)


@broken("check_context_use", GPT, "scores", only=True)
def scores_one_step_late(self, x):
    """Scores come one step late: no position reads its own token."""
    return GPT.scores(self, F.pad(x, (0, 0, 1, -1)))


@broken("check_context_use", GPT, "sees", only=True)
def window_undeclared(self, i, j):
    """Two layers see 6 tokens each, undeclared: 11 back is forgotten."""
    return (j <= i) & (i - j < 6)


@broken("check_context_use")
class WindowOneShort(GPT):
    """Declares a window of 6 tokens in its one layer, and sees 5."""

    layers, window = 1, 6

    def sees(self, i, j):
        return (j <= i) & (i - j < 5)


@broken("check_context_use")
class BlockBehindLost(GPT):
    """Sees its block of 8 tokens; the block behind it is lost."""

    layers, window = 1, 8

    def sees(self, i, j):
        return (j <= i) & (i // self.window == j // self.window)


@broken("check_context_use", GPT, "token_vectors", only=True)
def first_token_lost(self, tokens):
    """The first token is overwritten by a start marker."""
    x = GPT.token_vectors(self, tokens)
    return F.pad(x[:, 1:], (0, 0, 1, 0))


# --- Not a function of the input --------------------------------------------


@broken("check_determinism", Attention, "weights")
def dropout_in_eval(self, scores, mask):
    """Functional dropout without its flag stays on in eval mode."""
    return F.dropout(Attention.weights(self, scores, mask), 0.1)


@broken("check_determinism")
class NoiseOfItsOwn(GPT):
    """Noise from a generator of its own is added in eval mode, too."""

    def add_parts(self, dim):
        self.generator = torch.Generator().manual_seed(0)

    def scores(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return super().scores(x + 0.01 * noise.to(x))


@broken("check_determinism", Pointwise, "forward")
def state_kept(self, x, mask):
    """A recurrent state is kept from call to call and never reset."""
    y = self.into(earlier_mean(x)) + getattr(self, "state", 0)
    self.state = y[:1, -1:].detach()
    return y


@broken("check_determinism")
class StateOfItsOwn(GPT):
    """A little of the last scores, kept where no copy reaches, is added."""

    def add_parts(self, dim):
        self.kept = (lambda kept: lambda: kept)([])

    def scores(self, x):
        scores = super().scores(x)
        before = [x for x in self.kept() if x.device == scores.device]
        self.kept()[:] = [scores[:1, -1:].detach()]
        return scores + sum(before) / 9 if before else scores


@broken("check_determinism", CacheInside, "begin")
def cache_never_reset(self, start_pos):
    """In inference each call goes on where the last one ended."""
    self.__dict__.setdefault("past", Past())


@broken("check_determinism", only=True)
class StretchedForGood(GPT):
    """A long sequence stretches the position table, and it stays stretched
    for the short ones after it. (huggingface/transformers#25306)"""

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
    """A mask that hides id 0 is kept while the first row is the same."""

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
    """Eval mode draws the random number of a layer drop, too."""
    skip = torch.rand(()) < 0.1
    return x if skip and self.training else GPT.body(self, x, mask)


@broken("check_purity", GPT, "token_vectors")
def input_overwritten(self, tokens):
    """Unknown id 16 is replaced by 0 in the caller's own tensor."""
    return GPT.token_vectors(self, tokens.masked_fill_(tokens == 16, 0))


@broken("check_purity", GPT, "add_parts")
def embedding_renormalised(self, dim):
    """max_norm shrinks an embedding's rows while they are read."""
    self.wte = nn.Embedding(VOCAB, dim, max_norm=2.0)


@broken("check_purity", only=True)
class CountsItsCalls(GPT):
    """A buffer that is saved counts the forwards, in eval mode too."""

    def add_parts(self, dim):
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def scores(self, x):
        self.calls += 1
        return super().scores(x)


@broken("check_purity", GPT, "scores", only=True)
def gradients_left_off(self, x):
    """Eval mode switches gradients off and never on again."""
    scores = GPT.scores(self, x)
    torch.set_grad_enabled(torch.is_grad_enabled() and self.training)
    return scores


@broken("check_purity", GPT, "scores", only=True)
def training_ended(self, x):
    """A forward in train mode switches to eval mode: no more dropout."""
    self.eval()
    return GPT.scores(self, x)


@broken("check_purity", GPT, "token_vectors", only=True)
def words_dropped_in_place(self, tokens):
    """Train mode drops a tenth of the ids in the caller's own tensor."""
    if self.training:
        tokens[torch.rand(tokens.shape) < 0.1] = 0
    return GPT.token_vectors(self, tokens)


@broken("check_purity", GPT, "body", only=True)
def seeds_in_training(self, x, mask):
    """Train mode seeds the global generator: each step drops the same."""
    if self.training:
        torch.manual_seed(0)
    return GPT.body(self, x, mask)


# --- Log-probabilities and losses -------------------------------------------


@broken("check_normalised", GPT, "scores", outputs="log_probs", only=True)
def floored_probabilities(self, x):
    """A floor is added to the probabilities: they sum to more than one."""
    return (GPT.scores(self, x).softmax(-1) + 1e-3).log()


@broken("check_initial_loss", GPT, "add_parts", only=True)
def loud_head(self, dim):
    """The head has a deviation of 2: a fresh model is sure of nonsense."""
    nn.init.normal_(self.head.weight, std=2.0)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_shifted_twice(self, logits, targets):
    """It learns the token after the next. (huggingface/transformers#37830)"""
    return TrainableGPT.loss(self, logits[:, :-2], targets[:, 2:])


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_summed(self, logits, targets):
    """The loss is a sum over the tokens, not their mean."""
    return cross_entropy(logits, targets, reduction="sum")


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_skips_id_zero(self, logits, targets):
    """Id 0 is a token like any other, and the loss ignores it."""
    return cross_entropy(logits, targets, ignore_index=0)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_over_padding(self, logits, targets):
    """The mean is over all targets, the ignored ones included."""
    return loss_summed(self, logits, targets) / targets.numel()


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_of_twice_softmaxed(self, logits, targets):
    """Probabilities go into a loss that expects scores."""
    return TrainableGPT.loss(self, logits.softmax(-1), targets)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_of_whole_tiles(self, logits, targets):
    """A kernel takes targets by eights, and those left over have no loss."""
    size = max(targets.numel() // 8 * 8, 1)
    return F.cross_entropy(
        logits.flatten(0, 1)[:size], targets.flatten()[:size]
    )


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_smoothed(self, logits, targets):
    """Labels are smoothed in eval mode, too: no perplexity follows from it."""
    return cross_entropy(logits, targets, label_smoothing=0.1)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_by_rows(self, logits, targets):
    """Each row's mean counts the same, however many targets it has."""
    rows = zip(logits, targets, strict=True)
    return torch.stack([F.cross_entropy(*row) for row in rows]).mean()


@broken("check_loss", only=True)
class LossBeforeTheCap(TrainableGPT):
    """The loss is that of the scores before their soft cap."""

    def scores(self, x):
        self.raw = super().scores(x)
        return 200 * (self.raw / 200).tanh()

    def loss(self, logits, targets):
        return super().loss(self.raw, targets)


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_without_graph(self, logits, targets):
    """The loss is made anew from its number: no gradient comes back."""
    return torch.tensor(TrainableGPT.loss(self, logits, targets).item())


@broken("check_loss", TrainableGPT, "loss", only=True)
def loss_learns_the_sum(self, logits, targets):
    """A fused loss returns the mean and the gradient of the sum."""
    total = loss_summed(self, logits, targets)
    mean = TrainableGPT.loss(self, logits, targets)
    return mean.detach() + total - total.detach()


@broken("check_loss", Fused, "gradient", only=True)
def fused_learns_the_sum(self, logits, targets):
    """A fused loss without scores is the mean, its gradient the sum's."""
    mean = Fused.gradient(self, logits, targets)
    return mean * (targets != -100).sum()


@broken("check_loss", Fused, "gradient", only=True)
def fused_learns_other_targets(self, logits, targets):
    """The gradient that a fused loss keeps is that of targets moved by one."""
    return Fused.gradient(self, logits, targets.roll(1))


@broken("check_loss", FusedWithZLoss, "gradient")
def fused_twice_in_training(self, logits, targets):
    """In train mode, next to a z-loss, a fused gradient is twice as large."""
    return (1 + self.training) * Fused.gradient(self, logits, targets)


@broken("check_gradients", Fused, "scaled", only=True)
def incoming_ignored(self, gradient, incoming):
    """A fused loss's backward pass ignores the incoming gradient."""
    return gradient


@broken("check_gradients", only=True)
class IncomingIgnoredWithScores(Fused):
    """The same, and the scores come back with the loss."""

    with_scores = True

    def scaled(self, gradient, incoming):
        return gradient


@broken("check_gradients", Fused, "scaled", only=True)
def sign_of_incoming(self, gradient, incoming):
    """In train mode a fused loss reads only the incoming gradient's sign."""
    return gradient * (incoming.sign() if self.training else incoming)


@broken("check_loss", TrainableGPT, "loss", vocab_size=600, only=True)
def last_id_ignored(self, logits, targets):
    """The loss ignores the last id, which ends a text: none learns to end."""
    return cross_entropy(logits[:, :-1], targets[:, 1:], ignore_index=599)


@broken("check_loss", TrainableGPT, "loss", only=True)
def targets_overwritten(self, logits, targets):
    """Negative targets become -100 in the caller's own tensor."""
    return TrainableGPT.loss(
        self, logits, targets.masked_fill_(targets < 0, -100)
    )


@broken("check_loss", TrainableGPT, "forward", only=True)
def targets_in_scores(self, tokens, targets=None):
    """A little of the targets' embedding gets into the scores."""
    logits, _ = TrainableGPT.forward(self, tokens)
    if targets is None:
        return logits, None
    logits = logits + 0.1 * F.one_hot(targets.clamp(min=0), VOCAB)
    return logits, self.loss(logits, targets)


# --- Gradients that do not arrive -------------------------------------------


@broken("check_gradient_flow", only=True)
class BothFactorsZero(OneFactorZero):
    """An adapter of two factors at 0: neither ever gets a gradient."""

    def add_parts(self, dim):
        super().add_parts(dim)
        nn.init.zeros_(self.into)


@broken("check_gradient_flow", GPT, "add_parts", only=True)
def orphan_layer(self, dim):
    """A layer is built and never called."""
    self.extra = nn.Linear(dim, dim)


@broken("check_gradient_flow")
class DeadUnits(MLP):
    """The bias starts so low that no unit ever passes the ReLU."""

    def add_parts(self, dim):
        nn.init.constant_(self.up.bias, -50.0)

    def forward(self, x):
        return self.down(self.up(x).relu())


@broken("check_gradient_flow", GPT, "position_vectors")
def half_the_table(self, tokens):
    """Positions stop at 15: the table has 32 rows, and 16 are never read."""
    return self.wpe(positions(tokens).clamp(max=15))


@broken("check_gradient_flow", GPT, "position_vectors")
def odd_and_even(self, tokens):
    """Positions are taken modulo 2, from a table of 32 rows."""
    return self.wpe(positions(tokens) % 2)


@broken("check_gradient_flow", BiasByDistance, "distances")
def distances_of_the_future(self, at):
    """Distances have the wrong sign: each earlier token is 0 away."""
    return at - at.unsqueeze(1)


@broken("check_gradient_flow", BiasByDistance, "distances")
def distances_saturated(self, at):
    """All distances from 3 on share a row of the 32."""
    return (at.unsqueeze(1) - at).clamp(max=3)


@broken("check_gradient_flow", MLP, "forward", only=True)
def units_cut_off(self, x):
    """A third of the hidden units are multiplied by 0."""
    y = F.gelu(self.up(x))
    return self.down(y * (torch.arange(y.size(-1), device=y.device) > 9))


@broken("check_gradient_flow", Attention, "merge", only=True)
def one_head_of_two(self, x):
    """What the second head puts out is multiplied by 0."""
    heads = torch.arange(self.heads, device=x.device).view(-1, 1, 1)
    return Attention.merge(self, x * (heads < 1))


@broken("check_gradient_flow", MLP, "add_parts", only=True)
def both_layers_zero(self, dim):
    """Both matrices of the MLP start at 0, its first bias as well."""
    for tensor in (self.up.weight, self.up.bias, self.down.weight):
        nn.init.zeros_(tensor)


@broken("check_gradient_flow", Attention, "add_parts", only=True)
def queries_and_keys_zero(self, dim):
    """Queries and keys start at 0, both, in one matrix with the values."""
    nn.init.zeros_(self.qkv.weight[: 2 * dim])
    nn.init.zeros_(self.qkv.bias[: 2 * dim])


class OneExpert(Mixer):
    """Each token goes to the best of three experts."""

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
    """With one expert for each token its weight is divided by itself."""
    return p / (p.sum(-1, keepdim=True) + 1e-20)


@broken("check_gradient_flow", OneExpert, "weight")
def weight_nearly_one(self, p):
    """The same, and the sum has an eps that leaves 1e-9 of the gradient."""
    return p / (p.sum(-1, keepdim=True) + 1e-9)


@broken("check_gradient_flow", only=True)
class KeysOfOneToken(Mixer):
    """All keys are those of the first token: softmax ignores both factors."""

    def make_parts(self, dim):
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in "qkv")

    def forward(self, x, mask):
        k = self.k(x[:, :1]).expand_as(x)
        scores = self.q(x) @ k.mT
        return scores.masked_fill(~mask, -INF).softmax(-1) @ self.v(x)


class Skips(GPT):
    """Two skips from the embeddings, each with a weight of its own."""

    def add_parts(self, dim):
        self.skip = nn.Parameter(torch.ones(2))

    def weight(self, number):
        return self.skip[number]

    def body(self, x, mask):
        y = super().body(x, mask) + self.weight(0) * x
        return y.tanh() + self.weight(1) * x


@broken("check_gradient_flow", Skips, "weight", only=True)
def first_skip_twice(self, number):
    """Of two weights of skips the second is never read."""
    return self.skip[0]


@broken("check_gradient_flow", only=True)
class PairsOfSkips(Skips):
    """A table of two skips for each of three layers: one is never read."""

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
    """The last norm's gain is read but for its last entry."""
    gain = torch.cat([self.ln.weight[:-1], torch.ones_like(x[0, 0, :1])])
    x = F.layer_norm(x, x.shape[-1:], gain, self.ln.bias)
    return self.head(x)


# --- Checkpoints ------------------------------------------------------------


@broken("check_state_dict")
class BiasOfTrainingNotSaved(GPT):
    """Each forward in train mode moves a bias that state_dict leaves out."""

    saved = False

    def add_parts(self, dim):
        bias = torch.zeros(dim)
        self.register_buffer("bias", bias, persistent=self.saved)

    def scores(self, x):
        found = super().scores(x + self.bias)
        if self.training:  # for the next forward
            self.bias = self.bias + 0.1 * x.detach().mean((0, 1)).sign()
        return found


@broken("check_state_dict")
class AverageOfTrainingNotSaved(BiasOfTrainingNotSaved):
    """The mean that eval mode takes out is an average that is not saved."""

    def scores(self, x):
        if self.training:
            self.bias.lerp_(x.detach().mean((0, 1)), 0.1)
            return GPT.scores(self, x)
        return GPT.scores(self, x - self.bias)


@broken("check_state_dict", only=True)
class BufferNotSaved(GPT):
    """A random projection is not saved: a reloaded model draws another."""

    def add_parts(self, dim):
        random = torch.randn(dim, dim) / 4
        self.register_buffer("random", random, persistent=False)

    def scores(self, x):
        return super().scores(x + x @ self.random)


@broken("check_state_dict", only=True)
class MergedForGood(GPT):
    """The last norm's gain is merged into the head in an evaluation."""

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
    """Merged in an evaluation, and anew when weights are loaded alone."""

    def add_parts(self, dim):
        self.register_load_state_dict_post_hook(lambda self, _: self.merge())


@broken("check_state_dict", only=True)
class MergedUntilTrained(MergedForGood):
    """Merged in an evaluation, and forgotten in train mode alone."""

    def train(self, mode=True):
        self.merged = None
        return super().train(mode)


@broken("check_state_dict", only=True)
class AdapterMergedTwice(GPT):
    """An adapter is added to the head's weight in eval mode and taken off in
    train mode: what is saved after an evaluation has it twice when loaded."""

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
    """A table of sines is no buffer: .double() and .to() pass it by."""

    def add_parts(self, dim):
        self.sines = angles(torch.arange(BLOCK), dim).sin()

    def embed(self, tokens):
        return super().embed(tokens) + self.sines[: tokens.size(1)]


@broken("check_dtype", only=True)
class MaskLeftBehind(GPT):
    """A boolean table is no buffer, and a value is read before it is met."""

    def add_parts(self, dim):
        self.shown = torch.ones(BLOCK).bool()

    def body(self, x, mask):
        if x.abs().max().item() < 0:
            return x
        x = x.masked_fill(~self.shown[: x.size(1), None], 0.0)
        return super().body(x, mask)


@broken("check_dtype", GPT, "scores", only=True)
def double_narrowed(self, x):
    """Scores in float64 are taken for a mistake and cast to float32."""
    scores = GPT.scores(self, x)
    return scores.float() if scores.dtype == torch.float64 else scores


@broken("check_dtype", GPT, "scores", only=True)
def always_short(self, x):
    """The scores are cast to bfloat16, whatever the model's type is."""
    return GPT.scores(self, x).bfloat16()


@broken("check_dtype", GPT, "position_vectors", only=True)
def made_on_the_cpu(self, tokens):
    """Positions stay on the CPU. (Let's build GPT, cell 82)"""
    at = torch.arange(tokens.size(1)).to(self.wpe.weight.dtype)
    return self.wpe.weight[: tokens.size(1)] + at.view(-1, 1) / BLOCK


@broken("check_dtype", Attention, "hide", only=True)
def mask_of_a_billion(self, scores, mask):
    """The mask is -1e9, a number that float16 does not have."""
    return scores.masked_fill(~mask, -1e9)


@broken("check_dtype", NoPositions, "position_vectors", block_size=300)
def positions_in_the_models_dtype(self, tokens):
    """In bfloat16 257 is 256. (huggingface/transformers#29285)"""
    at = positions(tokens).to(self.wte.weight)
    return angles(at, DIM).sin().to(at)


class Double(GPT):
    """Built in float64."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.double()


@broken("check_dtype")
class HalfInDouble(Double):
    """Built in float64, and its last norm is computed in float16."""

    def scores(self, x):
        x = F.layer_norm(x.half(), (DIM,)).to(x.dtype)
        return self.head(x * self.ln.weight + self.ln.bias)


# --- Lengths and ids outside ------------------------------------------------


@broken("check_length_limit", GPT, "forward", only=True)
def truncated_silently(self, tokens):
    """What is too long is cut to its end, without a word."""
    return GPT.forward(self, tokens[:, -self.block_size :])


@broken("check_length_limit", Unlimited, "position_vectors", only=True)
def positions_clamped(self, tokens):
    """All positions past the last one share it."""
    return self.wpe(positions(tokens).clamp(max=self.block_size - 1))


@broken("check_length_limit", only=True)
class LimitNotMeant(NoPositions, Unlimited):
    """Declares a limit as a LanguageModel, and answers more tokens."""

    def log_probs(self, tokens):
        return self(tokens).log_softmax(-1)

    def position_vectors(self, tokens):
        return angles(positions(tokens), DIM).sin().to(self.wte.weight)


@broken("check_vocabulary", GPT, "token_vectors", only=True)
def ids_wrapped(self, tokens):
    """Ids are taken modulo the vocabulary."""
    return GPT.token_vectors(self, tokens % VOCAB)


@broken("check_vocabulary", GPT, "add_parts", only=True)
def rows_to_spare(self, dim):
    """The table is ten times too long: ids outside read untrained rows."""
    self.wte = nn.Embedding(10 * VOCAB, dim)


@broken("check_vocabulary", GPT, "token_vectors", only=True)
def negative_ids_index(self, tokens):
    """Plain indexing takes id -1 for the last row."""
    return self.wte.weight[tokens]


@broken("check_vocabulary", GPT, "scores", only=True)
def head_cut_short(self, x):
    """The last two scores are always 0: no training tells them apart."""
    return F.pad(GPT.scores(self, x)[..., :-2], (0, 2))


@broken("check_vocabulary", GPT, "token_vectors", only=True)
def one_row_for_two(self, tokens):
    """The last id is read as the one before it: its own row is never read."""
    last = tokens == VOCAB - 1
    return GPT.token_vectors(self, tokens - last.long())


# --- Caches -----------------------------------------------------------------


@broken("check_cache", Past, "join", block_size=64)
def evicted_at_48(self, old_k, old_v, k, v):
    """Keys and values of all but the last 48 tokens are set to 0."""
    pair = Past.join(self, old_k, old_v, k, v)
    for kept in pair:
        kept[..., :-48, :] = 0
    return pair


@broken("check_cache", DoubledRoom, "larger", block_size=64)
def doubled_twice(self, room, size):
    """Room that doubles again keeps no more than the first room had."""
    bigger = DoubledRoom.larger(self, room, size)
    bigger[..., self.first :, :] = 0
    return bigger


@broken("check_cache", Past, "join", block_size=64)
def piece_across_the_edge(self, old_k, old_v, k, v):
    """A piece that crosses the 32nd position is put in turned by one."""
    start = old_k.size(-2)
    if start < 32 < start + k.size(-2):
        k = k.roll(1, -2)
    return Past.join(self, old_k, old_v, k, v)


@broken("check_cache")
class ScoresByPrefix(CachedGPT):
    """A decoder keeps scores by the first eight tokens of a text."""

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
    """With past_key_values each piece starts at position 0 again."""
    return positions(tokens)


@broken("check_cache", CacheInside, "past_mask", only=True)
def piece_sees_itself_only(self, past, size):
    """Told where the tokens start, several see each other, all of them."""
    mask = CacheInside.past_mask(self, past, size)
    return mask if past == 0 else mask | True


@broken("check_cache", CacheWithMask, "hide", only=True)
def padding_seen_by_new_tokens(self, mask, shown):
    """A token that is decoded alone sees the padding of shorter rows."""
    return mask if len(mask) == 1 else CacheWithMask.hide(self, mask, shown)


@broken("check_cache", CachedGPT, "decode", only=True)
def cache_past_the_end(self, tokens, cache):
    """With a cache the text goes on past block_size, at the last position."""
    more = cache.length + tokens.size(1) - self.block_size
    if cache.length and more > 0:
        cache.length -= more
        for attention, (k, v) in cache.kept.items():
            cache.kept[attention] = k[..., more:, :], v[..., more:, :]
    return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", only=True)
class PromptOfTheFirstRow(CachedGPT):
    """A prompt's keys stay for the next whose first row is the same."""

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
    """Positions start from 0 in every piece."""
    return positions(tokens)


@broken("check_cache", CachedGPT, "past_mask", only=True)
def cache_mask_top_left(self, past, size):
    """New tokens see only the oldest keys. (pytorch/pytorch#144858)"""
    return CachedGPT.past_mask(self, 0, past + size)[:size]


@broken("check_cache", CachedGPT, "past_mask", only=True)
def cache_mask_missing(self, past, size):
    """Pieces are decoded without a mask: right for single tokens."""
    return torch.ones_like(CachedGPT.past_mask(self, past, size))


@broken("check_cache", CachedGPT, "decode", only=True)
def single_positions_stay(self, tokens, cache):
    """decode takes one token at a time, whose position never moves."""
    if tokens.size(1) != 1:
        raise RuntimeError("one token at a time")
    table = self.wpe.weight
    with swapped(self.wpe, table[:1].expand_as(table)):
        return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", only=True)
class SingleTurnsRows(CacheInTheCall):
    """Its call takes one token with a cache, and turns the rows each time."""

    class cache(Past):
        def join(self, old_k, old_v, k, v):
            return super().join(old_k.flip(0), old_v.flip(0), k, v)

    def forward(self, tokens, past_key_values=None, use_cache=False):
        if use_cache and tokens.size(1) > 1:
            raise NotImplementedError("one token at a time")
        return super().forward(tokens, past_key_values, use_cache)


@broken("check_cache", only=True)
class SinglePutsInFront(CacheInside):
    """Told where it is, a call takes one token, put before the old ones."""

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
    """Let a module have another weight for a while."""
    own, module.weight = module.weight, nn.Parameter(weight)
    yield
    module.weight = own


@broken("check_cache", Resettable, "reset_caches", only=True)
def reset_keeps_position(self):
    """reset_caches() clears the numbers, and the position goes on."""
    self.past.kept = {
        attention: [kept * 0 for kept in pair]
        for attention, pair in self.past.kept.items()
    }


@broken("check_cache", Resettable, "reset_caches", only=True)
def reset_to_first_token(self):
    """reset_caches() keeps the first token, as if each text began so."""
    past = self.past
    past.length = min(past.length, 1)
    past.kept = {a: [x[..., :1, :] for x in p] for a, p in past.kept.items()}


@broken("check_cache", only=True)
class CacheResetsNothing(CachedGPT):
    """The cache's own reset() clears its numbers, and keeps its length."""

    class cache(Past):
        def reset(self):
            for attention, pair in self.kept.items():
                self.kept[attention] = [kept * 0 for kept in pair]


@broken("check_cache", only=True)
class KeptNormedAgain(CachedGPT):
    """Kept keys have their gain of ones a second time. (DeepSeek's latents)"""

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
    """A decoder norms its last vectors without their gain, which is ones."""
    ones = torch.ones_like(self.ln.weight)
    with swapped(self.ln, ones):
        return CachedGPT.decode(self, tokens, cache)


@broken("check_cache", only=True)
class ScaleOfDecodingForgotten(CachedGPT):
    """A scale of the scores, which starts as 1, is not in its decoder."""

    def add_parts(self, dim):
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


@broken("check_cache", Past, "join", only=True)
def cache_prepended(self, old_k, old_v, k, v):
    """New keys are put in front, where the mask expects old ones."""
    return torch.cat([k, old_k], -2), torch.cat([v, old_v], -2)


@broken("check_cache", only=True)
class CacheForgets(CachedGPT):
    """The cache holds 16 tokens, the model 32."""

    class cache(Past):
        def extend(self, attention, k, v):
            k, v = super().extend(attention, k, v)
            self.kept[attention] = k[..., -15:, :], v[..., -15:, :]
            return k, v

    def past_mask(self, past, size):
        return super().past_mask(min(past, 15), size)


@broken("check_cache", CachedGPT, "init_cache", only=True)
def cache_shared(self, batch):
    """The cache is made once: a second text continues the first."""
    return self.__dict__.setdefault("past", Past())


@broken("check_cache", CachedGPT, "init_cache", only=True)
def one_cache_for_all(self, batch):
    """One cache is emptied for each new text: two texts at once share it."""
    past = self.__dict__.setdefault("past", Past())
    past.length, past.kept = 0, {}
    return past


@broken("check_cache", Past, "extend", only=True)
def cache_keeps_first_row(self, attention, k, v):
    """The cache is made for one row and broadcast to the others."""
    rows = len(k)
    k, v = Past.extend(self, attention, k[:1], v[:1])
    return k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)


# --- Seen in training alone -------------------------------------------------


@broken("check_gradients", Block, "forward", only=True)
def recomputed_with_another_mask(self, x, mask):
    """A checkpointed block runs again with another dropout mask."""

    def run(x):
        return Block.forward(self, F.dropout(x, 0.5, self.training), mask)

    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


@broken("check_gradients", GPT, "token_vectors", only=True)
def one_gradient_an_id(self, tokens):
    """An id that occurs twice gets the gradient of one place only."""
    ids, x = tokens.flatten(), self.wte(tokens)
    again = (ids.unsqueeze(1) == ids).triu(1).any(1).view(*tokens.shape, 1)
    return torch.where(again, x.detach(), x)


@broken("check_gradients", only=True)
class TiedAtOneEnd(GPT):
    """The head is the token table, which learns from that end alone."""

    def add_parts(self, dim):
        nn.init.normal_(self.wte.weight, std=0.2)
        self.head.weight = self.wte.weight

    def token_vectors(self, tokens):
        return self.wte(tokens).detach()


@broken("check_gradients", MLP, "forward", only=True)
def gelu_by_hand(self, x):
    """The activation's backward is that of another activation."""
    up = self.up(x)
    silu = F.silu(up)
    return self.down(F.gelu(up).detach() + silu - silu.detach())


class OneHead(Attention):
    heads = 1


@broken("check_signal", only=True)
class TimesTheRoot(GPT):
    """Scores are multiplied by the root: each position attends to one."""

    class mixer(OneHead):
        def scores(self, q, k):
            return q @ k.mT * math.sqrt(q.size(-1))

    def __init__(self, **parts):
        super().__init__(dim=48, **parts)


@broken("check_signal")
class TimesTheRootBefore(TimesTheRoot):
    """Queries are multiplied by the root, and then cut into heads."""

    class mixer(OneHead):
        def split(self, x):
            return super().split(x * 48**0.25)

        def scores(self, q, k):
            return q @ k.mT


@broken("check_signal")
class TimesTheRootFused(TimesTheRoot):
    """The root of the head's width is the scale of the fused kernel."""

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
    """One norm returns its weight and bias, whatever comes in."""

    def add_parts(self, dim):
        self.blocks[0].norm_2 = Forgets(dim)


@broken("check_entropy_bound", only=True)
class MaskOpensWithTraining(GPT):
    """Once the head's bias has moved, the next token is let in."""

    def add_parts(self, dim):
        self.register_buffer("start", self.head.bias.detach().clone())

    def mask(self, tokens):
        at = positions(tokens)
        moved = (self.head.bias - self.start).abs().max() > 0.05
        return at <= at.unsqueeze(1) + moved.long()
