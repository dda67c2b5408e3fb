"""Pairs of models that agree on one short text but differ elsewhere.

`Original` has one layer and is 16 wide. Each class of `PAIRS` is a port with
the same weights. It differs only on other texts, in batches of rows, in train
mode, or with other weights. `TWINS` are sound ports. The docstring of each
class names it in the tests.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from written_port import Written

VOCAB, BLOCK, WIDTH, HEADS, SHARE = 97, 130, 16, 2, 0.1


class Original(nn.Module):
    """the original"""

    vocab_size, block_size = VOCAB, BLOCK

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.gate = nn.Parameter(torch.zeros(1))
        for name, weight in self.named_parameters():
            if name.endswith(".bias"):
                weight.data.zero_()
            elif weight.ndim > 1:
                weight.data.normal_(0, 0.1)

    def embed(self, ids):
        return self.table(ids)

    def places(self, ids):
        return torch.arange(ids.size(1)).expand_as(ids)

    def speeds(self, time):
        return 100.0 ** -(torch.arange(0, 4).double() / 4)

    def rotate(self, x, ids):
        speeds = self.speeds(ids.size(1))
        angles = self.places(ids)[:, None, :, None] * speeds
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def project(self, x):
        return self.qkv(x)

    def queries(self, q):
        return q

    def mask(self, scores):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf)

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(WIDTH // HEADS)

    def drop(self, x):
        return F.dropout(x, SHARE, self.training)

    def attend(self, x, ids):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.project(x).chunk(3, -1)
        )
        q, k = self.rotate(self.queries(q), ids), self.rotate(k, ids)
        weights = self.mask(self.scores(q, k)).softmax(-1)
        weights = self.drop(weights)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.down(F.gelu(self.up(x)))

    def first(self, x):
        return self.ln_1(x)

    def second(self, x):
        return self.ln_2(x)

    def last(self, x):
        return self.ln_f(x)

    def gated(self, x):
        return x + self.gate * x.roll(1, -1)

    def join(self, x, y):
        return x + self.drop(y)

    def layer(self, x, ids):
        x = self.join(x, self.attend(self.first(x), ids))
        return self.join(x, self.feed(self.second(x)))

    def forward(self, ids):
        x = self.layer(self.embed(ids), ids)
        return self.head(self.last(self.gated(x)))


PAIRS = {}  # by name: a class, and the words that the report must have


def pair(word):
    def note(kind):
        PAIRS[kind.__doc__] = kind, word
        return kind

    return note


# --- Differences that only other texts show ----------------------------------


@pair("at 65 tokens")
class Window(Original):
    """a window of 64"""

    def mask(self, scores):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        seen = seen & ~seen.tril(-64)
        return scores.masked_fill(~seen, -math.inf)


@pair("at 33 tokens")
class Stretched(Original):
    """a rotary that changes past 32 tokens"""

    def speeds(self, time):
        base = 100.0 if time <= 32 else 100.0 * time / 32
        return base ** -(torch.arange(0, 4).double() / 4)


@pair("id 0")
class Padded(Original):
    """a padding id that is zeroed"""

    def embed(self, ids):
        return self.table(ids) * (ids != 0)[..., None]


@pair("on 2 rows")
class Mixed(Original):
    """rows that mix"""

    def embed(self, ids):
        x = self.table(ids)
        return x + x.mean(0, keepdim=True) - x[:1]


@pair("at 100 tokens")
class AtOneLength(Original):
    """another kernel at 100 tokens"""

    def mask(self, scores):
        causal = super().mask(scores)
        return scores if scores.size(-1) == 100 else causal


@pair("at 49 tokens")
class Clamped(Original):
    """positions that end at 47"""

    def places(self, ids):
        return super().places(ids).clamp(max=47)


@pair("id 96")
class LastId(Original):
    """a last id that is zeroed"""

    def embed(self, ids):
        return self.table(ids) * (ids != VOCAB - 1)[..., None]


@pair("on 2 rows")
class FirstRow(Original):
    """the ids of the first row in each row"""

    def embed(self, ids):
        return self.table(ids[:1].expand_as(ids))


# --- Differences that only other weights show --------------------------------


@pair("q.clamp(-8, 8)")
class Clipped(Original):
    """a clip of queries"""

    def queries(self, q):
        return q.clamp(-8, 8)


@pair("scores.clamp(-50, 50)")
class Bounded(Original):
    """a clamp of scores"""

    def mask(self, scores):
        return super().mask(scores.clamp(-50, 50))


@pair("x @ self.qkv.weight.T")
class NoBias(Original):
    """a missing qkv bias"""

    def project(self, x):
        return x @ self.qkv.weight.T


@pair("self.qkv(x)")
class WithoutBias(Original):
    """a qkv layer without a bias"""

    def __init__(self):
        super().__init__()
        self.qkv.register_parameter("bias", None)


@pair("self.ln_2(x)")
class Swapped(Original):
    """two norms swapped"""

    def first(self, x):
        return self.ln_2(x)

    def second(self, x):
        return self.ln_1(x)


@pair("scores.masked_fill(future, -1e4)")
class WeakMask(Original):
    """a mask of -1e4"""

    def mask(self, scores):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -1e4)


@pair("F.layer_norm(x")
class NoShift(Original):
    """a last norm without its shift"""

    def last(self, x):
        return F.layer_norm(x, (WIDTH,), self.ln_f.weight)


@pair("self.ln_f(x) * self.ln_f.weight")
class TwiceScaled(Original):
    """a norm's scale that is applied twice"""

    def last(self, x):
        return self.ln_f(x) * self.ln_f.weight


