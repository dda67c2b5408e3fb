"""A small GPT on one process, and the same model sharded over several.

Some of the sharded models are correct and some are broken. Under torchrun this
module checks them, and prints a line of JSON for each model.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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
    """Return this rank's part of a tensor along an axis."""
    return x.chunk(count(), dim)[rank()].contiguous()


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(count())]
    dist.all_gather(parts, x.contiguous())
    return parts


class Copied(torch.autograd.Function):
    """Return x itself; the backward pass sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduced(torch.autograd.Function):
    """Return the sum of x over the ranks; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gathered(torch.autograd.Function):
    """Join the parts of all ranks; if `summed`, sum their gradients."""

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
    """Send x `steps` ranks on, and return the x that comes to this rank."""
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
    """Send x `steps` ranks on; the backward pass sends gradients back."""

    @staticmethod
    def forward(ctx, x, steps):
        ctx.steps = steps
        return passed(x, steps)

    @staticmethod
    def backward(ctx, grad):
        return passed(grad, -ctx.steps), None


def filled(module, seed):
    """Set weights from their names, and from the rank if they are sharded."""
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

    def projected(self, x):
        return [self.split(f(x)) for f in (self.q, self.k, self.v)]

    def mixed(self, x, mask):
        q, k, v = self.projected(x)
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x, mask):
        return self.out(self.mixed(x, mask))


class FusedAttention(Attention):
    """Attention that computes queries, keys and values in one product."""

    def __init__(self, *heads):
        super().__init__(*heads)
        self.qkv = nn.Linear(DIM, 3 * self.q.out_features)
        del self.q, self.k, self.v

    def projected(self, x):
        return map(self.split, self.qkv(x).chunk(3, -1))


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
    """The model on one process."""

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


class FusedGPT(GPT):
    class block(Block):
        attention = FusedAttention


@torch.no_grad()
def loaded(model, single, cut=piece):
    """Copy the weights of a one-process model, or this rank's part of them."""
    whole = dict(filled(single, 0).named_parameters())
    for name, p in model.named_parameters():
        if name == "scale":
            continue
        name = name.replace("attn.bias", "attn.out.bias")
        weight = whole[name.replace("ff.bias", "ff.down.bias")]
        axes = [i for i in range(p.dim()) if p.size(i) != weight.size(i)]
        p.copy_(cut(weight, axes[0]) if axes else weight)


# --- Tensor parallel, by hand ------------------------------------------------


