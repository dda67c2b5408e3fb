"""A little training: slow, so the check runs only if it is named."""

import math

import torch

from ...running.context import during
from ...running.errors import SkipCheck
from ...running.losses import cross_entropy
from ...running.variant import changeable
from ...running.ways import TRAIN
from ..check import Subject, check

STEPS = 400
BATCH = 16
PERIOD = 3


@check(slow=True, needs="gradients")
def check_entropy_bound(subject: Subject) -> str:
    """Trained on unpredictable tokens, the loss stays above their entropy.

    Why: the surest sign of a leak needs no idea where it is: nobody can
    predict a fair die. And a model that cannot learn to repeat has not been
    wired up.
    How: 400 steps of Adam on fresh random ids, each batch's loss taken
    before its step; then on sequences that repeat three ids.
    Reports: karpathy/nanochat 844, a loss of 0.0018 from a leak.
    """
    subject.require_gradients()
    if subject.block_size < 2 * PERIOD:
        raise SkipCheck(f"needs sequences of {2 * PERIOD} tokens")
    ids = min(16, subject.vocab_size)
    entropy = math.log(ids)
    lowest = _train(subject, ids, repeat=False)
    # a mean of 50 batches: its spread is far below a tenth of a nat
    if lowest < entropy - 0.05:
        raise AssertionError(
            f"trained on uniform random ids the loss falls to {lowest:.3f}, "
            f"below their entropy ln({ids}) = {entropy:.3f}: the model sees "
            f"what it should predict"
        )
    last = _train(subject, ids, repeat=True)
    if not last < 0.8 * entropy:
        raise AssertionError(
            f"trained on sequences that repeat {PERIOD} ids the loss stays "
            f"at {last:.3f} of ln({ids}) = {entropy:.3f}: the model does "
            f"not learn to copy"
        )
    return f"random {lowest:.3f} of {entropy:.3f}, repeated {last:.3f}"


def _train(subject: Subject, ids: int, repeat: bool) -> float:
    """Return the lowest mean loss of 50 steps in a row."""
    variant = changeable(subject, "a function cannot be trained", TRAIN)
    model = variant.model
    generator = subject.generator()
    time = subject.lengths.fit(18)
    optimiser = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=3e-3
    )
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(ids, (BATCH, time), generator=generator)
        first = 0
        if repeat:
            tokens = tokens[:, :PERIOD].repeat(1, -(-time // PERIOD))
            tokens, first = tokens[:, :time], PERIOD - 1
        scores = variant.scores(tokens, grad=True, seed=step)
        loss = cross_entropy(scores[:, first:-1], tokens[:, first + 1 :])
        optimiser.zero_grad()
        with during("in the backward pass in train mode"):
            loss.backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # Adam takes no other
        optimiser.step()
        losses.append(loss.item())
    return float(torch.tensor(losses).view(-1, 50).mean(1).min())
