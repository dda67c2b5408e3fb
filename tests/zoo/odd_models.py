"""Sound models that look odd to a check, and faults that hide from a check."""

import random
from functools import partial

import torch
import torch.nn.functional as F
from correct_models import turned
from small_gpt import (
    BLOCK,
    DIM,
    GPT,
    MLP,
    VOCAB,
    Attention,
    EightBits,
    NoPositions,
    Padded,
    TrainableGPT,
    Unlimited,
    angles,
    cross_entropy,
    positions,
)
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel

NAMES = {"random": random, "forward": GPT.forward}
CODE = """def checked(self, tokens):
    random.getrandbits(8)
    return forward(self, tokens)
"""


class Beartyped(GPT):
    """A type checker checks one item of a list, drawn at random."""

    exec(compile(CODE, "<@beartype(GPT.forward)>", "exec"), NAMES)
    forward = NAMES["checked"]


class DrawsForNothing(GPT):
    """The forward draws a number from Python's generator and ignores it."""

    def forward(self, tokens):
        random.random()
        return super().forward(tokens)


class Mapped(MLP):
    """An MLP under vmap, whose layer returns an empty second result."""

    class Empty(nn.Linear):
        def forward(self, x):
            return super().forward(x), x[..., :0]

    def make_parts(self, dim):
        self.mapped = self.Empty(dim, dim)

    def forward(self, x):
        return torch.vmap(self.mapped)(x.flatten(0, 1))[0].view_as(x)


def mapped():
    """Return a function of ids that maps single rows by vmap."""
    model = GPT(block_size=64)
    return lambda tokens: torch.vmap(lambda row: model(row[None])[0])(tokens)


class TwoScores(GPT):
    """A second head predicts the token after the next one."""

    def add_parts(self, dim):
        self.second = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        self.require_length(tokens.size(1))
        x = self.body(self.embed(tokens), self.mask(tokens))
        return self.scores(x), self.second(x)


class Late(GPT):
    """A learned vector is added from position 48 on."""

    def __init__(self, **parts):
        super().__init__(block_size=64, **parts)

    def add_parts(self, dim):
        self.late = nn.Parameter(torch.zeros(dim))

    def embed(self, tokens):
        late = (positions(tokens) >= 48).unsqueeze(1)
        return super().embed(tokens) + late * self.late


class Flex(Attention):
    """Attention that calls flex_attention without compiling it."""

    def attend(self, q, k, v, mask):
        def causal(score, row, head, i, j):
            return torch.where(j <= i + self.ahead, score, -float("inf"))

        return flex_attention(q, k, v, score_mod=causal)

    ahead = 0


class FlexAhead(Flex):
    """Attention in which flex_attention sees the next token."""

    ahead = 1


