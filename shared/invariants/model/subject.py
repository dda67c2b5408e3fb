"""The model under test, as the checks see it."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import SkipCheck, UnusableModel, asked, sentence
from .building import Builder, Model, called_modules, name_of
from .calling import MASK, Caller, caller_of
from .probing import probe
from .randomness import isolated, seed_all
from .sizes import LENGTH, VOCABULARY, choose_sizes, declared
from .threads import few_threads

HEAVY = 2_000_000  # parameters: from here on fewer long sequences are tried
OUTPUTS = ("auto", "logits", "log_probs")


class Subject:
    """A language model that checks can build anew, call, and read.

    Args: as for `check_model`.

    Attributes:
        builder: builds the model anew.
        caller: calls it as its signature asks.
        reader: finds the scores in what it answers.
        name: of the model's class, or of the function.
        vocab_size: number of tokens.
        block_size: longest sequence that is tried.
        limit: the longest sequence as the model declares it, or None.
        is_module: whether it is an nn.Module.
        parameters: how many numbers it learns; 0 for a function.
        heavy: whether these are so many that calls are spared.
        says_log_probs: whether its scores are said to be normalised.
        notes: what the reader of a report should know.
        told: the check that told a cause of failures, by the cause.

    Raises:
        UnusableModel: a ValueError, in one line, for what cannot be built,
            called or read; the user's own exception is its cause.
    """

    def __init__(
        self,
        model_or_factory: Any,
        *,
        vocab_size: int | None = None,
        block_size: int | None = None,
        outputs: str = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        if outputs not in OUTPUTS:
            raise ValueError(
                f"outputs must be one of {', '.join(OUTPUTS)}, got {outputs!r}"
            )
        self.seed = seed
        self.notes: list[str] = []
        self.told: dict[str, str] = {}
        self.builder = Builder(model_or_factory, seed, device, self.notes)
        model = self.builder.build()
        self.is_module = isinstance(model, nn.Module)
        self.parameters = 0
        if isinstance(model, nn.Module):
            self.parameters = sum(p.numel() for p in model.parameters())
        self.heavy = self.parameters > HEAVY
        self.name = name_of(model_or_factory) or name_of(model) or "model"
        self.vocab_size, self.block_size = choose_sizes(
            model, self.name, vocab_size, block_size, self.notes
        )
        self.limit = declared(model, LENGTH)
        with called_modules() as called:
            self.caller, self.reader = probe(
                partial(self._ask, model),
                caller_of(model, log_probs=outputs != "logits"),
                self.vocab_size,
                self.block_size,
                padded=declared(model, VOCABULARY) is not None,
            )
        self.builder.require_own_modules(model, called)
        self.says_log_probs = (
            outputs == "log_probs"
            or self.caller.method is not None
            or (outputs == "auto" and "log_probs" in self.reader.path)
        )
        if self.reader.form.axes != (0, 1, 2):
            self.notes.append(f"the scores are read as {self.reader.form}")
        if self.caller.with_targets:
            name = self.caller.target_name
            self.notes.append(
                f"without {name} the model answers for fewer positions: it "
                f"is called with {name}, all 0"
            )
        self._double: dict[bool, bool] = {}

    def _ask(self, model: Model, caller: Caller, batch: int, time: int) -> Any:
        """Call a model in eval mode, and leave its mode as it was."""
        training = getattr(model, "training", False)
        with isolated(self.seed), torch.no_grad():
            tokens = torch.randint(self.vocab_size, (batch, time))
            if isinstance(model, nn.Module):
                model.eval()
            try:
                return caller.call(model, tokens.to(self.device))
            except Exception as error:
                raise UnusableModel(
                    f"{self.name} raised {sentence(error)} on tokens of "
                    f"shape {(batch, time)}"
                ) from error
            finally:
                if isinstance(model, nn.Module):
                    model.train(training)

    @property
    def device(self) -> torch.device | None:
        """Where the model is built, and its tokens are moved to."""
        return self.builder.device

    def few_threads(
        self, count: int | None = None
    ) -> AbstractContextManager[int]:
        """Run on this many threads inside; None: on one if it is small."""
        return few_threads(self.parameters, self.block_size, count)

    def generator(self) -> torch.Generator:
        """Return a new generator of random numbers, with the seed."""
        return torch.Generator().manual_seed(self.seed)

    def build(self, seed: int | None = None) -> Model:
        """Return the model anew; seed is that of its weights, if another."""
        return self.builder.build(seed)

    def build_module(self, for_a_function: str) -> nn.Module:
        """Return the model anew, to be changed.

        Raises:
            SkipCheck: with the reason given for a function; or where the
                model cannot be copied.
        """
        model = self.build()
        if not isinstance(model, nn.Module):
            raise SkipCheck(for_a_function)
        if not self.builder.can_copy:
            raise SkipCheck("the model cannot be copied")
        return model

    def precise(self, masked: bool = False) -> Model:
        """Return the model anew, in float64 where it can be."""
        return self.doubled(self.build(), masked)

    def doubled(self, model: Model, masked: bool = False) -> Model:
        """Turn a model that was built into float64, where it can be.

        Args:
            model: changed in place.
            masked: whether it is to be called with an attention mask.
        """
        if not isinstance(model, nn.Module) or not self.builder.can_copy:
            return model
        if masked not in self._double:
            self._double[masked] = self._holds_in_double(masked)
        return model.double() if self._double[masked] else model

    def _holds_in_double(self, masked: bool) -> bool:
        """Whether a copy in float64 answers in it, and with numbers.

        The lowest float64 in a mask, say, is minus infinity to a softmax in
        float32.
        """
        tokens = torch.zeros(1, min(4, self.block_size), dtype=torch.long)
        hidden = int(masked and tokens.size(1) > 1)
        mask = torch.ones_like(tokens) if masked else None
        if mask is not None:
            mask[:, :hidden] = 0

        def answer(model: nn.Module) -> Tensor:
            return self.scores(model, tokens, mask=mask)[:, hidden:]

        try:
            scores = answer(self.build_module("").double())
        except Exception:  # check_dtype says so; the others do without
            return False
        if scores.dtype != torch.float64:
            return False
        if bool(torch.isfinite(scores).all()):
            return True
        if not bool(torch.isfinite(answer(self.build_module(""))).all()):
            return True
        how = " with a left-padded attention mask" if masked else ""
        self.notes.append(
            f"in float64 the scores are NaN or infinite{how}, in the model's "
            f"own precision they are not: it is judged in that"
        )
        return False

    def scores(
        self,
        model: Model,
        tokens: Int[Tensor, "batch time"],
        *,
        training: bool = False,
        grad: bool = False,
        seed: int | None = None,
        mask: Int[Tensor, "batch time"] | None = None,
        strict: bool = False,
    ) -> Float[Tensor, "batch time vocab"]:
        """Call a model and return its scores in the common form.

        Args:
            model: as `build` returned it, or changed.
            tokens: ids, on any device.
            training: whether in train mode.
            grad: whether gradients are recorded.
            seed: of the global generators; None: they go on as they are.
            mask: the attention mask, for a caller that takes one.
            strict: whether nothing is mended: see `Reader.read`.

        Raises:
            ModelRaised: with the model's own exception as its cause, or for
                an answer without scores of the right shape.
        """
        if isinstance(model, nn.Module) and model.training != training:
            model.train(training)
        if seed is not None:
            seed_all(seed)
        # what a model does to its input must not reach the next check
        given = tokens.to(self.device, copy=True)
        extra = {} if mask is None else {MASK: mask.to(self.device)}
        batch, time = tokens.shape
        mode = "train" if training else "eval"
        with (
            asked(f"on tokens of shape {(batch, time)}, in {mode} mode"),
            torch.set_grad_enabled(grad),
        ):
            answer = self.caller.call(model, given, **extra)
        return self.reader.read(answer, batch, time, strict)
