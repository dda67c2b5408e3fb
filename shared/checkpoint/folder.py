"""A checkpoint's folder: model.safetensors and config.json, read, written."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config import GPTConfig
from ..files import new_folder
from ..validation import DTYPES
from .config_json import our_config, read_config, transformers_config
from .flat import INDEX, NUMBERS, flat_file
from .gpt2_layout import State, axes, read_gpt2, require_tied, strip
from .other_layouts import (
    bring_to_gpt2,
    count_layers,
    nanogpt_from_gpt2,
    recognise,
    with_prefix,
)
from .weights_file import WEIGHTS, find_weights, read_tensors, require_numbers

CONFIG = "config.json"
# The trained model that comes with the kit: its README says what it reaches.
SMALL_MODEL = Path(__file__).with_name("small_model")
# A tiny one, of Shakespeare's 65 characters: common ground for ports.
TINY_MODEL = Path(__file__).with_name("tiny_model")
TARGETS = ("gpt2", "nanogpt", "flat")
# What a layout is called, and its authors' activation.
_LAYOUTS = {
    "gpt2": ("the GPT-2 layout, as transformers saves it", None),
    "scratch": ("the layout of the post GPT from Scratch", "gelu"),
    "nanogpt": ("a state dict of nanoGPT", "gelu"),
    "mingpt": ("a state dict of minGPT", "gelu_tanh"),
}


@dataclass(frozen=True)
class Checkpoint:
    """Weights in the GPT-2 layout, and what they do not show."""

    state: State  # names without a prefix, always with lm_head.weight
    config: GPTConfig  # sizes, number of heads, activation
    # the layout that was recognised, and where each further fact is from
    notes: tuple[str, ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> State:
        """Return the tensors on a device, in a dtype."""
        return {name: t.to(device, dtype) for name, t in self.state.items()}

    def for_vocabulary(self, n_vocab: int, name: str) -> "Checkpoint":
        """Leave the rows out that only pad the vocabulary to a multiple of 64.

        nanoGPT trains 50,304 rows for GPT-2's 50,257 tokens.

        Raises:
            ValueError: where the two vocabularies differ, with both sizes.
        """
        rows = self.config.vocab_size
        if rows == n_vocab:
            return self
        # a small vocabulary is not padded, it is another one
        if n_vocab < 1000 or rows != -(-n_vocab // 64) * 64:
            raise ValueError(
                f"the tokenizer {name} has {n_vocab} tokens, the checkpoint "
                f"{rows}: choose its own with --tokenizer"
            )
        return self.cut(
            n_vocab, f"{rows - n_vocab} rows that pad the vocabulary left out"
        )

    def cut(self, n_vocab: int, note: str) -> "Checkpoint":
        """Keep the first tokens only: the same function over fewer tokens."""
        rows = ("wte.weight", "lm_head.weight", "lm_head.bias")
        state = {
            name: tensor[:n_vocab] if name in rows else tensor
            for name, tensor in self.state.items()
        }
        config = self.config.replace(vocab_size=n_vocab)
        return Checkpoint(state, config, (*self.notes, note))


def load_checkpoint(
    folder: str | Path,
    *,
    n_head: int | None = None,
    activation: str | None = None,
) -> Checkpoint:
    """Read a checkpoint of transformers, nanoGPT, minGPT or the post.

    Args:
        folder: with model.safetensors, or one other .safetensors, and
            config.json of transformers or of the kit.
        n_head: number of heads, where no config.json says it.
        activation: where no config.json says it; that of nanoGPT, minGPT
            and the post is known.

    Raises:
        ValueError: for a pickle, a damaged file, an unknown layout, shapes
            that do not fit, NaN, a fact that is missing or said twice
            differently.
    """
    folder = Path(folder)
    file = find_weights(folder)
    tensors = _widest(strip(read_tensors(file)))
    require_numbers(file, tensors)
    layout = recognise(tensors)
    state = bring_to_gpt2(tensors, layout)
    wte, head = state.get("wte.weight"), state.get("lm_head.weight")
    tied = wte is not None and (head is None or wte.equal(head))
    if layout == "nanogpt" and not tied:  # nanoGPT always is, minGPT never
        layout = "mingpt"
    title, default_activation = _LAYOUTS[layout]
    given = {"n_head": n_head, "activation": activation}
    facts, note = _read_facts(folder, given, default_activation)
    sizes = _sizes(state)
    config = GPTConfig(**sizes | {"tie_weights": tied} | facts)
    # before the shapes: a slip in config.json is one number
    for name, shown in sizes.items():
        said = getattr(config, name)
        if name == "n_inner":  # None is a width as well
            said, shown = config.inner_size, shown or 4 * config.n_embd
        if said != shown:
            raise ValueError(
                f"{folder / CONFIG} says {name} is {said}, the weights have "
                f"{shown}"
            )
    if not config.tie_weights and head is None:
        raise ValueError(
            "weights do not fit: missing lm_head.weight, which is not tied "
            "to wte.weight"
        )
    state = read_gpt2(state, config)
    if config.tie_weights:
        require_tied(state)
    return Checkpoint(state, config, (title, note))


def save_checkpoint(
    folder: str | Path,
    state: Mapping[str, Tensor],
    config: GPTConfig,
    layout: str = "gpt2",
    others: Mapping[str, str] | None = None,
) -> None:
    """Write weights and config.json into a new folder, whole or not at all.

    Args:
        folder: must not exist, or be empty.
        state: in the GPT-2 layout, as a style's to_gpt2 gives it.
        config: of the same model.
        layout: "gpt2", which transformers loads as a GPT2LMHeadModel;
            "nanogpt", the names and orientation of nanoGPT and minGPT; or
            "flat", numbers in a fixed order for a program in any language.
        others: texts of further files, by name.

    Raises:
        ValueError: for an unknown layout, a folder in the way, a head with
            a bias, which neither layout has, and a tied head that differs.
    """
    if layout not in TARGETS:
        raise ValueError(
            f"unknown layout {layout!r}; known: {', '.join(TARGETS)}"
        )
    state = read_gpt2(state, config)
    bias = state.pop("lm_head.bias", None)
    if bias is not None and bias.any():
        raise ValueError(
            f"the layout {layout} has no lm_head.bias, and this head's is "
            f"up to {bias.abs().max():.3g}: it cannot hold this function"
        )
    if config.tie_weights:
        require_tied(state)
    if layout == "flat":
        numbers, index = flat_file(state, config)
        with new_folder(Path(folder)) as beside:
            (beside / NUMBERS).write_bytes(numbers)
            for name, text in {INDEX: index, **(others or {})}.items():
                (beside / name).write_text(text, encoding="utf-8")
        return
    if config.tie_weights:
        del state["lm_head.weight"]
    if layout == "gpt2":
        tensors, description = with_prefix(state), transformers_config(config)
    else:
        state.setdefault("lm_head.weight", state["wte.weight"])
        tensors, description = nanogpt_from_gpt2(state), our_config(config)
    copies = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with new_folder(Path(folder)) as beside:
        save_file(copies, beside / WEIGHTS, metadata={"format": "pt"})
        for name, text in {CONFIG: description, **(others or {})}.items():
            (beside / name).write_text(text, encoding="utf-8")


def _widest(tensors: State) -> State:
    """Bring all tensors to the widest of their dtypes."""
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise ValueError(f"{name} is {kind}: weights must be float")
    dtypes = (tensor.dtype for tensor in tensors.values())
    widest = reduce(torch.promote_types, dtypes, torch.float16)
    return {name: tensor.to(widest) for name, tensor in tensors.items()}


def _read_facts(
    folder: Path, given: Mapping[str, Any], default_activation: str | None
) -> tuple[dict[str, Any], str]:
    """Return what weights do not show, and a note on where it comes from."""
    path = folder / CONFIG
    facts = read_config(path) if path.is_file() else {}
    origins = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        origin = CONFIG if name in facts else option
        if value is not None and facts.setdefault(name, value) != value:
            raise ValueError(
                f"{path} says {name} is {facts[name]}, {option} says {value}"
            )
        if name == "activation" and facts.get(name) is None:
            facts[name], origin = default_activation, "the layout's default"
        if facts.get(name) is None:
            raise ValueError(
                f"weights do not show {name}, and {folder} has no {CONFIG} "
                f"that does: give {option}"
            )
        origins.append(f"{name} {facts[name]} ({origin})")
    return facts, ", ".join(origins)


def _sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sizes that three shapes show; read_gpt2 checks them all."""
    V, C = axes(state, "wte.weight", 2)
    T, _ = axes(state, "wpe.weight", 2)
    _, inner = axes(state, "h.0.mlp.c_fc.weight", 2)
    return {
        "vocab_size": V,
        "block_size": T,
        "n_layer": count_layers(state),
        "n_embd": C,
        "n_inner": None if inner == 4 * C else inner,
    }
