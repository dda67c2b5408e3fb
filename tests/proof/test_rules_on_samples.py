"""The rules of proofs, tested on each operation for which torch has samples.

The entries of an operation's arguments get random codes. Then all entries with
one code are changed. Only entries of the result with at least that code may
change. A new rule needs no new test here. EXACT in test_dependence.py has
cases written by hand.
"""

import warnings
from collections import Counter
from itertools import product

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpt_duet.proof.call import RULES
from gpt_duet.proof.codes import (
    CODES,
    HIDDEN,
    KNOWN,
    plain,
)
from gpt_duet.proof.leaving import codes_carried
from gpt_duet.proof.shadows import Shadows

TOKENS = 4  # how many codes there are besides KNOWN
SAMPLES = 3  # how many samples of each operation are tried
SHARE = 0.3  # share of a sample's values that are set to -inf
SHARDS = 2
# Operations that return uninitialised memory, or have no kernel for the CPU.
UNSET = (
    "jiterator",
    "empty",
    "new_empty",
    "resize",
    "rand",
    "svd_lowrank",
    "pca_lowrank",
)


class WrongCode(Exception):
    """A value changed although its code forbids it."""


def numbers(values):
    """Return the strided, non-empty tensors among the arguments."""
    found = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
    return [v for v in found if v.layout == torch.strided and v.numel()]


def copied(values, strided=False):
    """Return copies of arguments; if `strided`, they are not contiguous."""

    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        if strided and value.dim() > 1:
            return (
                value.detach()
                .mT.clone(memory_format=torch.contiguous_format)
                .mT
            )
        return value.detach().clone()

    return tree_map(copy, values)


def changed(value, where, generator):
    """Return a tensor with other values at `where`; permute integers."""
    if value.is_floating_point() or value.is_complex():
        # values so large that 1.7 times the value would overflow
        lowest = value.isfinite() & (value.abs() > 1e30)
        other = torch.where(lowest, value * 0.6, value * 1.7 + 0.3)
        return torch.where(where, other, value)
    if value.dtype == torch.bool:
        return value ^ where
    other = value.flatten()[torch.randperm(value.numel(), generator=generator)]
    return torch.where(where, other.view(value.shape), value)


def outcome(function, values):
    torch.manual_seed(0)
    with torch.no_grad():
        return function(values)


def judged(function, sample, strided, seed):
    """Return "exact", "wide", "read" or "none"; a wrong code raises.

    "exact": most codes are as small as possible. "wide": they are larger.
    "read": the operation reads numbers, so it is not tested. "none": it has no
    rule.
    """
    generator = torch.Generator().manual_seed(seed)
    base = copied(sample, strided)
    codes = [
        torch.randint(KNOWN, TOKENS, t.shape, generator=generator).to(CODES)
        for t in numbers(base)
    ]
    for tensor, code in zip(numbers(base), codes, strict=True):
        # from the second seed on, some values are -inf
        if seed and tensor.is_floating_point():
            hidden = torch.rand(code.shape, generator=generator) < SHARE
            lowest = torch.rand(code.shape, generator=generator) < SHARE
            tensor.masked_fill_(lowest, torch.finfo(tensor.dtype).min)
            tensor.masked_fill_(hidden, -torch.inf)
            code += HIDDEN * (hidden & (code > KNOWN))
    shadows, given = Shadows(), copied(base, strided)
    for tensor, code in zip(numbers(given), codes, strict=True):
        shadows.mark(tensor, code)
    with codes_carried(shadows):
        results = numbers([outcome(function, given)])
    notes = shadows.notes
    if notes.reads or notes.left or notes.padding:
        return "read"
    found = [plain(shadows.codes(r)).expand(r.shape) for r in results]
    before = [
        r.clone() for r in numbers([outcome(function, copied(base, strided))])
    ]
    if len(before) != len(found):
        return "read"
    latest = [torch.full(r.shape, KNOWN) for r in before]
    for code in range(TOKENS):
        other = copied(base, strided)
        for tensor, of in zip(numbers(other), codes, strict=True):
            tensor.copy_(changed(tensor, plain(of) == code, generator))
        try:
            after = numbers([outcome(function, other)])
        except Exception:  # the operation rejects these arguments
            continue
        for old, new, last, bound in zip(
            before, after, latest, found, strict=True
        ):
            if old.shape != new.shape:
                return "read"
            moved = (old != new) & ~(old.isnan() | new.isnan())
            if bool((moved & (bound < code)).any()):
                raise WrongCode(f"moves with {code}, allowed: {bound}")
            last[moved] = code
    if notes.unknown:
        return "none"
    tight = all(
        bool((a >= b.clamp(max=TOKENS - 1)).double().mean() > 0.8)
        for a, b in zip(latest, found, strict=True)
    )
    return "exact" if tight else "wide"


def variants(op):
    """Yield functions of (input, args, kwargs): plain, in place, with out=."""

    def call(function):
        return lambda v: function(v[0], *v[1], **v[2])

    yield call(op)
    if op.inplace_variant is not None:
        yield call(op.inplace_variant)
    if op.supports_out:

        def out(v):
            results = tree_map(torch.empty_like, op(v[0], *v[1], **v[2]))
            op(v[0], *v[1], **v[2], out=results)
            return results

        yield out


def judged_in_all_ways(op):
    """Return the most common result of `judged` on some samples."""
    dtype = torch.float64
    if dtype not in op.dtypes:
        dtype = min(op.dtypes, key=str)
    kinds = Counter()
    samples = list(op.sample_inputs("cpu", dtype))[:SAMPLES]
    for number, sample in enumerate(samples):
        values = sample.input, sample.args, sample.kwargs
        for function, strided in product(variants(op), (False, True)):
            try:
                kind = judged(function, values, strided, number)
            except WrongCode:
                raise
            # this variant of the operation rejects these arguments
            except Exception:
                continue
            kinds[kind] += not number
    return kinds.most_common(1)[0][0] if kinds else "refused"


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operation_stays_within_its_rule(shard, capsys):
    pytest.importorskip("expecttest", reason="torch's samples import it")
    kinds, wrong = Counter(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        for op in op_db[shard::SHARDS]:
            if any(word in op.name for word in UNSET) or not op.dtypes:
                continue
            try:
                kinds[judged_in_all_ways(op)] += 1
            except WrongCode as error:
                wrong[op.name] = str(error)
    with capsys.disabled():
        print(f"\nrules of torch's operations, shard {shard}: {dict(kinds)}")
    assert not wrong, wrong
    assert kinds["exact"] > 100
    assert kinds.total() - kinds["refused"] > 290


def test_a_wrong_rule_is_found(monkeypatch):
    def forgetful(call):
        return torch.full_like(call.codes("self"), KNOWN)

    x, function = torch.randn(4, 4), lambda v: v[0].cumsum(*v[1])
    assert judged(function, (x, (0,)), False, 0) == "exact"
    monkeypatch.setitem(RULES, "cumsum", forgetful)
    with pytest.raises(WrongCode, match="moves with"):
        judged(function, (x, (0,)), False, 0)
