"""Measure the property of each check directly, in float64 if possible.

`MEASUREMENTS[check](case)` raises an AssertionError if the property does not
hold. This file does not use gpt_duet.invariants, so it is a second opinion on
the checks there.
"""

import copy
import inspect
import math
import re
from functools import partial
from itertools import pairwise, product

import torch
from small_gpt import Attention, cross_entropy
from torch import nn

MODES = (False, True)  # values of Module.training

# --- A case: how to build, call and read a model ----------------------------


class Function(nn.Module):
    """A module that calls a plain function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def build(case, seed=0):
    """Return a fresh model in its own dtype, in train mode."""
    torch.manual_seed(seed)
    model = case.build()
    return model if isinstance(model, nn.Module) else Function(model)


def wide(case, seed=0):
    """Return a fresh model in eval mode, and in float64 if that works."""
    model = build(case, seed).eval()
    double = case.double and works(build(case).double(), case)
    return model.double() if double else model


def works(model, case):
    return not refuses(scores, model, draw(case, 1, 4))


def draw(case, batch, time, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(case.vocab_size, (batch, time), generator=generator)


def longest(case):
    return min(case.block_size, 32)


def raw(answer):
    """Return the tensor of scores from an answer of any kind."""
    if isinstance(answer, dict):
        answer = answer["logits"]
    if isinstance(answer, tuple):
        parts = [part for part in answer if isinstance(part, torch.Tensor)]
        answer = max(parts, key=torch.Tensor.dim)
    return answer if answer.dim() else answer.view(1, 1, 1)  # a loss


def scores(model, tokens, training=False, seed=1, **given):
    """Return scores (batch, time, vocab) in a mode, with a seed for draws."""
    if model.training != training:
        model.train(training)
    torch.manual_seed(seed)
    # restore autograd's switch, even if the model changes it
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        answer = raw(model(tokens, **given))
    # restore a batch axis that the model drops: only check_shape measures that
    return answer.reshape(len(tokens), -1, answer.size(-1))


def rounding(tensor):
    """Return a bound between rounding errors and leaks."""
    return 1e-10 if tensor.dtype == torch.float64 else 1e-3


def same(a, b):
    """Return whether scores differ only by rounding, compared to their spread.

    NaN equals nothing, and an infinity equals only itself.
    """
    spread = a[a.isfinite()].std(correction=0)
    gap = torch.where(a == b, 0.0, a - b).abs().max() / (1e-300 + spread)
    return bool(gap <= rounding(a))


def same_first_row(tokens, case):
    """Return random texts, but with the first row of `tokens`."""
    other = draw(case, *tokens.shape, seed=1)
    return torch.cat([tokens[:1], other[1:]])


def larger(model, factor):
    """Return a copy with larger weights; redraw parameters that start at 0."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.any():
                p.normal_()
            elif p.is_floating_point() and p.dim() > 1 and "wte" not in name:
                p.mul_(factor)
    return model


def gates(model):
    """Yield copies of a model whose scalar parameters have other values.

    In the first copy, each scalar that is 0 is redrawn. Each other copy
    changes one scalar.
    """
    yield larger(model, 1)
    for name, p in model.named_parameters():
        for value in (-0.5, 0.1, 0.3, 1.0, *range(2, 9)) * (p.dim() == 0):
            other = copy.deepcopy(model)
            with torch.no_grad():
                other.get_parameter(name).fill_(value)
            yield other


