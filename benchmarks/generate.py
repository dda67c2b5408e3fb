"""How quickly new tokens come, one after another."""

from functools import partial

import torch
from torch import Tensor

from gpt_duet.comparison.benchmark_results import Run
from gpt_duet.generation import generate, optimize_for_decoding
from gpt_duet.protocol import CachedLanguageModel

from .gates import require_sound
from .models import Candidate, build_peers, build_styles
from .plan import Plan, Tokens
from .timing import Rounds, Tell
from .work import least_bytes


def measure_generate(plan: Plan, tell: Tell = lambda text: None) -> list[Run]:
    """Measure greedy decoding from a prompt.

    A style with a cache reads each token once, one without reads the whole
    text for each new token. On the CPU a style with a cache is optimized
    for it first, as `gpt-duet generate` does.
    """
    tell("building")
    trial = Tokens(plan, 1, max(plan.times)).ids
    everyone: list[tuple[Candidate, torch.dtype]] = []
    notes: list[str] = []
    for dtype in plan.dtypes:
        styles, notes = build_styles(plan, trial, dtype)
        everyone += [(style, dtype) for style in styles]
    peers, left_out = build_peers(plan)
    everyone += [(peer, plan.dtypes[0]) for peer in peers]
    for candidate, _ in everyone:
        tell(f"testing {candidate.name}")
        require_sound(candidate, trial, plan.config.vocab_size)
        if _cached(candidate) and plan.device.type == "cpu":
            optimize_for_decoding(candidate.model)
    runs = []
    for batch, prompt in plan.sizes:
        rounds, tokens = Rounds(plan, tell), Tokens(plan, batch, prompt)
        with torch.inference_mode():
            for candidate, dtype in everyone:
                name = candidate.name
                if dtype != plan.dtypes[0]:
                    name += f" {str(dtype).removeprefix('torch.')}"
                cached = _cached(candidate) or not candidate.style
                # the prompt is read with the first new token
                moved = sum(
                    least_bytes(plan.config, batch, 1, dtype.itemsize, past)
                    for past in range(prompt, prompt + plan.new)
                )
                rounds.add(
                    name,
                    partial(_decode, candidate, tokens, plan.new),
                    tokens=batch * plan.new,
                    parameters=candidate.parameters,
                    least_bytes=moved if cached else None,
                    note="with a cache" if cached else "without a cache",
                )
            runs.append(rounds.measure(tokens, notes + left_out))
    return runs


def _cached(candidate: Candidate) -> bool:
    return isinstance(candidate.model, CachedLanguageModel)


def _decode(candidate: Candidate, tokens: Tokens, new: int) -> Tensor:
    """Append new ids; transformers does so itself, without an end."""
    if candidate.style:
        return generate(candidate.model, tokens.ids, new)
    return candidate.model.generate(
        tokens.ids,
        attention_mask=torch.ones_like(tokens.ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
