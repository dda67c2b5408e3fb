"""The model under test: how it is built, called and read."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import ModelRaised, UnusableModel, sentence
from .calling import (
    Model,
    called_modules,
    device_of,
    is_factory,
    name_of_model,
    probe_sizes,
    shape_in_words,
    token_argument,
)
from .randomness import isolated, seed_all
from .reading import (
    Form,
    Path,
    describe,
    find_scores,
    follow,
    tensors_in,
    unsqueezed,
)
from .sizes import LENGTH, VOCABULARY, all_declared, declared, promised_limit

TARGETS = ("targets", "target", "labels", "y")
MASK = "attention_mask"
HEAVY = 2_000_000  # parameters: from here on fewer long sequences are tried
OUTPUTS = ("auto", "logits", "log_probs")


class Subject:
    """A language model that checks can build anew, call, and read.

    Args:
        model_or_factory: an nn.Module, a callable from (batch, time) ids to
            scores, or a function without arguments that builds one of these.
        vocab_size: number of tokens; None: as the model declares it.
        block_size: longest sequence to try; None: as the model declares it.
        outputs: "logits", "log_probs", or "auto": log-probabilities where
            the model has a method log_probs or calls its answer so.
        seed: of the weights and of all the tokens drawn.
        device: where to run; None: where the model is.

    Attributes:
        name: of the model's class, or of the function.
        vocab_size: number of tokens.
        block_size: longest sequence that is tried.
        form: where batch, time and vocabulary are in its answer.
        dtype: of its scores.
        heavy: whether it has so many parameters that calls are spared.
        fresh: whether a factory builds it anew, with untrained weights.
        notes: what the reader of a report should know.

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
        if not callable(model_or_factory):
            raise UnusableModel(
                f"a model, a function or a factory is needed, got "
                f"{type(model_or_factory).__name__}"
            )
        self.seed = seed
        self.outputs = outputs
        self.notes: list[str] = []
        self._given = model_or_factory
        self._first: weakref.ref[Any] | None = None
        self._double: bool | None = None
        self.can_copy = True
        self.fresh = is_factory(model_or_factory)
        self.device: torch.device | None = (
            None if device is None else torch.device(device)
        )
        model = self.build()
        self.is_module = isinstance(model, nn.Module)
        self.heavy = (
            isinstance(model, nn.Module)
            and sum(p.numel() for p in model.parameters()) > HEAVY
        )
        self.name = name_of_model(model_or_factory, model)
        if self.device is None:
            self.device = device_of(model)
        self._set_sizes(model, vocab_size, block_size)
        self._set_call(model)
        with called_modules() as called:
            self._probe(model)
        self._require_own_modules(model, called)

    def build(self, seed: int | None = None) -> Model:
        """Return the model anew: from the factory, or a copy of the one given.

        Args:
            seed: of the weights; None: the subject's own, so that each model
                built has the same weights.
        """
        with isolated(self.seed if seed is None else seed):
            model = self._make()
        if isinstance(model, nn.Module) and self.device is not None:
            model = model.to(self.device)
        return model

    def _make(self) -> Model:
        if not self.fresh:
            return self._copy(self._given)
        try:
            model = self._given()
        except Exception as error:
            raise UnusableModel(
                f"{name_of_model(self._given)} raised {sentence(error)}"
            ) from error
        if not callable(model):
            raise UnusableModel(
                f"{name_of_model(self._given)} returned no model but "
                f"{type(model).__name__}"
            )
        if self._first is not None and self._first() is model:
            assert model is not None
            return self._copy(model)  # the factory keeps its model
        if self._first is None and isinstance(model, nn.Module):
            self._first = weakref.ref(model)
        return model

    def _copy(self, model: Model) -> Model:
        if not isinstance(model, nn.Module) or not self.can_copy:
            return model
        try:
            return copy.deepcopy(model)
        except Exception as error:
            self.can_copy = False
            self.notes.append(
                f"the model cannot be copied ({sentence(error)}): checks "
                f"that change weights are left out; give a factory"
            )
            return model

    def _require_own_modules(
        self, model: Model, called: list[nn.Module]
    ) -> None:
        """Give up copying where a copy calls modules of its original."""
        given = self._given
        if not isinstance(given, nn.Module) or model is given:
            return
        assert isinstance(model, nn.Module)
        own = set(map(id, model.modules()))
        theirs = {id(m): name for name, m in given.named_modules()}
        shared = {
            theirs[id(m)]
            for m in called
            if id(m) in theirs and id(m) not in own
        }
        if shared:
            self.can_copy = False
            self.notes.append(
                f"a copy still calls {', '.join(sorted(shared)[:3])} of the "
                f"original (a lambda or closure as an attribute?): checks "
                f"that change weights are left out; give a factory"
            )

    def precise(self) -> Model:
        """Return the model anew, in float64 where it can be."""
        return self.doubled(self.build())

    def doubled(self, model: Model) -> Model:
        """Turn a model that was built into float64, where it can be."""
        if not isinstance(model, nn.Module) or not self.can_copy:
            return model
        if self._double is None:
            self._double = self._can_double()
        return model.double() if self._double else model

    def _can_double(self) -> bool:
        model = self.build()
        assert isinstance(model, nn.Module)
        tokens = torch.zeros(1, min(2, self.block_size), dtype=torch.long)
        try:
            scores = self.scores(model.double(), tokens.to(self.device))
        except Exception:  # check_dtype says so; the others do without
            return False
        return scores.dtype == torch.float64

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
            tokens: ids.
            training: whether in train mode.
            grad: whether gradients are recorded.
            seed: of the global generators; None: they go on as they are.
            mask: the attention mask, where `takes_mask`.
            strict: whether nothing is mended: see `read`.

        Raises:
            ModelRaised: with the model's own exception as its cause, or for
                an answer without scores of the right shape.
        """
        if isinstance(model, nn.Module) and model.training != training:
            model.train(training)
        if seed is not None:
            seed_all(seed)
        # what a model does to its input must not reach the next check
        given = tokens.clone()
        extra: dict[str, Any] = {}
        if mask is not None:
            extra[MASK] = mask
        extra |= self.fixed_arguments(tokens)
        try:
            with torch.set_grad_enabled(grad):
                answer = self.call(model, given, **extra)
        except Exception as error:
            raise ModelRaised(
                f"the model raised {sentence(error)} on "
                f"{shape_in_words(tokens)}"
            ) from error
        return self.read(answer, tokens, strict)

    def fixed_arguments(
        self, tokens: Int[Tensor, "batch time"]
    ) -> dict[str, Any]:
        """Return what a call needs beside the tokens: targets, all 0."""
        if not self._with_targets:
            return {}
        return {self.target_name or "": torch.zeros_like(tokens)}

    @contextmanager
    def on(self, device: torch.device | str) -> Iterator[None]:
        """Build and call on another device inside."""
        before, self.device = self.device, torch.device(device)
        try:
            yield
        finally:
            self.device = before

    def call(
        self, model: Model, tokens: Int[Tensor, "batch time"], **extra: Any
    ) -> Any:
        """Call a model as its signature asks, and return its answer."""
        function = model
        if self.method is not None:
            function = getattr(model, self.method)
        if self._token_name is None:
            return function(tokens, **extra)
        return function(**{self._token_name: tokens}, **extra)

    def read(
        self,
        answer: Any,
        tokens: Int[Tensor, "batch time"],
        strict: bool = False,
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, in the common form.

        Unless strict, axes of size 1 that the model drops are put back, and
        scores of ids beyond its vocabulary are left out: they are the
        matter of check_shape, and no other check should stumble over them.

        Raises:
            ModelRaised: where there are none of the right shape.
        """
        batch, time = tokens.shape
        if strict and self._width != self.vocab_size:
            raise ModelRaised(
                f"the scores are {self._width} wide, the vocabulary has "
                f"{self.vocab_size} ids"
            )
        found = follow(answer, self._path)
        if isinstance(found, Tensor):
            if not strict:
                shape = self.form.shape(batch, time, self._width)
                found = unsqueezed(found, shape)
            try:
                scores = self.form.read(found, batch, time)
            except (ValueError, RuntimeError):
                scores = None
            if scores is not None and scores.size(2) == self._width:
                return scores[..., : self.vocab_size]
        for path, form in find_scores(answer, batch, time, self._width):
            if form == self.form:
                scores = form.read(follow(answer, path), batch, time)
                return scores[..., : self.vocab_size]
        raise ModelRaised(
            f"the scores for {shape_in_words(tokens)} should have shape "
            f"{(batch, time, self.vocab_size)}, got {describe(answer)}"
        )

    def _set_sizes(
        self, model: Model, vocab_size: int | None, block_size: int | None
    ) -> None:
        known = declared(model, VOCABULARY)
        for name, size in (
            ("vocab_size", vocab_size),
            ("block_size", block_size),
        ):
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(
                    f"{name} must be a positive number, got {size!r}"
                )
        if vocab_size is None:
            if known is None:
                raise UnusableModel(
                    f"{self.name} does not say its vocabulary: "
                    f"vocab_size must be given"
                )
            vocab_size = known.value
        elif known is not None and known.value != vocab_size:
            raise UnusableModel(
                f"vocab_size={vocab_size} was given, but {self.name} has "
                f"{known}"
            )
        self._declared = known is not None
        if vocab_size < 2:
            raise UnusableModel(
                f"vocab_size must be at least 2 for one token to differ from "
                f"another, got {vocab_size}"
            )
        self.vocab_size = vocab_size
        self.limit, self.no_limit = promised_limit(model, vocab_size)
        longest = self.limit
        if longest is None:
            sizes = all_declared(model, LENGTH)
            longest = sizes[0] if sizes else None
        if block_size is None:
            if longest is None:
                raise UnusableModel(
                    f"{self.name} does not say its longest sequence: "
                    f"block_size must be given"
                )
            block_size = longest.value
        elif longest is not None and longest.value < block_size:
            self.notes.append(
                f"block_size {block_size} was asked for; the model declares "
                f"{longest}, which is used"
            )
            block_size = longest.value
        self.block_size = block_size

    def _set_call(self, model: Model) -> None:
        self.method: str | None = None
        own = getattr(model, "log_probs", None)
        function = model
        if self.outputs != "logits" and callable(own):
            self.method, function = "log_probs", own
        names, self._token_name = token_argument(function)
        self.takes_mask = MASK in names
        native, self._native_token_name = token_argument(model)
        self.target_name = next((n for n in TARGETS if n in native), None)
        self._with_targets = False

    def native(
        self, model: Model, tokens: Int[Tensor, "batch time"], **extra: Any
    ) -> Any:
        """Call the model itself, not its log_probs, and return its answer."""
        if self._native_token_name is None:
            return model(tokens, **extra)
        return model(**{self._native_token_name: tokens}, **extra)

    def _probe(self, model: Model) -> None:
        """Find the scores in two answers of sizes that no axis shares."""
        self._width = self.vocab_size
        found = self._find(model)
        if not found and self._declared and self._wider > self.vocab_size:
            self._width = self._wider
            found = self._find(model)
        if not found and self.target_name and self.method is None:
            self._width = self.vocab_size
            self._with_targets = True
            found = self._find(model)
        if not found:
            raise UnusableModel(self._unread)
        self._path, self.form, self.dtype = found
        keys = [key for key in self._path if isinstance(key, str)]
        self.says_log_probs = (
            self.outputs == "log_probs"
            or self.method is not None
            or (self.outputs == "auto" and "log_probs" in keys)
        )
        if self.form.axes != (0, 1, 2):
            self.notes.append(f"the scores are read as {self.form}")
        if self._with_targets:
            self.notes.append(
                f"without {self.target_name} the model answers for fewer "
                f"positions: it is called with {self.target_name}, all 0"
            )

    def _find(self, model: Model) -> tuple[Path, Form, torch.dtype] | None:
        """Return where the scores are, the same in both answers."""
        candidates = None
        for batch, time in probe_sizes(self.vocab_size, self.block_size):
            with isolated(self.seed):
                tokens = torch.randint(self.vocab_size, (batch, time))
                tokens = tokens.to(self.device)
                extra = self.fixed_arguments(tokens)
                training = getattr(model, "training", False)
                if isinstance(model, nn.Module):
                    model.eval()
                try:
                    with torch.no_grad():
                        answer = self.call(model, tokens, **extra)
                except Exception as error:
                    raise UnusableModel(
                        f"{self.name} raised {sentence(error)} on "
                        f"{shape_in_words(tokens)}"
                    ) from error
                finally:
                    if isinstance(model, nn.Module):
                        model.train(training)
            found = find_scores(answer, batch, time, self._width)
            widths = [
                tensor.size(2)
                for _, tensor in tensors_in(answer)
                if tensor.ndim == 3 and tensor.shape[:2] == (batch, time)
            ]
            self._wider = widths[0] if widths else 0
            if candidates is None:
                candidates = found
            candidates = [c for c in candidates if c in found]
            self._unread = (
                f"the scores of {self.name} for {shape_in_words(tokens)} "
                f"should have shape {(batch, time, self.vocab_size)} "
                f"(batch, time, vocab), got {describe(answer)}"
            )
        if not candidates:
            return None
        path, form = candidates[0]
        return path, form, follow(answer, path).dtype
