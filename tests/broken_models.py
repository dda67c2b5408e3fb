"""Models broken on purpose, each in one way, to test the checks with.

A fault is a class: what it replaces in the small GPT is the fault, its
docstring is the sentence that explains it, its decorator names the check
that must catch it. `only` marks a fault that no other check can see.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from small_gpt import (
    BLOCK,
    DIM,
    GPT,
    INF,
    MLP,
    VOCAB,
    Attention,
    CachedGPT,
    Mixer,
    Past,
    TrainableGPT,
    causal,
    earlier_mean,
)
from torch import nn


@dataclass(frozen=True)
class Broken:
    """A fault, how to build a model with it, and who must catch it."""

    name: str
    build: Callable[[], Callable]
    check: str
    sentence: str
    report: str | None = None
    vocab_size: int = VOCAB
    block_size: int = BLOCK
    outputs: str = "auto"
    device: None = None
    only: bool = False


BROKEN: list[Broken] = []


def broken(check, report=None, only=False, outputs="auto"):
    """Put the decorated class into the list, alone or as a part of a GPT."""

    def add(cls):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        sentence = " ".join(cls.__doc__.split())
        build = partial(GPT, **{cls.part: cls}) if cls.part else cls
        BROKEN.append(
            Broken(
                name,
                build,
                check,
                sentence,
                report,
                outputs=outputs,
                only=only,
            )
        )
        return cls

    return add


class Norm(nn.LayerNorm):
    part = "norm"


# --- Shape -----------------------------------------------------------------


@broken("check_shape")
class SqueezedScores(GPT):
    """A squeeze drops the batch axis of one row and the time axis of one
    token."""

    def forward(self, tokens):
        return super().forward(tokens).squeeze(0).squeeze(-2)


@broken("check_shape", only=True)
class FullRowFlattened(GPT):
    """In train mode one row of full length is taken for a packed batch and
    comes back without its batch axis."""

    def forward(self, tokens):
        scores = super().forward(tokens)
        packed = self.training and tokens.shape == (1, self.block_size)
        return scores.squeeze(0) if packed else scores


@broken("check_shape")
class PaddedToKernel(GPT):
    """Texts shorter than a kernel of 4 are padded on the right and not cut
    back."""

    def forward(self, tokens):
        missing = max(4 - tokens.size(1), 0)
        return super().forward(F.pad(tokens, (0, missing)))


# --- NaN and infinity ------------------------------------------------------


@broken("check_finite", report="GPT from Scratch, listing 5")
class DropoutBeforeSoftmax(Attention):
    """Dropout on the masked scores: minus infinity times 0 is NaN, in train
    mode only."""

    def hide(self, scores, mask):
        return F.dropout(super().hide(scores, mask), 0.1, self.training)


@broken("check_finite", only=True)
class RootOfZero(GPT):
    """The square root of a parameter that starts at 0: the value is right,
    its gradient is NaN."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def scores(self, x):
        return super().scores(x * (1 + (self.gate * self.gate).sqrt()))


@broken("check_finite")
class PaddingHidesFirst(GPT):
    """Id 0 counts as padding, and a first token of id 0 sees nothing: its
    softmax is 0 / 0."""

    def mask(self, tokens):
        return super().mask(tokens) & (tokens != 0).unsqueeze(1)


@broken("check_finite")
class NormWithoutEps(GPT):
    """The change from token to token is divided by its own size: two equal
    tokens in a row give 0 / 0."""

    def embed(self, tokens):
        x = self.wte(tokens)
        step = (x - F.pad(x, (0, 0, 1, -1))).detach()
        return super().embed(tokens) + step / step.norm(dim=-1, keepdim=True)


@broken("check_finite")
class SampleDeviation(GPT):
    """The running deviation of the past divides by n - 1: the first token
    divides by 0."""

    def embed(self, tokens):
        x = super().embed(tokens)
        n = torch.arange(1, x.size(1) + 1, device=x.device).view(1, -1, 1)
        spread = (x - earlier_mean(x)).square().cumsum(1) / (n - 1)
        return x / (1 + spread)


# --- Causality: the mask ---------------------------------------------------


@broken("check_causality", report="keras-team/keras#23038")
class NoMask(Attention):
    """The mask is dropped: every position sees all of them."""

    def hide(self, scores, mask):
        return scores


@broken("check_causality")
class MaskOneTooFar(GPT):
    """The triangle starts one diagonal too high: each position sees the
    next token, the one it has to predict."""

    def mask(self, tokens):
        size = tokens.size(1)
        ones = torch.ones(size, size, device=tokens.device)
        return ones.tril(1).bool()


@broken("check_causality", report="rasbt/LLMs-from-scratch#1062")
class MaskTransposed(GPT):
    """The upper triangle is kept instead of the lower: the past is hidden,
    the future shown."""

    def mask(self, tokens):
        return super().mask(tokens).mT


@broken("check_causality", report="karpathy/minGPT#75")
class MaskTooWeak(Attention):
    """Hidden scores get -1e4 added, which larger learned scores outweigh."""

    def hide(self, scores, mask):
        return scores + torch.where(mask, 0.0, -1e4).to(scores.dtype)


@broken("check_causality")
class MaskLeaky(Attention):
    """Hidden scores get log(1e-6) added: a millionth of the attention goes
    to the future."""

    def hide(self, scores, mask):
        return scores + torch.where(mask, 0.0, math.log(1e-6)).to(scores.dtype)


