"""A fresh model starts with the loss of guessing."""

import math

from ...running.losses import cross_entropy
from ...running.rounding import require_finite
from ...running.variant import own
from ..check import SkipCheck, Subject, check


@check(needs="fresh weights")
def check_initial_loss(subject: Subject) -> str:
    """A fresh model's loss is within 1.5 nats of ln(vocab).

    Why: an overconfident fresh model spends its first steps on unlearning, and
    may have a wrong initialisation or head.
    How: the check measures the mean cross-entropy of random targets, on random
    tokens.
    If it fails: draw the head's weights smaller, and start its bias at 0. The
    check is skipped for a model that is already trained.
    Reports: Karpathy's recipe for training networks, "verify loss @ init".
    """
    generator = subject.generator()
    time = subject.lengths.fit(32)
    room = (1 << 25) // (time * subject.vocab_size)
    batch = max(1, min(512 // time, room))
    variant = own(subject)
    tokens = subject.draw(batch, time, generator)
    targets = subject.draw(batch, time, generator)
    scores = variant.scores(tokens).float()
    loss = float(cross_entropy(scores, targets))
    expected = math.log(subject.vocab_size)
    text = f"loss {loss:.3f}, ln({subject.vocab_size}) = {expected:.3f}"
    if abs(loss - expected) <= 1.5:
        return text
    require_finite(scores)
    if not subject.builder.fresh:
        raise SkipCheck(
            f"{text}: the model may be trained; give a factory to have a "
            f"fresh one judged"
        )
    raise AssertionError(
        f"a fresh model's {text}: {abs(loss - expected):.2f} nats apart, "
        f"more than 1.5"
    )
