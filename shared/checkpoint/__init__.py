"""Checkpoints: read and write weights, and convert them between styles.

    gpt2_layout.py    GPT-2's names and shapes, in which the styles exchange
                      weights
    other_layouts.py  converts other layouts, such as nanoGPT's
    config_json.py    config.json of transformers and of the kit
    weights_file.py   model.safetensors; pickles are refused
    flat.py           numbers in a fixed order, for ports in any language
    folder.py         reads and writes the folder of a checkpoint
    convert.py        rebuilds a model of one style in another
    small_model/      the small trained model that comes with the kit
    tiny_model/       a tiny model of 65 characters, also in the flat layout

The weights.py of each style reads and writes GPT-2's layout.
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