@broken("check_causality")
class MaskMultiplied(Attention):
    """Hidden scores are set to 0, which is a middling score, not the
    lowest."""

    def hide(self, scores, mask):
        return scores * mask


@broken("check_causality")
class MaskAfterSoftmax(Attention):
    """Probabilities are hidden after the softmax, whose denominator has
    seen the future."""

    def weights(self, scores, mask):
        return scores.softmax(-1) * mask


@broken("check_causality")
class MaskOfFirstRow(Attention):
    """Only the first row of the batch is masked."""

    def hide(self, scores, mask):
        first = super().hide(scores[:1], mask)
        return torch.cat([first, scores[1:]])


@broken("check_causality")
class MaskOfFirstHead(Attention):
    """Only the first head is masked."""

    def hide(self, scores, mask):
        first = super().hide(scores[:, :1], mask)
        return torch.cat([first, scores[:, 1:]], 1)


@broken("check_causality")
class MaskOnlyInEval(Attention):
    """The mask is forgotten in train mode: evaluation looks sound."""

    def hide(self, scores, mask):
        return scores if self.training else super().hide(scores, mask)


@broken("check_causality")
class MaskOnlyInTraining(Attention):
    """The mask is forgotten in eval mode."""

    def hide(self, scores, mask):
        return super().hide(scores, mask) if self.training else scores


@broken("check_causality")
class MaskOnlyWithGrad(Attention):
    """The fast path for inference, without gradients, forgets the mask."""

    def attend(self, q, k, v, mask):
        if torch.is_grad_enabled():
            return super().attend(q, k, v, mask)
        return F.scaled_dot_product_attention(q, k, v)


@broken("check_causality")
class MaskDroppedOut(Attention):
    """Dropout falls on the mask, not on the probabilities: in train mode a
    tenth of the future is open."""

    def hide(self, scores, mask):
        keep = F.dropout((~mask).to(scores.dtype), 0.1, self.training)
        return scores.masked_fill(keep.bool(), -INF)


@broken("check_causality")
class MaskNotAtFullLength(GPT):
    """A sequence of exactly block_size tokens takes a path without a
    mask."""

    def mask(self, tokens):
        mask = super().mask(tokens)
        full = tokens.size(1) == self.block_size
        return torch.ones_like(mask) if full else mask


@broken("check_causality")
class MaskByChunk(GPT):
    """The mask knows chunks of 8, not positions: inside a chunk all see
    all."""

    def mask(self, tokens):
        chunk = torch.arange(tokens.size(1), device=tokens.device) // 8
        return chunk.unsqueeze(1) >= chunk


@broken("check_causality")
class PrefixSeesItself(GPT):
    """The first four tokens see each other, as in a prefix language
    model."""

    def mask(self, tokens):
        mask = super().mask(tokens)
        mask[:4, :4] = True
        return mask


@broken("check_causality")
class WindowOnBothSides(GPT):
    """Above 12 tokens a window takes over, and |i - j| < 12 looks both
    ways."""

    def mask(self, tokens):
        size = tokens.size(1)
        if size <= 12:
            return super().mask(tokens)
        at = torch.arange(size, device=tokens.device)
        return (at.unsqueeze(1) - at).abs() < 12


@broken("check_causality")
class WindowWrapsAround(Attention):
    """A window made of rolled keys: before the start the keys come from the
    end."""

    def attend(self, q, k, v, mask):
        steps = range(4)
        k = torch.stack([k.roll(step, -2) for step in steps], -2)
        v = torch.stack([v.roll(step, -2) for step in steps], -2)
        p = (k @ q.unsqueeze(-1)).squeeze(-1).softmax(-1)
        return (p.unsqueeze(-2) @ v).squeeze(-2)


@broken("check_causality")
class PaddingReplacesMask(GPT):
    """Where a row holds the padding id 0, the padding mask replaces the
    causal one instead of joining it."""

    def mask(self, tokens):
        real = (tokens != 0).unsqueeze(1)
        real = real | torch.eye(
            tokens.size(1), dtype=torch.bool, device=tokens.device
        )
        padded = (tokens == 0).any(1).view(-1, 1, 1)
        return torch.where(padded, real, super().mask(tokens))


@broken("check_causality")
class DocumentMaskOnly(GPT):
    """Packed documents are kept apart by id 1, and inside one document all
    see all."""

    def mask(self, tokens):
        document = (tokens == 1).cumsum(1)
        return document.unsqueeze(2) == document.unsqueeze(1)


@broken("check_causality")
class SoftmaxOverQueries(Attention):
    """The softmax runs over the queries: each key's share depends on later
    queries."""

    def weights(self, scores, mask):
        return self.hide(scores, mask).softmax(-2)


@broken("check_causality")
class DistanceInsteadOfMask(Attention):
    """A penalty on the distance, as ALiBi's, takes the place of the
    mask."""

    def hide(self, scores, mask):
        at = torch.arange(scores.size(-1), device=scores.device)
        return scores - (at.unsqueeze(1) - at).abs()


@broken("check_causality")
class TopKBeforeMask(Attention):
    """The best 4 keys are chosen before the mask: future keys take places
    from past ones."""

    def hide(self, scores, mask):
        k = min(4, scores.size(-1))
        least = scores.topk(k, -1).values[..., -1:]
        eye = torch.eye(len(mask), dtype=torch.bool, device=mask.device)
        return super().hide(scores, mask & (scores >= least) | eye)


