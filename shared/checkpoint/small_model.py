"""The small trained model that comes with the kit.

Four layers, 128 wide, a block of 128, the kit's own 1,024 tokens: trained on
Python's documentation by `python -m gpt_duet.training.make_small_model`. Its
folder, small_model/, says what it reaches.
"""

from pathlib import Path

from .folder import Checkpoint, load_checkpoint

SMALL_MODEL = Path(__file__).with_name("small_model")


def load_small_model() -> Checkpoint:
    """Return the small trained model; ValueError where it is damaged."""
    return load_checkpoint(SMALL_MODEL)
