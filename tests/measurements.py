"""Each property measured directly, in float64 where a model can be.

`MEASUREMENTS[check](case)` returns what contradicts the property, in words,
or "" where it holds: a measurement yields contradictions, the first counts.
Nothing here knows shared.invariants: these are the second opinion on its
checks.
"""

import copy
import inspect
import math
import re
from itertools import product

import torch
from small_gpt import Attention, cross_entropy
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
    model, double = build(case, seed).eval(), getattr(case, "double", True)
    double = double and works(build(case).double(), case)
    return model.double() if double else model


def works(model, case):
    try:
        scores(model, draw(case, 1, 4))
    except RuntimeError:
        return False
    return True


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


def scores(model, tokens, training=False, seed=1, **given):
    """Scores as (batch, time, vocab), in a mode and from a seed."""
    if model.training != training:
        model.train(training)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # put back after
        answer = raw(model(tokens, **given))
    # an axis that is lost is a fault of its own, measured as a shape
    return answer.reshape(len(tokens), -1, answer.size(-1))


def rounding(tensor):
    """What a sum in another order may change: a leak is larger."""
    return 1e-10 if tensor.dtype == torch.float64 else 1e-3


def differ(a, b):
    """Whether scores differ by more than rounding, relative to their spread.

    NaN differs from everything, an infinity from all but itself.
    """
    spread = a[a.isfinite()].std(correction=0)
    gap = torch.where(a == b, 0.0, a - b).abs().max() / (1e-300 + spread)
    return not gap <= rounding(a)


def same_first_row(tokens, case):
    """Other texts, but for the first."""
    other = draw(case, *tokens.shape, seed=1)
    return torch.cat([tokens[:1], other[1:]])


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


def refuses(call, *args):
    try:
        call(*args)
    except (ValueError, IndexError, RuntimeError):
        return True
    return False


# --- The properties ---------------------------------------------------------


def check_shape(case):
    model = wide(case)
    sizes = (1, 1), (1, longest(case)), (2, 8)
    for training, (batch, time) in product((False, True), sizes):
        answer = raw(model.train(training)(draw(case, batch, time)))
        if answer.shape != (batch, time, case.vocab_size):
            yield f"({batch}, {time}) ids give {tuple(answer.shape)}"
    sliced = draw(case, 2, 7)[:, :-1]
    if differ(scores(model, sliced.contiguous()), scores(model, sliced)):
        yield "a slice of ids has other scores than its copy"


def check_finite(case):
    texts = {
        "one token": draw(case, 2, 1),
        "any tokens": draw(case, 4, longest(case)),
        "id 0 first": draw(case, 2, 6).index_fill(1, torch.tensor(0), 0),
        "equal ids": torch.full((2, 6), case.vocab_size - 1),
    }
    for training, (words, tokens) in product((False, True), texts.items()):
        model = wide(case)
        answer = scores(model, tokens, training)
        if not answer.isfinite().all():
            yield f"{words}, training {training}: not finite"
        if answer.requires_grad:
            cross_entropy(answer, tokens).backward()
        for name, p in model.named_parameters():
            if p.grad is not None and not p.grad.to_dense().isfinite().all():
                yield f"{words}: gradient of {name} not finite"