@broken("check_causality", report="karpathy/nanochat#844")
class BlockSummary(Attention):
    """Each block of 8 has a summary key, the mean of its keys, which the
    positions inside the block already see."""

    def attend(self, q, k, v, mask):
        size = q.size(-2)
        starts = range(0, size, 8)
        more_k = [k[..., s : s + 8, :].mean(-2) for s in starts]
        more_v = [v[..., s : s + 8, :].mean(-2) for s in starts]
        at = torch.arange(size, device=q.device) // 8
        open_ = at.unsqueeze(1) >= torch.arange(len(starts), device=q.device)
        k = torch.cat([k, torch.stack(more_k, -2)], -2)
        v = torch.cat([v, torch.stack(more_v, -2)], -2)
        return super().attend(q, k, v, torch.cat([mask, open_], -1))


# --- Causality: axes -------------------------------------------------------


@broken("check_causality")
class HeadsFromTime(Attention):
    """The view splits heads without a transpose: row t of the second head
    is a token from half the sequence later."""

    def split(self, x):
        return x.reshape(len(x), self.heads, x.size(1), -1)


@broken("check_causality")
class HeadsMergedAsTime(Attention):
    """Heads are joined without transposing back: later positions of the
    first head land in the place of earlier ones."""

    def merge(self, x):
        return x.reshape(len(x), x.size(-2), -1).flip(1)


# --- Causality: statistics over time ---------------------------------------


@broken("check_causality", report="Let's build GPT, cell 74")
class NormOverTime(Norm):
    """The norm takes its mean and variance over the time axis."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        var = x.var(1, keepdim=True, unbiased=False)
        return self.weight * (x - mean) / (var + 1).sqrt() + self.bias


@broken("check_causality")
class NormOverTimeAndWidth(nn.GroupNorm):
    """GroupNorm on (batch, width, time) averages over time too."""

    part = "norm"

    def __init__(self, dim):
        super().__init__(1, dim)

    def forward(self, x):
        return super().forward(x.mT).mT


@broken("check_causality")
class BatchNormInTraining(nn.BatchNorm1d):
    """Batch norm in train mode averages over rows and positions."""

    part = "norm"

    def forward(self, x):
        if x.numel() == x.size(-1):  # one value a channel has no variance
            return x
        return super().forward(x.mT).mT


@broken("check_causality")
class MeanOfScoresRemoved(GPT):
    """The scores are centred over the time axis."""

    def scores(self, x):
        scores = super().scores(x)
        return scores - scores.mean(1, keepdim=True)


@broken("check_causality")
class QuantisedByTheWhole(MLP):
    """Activations are rounded to 8 bits on a scale set by the largest value
    of the whole sequence."""

    def forward(self, x):
        scale = x.abs().amax((1, 2), keepdim=True) / 127
        rounded = (x / scale).round() * scale
        return super().forward(x + (rounded - x).detach())


@broken("check_causality", report="Shwai-He/MEO#2")
class RoutedByTheMean(MLP):
    """A gate reads the mean of the whole sequence."""

    def __init__(self, dim):
        super().__init__(dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        gate = self.gate(x.mean(1, keepdim=True)).sigmoid()
        return gate * super().forward(x)


@broken("check_causality")
class CountsOfTheWhole(GPT):
    """How often a token occurs is added as a feature, counted over the
    whole sequence."""

    def embed(self, tokens):
        same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
        return super().embed(tokens) + self.wpe(same.sum(2) - 1)


@broken("check_causality")
class PositionsFromPadding(GPT):
    """Positions start after the padding, and every id 0 of the row counts
    as padding, later ones too."""

    def position_vectors(self, tokens):
        at = torch.arange(tokens.size(1), device=tokens.device)
        padding = (tokens == 0).sum(1, keepdim=True)
        return self.wpe((at - padding).clamp(min=0))


# --- Causality: other ways to mix ------------------------------------------


@broken("check_causality", report="xi029/Qwen3-VL-MoeLORA#4")
class ConvolutionPaddedBothSides(Mixer):
    """A convolution padded on both sides sees two tokens ahead."""

    def __init__(self, dim):
        super().__init__(dim)
        self.conv = nn.Conv1d(dim, dim, 5, padding="same")

    def forward(self, x, mask):
        return self.conv(x.mT).mT


@broken("check_causality")
class CircularConvolution(Mixer):
    """A long convolution through the FFT without padding: the end wraps
    around to the start."""

    def __init__(self, dim):
        super().__init__(dim)
        self.kernel = nn.Parameter(torch.randn(BLOCK, dim) / 4)

    def forward(self, x, mask):
        size = x.size(1)
        kernel = torch.fft.rfft(self.kernel[:size], n=size, dim=0)
        y = torch.fft.rfft(x, n=size, dim=1) * kernel
        return torch.fft.irfft(y, n=size, dim=1)


@broken("check_causality")
class BidirectionalLSTM(Mixer):
    """The recurrent net runs in both directions."""

    def __init__(self, dim):
        super().__init__(dim)
        self.lstm = nn.LSTM(
            dim, dim // 2, batch_first=True, bidirectional=True
        )

    def forward(self, x, mask):
        return self.lstm(x)[0]


@broken("check_causality")
class NormaliserOfTheWhole(Attention):
    """Linear attention whose numerator is causal and whose denominator sums
    over all keys."""

    def attend(self, q, k, v, mask):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        top = (q @ k.mT).masked_fill(~mask, 0.0) @ v
        return top / (q @ k.sum(-2).unsqueeze(-1))


@broken("check_causality")
class TokenShiftWraps(Mixer):
    """The token before is taken with a roll: before the first stands the
    last."""

    def __init__(self, dim):
        super().__init__(dim)
        self.now, self.before = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, mask):
        return self.now(earlier_mean(x)) + self.before(x.roll(1, 1))


@broken("check_causality")
class ScanBackwards(Mixer):
    """The recurrence runs from the last token to the first."""

    def __init__(self, dim):
        super().__init__(dim)
        self.into = nn.Linear(dim, dim)

    def forward(self, x, mask):
        return earlier_mean(self.into(x).flip(1)).flip(1)


@broken("check_causality")
class MixesTimeFreely(Mixer):
    """A linear map over the time axis, as MLP-Mixer has, is not cut to a
    triangle."""

    def __init__(self, dim):
        super().__init__(dim)
        self.time = nn.Parameter(torch.randn(BLOCK, BLOCK) / 6)

    def forward(self, x, mask):
        size = x.size(1)
        return self.time[:size, :size] @ x


@broken("check_causality", report="piotrpiekos/MoSA#3")
class ExpertChoosesTokens(MLP):
    """The expert takes the better half of the sequence: a later token can
    push an earlier one out."""

    def __init__(self, dim):
        super().__init__(dim)
        self.router = nn.Linear(dim, 1)

    def forward(self, x):
        score = self.router(x)
        least = score.topk((x.size(1) + 1) // 2, 1).values[:, -1:]
        return super().forward(x) * score.sigmoid() * (score >= least)


@broken("check_causality")
class LooksOneStateAhead(GPT):
    """A second head's state, one position ahead, is mixed into the first
    head's."""

    def scores(self, x):
        ahead = F.pad(x, (0, 0, -1, 1))
        return super().scores(x + ahead / 2)


