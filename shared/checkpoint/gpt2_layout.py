"""The GPT-2 checkpoint layout, in which the styles exchange weights.

The layout is that of transformers' GPT2LMHeadModel. Linear weights are
(in, out), as in its Conv1D. lm_head.weight is left out if the head is tied to
wte.weight.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import GPTConfig

State = dict[str, Tensor]

# The four matrices of a block, which nn.Linear stores transposed.
LINEAR_WEIGHTS = (
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
# Names of causal masks, which older programs saved, sometimes as booleans.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.mask")


def gpt2_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the layout, except the head's."""
    C, inner = config.n_embd, config.inner_size
    block = {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (C, 3 * C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, C),
        "mlp.c_proj.bias": (C,),
    }
    return {
        "wte.weight": (config.vocab_size, C),
        "wpe.weight": (config.block_size, C),
        **{
            f"h.{i}.{name}": shape
            for i in range(config.n_layer)
            for name, shape in block.items()
        },
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
    }


def strip(state: Mapping[str, Tensor], *prefixes: str) -> State:
    """Remove prefixes from names, and leave out mask buffers."""
    stripped = {}
    for name, tensor in state.items():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        if name in stripped:
            raise ValueError(f"weights do not fit: {name} occurs twice")
        if not name.endswith(MASK_BUFFERS):
            stripped[name] = tensor
    return stripped


def read_gpt2(state: Mapping[str, Tensor], config: GPTConfig) -> State:
    """Bring a GPT-2 checkpoint to its full form, and check names and shapes.

    Args:
        state: tensors by name, with or without "transformer."; mask buffers
            and the head may be missing.
        config: the sizes that the checkpoint must have.

    Returns:
        Tensors by name, without prefix and buffers. lm_head.weight is always
        among them (it is wte.weight if it was missing).

    Raises:
        ValueError: if names or shapes do not fit; the message lists them.
    """
    state = strip(state, "transformer.")
    if "wte.weight" in state:
        state.setdefault("lm_head.weight", state["wte.weight"])
    shapes = gpt2_shapes(config)
    shapes["lm_head.weight"] = (config.vocab_size, config.n_embd)
    if "lm_head.bias" in state:
        shapes["lm_head.bias"] = (config.vocab_size,)
    require_shapes(state, shapes)
    return state


def axes(
    state: Mapping[str, Tensor], name: str, count: int
) -> tuple[int, ...]:
    """Return the shape of a tensor that must exist and have `count` axes."""
    if name not in state:
        raise ValueError(f"weights do not fit: missing {name}")
    shape = tuple(state[name].shape)
    if len(shape) != count:
        raise ValueError(f"{name} has shape {shape}, not {count} axes")
    return shape


def require_shapes(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError unless a state has exactly these names and shapes.

    The message names the first few problems of each kind, and counts them.
    """
    problems = []
    if missing := sorted(shapes.keys() - state.keys()):
        problems.append(f"missing {first_few(missing)}")
    if unknown := sorted(state.keys() - shapes.keys()):
        problems.append(f"unknown {first_few(unknown)}")
    wrong = [
        f"{name} {tuple(state[name].shape)} for {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != tuple(shape)
    ]
    if wrong:
        problems.append(f"wrong shapes {first_few(wrong)}")
    if problems:
        raise ValueError("weights do not fit: " + "; ".join(problems))


def load_exactly(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load copies of tensors into a model that was built on "meta".

    The model gets the dtype and the device of the tensors.

    Raises:
        ValueError: if names or shapes are not the model's.
    """
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    require_shapes(state, shapes)
    contiguous = torch.contiguous_format
    copies = {
        name: tensor.detach().clone(memory_format=contiguous)
        for name, tensor in state.items()
    }
    model.load_state_dict(copies, strict=True, assign=True)


def require_tied(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a head differs from wte, so that it cannot be tied.

    A difference of four units in the last place counts as rounding, because
    dividing a matrix by a root and multiplying it again costs up to two. The
    message has the size of the difference, or of the bias.
    """
    wte, head = state["wte.weight"], state["lm_head.weight"]
    if not (wte.equal(head) or units_apart(wte, head) <= 4):
        raise ValueError(
            "tie_weights=True, but lm_head.weight differs from wte.weight "
            f"by up to {(wte - head).abs().max():.3g}"
        )
    bias = state.get("lm_head.bias")
    if bias is not None and bias.any():
        raise ValueError(
            f"tie_weights=True, but lm_head.bias is up to "
            f"{bias.abs().max():.3g}"
        )


def units_apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of a and b in units of a's last place.

    A very small number loses precision when it is divided by the root of a
    row's length. For such numbers, the unit is that of the smallest number
    with full precision.
    """
    finfo = torch.finfo(a.dtype)
    smallest = finfo.smallest_normal * math.sqrt(a.size(-1))
    size = a.double().abs().clamp(min=smallest)
    _, exponent = torch.frexp(size)
    unit = finfo.eps * 2.0 ** (exponent - 1).double()
    return ((a.double() - b.double()).abs() / unit).max().item()


def first_few(names: list[str]) -> str:
    """Return the first few names and the count of the others, as a text."""
    rest = len(names) - 4
    return ", ".join(names[:4]) + (f" and {rest} more" if rest > 0 else "")
