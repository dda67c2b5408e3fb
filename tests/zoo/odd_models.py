"""Sound models that look odd to a check, and faults that hide from one."""

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
    """A checker of types draws which item of a list it looks at."""

    exec(compile(CODE, "<@beartype(GPT.forward)>", "exec"), NAMES)
    forward = NAMES["checked"]


class DrawsForNothing(GPT):
    """Its forward draws from Python's generator, and uses no draw."""

    def forward(self, tokens):
        random.random()
        return super().forward(tokens)


class Mapped(MLP):
    """One vector at a time, by vmap; nothing is put out beside it."""

    class Empty(nn.Linear):
        def forward(self, x):
            return super().forward(x), x[..., :0]

    def make_parts(self, dim):
        self.mapped = self.Empty(dim, dim)

    def forward(self, x):
        return torch.vmap(self.mapped)(x.flatten(0, 1))[0].view_as(x)


def mapped():
    """A function of the ids: each row alone, by vmap."""
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
    """A vector is added from position 48 on."""

    def __init__(self, **parts):
        super().__init__(block_size=64, **parts)

    def add_parts(self, dim):
        self.late = nn.Parameter(torch.zeros(dim))

    def embed(self, tokens):
        late = (positions(tokens) >= 48).unsqueeze(1)
        return super().embed(tokens) + late * self.late


class Flex(Attention):
    """flex_attention, compiled nowhere."""

    def attend(self, q, k, v, mask):
        def causal(score, row, head, i, j):
            return torch.where(j <= i + self.ahead, score, -float("inf"))

        return flex_attention(q, k, v, score_mod=causal)

    ahead = 0


class FlexAhead(Flex):
    """flex_attention that sees one token ahead."""

    ahead = 1


class Blocks(Attention):
    """flex_attention whose lists of blocks are made by hand."""

    size = 4
    full, left_out = 1, 99  # diagonals from which on blocks are so

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
    """Compiled, each block on the diagonal is visible as a whole."""

    full = 0


class LeftOut(Blocks):
    """Compiled, a block sees the one before it; its mask_mod shows all."""

    left_out = 2


class Documents(GPT):
    """A new document begins behind each 0; torch lists the blocks."""

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
    """Each sees the next one; the mask is cut from that of a longer text."""

    def mask(self, tokens):
        def ahead(row, head, i, j):
            return j <= i + 1

        whole = create_block_mask(ahead, None, None, 16, 16, "cpu", 4)
        return whole._adjust(tokens.size(1), tokens.size(1))


class GivenBlocks(Documents):
    """Its caller makes the mask, and positions that start again."""

    def forward(self, tokens, block_mask, position_ids=None):
        at = positions(tokens) if position_ids is None else position_ids
        x = self.token_vectors(tokens) + self.wpe(at)
        return self.scores(self.body(x, self.kept(block_mask)))

    def kept(self, blocks):
        return blocks


class BlocksDropped(GivenBlocks):
    """It gives its attention no mask."""

    def kept(self, blocks):
        return None


class Quantised(MLP):
    """Its weights are whole numbers and a scale, of a class of their own."""

    def add_parts(self, dim):
        EightBits.of(self.up)
        EightBits.of(self.down)


class PerToken(Quantised):
    """So is what it gets, with a scale for each token."""

    def forward(self, x):
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


class Packed(GPT):
    """torch.ao's quantised layers: one scale for all tokens of all rows."""

    def add_parts(self, dim):
        self.blocks = quantize_dynamic(self.blocks, {nn.Linear})


class Magnitudes(MLP):
    """Rows have a length of their own; no gradient passes their norm."""

    def add_parts(self, dim):
        self.size = nn.Parameter(torch.ones(2 * dim))

    def forward(self, x):
        norm = self.up.weight.norm(dim=1).detach()
        wide = F.linear(x, (self.size / norm).unsqueeze(1) * self.up.weight)
        return self.down(F.gelu(wide))


def compiled(graph, model=GPT):
    """A model whose graph is compiled to another function."""

    def build():
        def backend(module, inputs):
            return lambda *given: graph(module(*given))

        return torch.compile(model(block_size=8), backend=backend)

    return build


def third_moved(outputs):
    """Scores of position 3 are larger."""
    return [
        x + (torch.arange(x.size(1)) == 3).unsqueeze(1)
        if x.dim() == 3 and x.size(-1) == VOCAB
        else x
        for x in outputs
    ]


def no_compiler(outputs):
    raise RuntimeError("no compiler here")


