"""Training: a recipe, a trainer, the folder of a run."""

from .recipe import Recipe
from .trainer import Record, Trainer, TrainingFailed

__all__ = [
    "Recipe",
    "Record",
    "Trainer",
    "TrainingFailed",
]
