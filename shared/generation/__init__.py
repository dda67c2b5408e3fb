"""Generation: from ids to more ids.

    sampling.py      the choice of a token: greedy, temperature, top-k, top-p
    loop.py          tokens appended to a batch or as a stream, from a cache
    streaming.py     ids to text as they come
    cpu_decoding.py  linear layers for a CPU that decodes token by token

Any model that keeps the contract of protocol.py will do.
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
