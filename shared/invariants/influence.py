"""Which output position depends on which input position."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .budget import Budget
from .context import one_run
from .copies import precise
from .meeting.meet import meet
from .model.building import Model
from .randomness import isolated
from .rounding import gaps
from .tokens import others, rows_at_once
from .variant import Variant


@one_run
def influence(
    model: Model,
    tokens: Int[Tensor, "*batch time"] | Sequence[int],
    *,
    vocab_size: int | None = None,
    rounds: int = 2,
    seed: int = 0,
    layout: str = "bt",
    outputs: str = "auto",
    device: torch.device | str | None = None,
) -> Float[Tensor, "time time"]:
    """Return how far each input position moves each output position.

    Entry [i, j] is the largest change of the scores of position i when token
    j alone is replaced: in float64 where the model can, in eval mode. For a
    causal model everything above the diagonal is 0.

    Args:
        model: a model, a function or a factory, as for check_model.
        tokens: ids of one sequence.
        vocab_size: where the model does not declare it.
        rounds: how many replacements of each token are tried.
        seed: of the replacements.
        layout: "tb" for a model that takes (time, batch).
        outputs: as for check_model.
        device: where to run; None: where the model is.

    Returns:
        The matrix, output position by input position; draw it with
        `save_map` or print it with `text_map`.

    Raises:
        ValueError: for more than one sequence, or a model that cannot be
            called.
    """
    ids = torch.as_tensor(tokens)
    if ids.ndim == 2 and ids.size(0) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.numel() == 0:
        raise ValueError(
            f"influence takes the ids of one sequence, got shape "
            f"{tuple(ids.shape)}"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"tokens must be whole numbers, got {ids.dtype}")
    subject = meet(
        model,
        vocab_size=vocab_size,
        block_size=ids.numel(),
        outputs=outputs,
        seed=seed,
        device=device,
        layout=layout,
    )
    subject.require_scores()
    if ids.numel() > subject.block_size:
        raise ValueError(
            f"{ids.numel()} tokens are more than the {subject.block_size} "
            f"that {subject.name} takes"
        )
    outside = ids[(ids < 0) | (ids >= subject.vocab_size)].tolist()
    if outside:
        raise ValueError(
            f"token {outside[0]} is outside the vocabulary of "
            f"{subject.vocab_size}"
        )
    with isolated(seed):
        variant = precise(subject, Budget())
        return influence_of(variant, ids.cpu().long(), rounds)


def influence_of(
    variant: Variant, ids: Int[Tensor, "time"], rounds: int = 2
) -> Float[Tensor, "time time"]:
    """Return the matrix of `influence` for one way to call a model."""
    subject, time = variant.subject, ids.numel()
    generator = subject.generator()
    matrix = torch.zeros(time, time, dtype=torch.float64)
    rows = min(rows_at_once(subject.vocab_size, time), time)
    base = variant.scores(ids.expand(rows, time).clone())
    for _ in range(rounds):
        replaced = others(ids, subject.vocab_size, generator)
        for start in range(0, time, rows):
            columns = [min(start + i, time - 1) for i in range(rows)]
            changed = ids.expand(rows, time).clone()
            changed[range(rows), columns] = replaced[columns]
            moved = gaps(variant.scores(changed), base).double().cpu()
            for i, j in enumerate(columns):
                matrix[:, j] = torch.maximum(matrix[:, j], moved[i])
    return matrix
