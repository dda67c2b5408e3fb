"""The failure that a leak becomes: its smallest case, its place, its map.

The smallest case is the shortest sequence in which changing one token still
moves an earlier score.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..dependence.proof import Proof
from ..model.building import hooked
from ..model.reading import tensors_in
from ..rounding import floor_of
from ..tokens import SHORT, draw, others
from ..variant import Variant
from .leaks import Leak, LeakFinder, Trial
from .moved import influence_of
from .pictures import levels, text_map

Parts = list[Tensor]
Calls = dict[tuple[str, int], tuple[Parts, Parts]]

MAP = 8  # tokens in the map of a leak, where it is as short
FEW = 8  # tokens of a long text that are changed alone, in a heavy model


def explain(leak: Leak, proof: Proof) -> AssertionError:
    """Return the failure, in one sentence; its map is a note.

    The proof names the lines that let a later token through.
    """
    variant = leak.trial.variant
    with variant.subject.budget.overtime():
        return _explained(smallest(leak), proof)


def _explained(leak: Leak, proof: Proof) -> AssertionError:
    trial, row, variant = leak.trial, leak.row, leak.trial.variant
    base, changed = trial.base[row], trial.changed[row]
    time = trial.time
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
        f"{variant.conditions}; rounding there is {leak.noise:.1g})"
    )
    place = None
    if isinstance(variant.model, nn.Module):
        place = first_difference(
            variant.model,
            variant.scores,
            trial.base,
            trial.changed,
            row,
            leak.position + 1,
            floor_of(getattr(torch, leak.dtype)) * leak.noise / leak.size,
        )
    if place is not None:
        text += f"; first seen at {place}"
    if proof.way is not None:
        text += f"; {proof.way}; let through at {proof.way.culprit}"
    if time <= SHORT:
        text += f"; the input ids were {' '.join(map(str, base.tolist()))}"
    error = AssertionError(text)
    if time <= 2 * SHORT:
        error.add_note(text_map(_map(variant, base)))
    return error


def smallest(leak: Leak) -> Leak:
    """Return the leak at the smallest length, from a single token."""
    trial = leak.trial
    subject = trial.variant.subject
    vocab, generator = subject.vocab_size, subject.generator()
    row = trial.base[leak.row]
    lengths = range(2, min(SHORT, trial.time - 1) + 1)
    for time in filter(subject.lengths.accepts, lengths):
        drawn = draw(vocab, 1, time, generator, repeats=False)[0]
        for base in (drawn, row[:time]):
            changed = others(base, vocab, generator)
            found = _of_one_token(trial.variant, base, changed, 1)
            if found is not None:
                return found
    changed, split = trial.changed[leak.row], trial.splits[leak.row]
    return _of_one_token(trial.variant, row, changed, split) or leak


def _of_one_token(
    variant: Variant,
    base: Int[Tensor, "time"],
    changed: Int[Tensor, "time"],
    first: int,
) -> Leak | None:
    """Return a leak from changing one token only, or None."""
    time = base.numel()
    splits = list(range(first, time))
    if variant.subject.heavy and time > SHORT:
        splits = splits[:FEW]
    rows = base.repeat(len(splits), 1)
    other = rows.clone()
    for i, split in enumerate(splits):
        other[i, split] = changed[split]
    return LeakFinder().find(Trial(variant, rows, other, splits))


def _map(
    variant: Variant, ids: Int[Tensor, "time"]
) -> Float[Tensor, "length length"]:
    """Return the influence matrix, of eight tokens if they leak, too."""
    subject = variant.subject
    more = max(0, subject.lengths.fit(MAP) - ids.numel())
    rest = draw(subject.vocab_size, 1, more, subject.generator())[0]
    longer, short = (
        influence_of(variant, tokens)
        for tokens in (torch.cat([ids, rest]), ids)
    )
    return longer if levels(longer).triu(1).any() else short


def first_difference(
    model: nn.Module,
    run: Callable[[Int[Tensor, "batch time"]], object],
    base: Int[Tensor, "batch time"],
    changed: Int[Tensor, "batch time"],
    row: int,
    before: int,
    noise: float,
) -> str | None:
    """Return the path and class of the module that lets a difference in.

    The first one in the order of calls whose output of a row before the
    split changes though its inputs there do not; None where none shows it.
    Changed ids are those of base, but for the row from the split on; noise is
    the relative size that passes as rounding.
    """
    batch, time = base.shape
    left, right = (
        calls_at(model, partial(run, ids), (batch, time), row, slice(before))
        for ids in (base, changed)
    )
    name = first_of(left, right, noise)
    if not name:
        itself = f"{type(model).__name__}, the model itself"
        return None if name is None else itself
    return f"{name} ({type(model.get_submodule(name)).__name__})"


def first_of(left: Calls, right: Calls, noise: float) -> str | None:
    """Return the first module whose output differs though its input does not.

    None where no output differs; noise is relative.
    """
    shown = [
        (name, not _differ(inputs, right[name, count][0], noise))
        for (name, count), (inputs, outputs) in left.items()
        if (name, count) in right
        and _differ(outputs, right[name, count][1], noise)
    ]
    if not shown:
        return None
    return next((name for name, lets_in in shown if lets_in), shown[0][0])


def calls_at(
    model: nn.Module,
    run: Callable[[], object],
    size: tuple[int, int],
    row: int,
    at: slice,
) -> Calls:
    """Return what each call takes and puts out, in the order they end.

    Of one row, at some of its positions.
    """
    names = {module: name for name, module in model.named_modules()}
    calls: Calls = {}
    counts: Counter[str] = Counter()
    begun: list[Parts] = []

    def parts(value: Any) -> Parts:
        found = (_part(x, *size, row, at) for _, x in tensors_in(value))
        return [part for part in found if part is not None]

    def enter(module: nn.Module, *given: Any) -> None:
        begun.append(parts(given))

    def leave(module: nn.Module, *given: Any) -> None:
        name = names[module]
        counts[name] += 1
        calls[name, counts[name]] = begun.pop(), parts(given[-1])

    with hooked(names, leave, enter):
        run()
    return calls


def _part(
    x: Tensor, batch: int, time: int, row: int, at: slice
) -> Tensor | None:
    """Return a copy of what is of one row at positions, time first."""
    if x.ndim < 2 or not x.is_floating_point():
        return None
    if x.shape[0] == batch and time in x.shape[1:]:
        x = x[row].movedim(x.shape[1:].index(time), 0)
    elif x.shape[0] == batch * time:
        x = x[row * time : (row + 1) * time]
    elif x.shape[:2] == (time, batch):
        x = x[:, row]
    else:
        return None
    return x[at].detach().clone()


def _differ(left: Parts, right: Parts, noise: float) -> bool:
    """Whether any of two calls' tensors differ by more than rounding."""
    return any(
        a.shape == b.shape
        and not torch.allclose(
            a, b, 0.0, noise * float(a.abs().nan_to_num(posinf=0.0).max())
        )
        for a, b in zip(left, right, strict=False)
    )
