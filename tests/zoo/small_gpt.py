"""A small correct GPT, whose parts the broken and correct models replace.

Each method makes one decision. So a broken model needs only a class, a
docstring and one wrong line.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from gpt_duet.testing import Fault, name_in_words, replaced

VOCAB, BLOCK, DIM = 17, 32, 16
INF = float("inf")


def positions(tokens):
    """Return 0, 1, 2, ... for the tokens of a row, on their device."""
    return torch.arange(tokens.size(1), device=tokens.device)


def angles(at, width):
    """Return `width` angles for each position."""
    rates = 100 ** -torch.linspace(0, 1, width, device=at.device)
    return at.unsqueeze(1) * rates


def cross_entropy(logits, targets, **options):
    """Return the cross-entropy over all positions of all rows."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def earlier_mean(x):
    """Return, at each position, the mean of its vector and earlier ones."""
    count = torch.arange(1, x.size(1) + 1, device=x.device)
    return x.cumsum(1) / count.view(1, -1, 1).to(x.dtype)


class Part(nn.Module):
    """Base of the parts of a block; a subclass may extend add_parts."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.make_parts(dim)
        self.add_parts(dim)

    def make_parts(self, dim):
        pass

    def add_parts(self, dim):
        pass


class Mixer(Part):
    """Base of parts that mix positions; they are called with x and a mask."""

    part = "mixer"


class Attention(Mixer):
    """Softmax attention with two heads."""

    heads = 2

    def make_parts(self, dim):
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).flatten(-2)

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(q.size(-1))

    def hide(self, scores, mask):
        return scores.masked_fill(~mask, -INF)

    def weights(self, scores, mask):
        return self.hide(scores, mask).softmax(-1)

    def attend(self, q, k, v, mask):
        return self.weights(self.scores(q, k), mask) @ v

    def forward(self, x, mask, past=None):
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = past.extend(self, k, v)
        mask = mask.unsqueeze(-3) if mask.dim() == 3 else mask
        return self.out(self.merge(self.attend(q, k, v, mask)))


class MLP(Part):
    """Two linear layers with a GELU between them."""

    part = "mlp"

    def make_parts(self, dim):
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Two residual branches, each of which starts with a norm."""

    part = "block"

    def __init__(self, mixer, mlp, norm, dim):
        super().__init__()
        self.norm_1, self.mixer = norm(dim), mixer(dim)
        self.norm_2, self.mlp = norm(dim), mlp(dim)
        self.drop = nn.Dropout(0.0)

    def forward(self, x, mask, past=None):
        past = () if past is None else (past,)
        x = x + self.drop(self.mixer(self.norm_1(x), mask, *past))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """A GPT that returns scores for each position."""

    part = None
    layers = 2
    mixer, mlp, norm, block = Attention, MLP, nn.LayerNorm, Block

    def __init__(self, vocab_size=VOCAB, block_size=BLOCK, dim=DIM, **parts):
        super().__init__()
        self.vocab_size, self.block_size = vocab_size, block_size
        for name, part in parts.items():
            setattr(self, name, part)
        self.wte = nn.Embedding(vocab_size, dim)
        self.wpe = nn.Embedding(block_size, dim)
        self.blocks = nn.ModuleList(
            self.block(self.mixer, self.mlp, self.norm, dim)
            for _ in range(self.layers)
        )
        self.ln = self.norm(dim)
        self.head = nn.Linear(dim, vocab_size)
        self.add_parts(dim)

    def add_parts(self, dim):
        pass

    def require_length(self, size):
        if size > self.block_size:
            raise ValueError(
                f"{size} tokens are more than the {self.block_size} allowed"
            )

    def token_vectors(self, tokens):
        return self.wte(tokens)

    def position_vectors(self, tokens):
        return self.wpe(positions(tokens))

    def embed(self, tokens):
        return self.token_vectors(tokens) + self.position_vectors(tokens)

    def sees(self, i, j):
        """Return whether position i may see position j."""
        return j <= i

    def mask(self, tokens):
        at = positions(tokens)
        return self.sees(at.unsqueeze(1), at)

    def body(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x

    def scores(self, x):
        return self.head(self.ln(x))

    def forward(self, tokens):
        self.require_length(tokens.size(1))
        return self.scores(self.body(self.embed(tokens), self.mask(tokens)))


class NoPositions(GPT):
    """A GPT without a position table; its parts must bring in positions."""

    def add_parts(self, dim):
        del self.wpe

    def position_vectors(self, tokens):
        return 0


class Unlimited(GPT):
    """A GPT that accepts texts of any length."""

    def require_length(self, size):
        pass


class Past:
    """A cache with the keys and values of the decoded tokens."""

    part = "cache"

    def __init__(self):
        self.length = 0
        self.kept = {}

    def extend(self, attention, k, v):
        if attention in self.kept:
            k, v = self.join(*self.kept[attention], k, v)
        self.kept[attention] = k, v
        return k, v

    def join(self, old_k, old_v, k, v):
        return torch.cat([old_k, k], -2), torch.cat([old_v, v], -2)


class CachedGPT(GPT):
    """A GPT that can also decode a text piece by piece, with a cache."""

    cache = Past

    def init_cache(self, batch):
        return self.cache()

    def past_positions(self, tokens, past):
        return past.length + positions(tokens)

    def past_mask(self, past, size):
        at = torch.arange(past + size, device=self.wte.weight.device)
        return self.sees(at[past:].unsqueeze(1), at)

    def decode(self, tokens, cache):
        size = tokens.size(1)
        self.require_length(cache.length + size)
        x = self.wte(tokens) + self.wpe(self.past_positions(tokens, cache))
        mask = self.past_mask(cache.length, size)
        for block in self.blocks:
            x = block(x, mask, cache)
        cache.length += size
        return self.scores(x), cache


class CacheInTheCall(CachedGPT):
    """A GPT whose forward takes and returns a cache, as in transformers."""

    init_cache = None

    def forward(self, tokens, past_key_values=None, use_cache=False):
        if not use_cache:
            return {"logits": super().forward(tokens)}
        past = past_key_values or self.cache()
        scores, past = self.decode(tokens, past)
        return {"logits": scores, "past_key_values": past}


class CacheWithMask(CacheInTheCall):
    """A GPT that also takes a padding mask over cached and new tokens."""

    def forward(
        self,
        tokens,
        attention_mask=None,
        past_key_values=None,
        use_cache=False,
    ):
        self.shown = attention_mask
        return super().forward(tokens, past_key_values or self.cache(), True)

    def past_mask(self, past, size):
        mask = super().past_mask(past, size)
        return mask if self.shown is None else self.hide(mask, self.shown)

    def hide(self, mask, shown):
        own = torch.ones_like(mask).triu(mask.size(1) - mask.size(0))
        return mask & (own | shown.bool().unsqueeze(1))


class CacheInside(CachedGPT):
    """A GPT that keeps its cache; the caller passes start_pos, as in Llama."""

    init_cache = None

    def begin(self, start_pos):
        if start_pos == 0:
            self.past = self.cache()

    def forward(self, tokens, start_pos=0):
        if torch.is_grad_enabled():
            return super().forward(tokens)
        self.begin(start_pos)
        return self.decode(tokens, self.past)[0]


class Padded(GPT):
    """A GPT that takes a padding mask; each position always sees itself."""

    def forward(self, tokens, attention_mask=None):
        self.require_length(tokens.size(1))
        mask = self.mask(tokens)
        if attention_mask is not None:
            own = torch.eye(tokens.size(1), device=mask.device).bool()
            mask = self.padded(mask, attention_mask.bool().unsqueeze(1) | own)
        return self.scores(self.body(self.embed(tokens), mask))

    def padded(self, mask, shown):
        return mask & shown


class Packed(GPT):
    """A GPT that takes document ids; each document has its own positions, and
    sees only itself."""

    def forward(self, tokens, doc_ids=None):
        if doc_ids is None:
            return super().forward(tokens)
        self.require_length(tokens.size(1))
        same = doc_ids.unsqueeze(1) == doc_ids.unsqueeze(2)
        x = self.token_vectors(tokens)
        x = x + self.wpe(self.within(tokens, same))
        return self.scores(self.body(x, self.apart(self.mask(tokens), same)))

    def within(self, tokens, same):
        """Return positions, counted from the start of each document."""
        return positions(tokens) - same.long().argmax(-1)

    def apart(self, mask, same):
        return mask & same


class TrainableGPT(GPT):
    """A GPT that returns (logits, loss), and does not shift the targets."""

    def loss(self, logits, targets):
        return cross_entropy(logits, targets)

    def forward(self, tokens, targets=None):
        logits = super().forward(tokens)
        return logits, None if targets is None else self.loss(logits, targets)


class EightBits(torch.Tensor):
    """A frozen weight of integers with a scale, as libraries store it.

    It supports copies, casts and products, and nothing else.
    """

    @staticmethod
    def __new__(cls, whole, scale):
        made = torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, dtype=scale.dtype, device=scale.device
        )
        made.whole, made.scale = whole, scale
        return made

    @classmethod
    def of(cls, linear):
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        made = cls((weight / scale).round().to(torch.int8), scale)
        linear.weight = nn.Parameter(made, requires_grad=False)

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            matrix = weight.whole.to(x) * weight.scale.to(x)
            return F.linear(x, matrix, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "copy_":
            args[0].scale.copy_(args[1].scale)
            args[0].whole.copy_(args[1].whole)
            return args[0]
        if name not in ("detach", "clone", "alias", "_to_copy"):
            raise NotImplementedError(f"EightBits has no {name}")
        scale = func(args[0].scale, **(kwargs or {}))
        where = {"device": scale.device} if name == "_to_copy" else {}
        whole = func(args[0].whole, **where)
        return cls(whole, scale)


@dataclass(frozen=True)
class Model(Fault):
    """A variant of the small GPT, broken or sound.

    Attributes:
        only: whether no other check can see its fault.
        double: whether in float64 it deviates only by float64's rounding.
        loosely: names of checks whose properties hold only approximately.
        deep: whether one layer is too few to see every token.
        open: why its causality is not proved, or "".
    """

    vocab_size: int = VOCAB
    block_size: int = BLOCK
    only: bool = False
    double: bool = True
    loosely: str = ""
    deep: bool = False
    open: str = ""


def collect(models, owner=None, method="", whole=None, **details):
    """Return a decorator that adds a model to a list.

    The decorator takes a method that replaces a method of the owner, or a
    class. The class is a model, or a part of the model `whole`. The details
    are fields of `Model`. The docstring becomes the model's sentence. It may
    name a public example of the fault in brackets.
    """

    def add(change):
        name, sentence = name_in_words(change)
        build = replaced(owner, method, change) if owner else change
        sizes = {k: n for k, n in details.items() if k.endswith("_size")}
        if build.part is not None:
            model = whole or (CachedGPT if build.part == "cache" else GPT)
            build = partial(model, **{build.part: build})
        build = partial(build, **sizes) if sizes else build
        models.append(Model(name, build, sentence, **details))
        return change

    return add
