"""Checkpoints on disk, and models from one style to another.

Tensors are read from safetensors and sizes from JSON, never from a pickle,
which is a program and runs when it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..config import GPTConfig
from ..files import new_folder
from ..protocol import load_style, style_of
from .config_json import our_config, read_config, transformers_config
from .gpt2_layout import State, read_gpt2, require_tied
from .other_layouts import (
    bring_to_gpt2,
    count_layers,
    nanogpt_from_gpt2,
    recognise,
    with_prefix,
)

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TARGETS = ("gpt2", "nanogpt")

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
# Older programs saved their causal masks, some of them as booleans.
_MASKS = (".attn.bias", ".attn.masked_bias", ".attn.mask")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """Weights in the GPT-2 layout, and what they do not show.

    Attributes:
        state: names without a prefix, always with lm_head.weight.
        config: sizes, number of heads, activation.
        told: what was recognised and where each fact comes from, in words.
    """

    state: State
    config: GPTConfig
    told: tuple[str, ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> State:
        """Return the tensors on a device, in a dtype."""
        return {name: t.to(device, dtype) for name, t in self.state.items()}

    def for_vocabulary(self, n_vocab: int, name: str) -> "Checkpoint":
        """Leave the rows out that only pad the vocabulary to a multiple of 64.

        nanoGPT trains 50,304 rows for GPT-2's 50,257 tokens.

        Args:
            n_vocab: of the tokenizer.
            name: of the tokenizer.

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
        note = f"{rows - n_vocab} rows that pad the vocabulary left out"
        return replace(
            self,
            state=cut_vocabulary(self.state, n_vocab),
            config=self.config.replace(vocab_size=n_vocab),
            told=(*self.told, note),
        )


def cut_vocabulary(state: Mapping[str, Tensor], n_vocab: int) -> State:
    """Keep the first tokens only: the same function over fewer tokens.

    Args:
        state: in the GPT-2 layout.
        n_vocab: how many tokens to keep.
    """
    rows = ("wte.weight", "lm_head.weight", "lm_head.bias")
    return {
        name: tensor[:n_vocab] if name in rows else tensor
        for name, tensor in state.items()
    }


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
        activation: where no config.json says it and the layout has no habit.

    Raises:
        ValueError: for a pickle, a damaged file, an unknown layout, shapes
            that do not fit, a fact that is missing or said twice
            differently.
    """
    folder = Path(folder)
    tensors = _read_tensors(_find_weights(folder))
    layout = recognise(tensors)
    state = bring_to_gpt2(tensors, layout)
    wte, head = state.get("wte.weight"), state.get("lm_head.weight")
    tied = wte is not None and (head is None or _equal(wte, head))
    title, habit = _habits(layout, tied)

    facts: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    told = [title]
    if (folder / CONFIG).is_file():
        facts, notes = read_config(folder / CONFIG)
        told += notes
        said_by = dict.fromkeys(facts, CONFIG)
    options = {"n_head": n_head, "activation": activation}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if facts.setdefault(name, value) != value:
            raise ValueError(
                f"{folder / CONFIG} says {name} is {facts[name]}, {option} "
                f"says {value}"
            )
        said_by.setdefault(name, option)
    if habit is not None and facts.get("activation") is None:
        facts["activation"], said_by["activation"] = habit, "its habit"
    _require_told(facts, folder)
    sizes = _sizes(state)
    facts = sizes | {"tie_weights": tied} | facts
    config = GPTConfig(**facts)
    _require_sizes(sizes, config, folder)
    if not config.tie_weights and head is None:
        raise ValueError(
            "weights do not fit: missing lm_head.weight, which is not tied "
            "to wte.weight"
        )
    state = read_gpt2(state, config)
    if config.tie_weights:
        require_tied(state)
    facts_told = (f"{n} {facts[n]} ({said_by[n]})" for n in options)
    return Checkpoint(state, config, (*told, ", ".join(facts_told)))


def save_checkpoint(
    folder: str | Path,
    state: Mapping[str, Tensor],
    config: GPTConfig,
    layout: str = "gpt2",
) -> None:
    """Write weights and config.json into a new folder, whole or not at all.

    Args:
        folder: must not exist, or be empty.
        state: in the GPT-2 layout, as a style's to_gpt2 gives it.
        config: of the same model.
        layout: "gpt2", which transformers loads as a GPT2LMHeadModel, or
            "nanogpt", the names and orientation of nanoGPT and minGPT.

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
        (beside / CONFIG).write_text(description, encoding="utf-8")