@pair("the left continues at hidden_pairs.py:")
class NoGate(Original):
    """a gate that is left out"""

    def gated(self, x):
        return x


# --- Differences that only train mode shows ----------------------------------


@pair("drops")
class NoDropout(Original):
    """dropout that is missing in train mode"""

    def drop(self, x):
        return x


@pair("drops")
class MoreDropout(Original):
    """dropout of another probability"""

    def drop(self, x):
        return F.dropout(x, 2 * SHARE, self.training)


@pair("in train mode")
class Unscaled(Original):
    """dropout without its scale"""

    def drop(self, x):
        if not self.training:
            return x
        return x * torch.bernoulli(torch.full_like(x, 1 - SHARE))


@pair("drops")
class AnotherPlace(Original):
    """dropout after the sum"""

    def join(self, x, y):
        return self.drop(x + y)


# --- Pairs that are one function ---------------------------------------------


class Bernoulli(Original):
    """dropout by a mask"""

    def drop(self, x):
        if not self.training:
            return x
        kept = torch.rand_like(x) < 1 - SHARE
        return torch.where(kept, x / (1 - SHARE), 0.0)


class Named(nn.Module):
    """other names of weights, a kernel"""

    vocab_size, block_size = VOCAB, BLOCK

    def __init__(self):
        super().__init__()
        of = Original()
        self.wte = of.table
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        weights, biases = of.qkv.weight.chunk(3), of.qkv.bias.chunk(3)
        for part, weight, bias in zip(
            (self.wq, self.wk, self.wv), weights, biases, strict=True
        ):
            part.weight.data, part.bias.data = weight.data, bias.data
        self.wo, self.fc, self.out = of.proj, of.up, of.down
        self.norms = nn.ModuleList([of.ln_f, of.ln_2, of.ln_1])
        self.wlm, self.skip, self.of = of.head, of.gate, [of]

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def attend(self, x, ids):
        q, k, v = (self.heads(w(x)) for w in (self.wq, self.wk, self.wv))
        q, k = self.of[0].rotate(q, ids), self.of[0].rotate(k, ids)
        share = SHARE if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=share, is_causal=True
        )
        return F.dropout(
            self.wo(y.transpose(1, 2).flatten(2)), SHARE, self.training
        )

    def forward(self, ids):
        last, second, first = self.norms
        x = self.wte(ids)
        x = x + self.attend(first(x), ids)
        y = self.out(F.gelu(self.fc(second(x))))
        x = x + F.dropout(y, SHARE, self.training)
        return self.wlm(last(x + self.skip * x.roll(1, -1)))


TWINS = {kind.__doc__: kind for kind in (Original, Bernoulli, Named)}
TWINS[Written.__doc__] = lambda: Written(Original().state_dict())


# --- Pairs that are one function, with weights in another form ---------------


class Buffered(Original):
    """a matrix that is read from a buffer"""

    def __init__(self):
        super().__init__()
        self.register_buffer("turned", self.qkv.weight.detach().T.clone())

    def project(self, x):
        return x @ self.turned + self.qkv.bias


class Prescaled(Original):
    """queries whose weights are divided by 4"""

    def __init__(self):
        super().__init__()
        self.qkv.weight.data[:WIDTH] /= 4

    def scores(self, q, k):
        return 4 * super().scores(q, k)


class Folded(Original):
    """a token table that is divided by a factor"""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor
        self.head.weight.data = self.table.weight.data.clone()
        self.table.weight.data /= factor

    def embed(self, ids):
        return self.table(ids) * self.factor


class InAList(Original):
    """weights that are not parameters"""

    def __init__(self):
        super().__init__()
        self.held = [self.up.weight.detach().clone().double()]
        del self.up.weight
        self.up.weight = None

    def feed(self, x):
        up = x @ self.held[0].to(x).T + self.up.bias
        return self.down(F.gelu(up))


FORMS = {
    kind.__doc__: (kind, Original) for kind in (Buffered, Prescaled, InAList)
}
FORMS[Folded.__doc__] = Folded, lambda: Folded(1.0)