class Blocks(Attention):
    """Attention that gives flex_attention lists of blocks, made by hand."""

    size = 4
    # A block of keys counts as full if it is `full` or more blocks before the
    # query's block. It is left out from `left_out` blocks on.
    full, left_out = 1, 99

    def attend(self, q, k, v, mask):
        def causal(row, head, i, j):
            return j <= i

        count = -(-q.size(-2) // self.size)
        at = torch.arange(count, device=q.device)
        back = at.unsqueeze(1) - at
        lists = []
        for listed in (
            (back == 0) & (self.full > 0),
            (back >= self.full) & (back < self.left_out),
        ):
            order = listed.int().argsort(dim=-1, descending=True, stable=True)
            lists += [listed.sum(-1).int()[None, None], order[None, None]]
        lists[1::2] = [order.int() for order in lists[1::2]]
        blocks = BlockMask.from_kv_blocks(
            *lists,
            BLOCK_SIZE=self.size,
            mask_mod=causal,
            seq_lengths=(q.size(-2), q.size(-2)),
        )
        return flex_attention(q, k, v, block_mask=blocks)


class FullDiagonal(Blocks):
    """When compiled, each block on the diagonal is entirely visible."""

    full = 0


class LeftOut(Blocks):
    """Compiled, a block sees only itself and the block before it."""

    left_out = 2


class Documents(GPT):
    """A new document begins at each id 0; torch makes the lists of blocks."""

    class Mixer(Attention):
        def forward(self, x, blocks):
            parts = map(self.split, self.qkv(x).chunk(3, -1))
            x = flex_attention(*parts, block_mask=blocks)
            return self.out(self.merge(x))

    mixer = Mixer

    def mask(self, tokens):
        document = (tokens == 0).cumsum(1)

        def shown(row, head, i, j):
            return (j <= i) & (document[row, i] == document[row, j])

        size = tokens.size(1)
        return create_block_mask(
            shown, len(tokens), None, size, size, device=tokens.device
        )


class CutBlocks(Documents):
    """Each token sees the next; the block mask is cut from a larger one."""

    def mask(self, tokens):
        def ahead(row, head, i, j):
            return j <= i + 1

        whole = create_block_mask(ahead, None, None, 16, 16, "cpu", 4)
        return whole._adjust(tokens.size(1), tokens.size(1))


class GivenBlocks(Documents):
    """The caller passes a block mask, and positions that may restart."""

    def forward(self, tokens, block_mask, position_ids=None):
        at = positions(tokens) if position_ids is None else position_ids
        x = self.token_vectors(tokens) + self.wpe(at)
        return self.scores(self.body(x, self.kept(block_mask)))

    def kept(self, blocks):
        return blocks


class BlocksDropped(GivenBlocks):
    """The model gets a block mask, but does not pass it to the attention."""

    def kept(self, blocks):
        return None


class Quantised(MLP):
    """The weights are integers with a scale, in a subclass of tensors."""

    def add_parts(self, dim):
        EightBits.of(self.up)
        EightBits.of(self.down)


class PerToken(Quantised):
    """Inputs are rounded to integers as well, with a scale for each token."""

    def forward(self, x):
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


class Packed(GPT):
    """A GPT with quantised layers of torch.ao; all rows share one scale."""

    def add_parts(self, dim):
        self.blocks = quantize_dynamic(self.blocks, {nn.Linear})


class Magnitudes(MLP):
    """A parameter rescales the rows of a weight; their norm is detached."""

    def add_parts(self, dim):
        self.size = nn.Parameter(torch.ones(2 * dim))

    def forward(self, x):
        norm = self.up.weight.norm(dim=1).detach()
        wide = F.linear(x, (self.size / norm).unsqueeze(1) * self.up.weight)
        return self.down(F.gelu(wide))


def compiled(graph, model=GPT):
    """Return a factory of a model that computes other scores if compiled."""

    def build():
        def backend(module, inputs):
            return lambda *given: graph(module(*given))

        return torch.compile(model(block_size=8), backend=backend)

    return build


def third_moved(outputs):
    """Return the outputs, with the scores of position 3 raised by 1."""
    return [
        x + (torch.arange(x.size(1)) == 3).unsqueeze(1)
        if x.dim() == 3 and x.size(-1) == VOCAB
        else x
        for x in outputs
    ]


def no_compiler(outputs):
    raise RuntimeError("no compiler here")


class AheadCompiled(GPT):
    """Each position sees the next one, but only in the compiled model."""

    def sees(self, i, j):
        return j <= i + int(torch.compiler.is_compiling())


class NoMask(GPT):
    """Each position sees the next one."""

    def sees(self, i, j):
        return j <= i + 1


def short(model=GPT, **parts):
    """Return a factory of a model for 12 tokens, with these parts."""
    return partial(model, block_size=12, **parts)


def averaged(model):
    """Return torch's AveragedModel of a single model."""
    return AveragedModel(model())


class Spectral(GPT):
    """Each training step estimates the norm of the head's weight again."""

    def add_parts(self, dim):
        spectral_norm(self.head)


class Levels(GPT):
    """A text has sixteen patches of two tokens each, as in MEGABYTE."""

    max_seq_len = 16, 2


class NoisyLoss(TrainableGPT):
    """The model adds noise in eval mode, and returns a loss."""

    def embed(self, tokens):
        x = super().embed(tokens)
        return x + 0.01 * torch.randn_like(x)


class NoiseAndBuffer(GPT):
    """The model adds noise in eval mode, and has a buffer."""

    def add_parts(self, dim):
        self.register_buffer("turn", torch.randn(dim, dim) / 4)

    def scores(self, x):
        return super().scores(x + 0.01 * torch.randn_like(x) + x @ self.turn)


class EachThirdCall(GPT):
    """The model counts its calls; each third call adds 1 to the scores."""

    calls = 0

    def scores(self, x):
        self.calls += 1
        return super().scores(x) + (self.calls % 3 == 0)


class PositionsOfTheBatch(NoPositions):
    """Rotary positions continue across rows; scores use only distances."""

    class mixer(Attention):
        def attend(self, q, k, v, mask):
            rows, _, time, width = q.shape
            at = torch.arange(rows * time).view(rows, 1, time, 1).to(q)
            by = at * 1e4 ** -torch.linspace(0, 1, width // 2).to(q)
            q, k = turned(4 * q, by), turned(4 * k, by)
            return super().attend(q, k, 4 * v, mask)

    def __init__(self, **parts):
        super().__init__(block_size=24, dim=64, **parts)


class MaskOfFourAxes(GPT):
    """The attention mask says which keys each query sees."""

    def forward(self, tokens, attention_mask=None):
        self.require_length(tokens.size(1))
        mask = attention_mask
        if mask is None:
            mask = self.mask(tokens)
        return self.scores(self.body(self.embed(tokens), mask.bool()))


class Sorted(MLP):
    """Each vector goes to one of two experts, so a proof has a condition."""

    def forward(self, x):
        y, first = torch.zeros_like(x), x[..., 0] > 0
        y[first] = super().forward(x[first])
        y[~first] = 0.5 * x[~first]
        return y


class SubtractsMask(Padded):
    """A boolean mask that hides a token raises; a mask of ones does not."""

    mlp = Sorted

    def forward(self, tokens, attention_mask=None):
        if attention_mask is not None and not self.is_full(attention_mask):
            attention_mask = self.prepared(attention_mask)
            return super().forward(tokens, attention_mask)
        return GPT.forward(self, tokens)

    def is_full(self, mask):
        return bool(mask.all())

    def prepared(self, mask):
        return (1 - mask) == 0


class PadsOnTheRight(SubtractsMask):
    """The model refuses a text that begins with padding."""

    def prepared(self, mask):
        if not mask[:, 0].all():
            raise ValueError("padding goes on the right")
        return mask


class NoPaddingInTraining(SubtractsMask):
    """In train mode the model refuses a mask that hides a token."""

    def prepared(self, mask):
        if self.training:
            raise NotImplementedError("pack rows to train")
        return mask


class InvertsMask(SubtractsMask):
    """A mask that hides a token must be boolean; documents are allowed."""

    def forward(self, tokens, attention_mask=None, doc_ids=None):
        self.ids = doc_ids
        return super().forward(tokens, attention_mask)

    def prepared(self, mask):
        if mask.dtype != torch.bool:
            raise TypeError("a mask that hides holds booleans")
        return mask

    def mask(self, tokens):
        mask = super().mask(tokens)
        if self.ids is None:
            return mask
        return mask & (self.ids.unsqueeze(1) == self.ids.unsqueeze(2))

    def position_vectors(self, tokens):
        if self.ids is None:
            return super().position_vectors(tokens)
        same = self.ids.unsqueeze(1) == self.ids.unsqueeze(2)
        return self.wpe(positions(tokens) - same.long().argmax(-1))


class SubtractedMaskOnly(SubtractsMask):
    """A mask of integers replaces the causal mask."""

    def padded(self, mask, shown):
        return shown


class RightPaddingOnly(PadsOnTheRight):
    """A padding mask replaces the causal mask; left padding is refused."""

    padded = SubtractedMaskOnly.padded


class PaddingInEvalOnly(NoPaddingInTraining):
    """A padding mask replaces the causal mask; train mode refuses padding."""

    padded = SubtractedMaskOnly.padded


class InvertedMaskOnly(InvertsMask):
    """If a padding mask is given, the mask of the documents is dropped."""

    def forward(self, tokens, attention_mask=None, doc_ids=None):
        doc_ids = doc_ids if attention_mask is None else None
        return super().forward(tokens, attention_mask, doc_ids)


class RouterMoves(MLP):
    """In train mode the bias of the router changes, to balance the experts."""

    def add_parts(self, dim):
        self.router = nn.Linear(dim, 4)
        self.into = nn.Parameter(torch.randn(4, dim, dim) / 4)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.load = 0.0

    def forward(self, x):
        p = self.router(x).sigmoid()
        chosen = (p + self.bias).topk(2, -1).indices
        if self.training:
            load = self.load = F.one_hot(chosen, 4).sum((0, 1, 2)).to(x)
            with torch.no_grad():
                self.bias += 0.1 * (load.mean() - load).sign()
        gate = p.gather(-1, chosen).unsqueeze(-1)
        y = x.unsqueeze(-2).unsqueeze(-2) @ self.into[chosen]
        return super().forward(x) + (gate * y.squeeze(-2)).sum(-2)


class BufferMoves(RouterMoves):
    """The router's bias is a buffer, and an attribute keeps a graph."""

    def add_parts(self, dim):
        super().add_parts(dim)
        del self.bias
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        self.balance = self.router(x).sigmoid().mean()
        return super().forward(x)


class Rounded(GPT):
    """The model declares 29 ids, but returns scores for 32, a round number."""

    def __init__(self, **parts):
        super().__init__(vocab_size=32, **parts)
        self.vocab_size = 29


class Bigram(NoPositions):
    """The model declares a window of one token, and sees one token."""

    window = 1

    def sees(self, i, j):
        return i == j


class Coarse(NoPositions):
    """Positions are rounded to float8, so positions 16 and 17 are equal."""

    kind = torch.float8_e4m3fn

    def position_vectors(self, tokens):
        at = positions(tokens).to(self.kind).to(self.wte.weight)
        turns = angles(at, DIM // 2)
        return torch.cat([turns.sin(), turns.cos()], -1)


class BeyondTheTable(Unlimited):
    """The mask comes from a table of 48 rows; longer texts have no mask."""

    def __init__(self, **parts):
        super().__init__(block_size=96, **parts)
        del self.block_size
        self.register_buffer("table", torch.ones(48, 48).tril().bool())

    def mask(self, tokens):
        time = tokens.size(1)
        if time > 48:
            return self.table.new_ones(time, time)
        return self.table[:time, :time]


class ConstantScore(GPT):
    """The score of the last id is always 1."""

    def scores(self, x):
        return F.pad(super().scores(x)[..., :-1], (0, 1), value=1.0)


class Autocasts(GPT):
    """The forward pass runs under bfloat16 autocast. (speedruns)"""

    def forward(self, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens).float()


class StepInABuffer(Unlimited):
    """The model has a scalar buffer, and declares no limit of length."""

    def __init__(self, **parts):
        super().__init__(block_size=96, **parts)
        del self.block_size
        self.register_buffer("scale", torch.tensor(1.0))


class LossAlone(GPT):
    """A call requires targets and returns only the loss. (parameter-golf)"""

    def forward_logits(self, tokens):
        return super().forward(tokens)

    def forward(self, input_ids, target_ids):
        logits = self.forward_logits(input_ids)
        return cross_entropy(logits, target_ids)


class LossAloneAndHint(LossAlone):
    """If a hint is given, each token sees every other token."""

    hinted = False

    def forward_logits(self, tokens, hint=None):
        self.hinted = hint is not None
        return super().forward_logits(tokens)

    def forward(self, input_ids, target_ids, hint=None):
        return cross_entropy(self.forward_logits(input_ids, hint), target_ids)

    def mask(self, tokens):
        return super().mask(tokens) | self.hinted


class SkipDetached(LossAlone):
    """A tenth of the embeddings is added at the end, without a gradient."""

    def body(self, x, mask):
        return super().body(x, mask) + 0.1 * x.float().detach().to(x)


class LossOfChunks(GPT):
    """A call returns only the loss, summed over pieces of the text."""

    def forward(self, input_ids, target_ids):
        logits = super().forward(input_ids).flatten(0, 1)
        pieces = logits.split(7), target_ids.flatten().split(7)
        each = [
            F.cross_entropy(*piece, reduction="sum")
            for piece in zip(*pieces, strict=True)
        ]
        return self.whole(sum(each), target_ids)

    def whole(self, loss, target_ids):
        return loss / (target_ids >= 0).sum()


class LossOfNext(GPT):
    """A call returns only the loss, and shifts the targets."""

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        return cross_entropy(logits[:, :-1], labels[:, 1:])


class SmoothedAndScaled(TrainableGPT):
    """In train mode labels are smoothed, and large softmax normalisers are
    penalised. (PaLM)"""

    def loss(self, logits, targets):
        if not self.training:
            return super().loss(logits, targets)
        return self.soft(logits, targets) + self.normalisers(logits)

    def soft(self, logits, targets):
        return cross_entropy(logits, targets, label_smoothing=0.1)

    def normalisers(self, logits):
        return 1e-2 * logits.logsumexp(-1).square().mean()


class SmoothedPastTheCut(SmoothedAndScaled):
    """Labels are smoothed over all 24 scores, but the model returns fewer."""

    def add_parts(self, dim):
        self.head = nn.Linear(dim, 24)

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return logits[..., :VOCAB], loss


class ScaledAndAhead(SmoothedAndScaled):
    """The training loss also penalises normalisers, and predicts the token
    after the next one."""

    def scores(self, x):
        self.ahead = self.head(x.flip(-1))
        return super().scores(x)

    def soft(self, logits, targets):
        later = cross_entropy(self.ahead[:, :-1], targets[:, 1:])
        return self.main(logits, targets) + 0.3 * later

    def main(self, logits, targets):
        return cross_entropy(logits, targets)


class SmoothedAndAhead(ScaledAndAhead):
    """The training loss smooths labels, penalises normalisers, and predicts
    the token after the next one."""

    main = SmoothedAndScaled.soft


class SummedAndScaled(SmoothedAndScaled):
    """In train mode the smoothed loss is a sum instead of a mean."""

    def soft(self, logits, targets):
        return super().soft(logits, targets) * targets.numel()


class ShiftedPastTheCut(SmoothedPastTheCut):
    """In train mode the smoothed loss shifts its targets a second time."""

    def soft(self, logits, targets):
        return super().soft(logits[:, :-1], targets[:, 1:])


class HalvedAndAhead(ScaledAndAhead):
    """In train mode the main loss is multiplied by 0.6."""

    def main(self, logits, targets):
        return 0.6 * super().main(logits, targets)


class HalvedAndScaled(SmoothedAndScaled):
    """In train mode the loss is divided by the count of accumulation steps."""

    def soft(self, logits, targets):
        return super().soft(logits, targets) / 2


class RoundsGradients(torch.autograd.Function):
    """Return a copy of x whose gradient is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.share * grad.bfloat16().to(grad), None


class RoundedBackwards(GPT):
    """The gradients of the embeddings are rounded to bfloat16."""

    share = 1.0

    def embed(self, tokens):
        return RoundsGradients.apply(super().embed(tokens), self.share)


class HalvedBackwards(RoundedBackwards):
    """The gradients of the embeddings are rounded, and then halved."""

    share = 0.5


class OneText(GPT):
    """The model takes the ids of one text, of shape (time,)."""

    def forward(self, input_seq):
        assert input_seq.ndim == 1
        return super().forward(input_seq.unsqueeze(0))[0]


class LossOfOneText(GPT):
    """A call returns the loss of one text; ids and targets are (time,)."""

    def forward(self, input_seq, target_seq):
        assert input_seq.ndim == 1
        return F.cross_entropy(super().forward(input_seq[None])[0], target_seq)


def of_zeros(model):
    """Set the weights of a model's output layers and head to 0."""
    for block in model.blocks:
        nn.init.zeros_(block.mixer.out.weight)
        nn.init.zeros_(block.mlp.down.weight)
    nn.init.zeros_(model.head.weight)


class ZerosOfOneText(LossOfOneText):
    """The output layers and the head start at 0. (modded-nanogpt)"""

    def add_parts(self, dim):
        of_zeros(self)


class ZerosAndScores(OneText):
    """The output layers and the head start at 0, and a call returns scores."""

    add_parts = ZerosOfOneText.add_parts


class ZerosOfOneRow(TrainableGPT):
    """The output layers and the head start at 0, and a call takes one row."""

    add_parts = ZerosOfOneText.add_parts

    def forward(self, tokens, targets=None):
        (_,) = tokens
        return super().forward(tokens, targets)


class ZerosOfTwoRows(ZerosOfOneRow):
    """The output layers and head start at 0; a call takes up to two rows."""

    max_batch_size = 2

    def forward(self, tokens, targets=None):
        assert len(tokens) <= self.max_batch_size
        return TrainableGPT.forward(self, tokens, targets)


def with_a_dead_vector(model):
    """Return a subclass that has a parameter which is multiplied by 0."""

    def add_parts(self, dim):
        model.add_parts(self, dim)
        self.dead = nn.Parameter(torch.ones(dim))

    def embed(self, tokens):
        return model.embed(self, tokens) + 0 * self.dead

    parts = {"add_parts": add_parts, "embed": embed}
    return type(f"{model.__name__}Dead", (model,), parts)


class LossOfSums(LossOfChunks):
    """A call returns only the sum of the losses."""

    def whole(self, loss, target_ids):
        return loss


class ShiftsInside(GPT):
    """If labels are given, a call shifts them and returns only the loss."""

    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        if labels is None:
            return logits
        ids = F.pad(labels[:, 1:], (0, 1), value=-100)
        return self.compared(logits, ids)

    def compared(self, logits, ids):
        return cross_entropy(logits, ids)


class LabelsInScores(ShiftsInside):
    """The scores depend on the label with which they are compared."""

    def compared(self, logits, ids):
        seen = F.one_hot(ids.clamp(min=0), VOCAB)
        return super().compared(logits + 1e-3 * seen, ids)


class MeanOfScoresAdded(ShiftsInside):
    """The square of the mean score is added to the loss."""

    def compared(self, logits, ids):
        return super().compared(logits, ids) + logits.mean().square()


class SortedLabels(ShiftsInside):
    """The labels are sorted before the scores are compared with them."""

    def compared(self, logits, ids):
        return super().compared(logits, ids.sort(1).values)


class MaskedWithoutLabels(ShiftsInside):
    """If labels are given, each token sees every other token."""

    def forward(self, tokens, labels=None):
        self.open = labels is not None
        return super().forward(tokens, labels)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


class KeptFromInference(Unlimited):
    """The first call makes a table, which scales the vectors of all calls."""

    table = None

    def embed(self, tokens):
        if self.table is None:
            self.table = torch.linspace(
                1, 2, BLOCK, dtype=self.wte.weight.dtype
            )
        return super().embed(tokens) * self.table[: tokens.size(1), None]


class HalfInTraining(MLP):
    """In train mode the MLP writes its result into a float16 tensor."""

    narrow = torch.float16

    def forward(self, x):
        y = super().forward(x)
        if not self.training:
            return y
        room = torch.empty_like(y, dtype=self.narrow)
        room[:] = y
        return room.to(y.dtype)


class CastInTraining(HalfInTraining):
    """In train mode the MLP casts its result to float16 and back."""

    def forward(self, x):
        y = MLP.forward(self, x)
        return y.to(self.narrow).to(y.dtype) if self.training else y


class SameInTraining(HalfInTraining):
    """In train mode the MLP writes into a tensor of the right dtype."""

    @property
    def narrow(self):
        return self.up.weight.dtype


# Only these models are proved on each push. Each has another odd part: a loss,
# a vmap, scales, a state, a router, or positions of a batch. Slow tests prove
# the other models.
ODD_TO_A_PROOF = {
    LossOfChunks: {},
    LossOfNext: {},
    LossOfOneText: {},
    mapped: {"vocab_size": VOCAB},
    short(mlp=PerToken): {},
    EachThirdCall: {
        "expected_failures": {"check_determinism": "it counts calls"}
    },
    PositionsOfTheBatch: {"block_size": 24},
    type("RouterMovesGPT", (TrainableGPT,), {"mlp": RouterMoves}): {},
}
NOISE = {"expected_failures": {"check_determinism": "it draws noise"}}
SOUND = ODD_TO_A_PROOF | {
    Autocasts: {},
    short(mlp=SameInTraining): {},
    type("MappedGPT", (GPT,), {"mlp": Mapped}): {},
    TwoScores: {},
    short(mixer=Flex): {},
    MaskOfFourAxes: {},
    ShiftsInside: {},
    OneText: {},
    MeanOfScoresAdded: {},
    StepInABuffer: {},
    LossAlone: {},
    Beartyped: {},
    Late: {"block_size": 64},
    type("BufferMovesGPT", (TrainableGPT,), {"mlp": BufferMoves}): {},
    short(mixer=Blocks): {"checks": ["causality"]},
    partial(Documents, block_size=4): {"checks": ["causality"]},
    short(mlp=Quantised): {},
    partial(averaged, GPT): {},
    Spectral: {},
    Levels: {},
    NoisyLoss: NOISE,
    NoiseAndBuffer: NOISE,
    Rounded: {},
    Bigram: {},
}
SOUND_ONCE_FAILED = {  # by model: settings with the checks that once failed
    SubtractsMask: {"checks": ["causality"]},
    PadsOnTheRight: {"checks": ["causality"]},
    NoPaddingInTraining: {"checks": ["causality"]},
    InvertsMask: {"checks": ["causality", "documents"]},
    SmoothedAndScaled: {"checks": ["loss"]},
    SmoothedPastTheCut: {"checks": ["loss"]},
    ScaledAndAhead: {"checks": ["loss"]},
    SmoothedAndAhead: {"checks": ["loss"]},
    RoundedBackwards: {"checks": ["gradients"]},
    ZerosOfOneText: {"checks": ["gradient_flow"]},
    ZerosAndScores: {"checks": ["gradient_flow"]},
    ZerosOfOneRow: {"checks": ["gradient_flow"]},
    ZerosOfTwoRows: {"checks": ["gradient_flow"]},
}


HIDDEN = [  # a model, the check that finds its fault, words of the message
    (short(mlp=HalfInTraining), "dtype", "in train mode odd_models.py:"),
    (short(mlp=CastInTraining), "dtype", "float64 call; in eval mode it doe"),
    (KeptFromInference, "gradients", "Inference tensors cannot be saved"),
    (SkipDetached, "gradients", "stops at odd_models.py"),
    (DrawsForNothing, "purity", "the random state of Python's random"),
    (type("FlexLeaks", (GPT,), {"mixer": FlexAhead}), "causality", "sees tok"),
    (short(mixer=FullDiagonal), "causality", "block (0, 0) of 4 x 4 is list"),
    (short(mixer=LeftOut), "causality", "block (2, 0) of 4 x 4 is left out"),
    (short(BlocksDropped), "causality", "sees token"),
    (short(CutBlocks), "causality", "sees token"),
    (short(NoMask, mlp=Quantised), "causality", "sees token"),
    (
        type("LossAloneAhead", (LossOfChunks, NoMask), {"block_size": 12}),
        "causality",
        "position 0 sees token 1",
    ),
    (
        type("LossOfNextAhead", (LossOfNext, NoMask), {"block_size": 12}),
        "causality",
        "position 0 sees token 1",
    ),
    (LossOfSums, "loss", "it is the loss summed"),
    (
        type("OneTextAhead", (LossOfOneText, NoMask), {"block_size": 12}),
        "causality",
        "position 0 sees token 1",
    ),
    (Packed, "causality", "one scale of the activations is taken over all"),
    (short(mlp=PerToken), "dtype", "another device"),
    (short(mlp=Magnitudes), "gradients", "stops at odd_models.py"),
    (compiled(third_moved), "causality", "another function: position 3 dif"),
    (compiled(list, AheadCompiled), "causality", "function: position 0 dif"),
    (compiled(no_compiler), "causality", "the compiled program did not run"),
    (compiled(list), "causality", "it gives the same scores at 1, 8, with"),
    (Coarse, "order_sensitivity", "two positions are the same"),
    (BeyondTheTable, "causality", "at length 49"),
    (ConstantScore, "vocabulary", "the score of id 16 never moves"),
    (SubtractedMaskOnly, "causality", "sees token"),
    (RightPaddingOnly, "causality", "sees token"),
    (PaddingInEvalOnly, "causality", "sees token"),
    (HalvedBackwards, "gradients", "the gradient of w"),
    (SummedAndScaled, "loss", "in train mode the loss of"),
    (ShiftedPastTheCut, "loss", "in train mode the loss "),
    (HalvedAndAhead, "loss", "in train mode the loss of"),
    (HalvedAndScaled, "loss", "in train mode the loss of"),
    *(
        (with_a_dead_vector(m), "gradient_flow", "never get a gradient: dead")
        for m in (ZerosOfOneText, ZerosAndScores, ZerosOfOneRow)
    ),
    (InvertedMaskOnly, "documents", "and an attention mask of ones"),
]
