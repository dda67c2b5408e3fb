"""Texts of the page about the style of minGPT."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

Table = Float[Tensor, "batch heads time width"]

# By concept: common terms, with their names in this style's source. Other
# names are paired by the values that their calls return.
NAMES = {
    "everywhere": {
        "width": ("n_embd", "C"),
        "heads": ("n_head",),
        "layers": ("n_layer",),
        "inner width": ("inner_size",),
        "vocabulary": ("vocab_size",),
        "longest sequence": ("block_size",),
    },
    "attention": {
        "query, key, value": ("c_attn",),
        "width of a head": ("hs",),
    },
    "block": {
        "attention": ("attn",),
        "feed-forward": ("mlp",),
    },
    "model": {"head": ("lm_head",)},
}

# By concept: what this style chose where the mathematics leaves a choice.
CHOICES = {
    "embedding": "One line looks up a row in each of two tables and adds the "
    "two. Both tables are learned, and nothing is scaled.",
    "attention": "Query, key and value come from one matrix. One call of "
    "PyTorch's scaled_dot_product_attention masks, takes the softmax and "
    "mixes the values; it never returns the probabilities.",
    "feed_forward": "The config names the activation; the default is GELU "
    "by tanh. Dropout comes last.",
    "block": "Block.forward has two lines that add to x; each first "
    "normalises the input of the part that it calls. The norm is "
    "nn.LayerNorm, which divides by sqrt(variance + eps); eps avoids a "
    "division by 0.",
    "model": "One class builds everything from one config, and fills the "
    "weights at random. No part is handed in, nor a mask.",
    "head": "`lm_head` computes the scores x W\u1d40, without a bias unless "
    "the checkpoint brings one; W is tied to the token table where the config "
    "says so. `log_probs` applies log-softmax.",
}

# By part: how this style writes the part, and how from_gpt2 fills its weights.
WEIGHT_TRANSFER = {
    "token table": ("wte(x)", "copied"),
    "position table": ("a learned table, wpe", "copied"),
    "attention's matrices": (
        "one fused c_attn, and c_proj",
        "transposed: GPT-2 stores (in, out)",
    ),
    "norm": ("nn.LayerNorm, variance divides by n", "copied"),
    "head": (
        "lm_head: logits, log-softmax after it",
        "copied; lm_head gets a bias if the checkpoint has a nonzero one",
    ),
    "tied head": (
        "lm_head may be wte itself",
        "tied where the config says so",
    ),
    "activation": ("GELU by tanh by default", "takes the config's"),
}

# By kind of step: how this style writes the step, where the styles differ.
STEPS = {
    "token": "The line takes the row of `wte` as it is.",
    "position": "`wpe` is a learned table, an nn.Embedding like `wte`.",
    "norm": "The block holds two norms, ln_1 and ln_2, and calls each in "
    "the line that adds a part's output to x.",
    "project": "One matrix `c_attn` computes query, key and value of all "
    "heads in one product; `split` cuts the result in three.",
    "scores": "No line returns the scores: scaled_dot_product_attention "
    "computes Q K\u1d40 inside, and divides it by \u221ad.",
    "mask": "This run builds no mask: `mask` is None. The argument "
    "`is_causal`, True here, makes scaled_dot_product_attention mask the "
    "later positions itself.",
    "probabilities": "scaled_dot_product_attention computes the probabilities "
    "inside and never returns them. The numbers here were computed from its "
    "inputs by the formula.",
    "mix": "scaled_dot_product_attention returns the mixed values and nothing "
    "else.",
    "residual_attention": "A line of the block adds attention's output.",
    "residual_feed_forward": "The block's next line adds the output of "
    "`mlp`, its feed-forward part.",
    "activation": "The activation is an nn.Module that the config names, "
    "GELU by tanh by default.",
    "logits": "`lm_head` has no bias, unless the checkpoint brings one. If "
    "the config ties the weights, its matrix is the token table itself: "
    "W = E.",
    "log_probs": "`log_probs` applies log_softmax to the logits.",
}

# By part: the edits that remove it from a copy (module, old text, new text).
BREAKS = {
    "mask": [
        (
            "attention",
            "mask, is_causal = None, True",
            "mask, is_causal = None, False",
        )
    ],
    "scale": [
        ("attention", "is_causal=is_causal", "is_causal=is_causal, scale=1.0")
    ],
    "positions": [
        (
            "model",
            "self.transformer.wte(idx) + self.transformer.wpe(pos)",
            "self.transformer.wte(idx)",
        )
    ],
    "residual": [
        ("block", "x = x + self.attn(", "x = self.attn("),
        ("block", "x = x + self.mlp(", "x = self.mlp("),
    ],
}

# By part, then by kind of step: how the step runs without the part.
WITHOUT = {
    "mask": {
        "mask": "`mask` is None and `is_causal` is False, so "
        "scaled_dot_product_attention masks nothing: softmax gets the scores "
        "of later positions as well.",
    },
    "scale": {
        "scores": "No line returns the scores: scaled_dot_product_attention "
        "computes Q K\u1d40 inside, and `scale=1.0` leaves it as it is.",
    },
    "positions": {
        "position": "No line reads `wpe` any more.",
        "embedding": "The line adds nothing: x is the token's vector.",
    },
    "residual": {
        "norm": "The line still calls `ln_1`, but does not add to x.",
        "second_norm": "The line still calls `ln_2`, but does not add to x.",
        "residual_attention": "The line sets x to attention's output and adds "
        "nothing.",
        "residual_feed_forward": "The line sets x to the output of `mlp` and "
        "adds nothing.",
    },
}

# The function that adds keys and values to the cache: module, name, lines.
CACHE_SOURCE = (
    "attention",
    "KeyValueCache.append",
    ("self.k[:, :, start", "self.v[:, :, start"),
)


def cached(cache: Any, layer: int) -> tuple[Table, Table]:
    """Return a layer's keys and values."""
    own = cache[layer]
    return own.k[:, :, : own.length], own.v[:, :, : own.length]
