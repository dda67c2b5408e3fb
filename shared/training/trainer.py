"""Train a model step by step, with evaluations at intervals."""

import time

import msgspec
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config import GPTConfig
from ..generation import eval_mode, generate
from ..protocol import LanguageModel
from ..tokenization.texts import random_batch
from .processes import Processes
from .recipe import Recipe, build_optimizer, generator_for, seed_for


class TrainingFailed(RuntimeError):
    """Raised if the loss or a gradient is NaN or infinite."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """The figures of one step; losses are in nats a token."""

    step: int  # counted from 1
    train_loss: float  # loss of the step's batch, before its update
    tokens_per_second: float  # speed of this step, over all processes
    seconds: float  # seconds since the start of the run, without interruptions
    # mean losses over batches, after the update; None without an evaluation
    train_estimate: float | None = None
    val_loss: float | None = None


class Trainer:
    """A model, its text, its optimizer, and the number of steps so far.

    All random numbers of a step come from seeds that depend on the step's
    number. So a resumed run takes the same steps as one without interruption.
    Dropout's seeds are set in torch's global generator. To change what a step
    does, change `take_step`. To record one more figure of each step, add a
    field to Record.

    Args:
        model: the model, which is trained in place.
        train_ids: ids of the text to train on.
        val_ids: ids of the validation text.
        recipe: the settings of the run.
        processes: the processes that train together.

    Raises:
        ValueError: if a part of the text is shorter than a window, or if the
            processes cannot share a batch evenly.

    Source: the loop of the lecture "Let's build GPT" and of nanoGPT.
    """

    def __init__(
        self,
        model: nn.Module,
        train_ids: Int[Tensor, "tokens"],
        val_ids: Int[Tensor, "val_tokens"],
        recipe: Recipe,
        processes: Processes | None = None,
    ):
        self.processes = processes or Processes()
        if recipe.batch_size % self.processes.count != 0:
            raise ValueError(
                f"a batch of {recipe.batch_size} windows cannot be shared "
                f"evenly by {self.processes.count} processes"
            )
        self.model = model
        if not isinstance(model, LanguageModel):
            raise ValueError(f"{type(model).__name__} is not a language model")
        self.config: GPTConfig = model.config
        self.recipe = recipe
        self.texts = {"train": train_ids, "val": val_ids}
        self.optimizer = build_optimizer(model, recipe)
        self.step = 0  # number of updates so far
        self.seconds = 0.0  # seconds spent so far
        train, val = len(train_ids), len(val_ids)
        block = self.config.block_size
        if min(train, val) <= block:
            raise ValueError(
                f"a text of {train + val} tokens, {train} for training and "
                f"{val} for validation, is too short: a window of {block} "
                f"and its target require {block + 1} in each part"
            )
        self._loss = self.processes.wrap(Loss(model))

    @property
    def done(self) -> bool:
        """Return whether all steps were taken."""
        return self.step >= self.recipe.steps

    def take_step(self) -> Record:
        """Update the weights once; evaluate at intervals and at the end.

        Raises:
            TrainingFailed: if the loss or a gradient is not finite; the
                weights are then unchanged.
        """
        start = time.monotonic()
        number = self.step + 1
        seed = self.recipe.seed
        torch.manual_seed(
            seed_for("dropout", seed, number, self.processes.rank)
        )
        x, y = self._draw("train", generator_for("batch", seed, number))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(x, y)
        train_loss = float(self.processes.mean(loss.detach()))
        _require_finite("loss", train_loss, number)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.recipe.clip
        )
        _require_finite("gradient's norm", float(norm), number)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(number)
        self.optimizer.step()
        self.step = number
        took = time.monotonic() - start
        estimates: dict[str, float] = {}
        if number % self.recipe.eval_interval == 0 or self.done:
            estimates = self.estimate_losses()
            for name, value in estimates.items():
                _require_finite(f"{name} loss", value, number)
        self.seconds += time.monotonic() - start
        tokens = self.recipe.batch_size * x.size(1)
        return Record(
            number,
            train_loss,
            tokens / max(took, 1e-9),
            self.seconds,
            estimates.get("train"),
            estimates.get("val"),
        )

    def estimate_losses(self) -> dict[str, float]:
        """Return the mean loss over batches, for each part of the text.

        The batches are the same at every evaluation, so only the model
        changes. The model runs in eval mode; afterwards it is in its former
        mode. If there are several processes, each takes its share of the rows,
        and all get the same result.
        """
        losses, count = {}, self.recipe.eval_batches
        with eval_mode(self.model), torch.no_grad():
            for name in self.texts:
                drawing = generator_for("eval", self.recipe.seed, name)
                total = 0.0
                for _ in range(count):
                    x, y = self._draw(name, drawing)
                    loss = Loss(self.model)(x, y)
                    total += float(self.processes.mean(loss))
                losses[name] = total / count
        return losses

    def _draw(
        self, name: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw a batch, and take this process's rows of it."""
        size, block = self.recipe.batch_size, self.config.block_size
        x, y = random_batch(self.texts[name], size, block, generator)
        return self.processes.share(x), self.processes.share(y)


def draw_sample(trainer: Trainer, count: int) -> list[int]:
    """Let a trained model go on from the first token of the validation text.

    Returns:
        That first token, then `count` drawn tokens. The same model and seed
        always give the same tokens.
    """
    assert isinstance(trainer.model, LanguageModel)
    start = trainer.texts["val"][:1].reshape(1, 1)
    drawing = torch.Generator(start.device).manual_seed(trainer.recipe.seed)
    row = generate(
        trainer.model, start, count, temperature=1.0, generator=drawing
    )
    return row[0].tolist()


class Loss(nn.Module):
    """The mean negative log-probability of the next tokens.

    It is a module so that DDP can wrap it.
    """

    def __init__(self, model: LanguageModel | nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, x: Int[Tensor, "batch time"], y: Int[Tensor, "batch time"]
    ) -> Float[Tensor, ""]:
        """Return the loss on windows x of a text; y is x one token later."""
        log_probs = self.model.log_probs(x)  # type: ignore[operator]
        return F.nll_loss(log_probs.flatten(0, 1), y.flatten())


def _require_finite(what: str, value: float, step: int) -> None:
    if value - value != 0:  # true for NaN and for infinities
        raise TrainingFailed(f"the {what} is {value} at step {step}")