def suffixes(case, time):
    """Splits, and two texts each that are the same before the split."""
    row, other = draw(case, 1, time), draw(case, 1, time, seed=1)
    without_0 = row.clamp(min=int(case.vocab_size > 2))
    # ids far from the old ones: a suffix of zeros, the next ids, any
    ends = (
        (without_0, torch.zeros_like(row)),
        (row, (row + 1) % case.vocab_size),
        (row, other),
    )
    for t, (old, new) in product({1, time // 2, time - 1}, ends):
        yield t, old, torch.cat([old[:, :t], new[:, t:]], 1)


def check_causality(case):
    time, vocab = longest(case), case.vocab_size
    lengths = {2, 8, time}
    if 65 < case.block_size < 200:
        lengths |= {64, 65}
    models = {"as it is": wide(case), "x 10": larger(wide(case), 10)}
    if any(p.dtype == torch.float64 for p in wide(case).parameters()):
        models["x 200"] = larger(wide(case), 200)
    runs = [
        (words, model, list(suffixes(case, length)), {})
        for (words, model), length in product(models.items(), lengths)
    ]
    row, half = draw(case, 1, time), time // 2
    start, end = row.split(half, 1)
    alone = [(half, row, torch.cat([start, (end + 1) % vocab], 1))]
    runs += [("one row", wide(case), alone, {})]
    runs += [("in its own dtype", build(case), alone, {})]
    short = build(case).bfloat16()
    if works(short, case):
        runs += [("in bfloat16", short, alone, {})]
    if "attention_mask" in inspect.signature(short.forward).parameters:
        shown = {"attention_mask": (torch.arange(time)[None] < time - 2)}
        runs += [("padded", wide(case), alone, shown)]
        runs += [("padded, x 2000", larger(wide(case), 2000), alone, shown)]
    if vocab < 5000:
        ids = torch.arange(vocab).view(-1, 1, 1).expand(-1, 1, half)
        ends = [(half, row, torch.cat([start, i], 1)) for i in ids]
        runs += [("each id at the end", wide(case), ends, {})]
    modes = (False, False), (False, True), (True, True)
    for (words, model, pairs, given), (training, grad) in product(runs, modes):
        splits, *texts = zip(*pairs, strict=True)
        with torch.set_grad_enabled(grad):
            one, two = (
                scores(model, torch.cat(rows), training, **given)
                for rows in texts
            )
        for i, t in enumerate(splits):
            if differ(one[i, :t], two[i, :t]):
                yield (
                    f"{words}, training {training}, gradients {grad}: tokens "
                    f"from {t} of {len(texts[0][i][0])} on move earlier scores"
                )


def check_causal_gradients(case):
    model, tokens, kept = wide(case), draw(case, 1, 10), []
    if hasattr(model, "wte"):
        model.wte.register_forward_hook(
            lambda _module, _args, out: kept.append(out.requires_grad_())
        )
    for training, t in product((False, True), range(tokens.size(1) - 1)):
        answer = scores(model, tokens, training)[0, t]
        if not kept:
            return
        weights = torch.linspace(1, 2, case.vocab_size).to(answer)
        (grad,) = torch.autograd.grad(
            answer @ weights,
            kept[-1],
            allow_unused=True,
            materialize_grads=True,
        )
        later = grad[0, t + 1 :].abs().max()
        if not later <= rounding(grad) * grad.abs().max():
            yield f"the gradient of score {t} reaches later tokens"


def check_prefix_consistency(case):
    model, time = wide(case), longest(case)
    tokens = draw(case, 2, time)
    whole = scores(model, tokens)
    for t in range(1, time):
        if differ(whole[:, :t], scores(model, tokens[:, :t].contiguous())):
            yield f"the first {t} of {time} tokens alone score otherwise"


def check_batch_independence(case):
    model = wide(case)
    for training, time in product((False, True), (3, 12)):
        tokens = draw(case, 5, time)
        one, two = (
            scores(model, ids, training)[:1]
            for ids in (tokens, same_first_row(tokens, case))
        )
        if differ(one, two):
            yield f"training {training}, length {time}: rows mix"
    tokens = draw(case, 5, 12)
    whole = scores(model, tokens)
    for row in range(len(tokens)):
        if differ(whole[[row]], scores(model, tokens[[row]])):
            yield f"row {row} scores otherwise alone"


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
        swap, *counts = (differ(last, each) for each in rest)
        if all(counts) and not swap:
            yield f"tokens 0 and {far} can be swapped"


def check_context_use(case):
    model = larger(wide(case), 1)
    config = getattr(model, "config", None)
    window = getattr(model, "window", getattr(config, "sliding_window", None))
    tokens = draw(case, 24, window or longest(case))
    last = scores(model, tokens)[:, -1]
    for s in range(tokens.size(1)):
        changed = tokens.clone()
        changed[:, s] = (changed[:, s] + 1) % case.vocab_size
        if torch.equal(last, scores(model, changed)[:, -1]):
            yield f"token {s} never changes the last score"


@torch.no_grad()
def check_determinism(case):
    model, tokens = wide(case), draw(case, 2, 8)
    first = scores(model, tokens)
    for time in (8, longest(case), 1):
        scores(model, draw(case, 2, time, seed=time))
        if differ(first, scores(model, tokens, seed=time)):
            yield f"another answer after {time} other tokens"
    other = torch.cat([tokens[:1], 0 * tokens[1:]])
    if differ(scores(model, other), scores(wide(case), other)):
        yield "another answer after a batch with the same first row"


def check_purity(case):
    """Measure what a caller has set, before and after a call."""
    for training in (False, True):
        model = wide(case).train(training)
        state = copy.deepcopy(model.state_dict())
        tokens = torch.arange(case.vocab_size)[-24:].repeat(8, 1)
        given, after = tokens.clone(), []
        for seed in (1, 2):
            before = torch.manual_seed(seed).get_state()
            model(given)
            after.append(torch.get_rng_state())
        changed = {
            "the seed": torch.equal(*after),
            "gradients": not torch.is_grad_enabled(),
            "the mode": any(m.training != training for m in model.modules()),
            "the input": not torch.equal(given, tokens),
        }
        if not training:
            changed["the random state"] = not torch.equal(before, after[-1])
            for name, tensor in model.state_dict().items():
                changed[name] = not torch.equal(tensor, state[name])
        for words in changed:
            if changed[words]:
                yield f"training {training}: {words} changed"


def check_normalised(case):
    if getattr(case, "outputs", "auto") == "log_probs":
        gap = scores(wide(case), draw(case, 3, 9)).logsumexp(-1).abs().max()
        if gap > 1e-9:
            yield f"log of the sum is {gap:.2g}"


def check_initial_loss(case):
    tokens, targets = draw(case, 8, 16), draw(case, 8, 16, seed=1)
    loss = cross_entropy(scores(wide(case), tokens).double(), targets).item()
    chance = math.log(case.vocab_size)
    if not abs(loss - chance) < 1.5:
        yield f"a fresh model's loss is {loss:.3g}, ln(vocab) is {chance:.3g}"


def check_signal(case):
    """Compare what norms answer two texts; measure attention's scores."""
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
            if torch.equal(one, two):
                yield "a norm answers the same for another text"
        elif module.qkv.out_features == 3 * module.qkv.in_features:
            q, k, _ = map(module.split, module.qkv(x).chunk(3, -1))
            if module.scores(q, k).std() > 7:
                yield "scores have a deviation over 7"


def with_gradient(loss, weight):
    """A loss and its gradient in one tensor; without a graph, the loss."""
    if not loss.requires_grad:
        return loss.double()
    (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
    return torch.cat([loss.detach().view(1), grad.flatten()])


def check_loss(case):
    model = wide(case)
    names = {"targets", "labels"} & {
        *inspect.signature(model.forward).parameters
    }
    for name, ignored in product(names, (None, -100, -1)):
        tokens, targets = draw(case, 3, 12), draw(case, 3, 12, seed=1)
        targets[:, 1:3] = case.vocab_size - 1
        options = {}
        if ignored is not None:
            options["ignore_index"] = targets[:, ::2] = ignored
        own = targets.clone()
        try:
            answer = model(tokens, **{name: targets})
        except IndexError:
            continue  # ignores no such number
        if not targets.equal(own):
            yield "the targets change"
        if differ(scores(model, tokens), raw(answer)):
            yield "the scores change with the targets"
        as_given = cross_entropy(raw(answer), own, **options)
        shifted = cross_entropy(raw(answer)[:, :-1], own[:, 1:], **options)
        loss = next(part for part in answer if part.dim() == 0)
        found, *wanted = (
            with_gradient(each, model.head.weight)
            for each in (loss, as_given, shifted)
        )
        if not any(
            found.shape == each.shape and torch.allclose(found, each)
            for each in wanted
        ):
            yield f"with {ignored} ignored the loss is another: {loss:.4f}"


def check_gradient_flow(case):
    model = wide(case)
    trainable = ((n, p) for n, p in model.named_parameters() if p.numel())
    without = {n for n, p in trainable if p.requires_grad}
    if not without:
        return
    for step in range(6):
        tokens = draw(case, 4, longest(case), seed=step)
        answer = scores(model, tokens, training=True, seed=step)
        model.zero_grad()
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

    def value(training):
        return (scores(model, tokens, training).flatten() * weights).sum()

    def slope(flat, index, step):
        old, ends = flat[index].item(), []
        for end in (old + step, old - step):
            flat[index] = end
            ends.append(value(training).item())
        flat[index] = old
        return (ends[0] - ends[1]) / (2 * step)

    if value(False).dtype != torch.float64:
        return
    for training, (name, p) in product(
        (False, True), list(model.named_parameters())
    ):
        if p.dtype != torch.float64 or not p.requires_grad or not p.numel():
            continue
        model.zero_grad()
        value(training).backward()
        if p.grad is None:
            continue
        grad = p.grad.to_dense().flatten()
        index = grad.abs().argmax()
        # the wider step is for what is float32 inside
        slopes = [slope(p.data.view(-1), index, s) for s in (1e-5, 1e-2)]
        found = grad[index].item()
        gap = min(abs(each - found) for each in slopes)
        if 0 not in slopes and not gap <= 2e-3 * (1 + abs(found)):
            yield f"{name} has gradient {found:.4g}, slopes are {slopes}"


def check_state_dict(case):
    model, other, fresh = wide(case), wide(case, seed=1), wide(case)
    tokens = draw(case, 2, 8)
    scores(model, tokens)
    scores(other, tokens)
    state = larger(fresh, 3).state_dict()
    for each in (fresh, other):
        each.load_state_dict(state)
    if differ(scores(fresh, tokens), scores(other, tokens)):
        yield "weights loaded after an evaluation are not used"
    model.train()
    with torch.no_grad():
        for p, new in zip(model.parameters(), fresh.parameters(), strict=True):
            p.copy_(new)
    if differ(scores(fresh, tokens), scores(model, tokens)):
        yield "weights changed after an evaluation are not used"


def check_dtype(case):
    if isinstance(build(case), Function):
        return
    tokens = draw(case, 2, 8)
    for cast in ("double", "bfloat16", "half"):
        # .to(dtype) would make complex buffers real, too
        model = getattr(build(case), cast)()
        dtype = next(
            p.dtype for p in model.parameters() if p.is_floating_point()
        )
        if not works(model, case):
            yield f"{cast}: an error"
        elif scores(model, tokens).dtype != dtype:
            yield f"{cast} weights answer in another dtype"
    if 257 < case.block_size < 1000:
        ids = torch.zeros(1, case.block_size).long()
        few, many = (
            len(torch.unique(model.embed(ids)[0], dim=0))
            for model in (build(case).bfloat16(), build(case).double())
        )
        if few < many:
            yield f"one id: of {many} vectors {few} are left in bfloat16"
    moved = build(case).to("meta").eval()
    for module in moved.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield f"{name} is not moved"
    try:
        moved(tokens.to("meta"))
    except (RuntimeError, NotImplementedError) as error:
        # to read a value is allowed, to mix devices is not
        if re.search("same device|two devices|expected device", str(error)):
            yield f"moved to another device: {error}"


def check_length_limit(case):
    model = wide(case)
    limit = getattr(model, "block_size", None)
    if limit and not refuses(model, draw(case, 1, limit + 1)):
        yield f"{limit + 1} tokens get an answer, the limit is {limit}"


def check_vocabulary(case):
    model, vocab = wide(case), case.vocab_size
    # a head that starts at 0 is drawn anew
    answer = scores(larger(model, 1), draw(case, 4, 8)).flatten(0, 1)
    same = (answer == answer[0]).all(0) & (answer > answer.amax() - 30).all(0)
    if same.sum() > 1:
        yield f"the scores of ids {same.nonzero().flatten()} never move"
    for outside in (vocab, vocab + 5, -1, -vocab - 1):
        if not refuses(model, torch.tensor([[1, outside, 1]])):
            yield f"id {outside} gets an answer, the vocabulary is {vocab}"


@torch.no_grad()
def cached(model, piece, past, start, **mask):
    """Scores of a piece and the cache after it, None where there is none."""
    taken = inspect.signature(model.forward).parameters
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
    model, time = wide(case), case.block_size
    tokens = draw(case, 2, time)
    if cached(model, tokens[:, :1], None, 0) is None:
        return
    ways = [time], [1] * time, [5, time - 5], [time - 3, 1, 2]
    for sizes, texts in product(ways, (tokens, same_first_row(tokens, case))):
        if refuses(fed, model, texts, sizes):
            yield f"pieces of {sizes[:3]}... tokens: an error"
        elif differ(scores(model, texts), fed(model, texts, sizes)):
            yield f"pieces of {sizes[:3]}... tokens score otherwise"
    if getattr(model, "init_cache", None):
        past, second = model.init_cache(2), model.init_cache(2)
        model.decode(tokens[:, :1], past)
        answer, _ = model.decode(tokens[:, 1:2], second)
        if differ(scores(model, tokens[:, 1:2]), answer):
            yield "two texts at once score otherwise"
    longer = draw(case, 1, time + 1)
    if refuses(model, longer) and not refuses(fed, model, longer, [time, 1]):
        yield "one token too many is answered"
    if "attention_mask" in inspect.signature(model.forward).parameters:
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, :3] = 0
        whole = scores(model, tokens[:, :9], attention_mask=mask)
        pieces = fed(model, tokens[:, :9], [5, 1, 1, 1, 1], mask)
        if differ(whole[mask.bool()], pieces[mask.bool()]):
            yield "rows that begin with padding score otherwise"


def trained_loss(case, batches):
    """Loss over the last fifth of 100 steps, each on new tokens."""
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
                p.grad = p.grad.to_dense()  # Adam takes no other
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
    if noise < entropy - 0.1:
        yield f"loss {noise:.3g} on tokens of entropy {entropy:.3g}"
    copies = (drawn(16, 1).expand(-1, 17) for _ in range(100))
    copied = trained_loss(case, copies)
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
