"""The answer itself: its shape, its numbers, its losses."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ModelRaised, SkipCheck, asked, sentence
from ..model.building import Model
from ..model.reading import TIME_FIRST
from ..model.subject import Subject
from ..model.tokens import draw
from ..search.larger_weights import Searches
from ..search.leaks import Search
from ..search.tolerance import (
    FLOOR,
    dtype_name,
    floor,
    floor_of,
    gaps,
    is_real,
    rounding,
)
from ..search.trial import EVAL
from .causality import check_causality
from .cross_entropy import cross_entropy
from .rows import check_batch_independence

NORMALISED = 1e-3  # sums as close to 1 as that are meant to be 1


def check_shape(subject: Subject) -> str:
    """(batch, time) ids give (batch, time, vocab) scores, at every size.

    Why: a squeezed batch of one, or a last position where all were asked
    for, broadcasts into losses that look right.
    How: one row, one token, and several sizes up to the longest, in eval
    and train mode; slices that are not contiguous. Scores in which time
    comes first must be causal and independent of other rows in that reading.
    Cost: a dozen small forwards.
    Reports: karpathy/nanoGPT, whose forward answers for the last position
    only unless it is given targets.
    """
    generator = subject.generator()
    model = subject.build()
    longest = subject.block_size
    if subject.fault:
        raise AssertionError(subject.fault)
    if subject.refusals:
        text = "; ".join(
            f"{error}; {words}" for error, words in subject.refusals
        )
        raise ModelRaised(text) from subject.refusals[0][0].__cause__
    sizes = {(1, 1), (4, 1), (1, 2), (3, 2), (5, 3), (2, 7), (1, longest)}
    sizes = {(b, subject.lengths.fit(t)) for b, t in sizes}
    for training in (False, True):
        for batch, time in sorted(sizes):
            if training and time == longest and subject.spares:
                continue  # check_finite has it
            tokens = subject.draw(batch, time, generator)
            scores = subject.scores(
                model, tokens, training=training, strict=True
            )
            if not scores.is_floating_point():
                raise AssertionError(f"scores have dtype {scores.dtype}")
    inputs = _require_inputs(subject, model)
    if subject.reader.form == TIME_FIRST:
        try:
            check_causality(subject)
            check_batch_independence(subject)
        except AssertionError as error:
            subject.fault = (
                f"the scores have shape (time, batch, vocab), and read so "
                f"they break another property: {error}"
            )
            raise AssertionError(subject.fault) from None
        return "(time, batch, vocab), which holds in that reading"
    return f"{len(sizes)} sizes, the longest of {longest}; {inputs}"


def _require_inputs(subject: Subject, model: Model) -> str:
    """Require slices to be read as their copies; return what int32 ids do."""
    time = subject.lengths.fit(6)
    ids = draw(subject.vocab_size, 2, time + 1, subject.generator())
    ids = ids.to(subject.device)
    slices = {"tokens[:, :-1]": ids[:, :-1], "tokens[:, 1:]": ids[:, 1:]}

    def differ(a: Tensor, b: Tensor) -> bool:
        moved = gaps(a.nan_to_num(), b.nan_to_num())
        return not subject.lost_state and float(moved.max()) > floor(b)

    for name, sliced in slices.items():
        expected = subject.scores(model, sliced.contiguous(), seed=1)
        with asked(f"on {name}, which are not contiguous"):
            scores = subject.scores(model, sliced, seed=1, as_given=True)
        if differ(scores, expected):
            raise AssertionError(
                f"{name}, which are not contiguous, are read as other ids: "
                f"they have other scores than their copy"
            )
    try:
        scores = subject.scores(model, sliced.int(), seed=1)
    except ModelRaised as error:
        return f"int32 ids are refused ({sentence(error.__cause__ or error)})"
    if differ(scores, expected):
        return "int32 ids have other scores than int64 ids"
    return "int32 ids, too"


def check_finite(subject: Subject) -> str:
    """Neither scores nor gradients are ever NaN or infinite.

    Why: one NaN, after one step of an optimiser, is in every weight.
    How: random ids, id 0 first, all ids equal; one token and up to the
    longest; eval mode and, with several dropout masks, train mode.
    Cost: some 30 forwards, two thirds of them with a backward.
    Reports: dropout on masked scores turns -inf into NaN in one of ten
    passes in train mode ("GPT from Scratch", listing 5).
    """
    generator = subject.generator()
    vocab, longest = subject.vocab_size, subject.block_size
    model: Any = subject.build()
    few = subject.spares  # a backward pass fills as many numbers
    for time in subject.fit(*((1, 16) if few else (1, 2, 3, 16)), longest):
        tokens = subject.draw(5, time, generator)
        tokens[1, 0] = 0
        tokens[2], tokens[3], tokens[4] = 0, vocab - 1, tokens[4, 0]
        if time > 16:
            tokens = tokens[:2] if time * vocab < 1 << 22 else tokens[:1]
        grads = time <= 256 and subject.is_module and subject.builder.can_copy
        seeds = range(4 if 3 < time <= 16 and not few else 1)
        passes = [(False, False, 0)] + [(False, True, 0)] * grads
        passes += [(True, grads, seed) for seed in seeds]
        for training, with_grad, seed in passes:
            mode = "in train mode" if training else "in eval mode"
            if with_grad:
                model.zero_grad()
            scores = subject.scores(
                model, tokens, training=training, grad=with_grad, seed=seed
            )
            _require_finite(scores.detach(), time, mode)
            if not scores.requires_grad:
                continue
            with asked(f"in the backward pass {mode}, at length {time}"):
                cross_entropy(scores.float(), tokens.roll(1, 0)).backward()
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                if grad is not None and not grad.to_dense().isfinite().all():
                    raise AssertionError(
                        f"the gradient of {name} is NaN or infinite at "
                        f"length {time} {mode}, while the scores are finite"
                    )
    return f"lengths 1 to {longest}, eval and train mode"


def _require_finite(
    scores: Float[Tensor, "batch time vocab"], time: int, mode: str
) -> None:
    bad = ~torch.isfinite(scores)
    if bad.any():
        row, position = bad.any(-1).nonzero()[0].tolist()
        raise AssertionError(
            f"{float(bad.double().mean()):.2%} of the scores are NaN or "
            f"infinite at length {time} {mode}, first at position {position} "
            f"of row {row}"
        )


def check_normalised(subject: Subject) -> str:
    """Log-probabilities sum to 1, where the model says it returns them.

    Why: a sum of 0.99 is a loss that is 0.01 too high or too low.
    How: the logarithm of the sum of exponentials is 0 to rounding, on the
    fresh model and with larger weights, in float64 where the model can.
    Cost: four forwards.
    Reports: a softmax in front of nn.CrossEntropyLoss, which takes logits.
    """
    worst = max(map(_require_sums, Searches(subject)))
    return f"sums are 1 to {worst:.1g}"


def _require_sums(search: Search) -> float:
    """Return how far logarithms of sums are from 0; raise where too far."""
    subject = search.subject
    tokens = subject.draw(3, 16)
    scores = search.run(tokens)
    ones = torch.ones_like(scores[..., 0], dtype=torch.float64)
    if bool((scores >= 0).all()) and torch.allclose(
        scores.double().sum(-1), ones, atol=1e-4
    ):
        raise AssertionError(
            "the scores are probabilities, not their logarithms: none is "
            "negative, and those of a position sum to 1"
        )

    def sums(scores: Tensor) -> Tensor:
        return scores[..., subject.scored].double().logsumexp(-1)

    off = sums(scores)
    size = float(off.abs().nan_to_num(nan=math.inf).max())
    noise = max(rounding(scores), torch.finfo(scores.dtype).eps)
    # what is nearly normalised was meant to be
    if not subject.says_log_probs and size > NORMALISED:
        raise SkipCheck("logits, which need not be normalised")
    # what is computed in float32 inside keeps float32's rounding
    inner = FLOOR * torch.finfo(torch.float32).eps
    if size > floor_of(scores.dtype) * noise and (
        size > inner
        or is_real(search.model, lambda: sums(search.run(tokens)), noise)
    ):
        position = int(off.abs().amax(0).argmax())
        total = float(off[:, position].exp().max())
        raise AssertionError(
            f"the probabilities of position {position} sum to {total:.9g}: "
            f"in logarithms {size:.2g} from 0 ({dtype_name(scores.dtype)}"
            f"{search.conditions(EVAL)})"
        )
    return size


def check_initial_loss(subject: Subject) -> str:
    """A fresh model's loss is within 1.5 nats of ln(vocab).

    Why: a model that starts out sure of itself spends its first steps
    unlearning, and hides a wrong initialisation or head.
    How: the mean cross-entropy of random targets given random tokens.
    Cost: one forward of 512 tokens.
    Reports: Karpathy's recipe for training neural networks, "verify loss @
    init".
    """
    generator = subject.generator()
    time = subject.lengths.fit(32)
    room = (1 << 25) // (time * subject.vocab_size)
    batch = max(1, min(512 // time, room))
    model = subject.build()
    tokens = subject.draw(batch, time, generator)
    targets = subject.draw(batch, time, generator)
    loss = float(cross_entropy(subject.scores(model, tokens).float(), targets))
    expected = math.log(subject.vocab_size)
    text = f"loss {loss:.3f}, ln({subject.vocab_size}) = {expected:.3f}"
    if abs(loss - expected) <= 1.5:
        return text
    if not subject.builder.fresh and math.isfinite(loss):
        raise SkipCheck(
            f"{text}: the model may be trained; give a factory to have a "
            f"fresh one judged"
        )
    raise AssertionError(
        f"a fresh model's {text}: {abs(loss - expected):.2f} nats apart, "
        f"more than 1.5"
    )
