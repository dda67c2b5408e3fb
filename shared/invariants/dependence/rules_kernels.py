"""Rules of kernels that run through time, or solve for it."""

import torch
from torch import Tensor

from .call import Call, rule
from .lattice import over
from .rules_mixing import scan


@rule("mkldnn_rnn_layer _cudnn_rnn miopen_rnn")
def recurrent(call: Call) -> Tensor | list[Tensor]:
    """Depend on what stands before in time, and the first state."""
    x = call["input"]
    # the kernel of the CPU has its input turned already
    turned = call.name == "mkldnn_rnn_layer" or not call.get("batch_first")
    time = 0 if turned else 1
    codes = over(call.plain("input"), -1)
    for name in call.tensors:
        if name != "input":
            codes = torch.maximum(codes, call.plain(name).amax())
    if call.get("bidirectional") or (call.get("num_layers") or 1) < 1:
        return codes.amax()
    codes = scan(codes, time, x.size(time), bool(call.get("reverse")))
    if x.dim() != call.outs[0].dim():
        return codes.amax()
    rest = [codes.amax() for _ in call.outs[1:]]
    return [codes, *rest]


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def cell(call: Call) -> Tensor:
    """One step of each row."""
    names = [n for n in call.tensors if call[n].dim() > 1]
    codes = [over(call.plain(n), -1) for n in names]
    most = codes[0]
    for one in codes[1:]:
        most = torch.maximum(most, one)
    return most.clamp(min=-1)


@rule(
    "linalg_matrix_exp linalg_cholesky_ex linalg_qr _linalg_svd _linalg_det "
    "_linalg_slogdet _linalg_eigh linalg_eig linalg_lu linalg_lu_factor_ex"
)
def of_a_matrix(call: Call) -> list[Tensor]:
    """Depend on all of the matrix, each on its own."""
    name = call.tensors[0]
    codes = over(call.plain(name), [-1, -2])[..., 0, 0]
    batch = call[name].dim() - 2
    return [codes[(..., *(None,) * (o.dim() - batch))] for o in call.outs]


@rule("linalg_solve_triangular triangular_solve")
def triangular(call: Call) -> Tensor | list[Tensor]:
    """A row depends on the rows that are solved before it."""
    a, b = ("self", "B") if "B" in call.args else ("A", "self")
    left = call.get("left", default=True)
    upper = bool(call["upper"]) ^ bool(call.get("transpose", default=False))
    found = _solved(call, a, b, upper, left, call["upper"])
    return [found, call.plain(a)][: len(call.outs)]


def _solved(
    call: Call, a: str, b: str, upper: bool, left: bool, stored: bool
) -> Tensor:
    size = call[a].size(-1)
    matrix = call.plain(a).expand(*call.plain(a).shape[:-2], size, size)
    cut = torch.ones(size, size, dtype=torch.bool, device=matrix.device)
    cut = cut.triu() if stored else cut.tril()
    matrix = matrix.masked_fill(~cut, -2)
    matrix = matrix.mT if upper != stored else matrix
    solved = call.plain(b)
    solved = solved if left else solved.mT
    matrix = matrix if left else matrix.mT
    backwards = upper if left else not upper
    rows = torch.maximum(over(matrix, -1), solved)
    rows = scan(rows, -2, size, backwards)
    return rows if left else rows.mT


@rule("linalg_inv_ex inverse linalg_solve_ex _linalg_solve_ex linalg_lu_solve")
def solved(call: Call) -> Tensor | list[Tensor]:
    """The same where a known triangle of zeros says so; else everything."""
    name = "self" if "self" in call.args else "A"
    zeros = call.zeros(name)
    size = call[name].size(-1)
    zeros = zeros.expand(*zeros.shape[:-2], size, size)
    above = torch.ones(size, size, dtype=torch.bool, device=zeros.device)
    matrix = call.plain(name)
    matrix = matrix.expand(*matrix.shape[:-2], size, size)
    free = [call.everything() for _ in call.outs[1:]]
    for upper, empty in ((False, above.triu(1)), (True, above.tril(-1))):
        if not bool((zeros | ~empty).all()):
            continue
        rows = over(matrix.masked_fill(empty, -2), -1)
        if "inv" in call.name:
            codes = scan(rows, -2, size, upper)
            codes = codes.expand(*codes.shape[:-2], size, size)
            return [codes.masked_fill(empty, -2), *free]
        if call["B"].dim() < call[name].dim() or not call["left"]:
            return [call.everything(), *free]
        rows = torch.maximum(rows, call.plain("B"))
        return [scan(rows, -2, size, upper), *free]
    if call["self" if "self" in call.args else "A"].dim() > 2:
        codes = over(matrix, [-1, -2])
        if "B" not in call.args:
            return [codes, *free]
        if call["B"].dim() == matrix.dim():
            axis = -2 if call["left"] else -1
            return [torch.maximum(codes, over(call.plain("B"), axis)), *free]
    return [call.everything(), *free]
