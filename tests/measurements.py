"""Each property measured directly, in float64 where a model can be.

`MEASUREMENTS[check](case)` returns what contradicts the property, in words,
or "" where it holds: a measurement yields contradictions, the first counts.
Nothing here knows shared.invariants: these are the second opinion on its
checks.
"""

import copy
import inspect
import math
import random
import re
from itertools import product

import small_gpt
import torch
from torch import nn

# --- A case: how to build, call and read a model ----------------------------


class Function(nn.Module):
    """A model that is a plain function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, tokens):
        return self.function(tokens)


def build(case, seed=0):
    """A fresh model in its own dtype and train mode."""
    torch.manual_seed(seed)
    model = case.build()
    return model if isinstance(model, nn.Module) else Function(model)


def wide(case, seed=0):
    """A fresh model in float64 if it works there, in eval mode."""
    model = build(case, seed).eval()
    if not getattr(case, "double", True):
        return model
    model = model.double()
    try:
        scores(model, draw(case, 1, 4), case)
    except RuntimeError:
        model = build(case, seed).eval()
    return model


def draw(case, batch, time, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(case.vocab_size, (batch, time), generator=generator)


def longest(case):
    return min(case.block_size, 32)


def raw(answer):
    """The tensor of scores in an answer, in whatever shape."""
    if isinstance(answer, dict):
        answer = answer["logits"]
    if isinstance(answer, tuple):
        answer = next(part for part in answer if part.dim() > 0)
    return answer


def read(answer, tokens, case):
    """Find the scores in an answer, as (batch, time, vocab)."""
    answer = raw(answer)
    (batch, time), vocab = tokens.shape, case.vocab_size
    if answer.shape == (batch, vocab, time) and time != vocab:
        answer = answer.mT
    # an axis that is lost is a fault of its own, measured as a shape
    return answer.reshape(batch, -1, answer.size(-1))


def scores(model, tokens, case):
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # put back after
        return read(model(tokens), tokens, case)


def rounding(tensor):
    """What a sum in another order may change: a leak is larger."""
    return 1e-10 if tensor.dtype == torch.float64 else 1e-3


def differ(a, b):
    """Whether scores differ by more than rounding, relative to their spread.

    NaN differs from everything, an infinity from all but itself.
    """
    if a.numel() == 0:
        return False
    spread = a[a.isfinite()].std(correction=0)
    gap = torch.where(a == b, 0.0, a - b).abs().max() / (1e-300 + spread)
    return not gap <= rounding(a)


def cross_entropy(scores, targets, **options):
    return small_gpt.cross_entropy(scores.double(), targets, **options)


# --- The properties ---------------------------------------------------------


def check_shape(case):
    model, vocab = wide(case), case.vocab_size
    sizes = (1, 1), (1, 5), (1, longest(case)), (4, 1), (3, 6), (2, 8)
    for training, (batch, time) in product((False, True), sizes):
        model.train(training)
        shape = tuple(raw(model(draw(case, batch, time))).shape)
        if shape not in ((batch, time, vocab), (batch, vocab, time)):
            yield f"({batch}, {time}) ids give {shape}"
    sliced = draw(case, 2, 7)[:, :-1]
    model.eval()
    torch.manual_seed(1)
    once = scores(model, sliced.contiguous(), case)
    torch.manual_seed(1)
    if differ(once, scores(model, sliced, case)):
        yield "a slice of ids has other scores than its copy"


def awkward_tokens(case):
    """Lengths and ids that numbers fail on."""
    yield "one token", draw(case, 2, 1)
    yield "any tokens", draw(case, 4, longest(case))
    yield "id 0 first", draw(case, 2, 6).index_fill(1, torch.tensor(0), 0)
    yield "equal ids", torch.full((2, 6), case.vocab_size - 1)
    yield "only id 0", torch.zeros(2, 6, dtype=torch.long)


def check_finite(case):
    for training, (words, tokens) in product(
        (False, True), awkward_tokens(case)
    ):
        model = wide(case).train(training)
        answer = scores(model, tokens, case)
        mode = f"{words}, {'train' if training else 'eval'} mode"
        if not answer.isfinite().all():
            yield f"{mode}: not finite"
        if answer.requires_grad:
            cross_entropy(answer, tokens).backward()
        for name, p in model.named_parameters():
            if p.grad is not None and not p.grad.to_dense().isfinite().all():
                yield f"{mode}: gradient of {name} not finite"


MODES = (  # in words, train mode, with gradients
    ("eval mode without gradients", False, False),
    ("eval mode", False, True),
    ("train mode", True, True),
)


def larger(model, factor):
    """Weights amplified, and parameters that start at 0 drawn anew."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.any():
                p.normal_()
            elif p.is_floating_point() and p.dim() > 1 and "wte" not in name:
                p.mul_(factor)
    return model