def convert(model: nn.Module, style: str) -> nn.Module:
    """Rebuild a model in another style, through the GPT-2 layout.

    Args:
        model: of any style.
        style: name of the style's package.

    Returns:
        A model with copies of the weights and the same config, in the same
        train or eval mode.

    Raises:
        ValueError: where the model is of no style, or does not fit.
    """
    state = style_of(model).to_gpt2(model)
    config = model.config
    assert isinstance(config, GPTConfig)
    return load_style(style).from_gpt2(state, config).train(model.training)


def _find_weights(folder: Path) -> Path:
    if folder.is_file():
        _refuse_pickle(folder)
        raise ValueError(f"{folder} is a file: give its folder")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    files = sorted(file for file in folder.iterdir() if file.is_file())
    found = [file for file in files if file.suffix == ".safetensors"]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{folder} has {len(found)} .safetensors files and none is named "
            f"{WEIGHTS}: join them, for instance with save_pretrained("
            "max_shard_size=...)"
        )
    for file in files:
        _refuse_pickle(file)
    raise ValueError(f"{folder} has no {WEIGHTS}")


def _refuse_pickle(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(9)
    # Safetensors begins with the length of its header, which can look like
    # a pickle's first bytes; the header itself begins with a brace.
    safe = start[4:] == b"\0\0\0\0{"
    zipped = start.startswith(b"PK\3\4")
    raw = start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    if not safe and (zipped or raw or file.suffix in _PICKLE_SUFFIXES):
        raise ValueError(
            f"{file} is a pickle, a program that runs when it is read: save "
            "the state dict with safetensors.torch.save_file instead"
        )


def _read_tensors(file: Path) -> State:
    _refuse_pickle(file)
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"{file} is damaged, or not a safetensors file: {error}"
        ) from None
    tensors = {k: v for k, v in tensors.items() if not k.endswith(_MASKS)}
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{name} is {kind}: weights must be float")
    dtypes = (tensor.dtype for tensor in tensors.values())
    widest = reduce(torch.promote_types, dtypes, torch.float16)
    return {name: tensor.to(widest) for name, tensor in tensors.items()}


def _habits(layout: str, tied: bool) -> tuple[str, str | None]:
    """What a layout is called, and its author's activation."""
    if layout == "gpt2":
        return "the GPT-2 layout, as transformers saves it", None
    if layout == "scratch":
        return "the layout of the post GPT from Scratch", "gelu"
    if tied:  # as nanoGPT always is, and minGPT never
        return "a state dict of nanoGPT", "gelu"
    return "a state dict of minGPT", "gelu_tanh"


def _require_told(facts: Mapping[str, Any], folder: Path) -> None:
    wanted = ("n_head", "activation")
    missing = [name for name in wanted if facts.get(name) is None]
    if missing:
        options = " and ".join(f"--{n.replace('_', '-')}" for n in missing)
        there = (folder / CONFIG).is_file()
        raise ValueError(
            f"weights do not show {' and '.join(missing)}, and {folder} has "
            f"{'nothing about it in its' if there else 'no'} {CONFIG}: give "
            f"{options}"
        )


def _require_sizes(
    sizes: Mapping[str, Any], config: GPTConfig, folder: Path
) -> None:
    """Compare sizes before shapes: a slip in config.json is one number."""
    shown = GPTConfig(**sizes, n_head=1)
    for name in (*sizes, "inner_size"):
        said, has = getattr(config, name), getattr(shown, name)
        if said != has and name != "n_inner":
            raise ValueError(
                f"{folder / CONFIG} says "
                f"{'n_inner' if name == 'inner_size' else name} is {said}, "
                f"the weights have {has}"
            )


def _sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What three shapes show; read_gpt2 looks at all of them."""
    shapes = {}
    for name in ("wte.weight", "wpe.weight", "h.0.mlp.c_fc.weight"):
        if name not in state:
            raise ValueError(f"weights do not fit: missing {name}")
        shapes[name] = tuple(state[name].shape)
        if len(shapes[name]) != 2:
            raise ValueError(f"{name} has shape {shapes[name]}, not 2 axes")
    (V, C), (T, _), (_, inner) = shapes.values()
    return {
        "vocab_size": V,
        "block_size": T,
        "n_layer": count_layers(state),
        "n_embd": C,
        "n_inner": None if inner == 4 * C else inner,
    }


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.equal(b)
