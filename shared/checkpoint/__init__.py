"""Checkpoints: weights on disk, and from one style to another.

    gpt2_layout.py    GPT-2's names and shapes, in which the styles exchange
                      weights
    other_layouts.py  nanoGPT's, minGPT's and the post's, to and from GPT-2's
    config_json.py    config.json, transformers' and the kit's own
    weights_file.py   model.safetensors; pickles are refused
    flat.py           numbers in a fixed order, for ports in any language
    folder.py         a checkpoint's folder, read and written
    convert.py        a model of one style, rebuilt in another
    small_model/      the small trained model that comes with the kit
    tiny_model/       a tiny one of 65 characters, also in the flat layout

Each style's own weights.py takes GPT-2's layout in, and writes it.
"""

from .convert import convert, in_gpt2_layout
from .folder import (
    SMALL_MODEL,
    TINY_MODEL,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from .gpt2_layout import State

__all__ = [
    "SMALL_MODEL",
    "TINY_MODEL",
    "Checkpoint",
    "State",
    "convert",
    "in_gpt2_layout",
    "load_checkpoint",
    "save_checkpoint",
]
