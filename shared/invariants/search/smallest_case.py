"""The failure that a leak becomes: its smallest case, its place, its map."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..model.tokens import SHORT, draw, others
from ..pictures import levels, text_map
from .first_difference import first_difference
from .influence import influence_of
from .leaks import Search
from .tolerance import floor_of
from .trial import Leak, Mode, Trial

MAP = 8  # tokens in the map of a leak, where it is as short


def explain(search: Search, leak: Leak) -> AssertionError:
    """Return the failure, in one sentence; its map is a note."""
    leak = smallest(search, leak)
    trial, row = leak.trial, leak.row
    base, changed = trial.base[row], trial.changed[row]
    time = base.numel()
    differing = (base != changed).nonzero().flatten().tolist()
    token, last = differing[0], differing[-1]
    what = (
        f"sees token {token}: at length {time}, changing token {token} from "
        f"{int(base[token])} to {int(changed[token])}"
    )
    if token != last:
        what = (
            f"sees the tokens from {token} on: at length {time}, redrawing "
            f"tokens {token} to {last}"
        )
    text = (
        f"position {leak.position} {what} moves the scores of position "
        f"{leak.position} by {leak.size:.2g} ({leak.dtype}"
        f"{search.conditions(trial.mode)}; rounding there is {leak.noise:.1g})"
    )
    place = None
    if isinstance(search.model, nn.Module):
        place = first_difference(
            search.model,
            lambda tokens: search.run(tokens, trial.mode),
            trial.base,
            trial.changed,
            row,
            leak.position + 1,
            floor_of(getattr(torch, leak.dtype)) * leak.noise / leak.size,
        )
    if place is not None:
        text += f"; first seen at {place}"
    if time <= SHORT:
        text += f"; the input ids were {' '.join(map(str, base.tolist()))}"
    error = AssertionError(text)
    if time <= 2 * SHORT:
        error.add_note(text_map(_map(search, base, trial.mode)))
    return error


def smallest(search: Search, leak: Leak) -> Leak:
    """Return the leak at the smallest length, from a single token."""
    vocab, generator = search.subject.vocab_size, search.subject.generator()
    trial = leak.trial
    row = trial.base[leak.row]
    lengths = range(2, min(SHORT, row.numel() - 1) + 1)
    for time in filter(search.subject.lengths.accepts, lengths):
        drawn = draw(vocab, 1, time, generator, repeats=False)[0]
        for base in (drawn, row[:time]):
            changed = others(base, vocab, generator)
            found = _of_one_token(search, base, changed, trial.mode, 1)
            if found is not None:
                return found
    changed, split = trial.changed[leak.row], trial.splits[leak.row]
    return _of_one_token(search, row, changed, trial.mode, split) or leak


def _of_one_token(
    search: Search,
    base: Int[Tensor, "time"],
    changed: Int[Tensor, "time"],
    mode: Mode,
    first: int,
) -> Leak | None:
    """Return a leak from changing one token only, or None."""
    time = base.numel()
    splits = list(range(first, time))
    costs = search.subject.costs
    if costs.limited and time > SHORT:
        seconds = costs.of(time, double=search.double)
        splits = splits[: max(1, int(costs.left / seconds))]
    rows = base.repeat(len(splits), 1)
    other = rows.clone()
    for i, split in enumerate(splits):
        other[i, split] = changed[split]
    return search.find(Trial(rows, other, splits, mode))


def _map(
    search: Search, ids: Int[Tensor, "time"], mode: Mode
) -> Float[Tensor, "length length"]:
    """Return the influence matrix, of eight tokens if they leak, too."""
    subject = search.subject
    more = max(0, subject.lengths.fit(MAP) - ids.numel())
    rest = draw(subject.vocab_size, 1, more, subject.generator())[0]
    longer, short = (
        influence_of(lambda x: search.run(x, mode), tokens, subject)
        for tokens in (torch.cat([ids, rest]), ids)
    )
    return longer if levels(longer).triu(1).any() else short
