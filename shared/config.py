"""Set the sizes of a GPT, under GPT-2's names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .validation import is_number, whole_number


def _module(name: str, **settings: Any) -> Any:
    """Build a module of torch. Import torch late, so that --help is fast."""
    from torch import nn

    return getattr(nn, name)(**settings)


ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "relu": partial(_module, "ReLU"),
    "gelu": partial(_module, "GELU"),
    "gelu_tanh": partial(_module, "GELU", approximate="tanh"),
}


def _preset(
    n_layer: int, n_head: int, n_embd: int, **others: int
) -> dict[str, Any]:
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return sizes | others


_GPT2 = {"vocab_size": 50257, "block_size": 1024, "tie_weights": True}
_GPT1 = {"vocab_size": 40478, "block_size": 512, "tie_weights": True}
# The fields of each preset, by its name. Sources: the GPT-2 and GPT papers;
# minGPT's table; the base model of "Attention Is All You Need".
# tests/running/test_config.py lists the presets too; the benchmark's shapes S1
# to S3 are in benchmarks/plan.py.
_PRESETS = {
    "gpt2": _preset(12, 12, 768, **_GPT2),
    "gpt2-medium": _preset(24, 16, 1024, **_GPT2),
    "gpt2-large": _preset(36, 20, 1280, **_GPT2),
    "gpt2-xl": _preset(48, 25, 1600, **_GPT2),
    "openai-gpt": _preset(12, 12, 768, **_GPT1),
    "gpt-mini": _preset(6, 6, 192),
    "gpt-micro": _preset(4, 4, 128),
    "gpt-nano": _preset(3, 3, 48),
    "annotated-base": _preset(6, 8, 512, n_inner=2048),
}
# The least value of each field that is a whole number.
_LEAST = {
    "vocab_size": 1,
    "block_size": 1,
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 2,  # the LayerNorm of annotated divides by n - 1
    "n_inner": 1,
}


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and options that models must share to compute the same.

    Attributes:
        vocab_size: number of tokens.
        block_size: longest sequence, in tokens.
        n_layer: number of blocks.
        n_head: number of attention heads in a block.
        n_embd: width of the features, a multiple of n_head, at least 2.
        n_inner: width inside the feed-forward networks; None means 4 * n_embd.
        dropout: probability of dropout, at least 0 and less than 1.
        activation: "relu", "gelu" (exact) or "gelu_tanh" (GPT-2's).
        tie_weights: whether head and token embedding are one matrix, in
            styles that support it.
        norm_eps: epsilon of every norm; None is the default of its class.

    Raises:
        ValueError: for an invalid field; the message has its name and value.

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
        """Raise ValueError for invalid fields; accept NumPy's numbers."""
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if field == "n_inner" and value is None:
                continue
            number = whole_number(field, value, least, at_most=2**31 - 1)
            object.__setattr__(self, field, number)
        if self.n_embd % self.n_head != 0:
            raise ValueError(
                f"n_embd must be a multiple of n_head, "
                f"got n_embd={self.n_embd} and n_head={self.n_head}"
            )
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        object.__setattr__(self, "dropout", float(self.dropout))
        if self.activation not in tuple(ACTIVATIONS):
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, "
                f"got {self.activation!r}"
            )
        if not isinstance(self.tie_weights, bool):
            raise ValueError(
                f"tie_weights must be True or False, got {self.tie_weights!r}"
            )
        if self.norm_eps is not None:
            if not is_number(self.norm_eps) or self.norm_eps < 0:
                raise ValueError(
                    f"norm_eps must be a number of at least 0, got "
                    f"{self.norm_eps!r}"
                )
            object.__setattr__(self, "norm_eps", float(self.norm_eps))

    @property
    def inner_size(self) -> int:
        """Return the width inside the feed-forward networks."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Return the configuration of a well-known model.

        Args:
            name: one of `preset_names()`.
            **overrides: fields that replace the preset's or that it does not
                set. Only the presets gpt2* and openai-gpt set vocab_size and
                block_size.

        Raises:
            ValueError: for an unknown name, an unknown field, or a missing
                field.
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
                f"preset {name!r} does not set {', '.join(sorted(missing))}"
            )
        return cls(**fields)

    def replace(self, **changes: Any) -> "GPTConfig":
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def preset_names() -> tuple[str, ...]:
    """Return the names that GPTConfig.preset knows."""
    return tuple(_PRESETS)


def preset_fields(name: str) -> dict[str, Any]:
    """Return the fields that a preset sets."""
    return dict(_PRESETS[name])


def activation_name(activation: Callable[..., Any] | str) -> str:
    """Return the name of an activation given by name, function or module.

    Raises:
        ValueError: for an activation that GPTConfig has no name for.
    """
    import torch.nn.functional as F
    from torch import nn

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
