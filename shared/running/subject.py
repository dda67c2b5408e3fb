"""The model under test: the facts that all checks share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..visibility import Declared as Visible
from .budget import Budget
from .context import few_threads
from .errors import ModelRaised, SkipCheck, UnusableModel
from .model.building import Builder
from .model.calling import IN_ARRAYS, Caller, Reader
from .model.sizes import Declared, Lengths
from .program import Program
from .tokens import draw

SECONDS = 1e11  # multiplications of a forward pass: parameters times tokens
HEAVY = 2_000_000  # parameters: float64 and whole batches cost too much


@dataclass(frozen=True, eq=False)
class Subject:
    """A record of a model: `meet` writes it, the checks read it.

    Next to it are the clock of its checks, their proofs, and the copies of the
    model that no check may change.
    """

    name: str  # of its class or factory
    builder: Builder  # makes it again
    seed: int  # of weights and tokens
    vocab_size: int
    block_size: int  # longest sequence that is tried
    limit: Declared | None  # longest sequence that the model declares
    parameters: int  # their number; 0 for a function
    is_module: bool
    caller: Caller
    lengths: Lengths  # that it answers
    reader: Reader = field(default_factory=Reader)
    rows: int | None = None  # that it takes at once; None: any number
    cache_rows: int | None = None  # that a cache has room for, as declared
    # exceptions for other lengths and rows, and which ones are answered
    refusals: tuple[tuple[ModelRaised, str], ...] = ()
    # ids whose scores are always minus infinity, or as good as: read as 0
    hidden: tuple[int, ...] = ()
    noisy: bool = False  # whether it draws random numbers in eval mode
    keeps_state: bool = False  # whether a call changes the next one's scores
    lost_state: str = ""  # why that change cannot be undone
    says_log_probs: bool = False  # that its scores are normalised
    in_arrays: bool = False  # of NumPy or JAX, not in torch
    make_cache: Callable[..., Any] | None = None  # that the user names
    documents: Any = None  # where they are, as the user says
    sees: Visible | None = None  # who may see whom; None: causal
    unanswered: tuple[Any, ...] = ()  # Cases in which no scores come back
    never_given: tuple[str, ...] = ()  # arguments, by no case
    instead: tuple[str, ...] = ()  # arguments that take the tokens' place
    fault: str = ""  # why its answers cannot be read at all
    notes: tuple[str, ...] = ()  # for the reader of a report
    compile: bool = False  # whether the user asks for its compiled program
    budget: Budget = field(default_factory=Budget)  # of its checks
    proofs: dict[str, Any] = field(default_factory=dict)  # Proofs, by order
    kept: dict[Any, Any] = field(default_factory=dict)  # read-only copies

    @property
    def is_program(self) -> bool:
        """Whether the model is a program, of which only scores are seen."""
        return isinstance(self.builder.given, Program)

    @property
    def heavy(self) -> bool:
        """Whether the model has many parameters."""
        return self.parameters > HEAVY

    def takes_seconds(self, tokens: int) -> bool:
        """Whether a call of so many tokens takes two cores some seconds."""
        return self.parameters * tokens > SECONDS

    @property
    def scored(self) -> list[int]:
        """The ids whose scores are numbers."""
        return sorted({*range(self.vocab_size)} - {*self.hidden})

    @property
    def device(self) -> torch.device | None:
        """Where the model is built, and its tokens are moved to."""
        return self.builder.device

    def noted(self, *notes: str) -> "Subject":
        """Return the same subject with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def require_scores(self) -> None:
        """Refuse a model whose answers cannot be read."""
        if self.fault:
            raise UnusableModel(f"{self.name}: {self.fault}")

    def require_no_state(self) -> None:
        """Skip a check that compares two calls if the first changes both."""
        if self.lost_state:
            raise SkipCheck(self.lost_state)

    def require_no_look_ahead(self) -> None:
        """Skip a check of texts that go on, where positions see ahead."""
        if self.sees is not None and self.sees.looks_ahead:
            raise SkipCheck(
                f"{self.sees.name} lets a position see later tokens"
            )

    def require_no_noise(self) -> None:
        """Skip a check that compares inputs of unequal shape under noise."""
        if self.noisy:
            raise SkipCheck(
                "random numbers are drawn in eval mode, others at each size: "
                "see check_determinism"
            )

    def require_gradients(self) -> None:
        """Skip a check that needs gradients where none can be recorded."""
        if self.in_arrays or self.caller.no_gradients:
            raise SkipCheck(self.caller.no_gradients or IN_ARRAYS)

    def fit(self, *lengths: int) -> list[int]:
        """Return these lengths, each as near as the model accepts it."""
        return sorted({self.lengths.fit(time) for time in lengths})

    def fit_rows(self, count: int) -> int:
        """Return a number of rows, fewer where the model has no room."""
        return count if self.rows is None else min(count, self.rows)

    def with_room(self) -> "Subject":
        """Return the subject with no more rows than its cache has room for."""
        if self.cache_rows is None:
            return self
        return replace(self, rows=self.fit_rows(self.cache_rows))

    def one_document(
        self, tokens: Int[Tensor, "*shape"]
    ) -> Int[Tensor, "*shape"]:
        """Return tokens without the id that separates documents."""
        mark = self.documents
        if not isinstance(mark, int):
            return tokens
        return tokens.masked_fill(tokens == mark, 0 if mark else 1)

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

    def read(
        self, answer: Any, batch: int, time: int, strict: bool = False
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer in the common form.

        Strict: see `Reader.read`.
        """
        scores = self.reader.read(answer, batch, time, strict)
        return self.without_hidden(scores)

    def without_hidden(
        self, scores: Float[Tensor, "batch time vocab"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Return scores in which those of hidden ids are 0."""
        if not self.hidden:
            return scores
        at = torch.tensor(self.hidden, device=scores.device)
        return scores.index_fill(-1, at, 0.0)
