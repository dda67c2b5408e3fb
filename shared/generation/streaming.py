"""Next tokens, one after another: greedy or sampled, whole or streamed."""

import codecs
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from ..protocol import LanguageModel
from ..tokenization.tokenizers import Tokenizer
from .reading import Reader

MOST = 2**31  # new tokens at once: beyond that a number is a slip


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen from log-probabilities.

    Temperature first, then top-k, then top-p of what top-k left.

    Attributes:
        temperature: 0 is greedy; 1 draws from the model's own distribution.
        top_k: keep the k likeliest tokens; more than there are keep all.
        top_p: keep the fewest likeliest tokens that reach this probability.

    Raises:
        ValueError: naming the setting and the value.

    Source: Fan et al. 2018 (Hierarchical Neural Story Generation) for top-k;
    Holtzman et al. 2020 (The Curious Case of Neural Text Degeneration) for
    top-p.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn from."""
        if not (_is_real(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be a number from 0, got {self.temperature}"
            )
        if self.top_k is not None and not _is_count(self.top_k, at_least=1):
            raise ValueError(
                f"top_k must be a whole number from 1, got {self.top_k}"
            )
        if self.top_p is not None and not (
            _is_real(self.top_p) and 0 < self.top_p <= 1
        ):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def choose(
        self,
        log_probs: Float[Tensor, "batch vocab"],
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch"]:
        """Return one id a row; the first of several that are likeliest.

        Raises:
            ValueError: where a row holds NaN, or nothing but -inf.
        """
        best, likeliest = log_probs.max(dim=-1)
        if not best.isfinite().all():
            row = int((~best.isfinite()).nonzero()[0])
            raise ValueError(
                f"row {row} has no distribution to choose from: its largest "
                f"log-probability is {best[row].item()}"
            )
        if self.temperature == 0:
            return likeliest
        probs = self.probabilities(log_probs)
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1)

    def probabilities(
        self, log_probs: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return what is drawn from, at a temperature above 0."""
        scores = log_probs
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        # With the largest score at 0 no temperature is too small, except
        # that the dtype must be able to hold it.
        limits = torch.finfo(scores.dtype)
        temperature = min(max(self.temperature, limits.tiny), limits.max)
        scores = scores - scores.amax(dim=-1, keepdim=True)
        scores = scores / temperature
        if self.top_k is not None and self.top_k < scores.size(-1):
            kept = scores.topk(self.top_k).indices
            dropped = torch.ones_like(scores, dtype=torch.bool)
            dropped = dropped.scatter(-1, kept, False)
            scores = scores.masked_fill(dropped, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            probs = scores.softmax(dim=-1)
            probs, order = probs.sort(dim=-1, descending=True, stable=True)
            reached = probs.cumsum(dim=-1) - probs >= self.top_p
            dropped = torch.empty_like(reached).scatter(-1, order, reached)
            scores = scores.masked_fill(dropped, float("-inf"))
        return scores.softmax(dim=-1)


def generate(
    model: LanguageModel,
    tokens: Integer[Tensor, "batch time"],
    new_token_count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "batch longer"]:
    """Append new tokens to prompts of one length.

    The model sees the last block_size tokens: once its window is full it
    slides, and positions count from the window's first token. It runs in
    eval mode and without gradients, and is left in the mode it came in.

    Args:
        model: a language model.
        tokens: the prompts, at least one token each.
        new_token_count: how many tokens to append to each.
        temperature: 0 is greedy; above 0 tokens are drawn.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the fewest tokens that reach this probability.
        generator: what random numbers come from, on the model's device;
            None: torch's own.

    Returns:
        Prompts and new tokens, (batch, time + new_token_count).

    Raises:
        ValueError: for an empty prompt, an id outside the vocabulary, or a
            number out of its range.

    Source: the three texts' loops, with eval mode and the crop they lack.
    """
    sampler = Sampler(temperature, top_k, top_p)
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"tokens must be a tensor, got {type(tokens).__name__}; "
            "generate_rows takes lists of ids"
        )
    if tokens.device != _device_of(model, tokens.device):
        raise ValueError(
            f"tokens are on {tokens.device}, the model is on "
            f"{_device_of(model, tokens.device)}"
        )
    _require_tokens(tokens, model.vocab_size)
    _require_count(new_token_count)
    batch, time = tokens.shape
    rows = tokens.new_zeros((batch, time + new_token_count), dtype=torch.long)
    rows[:, :time] = tokens
    lengths = [time] * batch
    for _ in _append(
        model, rows, lengths, new_token_count, sampler, generator
    ):
        pass
    return rows


