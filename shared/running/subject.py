"""Describe the tested model by the facts that all checks share."""

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

SECONDS = 1e11  # a call takes seconds if parameters times tokens exceed this
HEAVY = 2_000_000  # parameters; with more, float64 is too slow


@dataclass(frozen=True, eq=False)
class Subject:
    """A record of a model: `meet` writes it, the checks read it.

    A Subject also has the clock and the proofs of the model's checks, and
    copies of the model that no check may change.
    """

    name: str  # name of the model's class or factory
    builder: Builder  # builds the model again
    seed: int  # seed of weights and tokens
    vocab_size: int
    block_size: int  # longest sequence that is tried
    limit: Declared | None  # longest sequence that the model declares
    parameters: int  # number of parameters; 0 for a function
    is_module: bool
    caller: Caller
    lengths: Lengths  # lengths that the model accepts
    reader: Reader = field(default_factory=Reader)
    rows: int | None = None  # most rows in a call; None: any number
    cache_rows: int | None = None  # declared number of rows of a cache
    # exceptions with which the model refuses lengths or rows, each with the
    # lengths or rows that it accepts, in words
    refusals: tuple[tuple[ModelRaised, str], ...] = ()
    # ids whose scores are always minus infinity, and are read as 0
    hidden: tuple[int, ...] = ()
    noisy: bool = False  # whether the model draws random numbers in eval mode
    keeps_state: bool = False  # whether a call changes the next one's scores
    lost_state: str = ""  # why a call's change of the state cannot be undone
    says_log_probs: bool = False  # whether scores are log-probabilities
    in_arrays: bool = False  # whether the model is in NumPy or JAX, not torch
    make_cache: Callable[..., Any] | None = None  # the user's maker of a cache
    documents: Any = None  # the user's declaration of documents
    sees: Visible | None = None  # declared visibility; None: causal
    unanswered: tuple[Any, ...] = ()  # Cases in which no scores are returned
    never_given: tuple[str, ...] = ()  # arguments that no test call gives
    without: tuple[str, ...] = ()  # left out on purpose, such as caches
    instead: tuple[str, ...] = ()  # arguments that replace the tokens
    fault: str = ""  # why the model's answers cannot be read
    notes: tuple[str, ...] = ()  # for the reader of a report
    compile: bool = False  # whether to check the compiled program
    budget: Budget = field(default_factory=Budget)  # time left for the checks
    proofs: dict[str, Any] = field(default_factory=dict)  # by Order's name
    kept: dict[Any, Any] = field(default_factory=dict)  # read-only copies
    # answers of the proofs' rules by question, see proof/answers.py
    answers: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_program(self) -> bool:
        """Return whether the model is a program, which shows only scores."""
        return isinstance(self.builder.given, Program)

    @property
    def heavy(self) -> bool:
        """Return whether the model has many parameters."""
        return self.parameters > HEAVY

    def takes_seconds(self, tokens: int) -> bool:
        """Return whether a call with this many tokens takes seconds."""
        return self.parameters * tokens > SECONDS

    @property
    def scored(self) -> list[int]:
        """Return the ids whose scores are not always minus infinity."""
        return sorted({*range(self.vocab_size)} - {*self.hidden})

    @property
    def device(self) -> torch.device | None:
        """Return the device of the model and its tokens."""
        return self.builder.device

    def noted(self, *notes: str) -> "Subject":
        """Return a copy of the subject with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def require_scores(self) -> None:
        """Refuse a model whose answers cannot be read."""
        if self.fault:
            raise UnusableModel(f"{self.name}: {self.fault}")

    def require_no_state(self) -> None:
        """Skip a check that compares calls if a call changes later calls."""
        if self.lost_state:
            raise SkipCheck(self.lost_state)

    def require_no_look_ahead(self) -> None:
        """Skip a check of text prefixes if positions see later tokens."""
        if self.sees is not None and self.sees.looks_ahead:
            raise SkipCheck(
                f"{self.sees.name} lets a position see later tokens"
            )

    def require_no_noise(self) -> None:
        """Skip a check that compares unequal shapes if scores are random."""
        if self.noisy:
            raise SkipCheck(
                "random numbers are drawn in eval mode, and differ by size: "
                "see check_determinism"
            )

    def require_gradients(self) -> None:
        """Skip a check that needs gradients if none can be recorded."""
        if self.in_arrays or self.caller.no_gradients:
            raise SkipCheck(self.caller.no_gradients or IN_ARRAYS)

    def fit(self, *lengths: int) -> list[int]:
        """Return lengths that the model accepts, near these lengths."""
        return sorted({self.lengths.fit(time) for time in lengths})

    def fit_rows(self, count: int) -> int:
        """Return `count`, or fewer rows if the model has no room for them."""
        return count if self.rows is None else min(count, self.rows)

    def with_room(self) -> "Subject":
        """Return this subject, limited to the rows that fit into its cache."""
        if self.cache_rows is None:
            return self
        return replace(self, rows=self.fit_rows(self.cache_rows))

    def one_document(
        self, tokens: Int[Tensor, "*shape"]
    ) -> Int[Tensor, "*shape"]:
        """Replace the id that separates documents by another id."""
        mark = self.documents
        if not isinstance(mark, int):
            return tokens
        return tokens.masked_fill(tokens == mark, 0 if mark else 1)

    def few_threads(
        self, count: int | None = None
    ) -> AbstractContextManager[int]:
        """Use `count` threads in the body; by default 1 for a small model."""
        return few_threads(self.parameters, self.block_size, count)

    def generator(self) -> torch.Generator:
        """Return a new random generator, with the seed of this model."""
        return torch.Generator().manual_seed(self.seed)

    def draw(
        self, rows: int, time: int, generator: torch.Generator | None = None
    ) -> Int[Tensor, "rows time"]:
        """Draw ids, in a length near `time` that the model accepts."""
        time = self.lengths.fit(time)
        generator = generator or self.generator()
        return draw(self.vocab_size, rows, time, generator)

    def read(
        self, answer: Any, batch: int, time: int, strict: bool = False
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, as (batch, time, vocab).

        `strict` is that of `Reader.read`.
        """
        scores = self.reader.read(answer, batch, time, strict)
        return self.without_hidden(scores)

    def without_hidden(
        self, scores: Float[Tensor, "batch time vocab"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores, with 0 as the score of each hidden id."""
        if not self.hidden:
            return scores
        at = torch.tensor(self.hidden, device=scores.device)
        return scores.index_fill(-1, at, 0.0)
