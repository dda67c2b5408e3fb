"""Makers of an empty cache: methods, classes, and their arguments."""

import inspect
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..model.sizes import CONFIGS, declared
from ..subject import Subject

# Methods that return an empty cache, make room inside, or empty it again.
WORD = r"_(kv_?)?(cache|caches|state|states|hidden|memory|mems)"
MAKES = re.compile(rf"(init|initial|make|new|create|empty|get){WORD}")
SETUP = re.compile(rf"(setup|set|init|enable|allocate|build|make){WORD}")
RESET = re.compile(rf"(reset|clear|empty|flush){WORD}")
# Sizes that a cache is made with, by the names of arguments and attributes.
SIZES = (
    ("n_kv_head", "n_kv_heads", "num_kv_heads", "num_key_value_heads"),
    ("n_head", "n_heads", "num_heads", "heads", "num_attention_heads"),
    ("n_layer", "n_layers", "num_layers", "layers", "num_hidden_layers"),
    ("n_embd", "d_model", "dim", "emb_dim", "hidden_size", "embed_dim"),
)
ROWS = ("batch", "batch_size", "max_batch_size", "bsz", "rows")
LENGTHS = (
    *("length", "seq_len", "max_seq_len", "max_seq_length", "max_length"),
    *("max_seqlen", "decoder_max_seq_len"),
)
WIDTHS = ("size", "head_dim", "head_size", "d_head", "d_k", "dim_head")


@dataclass
class InferenceParams:
    """A cache that the caller makes, and counts the tokens of."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None


def methods_of(model: Any) -> dict[str, Any]:
    """Return a model's own methods that have to do with a cache."""
    found = {}
    for name in sorted(set(dir(type(model))) - set(dir(nn.Module))):
        if any(p.fullmatch(name) for p in (MAKES, SETUP, RESET)):
            with suppress(Exception):  # a property of the user's
                found[name] = getattr(model, name)
    return {name: m for name, m in found.items() if inspect.ismethod(m)}


def makers_of(model: Any) -> dict[str, Any]:
    """Return what makes a cache: methods, and classes of the model's files.

    The classes may be defined or imported there. The names are those that its
    forward sees: the module itself may be put away (see `Alone`).
    """
    found = methods_of(model).items()
    makers = {name: m for name, m in found if MAKES.fullmatch(name)}
    for kind in reversed(type(model).__mro__):
        if not kind.__module__.startswith("torch."):
            names = getattr(vars(kind).get("forward"), "__globals__", {})
            makers |= {
                name: value
                for name, value in names.items()
                if isinstance(value, type) and "cache" in name.lower()
            }
    return makers


def layers_of(model: Any) -> int:
    """Return how many layers a model has: as it says, or its longest list."""
    said = declared(model, SIZES[2])
    modules = model.modules() if isinstance(model, nn.Module) else ()
    lists = [len(m) for m in modules if isinstance(m, nn.ModuleList)]
    return said.value if said else max(lists, default=1)


def fill(function: Any, subject: Subject, model: Any, rows: int) -> Any:
    """Call what makes a cache, each argument filled by its name.

    Raises:
        ValueError: for an argument without a default that has no known name.
    """
    weights: Any = getattr(model, "parameters", list)()
    weight = next(iter(weights), torch.empty(0))
    known: dict[str, Any] = dict.fromkeys(ROWS, rows)
    known |= dict.fromkeys(LENGTHS, subject.block_size)
    known |= {"dtype": weight.dtype, "device": weight.device}
    known |= dict.fromkeys(SIZES[2], layers_of(model)) | {"model": model}
    known |= {c: getattr(model, c) for c in CONFIGS if hasattr(model, c)}
    heads = declared(model, SIZES[1])
    pairs = declared(model, SIZES[0]) or heads
    if heads and pairs:
        known |= dict.fromkeys((*SIZES[0], *SIZES[1]), pairs.value)
        width = declared(model, SIZES[3])
        own = declared(model, WIDTHS[1:])
        if own or width:
            size = own.value if own else (width or heads).value // heads.value
            known |= dict.fromkeys(WIDTHS, size)
    given = {}
    for name, p in inspect.signature(function).parameters.items():
        if name in known and (
            p.default is p.empty or name in (*ROWS, *LENGTHS, "dtype")
        ):
            given[name] = known[name]
        elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            raise ValueError(
                f"{getattr(function, '__name__', function)} takes {name}, "
                f"whose value is not known"
            )
    return function(**given)
