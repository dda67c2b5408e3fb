"""Gradients: none from the future, and none missing."""

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import SkipCheck
from ..model.subject import Subject
from ..model.tokens import SMALL, draw, splits_to_try
from ..search.copies import awake
from ..search.leaks import Mode, Search
from ..search.rounding import FLOOR, epsilon, is_real, rows_at_once
from .embedding import gradients_at

ROUNDING_SHARE = 1e-6  # of the largest gradient: in float32, rounding


def check_causal_gradients(subject: Subject) -> str:
    """The gradient of output t by the embedding of a later token is 0.

    Why: a custom backward may leak where values do not, and a value may be
    the same by chance where its gradient is not.
    How: rows of equal tokens; row t has the gradient of a random
    combination of position t's scores. What lies after t must be 0 to
    rounding. In eval and train mode, and with larger weights.
    Cost: one forward and backward for each of some eight lengths.
    Reports: triton-lang/triton 4541, a backward kernel that ignores the
    causal flag of its forward.
    """
    longest = subject.block_size
    if longest < 2:
        return "one token has no future"
    generator = torch.Generator().manual_seed(subject.seed)
    searches = [
        (Search(subject, subject.precise()), Mode()),
        (
            Search(subject, subject.precise()),
            Mode(", in train mode", training=True),
        ),
    ]
    copy = awake(subject)
    if copy is not None:
        words = ", with larger weights"
        searches.append((Search(subject, copy, words), Mode()))
    lengths = {min(t, longest) for t in (2, 3, 7, SMALL)}
    for search, mode in searches:
        for time in sorted(lengths):
            _gradients(search, mode, time, generator)
        if not subject.heavy or not mode.training:
            _gradients(search, mode, longest, generator)
    return f"lengths 2 to {longest}, eval and train mode"


def _gradients(
    search: Search, mode: Mode, time: int, generator: torch.Generator
) -> None:
    subject = search.subject
    positions = list(range(time - 1))
    if time > SMALL:
        splits = splits_to_try(time, generator, 2 if subject.heavy else 8)
        positions = [s - 1 for s in splits]
    at_once = max(1, rows_at_once(subject, time) // 4)
    tokens = draw(subject.vocab_size, 1, time, generator, repeats=False)
    seed = int(torch.randint(1 << 30, (1,), generator=generator))
    for first in range(0, len(positions), at_once):
        part = positions[first : first + at_once]

        def measure(part: list[int] = part) -> torch.Tensor | None:
            weights = torch.Generator().manual_seed(seed)
            return gradients_at(search, tokens, part, weights, mode)

        grads = measure()
        if grads is None:
            raise SkipCheck("no embedding of the tokens can be found")
        grads = grads.cpu()
        future = torch.zeros_like(grads, dtype=torch.bool)
        for row, position in enumerate(part):
            future[row, position + 1 :] = True
        ahead = grads.masked_fill(~future, 0.0).nan_to_num(nan=float("inf"))
        past = float(grads.masked_fill(future, 0.0).nan_to_num().max())
        noise = max(past, 1e-300) * 2.3e-16
        if subject.dtype != torch.float64 and not _is_double(search.model):
            noise = max(past, 1e-300) * torch.finfo(subject.dtype).eps
        size = float(ahead.max())
        if not size > FLOOR * noise:
            continue
        row, later = divmod(int(ahead.argmax()), time)

        def difference(
            row: int = row, later: int = later, part: list[int] = part
        ) -> torch.Tensor:
            grads = measure(part)
            assert grads is not None
            return grads[row, later].reshape(1)

        if is_real(search.model, difference, noise):
            share = size / past if past else float("inf")
            raise AssertionError(
                f"the scores of position {part[row]} have a gradient by the "
                f"embedding of token {later}, at length {time}: "
                f"{size:.2g}, {share:.2g} of the largest one from the past"
                f"{mode.words}{search.weights}"
            )


def _is_double(model: object) -> bool:
    return isinstance(model, nn.Module) and any(
        p.dtype == torch.float64 for p in model.parameters()
    )


def check_gradient_flow(subject: Subject) -> str:
    """Over several batches every trainable parameter gets a gradient.

    Why: a parameter that the optimiser never moves is dead weight: a layer
    that is never called, a detached branch, a head whose output is dropped.
    How: train mode, cross-entropy of random targets, batch after batch
    until each gradient has been different from 0; what still has none is
    tried on a copy whose zero-initialised parameters are redrawn. A
    gradient of mere rounding passes and is mentioned (a key's bias: softmax
    ignores a constant per row), as is a frozen parameter.
    Cost: one forward and backward where all is well, at most 16 more.
    Reports: state-spaces/s4 26, parameters that are used and yet get no
    gradient.
    """
    model = subject.build()
    if not isinstance(model, nn.Module):
        raise SkipCheck("a function has no parameters to see")
    if not subject.can_copy:
        raise SkipCheck("the model cannot be copied")
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    sizes = _gradient_sizes(subject, model)
    without = [name for name, size in sizes.items() if size == 0]
    if without:
        copy = awake(subject)
        if copy is not None:
            again = _gradient_sizes(subject, copy)
            without = [name for name in without if not again.get(name)]
    if without:
        shown = ", ".join(without[:4])
        more = f" and {len(without) - 4} more" if len(without) > 4 else ""
        raise AssertionError(
            f"{len(without)} of {len(sizes)} trainable parameters never get "
            f"a gradient: {shown}{more}"
        )
    if not sizes:
        raise AssertionError("the model has no trainable parameter")
    largest = max(sizes.values())
    share = max(ROUNDING_SHARE, 16 * epsilon_of(model))
    faint = [n for n, s in sizes.items() if 0 < s < share * largest]
    notes = f"{len(sizes)} parameters"
    if faint:
        notes += f"; only rounding reaches {', '.join(faint[:3])}"
        notes += f" and {len(faint) - 3} more" if len(faint) > 3 else ""
    if frozen:
        notes += f"; frozen: {', '.join(frozen[:3])}"
        notes += f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
    return notes


def epsilon_of(model: nn.Module) -> float:
    """Return the unit of rounding of a model's first parameter."""
    return max((epsilon(p) for p in model.parameters()), default=0.0)


def _gradient_sizes(subject: Subject, model: nn.Module) -> dict[str, float]:
    """Return the largest gradient entry that each parameter ever got."""
    generator = torch.Generator().manual_seed(subject.seed)
    time = min(32, subject.block_size)
    batch = max(1, min(8, rows_at_once(subject, time) // 4))
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sizes = dict.fromkeys(trainable, 0.0)
    for seed in range(16):
        tokens = draw(subject.vocab_size, batch, time, generator)
        targets = draw(subject.vocab_size, batch, time, generator)
        model.zero_grad(set_to_none=True)
        scores = subject.scores(
            model,
            tokens.to(subject.device),
            training=True,
            grad=True,
            seed=seed,
        )
        if not scores.requires_grad:
            raise AssertionError(
                "the scores carry no gradient in train mode: something "
                "detaches them"
            )
        F.cross_entropy(
            scores.flatten(0, 1).float()
            if scores.dtype != torch.float64
            else scores.flatten(0, 1),
            targets.flatten().to(scores.device),
        ).backward()
        for name, parameter in trainable.items():
            if parameter.grad is not None:
                largest = float(parameter.grad.abs().max())
                sizes[name] = max(sizes[name], largest)
        if all(sizes.values()):
            break
    return sizes
