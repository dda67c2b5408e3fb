"""Weights on disk: layouts, config.json, and from style to style."""

from .folder import (
    Checkpoint,
    convert,
    cut_vocabulary,
    load_checkpoint,
    save_checkpoint,
)

__all__ = [
    "Checkpoint",
    "convert",
    "cut_vocabulary",
    "load_checkpoint",
    "save_checkpoint",
]
