"""A small GPT on one process, and the same sharded over several.

Some are right and some wrong. Run under torchrun this module checks them, and
prints a line of JSON for each.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, BLOCK, DIM, HEADS, LAYERS = 20, 16, 16, 4, 2


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def count():
    return dist.get_world_size() if dist.is_initialized() else 1


def piece(x, dim):
    """This rank's part of a tensor."""
    return x.chunk(count(), dim)[rank()].contiguous()


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(count())]
    dist.all_gather(parts, x.contiguous())
    return parts


class Copied(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduced(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gathered(torch.autograd.Function):
    """The parts of all ranks side by side; summed: their gradients."""

    @staticmethod
    def forward(ctx, x, dim, summed):
        ctx.dim, ctx.summed = dim, summed
        return torch.cat(gathered(x), dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.summed:
            dist.all_reduce(grad)
        return piece(grad, ctx.dim), None, None


def passed(x, steps):
    """What the rank so many steps before this one has."""
    x, ranks = x.contiguous(), count()
    came = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.irecv, came, (rank() - steps) % ranks),
        dist.P2POp(dist.isend, x, (rank() + steps) % ranks),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return came


class PassedOn(torch.autograd.Function):
    """Sent to the next rank; its gradient comes back."""

    @staticmethod
    def forward(ctx, x, steps):
        ctx.steps = steps
        return passed(x, steps)

    @staticmethod
    def backward(ctx, grad):
        return passed(grad, -ctx.steps), None


def filled(module, seed):
    """Weights that depend on names alone; biases that are not 0."""
    for index, (name, p) in enumerate(sorted(module.named_parameters())):
        own = any(f".{part}." in f".{name}" for part in module.sharded)
        g = torch.Generator().manual_seed(seed + index + 99 * own * rank())
        scale = 0.3 if p.dim() > 1 else 0.1
        p.data.copy_(torch.randn(p.shape, generator=g) * scale)
        p.data.add_(float(p.dim() == 1))
    return module


class Attention(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.heads, width = heads, DIM // HEADS * heads
        self.q, self.k, self.v = (nn.Linear(DIM, width) for _ in "qkv")
        self.out = nn.Linear(width, DIM)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def mixed(self, x, mask):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x, mask):
        return self.out(self.mixed(x, mask))


class MLP(nn.Module):
    def __init__(self, width=4 * DIM):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    attention, mlp = Attention, MLP

    def __init__(self):
        super().__init__()
        self.norm_1, self.attn = nn.LayerNorm(DIM), self.attention()
        self.norm_2, self.ff = nn.LayerNorm(DIM), self.mlp()

    def forward(self, x, mask):
        x = x + self.attn(self.norm_1(x), mask)
        return x + self.ff(self.norm_2(x))


class GPT(nn.Module):
    """On one process."""

    vocab_size, block_size = VOCAB, BLOCK
    block, sharded = Block, ()

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(BLOCK, DIM)
        self.blocks = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def embed(self, ids, positions):
        return self.wte(ids) + self.wpe(positions)

    def logits(self, x):
        return self.head(self.norm(x))

    def forward(self, ids):
        time = ids.size(1)
        if time > BLOCK:
            raise ValueError(f"{time} tokens, at most {BLOCK}")
        x = self.embed(ids, torch.arange(time))
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return self.logits(x)


# --- Tensor parallel, by hand ------------------------------------------------


class ParallelAttention(Attention):
    """A part of the heads on each rank."""

    copied, reduced = Copied.apply, Reduced.apply

    def __init__(self):
        super().__init__(HEADS // count())
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.out.bias = None

    def forward(self, x, mask):
        mixed = self.mixed(type(self).copied(x), mask)
        return type(self).reduced(self.out(mixed)) + self.bias


class ParallelMLP(MLP):
    """A part of the width on each rank."""

    def __init__(self):
        super().__init__(4 * DIM // count())
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.down.bias = None

    def reduced(self, x):
        return Reduced.apply(x)

    def forward(self, x):
        x = F.gelu(self.up(Copied.apply(x)))
        return self.reduced(self.down(x)) + self.bias


class TensorParallel(GPT):
    """Heads, width and vocabulary are split."""

    class block(Block):
        attention, mlp = ParallelAttention, ParallelMLP

    sharded = "wte", "head", "q", "k", "v", "out", "up", "down"
    offset = 0  # of a vocabulary's shard
    summed = False

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB // count(), DIM)
        self.head = nn.Linear(DIM, VOCAB // count())

    def embed(self, ids, positions):
        size = VOCAB // count()
        own = ids - rank() * size - self.offset * (rank() > 0)
        other = (own < 0) | (own >= size)
        x = self.wte(own.masked_fill(other, 0))
        x = x.masked_fill(other.unsqueeze(-1), 0.0)
        return Reduced.apply(x) + self.wpe(positions)

    def logits(self, x):
        logits = self.head(Copied.apply(self.norm(x)))
        return Gathered.apply(logits, 2, self.summed)


class Scattered(torch.autograd.Function):
    """The sum over the ranks, of which each keeps its part of the text."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return piece(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat(gathered(grad), 1)


def whole(x):
    """The text of all ranks; each has a part of its gradient."""
    return Gathered.apply(x, 1, True)


class SequenceParallel(TensorParallel):
    """Between the products each rank has a part of the text."""

    class block(Block):
        class attention(ParallelAttention):
            def forward(self, x, mask):
                mixed = self.mixed(whole(x), mask)
                return Scattered.apply(self.out(mixed)) + self.bias

        class mlp(ParallelMLP):
            def forward(self, x):
                x = self.down(F.gelu(self.up(whole(x))))
                return Scattered.apply(x) + self.bias

    def forward(self, ids):
        time = ids.size(1)
        ids = F.pad(ids, (0, -time % count()))
        x = self.embed(ids, torch.arange(ids.size(1)).clamp(max=BLOCK - 1))
        x = Parted.apply(x)
        mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(whole(self.norm(x)))
        return Gathered.apply(logits, 2, False)[:, :time]


class Parted(torch.autograd.Function):
    """This rank's part of the text; the gradient is that of all."""

    @staticmethod
    def forward(ctx, x):
        return piece(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat(gathered(grad), 1)


class NoReduction(TensorParallel):
    """The last block's MLP is not summed."""

    def __init__(self):
        super().__init__()

        class Alone(ParallelMLP):
            def reduced(self, x):
                return x

        self.blocks[-1].ff = Alone()


class NoReductionFirst(TensorParallel):
    """The first block's heads are not summed."""

    def __init__(self):
        super().__init__()

        class Alone(ParallelAttention):
            reduced = nn.Identity()

        self.blocks[0].attn = Alone()


class BiasOnEveryRank(TensorParallel):
    """The bias behind the width's parts is added before the sum."""

    class block(Block):
        attention = ParallelAttention

        class mlp(ParallelMLP):
            def forward(self, x):
                x = F.gelu(self.up(Copied.apply(x)))
                return self.reduced(self.down(x) + self.bias)


class OffByOne(TensorParallel):
    """The second rank's vocabulary begins one id too late."""

    offset = 1


class WrongOrder(TensorParallel):
    """The scores of the last rank's ids come first."""

    def logits(self, x):
        logits = self.head(Copied.apply(self.norm(x)))
        return torch.cat(gathered(logits)[::-1], -1)


class HeadsInWrongOrder(TensorParallel):
    """The parts of the width are gathered from the last to the first."""

    class block(Block):
        attention = ParallelAttention

        class mlp(ParallelMLP):
            def __init__(self):
                super().__init__()
                self.down = nn.Linear(4 * DIM, DIM)

            def forward(self, x):
                x = F.gelu(self.up(Copied.apply(x)))
                return self.down(torch.cat(gathered(x)[::-1], -1))

    sharded = "wte", "head", "q", "k", "v", "out", "up"


class OtherWeights(TensorParallel):
    """The ranks start from other norms."""

    def fill(self):
        filled(self, 0)
        with torch.no_grad():
            self.norm.weight.add_(0.1 * rank())


class NoCopyBackward(TensorParallel):
    """Nothing sums the gradient of a column-parallel input."""

    class block(Block):
        class attention(ParallelAttention):
            @staticmethod
            def copied(x):
                return x

        mlp = ParallelMLP


class SumsTwice(TensorParallel):
    """The backward of the last gather sums what is whole."""

    summed = True


# --- Context parallel --------------------------------------------------------


class ContextAttention(Attention):
    """Queries of this rank, keys of all."""

    def mixed(self, x, at):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        k, v = (Gathered.apply(t, 2, True) for t in (k, v))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(~self.visible(at), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def visible(self, at):
        keys = torch.cat(gathered(at))
        return keys <= at.unsqueeze(1)


class ContextParallel(GPT):
    """Each rank has a piece of the text; the scores are gathered."""

    class block(Block):
        attention = ContextAttention

    zigzag = False

    def order(self, time):
        """The positions in the order of the ranks."""
        if not self.zigzag:
            return torch.arange(time)
        parts = torch.arange(time).chunk(2 * count())
        held = [torch.cat([parts[i], parts[~i]]) for i in range(count())]
        return torch.cat(held)

    def positions(self, at):
        return at

    def put_back(self, x, order):
        return x[:, order.argsort()]

    def forward(self, ids):
        time = ids.size(1)
        if time > BLOCK:
            raise ValueError(f"{time} tokens, at most {BLOCK}")
        ids = F.pad(ids, (0, -time % (2 * count())))
        order = self.order(ids.size(1))
        at = piece(order, 0)
        x = self.embed(ids[:, at], self.positions(at))
        for block in self.blocks:
            x = block(x, at)
        x = Gathered.apply(self.logits(x), 1, False)
        return self.put_back(x, order)[:, :time]


class Zigzag(ContextParallel):
    """Each rank has a piece of the beginning and one of the end."""

    zigzag = True


class OwnPositions(ContextParallel):
    """Each rank counts positions from 0."""

    def positions(self, at):
        return at - at[0]


class NotPutBack(Zigzag):
    """The scores come in the order in which the ranks hold them."""

    def put_back(self, x, order):
        return x


class OwnPieceWhole(ContextParallel):
    """Of its own piece a rank sees all."""

    class block(Block):
        class attention(ContextAttention):
            def visible(self, at):
                keys = torch.cat(gathered(at))
                own = (keys >= at[0]) & (keys <= at[-1])
                return (keys <= at.unsqueeze(1)) | own


class HeldOrder(Zigzag):
    """A mask by position on keys in the order in which they are held."""

    class block(Block):
        class attention(ContextAttention):
            def visible(self, at):
                keys = torch.arange(len(at) * count())
                return keys <= at.unsqueeze(1)


class OwnMask(ContextParallel):
    """The mask has each rank's own positions."""

    class block(Block):
        class attention(ContextAttention):
            def visible(self, at):
                keys = torch.arange(len(at) * count())
                return keys <= (at - at[0]).unsqueeze(1)


class Late(GPT):
    """A gather that one rank waits for, and a leak behind it."""

    def logits(self, x):
        time.sleep(0.02 * rank())
        x = sum(gathered(x)) / count()
        return super().logits(x + x.flip(1))


class RingAttention(Attention):
    """Keys go round from rank to rank, under a running softmax."""

    def mixed(self, x, at):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        top = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        total, mixed = torch.zeros_like(top), torch.zeros_like(q)
        keys = at
        for step in range(count()):
            scores = q @ k.mT / q.size(-1) ** 0.5
            scores = scores.masked_fill(keys > at.unsqueeze(1), -torch.inf)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, old = (scores - new).exp(), (top - new).exp()
            total = total * old + weights.sum(-1, keepdim=True)
            mixed, top = mixed * old + weights @ v, new
            if step < count() - 1:
                k, v, keys = (self.passed_on(t) for t in (k, v, keys))
        return (mixed / total).transpose(1, 2).flatten(2)

    def passed_on(self, x):
        return PassedOn.apply(x, 1) if x.requires_grad else passed(x, 1)


class Ring(ContextParallel):
    """Context parallel with a ring."""

    class block(Block):
        attention = RingAttention


# --- Experts -----------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to the matrix of its likeliest expert."""

    held = 4  # experts

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.matrices = nn.Parameter(torch.zeros(self.held, DIM, DIM))

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1)
        x = self.moved(x.flatten(0, 1), chosen.flatten())
        return x.view(*chosen.shape, -1) * share.unsqueeze(-1)

    def moved(self, x, chosen):
        return (x.unsqueeze(1) @ self.matrices[chosen]).squeeze(1)


class ToOwners(torch.autograd.Function):
    """Rows sent to other ranks, by their numbers; gradients come back."""

    @staticmethod
    def forward(ctx, x, sent, came):
        ctx.sent, ctx.came = sent, came
        out = x.new_empty(sum(came), x.size(1))
        dist.all_to_all_single(out, x.contiguous(), came, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        return ToOwners.apply(grad, ctx.came, ctx.sent), None, None


class ParallelExperts(Experts):
    """Each rank holds some of the experts; tokens go to them and back."""

    def __init__(self):
        self.held = 4 // count()
        super().__init__()

    def moved(self, x, chosen):
        order = chosen.argsort(stable=True)
        owners = chosen[order] // self.held
        sent = owners.bincount(minlength=count())
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        sent, came = sent.tolist(), came.tolist()
        own = ToOwners.apply(chosen[order, None].to(x), sent, came)
        rows = ToOwners.apply(x[order], sent, came)
        rows = super().moved(rows, own[:, 0].long() % self.held)
        return self.returned(ToOwners.apply(rows, came, sent), order)

    def returned(self, x, order):
        return x[order.argsort()]


class MixedGPT(GPT):
    """With experts, on one process."""

    class block(Block):
        mlp = Experts


class ExpertParallel(ContextParallel):
    class block(Block):
        attention, mlp = ContextAttention, ParallelExperts


class NotReturned(ContextParallel):
    """Tokens come back in the order of their experts."""

    class block(Block):
        attention = ContextAttention

        class mlp(ParallelExperts):
            def returned(self, x, order):
                return x


# --- By torch's own ----------------------------------------------------------


def by_parallelize_module():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = filled(GPT(), 0)
    mesh = init_device_mesh("cpu", (count(),))
    for block in model.blocks:
        block.attn.heads = HEADS // count()
        plan = {f"attn.{n}": ColwiseParallel() for n in "qkv"}
        plan |= {"attn.out": RowwiseParallel(), "ff.up": ColwiseParallel()}
        plan |= {"ff.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    head = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, {"head": head})


def by_data_parallel():
    return nn.parallel.DistributedDataParallel(filled(GPT(), 0))


def by_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = filled(GPT(), 0)
    mesh = init_device_mesh("cpu", (count(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_rank_1():
    """A model that adds something on rank 1 alone."""

    class Other(GPT):
        def forward(self, ids):
            return super().forward(ids) + rank()

    return filled(Other(), 0)


def single():
    return filled(GPT(), 0)


def mixed():
    return filled(MixedGPT(), 0)


def unlike(build):
    """Return what builds the same with other weights, zeros among them."""

    def other():
        model = build()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5) if p.dim() > 1 else p.zero_()
        return model

    return other


def built(model):
    """Return a factory of a sharded class."""

    def build():
        made = model()
        made.fill() if hasattr(made, "fill") else filled(made, 0)
        return made

    return build


SOUND = {
    "tensor parallel": built(TensorParallel),
    "context parallel": built(ContextParallel),
    "zigzag": built(Zigzag),
    "ring": built(Ring),
    "parallelize_module": by_parallelize_module,
    "fully_shard": by_fully_shard,
}
BROKEN = {  # and a check that fails
    "no reduction": (built(NoReduction), "gradients"),
    "other weights": (built(OtherWeights), "gradients"),
    "no reduction in the backward": (built(NoCopyBackward), "gradients"),
    "gather sums twice": (built(SumsTwice), "gradients"),
    "own positions": (built(OwnPositions), "prefix_consistency"),
    "own mask": (built(OwnMask), "prefix_consistency"),
    "zigzag not put back": (built(NotPutBack), "causality"),
    "own piece whole": (built(OwnPieceWhole), "causality"),
    "held order": (built(HeldOrder), "causality"),
    "behind a late gather": (built(Late), "causality"),
}
FIRST_SEEN = {"behind a late gather": "x.flip(1)"}


PROVED = ("tensor parallel", "context parallel", "zigzag", "ring")


SAME = (
    *SOUND,
    "other DTensors",
    "other shards",
    "other weights",
    "data parallel",
    "sequence parallel",
    "experts",
)
PART = {  # and what the diff with the single one says
    "experts not returned": ["`*`: rank 0", "put back in their order?"],
    "no reduction in the backward": [
        "the gradient of blocks.0.ff.bias is",
        "that of blocks.1.norm_1.bias, reached before by the backward pass, "
        "is a part of a sum on each rank",
    ],
    "gather sums twice": ["the gradient of head.bias is 2 times that of"],
    "no reduction": [
        "`+`: an all_reduce is missing: ",
        "`linear` is a part of a sum on each rank",
    ],
    "no reduction first": ["`+`: an all_reduce is missing: "],
    "bias on every rank": [
        "every rank adds the bias blocks.0.ff.bias, so the sum over the "
        "ranks has it 2 times"
    ],
    "on rank 1": ["`+`: rank 1: no value on the left equals it"],
    "off by one": ["`embedding`: no value on the left equals it"],
    "wrong order": ["put back in their order?", "10-19, 0-9 of axis 2"],
    "heads in wrong order": ["32-63, 0-31 of axis 2", "gathered"],
    "own positions": ["rank 1: ", "rank 1 counts positions from 0"],
    "own mask": [
        "`masked_fill`: rank 1: position 8 sees keys 0, on the left 0-8: "
        "the mask counts a rank's positions from 0"
    ],
    "own piece whole": ["position 0 sees keys 0-7, on the left 0"],
    "held order": ["the keys are in the order 0-3, 12-15, 4-11: is the mask?"],
    "zigzag not put back": ["0-3, 12-15, 4-11 of axis 1", "put back"],
}
MAKERS = SOUND | {name: make for name, (make, _) in BROKEN.items()}
MAKERS |= {
    "on rank 1": on_rank_1,
    "data parallel": by_data_parallel,
    "experts": unlike(built(ExpertParallel)),
    "experts not returned": unlike(built(NotReturned)),
    "sequence parallel": built(SequenceParallel),
    "no reduction first": built(NoReductionFirst),
    "bias on every rank": built(BiasOnEveryRank),
    "off by one": built(OffByOne),
    "other DTensors": unlike(by_parallelize_module),
    "other shards": unlike(by_fully_shard),
    "wrong order": built(WrongOrder),
    "heads in wrong order": built(HeadsInWrongOrder),
}


calls = []


def killed():
    """A model whose rank 1 is killed in the middle of a check."""

    class Killed(GPT):
        def forward(self, ids):
            calls.append(ids)
            if len(calls) > 60 and rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            x = super().forward(ids)
            dist.all_reduce(x)
            return x

    return filled(Killed(), 0)


def check(names):
    from gpt_duet import check_model

    checks = dict.fromkeys(SOUND, SOME)
    checks |= {name: [check] for name, (_, check) in BROKEN.items()}
    for name in names or checks:
        report = check_model(MAKERS[name], checks=checks[name], budget=45)
        found = {r.name[6:]: [r.status, r.message] for r in report.results}
        yield {"model": name} | found


def diff(names):
    from shared.comparison.sharded.diff import diff_sharded

    for name in names or (*SAME, *PART):
        left = mixed if "experts" in name else single
        found = diff_sharded(
            left, MAKERS[name], names=("single", name), gradients=True
        )
        yield {"model": name} | found.to_json()


def main(what, *names):
    dist.init_process_group("gloo")
    for found in {"check": check, "diff": diff}[what](names):
        if rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may abort an interpreter that ends


SOME = ["shape", "finite", "determinism", "causality", "prefix_consistency"]
SOME += ["purity", "gradient_flow", "gradients", "state_dict", "dtype"]

if __name__ == "__main__":
    main(*sys.argv[1:])