def trained(model):
    """Make the entries of each constant vector differ, as after training."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1 and p.any() and (p == p[0]).all():
                p.mul_(torch.linspace(0.5, 1.7, len(p)))
    return model


def refuses(call, *args):
    """Return the message of the error that a call raises, or ""."""
    try:
        call(*args)
    except (ValueError, IndexError, RuntimeError) as error:
        return str(error)
    return ""


# --- The properties ---------------------------------------------------------


def check_shape(case):
    model = wide(case)
    sizes = (1, 1), (1, longest(case)), (2, 8)
    for training, size in product(MODES, sizes):
        answer = raw(model.train(training)(draw(case, *size)))
        assert answer.shape == (*size, case.vocab_size)
    sliced = draw(case, 2, 7)[:, :-1]
    assert same(scores(model, sliced.contiguous()), scores(model, sliced))
    turned = sliced.t().contiguous().t()
    assert same(scores(model, sliced.contiguous()), scores(model, turned))


def check_finite(case):
    texts = (
        draw(case, 2, 1),
        draw(case, 4, longest(case)),
        draw(case, 2, 6).index_fill(1, torch.tensor(0), 0),
        torch.full((2, 6), case.vocab_size - 1),
    )
    for training, tokens in product(MODES, texts):
        model = wide(case)
        answer = scores(model, tokens, training)
        assert answer.isfinite().all()
        if answer.requires_grad:
            cross_entropy(answer, tokens).backward()
        for p in model.parameters():
            assert p.grad is None or p.grad.to_dense().isfinite().all()

    if not case.check or case.name.startswith("softmax"):
        model = larger(build(case).eval(), 20)
        assert scores(model, draw(case, 2, 8)).isfinite().all()


def suffixes(case, time):
    """Return (split, text, text): two texts that agree before the split."""
    row, other = draw(case, 1, time), draw(case, 1, time, seed=1)
    without_0 = row.clamp(min=int(case.vocab_size > 2))
    # pairs: old ids, and new ids (zeros, the next ids, or random ids)
    ends = (
        (without_0, torch.zeros_like(row)),
        (row, (row + 1) % case.vocab_size),
        (row, other),
    )
    return [
        (t, old, torch.cat([old[:, :t], new[:, t:]], 1))
        for t, (old, new) in product({1, time // 2, time - 1}, ends)
    ]


def optional(time):
    """Return optional arguments for one row, such as targets or positions."""
    at = torch.arange(time).view(1, -1)
    return {
        "targets": torch.where(at == time // 2 - 1, 0, -100),
        "position_ids": at,
        "token_type_ids": (at > time // 2).long(),
        "doc_ids": (at > time // 2).long(),
        "document_ids": (at[0] > time // 2).long(),
        "cu_seqlens": torch.tensor([0, time // 2, time]),
        "padding_mask": (at > 0).long(),
        "prefix": True,
        "logits_to_keep": time,
    }


def with_targets(model, tokens):
    """Yield no arguments; then targets, if the model takes them."""
    names = inspect.signature(model.forward).parameters
    yield {}
    given = {"targets": torch.zeros_like(tokens)}
    # only if the model returns scores and not just a loss
    if "targets" in names and raw(model(tokens, **given)).numel() > 1:
        yield given


def check_causality(case):
    model, own, short = wide(case), build(case), build(case).bfloat16()
    time, vocab = longest(case), case.vocab_size
    row, half = draw(case, 1, time), time // 2
    start, end = row.split(half, 1)
    alone = [(half, row, torch.cat([start, (end + 1) % vocab], 1))]
    lengths = {2, 8, time}
    if 65 < case.block_size < 200:
        lengths |= {64, 65}
    models = [model, larger(model, 10)]
    if any(p.dtype == torch.float64 for p in model.parameters()):
        models.append(larger(model, 200))
    if 100 < case.block_size < 200:
        lengths |= {100}
    runs = [(m, suffixes(case, n), {}) for m, n in product(models, lengths)]
    runs += [
        (m, [pair], {}) for m in gates(model) for pair in suffixes(case, 8)
    ]
    frozen = wide(case).requires_grad_(False)
    runs += [(m, alone, {}) for m in (model, own, frozen)]
    names = inspect.signature(model.forward).parameters
    given = [*optional(time).items()]
    given.append(("position_ids", torch.arange(time).view(1, -1) % half))
    runs += [
        (model, alone, {name: value}) for name, value in given if name in names
    ]
    if {"kwargs", "use_cache"} & {*names}:
        flag = "prefix" if "kwargs" in names else "use_cache"
        runs.append((model, alone, {flag: True}))
    together = getattr(model, "together", ())
    every = {**optional(time), "attention_mask": torch.ones(1, time).long()}
    runs.append((model, alone, {name: every[name] for name in together}))
    if not case.name.endswith("function") and case.block_size < 50:
        runs.append((own, suffixes(case, min(24, time)), {}))
        many = suffixes(case, case.block_size)
        runs.append((model, many * (4100 // case.block_size // 9 + 1), {}))
    half_precision = build(case).half()
    if works(half_precision, case):
        runs.append((half_precision, alone, {}))
    if works(short, case):
        runs.append((short, alone, {}))
    if "attention_mask" in inspect.signature(model.forward).parameters:
        shown = {"attention_mask": torch.arange(time)[None] < time - 2}
        runs += [(m, alone, shown) for m in (model, larger(model, 2000))]
    if case.name.startswith("four_axes"):
        four = torch.ones(1, 1, time, time).tril().bool()
        runs.append((model, alone, {"attention_mask": four}))
    # for a small vocabulary, try one text that ends in each id
    if vocab < 5000:
        ends = torch.arange(vocab).view(-1, 1, 1).expand(-1, 1, half)
        texts = [(half, row, torch.cat([start, end], 1)) for end in ends]
        runs.append((model, texts, {}))
        before = ends[..., :1]
        texts = [
            (half, *(torch.cat([start[:, 1:], i, rest], 1) for rest in both))
            for i in before
            for both in [(end, (end + 1) % vocab)]
        ]
        runs.append((model, texts, {}))
    kinds = (
        (False, torch.no_grad),
        (False, torch.enable_grad),
        (True, torch.enable_grad),
        (False, torch.inference_mode),
        (False, partial(torch.autocast, "cpu", torch.bfloat16)),
    )
    for (model, texts, given), (training, within) in product(runs, kinds):
        if kinds.index((training, within)) > 2 and model is not own:
            continue
        splits, *both = zip(*texts, strict=True)
        if within is torch.inference_mode:
            # a new model, because tensors made in inference mode cannot be
            # trained
            model = build(case)
        try:
            with within():
                one, two = (
                    scores(model, torch.cat(rows), training, **given)
                    for rows in both
                )
        except (AttributeError, IndexError, RuntimeError):
            # Some models need every target, or have no kernel for two dtypes.
            # A cache may need a set-up, or take only single tokens.
            refused = {"targets", "use_cache"} & {*given}
            assert refused or within is kinds[-1][1]
            continue
        for i, t in enumerate(splits):
            assert same(one[i, :t], two[i, :t])


def check_causal_gradients(case):
    model, tokens, kept = wide(case), draw(case, 1, 10), []
    if hasattr(model, "wte"):
        model.wte.register_forward_hook(
            lambda _module, _args, out: kept.append(out.requires_grad_())
        )
    for training, t in product(MODES, range(tokens.size(1) - 1)):
        answer = scores(model, tokens, training)[0, t]
        if not kept:
            return
        weights = torch.linspace(1, 2, case.vocab_size).to(answer)
        (grad,) = torch.autograd.grad(
            answer @ weights, kept[-1], materialize_grads=True
        )
        later = grad[0, t + 1 :].abs().max()
        assert later <= rounding(grad) * grad.abs().max()


def check_prefix_consistency(case):
    model, time = wide(case), longest(case)
    tokens = draw(case, 2, time)
    for t, given in product(range(1, time), with_targets(model, tokens)):
        cut = {name: ids[:, :t] for name, ids in given.items()}
        whole = scores(model, tokens, **given)[:, :t]
        assert same(whole, scores(model, tokens[:, :t].contiguous(), **cut))


def check_batch_independence(case):
    model = wide(case)
    for training, time in product(MODES, (3, 12)):
        tokens = draw(case, 5, time)
        first = scores(model, tokens, training)[0]
        others = same_first_row(tokens, case)
        assert same(first, scores(model, others, training)[0])
    many, long = draw(case, 17, 5), draw(case, 5, min(case.block_size, 40))
    if "attention_mask" in inspect.signature(model.forward).parameters:
        mask = torch.ones_like(tokens).triu()  # row i hides i columns
        whole = scores(model, tokens, attention_mask=mask)
        for row, shown in enumerate(mask.bool()):
            one = {"attention_mask": mask[[row]]}
            alone = scores(model, tokens[[row]], **one)
            assert same(whole[row, shown], alone[0, shown])
    for ids in (tokens, many, many[:8], long):
        for row, given in product(range(len(ids)), with_targets(model, ids)):
            one = {name: each[[row]] for name, each in given.items()}
            whole = scores(model, ids, **given)
            assert same(whole[[row]], scores(model, ids[[row]], **one))


def check_documents(case):
    """Require that a document has the scores that it has in its own row."""
    model, names = wide(case), inspect.signature(build(case).forward)
    for sizes, times, more in (
        ([10, 1, 2, 7], 1, 0),
        ([1] * 12, 1, 0),
        ([1] * 12, 64, 250),
        ([1] * 12, 1, 250),
        ([24, 8], 1, 0),
    ):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        ways = {
            "doc_ids": times * ids[None] + more,
            "document_ids": times * ids[None] + more,
            "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0),
        }
        given = {n: way for n, way in ways.items() if n in names.parameters}
        if given:
            documents_are_apart(case, model, given, ids)
    if given and "cu_seqlens" not in given:
        other_documents_are_apart(case, model, *given)


def documents_are_apart(case, model, given, ids):
    row, new = (draw(case, 1, len(ids), seed=seed) for seed in range(2))
    kinds, names = [given], inspect.signature(model.forward).parameters
    if "attention_mask" in names:
        kinds.append(given | {"attention_mask": torch.ones_like(row)})
    each = product(range(1 + int(ids[-1])), MODES)
    for (i, training), given in product(each, kinds):
        at = ids == i
        packed = scores(model, row, training, **given)
        other = torch.where(at, row, new)
        moved = scores(model, other, training, **given)
        assert same(packed[:, at], moved[:, at])
        assert same(packed[:, at], scores(model, row[:, at], training))


def other_documents_are_apart(case, model, name):
    """Require that other rows and earlier documents have no effect."""
    rows, ids = draw(case, 2, 8), torch.arange(8).repeat(2, 1) // 4
    ids[1] = torch.arange(8) // 6
    both = scores(model, rows, **{name: ids})
    for row, training in product(range(2), MODES):
        one = rows[[row]], training
        fresh = scores(wide(case), *one, **{name: ids[[row]]})
        assert same(both[[row]], fresh) or training
        scores(model, rows[:1], training, **{name: ids[:1]})
        assert same(fresh, scores(model, *one, **{name: ids[[row]]}))
        plain = scores(model, *one)
        assert same(plain, scores(wide(case), *one))


def check_order_sensitivity(case):
    model, time = larger(wide(case), 1), longest(case)
    for far in (8, 16):
        texts = draw(case, 8, time)
        texts[:, far] = (texts[:, 0] + 1) % case.vocab_size
        swapped, first, other = texts.clone(), texts.clone(), texts.clone()
        swapped[:, [0, far]] = texts[:, [far, 0]]
        first[:, 0], other[:, far] = texts[:, far], texts[:, 0]
        last, *rest = (
            scores(model, ids)[:, -1] for ids in (texts, swapped, first, other)
        )
        swap, *alone = (same(last, each) for each in rest)
        assert any(alone) or not swap


def check_context_use(case):
    model = larger(wide(case), 1)
    config = getattr(model, "config", None)
    window = getattr(model, "window", getattr(config, "sliding_window", None))
    seen = window or longest(case)
    for time in {seen, min(seen + 1, longest(case))}:
        tokens = draw(case, 24, time)
        last = scores(model, tokens)[:, -1]
        for s in range(time - seen, time):
            changed = tokens.clone()
            changed[:, s] = (changed[:, s] + 1) % case.vocab_size
            assert not last.equal(scores(model, changed)[:, -1])


@torch.no_grad()
def check_determinism(case):
    model, tokens = wide(case), draw(case, 2, 8)
    first = scores(model, tokens)
    for time in (8, longest(case), 1):
        scores(model, draw(case, 2, time, seed=time))
        assert same(first, scores(model, tokens, seed=time))
    rows = torch.cat([tokens[:1], 0 * tokens[1:]])
    longer = draw(case, 2, min(case.block_size, 24))
    ends = torch.cat([longer[:, :8], 0 * longer[:, 8:]], 1)
    for first, other in ((tokens, rows), (longer, ends)):
        scores(model, first)
        assert same(scores(model, other), scores(wide(case), other))
    names, at = inspect.signature(model.forward).parameters, torch.arange(8)
    for name in {"position_ids", "attention_mask", "doc_ids"} & {*names}:
        one, two = ({name: (at >= k).long().expand(2, 8)} for k in (1, 5))
        scores(model, tokens, **one)
        again = scores(model, tokens, **two)
        assert same(again, scores(wide(case), tokens, **two))


def check_purity(case):
    """Compare the caller's tensors and settings before and after a call."""
    for training in MODES:
        model = wide(case).train(training)
        state = copy.deepcopy(model.state_dict())
        tokens = torch.arange(case.vocab_size)[-24:].repeat(8, 1)
        given, after = tokens.clone(), []
        for seed in (1, 2):
            before = torch.manual_seed(seed).get_state()
            model(given)
            after.append(torch.get_rng_state())
        # equal random states would show that the call has set the seed
        assert not torch.equal(*after)
        assert torch.is_grad_enabled()
        assert {m.training for m in model.modules()} == {training}
        assert given.equal(tokens)
        if not training:
            assert before.equal(after[-1])
            for name, tensor in model.state_dict().items():
                assert tensor.equal(state[name])