# --- Causality: asleep, tiny, or in one mode -------------------------------


@broken("check_causality")
class TinyLeak(GPT):
    """A millionth of the mean over the whole sequence is added."""

    def scores(self, x):
        return super().scores(x) + 1e-6 * super().scores(x).mean(
            1, keepdim=True
        )


@broken("check_causality")
class LeakBehindZero(GPT):
    """The mean over the whole sequence comes in through a gate that starts
    at 0: it leaks as soon as it is trained."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(DIM))

    def body(self, x, mask):
        return super().body(x, mask) + self.gate * x.mean(1, keepdim=True)


@broken("check_causality", only=True)
class LeakWithoutGradient(GPT):
    """In train mode the detached mean over the whole sequence is added:
    no gradient shows it, and eval mode is sound."""

    def body(self, x, mask):
        if self.training:
            x = x + x.mean(1, keepdim=True).detach()
        return super().body(x, mask)


# --- Gradients that see the future -----------------------------------------


class SumsAllInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad.sum(1, keepdim=True).expand_as(grad)


@broken("check_causal_gradients", only=True)
class BackwardOfOwn(Mixer):
    """A running sum with a backward of its own, which sums over all
    positions: the values are causal, the gradients are not."""

    def __init__(self, dim):
        super().__init__(dim)
        self.into = nn.Linear(dim, dim)

    def forward(self, x, mask):
        return SumsAllInBackward.apply(self.into(x)) / BLOCK


@broken("check_causal_gradients", only=True)
class StraightThrough(GPT):
    """A straight-through term is 0 in value and sends the gradient of the
    mean over the whole sequence."""

    def body(self, x, mask):
        mean = x.mean(1, keepdim=True)
        return super().body(x + (mean - mean.detach()), mask)


@broken("check_causal_gradients", only=True)
class GradientCentred(GPT):
    """A hook centres the gradient over the time axis."""

    def body(self, x, mask):
        if x.requires_grad:
            x = x * 1
            x.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
        return super().body(x, mask)


# --- A prefix gives another answer than the whole ---------------------------


@broken("check_prefix_consistency", only=True)
class PositionsFromTheEnd(GPT):
    """Positions are counted from the end: one token more moves them all."""

    def position_vectors(self, tokens):
        return super().position_vectors(tokens).flip(0)


@broken("check_prefix_consistency", only=True)
class ScaledByLength(Attention):
    """Scores are divided by the root of the length, not of the width."""

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(k.size(-2))


@broken("check_prefix_consistency", only=True)
class LastPositionDiffers(GPT):
    """The last position goes to the head without the last norm."""

    def scores(self, x):
        last = self.head(x[:, -1:])
        return torch.cat([super().scores(x[:, :-1]), last], 1)


@broken("check_prefix_consistency", only=True)
class PaddedOnTheLeft(GPT):
    """Odd lengths are padded on the left to even ones, which moves every
    position by one."""

    def position_vectors(self, tokens):
        size = tokens.size(1)
        at = torch.arange(size, device=tokens.device) + size % 2
        return self.wpe(at.clamp(max=BLOCK - 1))


# --- Rows of a batch that know of each other --------------------------------


@broken("check_batch_independence")
class CentredOverBatch(GPT):
    """The mean over the rows is subtracted."""

    def scores(self, x):
        return super().scores(x - x.mean(0, keepdim=True) / 2)


@broken("check_batch_independence")
class SoftmaxOverBatch(MLP):
    """A gate's softmax runs over axis 0, the batch."""

    def __init__(self, dim):
        super().__init__(dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        return super().forward(x) * self.gate(x).softmax(0)


@broken("check_batch_independence", only=True)
class PositionOfTheRow(GPT):
    """A table of positions is looked up by the number of the row as
    well."""

    def embed(self, tokens):
        row = torch.arange(len(tokens), device=tokens.device) % BLOCK
        return super().embed(tokens) + self.wpe(row).unsqueeze(1)


@broken("check_batch_independence", only=True)
class ScaledByBatch(GPT):
    """The scores are divided by the number of rows."""

    def scores(self, x):
        return super().scores(x) / len(x)


@broken("check_batch_independence")
class CapacityOverBatch(MLP):
    """The expert takes the first 24 tokens that want it, counted over the
    whole batch: the first rows fill it."""

    def __init__(self, dim):
        super().__init__(dim)
        self.router = nn.Linear(dim, 1)

    def forward(self, x):
        score = self.router(x).flatten(0, 1)
        wants = score > -1
        fits = wants & (wants.cumsum(0) <= 24)
        gate = (score.sigmoid() * fits).view(*x.shape[:2], 1)
        return super().forward(x) * gate


@broken("check_batch_independence")
class StateFromRowToRow(Mixer):
    """The rows are laid end to end for the recurrence: each starts with the
    state that the row before left."""

    def __init__(self, dim):
        super().__init__(dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x, mask):
        return self.lstm(x.flatten(0, 1).unsqueeze(0))[0].view_as(x)


@broken("check_batch_independence")
class BatchTakenForTime(Attention):
    """The layer expects time first and gets batch first: it attends over
    the rows, on top of sound attention."""

    def __init__(self, dim):
        super().__init__(dim)
        self.across = nn.MultiheadAttention(dim, 2)

    def forward(self, x, mask):
        return super().forward(x, mask) + self.across(x, x, x)[0]


@broken("check_batch_independence")
class RowsSorted(GPT):
    """Rows are sorted for the kernel and not put back in order."""

    def forward(self, tokens):
        return super().forward(tokens[tokens[:, 0].argsort(stable=True)])


# --- Order and context ------------------------------------------------------


class Pointwise(Mixer):
    """No mixing at all: what is mixed is mixed elsewhere."""

    def __init__(self, dim):
        super().__init__(dim)
        self.into = nn.Linear(dim, dim)

    def forward(self, x, mask):
        return self.into(x)


@broken("check_order_sensitivity", only=True)
class BagOfWords(GPT):
    """The past is averaged without positions: its order is lost."""

    mixer = Pointwise

    def __init__(self):
        super().__init__()
        del self.wpe

    def embed(self, tokens):
        x = self.wte(tokens)
        return x + earlier_mean(x)


@broken(
    "check_order_sensitivity",
    report="The Transformer architecture of GPT models, listing 3",
)
class OnePositionForAll(GPT):
    """A table of one position broadcasts: all positions are equal, and one
    layer of attention cannot tell their order."""

    layers = 1

    def position_vectors(self, tokens):
        return self.wpe.weight[:1]


@broken("check_context_use")
class Bigram(GPT):
    """The mask is the diagonal: each position sees itself alone."""

    def mask(self, tokens):
        return torch.eye(tokens.size(1), device=tokens.device).bool()


@broken("check_context_use", only=True)
class WindowUndeclared(GPT):
    """Two layers see 6 tokens each, and nothing says so: what lies 11 back
    is forgotten."""

    def mask(self, tokens):
        return super().mask(tokens).triu(-5)


@broken("check_context_use", only=True)
class FirstTokenLost(GPT):
    """The first token counts as a start marker and is overwritten by a
    position of its own."""

    def token_vectors(self, tokens):
        x = super().token_vectors(tokens)
        return F.pad(x[:, 1:], (0, 0, 1, 0))


@broken("check_context_use", only=True)
class StridedMask(GPT):
    """Each position sees every second one, its own parity: half of the past
    is never read."""

    def mask(self, tokens):
        at = torch.arange(tokens.size(1), device=tokens.device)
        same = (at.unsqueeze(1) - at) % 2 == 0
        return super().mask(tokens) & same


@broken("check_context_use")
class HeadsAreStretches(Attention):
    """Heads are split and joined without a transpose, wrong twice: each
    head is a stretch of time and sees no other."""

    def split(self, x):
        return x.reshape(len(x), self.heads, x.size(1), -1)

    def merge(self, x):
        return x.reshape(len(x), x.size(-2), -1)


# --- Not a function of the input --------------------------------------------


@broken("check_determinism")
class DropoutInEval(Attention):
    """Functional dropout without the training flag stays on in eval
    mode."""

    def weights(self, scores, mask):
        return F.dropout(super().weights(scores, mask), 0.1)


@broken("check_determinism")
class NoiseOfItsOwn(GPT):
    """Noise from a generator of its own is added to the scores in eval
    mode too."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def scores(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return super().scores(x + 0.01 * noise.to(x))


@broken("check_determinism")
class StateKept(Mixer):
    """A recurrent state is kept from call to call and never reset."""

    def __init__(self, dim):
        super().__init__(dim)
        self.into = nn.Linear(dim, dim)
        self.state = None

    def forward(self, x, mask):
        y = self.into(earlier_mean(x))
        if self.state is not None:
            y = y + self.state
        self.state = y[:1, -1:].detach()
        return y


@broken(
    "check_determinism", report="huggingface/transformers#25306", only=True
)
class StretchedForGood(GPT):
    """A long sequence stretches the position table, and it stays stretched
    for the short ones after it."""

    def __init__(self):
        super().__init__()
        self.longest = 16

    def position_vectors(self, tokens):
        size = tokens.size(1)
        self.longest = max(self.longest, size)
        at = torch.arange(size, device=tokens.device) * 16 / self.longest
        low = at.long()
        part = (at - low).unsqueeze(1).to(self.wpe.weight.dtype)
        return torch.lerp(self.wpe(low), self.wpe(low + 1), part)


@broken("check_determinism")
class FastPathAfterWarmUp(GPT):
    """After the first 12 calls a faster path takes over, which rounds its
    weights to 8 bits."""

    calls = 0

    def scores(self, x):
        self.calls += 1
        if self.calls <= 12:
            return super().scores(x)
        weight = (self.head.weight * 64).round() / 64
        return F.linear(self.ln(x), weight, self.head.bias)


# --- Side effects -----------------------------------------------------------


@broken("check_purity", only=True)
class DrawsAndForgets(GPT):
    """A random number is drawn for a layer drop that eval mode ignores: the
    caller's sampling changes."""

    def body(self, x, mask):
        skip = torch.rand(()) < 0.1
        return x if skip and self.training else super().body(x, mask)


@broken("check_purity", only=True)
class InputOverwritten(GPT):
    """Unknown id 16 is replaced by 0 in the caller's own tensor."""

    def token_vectors(self, tokens):
        return super().token_vectors(tokens.masked_fill_(tokens == 16, 0))


@broken("check_purity", only=True)
class EmbeddingRenormalised(GPT):
    """An embedding with max_norm shrinks its rows in place while it is
    read, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM, max_norm=2.0)


@broken("check_purity", only=True)
class CountsItsCalls(GPT):
    """A buffer counts the forwards, in eval mode too: the checkpoint of a
    model that was only read has changed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def scores(self, x):
        self.calls += 1
        return super().scores(x)


# --- Log-probabilities that are none ----------------------------------------


@broken("check_normalised", outputs="log_probs", only=True)
class FlooredProbabilities(GPT):
    """A floor is added to the probabilities before the logarithm: they sum
    to more than one."""

    def scores(self, x):
        return (super().scores(x).softmax(-1) + 1e-3).log()


@broken("check_normalised", outputs="log_probs")
class NormalisedOverTime(GPT):
    """The log-softmax runs over the time axis."""

    def scores(self, x):
        return super().scores(x).log_softmax(1)


@broken("check_normalised", outputs="log_probs", only=True)
class NormalisedInHalves(GPT):
    """An adaptive softmax forgets to multiply with the probability of the
    half: each half sums to one."""

    def scores(self, x):
        halves = super().scores(x).split(9, -1)
        return torch.cat([half.log_softmax(-1) for half in halves], -1)


# --- The loss ---------------------------------------------------------------


@broken("check_initial_loss", only=True)
class LoudHead(GPT):
    """The head is drawn from a normal distribution of deviation 2: a fresh
    model is sure of nonsense."""

    def __init__(self):
        super().__init__()
        nn.init.normal_(self.head.weight, std=2.0)


@broken("check_initial_loss", only=True)
class BiasFromCounts(GPT):
    """The head's bias starts from counts of which half are 0: those tokens
    start at the logarithm of almost nothing."""

    def __init__(self):
        super().__init__()
        counts = torch.arange(VOCAB) % 2 + 1e-6
        self.head.bias.data.copy_(counts.log())


@broken("check_loss", report="huggingface/transformers#37830", only=True)
class LossShiftedTwice(TrainableGPT):
    """The scores are shifted before a loss that shifts them again: the
    model learns the token after the next."""

    def loss(self, logits, targets):
        return super().loss(logits[:, :-2], targets[:, 2:])


@broken("check_loss", only=True)
class LossSummed(TrainableGPT):
    """The loss is a sum over the tokens, not their mean."""

    def loss(self, logits, targets):
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )


