"""Append tokens to prompts, with a key-value cache if the model has one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from ..protocol import LanguageModel, cache_reader
from ..validation import whole_number
from .sampling import Sampler

MAX_NEW_TOKENS = 2**31  # most new tokens: a larger number must be a mistake


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
    """Append new tokens to prompts that all have the same length.

    The model sees a window of the last block_size tokens. Once the window is
    full, it slides, and positions count from its first token. The model runs
    without gradients, in eval mode; afterwards it is in its former mode.

    Args:
        model: a language model.
        tokens: the prompts, at least one token each.
        new_token_count: how many tokens to append to each prompt.
        temperature: 0 is greedy; above 0, tokens are drawn.
        top_k: draw only from the k likeliest tokens.
        top_p: draw from the likeliest tokens that together reach this share.
        generator: source of random numbers, on the model's device; None means
            torch's own.

    Returns:
        Prompts and new tokens, (batch, time + new_token_count).

    Raises:
        ValueError: for an empty prompt, an id outside the vocabulary, or a
            number out of its range.

    Source: the loops of GPT tutorials, which lack eval mode and a window.
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"tokens must be a tensor, got {type(tokens).__name__}; "
            "stream_tokens takes lists of ids"
        )
    if tokens.device != _device_of(model, tokens.device):
        raise ValueError(
            f"tokens are on {tokens.device}, the model is on "
            f"{_device_of(model, tokens.device)}"
        )
    _require_tokens(tokens, model.vocab_size)
    new = stream_tokens(
        model,
        tokens.tolist(),
        new_token_count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    )
    return torch.cat([tokens.long(), *(ids[:, None] for ids in new)], dim=1)


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

    Between two tokens, the model is in its former mode. Prompts may differ in
    length: shorter rows are padded on the right, and a row's next token comes
    after its own last token. A causal model cannot see the padding, so each
    row gets the same tokens as if its prompt were alone. Settings and errors
    are those of `generate`. Wrong arguments raise an error at the call, not at
    the first token.
    """
    sampler = Sampler(temperature, top_k, top_p)
    count = whole_number(
        "new_token_count", new_token_count, at_most=MAX_NEW_TOKENS
    )
    if len(prompts) == 0:
        raise ValueError("generating requires at least one prompt, got 0")
    lengths = [len(prompt) for prompt in prompts]
    rows = torch.zeros(
        (len(prompts), max(lengths) + count),
        dtype=torch.long,
        device=_device_of(model, torch.device("cpu")),
    )
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt]])
        _require_tokens(ids, model.vocab_size, row=i)
        rows[i, : len(prompt)] = ids[0]
    return _append(model, rows, lengths, count, sampler, generator)


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Put a model in eval mode; afterwards, restore each module's mode."""
    with _in_eval(_modules(model)):
        yield


def _modules(model: object) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []


@contextmanager
def _in_eval(modules: list[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _append(
    model: LanguageModel,
    rows: Tensor,
    lengths: list[int],
    count: int,
    sampler: Sampler,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Fill rows in place, and yield each column of new tokens.

    If a model has a cache, it reads each token once, as long as all rows are
    equally long and fit into its block. Then the window slides, and every
    token in it gets a new position. So the whole window is computed again for
    each new token. Without a cache, or for rows of different lengths, this is
    always so.
    """
    reader, modules = cache_reader(model), _modules(model)
    read_next = getattr(reader, "next_log_probs", None)
    if read_next and "cache" not in signature(read_next).parameters:
        read_next = None
    cache: Any = None
    seen = 0
    for _ in range(count):
        longest = max(lengths)
        fits = min(lengths) == longest <= model.block_size
        with _in_eval(modules), torch.no_grad():
            if reader is not None and fits:
                if cache is None:
                    cache = reader.init_cache(len(lengths))
                piece, seen = rows[:, seen:longest], longest
                log_probs = (
                    read_next(piece, cache)  # runs the head at one position
                    if read_next
                    else reader.decode(piece, cache)[:, -1]
                )
            else:
                cache = None  # its tokens have other positions from now on
                log_probs = _last_log_probs(model, rows, lengths)
            new = sampler.choose(log_probs, generator)
        rows[range(len(lengths)), lengths] = new
        lengths = [n + 1 for n in lengths]
        yield new


def _last_log_probs(
    model: LanguageModel,
    rows: Int[Tensor, "batch longest"],
    lengths: Sequence[int],
) -> Float[Tensor, "batch vocab"]:
    """Return log-probabilities after the last token of each padded row."""
    block, longest = model.block_size, max(lengths)
    width = min(block, longest)
    next_log_probs = getattr(model, "next_log_probs", None)
    if min(lengths) == longest and next_log_probs is not None:
        return next_log_probs(rows[:, longest - width : longest])
    starts = [max(0, n - block) for n in lengths]
    windows = torch.stack(
        [row[s : s + width] for row, s in zip(rows, starts, strict=True)]
    )
    last = [n - s - 1 for n, s in zip(lengths, starts, strict=True)]
    return model.log_probs(windows)[range(len(last)), last]


def _device_of(model: object, default: torch.device) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in model.parameters():
            return tensor.device
    return default


def _require_tokens(
    tokens: Tensor, vocab_size: int, row: int | None = None
) -> None:
    where = "" if row is None else f" of prompt {row}"
    if tokens.numel() == 0:
        raise ValueError(
            f"the prompt{'' if row is None else f' {row}'} is empty: tokens "
            f"of shape {tuple(tokens.shape)}"
        )
    whole = not tokens.is_floating_point() and tokens.dtype != torch.bool
    if tokens.dim() != 2 or not whole:
        raise ValueError(
            f"tokens{where} must be whole numbers of shape (batch, time), "
            f"got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside) > 0:
        raise ValueError(
            f"id {outside[0].item()}{where} is outside the vocabulary of "
            f"{vocab_size} ids"
        )