def check_normalised(case):
    if case.outputs == "log_probs":
        sums = scores(wide(case), draw(case, 3, 9)).logsumexp(-1)
        assert sums.abs().max() <= 1e-9


def check_initial_loss(case):
    tokens, targets = draw(case, 8, 16), draw(case, 8, 16, seed=1)
    loss = cross_entropy(scores(wide(case), tokens).double(), targets).item()
    assert abs(loss - math.log(case.vocab_size)) < 1.5


def check_signal(case):
    """Require that norms tell texts apart, and scores are not too large."""
    model, kept = wide(case), {}

    def keep(module, args, answer):
        kept.setdefault(module, []).append((args[0], answer))

    for module in model.modules():
        if isinstance(module, nn.LayerNorm | Attention):
            module.register_forward_hook(keep)
    for seed in (0, 1):
        scores(model, draw(case, 2, longest(case), seed))
    for module, calls in kept.items():
        (x, one), *_, (_, two) = calls
        if isinstance(module, nn.LayerNorm):
            assert not one.equal(two)
        elif module.qkv.out_features == 3 * module.qkv.in_features:
            q, k, _ = map(module.split, module.qkv(x).chunk(3, -1))
            assert module.scores(q, k).std() <= 7


def with_gradient(loss, weight):
    """Return a loss joined with its gradient, if the loss has one."""
    if not loss.requires_grad:
        return loss.double()
    (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
    return torch.cat([loss.detach().view(1), grad.flatten()])


def check_loss(case):
    model = wide(case)
    names = {"targets", "labels"} & {
        *inspect.signature(model.forward).parameters
    }
    kinds = product(names, (None, -100, -1), MODES)
    for name, ignored, training in kinds:
        model.train(training)
        tokens, targets = draw(case, 3, 12), draw(case, 3, 12, seed=1)
        targets[:, 1:3] = case.vocab_size - 1
        options = {}
        if ignored is not None:
            options["ignore_index"] = targets[0, ::2] = ignored
        own = targets.clone()
        try:
            answer = model(tokens, **{name: targets})
        except IndexError:
            continue  # the loss does not ignore targets with this mark
        assert targets.equal(own)
        if not training and answer[0] is not None:
            assert same(scores(model, tokens), raw(answer))
        loss = next(p for p in answer if p is not None and p.dim() == 0)
        if answer[0] is None:
            answer = model(tokens)
        as_given = cross_entropy(raw(answer), own, **options)
        shifted = cross_entropy(raw(answer)[:, :-1], own[:, 1:], **options)
        found, *wanted = (
            with_gradient(each, model.head.weight)
            for each in (loss, as_given, shifted)
        )
        assert any(
            found.shape == each.shape and torch.allclose(found, each)
            for each in wanted
        )


def check_gradient_flow(case):
    model = wide(case)
    trainable = ((n, p) for n, p in model.named_parameters() if p.numel())
    without, moved = {n for n, p in trainable if p.requires_grad}, {}
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    faint = without & {f"{name}.weight" for name in layers}
    for step in range(6 if without else 0):
        tokens = draw(case, 4, case.block_size, seed=step)
        answer = scores(model, tokens, training=True, seed=step)
        model.zero_grad()
        cross_entropy(answer, tokens.roll(-1, 1)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        largest = max(float(g.to_dense().abs().max()) for g in grads)
        for name, p in model.named_parameters():
            if p.grad is not None and p.grad.to_dense().any():
                if not p.grad.to_dense().abs().max() <= 1e-7 * largest:
                    faint.discard(name)  # a NaN gradient is not faint either
                without.discard(name)
                grad = p.grad.to_dense()
                p.data -= 0.01 * grad.sign()  # moves parameters away from 0
                if p.dim() and not name.startswith(("wte", "head")):
                    moved[name] = moved.get(name, 0) + grad.abs()
    assert not without
    assert not faint
    for parts in moved.values():
        if parts.dim() == 1 or parts.shape == (3, 2):
            assert parts.all()
            continue
        for axis in (0, 1):
            assert (parts.amax(axis) == 0).sum() < 2 or len(parts) < 3


def require_scaled_loss(model, tokens):
    """Require that twice the loss has twice the gradient."""
    if "targets" not in inspect.signature(model.forward).parameters:
        return
    for training in MODES:
        found = []
        for factor in (1, 2):
            model.train(training).zero_grad()
            torch.manual_seed(0)
            answer = model(tokens, targets=tokens.clone())
            tensors = [part for part in answer if torch.is_tensor(part)]
            losses = [part for part in tensors if part.dim() == 0]
            if not losses or not losses[0].requires_grad:
                return
            (factor * losses[0]).backward()
            found.append(model.head.weight.grad / factor)
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def check_gradients(case):
    """Compare the largest entry of each gradient with finite differences."""
    model = larger(wide(case), 1)
    tokens = draw(case, 3, 6)
    tokens[:, -1] = tokens[:, 0]
    weights = torch.linspace(-1, 2, 18 * case.vocab_size)

    def value(training):
        return (scores(model, tokens, training).flatten() * weights).sum()

    def slope(entry, step, training):
        old, ends = entry.item(), []
        for end in (old + step, old - step):
            entry.fill_(end)
            ends.append(value(training).item())
        entry.fill_(old)
        return (ends[0] - ends[1]) / (2 * step)

    require_scaled_loss(model, tokens)
    if value(False).dtype != torch.float64:
        return
    for training, p in product(MODES, list(model.parameters())):
        if p.dtype != torch.float64 or not p.requires_grad or not p.numel():
            continue
        model.zero_grad()
        value(training).backward()
        if p.grad is None:
            continue
        grad = p.grad.to_dense().flatten()
        largest = grad.abs().argmax().item()
        found, entry = grad[largest], p.data.view(-1)[largest]
        # two step sizes: the larger is for models that compute in float32
        slopes = [slope(entry, step, training) for step in (1e-5, 1e-2)]
        gap = min(abs(each - found) for each in slopes)
        assert 0 in slopes or gap <= 2e-3 * (1 + abs(found))


def check_state_dict(case):
    model, other, fresh = wide(case), wide(case, seed=1), wide(case)
    tokens = draw(case, 2, 8)
    scores(model, tokens)
    scores(other, tokens)
    state = larger(fresh, 3).state_dict()
    for each in (fresh, other):
        each.load_state_dict(state)
    # after an evaluation, the model must use the loaded or changed weights
    assert same(scores(fresh, tokens), scores(other, tokens))
    model.train(True)
    with torch.no_grad():
        for p, new in zip(model.parameters(), fresh.parameters(), strict=True):
            p.copy_(new)
    assert same(scores(fresh, tokens), scores(model, tokens))
    # three calls in train mode, which may change buffers
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        scores(model, tokens, True)
    fresh.load_state_dict(model.state_dict())
    assert same(scores(fresh, tokens), scores(model, tokens))


def check_dtype(case):
    if isinstance(build(case), Function):
        return
    tokens = draw(case, 2, 8)
    for cast in ("double", "bfloat16", "half"):
        # .to(dtype) would drop the imaginary part of complex buffers
        model = getattr(build(case), cast)()
        floats = [p for p in model.parameters() if p.is_floating_point()]
        assert works(model, case)
        assert scores(model, tokens).dtype == floats[0].dtype
    model = build(case)
    if {p.dtype for p in model.parameters()} == {torch.float64}:
        before = scores(model, tokens).detach()
        with torch.no_grad():
            # a change that only float64 shows: float32 ignores it
            model.wte.weight.mul_(1 + 1e-9)
        moved = (scores(model, tokens).detach() - before).abs().amax(-1)
        assert (moved > 0).all()
    if 257 < case.block_size < 1000:  # bfloat16 must tell positions apart
        ids = torch.zeros(1, case.block_size).long()
        few, many = (
            len(torch.unique(model.embed(ids)[0], dim=0))
            for model in (build(case).bfloat16(), build(case).double())
        )
        assert few == many
    moved = build(case).to("meta").eval()
    for module in moved.modules():
        for value in vars(module).values():
            assert not isinstance(value, torch.Tensor) or value.is_meta
    # an error about two devices is a fault; an error because "meta" tensors
    # have no values is not
    mixed = "same device|two devices|expected device"
    assert not re.search(mixed, refuses(moved, tokens.to("meta")))


def check_length_limit(case):
    model = wide(case)
    limit = getattr(model, "block_size", None)
    assert not limit or refuses(model, draw(case, 1, limit + 1))


def check_vocabulary(case):
    model, vocab = wide(case), case.vocab_size
    # `larger` redraws a head that starts at 0
    answer = scores(larger(model, 1), draw(case, 4, 8)).flatten(0, 1)
    still = (answer == answer[0]).all(0) & (answer > answer.amax() - 30).all(0)
    assert still.sum() <= 1
    texts = torch.arange(min(vocab, 99)).view(-1, 1) * torch.tensor([0, 1])
    last = scores(larger(model, 1), texts)[:, -1]
    alike = [same(x, y) for x, y in pairwise(last)]
    assert all(alike) or not any(alike)
    for outside in (vocab, vocab + 5, -1, -vocab - 1):
        assert refuses(model, torch.tensor([[1, outside, 1]]))


@torch.no_grad()
def cached(model, piece, past, start, **mask):
    """Return the scores of a piece, and the cache or None.

    None means that the model itself keeps the cache.
    """
    taken = inspect.signature(model.forward).parameters
    if "past_key_values" in taken:
        more = {"past_key_values": past, "use_cache": True, **mask}
        return model(piece, **more).values()
    if "kv_cache" in taken:
        scores, _, after = model(piece, kv_cache=past)
        return scores, after
    if "start_pos" in taken:
        return model(piece, start_pos=start), None
    if hasattr(model, "setup_caches"):
        if model.past is None:
            model.setup_caches()
        elif start == 0:
            model.reset_caches()
        return model(piece, use_cache=True), None
    if hasattr(model, "init_cache"):
        return model.decode(piece, past or model.init_cache(len(piece)))
    return None


def fed(model, tokens, sizes, mask=None):
    """Return the scores of tokens that are fed in pieces of these sizes."""
    past, start, pieces = None, 0, []
    for piece in tokens.split(sizes, 1):
        end = start + piece.size(1)
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        answer, past = cached(model, piece, past, start, **seen)
        pieces.append(answer)
        start = end
    return torch.cat(pieces, 1)


def check_cache(case):
    model, time = trained(wide(case)), case.block_size
    tokens = draw(case, 2, time)
    if cached(model, tokens[:, :1], None, 0) is None:
        return
    ways = [[time], [1] * time, [5, time - 5], [time - 3, 1, 2]]
    if refuses(fed, model, tokens[:, :2], [2]):
        ways = ways[1:2]
    elif time > 20:
        ways.append([20] * (time // 20) + [time % 20])
    later = torch.arange(time) >= time // 2
    alike = torch.where(later, same_first_row(tokens, case).flip(0), tokens)
    three = tokens, same_first_row(tokens, case), alike
    for sizes, texts in product(ways, three):
        assert not refuses(fed, model, texts, sizes)
        assert same(scores(model, texts), fed(model, texts, sizes))
    if getattr(model, "init_cache", None):  # also decode two texts in turn
        past, second = model.init_cache(2), model.init_cache(2)
        before, _ = model.decode(tokens[:, :1], past)
        answer, _ = model.decode(tokens[:, 1:2], second)
        assert same(scores(model, tokens[:, 1:2]), answer)
        if hasattr(past, "reset"):
            past.reset()
            assert same(model.decode(tokens[:, :1], past)[0], before)
    longer = draw(case, 1, time + 1)
    assert not refuses(model, longer) or refuses(fed, model, longer, [time, 1])
    if "attention_mask" in inspect.signature(model.forward).parameters:
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, :3] = 0
        whole = scores(model, tokens[:, :9], attention_mask=mask)
        pieces = fed(model, tokens[:, :9], [5, 1, 1, 1, 1], mask)
        assert same(whole[mask.bool()], pieces[mask.bool()])


def trained_loss(case, batches):
    """Train on new batches; return the mean loss of the last 20 steps."""
    model = build(case)
    if case.vocab_size < 100:
        model = model.float()
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(batches):
        answer = scores(model, tokens[:, :-1], training=True, seed=step)
        loss = cross_entropy(answer, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # AdamW takes no sparse gradients
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def check_entropy_bound(case):
    if not [*build(case).parameters()]:
        return
    vocab, generator = min(case.vocab_size, 17), torch.Generator()
    entropy = math.log(vocab)

    def drawn(*shape):
        return torch.randint(vocab, shape, generator=generator)

    noise = trained_loss(case, (drawn(16, 17) for _ in range(100)))
    assert noise >= entropy - 0.1
    copies = (drawn(16, 1).expand(-1, 17) for _ in range(100))
    assert trained_loss(case, copies) <= 0.5 * entropy


MEASUREMENTS = {
    name: measure
    for name, measure in globals().items()
    if name.startswith("check_")
}
