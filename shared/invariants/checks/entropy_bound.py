"""Train a model a little; this is slow, so the check runs only if named."""

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

    Why: no model can predict a fair die, so this finds a leak without knowing
    its place. And a model that cannot learn to repeat a text is not wired
    correctly.
    How: the model takes 400 training steps of Adam on fresh random ids. The
    loss of each batch is measured before the step on it. Then another copy is
    trained on sequences that repeat three ids.
    If it fails: a loss below the entropy means that there is a leak. A loss
    that does not fall means that the gradient points the wrong way, or that
    the model cannot copy. The check trains the model, so it runs only if it is
    named.
    Reports: issue karpathy/nanochat 844, a loss of 0.0018 from a leak.
    """
    subject.require_gradients()
    if subject.block_size < 2 * PERIOD:
        raise SkipCheck(f"needs sequences of {2 * PERIOD} tokens")
    ids = min(16, subject.vocab_size)
    entropy = math.log(ids)
    lowest = _train(subject, ids, repeat=False)
    # 0.05 nats: the mean of 50 batches varies by far less than that
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
    """Return the lowest mean loss of 50 consecutive steps."""
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
                p.grad = p.grad.to_dense()  # Adam accepts only dense gradients
        optimiser.step()
        losses.append(loss.item())
    return float(torch.tensor(losses).view(-1, 50).mean(1).min())
