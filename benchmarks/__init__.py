"""How fast a GPT is: both styles, their peers, and the machine's limit."""

from typing import Literal

# Here, as --help is not to wait for torch.
Kind = Literal["forward", "generate", "train-step"]
STYLES = ("annotated", "mingpt_style")
PEERS = (
    *("transformers", "transformers-eager", "transformers-one-gelu"),
    *("torch-encoder", "x-transformers"),
)
