"""config.json: transformers' own for GPT-2, and the kit's."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..config import GPTConfig

# transformers' names, and ours.
_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "block_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
# Switches that make another function of GPT-2, and how they must stand.
_SWITCHES = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_OUR_FIELDS = {field.name for field in fields(GPTConfig)}


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of GPTConfig that a config.json fixes.

    It is transformers' for GPT-2 (it has a model_type), or the kit's own:
    the fields of GPTConfig; nanoGPT's model_args will do. Of transformers'
    three rates of dropout the first is taken.

    Raises:
        ValueError: for what is no JSON object, a field that is missing or
            unknown, and a model that is not GPT-2.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    if "model_type" in content or "n_positions" in content:
        return _read_transformers(content, path)
    return _read_ours(content, path)


def our_config(config: GPTConfig) -> str:
    """Return a config.json of the kit's own."""
    return json.dumps(asdict(config), indent=2) + "\n"


def transformers_config(config: GPTConfig) -> str:
    """Return the config.json of a GPT2LMHeadModel."""
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    content = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "n_inner": config.n_inner,
        "activation_function": names[config.activation],
        "layer_norm_epsilon": (
            1e-5 if config.norm_eps is None else config.norm_eps
        ),
        **dict.fromkeys(_DROPOUTS, config.dropout),
        "tie_word_embeddings": config.tie_weights,
        # GPT-2's own ids of these lie outside a smaller vocabulary
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return json.dumps(content, indent=2) + "\n"


def _read_transformers(content: dict[str, Any], path: Path) -> dict[str, Any]:
    _require(content, path, "model_type", *_SIZES, "activation_function")
    if content["model_type"] != "gpt2":
        raise ValueError(
            f"{path} is of a {content['model_type']!r} model, not of gpt2"
        )
    for switch, must in _SWITCHES.items():
        if content.get(switch, must) is not must:
            raise ValueError(
                f"{path} sets {switch} to {content[switch]}, which is not "
                "this GPT-2"
            )
    named = content["activation_function"]
    if not isinstance(named, str) or named not in _ACTIVATIONS:
        raise ValueError(
            f"{path} has activation_function {named!r}; known: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    found = {ours: content[theirs] for theirs, ours in _SIZES.items()}
    return found | {
        "n_inner": content.get("n_inner"),
        "activation": _ACTIVATIONS[named],
        "norm_eps": content.get("layer_norm_epsilon", 1e-5),
        "dropout": content.get(_DROPOUTS[0], 0.1),
        "tie_weights": content.get("tie_word_embeddings", True),
    }


def _read_ours(content: dict[str, Any], path: Path) -> dict[str, Any]:
    _require(content, path, *_SIZES.values())
    # nanoGPT's model_args say whether there are biases; the weights do as well
    unknown = content.keys() - _OUR_FIELDS - {"bias"}
    if unknown:
        raise ValueError(
            f"{path} has unknown fields: {', '.join(sorted(unknown))}"
        )
    return {k: v for k, v in content.items() if k in _OUR_FIELDS}


def _require(content: dict[str, Any], path: Path, *names: str) -> None:
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}")
