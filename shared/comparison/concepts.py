"""Describe the six concepts of a decoder, which every style implements."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Concept:
    """One part of the decoder."""

    does: str  # what the part does, in one line
    mathematics: str  # what every style must compute, in one or two sentences
    stage: str  # the stage that has the concept's output; {i} is the layer


CONCEPTS = {
    "embedding": Concept(
        "Turns each token and its position into one vector.",
        "x\u209c = E[token\u209c] + P[t]: a row of the token table plus a "
        "row of the position table.",
        "embedding",
    ),
    "attention": Concept(
        "Gives each position information from itself and earlier positions.",
        "In every head softmax(Q K\u1d40 / \u221ad) V, with the scores of "
        "later positions at \u2212\u221e; the heads are joined and go through "
        "one more matrix.",
        "block.{i}.attention",
    ),
    "feed_forward": Concept(
        "Transforms each position by itself: widens its vector, applies the "
        "activation, narrows it again.",
        "f(x W\u2081 + b\u2081) W\u2082 + b\u2082, with the same weights at "
        "every position.",
        "block.{i}.feed_forward",
    ),
    "block": Concept(
        "Adds the output of attention to the residual stream, then that of "
        "the feed-forward part.",
        "x + attention(norm(x)), then x + feed_forward(norm(x)). The norm "
        "subtracts the mean, divides by the standard deviation, then scales "
        "and shifts.",
        "block.{i}",
    ),
    "model": Concept(
        "Stacks the blocks between the embedding and the head.",
        "N blocks one after another, and a last norm.",
        "final_norm",
    ),
    "head": Concept(
        "Scores every token as the next one; log-softmax turns the scores "
        "into log-probabilities.",
        "Scores z = x W\u1d40 (+ b, if the style has a bias); then "
        "log softmax(z) over the whole vocabulary.",
        "log_probs",
    ),
}