def generate_rows(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    new_token_count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Append new tokens to prompts of any lengths, all in one batch.

    Shorter rows are padded on the right, and each is read at its own last
    token: a causal model cannot see the padding, so every row is what its
    prompt alone would give.

    Args:
        model: a causal language model.
        prompts: ids, at least one each.
        new_token_count: how many tokens to append to each.
        temperature: as in `generate`.
        top_k: as in `generate`.
        top_p: as in `generate`.
        generator: as in `generate`.

    Returns:
        Each prompt with its new tokens.

    Raises:
        ValueError: as `generate`, and for no prompts at all.
    """
    rows = [list(map(int, prompt)) for prompt in prompts]
    for new in stream_tokens(
        model,
        rows,
        new_token_count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    ):
        for row, token in zip(rows, new.tolist(), strict=True):
            row.append(token)
    return rows


def stream_tokens(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    new_token_count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Int[Tensor, "batch"]]:
    """Yield the next token of every prompt as soon as it is chosen.

    Between two tokens the model is in the mode it came in. What is wrong
    with the arguments is said at the call, not at the first token.

    Args:
        model: a causal language model.
        prompts: ids, at least one each, of any lengths.
        new_token_count: how many tokens to yield for each.
        temperature: as in `generate`.
        top_k: as in `generate`.
        top_p: as in `generate`.
        generator: as in `generate`.

    Raises:
        ValueError: as `generate`, and for no prompts at all.
    """
    sampler = Sampler(temperature, top_k, top_p)
    _require_count(new_token_count)
    if len(prompts) == 0:
        raise ValueError("generating needs at least one prompt, got 0")
    lengths = [len(prompt) for prompt in prompts]
    rows = torch.zeros(
        (len(prompts), max(lengths) + new_token_count),
        dtype=torch.long,
        device=_device_of(model, torch.device("cpu")),
    )
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt]], dtype=torch.long)
        _require_tokens(ids, model.vocab_size, row=i)
        rows[i, : len(prompt)] = ids[0]
    return _append(model, rows, lengths, new_token_count, sampler, generator)


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Put a model in eval mode, then every part back in its own mode."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class TextStream:
    """Turns ids into text as they come, never half a character.

    Bytes that may still become a character are held back. All that is
    returned, joined, is what `tokenizer.decode` makes of all ids at once;
    an id that the tokenizer leaves unused becomes U+FFFD.

    Args:
        tokenizer: whose ids they are.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete, often all of theirs.

        Raises:
            ValueError: for an id outside the vocabulary.
        """
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    def close(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.decode_bytes([token])
        except ValueError:
            if not 0 <= token < self._tokenizer.n_vocab:
                raise
            return "\ufffd".encode()


def _append(
    model: LanguageModel,
    rows: Tensor,
    lengths: list[int],
    count: int,
    sampler: Sampler,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Fill rows in place, and yield each column of new tokens."""
    reader = Reader(model)
    for _ in range(count):
        with eval_mode(model), torch.no_grad():
            log_probs = reader.last_log_probs(rows, lengths)
            new = sampler.choose(log_probs, generator)
        rows[range(len(lengths)), lengths] = new
        lengths = [n + 1 for n in lengths]
        yield new


def _device_of(model: object, default: torch.device) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in model.parameters():
            return tensor.device
    return default


def _require_tokens(
    tokens: Tensor, vocab_size: int, row: int | None = None
) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ValueError(
            "tokens must be whole numbers of shape (batch, time), got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    where = "" if row is None else f" of prompt {row}"
    if tokens.numel() == 0:
        raise ValueError(
            f"the prompt{'' if row is None else f' {row}'} is empty: tokens "
            f"of shape {tuple(tokens.shape)}"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside) > 0:
        raise ValueError(
            f"id {outside[0].item()}{where} is outside the vocabulary of "
            f"{vocab_size} ids"
        )


def _require_count(new_token_count: int) -> None:
    if not _is_count(new_token_count, at_least=0) or new_token_count > MOST:
        raise ValueError(
            f"new_token_count must be a whole number from 0 to {MOST:,}, got "
            f"{new_token_count}"
        )


def _is_count(value: object, at_least: int) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= at_least


def _is_real(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value)
