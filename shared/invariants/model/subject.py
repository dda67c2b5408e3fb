"""The model under test, as the checks see it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import ModelRaised, SkipCheck, UnusableModel, asked
from .building import Builder, KeptState, Model, called_modules, name_of
from .calling import LAYOUTS, MASK, caller_of
from .costs import Costs
from .probing import probe
from .randomness import isolated, seed_all
from .reading import BATCH_FIRST, SCORES, Reader, find_scores, follow
from .refusals import (
    Lengths,
    find_noise,
    find_refusals,
    find_state,
    require_batch_first,
)
from .sizes import LENGTH, choose_sizes, declared
from .threads import few_threads
from .tokens import draw

HEAVY = 2_000_000  # parameters: from here on fewer long sequences are tried
OUTPUTS = ("auto", "logits", "log_probs")


class Subject:
    """A language model that checks can build anew, call, and read.

    Args: as for `check_model`.

    Raises:
        UnusableModel: a ValueError, in one line, for what cannot be built,
            called or read; the user's own exception is its cause.
    """

    reader: Reader  # of scores that can be read
    fault = ""  # why its answers cannot be read at all
    rows: int | None = None  # it takes at once; None: as many as given
    noisy = False  # whether random numbers show in its scores in eval mode
    keeps_state = False  # whether a call shows in the scores of the next one
    lost_state = ""  # why that cannot be undone
    for_inference = False  # whether it answers in inference mode
    less = ""  # why a check has tried less than of other models

    def __init__(
        self,
        model_or_factory: Any,
        *,
        vocab_size: int | None = None,
        block_size: int | None = None,
        outputs: str = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
        layout: str = "bt",
    ):
        for name, value, known in (
            ("outputs", outputs, OUTPUTS),
            ("layout", layout, LAYOUTS),
        ):
            if value not in known:
                words = f"{name} must be one of {', '.join(known)}"
                raise ValueError(f"{words}, got {value!r}")
        self.seed = seed
        self.notes: list[str] = []  # for the reader of a report
        self.failed_first: dict[str, str] = {}  # check by cause
        self.costs = Costs()
        # called with what a check knows before it ends
        self.tell: Callable[[str], None] = lambda text: None
        self._kept: dict[object, Any] = {}
        self.builder = Builder(model_or_factory, seed, device, self.notes)
        model = self.builder.build()
        self.is_module = isinstance(model, nn.Module)
        self.parameters = 0  # of a function
        if isinstance(model, nn.Module):
            self.parameters = sum(p.numel() for p in model.parameters())
        self.heavy = self.parameters > HEAVY  # calls are spared
        if self.heavy:
            model = self.builder.keep(model)
        self.name = name_of(model_or_factory) or name_of(model) or "model"
        self.vocab_size, self.block_size = choose_sizes(
            model, self.name, vocab_size, block_size, self.notes
        )
        self.limit = declared(model, LENGTH)  # block_size may be less
        self.caller = caller_of(model, outputs != "logits", layout == "tb")
        self.lengths = Lengths(1, 1, self.block_size)  # that it accepts
        # of lengths and rows, and what is answered instead
        self.refusals: list[tuple[ModelRaised, str]] = []
        self._states = WeakKeyDictionary[nn.Module, KeptState]()
        # ids whose scores are always minus infinity, or as good as: read as 0
        self.hidden: list[int] = []
        self._double: dict[bool, bool] = {}
        training = getattr(model, "training", False)
        try:
            with isolated(seed), self.few_threads():
                self._meet(model, outputs)
        finally:
            self._states.clear()
            if isinstance(model, nn.Module):
                model.train(training)

    def _meet(self, model: Model, outputs: str) -> None:
        """Find out how a model is called and read, and what it refuses."""
        self.start_again(model)
        own = self.caller
        with called_modules() as called:
            try:
                size = probe(self, model)
            except ModelRaised as error:
                raise UnusableModel(f"{self.name}: {error}") from (
                    error.__cause__
                )
        self.builder.require_own_modules(model, called)
        for name in self.caller.given.keys() - own.given.keys():
            self.notes.append(
                f"without {name} the model answers for fewer positions: it "
                f"is called with {name}, all 0"
            )
        if self.fault:
            return
        self.says_log_probs = (
            outputs == "log_probs"
            or self.caller.method is not None
            or (outputs == "auto" and "log_probs" in self.reader.path)
        )
        if self.reader.form != BATCH_FIRST:
            self.notes.append(f"the scores are read as {self.reader.form}")
        if self.reader.alike > 1 and not set(SCORES) & {*self.reader.path}:
            self.notes.append(
                f"the model answers with {self.reader.alike} tensors of "
                f"scores: the first is checked"
            )
        with suppress(ModelRaised):  # the checks will meet it, too
            find_state(self, model, *size)
            require_batch_first(self, model, *size)
            find_refusals(self, model, *size)
            find_noise(self, model, size[0])

    def start_again(self, model: Model) -> None:
        """Put back what a model held when it was first called."""
        if not isinstance(model, nn.Module):
            return
        if model in self._states:
            self._states[model].put_back(always=True)
        else:
            self._states[model] = KeptState(model)

    @cached_property
    def scored(self) -> list[int]:
        """The ids whose scores are numbers."""
        return sorted({*range(self.vocab_size)} - {*self.hidden})

    def require_scores(self) -> None:
        """Refuse a model whose answers cannot be read."""
        if self.fault:
            raise UnusableModel(f"{self.name}: {self.fault}")

    def require_no_state(self) -> None:
        """Skip what compares two calls where the first shows in the second."""
        if self.lost_state:
            raise SkipCheck(self.lost_state)

    def require_no_noise(self) -> None:
        """Skip what compares inputs of unequal shape under noise."""
        if self.noisy:
            raise SkipCheck(
                "random numbers are drawn in eval mode, others at each size: "
                "see check_determinism"
            )

    def fit(self, *lengths: int) -> list[int]:
        """Return these lengths, each as near as the model accepts it."""
        return sorted({self.lengths.fit(time) for time in lengths})

    def fit_rows(self, count: int) -> int:
        """Return a number of rows, fewer where the model has no room."""
        return count if self.rows is None else min(count, self.rows)

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

    def draw(
        self, rows: int, time: int, generator: torch.Generator | None = None
    ) -> Int[Tensor, "rows time"]:
        """Draw ids, of a length as near as the model accepts it."""
        time = self.lengths.fit(time)
        generator = generator or self.generator()
        return draw(self.vocab_size, rows, time, generator)

    def measure(self) -> bool:
        """Measure calls and a copy; return whether the scores are finite."""
        costs, short = self.costs, self.lengths.fit(1)
        start = perf_counter()
        model = self.build()
        costs.build = perf_counter() - start
        seconds = {}
        finite = True
        for length in (short, self.block_size, short):  # the first is slower
            tokens = torch.zeros(1, length, dtype=torch.long)
            start = perf_counter()
            scores = self.scores(model, tokens)
            finite &= bool(torch.isfinite(scores).all())  # waits for it
            seconds[length] = perf_counter() - start
        costs.call, costs.heavy = seconds[short], self.heavy
        more = seconds[self.block_size] - costs.call
        costs.token = max(more, 0.0) / self.block_size
        return finite

    def shared(self, name: object, make: Callable[[], Any]) -> Any:
        """Return a copy not to be changed; where time is short, it is kept."""
        if not self.costs.limited:
            return make()
        if self._kept.get(name) is None:
            self._kept[name] = make()
        return self._kept[name]

    def unshare(self, model: Any) -> None:
        """Let a copy be changed: no other check gets it."""
        self._kept = {n: m for n, m in self._kept.items() if m is not model}

    def build(self, seed: int | None = None) -> Model:
        """Return the model anew; seed is that of its weights, if another."""
        self.costs.reckoned += self.costs.build
        return self.builder.build(seed)

    def build_module(self, for_a_function: str) -> nn.Module:
        """Return the model anew, to be changed, or skip the check."""
        self._kept.clear()  # it may need the memory
        model = self.build()
        if not isinstance(model, nn.Module):
            raise SkipCheck(for_a_function)
        if not self.builder.can_copy:
            raise SkipCheck("the model cannot be copied")
        return model

    def precise(self, masked: bool = False, long: bool = False) -> Model:
        """Return the model in float64 where it can be, not to be changed.

        Masked is a model that gets an attention mask, long one that gets
        sequences which may take too long there.
        """
        if (long and self.spares) or not self._in_double(masked):
            return self.shared("own", self.build)
        return self.shared(
            "float64", lambda: self.doubled(self.build(), masked)
        )

    @property
    def spares(self) -> bool:
        """Whether long sequences are too slow for float64."""
        return self.costs.limited and self.heavy

    def doubled(self, model: Model, masked: bool = False) -> Model:
        """Turn a model that was built into float64, where it can be."""
        if not isinstance(model, nn.Module) or not self._in_double(masked):
            return model
        return model.double()

    def _in_double(self, masked: bool) -> bool:
        """Whether copies are judged in float64."""
        if masked not in self._double:
            self._double[masked] = self._holds_in_double(masked)
        return self._double[masked]

    def _holds_in_double(self, masked: bool) -> bool:
        """Whether a copy in float64 answers in it, and with numbers.

        The lowest float64 in a mask, say, is minus infinity to a softmax in
        float32.
        """
        tokens = torch.zeros(1, self.lengths.fit(4), dtype=torch.long)
        hidden = int(masked and tokens.size(1) > 1)
        mask = (torch.arange(tokens.size(1)) >= hidden).long().unsqueeze(0)

        def answer(model: nn.Module) -> Tensor:
            given = mask if masked else None
            return self.scores(model, tokens, mask=given)[:, hidden:]

        try:
            scores = answer(self.build_module("").double())
        except Exception:  # check_dtype says so; the others do without
            return False
        if scores.dtype != torch.float64:
            return False
        if bool(torch.isfinite(scores).all()) or not bool(
            torch.isfinite(answer(self.build_module(""))).all()
        ):
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
        go_on: bool = False,
        as_given: bool = False,
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
            go_on: whether a model that keeps state has what the last call
                left, and not what it was built with.
            as_given: whether it gets these very ids, not a copy of them.

        Raises:
            ModelRaised: with the model's own exception as its cause, or for
                an answer without scores of the right shape.
        """
        if self.keeps_state and not go_on:
            self.start_again(model)
        if self.noisy and not training and seed is None:
            seed = self.seed
        if seed is not None:
            seed_all(seed)
        if self.rows is not None and len(tokens) > self.rows:
            call = partial(
                self.scores,
                model,
                training=training,
                grad=grad,
                strict=strict,
                go_on=go_on,
                as_given=as_given,
            )
            parts = tokens.split(self.rows)
            if mask is None:
                return torch.cat([call(ids) for ids in parts])
            pairs = zip(parts, mask.split(self.rows), strict=True)
            return torch.cat([call(ids, mask=shown) for ids, shown in pairs])
        if isinstance(model, nn.Module) and model.training != training:
            model.train(training)
        # what a model does to its input must not reach the next check
        given = tokens.to(self.device, copy=not as_given)
        extra = {} if mask is None else {MASK: mask.to(self.device)}
        what = f"on tokens of shape {tuple(tokens.shape)}, in "
        what += "train mode" if training else "eval mode"
        if mask is not None:
            what += ", with an attention mask"
        with asked(what), torch.set_grad_enabled(grad):
            answer = self.caller.call(model, given, **extra)
        scores = self.read(answer, len(tokens), tokens.size(1), strict)
        self.costs.charge(scores)
        return scores

    def read(
        self, answer: Any, batch: int, time: int, strict: bool = False
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, as `scores` does."""
        size = (time, batch) if self.caller.time_first else (batch, time)
        scores = self.reader.read(answer, *size, strict)
        if self.caller.time_first:
            scores = scores.transpose(0, 1)
        if self.hidden:
            at = torch.tensor(self.hidden, device=scores.device)
            scores = scores.index_fill(-1, at, 0.0)
        self.for_inference = scores.is_inference()
        return scores.clone() if self.for_inference else scores

    def find(
        self, answer: Any, batch: int, time: int
    ) -> Float[Tensor, "batch time vocab"] | None:
        """Return scores in an answer, wherever they are."""
        if self.caller.time_first:
            batch, time = time, batch
        found = find_scores(answer, batch, time, self.vocab_size)
        if not found:
            return None
        # those of the form that other answers have, if there are any
        path, form = max(found, key=lambda place: place[1] == self.reader.form)
        scores = form.read(follow(answer, path), batch, time)
        return scores.transpose(0, 1) if self.caller.time_first else scores
