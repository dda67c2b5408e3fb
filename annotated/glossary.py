"""This style's names and choices, for views that show two styles."""

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
    "embedding": "One module for tokens, one for positions, in a chain. "
    "Tokens are scaled; positions are sines and cosines, never trained "
    "(from_gpt2 copies a checkpoint's learned table over them).",
    "attention": "Four equal projections, cloned. The formula is a function "
    "of its own: it takes any mask and gives the probabilities back.",
    "feed_forward": "The nonlinearity is a part to put in, by default ReLU. "
    "Dropout sits inside, after it.",
    "block": "A residual connection is an object that wraps any sublayer. "
    "The norm is written out, its eps outside the root.",
    "model": "Parts are handed to parts: a function puts them together, and "
    "no class builds what it holds. The mask travels as an argument.",
    "head": "A module of its own, with a bias, that ends in log-softmax. "
    "Never tied to the embedding.",
}

# How each part is written, and how it takes over a GPT-2 checkpoint's.
WEIGHT_TRANSFER = {
    "token table": ("lut(x) * sqrt(d_model)", "lut = wte / sqrt(d_model)"),
    "position table": (
        "sines and cosines in a buffer, pe",
        "copied into the buffer",
    ),
    "projections": (
        "four cloned linears",
        "c_attn is cut in three; all are transposed",
    ),
    "norm": (
        "a_2 * (x - mean) / (std + eps) + b_2, std with n - 1",
        "a_2 = weight * sqrt(n / (n - 1))",
    ),
    "head": (
        "Generator: a linear map with bias, log-softmax",
        "copied; an absent bias is zeros",
    ),
    "tied head": (
        "never tied: two tensors",
        "the second tensor is filled from wte",
    ),
    "activation": ("ReLU by default", "takes the config's"),
}

# How this style writes a step of a forward pass, where styles differ.
STEPS = {
    "token": "Multiplies the row by sqrt(d_model), as the paper does. "
    "from_gpt2 fills the table `lut` with a checkpoint's rows divided by "
    "sqrt(d_model), so the product is the checkpoint's row.",
    "position": "`pe` is a buffer, which training does not change. A new "
    "model fills it with sines and cosines. When a model is loaded from a "
    "GPT-2 checkpoint, from_gpt2 copies the checkpoint's learned table over "
    "the sines: then `pe` equals the other style's learned table.",
    "norm": "SublayerConnection holds the norm, and wraps it around "
    "any sublayer.",
    "project": "Three of four equal nn.Linear, one each for query, key and "
    "value, applied in turn.",
    "scores": "Divides the queries by sqrt(d_k) first, d_k being the width "
    "of a head, then multiplies with the keys.",
    "mask": "`decode` builds one boolean mask and hands it down to every "
    "layer. `attention` fills the scores with -inf in place, where the mask "
    "is False.",
    "probabilities": "A line of its own. `attention` also returns the "
    "probabilities, so that a reader can look at them.",
    "mix": "A product of two matrices.",
    "residual_attention": "SublayerConnection adds: its x is the input, and "
    "`sublayer` is attention here.",
    "residual_feed_forward": "The same line adds again: `sublayer` is the "
    "feed-forward network here.",
    "activation": "A part handed in from outside.",
    "logits": "Generator is a module of its own, with a bias; its matrix is "
    "never shared with the token table.",
    "log_probs": "The model's own output: Generator ends in log_softmax.",
}