def with_larger_weights(case):
    model = wide(case)
    yield "", model
    yield ", weights x 10", larger(model, 10)
    if any(p.dtype == torch.float64 for p in model.parameters()):
        yield ", weights x 200", larger(model, 200)


def check_causality(case):
    for words, model in with_larger_weights(case):
        few = words or case.vocab_size > 1000
        lengths = (2, 8) if few else (2, 3, 5, 8, 13, 16, 24)
        lengths += (64, 65) if 65 < case.block_size < 200 else ()
        for (mode, training, gradients), time in product(
            MODES, (*lengths, longest(case))
        ):
            model.train(training)
            with torch.set_grad_enabled(gradients):
                splits = splits_that_leak(model, case, time)
            for t in splits:
                yield (
                    f"{mode}{words}: length {time}, tokens from {t} on move "
                    "earlier scores"
                )
    yield from one_row_that_leaks(case)
    yield from ids_that_leak(case)


def one_row_that_leaks(case):
    """One row of full length: in each dtype, and with a mask of padding."""
    time, runs = longest(case), [(wide(case), {}), (build(case), {})]
    if next(build(case).parameters(), None) is not None:
        runs.append((build(case).bfloat16(), {}))
    if "attention_mask" in inspect.signature(runs[0][0].forward).parameters:
        shown = {
            "attention_mask": (torch.arange(time) < time - 2).long()[None]
        }
        runs += [(m, shown) for m in (wide(case), larger(wide(case), 2000))]
    tokens = draw(case, 1, time)
    changed = tokens.clone()
    changed[0, time // 2 :] = (tokens[0, time // 2 :] + 1) % case.vocab_size
    for training, (model, mask) in product((False, True), runs):
        model.train(training)
        answers = []
        for ids in (tokens, changed):
            torch.manual_seed(1)
            try:
                answers.append(read(model(ids, **mask), ids, case))
            except RuntimeError:  # not in every dtype
                break
        first = [answer[0, : time // 2] for answer in answers]
        if len(first) == 2 and differ(*first):
            yield f"one row, {len(mask)} masks: the second half moves it"


def ids_that_leak(case):
    """Each id, put to the end of one text."""
    if case.vocab_size > 5000:
        return
    model, time = wide(case), min(8, longest(case))
    tokens = draw(case, 1, time).repeat(case.vocab_size, 1)
    changed = tokens.clone()
    changed[:, time // 2 :] = torch.arange(case.vocab_size).unsqueeze(1)
    one, two = (scores(model, ids, case) for ids in (tokens, changed))
    for i in range(case.vocab_size):
        if differ(one[i, : time // 2], two[i, : time // 2]):
            yield f"id {i} at the end moves the scores before it"
            return


def splits_that_leak(model, case, time):
    """Redraw the tokens from split t on, each in its row, and look before."""
    splits = sorted({1, 2, time // 2, time - 1} - {0})
    row, other = draw(case, 1, time), draw(case, len(splits), time, seed=1)
    without_0 = row.clamp(min=int(case.vocab_size > 2))
    tokens, changed, at = [], [], []
    for i, t in enumerate(splits):
        # ids far from the old ones: a suffix of zeros, the next ids, any
        for old, new in (
            (without_0, torch.zeros_like(row)),
            (row, (row + 1) % case.vocab_size),
            (row, other[[i]]),
        ):
            tokens.append(old)
            changed.append(torch.cat([old[:, :t], new[:, t:]], 1))
            at.append(t)
    answers = []
    for batch in (tokens, changed):
        torch.manual_seed(1)
        answers.append(scores(model, torch.cat(batch), case).detach())
    return [
        t
        for one, two, t in zip(*answers, at, strict=True)
        if differ(one[:t], two[:t])
    ]


def check_causal_gradients(case):
    model = wide(case)
    tokens = draw(case, 1, 10)
    kept = []
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding)
            and module.num_embeddings >= case.vocab_size
            and module.num_embeddings != case.block_size
        ):
            module.register_forward_hook(
                lambda _module, _args, out: (
                    kept.append(out.requires_grad_()) or out
                )
            )
    for training, t in product((False, True), range(tokens.size(1) - 1)):
        model.train(training)
        kept.clear()
        answer = scores(model, tokens, case)[0, t]
        if not kept:
            return
        weights = torch.linspace(1, 2, answer.numel()).to(answer)
        (grad,) = torch.autograd.grad(
            (answer * weights).sum(),
            kept[0],
            allow_unused=True,
            materialize_grads=True,
        )
        grad = grad.expand(1, tokens.size(1), -1)
        later = grad[0, t + 1 :].abs().max().item()
        if not later <= rounding(grad) * grad.abs().max().item():
            yield f"the gradient of score {t} reaches later tokens"


def check_prefix_consistency(case):
    model = wide(case)
    for time in {longest(case), 9}:
        tokens = draw(case, 2, time)
        whole = scores(model, tokens, case)
        for t in set(range(1, time)) - {case.vocab_size}:  # can be misread
            prefix = tokens[:, :t].contiguous()
            if differ(whole[:, :t], scores(model, prefix, case)):
                yield f"the first {t} of {time} tokens alone score otherwise"


def check_batch_independence(case):
    model = wide(case)
    tokens = draw(case, 5, 12)
    whole = scores(model, tokens, case)
    for row in range(len(tokens)):
        if differ(whole[[row]], scores(model, tokens[[row]], case)):
            yield f"row {row} scores otherwise alone"
    if differ(whole, scores(model, tokens.flip(0), case).flip(0)):
        yield "the order of the rows matters"
    other = torch.cat([tokens[:1], draw(case, 4, 12, seed=1)])
    if differ(whole[:1], scores(model, other, case)[:1]):
        yield "a row depends on the others"
    for training, time in ((True, 12), (False, 3)):
        firsts = []
        for ids in (tokens, other):
            torch.manual_seed(0)
            model.train(training)
            firsts.append(scores(model, ids[:, :time], case)[:1])
        if differ(*firsts):
            yield f"training {training}, length {time}: rows mix"


def check_order_sensitivity(case):
    model = larger(wide(case), 1)
    span = getattr(model, "window", 12)  # a declared window is kept
    tokens = torch.arange(min(12, span)).unsqueeze(0) % case.vocab_size
    last = scores(model, tokens, case)[:, -1]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(tokens.size(1) - 1, generator=generator)
        mixed = torch.cat([tokens[:, order], tokens[:, -1:]], 1)
        if differ(last, scores(model, mixed, case)[:, -1]):
            break
    else:
        yield "permuting the earlier tokens changes nothing at the last"
    span = min(longest(case), getattr(model, "window", 32))
    for far in (8, 16):
        if far >= span - 1:
            continue
        texts = torch.cat([draw(case, 1, span, seed) for seed in range(8)])
        texts[:, far] = (texts[:, 0] + 1) % case.vocab_size
        swapped, first, other = texts.clone(), texts.clone(), texts.clone()
        swapped[:, [0, far]] = texts[:, [far, 0]]
        first[:, 0], other[:, far] = texts[:, far], texts[:, 0]
        last, *rest = (
            scores(model, ids, case)[:, -1]
            for ids in (texts, swapped, first, other)
        )
        swap, *counts = (differ(last, each) for each in rest)
        if all(counts) and not swap:
            yield f"tokens 0 and {far} can be swapped"


def check_context_use(case):
    model = larger(wide(case), 1)
    config = getattr(model, "config", None)
    window = getattr(model, "window", None)
    window = window or getattr(config, "sliding_window", None)
    time = window or longest(case)
    texts = [draw(case, 1, time, seed).repeat(3, 1) for seed in range(8)]
    lasts = [scores(model, tokens, case)[:, -1] for tokens in texts]
    step = torch.arange(1, 4) % max(case.vocab_size - 1, 1)

    def moves(tokens, last, s):
        changed = tokens.clone()
        changed[:, s] = (changed[:, s] + step + 1) % case.vocab_size
        return not torch.equal(last, scores(model, changed, case)[:, -1])

    for s in range(time):
        if not any(map(moves, texts, lasts, [s] * len(texts))):
            yield f"token {s} of {time} never changes the last score"


@torch.no_grad()
def check_determinism(case):
    model = wide(case)
    tokens = draw(case, 2, 8)
    torch.manual_seed(1)
    try:
        first = scores(model, tokens, case)
        for time in (8, longest(case), 3, 8, 1, 8) * 3:
            torch.manual_seed(time)
            scores(model, draw(case, 2, time, seed=time), case)
            if differ(first, scores(model, tokens, case)):
                yield f"another answer after {time} other tokens"
    except (ValueError, RuntimeError) as error:
        yield f"another call raises {error}"
        return
    other = torch.cat([tokens[:1], 0 * tokens[1:]])
    if differ(scores(model, other, case), scores(wide(case), other, case)):
        yield "another answer after a batch with the same first row"


def check_purity(case):
    yield from changed_by_a_call(case)
    model = wide(case)
    state = copy.deepcopy(model.state_dict())
    tokens = torch.arange(case.vocab_size)[-24:].unsqueeze(0)
    given = tokens.clone()
    torch.manual_seed(7)
    random.seed(7)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    scores(model, given, case)
    if not torch.equal(torch.get_rng_state(), torch_state):
        yield "torch's random state has moved"
    if random.getstate() != python_state:
        yield "Python's random state has moved"
    if not torch.equal(given, tokens):
        yield "the input has changed"
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, state[name]):
            yield f"{name} has changed"


def changed_by_a_call(case):
    """Measure what the caller has set, in both modes, with gradients."""
    for training in (False, True):
        model = wide(case).train(training)
        tokens = torch.arange(case.vocab_size)[-24:].repeat(8, 1)
        given, after = tokens.clone(), []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model(given)
            after.append(torch.get_rng_state())
        mode = "train" if training else "eval"
        if torch.equal(*after):
            yield f"{mode} mode seeds torch"
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            yield f"{mode} mode leaves gradients off"
        if not all(m.training == training for m in model.modules()):
            yield f"{mode} mode is left"
        if not torch.equal(given, tokens):
            yield f"{mode} mode changes its input"


def check_normalised(case):
    model = wide(case)
    if hasattr(model, "log_probs"):
        model = model.log_probs
    elif getattr(case, "outputs", "auto") != "log_probs":
        return
    answer = scores(model, draw(case, 3, 9), case)
    gap = answer.logsumexp(-1).abs().max().item()
    if gap > 1e-9:
        yield f"log of the sum is {gap:.2g}"


def check_initial_loss(case):
    tokens, targets = draw(case, 8, 16), draw(case, 8, 16, seed=1)
    loss = cross_entropy(scores(wide(case), tokens, case), targets).item()
    chance = math.log(case.vocab_size)
    if not abs(loss - chance) < 1.5:
        yield f"a fresh model's loss is {loss:.3g}, ln(vocab) is {chance:.3g}"


def check_signal(case):
    """Compare what parts put out for two texts; measure attention's scores."""
    model, inputs, answers = wide(case), {}, {}

    def keep(module, args, answer):
        if args and torch.is_tensor(answer) and args[0].is_floating_point():
            inputs.setdefault(module, []).append(args[0].clone())
            answers.setdefault(module, []).append(answer.clone())

    for module in model.modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_hook(keep)
    with torch.no_grad():
        for seed in (0, 1):
            scores(model, draw(case, 2, longest(case), seed), case)
    for name, module in model.named_modules():
        given, got = inputs.get(module, []), answers.get(module, [])
        calls = len(given) // 2
        changed = calls and not torch.equal(given[0], given[calls])
        changed = changed and next(module.parameters()).any()  # no start at 0
        if changed and torch.equal(got[0], got[calls]) and got[0].any():
            yield f"{name} answers the same for another text"
        mixer = model.get_submodule(name.rpartition(".")[0])
        whole = name.endswith("mixer.qkv") and hasattr(mixer, "split")
        if whole and got and got[0].size(-1) == 3 * module.in_features:
            q, k, _ = map(mixer.split, got[0].chunk(3, -1))
            if mixer.scores(q, k).std() > 7:
                yield f"{name}: scores have a deviation over 7"


def check_loss(case):
    model = wide(case)
    known = inspect.signature(model.forward).parameters
    name = next((n for n in ("targets", "labels") if n in known), None)
    if name is None:
        return
    model = model.train()
    tokens, targets = draw(case, 3, 7), draw(case, 3, 7, seed=1)
    answer = model(tokens, **{name: targets})
    loss = next(part for part in answer if part.dim() == 0)
    if not loss.requires_grad:
        yield "the loss has no graph"
    weight = model.head.weight
    own = cross_entropy(read(answer, tokens, case), targets)
    shift = read(answer, tokens, case)[:, :-1], targets[:, 1:]
    grads = [
        torch.autograd.grad(value, weight, retain_graph=True)[0]
        for value in (loss, own, cross_entropy(*shift))
        if value.requires_grad
    ]
    if not any(torch.allclose(grads[0], grad) for grad in grads[1:]):
        yield "the loss has the gradient of something else"
    model = model.eval()
    tokens = draw(case, 3, 12)
    bare = scores(model, tokens, case)
    for ignored in (None, -100, -1):
        targets = draw(case, 3, 12, seed=1)
        targets[:, 1:3] = case.vocab_size - 1
        if ignored is not None:
            targets[:, ::2] = ignored
        own = targets.clone()
        try:
            answer = model(tokens, **{name: targets})
        except IndexError:
            continue  # ignores no such number
        if not targets.equal(own):
            yield "the targets change"
        given = next(part for part in answer if part.dim() == 0).item()
        answer = read(answer, tokens, case)
        if differ(bare, answer):
            yield "the scores change with the targets"
        options = {} if ignored is None else {"ignore_index": ignored}
        as_given = cross_entropy(answer, targets, **options).item()
        shifted = cross_entropy(
            answer[:, :-1], targets[:, 1:], **options
        ).item()
        if min(abs(given - as_given), abs(given - shifted)) > 1e-9:
            yield (
                f"the loss is {given:.4f}, cross-entropy {as_given:.4f} "
                f"as given, {shifted:.4f} shifted"
            )


def check_gradient_flow(case):
    model = wide(case).train()
    trainable = ((n, p) for n, p in model.named_parameters() if p.numel())
    without = {n for n, p in trainable if p.requires_grad}
    for step in range(6):
        tokens = draw(case, 4, longest(case), seed=step)
        answer = scores(model, tokens, case)
        model.zero_grad()
        if not without:
            return
        cross_entropy(answer[:, :-1], tokens[:, 1:]).backward()
        for name, p in model.named_parameters():
            if p.grad is not None and p.grad.to_dense().any():
                without.discard(name)
                p.data -= 0.01 * p.grad.to_dense().sign()  # zeros move
    for name in without:
        yield f"{name} gets no gradient"


def check_gradients(case):
    """Compare the largest entry of each gradient with differences."""
    model = larger(wide(case), 1)
    tokens = draw(case, 3, 6)
    tokens[:, -1] = tokens[:, 0]
    weights = torch.linspace(-1, 2, 18 * case.vocab_size)

    def value():
        torch.manual_seed(1)
        return (scores(model, tokens, case).flatten() * weights).sum()

    if value().dtype != torch.float64 or not value().requires_grad:
        return
    for training, (name, p) in product(
        (False, True), list(model.named_parameters())
    ):
        model.train(training)
        model.zero_grad()
        value().backward()
        if p.dtype != torch.float64 or p.grad is None or not p.numel():
            continue
        grad = p.grad.to_dense()
        index = int(grad.abs().argmax())
        flat, found = p.data.view(-1), grad.view(-1)[index].item()
        old, slopes = flat[index].item(), []
        for step in (1e-5, 1e-2):  # the wider for what is float32 inside
            ends = []
            for end in (old + step, old - step):
                flat[index] = end
                ends.append(value().item())
            slopes.append((ends[0] - ends[1]) / (2 * step))
        flat[index] = old
        gap = min(abs(slope - found) for slope in slopes)
        if 0 not in slopes and not gap <= 2e-3 * (1 + abs(found)):
            yield f"{name} has gradient {found:.4g}, slopes are {slopes}"


def check_state_dict(case):
    model, other = wide(case), wide(case, seed=1)
    tokens = draw(case, 2, 8)
    before = scores(model, tokens, case)
    other.load_state_dict(model.state_dict())
    if differ(before, scores(other, tokens, case)):
        yield "a reloaded model computes something else"
    larger_head = larger(wide(case), 3).state_dict()
    fresh = wide(case)
    fresh.load_state_dict(larger_head)
    expected = scores(fresh, tokens, case)
    other.load_state_dict(larger_head)
    if differ(expected, scores(other, tokens, case)):
        yield "weights loaded after an evaluation are not used"
    model.train()
    with torch.no_grad():
        for p, new in zip(model.parameters(), fresh.parameters(), strict=True):
            p.copy_(new)
    if differ(scores(fresh, tokens, case), scores(model.eval(), tokens, case)):
        yield "weights changed after an evaluation are not used"


def check_dtype(case):
    if isinstance(build(case), Function):
        return
    tokens = draw(case, 2, 8)
    for cast in ("double", "bfloat16", "half"):
        try:
            # .to(dtype) would make complex buffers real, too
            model = getattr(build(case).eval(), cast)()
            answer = scores(model, tokens, case)
        except RuntimeError as error:
            yield f"{cast}: {error}"
            continue
        floats = [p for p in model.parameters() if p.is_floating_point()]
        if answer.dtype != floats[0].dtype:
            yield f"{cast} weights answer in {answer.dtype}"
    yield from positions_that_collide(case)
    for module in build(case).to("meta").modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield f"{name} is not moved"
    try:
        build(case).to("meta").eval()(tokens.to("meta"))
    except (RuntimeError, NotImplementedError) as error:
        # to read a value is allowed, to mix devices is not
        if re.search("same device|two devices|expected device", str(error)):
            yield f"moved to another device: {error}"


def positions_that_collide(case):
    """Whether one id has one vector at two places, and in float64 two."""
    if not 257 < case.block_size < 1000:
        return
    model, ids = build(case).double(), torch.zeros(1, case.block_size).long()
    most = len(torch.unique(model.embed(ids)[0], dim=0))
    left = len(torch.unique(model.bfloat16().embed(ids)[0], dim=0))
    if left < most:
        yield f"of {most} vectors {left} are left in bfloat16"


def refuses(model, tokens):
    try:
        model(tokens)
    except (ValueError, IndexError, RuntimeError, AssertionError):
        return True
    return False


def check_length_limit(case):
    model = wide(case)
    limit = getattr(model, "block_size", None)
    if limit and not refuses(model, draw(case, 1, limit + 1)):
        yield f"{limit + 1} tokens get an answer, the limit is {limit}"


def check_vocabulary(case):
    model, vocab = wide(case), case.vocab_size
    moved = larger(model, 1)  # a head that starts at 0 is drawn anew
    answer = scores(moved, draw(case, 4, 8), case).flatten(0, 1)
    same = (answer == answer[0]).all(0) & (answer > answer.amax() - 30).all(0)
    if same.sum() > 1:
        yield f"the scores of ids {same.nonzero().flatten()} never move"
    for ids in torch.arange(vocab)[-256:].split(16):
        scores(model, ids.unsqueeze(0), case)
    for outside in (vocab, vocab + 5, -1, -vocab - 1):
        if not refuses(model, torch.tensor([[1, outside, 1]])):
            yield f"id {outside} gets an answer, the vocabulary is {vocab}"


def cached(model, piece, past, start, **mask):
    """Scores of a piece and the cache after it, None where there is none."""
    taken = inspect.signature(model.forward).parameters
    with torch.no_grad():
        if "past_key_values" in taken:
            more = {"past_key_values": past, "use_cache": True, **mask}
            answer = model(piece, **more)
            return answer["logits"], answer["past_key_values"]
        if "kv_cache" in taken:
            scores, _, after = model(piece, kv_cache=past)
            return scores, after
        if "start_pos" in taken:
            return model(piece, start_pos=start), None
    if hasattr(model, "init_cache"):
        return model.decode(piece, past or model.init_cache(len(piece)))
    return None


def fed(model, tokens, sizes, mask=None):
    """Scores of tokens that are fed in pieces of these sizes."""
    past, start, pieces = None, 0, []
    for piece in tokens.split(sizes, 1):
        end = start + piece.size(1)
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        answer, past = cached(model, piece, past, start, **seen)
        pieces.append(answer)
        start = end
    return torch.cat(pieces, 1)


def check_cache(case):
    model = wide(case)
    if cached(model, draw(case, 2, 1), None, 0) is None:
        return
    time = case.block_size
    tokens = draw(case, 2, time)
    whole = scores(model, tokens, case)
    for sizes in ([time], [1] * time, [5, time - 5], [time - 3, 1, 2]):
        try:
            answer = fed(model, tokens, sizes)
        except (ValueError, RuntimeError) as error:
            yield f"pieces of {sizes[:3]}... tokens: {error}"
        if differ(whole, answer):
            yield f"pieces of {sizes[:3]}... tokens score otherwise"
    other = torch.cat([tokens[:1], draw(case, 1, time, seed=1)])
    fed(model, tokens, [5, *[1] * (time - 5)])
    answer = fed(model, other, [5, *[1] * (time - 5)])
    if differ(scores(model, other, case), answer):
        yield "a text with the same first row scores otherwise"
    if getattr(model, "init_cache", None):
        past, second = model.init_cache(2), model.init_cache(2)
        model.decode(tokens[:, :1], past)
        answer, _ = model.decode(other[:, :1], second)
        if differ(scores(model, other[:, :1], case), answer):
            yield "two texts at once score otherwise"
    longer = draw(case, 1, time + 1)
    if refuses(model, longer):
        try:
            fed(model, longer, [time, 1])
            yield "one token too many is answered"
        except (ValueError, RuntimeError, IndexError):
            pass
    if "attention_mask" in inspect.signature(model.forward).parameters:
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, :3] = 0
        one = raw(model(tokens[:, :9], attention_mask=mask))
        two = fed(model, tokens[:, :9], [5, 1, 1, 1, 1], mask)
        shown = mask.bool()
        if differ(one[shown], two[shown]):
            yield "rows that begin with padding score otherwise"


def trained_loss(case, batches):
    """Loss over the last fifth of 100 steps, each on new tokens."""
    model = build(case)
    if case.vocab_size < 100:
        model = model.float()
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in batches:
        answer = scores(model, tokens[:, :-1], case)
        loss = cross_entropy(answer, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # Adam takes no other
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def check_entropy_bound(case):
    if not [*build(case).parameters()]:
        return
    steps, vocab = range(100), min(case.vocab_size, 17)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randint(vocab, shape, generator=generator)

    entropy = math.log(vocab)
    noise = trained_loss(case, (drawn(16, 17) for _ in steps))
    if noise < entropy - 0.1:
        yield f"loss {noise:.3g} on tokens of entropy {entropy:.3g}"
    copied = trained_loss(case, (drawn(16, 1).expand(-1, 17) for _ in steps))
    if copied > 0.5 * entropy:
        yield f"loss {copied:.3g} on copies, entropy {entropy:.3g}"


def first_of(measure):
    def first(case):
        with torch.enable_grad():  # and put back after, whatever a model does
            return next(measure(case), "")

    return first


MEASUREMENTS = {
    name: first_of(measure)
    for name, measure in globals().items()
    if name.startswith("check_")
}