@broken("check_loss", only=True)
class LossSkipsIdZero(TrainableGPT):
    """Id 0 is a token like any other, and the loss ignores it as
    padding."""

    def loss(self, logits, targets):
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=0
        )


@broken("check_loss", only=True)
class LossOverPadding(TrainableGPT):
    """Ignored targets count in the denominator: the more padding, the
    smaller the loss."""

    def loss(self, logits, targets):
        total = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return total / targets.numel()


@broken("check_loss", only=True)
class LossTransposed(TrainableGPT):
    """Scores are laid out time first, targets batch first."""

    def loss(self, logits, targets):
        return super().loss(logits.transpose(0, 1), targets)


@broken("check_loss", only=True)
class LossOfTwiceSoftmaxed(TrainableGPT):
    """Probabilities go into a loss that expects scores."""

    def loss(self, logits, targets):
        return super().loss(logits.softmax(-1), targets)


@broken("check_loss", only=True)
class TargetsInScores(TrainableGPT):
    """Given targets, a little of their embedding gets into the scores that
    are returned."""

    def forward(self, tokens, targets=None):
        logits, _ = super().forward(tokens)
        if targets is None:
            return logits, None
        hint = F.one_hot(targets.clamp(min=0), VOCAB)
        logits = logits + 0.1 * hint
        return logits, self.loss(logits, targets)


