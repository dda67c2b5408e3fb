"""A GPT decoder in the style of minGPT."""

from .attention import CausalSelfAttention, KeyValueCache
from .block import Block, layer_norm
from .feed_forward import MLP
from .model import GPT, build_model
from .weights import from_gpt2, from_nanogpt, to_gpt2

__all__ = [
    "GPT",
    "MLP",
    "Block",
    "CausalSelfAttention",
    "build_model",
    "from_gpt2",
    "from_nanogpt",
    "to_gpt2",
]

# The parts that implement each concept, in reading order.
COMPONENTS: dict[str, tuple[object, ...]] = {
    "embedding": (GPT.embed,),
    "attention": (CausalSelfAttention, KeyValueCache),
    "feed_forward": (MLP,),
    "block": (layer_norm, Block),
    "model": (GPT,),
    "head": (GPT.log_probs, GPT.next_log_probs),
}

# The submodule whose output is each stage; {i} is the layer.
STAGES = {
    "embedding": "transformer.drop",
    "block.{i}.attention": "transformer.h.{i}.attn",
    "block.{i}.feed_forward": "transformer.h.{i}.mlp",
    "block.{i}": "transformer.h.{i}",
    "final_norm": "transformer.ln_f",
}
