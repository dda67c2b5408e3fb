"""A run's values written to a file, for the tests of a port."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch import Tensor, nn

from ...files import replace_file
from ...invariants.context import one_run
from ...invariants.variant import own
from .given import Model, as_tokens, fitting, size_of, subject_of
from .recording import GRADIENT, TOKENS, name_of
from .side import Side
from .value import real
from .value import statistics as of_value


@one_run
def record_values(
    model: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None,
    path: Path | str,
    *,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = False,
    statistics: bool = False,
) -> int:
    """Write each value that a model computes to a file.

    Names are "0012 layer 1 block.py:43 ln_1": number, layer, line, and the
    module or the operation; the metadata has file, line, operation, layer
    and shape of each as JSON. "tokens" are the ids.

    Args:
        model: as for diff_by_value.
        tokens: ids; None: 16 drawn from a seed.
        path: of the .safetensors.
        vocab_size: number of tokens, where the model does not declare it.
        dtype: to run in; None: that of the model's weights.
        gradients: whether to add "gradient NAME" of each parameter, of the
            mean cross-entropy of the next tokens.
        statistics: whether to write of each value its mean, deviation, least,
            most and norm alone, for models too large to keep.

    Returns:
        How many values were written.

    Raises:
        ValueError: for tokens that do not fit, a model that raises, or one
            of which nothing can be recorded.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"a recording is a .safetensors, got {path}")
    if statistics and gradients:
        raise ValueError("statistics have no gradients")
    given = None if tokens is None else as_tokens(tokens)
    subject = subject_of(model, size_of(given), vocab_size)
    given = fitting(given, subject.block_size, subject.vocab_size)
    built = own(subject).model
    weights = built.parameters() if isinstance(built, nn.Module) else ()
    kinds = [w.dtype for w in weights if w.is_floating_point()]
    dtype = dtype or next(iter(kinds), torch.float32)
    side = Side(subject, given, dtype, of_value if statistics else None)
    # a norm may be too large for float16
    stored = torch.promote_types(dtype, torch.bfloat16)
    lines = [
        value
        for value in side.values
        if not value.place.inside or value.number == side.last
    ]
    names = {v.number: f"{v.number:04} {name_of(v.place)}" for v in lines}
    arrays: dict[str, Tensor] = {}

    def keep(number: int, value: Tensor) -> None:
        found = real(value.detach().cpu()).clone().contiguous()
        arrays[names[number]] = found.to(stored) if statistics else found

    side.visit(names, keep)
    metadata = {
        names[value.number]: json.dumps(
            value.place.to_dict() | {"shape": list(value.shape)}
        )
        for value in lines
    }
    for name, gradient in (side.gradients() if gradients else {}).items():
        arrays[GRADIENT + name] = gradient.contiguous()
    arrays[TOKENS] = given.contiguous()
    with replace_file(path) as beside:
        save_file(arrays, beside, metadata)
    return len(lines)