# --- Gradients that do not arrive -------------------------------------------


@broken("check_gradient_flow", only=True)
class DetachedMLP(MLP):
    """A forgotten detach cuts the network behind it off from training."""

    def forward(self, x):
        return super().forward(x).detach()


@broken("check_gradient_flow", only=True)
class OrphanLayer(GPT):
    """A layer is built and never called."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(DIM, DIM)


@broken("check_gradient_flow", only=True)
class DeadUnits(MLP):
    """The bias starts so low that no unit ever rises above the ReLU's
    0."""

    def __init__(self, dim):
        super().__init__(dim)
        nn.init.constant_(self.up.bias, -50.0)

    def forward(self, x):
        return self.down(self.up(x).relu())


@broken("check_gradient_flow", only=True)
class ReadAsData(Norm):
    """The norm's gain is read through .data: it is used and never
    trained."""

    def forward(self, x):
        bare = F.layer_norm(x, self.normalized_shape)
        return bare * self.weight.data + self.bias


# --- Checkpoints ------------------------------------------------------------


@broken("check_state_dict", only=True)
class BufferNotSaved(GPT):
    """A random projection is a buffer with persistent=False: a reloaded
    model draws another one."""

    def __init__(self):
        super().__init__()
        random = torch.randn(DIM, DIM) / 4
        self.register_buffer("random", random, persistent=False)

    def scores(self, x):
        return super().scores(x + x @ self.random)


@broken("check_state_dict", only=True)
class ShadowWeights(GPT):
    """The head reads a copy of its weights that was made at construction:
    loading changes the weights and not the copy."""

    def __init__(self):
        super().__init__()
        copy = self.head.weight.detach().clone()
        self.register_buffer("shadow", copy, persistent=False)

    def scores(self, x):
        weight = self.shadow + (self.head.weight - self.head.weight.detach())
        return F.linear(self.ln(x), weight, self.head.bias)


@broken("check_state_dict", only=True)
class SavedWithoutBias(GPT):
    """A hook drops the head's bias from the checkpoint, and the loader does
    not miss it."""

    def __init__(self):
        super().__init__()
        self.head.register_state_dict_post_hook(self.drop)
        self.head.register_load_state_dict_post_hook(self.forgive)

    @staticmethod
    def drop(module, state, prefix, metadata):
        state.pop(f"{prefix}bias")

    @staticmethod
    def forgive(module, incompatible):
        incompatible.missing_keys.clear()


# --- Types and devices ------------------------------------------------------


@broken("check_dtype", only=True)
class TableNotRegistered(GPT):
    """A table of sines is an attribute, not a buffer: .double() and .to()
    pass it by."""

    def __init__(self):
        super().__init__()
        at = torch.arange(BLOCK).unsqueeze(1) / 10000 ** torch.linspace(
            0, 1, DIM
        )
        self.sines = at.sin()

    def embed(self, tokens):
        return super().embed(tokens) + self.sines[: tokens.size(1)]


@broken("check_dtype", only=True)
class DoubleNarrowed(GPT):
    """Scores in float64 are taken for a mistake and cast to float32."""

    def scores(self, x):
        scores = super().scores(x)
        return scores.float() if scores.dtype == torch.float64 else scores


@broken("check_dtype", only=True)
class AlwaysShort(GPT):
    """The scores are cast to bfloat16, whatever the model's type is."""

    def scores(self, x):
        return super().scores(x).bfloat16()


