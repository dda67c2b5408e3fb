"""Write the values that a model computes to a file, for a later comparison."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch import Tensor

from ...files import replace_file
from ...running.context import one_run
from ...running.variant import own
from ...tracing.value import real
from ...tracing.value import statistics as of_value
from .given import Model, as_tokens, fitting, size_of, subject_of
from .recording import GRADIENT, TOKENS, name_of
from .side import Side


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

    A name such as "0012 layer 1 block.py:43 ln_1" has a number, the layer, the
    line, and the module or operation. For each value, the metadata has the
    file, line, operation, layer and shape as JSON. The array "tokens" has the
    ids.

    Args:
        model: as for diff_by_value.
        tokens: ids; None draws 16 random ids from a fixed seed.
        path: path of the .safetensors file to write.
        vocab_size: number of tokens, if the model does not declare it.
        dtype: dtype to run in; None means the dtype of the model's weights.
        gradients: whether to add "gradient NAME" for each parameter, from the
            mean cross-entropy of the next tokens.
        statistics: whether to write only mean, deviation, least, most and norm
            of each value. Use it if a file of all values would be too large.

    Returns:
        The number of written values.

    Raises:
        ValueError: if the tokens do not fit the model, the model raises, or
            no value of the model can be recorded.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"a recording is a .safetensors file, got {path}")
    if statistics and gradients:
        raise ValueError("statistics have no gradients")
    given = None if tokens is None else as_tokens(tokens)
    subject = subject_of(model, size_of(given), vocab_size)
    given = fitting(given, subject.block_size, subject.vocab_size)
    weights = own(subject).parameters
    kinds = [w.dtype for w in weights if w.is_floating_point()]
    dtype = dtype or next(iter(kinds), torch.float32)
    side = Side.run(subject, given, dtype, of_value if statistics else None)
    # the norm of a float16 value may be too large for float16
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
