"""The sizes of a GPT, in GPT-2's words."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
}

# n_layer, n_head, n_embd; then vocabulary and block, where the name fixes
# them. Sources: GPT-2 and GPT papers; minGPT's table; the paper's base model.
_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "openai-gpt": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt-mini": {"n_layer": 6, "n_head": 6, "n_embd": 192},
    "gpt-micro": {"n_layer": 4, "n_head": 4, "n_embd": 128},
    "gpt-nano": {"n_layer": 3, "n_head": 3, "n_embd": 48},
    "annotated-base": {
        "n_layer": 6,
        "n_head": 8,
        "n_embd": 512,
        "n_inner": 2048,
    },
}
for _name, _sizes in _PRESETS.items():
    if _name.startswith("gpt2"):
        _sizes |= {"vocab_size": 50257, "block_size": 1024}
        _sizes |= {"tie_weights": True}
_PRESETS["openai-gpt"] |= {"vocab_size": 40478, "block_size": 512}
_PRESETS["openai-gpt"] |= {"tie_weights": True}


@dataclass(frozen=True)
class GPTConfig:
    """What two models must share to be one function, weights apart.

    Attributes:
        vocab_size: number of tokens.
        block_size: longest sequence, in tokens.
        n_layer: number of blocks.
        n_head: number of attention heads in a block.
        n_embd: width of the features, a multiple of n_head, at least 2.
        n_inner: width inside the feed-forward networks; None: 4 * n_embd.
        dropout: probability, from 0 up to but not including 1.
        activation: "relu", "gelu" (exact) or "gelu_tanh" (GPT-2's).
        tie_weights: whether head and token embedding are one matrix, in the
            styles that can tie.
        norm_eps: eps of every norm; None: the norm class's own.

    Raises:
        ValueError: naming the field and the value.

    Source: field names of the GPT-2 configuration.
    """

    vocab_size: int
    block_size: int
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int | None = None
    dropout: float = 0.1
    activation: str = "gelu_tanh"
    tie_weights: bool = False
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no model can be built from."""
        for field in ("vocab_size", "block_size", "n_layer", "n_head"):
            _require_count(field, getattr(self, field), at_least=1)
        _require_count("n_embd", self.n_embd, at_least=2)
        if self.n_inner is not None:
            _require_count("n_inner", self.n_inner, at_least=1)
        if self.n_embd % self.n_head != 0:
            raise ValueError(
                f"n_embd must be a multiple of n_head, "
                f"got n_embd={self.n_embd} and n_head={self.n_head}"
            )
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.activation not in tuple(ACTIVATIONS):
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, "
                f"got {self.activation!r}"
            )
        if not isinstance(self.tie_weights, bool):
            raise ValueError(
                f"tie_weights must be True or False, got {self.tie_weights!r}"
            )
        if self.norm_eps is not None and (
            not _is_number(self.norm_eps) or not 0 <= self.norm_eps < math.inf
        ):
            raise ValueError(
                f"norm_eps must be a number from 0, got {self.norm_eps!r}"
            )

    @property
    def inner_size(self) -> int:
        """Width inside the feed-forward networks."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Return a well-known configuration.

        Args:
            name: one of `preset_names()`.
            **overrides: fields to set otherwise, or that the preset leaves
                open (vocab_size and block_size of all but gpt2* and
                openai-gpt).

        Raises:
            ValueError: for an unknown name, an unknown field, or a field
                that stays open.
        """
        if name not in _PRESETS:
            raise ValueError(
                f"unknown preset {name!r}; known: {', '.join(_PRESETS)}"
            )
        fields = _PRESETS[name] | overrides
        unknown = fields.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        missing = {"vocab_size", "block_size"} - fields.keys()
        if missing:
            raise ValueError(
                f"preset {name!r} leaves open: {', '.join(sorted(missing))}"
            )
        return cls(**fields)

    def replace(self, **changes: Any) -> "GPTConfig":
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def preset_names() -> tuple[str, ...]:
    """Names that GPTConfig.preset knows."""
    return tuple(_PRESETS)


def preset_fields(name: str) -> dict[str, Any]:
    """The fields that a preset fixes."""
    return dict(_PRESETS[name])


def activation_name(activation: Callable[[Tensor], Tensor] | str) -> str:
    """Return the name of an activation given by name, function or module.

    Raises:
        ValueError: for one that GPTConfig has no name for.
    """
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return activation
    if activation is F.relu or type(activation) is nn.ReLU:
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    raise ValueError(
        f"activation must be one of {', '.join(ACTIVATIONS)}, "
        f"or its function or module, got {activation!r}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_count(field: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field} must be a whole number, got {value!r}")
    if value < at_least:
        raise ValueError(f"{field} must be at least {at_least}, got {value}")
    if value >= 2**31:
        raise ValueError(f"{field} must be below 2**31, got {value}")
