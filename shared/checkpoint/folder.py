"""Read and write a checkpoint: a folder of weights and config.json."""

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
# The trained model that comes with the kit: its README has its losses.
SMALL_MODEL = Path(__file__).with_name("small_model")
# A tiny model with a vocabulary of 65 characters, for comparison with ports.
TINY_MODEL = Path(__file__).with_name("tiny_model")
TARGETS = ("gpt2", "nanogpt", "flat")
# By layout: its name for a reader, and the activation of its authors' code.
_LAYOUTS = {
    "gpt2": ("the GPT-2 layout, as transformers saves it", None),
    "scratch": ("the layout of the post GPT from Scratch", "gelu"),
    "nanogpt": ("a state dict of nanoGPT", "gelu"),
    "mingpt": ("a state dict of minGPT", "gelu_tanh"),
}


@dataclass(frozen=True)
class Checkpoint:
    """Weights in the GPT-2 layout, and the facts that weights do not show."""

    # tensors by name (without a prefix), always with lm_head.weight
    state: State
    config: GPTConfig  # the model's sizes, number of heads, activation, ...
    # the layout that was recognised, and the sources of other facts
    notes: tuple[str, ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> State:
        """Return the tensors on a device, in a dtype."""
        return {name: t.to(device, dtype) for name, t in self.state.items()}

    def for_vocabulary(self, n_vocab: int, name: str) -> "Checkpoint":
        """Leave out the rows that only pad the vocabulary to a multiple of 64.

        nanoGPT trains 50,304 rows for GPT-2's 50,257 tokens.

        Raises:
            ValueError: for any other difference of sizes; it names both.
        """
        rows = self.config.vocab_size
        if rows == n_vocab:
            return self
        # not padding to a multiple of 64, so the vocabularies differ
        if n_vocab < 1000 or rows != -(-n_vocab // 64) * 64:
            raise ValueError(
                f"the tokenizer {name} has {n_vocab} tokens, the checkpoint "
                f"{rows}: choose its own with --tokenizer"
            )
        return self.cut(
            n_vocab, f"{rows - n_vocab} rows that pad the vocabulary left out"
        )

    def cut(self, n_vocab: int, note: str) -> "Checkpoint":
        """Keep only the first `n_vocab` tokens; their logits do not change."""
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
    """Read a checkpoint of transformers, nanoGPT, minGPT or GPT from Scratch.

    Args:
        folder: folder with model.safetensors, or one other .safetensors
            file, and a config.json of transformers or of the kit.
        n_head: number of heads, if no config.json has it.
        activation: activation, if no config.json has it. It is known for
                nanoGPT, minGPT and GPT from Scratch.

    Raises:
        ValueError: for a pickle, a damaged file, an unknown layout, shapes
            that do not fit, or NaN; or if n_head, the activation or a size is
            missing, or is given twice with different values.
    """
    folder = Path(folder)
    file = find_weights(folder)
    tensors = _widest(strip(read_tensors(file)))
    require_numbers(file, tensors)
    layout = recognise(tensors)
    state = bring_to_gpt2(tensors, layout)
    wte, head = state.get("wte.weight"), state.get("lm_head.weight")
    tied = wte is not None and (head is None or wte.equal(head))
    if layout == "nanogpt" and not tied:  # minGPT never ties its head
        layout = "mingpt"
    title, default_activation = _LAYOUTS[layout]
    given = {"n_head": n_head, "activation": activation}
    facts, note = _read_facts(folder, given, default_activation)
    sizes = _sizes(state)
    config = GPTConfig(**sizes | {"tie_weights": tied} | facts)
    # compare the config's sizes with those that the shapes show; an error
    # names the first that differs
    for name, shown in sizes.items():
        said = getattr(config, name)
        if name == "n_inner":  # n_inner None means 4 * n_embd
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
    """Write weights and config.json into a new folder: all, or nothing.

    Args:
        folder: a folder that does not exist, or is empty.
        state: weights in the GPT-2 layout, as a style's to_gpt2 returns.
        config: config of the model with these weights.
        layout: "gpt2", which transformers loads as a GPT2LMHeadModel;
            "nanogpt", the names and orientation of nanoGPT and minGPT; or
            "flat", numbers in a fixed order for a program in any language.
        others: texts of other files to write, by name.

    Raises:
        ValueError: for an unknown layout, an existing folder, a head with a
            bias (which no layout has), or a tied head that differs.
    """
    if layout not in TARGETS:
        raise ValueError(
            f"unknown layout {layout!r}; known: {', '.join(TARGETS)}"
        )
    state = read_gpt2(state, config)
    bias = state.pop("lm_head.bias", None)
    if bias is not None and bias.any():
        raise ValueError(
            f"the layout {layout} cannot store lm_head.bias, and this head "
            f"has one of up to {bias.abs().max():.3g}"
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
    """Convert all tensors to the widest dtype that one of them has."""
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
    """Return the facts that weights do not show, and where they come from."""
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
                f"with it: give {option}"
            )
        origins.append(f"{name} {facts[name]} ({origin})")
    return facts, ", ".join(origins)


def _sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sizes that three tensors' shapes and the names show."""
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
