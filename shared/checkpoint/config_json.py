"""Read and write config.json in the formats of transformers and the kit."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..config import GPTConfig

# Names of fields and activations in transformers' config, with the kit's.
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
# Switches that change the function of GPT-2, with the values they must have.
_SWITCHES = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_OUR_FIELDS = {field.name for field in fields(GPTConfig)}


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of GPTConfig that a config.json determines.

    A file with a model_type is a config that transformers wrote for a GPT-2.
    Any other file is the kit's: it has the fields of GPTConfig, which are also
    in nanoGPT's model_args. A config of transformers has three rates of
    dropout; the first is used.

    Raises:
        ValueError: if the file is not a JSON object, a field is missing or
            unknown, or the model is not GPT-2.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    if "model_type" in content or "n_positions" in content:
        return _read_transformers(content, path)
    return _read_ours(content, path)


def our_config(config: GPTConfig) -> str:
    """Return the text of a config.json of the kit."""
    return json.dumps(asdict(config), indent=2) + "\n"


def transformers_config(config: GPTConfig) -> str:
    """Return the text of the config.json of a GPT2LMHeadModel."""
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
        # not GPT-2's ids, which a smaller vocabulary does not contain
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
    # nanoGPT's model_args also have "bias", which the weights show anyway
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
