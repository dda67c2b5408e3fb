"""From ids to more ids: sampled, streamed, read with a cache."""

from .streaming import (
    Sampler,
    TextStream,
    eval_mode,
    generate,
    generate_rows,
    stream_tokens,
)

__all__ = [
    "Sampler",
    "TextStream",
    "eval_mode",
    "generate",
    "generate_rows",
    "stream_tokens",
]