@broken("check_dtype", report="Let's build GPT, cell 82", only=True)
class MadeOnTheCPU(GPT):
    """Positions are made without a device: they stay on the CPU."""

    def position_vectors(self, tokens):
        at = torch.arange(tokens.size(1)).to(self.wpe.weight.dtype)
        return self.wpe.weight[: tokens.size(1)] + at.view(-1, 1) / BLOCK


@broken("check_dtype")
class WeightsInAList(GPT):
    """Layers in a plain list are no submodules: neither .double() nor
    state_dict() knows them."""

    def __init__(self):
        super().__init__()
        self.hidden_layers = [nn.Linear(DIM, DIM)]

    def scores(self, x):
        return super().scores(self.hidden_layers[0](x))


@broken("check_dtype", only=True)
class LinearByHandInFloat(GPT):
    """A constant matrix is made in float32 at every call and meets other
    types."""

    def scores(self, x):
        eye = torch.eye(DIM, device=x.device)
        return super().scores(x + x @ eye)


# --- Lengths and ids outside ------------------------------------------------


@broken("check_length_limit", only=True)
class TruncatedSilently(GPT):
    """What is too long is cut to its last block_size tokens without a
    word."""

    def forward(self, tokens):
        return super().forward(tokens[:, -self.block_size :])


@broken("check_length_limit", only=True)
class PositionsClamped(GPT):
    """All positions past the last one share it."""

    def require_length(self, size):
        pass

    def position_vectors(self, tokens):
        at = torch.arange(tokens.size(1), device=tokens.device)
        return self.wpe(at.clamp(max=self.block_size - 1))


@broken("check_length_limit", only=True)
class PositionsStartOver(GPT):
    """Past the last position the table starts again from the first."""

    def require_length(self, size):
        pass

    def position_vectors(self, tokens):
        at = torch.arange(tokens.size(1), device=tokens.device)
        return self.wpe(at % self.block_size)


