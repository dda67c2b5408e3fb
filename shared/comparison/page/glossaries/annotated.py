"""What the page says of the style of The Annotated Transformer."""

# A common term, and the names that stand for it in the source: those that
# the values of a run do not show.
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

# What this style chose, where the mathematics leaves a choice.
CHOICES = {
    "embedding": "Two modules run in a chain, one for tokens and one for "
    "positions. Token vectors are scaled by sqrt(d_model). The position table "
    "`pe` is a buffer, which training does not change: a new model fills it "
    "with sines and cosines; here `from_gpt2` has copied the checkpoint's "
    "learned table into it.",
    "attention": "A list holds four nn.Linear of one shape: the first three "
    "make query, key and value, the fourth joins the heads. The formula is a "
    "function of its own, which takes any mask and returns the "
    "probabilities, too.",
    "feed_forward": "The activation is an argument of the class: ReLU by "
    "default, in this run the config's. Dropout follows it.",
    "block": "A residual connection is an object that wraps any sublayer. "
    "The style's own `LayerNorm` writes the formula out and divides by "
    "sqrt(variance) + eps; in this run `from_gpt2` has put nn.LayerNorm "
    "in its place.",
    "model": "A function builds the parts and passes them to each other; no "
    "class builds its own attention, feed-forward network or embedding. The "
    "mask travels as an argument.",
    "head": "A module of its own, `Generator`, computes the scores "
    "x W\u1d40 + b, then their log-softmax. Its matrix is never tied to the "
    "token table.",
}

# How each part is written, and how it takes over a GPT-2 checkpoint's.
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

# How this style writes a step of a forward pass, where styles differ.
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
    "probabilities": "softmax has a line of its own. `attention` also returns "
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
