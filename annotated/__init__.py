"""A GPT decoder in the style of The Annotated Transformer."""

from .attention import MultiHeadedAttention, attention
from .block import DecoderLayer, SublayerConnection
from .cache import CachedAttention, CachedDecoder
from .embedding import Embeddings, PositionalEncoding
from .feed_forward import PositionwiseFeedForward
from .layers import LayerNorm, clones
from .model import Decoder, DecoderModel, Generator, build_model, make_model
from .weights import from_gpt2, to_gpt2

__all__ = [
    "CachedAttention",
    "CachedDecoder",
    "Decoder",
    "DecoderLayer",
    "DecoderModel",
    "Embeddings",
    "Generator",
    "LayerNorm",
    "MultiHeadedAttention",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "SublayerConnection",
    "attention",
    "build_model",
    "clones",
    "from_gpt2",
    "make_model",
    "to_gpt2",
]

# The parts that implement each concept, in reading order.
COMPONENTS: dict[str, tuple[object, ...]] = {
    "embedding": (Embeddings, PositionalEncoding),
    "attention": (MultiHeadedAttention, attention, CachedAttention),
    "feed_forward": (PositionwiseFeedForward,),
    "block": (LayerNorm, SublayerConnection, DecoderLayer),
    "model": (clones, Decoder, DecoderModel, make_model),
    "head": (Generator,),
}

# The submodule whose output is each stage; {i} is the layer.
STAGES = {
    "embedding": "embed",
    "block.{i}.attention": "decoder.layers.{i}.self_attn",
    "block.{i}.feed_forward": "decoder.layers.{i}.feed_forward",
    "block.{i}": "decoder.layers.{i}",
    "final_norm": "decoder.norm",
}

# Own parts that from_gpt2 replaces, so that styles agree up to rounding.
ORIGINAL_PARTS = {"norm": LayerNorm}
ORIGINAL_PARTS_NOTES = {"norm": "eps outside the root"}
