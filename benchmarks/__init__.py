"""Measure the speed of both styles, their peers, and the machine's limit."""

from typing import Literal

# The kinds of runs, defined here so that --help does not import torch.
Kind = Literal["forward", "generate", "train-step"]
STYLES = ("annotated", "mingpt_style")
PEERS = (
    *("transformers", "transformers-eager", "transformers-one-gelu"),
    *("torch-encoder", "x-transformers"),
)