class AheadCompiled(GPT):
    """Compiled alone, each position sees the next one."""

    def sees(self, i, j):
        return j <= i + int(torch.compiler.is_compiling())


class NoMask(GPT):
    """Each position sees the next one."""

    def sees(self, i, j):
        return j <= i + 1


def short(model=GPT, **parts):
    """A model of up to 12 tokens, with other parts."""
    return partial(model, block_size=12, **parts)


def averaged(model):
    """The average of one model's weights."""
    return AveragedModel(model())


class Spectral(GPT):
    """The head's norm is estimated anew in each step of training."""

    def add_parts(self, dim):
        spectral_norm(self.head)


class Levels(GPT):
    """Patches of four tokens, sixteen of them: MEGABYTE's two lengths."""

    max_seq_len = 16, 2


class NoisyLoss(TrainableGPT):
    """Draws noise in eval mode, and returns a loss."""

    def embed(self, tokens):
        x = super().embed(tokens)
        return x + 0.01 * torch.randn_like(x)


class NoiseAndBuffer(GPT):
    """Draws noise in eval mode, and has a buffer."""

    def add_parts(self, dim):
        self.register_buffer("turn", torch.randn(dim, dim) / 4)

    def scores(self, x):
        return super().scores(x + 0.01 * torch.randn_like(x) + x @ self.turn)


class EachThirdCall(GPT):
    """Counts its calls, and adds 1 in each third."""

    calls = 0

    def scores(self, x):
        self.calls += 1
        return super().scores(x) + (self.calls % 3 == 0)


class PositionsOfTheBatch(NoPositions):
    """Rotary positions go on from row to row: only differences count."""

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
    """Its attention mask says for each query and key whether it is seen."""

    def forward(self, tokens, attention_mask=None):
        self.require_length(tokens.size(1))
        mask = attention_mask
        if mask is None:
            mask = self.mask(tokens)
        return self.scores(self.body(self.embed(tokens), mask.bool()))


class Sorted(MLP):
    """Vectors are sorted to two experts: no proof is without a condition."""

    def forward(self, x):
        y, first = torch.zeros_like(x), x[..., 0] > 0
        y[first] = super().forward(x[first])
        y[~first] = 0.5 * x[~first]
        return y


class SubtractsMask(Padded):
    """A mask of ones takes a shortcut; booleans that hide cannot be subtracted
    from 1.
    """

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
    """A text that begins with padding is refused."""

    def prepared(self, mask):
        if not mask[:, 0].all():
            raise ValueError("padding goes on the right")
        return mask


class NoPaddingInTraining(SubtractsMask):
    """In train mode rows are packed, and a mask that hides is refused."""

    def prepared(self, mask):
        if self.training:
            raise NotImplementedError("pack rows to train")
        return mask


class InvertsMask(SubtractsMask):
    """Only booleans that hide can be inverted; documents go with a mask."""

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
    """A mask of integers takes the place of the causal one."""

    def padded(self, mask, shown):
        return shown


class RightPaddingOnly(PadsOnTheRight):
    """The mask of padding takes the place of the causal one."""

    padded = SubtractedMaskOnly.padded


class PaddingInEvalOnly(NoPaddingInTraining):
    """The mask of padding takes the place of the causal one."""

    padded = SubtractedMaskOnly.padded


class InvertedMaskOnly(InvertsMask):
    """A mask of padding takes the place of that of documents."""

    def forward(self, tokens, attention_mask=None, doc_ids=None):
        doc_ids = doc_ids if attention_mask is None else None
        return super().forward(tokens, attention_mask, doc_ids)


class RouterMoves(MLP):
    """In train mode the router's bias moves towards equal loads."""

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
    """The bias is a buffer, and a number for a log keeps its graph."""

    def add_parts(self, dim):
        super().add_parts(dim)
        del self.bias
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        self.balance = self.router(x).sigmoid().mean()
        return super().forward(x)


class Rounded(GPT):
    """Declares 29 ids, and scores 32: a round number."""

    def __init__(self, **parts):
        super().__init__(vocab_size=32, **parts)
        self.vocab_size = 29


class Bigram(NoPositions):
    """Declares a window of one token, and has it."""

    window = 1

    def sees(self, i, j):
        return i == j


