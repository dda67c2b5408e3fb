"""One Transformer block: attention, then the MLP, each with a residual."""

from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from gpt_duet.config import GPTConfig

from .attention import CausalSelfAttention, KeyValueCache
from .feed_forward import MLP


def layer_norm(config: GPTConfig) -> nn.LayerNorm:
    """Build a norm with the config's eps, or else torch's default eps."""
    norm = partial(nn.LayerNorm, config.n_embd)
    return norm() if config.norm_eps is None else norm(eps=config.norm_eps)


class Block(nn.Module):
    """Attention, then an MLP; each normalises its input and adds to x.

    Args:
        config: passed on to the norms, the attention and the MLP.

    Source: minGPT and nanoGPT, model.py; Radford et al. 2019 (GPT-2),
    section 2.3, for the place of the norm.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = layer_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "batch time n_embd"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "batch time n_embd"]:
        """Add attention's output to the residual stream, then the MLP's."""
        x = x + self.attn(self.ln_1(x), cache)
        x = x + self.mlp(self.ln_2(x))
        return x