@broken("check_length_limit", only=True)
class LimitNotMeant(GPT):
    """The sequence may be longer than the declared limit: sines instead of
    a table, and nobody compares."""

    def __init__(self):
        super().__init__()
        del self.wpe

    def require_length(self, size):
        pass

    def position_vectors(self, tokens):
        at = torch.arange(tokens.size(1), device=tokens.device)
        rate = 100 ** -torch.linspace(0, 1, DIM, device=tokens.device)
        return (at.unsqueeze(1) * rate).sin().to(self.wte.weight.dtype)


@broken("check_vocabulary", only=True)
class IdsWrapped(GPT):
    """Ids are taken modulo the vocabulary."""

    def token_vectors(self, tokens):
        return super().token_vectors(tokens % VOCAB)


@broken("check_vocabulary", only=True)
class IdsClamped(GPT):
    """Ids are clamped into the vocabulary: an unknown one becomes the
    last."""

    def token_vectors(self, tokens):
        return super().token_vectors(tokens.clamp(0, VOCAB - 1))


@broken("check_vocabulary", only=True)
class RowsToSpare(GPT):
    """The embedding has rows to spare: ids past the vocabulary are read
    from rows that were never trained."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB + 7, DIM)


@broken("check_vocabulary", only=True)
class NegativeIdsIndex(GPT):
    """Plain indexing takes id -1 for the last row."""

    def token_vectors(self, tokens):
        return self.wte.weight[tokens]


@broken("check_vocabulary", only=True)
class UnknownIsNothing(GPT):
    """One-hot rows by comparison: an id outside is a row of zeros and goes
    through."""

    def token_vectors(self, tokens):
        ids = torch.arange(VOCAB, device=tokens.device)
        hot = (tokens.unsqueeze(-1) == ids).to(self.wte.weight.dtype)
        return hot @ self.wte.weight


# --- Caches -----------------------------------------------------------------


@broken("check_cache", only=True)
class CachePositionsRestart(CachedGPT):
    """Positions start from 0 in every piece."""

    def past_positions(self, tokens, past):
        return torch.arange(tokens.size(1), device=tokens.device)


@broken("check_cache", report="pytorch/pytorch#144858", only=True)
class CacheMaskTopLeft(CachedGPT):
    """The mask of a piece is aligned with the first key, not with the last:
    new tokens see only the oldest."""

    def past_mask(self, size, past, tokens):
        return causal(tokens, past.length + size)[:size]


@broken("check_cache", only=True)
class CacheMaskMissing(CachedGPT):
    """A piece is decoded without a mask: right token by token, wrong in
    larger pieces."""

    def past_mask(self, size, past, tokens):
        return torch.ones_like(super().past_mask(size, past, tokens))


class NewestFirst(Past):
    def extend(self, attention, k, v):
        if attention in self.kept:
            old_k, old_v = self.kept[attention]
            k, v = torch.cat([k, old_k], -2), torch.cat([v, old_v], -2)
        self.kept[attention] = k, v
        return k, v


@broken("check_cache", only=True)
class CachePrepended(CachedGPT):
    """New keys are put in front of the old ones, where the mask of a piece
    of several tokens does not expect them."""

    def init_cache(self, batch):
        return NewestFirst()


class ForgetsOldest(Past):
    def extend(self, attention, k, v):
        k, v = super().extend(attention, k, v)
        self.kept[attention] = k[..., -15:, :], v[..., -15:, :]
        return k, v


@broken("check_cache", only=True)
class CacheForgets(CachedGPT):
    """The cache holds 16 tokens, the model 32: a long text loses its
    start."""

    def init_cache(self, batch):
        return ForgetsOldest()

    def past_mask(self, size, past, tokens):
        kept = min(past.length, 15)
        return causal(tokens, kept + size)[kept:]


@broken("check_cache", only=True)
class CacheShared(CachedGPT):
    """The cache is made once: a second text continues the first."""

    def init_cache(self, batch):
        if "past" not in self.__dict__:
            self.past = Past()
        return self.past


class ValuesLag(Past):
    def extend(self, attention, k, v):
        if attention in self.kept:
            old_k, old_v = self.kept[attention]
            k, v = torch.cat([old_k, k], -2), torch.cat([v, old_v], -2)
        self.kept[attention] = k, v
        return k, v


@broken("check_cache", only=True)
class CacheValuesSwapped(CachedGPT):
    """Keys are appended and values prepended: they no longer belong
    together."""

    def init_cache(self, batch):
        return ValuesLag()


@broken("check_cache", only=True)
class CacheKeepsFirstRow(CachedGPT):
    """The cache is made for one row and broadcast to the others."""

    def init_cache(self, batch):
        return FirstRow()


class FirstRow(Past):
    def extend(self, attention, k, v):
        rows = len(k)
        k, v = super().extend(attention, k[:1], v[:1])
        return k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)


# --- Seen in training alone -------------------------------------------------


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


@broken("check_entropy_bound", only=True)
class GradientReversed(GPT):
    """The gradient changes its sign on the way back: training unlearns,
    and nothing short of training shows it."""

    def scores(self, x):
        return Reversal.apply(super().scores(x))


@broken("check_entropy_bound")
class MaskOpensWithTime(GPT):
    """After 60 training steps the next token is let in, as if a schedule of
    the mask had been turned around."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def embed(self, tokens):
        x = super().embed(tokens)
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        if self.training and self.steps > 60:
            x = x + 3 * F.pad(self.wte(tokens), (0, 0, -1, 1))
        return x
