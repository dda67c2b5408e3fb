"""Texts of the page about the style of The Annotated Transformer."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

Table = Float[Tensor, "batch heads time width"]

# By concept: common terms, with their names in this style's source. Other
# names are paired by the values that their calls return.
NAMES = {
    "everywhere": {
        "width": ("d_model",),
        "heads": ("h",),
        "layers": ("N",),
        "inner width": ("d_ff",),
        "vocabulary": ("vocab_size", "vocab"),
        "longest sequence": ("max_len",),
    },
    "attention": {
        "query, key, value": ("linears[0..2]",),
        "width of a head": ("d_k",),
    },
    "block": {
        "width": ("d_model", "size", "features"),
        "attention": ("self_attn",),
        "feed-forward": ("feed_forward",),
    },
    "model": {"head": ("generator",)},
}

# By concept: what this style chose where the mathematics leaves a choice.
CHOICES = {
    "embedding": "Two modules run in a chain, one for tokens and one for "
    "positions. Token vectors are scaled by sqrt(d_model). The position table "
    "`pe` is a buffer, which training does not change: a new model fills it "
    "with sines and cosines; here `from_gpt2` has copied the checkpoint's "
    "learned table into it.",
    "attention": "A list holds four nn.Linear of one shape: the first three "
    "make query, key and value, the fourth joins the heads. The formula is in "
    "a separate function, which takes any mask and also returns the "
    "probabilities.",
    "feed_forward": "The activation is an argument of the class: ReLU by "
    "default, in this run the config's. Dropout follows it.",
    "block": "A residual connection is an object that wraps any sublayer. "
    "The style's own `LayerNorm` writes the formula out and divides by "
    "sqrt(variance) + eps; in this run `from_gpt2` has replaced it by "
    "nn.LayerNorm.",
    "model": "A function builds the parts and passes them to each other; no "
    "class builds its own attention, feed-forward network or embedding. The "
    "mask travels as an argument.",
    "head": "A separate module, `Generator`, computes the scores "
    "x W\u1d40 + b, then their log-softmax. Its matrix is never tied to the "
    "token table.",
}

# By part: how this style writes the part, and how from_gpt2 fills its weights.
WEIGHT_TRANSFER = {
    "token table": ("lut(x) * sqrt(d_model)", "lut = wte / sqrt(d_model)"),
    "position table": (
        "sines and cosines in a buffer, pe",
        "copied into the buffer",
    ),
    "attention's matrices": (
        "four cloned linears",
        "c_attn is cut in three; all four matrices are transposed",
    ),
    "norm": (
        "a_2 * (x - mean) / (std + eps) + b_2, std divides by n - 1 (n: the "
        "width)",
        "its own LayerNorm: a_2 = weight * sqrt(n / (n - 1)); nn.LayerNorm: "
        "copied",
    ),
    "head": (
        "Generator: a linear map with bias, log-softmax",
        "copied; a missing bias is filled with zeros",
    ),
    "tied head": (
        "never tied: two tensors",
        "the second tensor is filled from wte",
    ),
    "activation": ("ReLU by default", "takes the config's"),
}

# By kind of step: how this style writes the step, where the styles differ.
STEPS = {
    "token": "The line multiplies the row by the root of the width, d_model, "
    "as the paper 'Attention Is All You Need' does. A file of GPT-2's "
    "weights expects no such factor, so loading it divides the rows of the "
    "table, `lut`, by sqrt(d_model); multiplying here undoes that.",
    "position": "`pe` is a buffer, which training does not change. In this "
    "run it holds sines and cosines.",
    "learned_position": "`pe` is a buffer, which training does not change. "
    "A new model fills it with sines and cosines; in this run the loader of "
    "GPT-2 checkpoints has replaced them by the checkpoint's learned table.",
    "norm": "The class shown, SublayerConnection, holds the norm and "
    "normalises the input of its sublayer.",
    "project": "`linears` holds four nn.Linear of one shape: the first three "
    "make query, key and value, the fourth joins the heads.",
    "scores": "The line first divides the queries by sqrt(d_k), then "
    "multiplies them with the keys; `d_k` is the width of a head.",
    "mask": "`attention` is given one `mask` for all layers, True on and "
    "below the diagonal. The line sets the scores to minus infinity where "
    "the mask is False (`mask == 0`).",
    "probabilities": "softmax has a separate line. `attention` also returns "
    "the probabilities, so that a reader can look at them.",
    "mix": "A product of two matrices mixes the values.",
    "residual_attention": "This line runs twice in every layer; here "
    "`sublayer` is attention.",
    "residual_feed_forward": "The line that added attention's output runs "
    "again; here `sublayer` is feed-forward.",
    "activation": "The activation is an argument of PositionwiseFeedForward: "
    "ReLU by default, in this run the one that the config names.",
    "logits": "`proj` in Generator has a bias b, filled with zeros where the "
    "checkpoint has none; its matrix is never shared with the token table.",
    "log_probs": "Generator applies log_softmax to the scores itself, so it "
    "returns log-probabilities.",
}

# By part: the edits that remove it from a copy (module, old text, new text).
BREAKS = {
    "mask": [
        ("attention", 'scores.masked_fill_(mask == 0, float("-inf"))', "pass")
    ],
    "scale": [("attention", "query / math.sqrt(d_k) @ key", "query @ key")],
    "positions": [("embedding", "x + self.pe[:, : x.size(1)]", "x")],
    "residual": [
        (
            "block",
            "x + self.dropout(sublayer(self.norm(x)))",
            "self.dropout(sublayer(self.norm(x)))",
        )
    ],
}

# By part, then by kind of step: how the step runs without the part.
WITHOUT = {
    "mask": {
        "mask": "`pass` replaces the line, so nothing is masked: softmax gets "
        "the scores of later positions as well.",
    },
    "scale": {
        "scores": "The line multiplies the queries with the keys and divides "
        "by nothing.",
    },
    "positions": {
        "position": "No line reads `pe` any more.",
        "embedding": "The line adds nothing: x is the token's vector.",
    },
    "residual": {
        "norm": "The line still normalises the input of its sublayer, but "
        "does not add x.",
        "second_norm": "The line still normalises the input of its sublayer, "
        "but does not add x.",
        "residual_attention": "The line returns attention's output and adds "
        "it to nothing.",
        "residual_feed_forward": "The line returns the feed-forward output "
        "and adds it to nothing.",
    },
}

# The function that adds keys and values to the cache: module, name, lines.
CACHE_SOURCE = (
    "cache",
    "CachedAttention.__call__",
    ("self.attn.project(x, x, x)", "self.key = torch", "self.value = torch"),
)


def cached(cache: Any, layer: int) -> tuple[Table, Table]:
    """Return a layer's keys and values."""
    _, attend = cache.layers[layer]
    return attend.key, attend.value