class ParallelAttention(Attention):
    """Attention in which each rank has some of the heads."""

    copied, reduced = Copied.apply, Reduced.apply

    def __init__(self):
        super().__init__(HEADS // count())
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.out.bias = None

    def forward(self, x, mask):
        mixed = self.mixed(type(self).copied(x), mask)
        return type(self).reduced(self.out(mixed)) + self.bias


class ParallelMLP(MLP):
    """An MLP in which each rank has a part of the inner width."""

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
    """Heads, the MLP's inner width and the vocabulary are split over ranks."""

    class block(Block):
        attention, mlp = ParallelAttention, ParallelMLP

    sharded = "wte", "head", "q", "k", "v", "out", "up", "down"
    offset = 0  # a fault may shift the first id of a later rank's vocabulary
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


class FusedParallel(TensorParallel):
    """Each rank loads its part of the queries, keys and values."""

    class block(Block):
        class attention(FusedAttention, ParallelAttention):
            pass

        mlp = ParallelMLP

    def cut(self, weight, axis):
        fused = axis == 0 and weight.size(0) == 3 * DIM
        thirds = weight.chunk(3) if fused else [weight]
        return torch.cat([piece(part, axis) for part in thirds], axis)

    def fill(self):
        loaded(self, FusedGPT(), self.cut)


class CutByThirds(FusedParallel):
    """Each rank loads consecutive rows of the fused weight, which holds
    queries, keys and values one after the other."""

    def cut(self, weight, axis):
        return piece(weight, axis)


class InterleavedAttention(FusedAttention):
    """The query, key and value of each head are adjacent, as in Megatron."""

    def projected(self, x):
        heads = self.qkv(x).unflatten(-1, (self.heads, 3, -1))
        return [part.transpose(1, 2) for part in heads.unbind(-2)]


class InterleavedGPT(GPT):
    class block(Block):
        attention = InterleavedAttention


class InterleavedParallel(TensorParallel):
    """Each rank loads its part of the weights; the scale exists only in this
    model."""

    class block(Block):
        class attention(InterleavedAttention, ParallelAttention):
            pass

        mlp = ParallelMLP

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def logits(self, x):
        return super().logits(x) * self.scale.mean()

    def fill(self):
        loaded(self, InterleavedGPT())


class Scattered(torch.autograd.Function):
    """Sum x over the ranks, and return this rank's part of the text."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return piece(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat(gathered(grad), 1)


def whole(x):
    """Join the ranks' parts of the text; the backward pass sums gradients."""
    return Gathered.apply(x, 1, True)


class SequenceParallel(TensorParallel):
    """Between the matrix products, each rank has a part of the text."""

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


class SummedNorm(nn.LayerNorm):
    def forward(self, x):
        weight, bias = map(Copied.apply, (self.weight, self.bias))
        return F.layer_norm(x, (DIM,), weight, bias)


class ReducedNorms(SequenceParallel):
    """The gradients of the norms are summed over the ranks."""

    def __init__(self):
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.__class__ = SummedNorm


class Parted(torch.autograd.Function):
    """Return this rank's part of the text; the backward pass gathers the
    gradient."""

    @staticmethod
    def forward(ctx, x):
        return piece(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat(gathered(grad), 1)


class NoReduction(TensorParallel):
    """The sum over the ranks is missing after the last block's MLP."""

    def __init__(self):
        super().__init__()

        class Alone(ParallelMLP):
            def reduced(self, x):
                return x

        self.blocks[-1].ff = Alone()


class NoReductionFirst(TensorParallel):
    """The sum over the ranks is missing after the first block's attention."""

    def __init__(self):
        super().__init__()

        class Alone(ParallelAttention):
            reduced = nn.Identity()

        self.blocks[0].attn = Alone()


class BiasOnEveryRank(TensorParallel):
    """Each rank adds the bias before the sum over the ranks."""

    class block(Block):
        attention = ParallelAttention

        class mlp(ParallelMLP):
            def forward(self, x):
                x = F.gelu(self.up(Copied.apply(x)))
                return self.reduced(self.down(x) + self.bias)


class OffByOne(TensorParallel):
    """The vocabulary of the second rank starts one id too late."""

    offset = 1


class WrongOrder(TensorParallel):
    """The ranks' scores are joined in reverse order."""

    def logits(self, x):
        logits = self.head(Copied.apply(self.norm(x)))
        return torch.cat(gathered(logits)[::-1], -1)


class HeadsInWrongOrder(TensorParallel):
    """The parts of the inner width are joined in reverse order."""

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
    """The ranks start with different weights of the last norm."""

    def fill(self):
        filled(self, 0)
        with torch.no_grad():
            self.norm.weight.add_(0.1 * rank())


class NoCopyBackward(TensorParallel):
    """The backward pass does not sum the gradient of attention's input over
    the ranks."""

    class block(Block):
        class attention(ParallelAttention):
            @staticmethod
            def copied(x):
                return x

        mlp = ParallelMLP


class SumsTwice(TensorParallel):
    """The backward pass of the last gather sums gradients over the ranks,
    although they are complete."""

    summed = True


# --- Context parallel --------------------------------------------------------


class ContextAttention(Attention):
    """The queries of this rank attend to the keys of all ranks."""

    def mixed(self, x, at):
        q, k, v = self.projected(x)
        k, v = (Gathered.apply(t, 2, True) for t in (k, v))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(~self.visible(at), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def visible(self, at):
        keys = torch.cat(gathered(at))
        return keys <= at.unsqueeze(1)


class ContextParallel(GPT):
    """Each rank has a piece of the text, and the scores are gathered."""

    class block(Block):
        attention = ContextAttention

    zigzag = False

    def order(self, time):
        """Return all positions, sorted by the rank that holds them."""
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


class LossByRanks(ContextParallel):
    """The loss is the mean of the ranks' means, although some ranks have
    fewer tokens."""

    def reduced(self, total, number):
        return Reduced.apply(total / number.clamp(min=1)) / count()

    def forward(self, ids, targets=None):
        logits = super().forward(ids)
        if targets is None:
            return logits, None
        targets = F.pad(targets, (0, -ids.size(1) % count()), value=-100)
        padded = F.pad(logits, (0, 0, 0, targets.size(1) - ids.size(1)))
        own = piece(Copied.apply(padded), 1).flatten(0, 1)
        targets = piece(targets, 1).flatten()
        total = F.cross_entropy(own, targets, reduction="sum")
        return logits, self.reduced(total, (targets != -100).sum())


class LossByTokens(LossByRanks):
    """The loss is the mean over the tokens of all ranks."""

    def reduced(self, total, number):
        number = number.clone()
        dist.all_reduce(number)
        return Reduced.apply(total) / number.clamp(min=1)


class Zigzag(ContextParallel):
    """Each rank has one piece from the text's start and one from its end."""

    zigzag = True


class OwnPositions(ContextParallel):
    """Each rank counts its positions from 0."""

    def positions(self, at):
        return at - at[0]


class NotPutBack(Zigzag):
    """The scores are left in the order in which the ranks hold them."""

    def put_back(self, x, order):
        return x


class OwnPieceWhole(ContextParallel):
    """Each token sees all of the piece of the text that its rank holds."""

    class block(Block):
        class attention(ContextAttention):
            def visible(self, at):
                keys = torch.cat(gathered(at))
                own = (keys >= at[0]) & (keys <= at[-1])
                return (keys <= at.unsqueeze(1)) | own


class HeldOrder(Zigzag):
    """The mask assumes keys in the text's order, which ranks do not keep."""

    class block(Block):
        class attention(ContextAttention):
            def visible(self, at):
                keys = torch.arange(len(at) * count())
                return keys <= at.unsqueeze(1)


class OwnMask(ContextParallel):
    """The mask counts the positions of each rank from 0."""

    class block(Block):
        class attention(ContextAttention):
            def visible(self, at):
                keys = torch.arange(len(at) * count())
                return keys <= (at - at[0]).unsqueeze(1)


class Late(GPT):
    """One rank comes late to a gather; after the gather, the model leaks."""

    def logits(self, x):
        time.sleep(0.02 * rank())
        x = sum(gathered(x)) / count()
        return super().logits(x + x.flip(1))


class RingAttention(Attention):
    """Keys go round the ranks, and a running softmax collects the result."""

    def mixed(self, x, at):
        q, k, v = self.projected(x)
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
    """A context-parallel model whose keys go round a ring of ranks."""

    class block(Block):
        attention = RingAttention


# --- Experts on different ranks ----------------------------------------------


class Experts(nn.Module):
    """Each token is multiplied by the matrix of its most likely expert."""

    held = 4  # number of experts in this module

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
    """Exchange rows of x between ranks; the gradients come back."""

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
    """Each rank holds some of the experts, to which tokens are sent."""

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
    """The model with experts, on one process."""

    class block(Block):
        mlp = Experts


class ExpertParallel(ContextParallel):
    class block(Block):
        attention, mlp = ContextAttention, ParallelExperts


class NotReturned(ContextParallel):
    """The tokens come back in the experts' order, not in the text's."""

    class block(Block):
        attention = ContextAttention

        class mlp(ParallelExperts):
            def returned(self, x, order):
                return x


class CappedExperts(Experts):
    """Each expert takes at most a quarter of the tokens."""

    def moved(self, x, chosen):
        before = F.one_hot(chosen, 4).cumsum(0)
        place = before.gather(1, chosen[:, None])
        kept = place <= -(-len(chosen) // 4)
        return super().moved(x, chosen) * kept


class CappedGPT(GPT):
    class block(Block):
        mlp = CappedExperts


class CapacityByRank(ContextParallel):
    """On each rank, an expert takes at most a quarter of the rank's tokens."""

    class block(Block):
        attention = ContextAttention

        class mlp(CappedExperts, ParallelExperts):
            pass


# --- Pipeline stages, by hand ------------------------------------------------


class Stage(GPT):
    """The blocks of one rank; the first rank also embeds, the last
    returns scores."""

    def holds(self, index):
        return index * count() // LAYERS == rank()

    def __init__(self):
        super().__init__()
        held = {str(i): b for i, b in enumerate(self.blocks) if self.holds(i)}
        self.blocks = nn.ModuleDict(held)
        if rank() > 0:
            del self.wte, self.wpe
        if rank() < count() - 1:
            del self.norm, self.head

    def forward(self, x):
        time = x.size(1)
        if rank() == 0:
            x = self.embed(x, torch.arange(time))
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        for block in self.blocks.values():
            x = block(x, mask)
        # only the last rank returns scores, in the dtype of x
        last = rank() == count() - 1
        return self.logits(x).to(x.dtype) if last else x


class Swapped(Stage):
    """The first rank has the last blocks, and the last rank the first."""

    def holds(self, index):
        return super().holds(LAYERS - 1 - index)


class FromBefore(torch.autograd.Function):
    """Receive a tensor from the previous rank; send its gradient back."""

    @staticmethod
    def forward(ctx, like):
        x = torch.empty_like(like)
        dist.recv(x, rank() - 1)
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.send(grad.contiguous(), rank() - 1)


class ToAll(torch.autograd.Function):
    """Send a tensor to the next rank, and return the last rank's scores."""

    @staticmethod
    def forward(ctx, x, shape):
        ctx.like = x
        if rank() < count() - 1:
            dist.send(x.contiguous(), rank() + 1)
        last = rank() == count() - 1
        scores = x.clone() if last else x.new_empty(shape)
        dist.broadcast(scores, count() - 1)
        return scores

    @staticmethod
    def backward(ctx, grad):
        if rank() < count() - 1:
            grad = torch.empty_like(ctx.like)
            dist.recv(grad, rank() + 1)
        return grad, None


class Pipeline(nn.Module):
    """Each stage receives states, sends its own, and sends gradients back."""

    vocab_size, block_size = VOCAB, BLOCK
    stages, sharded = Stage, ()

    def __init__(self):
        super().__init__()
        self.stage = self.stages()

    def fill(self):
        loaded(self.stage, GPT())

    def forward(self, ids):
        if ids.size(1) > BLOCK:
            raise ValueError(f"{ids.size(1)} tokens, at most {BLOCK}")
        return self.run(ids, next(self.parameters()).dtype)

    def run(self, x, dtype):
        shape = *x.shape, VOCAB
        if rank() > 0:
            like = torch.zeros(*x.shape, DIM, dtype=dtype)
            x = FromBefore.apply(like.requires_grad_())
        return ToAll.apply(self.stage(x), shape)


class StagesSwapped(Pipeline):
    """The stages run in the wrong order."""

    stages = Swapped


class Scheduled(Pipeline):
    """torch.distributed.pipelining runs the stages; no backward pass runs."""

    def run(self, x, dtype):
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        stage = PipelineStage(self.stage, rank(), count(), x.device)
        given = [x][rank() :][:1]
        scores = ScheduleGPipe(stage, 1).step(*given)
        if scores is None:
            scores = torch.empty(*x.shape, VOCAB, dtype=dtype)
        dist.broadcast(scores, count() - 1)
        return scores


class ScheduledSwapped(Scheduled):
    """torch.distributed.pipelining runs the stages in the wrong order."""

    stages = Swapped


# --- Using torch's own tools -------------------------------------------------


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


def by_sequence_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class Padded(GPT):
        def forward(self, ids):
            padded = F.pad(ids, (0, -ids.size(1) % count()))
            return super().forward(padded)[:, : ids.size(1)]

    model = filled(Padded(), 0)
    mesh = init_device_mesh("cpu", (count(),))
    rows, whole = Shard(1), Replicate()
    embedding = RowwiseParallel(input_layouts=whole, output_layouts=rows)
    plan = {"wte": embedding, "norm": SequenceParallel()}
    plan |= {"head": ColwiseParallel(input_layouts=rows, output_layouts=whole)}
    for i, block in enumerate(model.blocks):
        block.attn.heads = HEADS // count()
        names = [*(f"attn.{n}" for n in "qkv"), "ff.up"]
        own = dict.fromkeys(names, ColwiseParallel())
        for name in ("attn.out", "ff.down"):
            own[name] = RowwiseParallel(output_layouts=rows)
        for name in ("norm_1", "norm_2"):
            own[name] = SequenceParallel()
        own["attn"] = PrepareModuleInput(
            input_layouts=(rows, None), desired_input_layouts=(whole, None)
        )
        own["ff"] = PrepareModuleInput(
            input_layouts=(rows,), desired_input_layouts=(whole,)
        )
        plan |= {f"blocks.{i}.{name}": how for name, how in own.items()}
    model = parallelize_module(model, mesh, plan)
    positions = RowwiseParallel(input_layouts=whole, output_layouts=Shard(0))
    return parallelize_module(model, mesh, {"wpe": positions})


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


def by_fully_shard_of_blocks():
    """Return a model in which only the blocks are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = filled(GPT(), 0)
    mesh = init_device_mesh("cpu", (count(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return model


def reduced_in(dtype, gpt=GPT):
    """Return a factory of a model that sums its gradients in a given dtype."""

    def build():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = filled(gpt(), 0)
        mesh = init_device_mesh("cpu", (count(),))
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    return build


class Damped(GPT):
    """Half of each embedding goes on without a gradient."""

    def embed(self, ids, positions):
        x = super().embed(ids, positions)
        return 0.5 * x + 0.5 * x.detach()


def padded_on_rank_1():
    """Return a model whose padding id belongs to the second rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = GPT()
    model.wte = nn.Embedding(VOCAB, DIM, padding_idx=VOCAB - 2)
    filled(model, 0)
    return fully_shard(model, mesh=init_device_mesh("cpu", (count(),)))


def by_fully_shard_but_one():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = filled(GPT(), 0)
    mesh = init_device_mesh("cpu", (count(),))
    outside = {*model.blocks[1].parameters()}
    return fully_shard(model, mesh=mesh, ignored_params=outside)


def on_rank_1():
    """Return a model that adds 1 to its scores on rank 1."""

    class Other(GPT):
        def forward(self, ids):
            return super().forward(ids) + rank()

    return filled(Other(), 0)


def single():
    return filled(GPT(), 0)


def mixed():
    return filled(MixedGPT(), 0)


def capped():
    return filled(CappedGPT(), 0)


def fused():
    return filled(FusedGPT(), 0)


def interleaved():
    return filled(InterleavedGPT(), 0)


def unlike(build):
    """Return a factory of a model with halved matrices and zero vectors."""

    def other():
        model = build()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5) if p.dim() > 1 else p.zero_()
        return model

    return other


def built(model):
    """Return a factory of a sharded class, with its weights set."""

    def build():
        made = model()
        made.fill() if hasattr(made, "fill") else filled(made, 0)
        return made

    return build


calls = []


def killed():
    """Return a model whose rank 1 is killed during a check."""

    class Killed(GPT):
        def forward(self, ids):
            calls.append(ids)
            if len(calls) > 60 and rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            x = super().forward(ids)
            dist.all_reduce(x)
            return x

    return filled(Killed(), 0)


# --- By fault: what the report must say --------------------------------------

MAIN = ["shape", "finite", "determinism", "prefix_consistency"]
GRADIENTS = ["gradient_flow", "gradients"]


@dataclass(frozen=True)
class Case:
    """A model and the expected findings.

    Attributes:
        build: a function that makes the model.
        checks: the checks that the model must pass.
        fails: a check that the model must fail, or "".
        words: words in the message of that failure.
        left: a function that makes the same model on one process, to compare;
            None means that nothing is compared.
        proved: whether check_causality must prove the model.
        recorded: whether the left model is compared as a recorded file.
        same: whether the comparison must find one function and the same
            gradients.
        says: words in the sentence of the comparison.
    """

    build: Callable[[], nn.Module]
    checks: Sequence[str] = ()
    fails: str = ""
    words: str = ""
    left: Callable[[], nn.Module] | None = single
    proved: bool = False
    recorded: bool = False
    same: bool = True
    says: Sequence[str] = ()


def sound(build, *says, **how):
    return Case(build, says=says, **how)


def broken(build, *says, **how):
    return Case(build, says=says, same=False, **how)


CASES = {
    "tensor parallel": sound(
        built(TensorParallel), "one function over", "65 of 66 values",
        checks=[*MAIN, *GRADIENTS, "purity", "state_dict", "dtype"],
        proved=True,
    ),
    "fused": sound(built(FusedParallel), left=fused),
    "interleaved": sound(
        built(InterleavedParallel), "30 gradients equal", "0-23 of axis 0",
        left=interleaved,
    ),
    "sequence parallel": sound(
        built(ReducedNorms), "4 of them as the sum over the ranks"
    ),
    "context parallel": sound(
        built(ContextParallel), checks=MAIN, proved=True
    ),
    "zigzag": sound(
        built(Zigzag), "as the sum over the ranks",
        checks=[*MAIN, *GRADIENTS],
    ),
    "ring": sound(
        built(Ring), checks=MAIN, proved=True
    ),
    "experts": sound(
        unlike(built(ExpertParallel)), checks=MAIN[:3], left=mixed
    ),
    "pipeline": sound(
        built(Pipeline), "38 gradients equal;",
        checks=[*MAIN, *GRADIENTS], proved=True,
    ),
    "pipelining": sound(built(Scheduled), checks=[*MAIN, *GRADIENTS]),
    "parallelize_module": sound(
        unlike(by_parallelize_module), "38 gradients equal;",
        checks=[*MAIN, *GRADIENTS, "state_dict", "dtype"],
    ),
    "parallelize_module, sequence parallel": sound(
        by_sequence_parallel, checks=[*MAIN, *GRADIENTS]
    ),
    "fully_shard": sound(
        unlike(by_fully_shard), "38 gradients equal;",
        checks=[*MAIN, *GRADIENTS, "purity", "state_dict", "dtype"],
    ),
    "blocks by fully_shard": sound(
        by_fully_shard_of_blocks, checks=GRADIENTS, left=None
    ),
    "reduced in float32": sound(
        reduced_in(torch.float32), checks=GRADIENTS, left=None
    ),
    "reduced in bfloat16": sound(
        reduced_in(torch.bfloat16), checks=GRADIENTS, left=None
    ),
    "padding on rank 1": sound(
        padded_on_rank_1, checks=GRADIENTS, left=None
    ),
    "damped, reduced in bfloat16": sound(
        reduced_in(torch.bfloat16, Damped), fails="gradients", left=None
    ),
    "data parallel": sound(by_data_parallel, checks=[*MAIN[:3], *GRADIENTS]),
    "loss by tokens": sound(built(LossByTokens), checks=["loss"], left=None),
    "loss by ranks": sound(built(LossByRanks), fails="loss", left=None),
    "no reduction": broken(
        built(NoReduction), "`+`: an all_reduce is missing: ",
        "`linear` is a part of a sum on each rank", fails="gradients",
    ),
    "no reduction first": broken(
        built(NoReductionFirst), "`+`: an all_reduce is missing: "
    ),
    "bias on every rank": broken(
        built(BiasOnEveryRank), "every rank adds the bias blocks.0.ff.bias, "
        "so the sum over the ranks contains it 2 times",
    ),
    "off by one": broken(
        built(OffByOne), "`embedding`: rank 1: no value on the left equals it"
    ),
    "recorded": sound(
        built(FusedParallel), "30 gradients equal", left=fused, recorded=True
    ),
    "cut by thirds, recorded": broken(
        built(CutByThirds), "is a fused weight of queries",
        left=fused, recorded=True,
    ),
    "cut by thirds": broken(
        built(CutByThirds), "is a fused weight of queries, keys and values",
        left=fused,
    ),
    "wrong order": broken(
        built(WrongOrder), "put back in their order?", "10-19, 0-9 of axis 2"
    ),
    "heads in wrong order": broken(
        built(HeadsInWrongOrder), "32-63, 0-31 of axis 2", "gathered"
    ),
    "other weights": Case(
        built(OtherWeights), fails="gradients",
        says=["the ranks started with different norm.weight"],
    ),
    "no reduction in the backward": broken(
        built(NoCopyBackward), "the gradient of blocks.0.ff.bias is",
        "that of blocks.1.norm_1.bias, which the backward pass reaches "
        "earlier, is a part of a sum on each rank", fails="gradients",
    ),
    "gather sums twice": broken(
        built(SumsTwice), "the gradient of head.bias is 2 times that of",
        fails="gradients",
    ),
    "norms unreduced": Case(
        built(SequenceParallel),
        says=["14 of them as the sum over the ranks, which the training code"],
    ),
    "own positions": broken(
        built(OwnPositions), "rank 1: ", "rank 1 counts positions from 0",
        fails="prefix_consistency",
    ),
    "own mask": broken(
        built(OwnMask), "`masked_fill`: rank 1: position 8 sees keys 0, on "
        "the left 0-8: the mask counts a rank's positions from 0",
        fails="prefix_consistency",
    ),
    "own piece whole": broken(
        built(OwnPieceWhole), "position 0 sees keys 0-7, on the left 0",
        fails="causality",
    ),
    "held order": broken(
        built(HeldOrder),
        "the keys are in the order 0-3, 12-15, 4-11: is the mask in",
        fails="causality",
    ),
    "zigzag not put back": broken(
        built(NotPutBack), "0-3, 12-15, 4-11 of axis 1", "put back",
        fails="causality",
    ),
    "behind a late gather": sound(
        built(Late), fails="causality", left=None,
        words=r"first seen at \S+ `x\.flip\(1\)`",
    ),
    "experts not returned": broken(
        unlike(built(NotReturned)), "`*`: rank 0", "(1-7, 0 of axis 0)",
        "put back in their order?",
        left=mixed,
    ),
    "capacity by rank": broken(
        unlike(built(CapacityByRank)), "`*`: no value on the left equals it",
        left=capped,
    ),
    "one block outside": broken(
        by_fully_shard_but_one, "the gradient of blocks.1",
        "and the left's is the mean over them",
    ),
    "stages in the wrong order": broken(
        built(StagesSwapped), "blocks.1.norm_1 takes ",
        "on the left is the input of blocks.0.norm_1: do layers, or stages",
    ),
    "pipelining in the wrong order": broken(
        built(ScheduledSwapped), "do layers, or stages, run in another order?"
    ),
    "on rank 1": broken(
        on_rank_1, "`+`: rank 1: no value on the left equals it",
        fails="determinism", words="rank 1 returns other scores than rank 0",
    ),
}  # fmt: skip


def found_of(name):
    """Return the findings of checks and of a comparison, ready for JSON."""
    from gpt_duet import check_model
    from gpt_duet.comparison.values import record_values
    from gpt_duet.distributed.diff import diff_sharded

    case = CASES[name]
    found = {"model": name}
    checks = [*case.checks, *["causality"] * case.proved]
    checks += [case.fails] * bool(case.fails)
    if checks and count() == 2:  # with more processes, checks take too long
        report = check_model(
            case.build, checks=checks, block_size=6, budget=45
        )
        found |= {r.name[6:]: [r.status, r.message] for r in report.results}
    if case.left is not None:
        left, how = case.left, {"gradients": True}
        with TemporaryDirectory() as folder:
            if case.recorded:
                left = Path(folder) / "left.safetensors"
                record_values(
                    case.left, None, left, dtype=torch.float64, **how
                )
            both = left, case.build
            diff = diff_sharded(*both, names=("single", name), **how)
            found["diff"] = diff.to_json()
    return found


def main(*names):
    dist.init_process_group("gloo")
    for name in names or CASES:
        found = found_of(name)
        if rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # not sys.exit: gloo's threads may abort the interpreter at its end
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
