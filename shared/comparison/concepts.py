"""What each concept of a decoder does, whoever writes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Concept:
    """One part of the decoder.

    Attributes:
        does: what it does, in one line.
        mathematics: what every style must compute, in one or two sentences.
        stage: the stage whose output is the concept's; {i} is the layer.
    """

    does: str
    mathematics: str
    stage: str


CONCEPTS = {
    "embedding": Concept(
        "Turns each token and its place into one vector.",
        "x\u209c = E[token\u209c] + P[t]: one table says what stands there, "
        "another says where.",
        "embedding",
    ),
    "attention": Concept(
        "Lets each position gather what it needs from those before it.",
        "In every head softmax(Q K\u1d40 / \u221ad) V, with the scores of "
        "later positions at \u2212\u221e; the heads are joined and projected.",
        "block.{i}.attention",
    ),
    "feed_forward": Concept(
        "Lets each position think for itself: widen, bend, narrow.",
        "f(x W\u2081 + b\u2081) W\u2082 + b\u2082, with the same weights at "
        "every position.",
        "block.{i}.feed_forward",
    ),
    "block": Concept(
        "Adds to the stream what attention says, then what feed-forward says.",
        "x + attention(norm(x)), then x + feed_forward(norm(x)). The norm "
        "takes mean and deviation out, and puts a gain and a shift in.",
        "block.{i}",
    ),
    "model": Concept(
        "Stacks the blocks between the embedding and the head.",
        "N blocks one after another, and a last norm.",
        "final_norm",
    ),
    "head": Concept(
        "Makes of each vector the log-probabilities of the next token.",
        "log softmax(x W\u1d40 + b), over the whole vocabulary.",
        "log_probs",
    ),
}


def choose_concepts(name: str | None, known: list[str]) -> list[str]:
    """Return the concept of that name, or all.

    Args:
        name: a concept; None: all that are known.
        known: what the styles have.

    Raises:
        ValueError: for a name that is not known, naming those that are.
    """
    if name is None:
        return known
    if name not in known:
        raise ValueError(f"no concept {name!r}; there is {', '.join(known)}")
    return [name]
