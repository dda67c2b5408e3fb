"""Generate tokens with any model that implements protocol.py.

sampling.py      choose a token: greedy, temperature, top-k, top-p
loop.py          append tokens to a batch, or stream them, with a cache
streaming.py     turn ids into text as they come
cpu_decoding.py  faster linear layers for a CPU that decodes single tokens
"""

from .cpu_decoding import optimize_for_decoding
from .loop import MAX_NEW_TOKENS, eval_mode, generate, stream_tokens
from .sampling import Sampler
from .streaming import TextStream, text_of

__all__ = [
    "MAX_NEW_TOKENS",
    "Sampler",
    "TextStream",
    "eval_mode",
    "generate",
    "optimize_for_decoding",
    "stream_tokens",
    "text_of",
]