class Coarse(NoPositions):
    """Positions are held in a byte: 16 and 17 are one."""

    kind = torch.float8_e4m3fn

    def position_vectors(self, tokens):
        at = positions(tokens).to(self.kind).to(self.wte.weight)
        turns = angles(at, DIM // 2)
        return torch.cat([turns.sin(), turns.cos()], -1)


class BeyondTheTable(Unlimited):
    """Its mask is a table of 48 rows; a longer text has none."""

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
    """The last id's score is 1, whatever the tokens."""

    def scores(self, x):
        return F.pad(super().scores(x)[..., :-1], (0, 1), value=1.0)


class Autocasts(GPT):
    """Its forward runs in bfloat16, a matrix of it twice. (speedruns)"""

    def forward(self, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens).float()


class StepInABuffer(Unlimited):
    """A number is a buffer without axes; no limit is declared."""

    def __init__(self, **parts):
        super().__init__(block_size=96, **parts)
        del self.block_size
        self.register_buffer("scale", torch.tensor(1.0))


class LossAlone(GPT):
    """Its forward takes targets and returns the loss. (parameter-golf)"""

    def forward_logits(self, tokens):
        return super().forward(tokens)

    def forward(self, input_ids, target_ids):
        logits = self.forward_logits(input_ids)
        return cross_entropy(logits, target_ids)


class LossAloneAndHint(LossAlone):
    """Given a hint, each token sees all."""

    hinted = False

    def forward_logits(self, tokens, hint=None):
        self.hinted = hint is not None
        return super().forward_logits(tokens)

    def forward(self, input_ids, target_ids, hint=None):
        return cross_entropy(self.forward_logits(input_ids, hint), target_ids)

    def mask(self, tokens):
        return super().mask(tokens) | self.hinted


class SkipDetached(LossAlone):
    """A tenth of the embeddings skips the blocks, detached in float32."""

    def body(self, x, mask):
        return super().body(x, mask) + 0.1 * x.float().detach().to(x)


class LossOfChunks(GPT):
    """It returns the loss alone, summed over pieces of the text."""

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
    """It returns the loss alone, of targets that it shifts itself."""

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        return cross_entropy(logits[:, :-1], labels[:, 1:])


class SmoothedAndScaled(TrainableGPT):
    """In train mode labels are smoothed and large normalisers cost. (PaLM)"""

    def loss(self, logits, targets):
        if not self.training:
            return super().loss(logits, targets)
        return self.soft(logits, targets) + self.normalisers(logits)

    def soft(self, logits, targets):
        return cross_entropy(logits, targets, label_smoothing=0.1)

    def normalisers(self, logits):
        return 1e-2 * logits.logsumexp(-1).square().mean()


class SmoothedPastTheCut(SmoothedAndScaled):
    """The same over the 24 scores of a padded head."""

    def add_parts(self, dim):
        self.head = nn.Linear(dim, 24)

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return logits[..., :VOCAB], loss


class ScaledAndAhead(SmoothedAndScaled):
    """Normalisers cost, and so does the token after next."""

    def scores(self, x):
        self.ahead = self.head(x.flip(-1))
        return super().scores(x)

    def soft(self, logits, targets):
        later = cross_entropy(self.ahead[:, :-1], targets[:, 1:])
        return self.main(logits, targets) + 0.3 * later

    def main(self, logits, targets):
        return cross_entropy(logits, targets)


class SmoothedAndAhead(ScaledAndAhead):
    """All three at once."""

    main = SmoothedAndScaled.soft


class SummedAndScaled(SmoothedAndScaled):
    """The smoothed loss is a sum."""

    def soft(self, logits, targets):
        return super().soft(logits, targets) * targets.numel()


class ShiftedPastTheCut(SmoothedPastTheCut):
    """The smoothed loss is of targets that are shifted once more."""

    def soft(self, logits, targets):
        return super().soft(logits[:, :-1], targets[:, 1:])


class HalvedAndAhead(ScaledAndAhead):
    """The main loss is weighed by 0.6 and called the loss."""

    def main(self, logits, targets):
        return 0.6 * super().main(logits, targets)


class HalvedAndScaled(SmoothedAndScaled):
    """The loss is divided by the steps of an accumulation."""

    def soft(self, logits, targets):
        return super().soft(logits, targets) / 2


class RoundsGradients(torch.autograd.Function):
    """The backward pass goes through bfloat16, as to save memory."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.share * grad.bfloat16().to(grad), None


class RoundedBackwards(GPT):
    """Gradients of the embeddings are rounded to bfloat16."""

    share = 1.0

    def embed(self, tokens):
        return RoundsGradients.apply(super().embed(tokens), self.share)


class HalvedBackwards(RoundedBackwards):
    """They are halved as well."""

    share = 0.5


class OneText(GPT):
    """It takes the ids of one text, (time,)."""

    def forward(self, input_seq):
        assert input_seq.ndim == 1
        return super().forward(input_seq.unsqueeze(0))[0]


class LossOfOneText(GPT):
    """It takes one text and its targets, (time,), and returns the loss."""

    def forward(self, input_seq, target_seq):
        assert input_seq.ndim == 1
        return F.cross_entropy(super().forward(input_seq[None])[0], target_seq)


def of_zeros(model):
    """Let all that mixes, and the head, start at 0."""
    for block in model.blocks:
        nn.init.zeros_(block.mixer.out.weight)
        nn.init.zeros_(block.mlp.down.weight)
    nn.init.zeros_(model.head.weight)


class ZerosOfOneText(LossOfOneText):
    """What mixes starts at 0, and so does the head. (modded-nanogpt)"""

    def add_parts(self, dim):
        of_zeros(self)


class ZerosAndScores(OneText):
    """The same of a model that returns scores."""

    add_parts = ZerosOfOneText.add_parts


class ZerosOfOneRow(TrainableGPT):
    """The same of a model that takes one row, and its targets."""

    add_parts = ZerosOfOneText.add_parts

    def forward(self, tokens, targets=None):
        (_,) = tokens
        return super().forward(tokens, targets)


class ZerosOfTwoRows(ZerosOfOneRow):
    """The same of a model that declares room for two rows."""

    max_batch_size = 2

    def forward(self, tokens, targets=None):
        assert len(tokens) <= self.max_batch_size
        return TrainableGPT.forward(self, tokens, targets)


def with_a_dead_vector(model):
    """A vector that is multiplied by 0 is a parameter of the model."""

    def add_parts(self, dim):
        model.add_parts(self, dim)
        self.dead = nn.Parameter(torch.ones(dim))

    def embed(self, tokens):
        return model.embed(self, tokens) + 0 * self.dead

    parts = {"add_parts": add_parts, "embed": embed}
    return type(f"{model.__name__}Dead", (model,), parts)


class LossOfSums(LossOfChunks):
    """It returns the sum of the losses alone."""

    def whole(self, loss, target_ids):
        return loss


class ShiftsInside(GPT):
    """With labels it returns the loss alone, over the tokens behind them."""

    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        if labels is None:
            return logits
        ids = F.pad(labels[:, 1:], (0, 1), value=-100)
        return self.compared(logits, ids)

    def compared(self, logits, ids):
        return cross_entropy(logits, ids)


class LabelsInScores(ShiftsInside):
    """Its scores see the label that they are compared with."""

    def compared(self, logits, ids):
        seen = F.one_hot(ids.clamp(min=0), VOCAB)
        return super().compared(logits + 1e-3 * seen, ids)


class MeanOfScoresAdded(ShiftsInside):
    """A mean of all scores is in the loss."""

    def compared(self, logits, ids):
        return super().compared(logits, ids) + logits.mean().square()


class SortedLabels(ShiftsInside):
    """Labels are sorted before they are compared."""

    def compared(self, logits, ids):
        return super().compared(logits, ids.sort(1).values)


class MaskedWithoutLabels(ShiftsInside):
    """With labels each token sees all."""

    def forward(self, tokens, labels=None):
        self.open = labels is not None
        return super().forward(tokens, labels)

    def mask(self, tokens):
        return super().mask(tokens) | self.open


class KeptFromInference(Unlimited):
    """A table that scales the vectors is made in its first call, and kept."""

    table = None

    def embed(self, tokens):
        if self.table is None:
            self.table = torch.linspace(
                1, 2, BLOCK, dtype=self.wte.weight.dtype
            )
        return super().embed(tokens) * self.table[: tokens.size(1), None]


# A proof goes through what is odd in these: a vmap, scales, a state, positions
# that go on from row to row, a router. The slow run proves the others, too.
class HalfInTraining(MLP):
    """In train mode the MLP writes into a float16 tensor, at any dtype."""

    narrow = torch.float16

    def forward(self, x):
        y = super().forward(x)
        if not self.training:
            return y
        room = torch.empty_like(y, dtype=self.narrow)
        room[:] = y
        return room.to(y.dtype)


class CastInTraining(HalfInTraining):
    """In train mode it casts to float16 and back."""

    def forward(self, x):
        y = MLP.forward(self, x)
        return y.to(self.narrow).to(y.dtype) if self.training else y


class SameInTraining(HalfInTraining):
    """Sound: the room has the dtype of the answer."""

    @property
    def narrow(self):
        return self.up.weight.dtype


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
SOUND_ONCE_FAILED = {  # the checks that failed, and settings
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


HIDDEN = [  # a model, the check that finds its fault, and words
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
