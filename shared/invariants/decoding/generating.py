"""A model's own generate, with and without its cache: the same ids."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ..context import during, seed_all
from ..errors import SkipCheck
from ..model.building import KeptState
from ..model.calling import token_argument
from ..model.inputs import CACHED, FLAG
from ..subject import Subject
from ..variant import both

COUNTS = (
    *("max_new_tokens", "new_tokens", "num_new_tokens", "n_new_tokens"),
    *("max_tokens", "num_tokens", "n_tokens", "steps"),
)
GREEDY = {"do_sample": False, "top_k": 1, "temperature": 1.0}
NEEDED = (
    "give the model init_cache(batch) and decode(tokens, cache), or name "
    "what makes its cache: --cache my_pkg:make_cache"
)


def compare_generate(subject: Subject, reason: str) -> str:
    """Require the same ids of generate with and without its cache.

    Raises:
        SkipCheck: for a model without it; the reason is that of others.
    """
    fresh, *larger = both(subject)
    generate = getattr(fresh.model, "generate", lambda: 0)
    arguments, _ = token_argument(generate)
    flag = next((n for n in arguments if FLAG.fullmatch(n)), None)
    count = next((n for n in COUNTS if n in arguments), None)
    if flag is None or count is None:
        may = [n for n in subject.caller.optional if CACHED.search(n)]
        if may and not reason:
            reason = f"{' and '.join(may)} may take one"
        because = f" ({reason})" if reason else ""
        raise SkipCheck(f"no cache was found{because}: {NEEDED}")
    subject.require_no_noise()
    options = {n: v for n, v in GREEDY.items() if n in arguments}
    prompt = subject.draw(4, subject.block_size // 2).to(subject.device)
    new = min(8, subject.block_size - prompt.size(1))
    ways = f"generate with {flag}=True and {flag}=False, {new} new tokens"
    for variant in (*larger, fresh):
        state, texts = KeptState(variant.model), []
        variant.model.eval()
        for value in (False, True):
            state.put_back(always=True)
            seed_all(subject.seed)  # for one that draws all the same
            with during(f"in generate with {flag}={value}"), torch.no_grad():
                given = {count: new, flag: value}
                answer = variant.model.generate(
                    prompt.clone(), **options, **given
                )
                texts.append(_rows(answer)[..., -new:])
        if texts[0].shape != texts[1].shape:
            shapes = " and ".join(str((*text.shape,)) for text in texts)
            raise AssertionError(f"{ways}: of shapes {shapes}, without first")
        for row, at in (texts[0] != texts[1]).nonzero().tolist()[:1]:
            without, cached = (int(text[row, at]) for text in texts)
            raise AssertionError(
                f"{ways}: new token {at} of row {row} is {cached} with the "
                f"cache and {without} without, behind {prompt.size(1)} tokens"
            )
    return f"decoding: {ways}: the same ids"


def _rows(answer: Any) -> Tensor:
    """Return ids as (rows, time), of a tensor, a list or a generator."""
    if inspect.isgenerator(answer):
        answer = [*answer]
    if isinstance(answer, tuple):
        answer = answer[0]
    if isinstance(answer, list) and isinstance(answer[0], Tensor):
        answer = torch.cat([part.reshape(len(part), -1) for part in answer], 1)
    ids = torch.as_tensor(answer)
    return ids.unsqueeze(0) if ids.dim() == 1 else ids
