"""The faults of three public tutorials, as a table for the README.

Each is pinned in test_errata.py by a test of the same number. D1 is "GPT
from Scratch", D3 the notebook "Let's build GPT", D4 "The Transformer
architecture of GPT models".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What a tutorial gets wrong, and what this kit does instead."""

    number: str
    sentence: str
    ours: str


FAULTS = (
    Fault(
        "D1-01",
        "Dropout falls on the masked scores before the softmax: minus "
        "infinity times 0 is NaN, in one pass of ten per layer.",
        "Mask, softmax, dropout, in this order: finite in train mode.",
    ),
    Fault(
        "D1-01b",
        "The closing demo never calls eval() and prints only the shape of a "
        "tensor that is all NaN.",
        "The same call is finite in train and in eval mode.",
    ),
    Fault(
        "D1-02",
        "A dropped score is 0, not absent: a token with a low score is "
        "attended to more when it is dropped.",
        "A dropped probability is exactly 0.",
    ),
    Fault(
        "D1-04",
        "forward takes a target and ignores it.",
        "minGPT's style returns the loss; the annotated style has no such "
        "argument.",
    ),
    Fault(
        "D1-05",
        "Every layer saves a mask of float32 in the checkpoint.",
        "No mask is saved, in either style.",
    ),
    Fault(
        "D1-06",
        "A misspelt setting is accepted, and the default model is built.",
        "GPTConfig refuses names that it does not know.",
    ),
    Fault(
        "D1-12",
        "The loop it describes feeds the whole sequence back, and dies when "
        "the sequence outgrows the model.",
        "The window slides: the model sees its last block_size tokens.",
    ),
    Fault(
        "D1-16",
        "One rendering of the text has lost the indentation of its code.",
        "The code is a package that is imported by its tests.",
    ),
    Fault(
        "D3-01",
        "generate crops a variable of the notebook, or none, and passes the "
        "whole context on.",
        "What is cropped is what the model is given.",
    ),
    Fault(
        "D3-02",
        "The head's width comes from a global: the class with its own "
        "defaults cannot run.",
        "All widths come from one config.",
    ),
    Fault(
        "D3-03",
        "Head is defined again with its two sizes in the other order, and "
        "older classes pick it up.",
        "Swapped sizes are refused, with both numbers.",
    ),
    Fault(
        "D3-04",
        "Scores are divided by the root of the model's width, not the "
        "head's: attention is flatter by the root of the number of heads.",
        "Divided by the root of the head's width, as PyTorch's own kernel.",
    ),
    Fault(
        "D3-05",
        "LayerNorm normalises over time: every position sees the future, "
        "one token alone is NaN, and nothing is trainable.",
        "Both norms act on the last axis, with parameters.",
    ),
    Fault(
        "D3-06",
        "The module offered as the same thing in one go has no causal mask.",
        "Both styles are causal by default.",
    ),
    Fault(
        "D3-12",
        "allclose with its default tolerance fails for some seeds.",
        "Tolerances follow the precision: none fails.",
    ),
    Fault(
        "D3-07",
        "generate crops to a global 8 tokens, where the model sees 256.",
        "generate crops to the model's own block_size.",
    ),
    Fault(
        "D3-08",
        "It samples in train mode, with dropout on, and records gradients.",
        "generate runs in eval mode without gradients, and puts the mode "
        "back.",
    ),
    Fault(
        "D3-09",
        "The loop calls get_batch(split), and get_batch takes no argument: "
        "it crashes, and leaves the model in eval mode.",
        "The trainer draws batches of either part, and puts the mode back "
        "after an error, too.",
    ),
    Fault(
        "D3-10",
        "estimate_loss returns a float that the loop indexes as a dict; "
        "a model that came in eval mode leaves in train mode.",
        "A loss for each part, by its name; every mode as it was.",
    ),
    Fault(
        "D3-11",
        "Training draws windows of a global 8 tokens for a context of 256, "
        "from a text without a split: 248 positions stay random.",
        "Windows are as long as the model's context, from the part of the "
        "text to learn from alone.",
    ),
    Fault(
        "D3-14",
        "Each head of each layer keeps a mask of its own: a fifth of the "
        "checkpoint.",
        "No mask is saved, in either style.",
    ),
    Fault(
        "D3-15",
        "Heads that do not divide the width fail in the forward.",
        "Refused when the model is built, with both numbers.",
    ),
    Fault(
        "D3-16",
        "An unknown character is a bare KeyError.",
        "A ValueError names the characters.",
    ),
    Fault(
        "D3-18",
        "The loss reshapes by a global vocabulary: scores and targets of "
        "different lengths get a loss without a word.",
        "The sizes are the scores' own: such a call is refused.",
    ),
    Fault(
        "D3-26",
        "Positions are made on the CPU: the model cannot run elsewhere.",
        "Positions are made where the tokens are.",
    ),
    Fault(
        "D4-01",
        "Five names are used that nothing imports.",
        "Every global name in both styles is defined.",
    ),
    Fault(
        "D4-02",
        "Nothing has a seed: no result can be had again.",
        "Weights, choices and batches take a seed or a generator.",
    ),
    Fault(
        "D4-03",
        "Greedy decoding runs with dropout on: the same prompt gives "
        "different texts.",
        "Greedy decoding gives one text, in every row.",
    ),
    Fault(
        "D4-04",
        "Each layer keeps its last attention with the graph behind it: the "
        "model can no longer be copied.",
        "Kept only when asked for, and detached.",
    ),
    Fault(
        "D4-05",
        "make_model's dropout does not reach the attention.",
        "It reaches every part.",
    ),
    Fault(
        "D4-06",
        "Layers are copies of one, and their biases stay equal.",
        "build_model starts all biases at 0 and draws every matrix anew.",
    ),
    Fault(
        "D4-07",
        "Xavier initialisation makes a token of a large vocabulary fainter "
        "than its position, five to one.",
        "build_model draws tokens that are as loud as their positions.",
    ),
    Fault(
        "D4-08",
        "A mask of -1e9 does not fit in float16, and a row with nothing to "
        "see attends to what is hidden.",
        "Minus infinity in any dtype; such masks are refused.",
    ),
    Fault(
        "D4-09",
        "An odd width fails, and a table of one position broadcasts over all.",
        "An odd width works; too many tokens are refused, with both numbers.",
    ),
    Fault(
        "D4-11",
        "Text that spells a special token crashes the tokenizer.",
        "It is read as ordinary text.",
    ),
    Fault(
        "D4-12",
        "The mask is made on the CPU: the model cannot run elsewhere.",
        "The mask is made where the tokens are.",
    ),
    Fault(
        "D4-13",
        "What is called a probability distribution are log-probabilities, "
        "and sampling from it crashes.",
        "The method is called log_probs, and its exponential sums to one.",
    ),
    Fault(
        "D4-14",
        "The model cannot be called with tokens alone, and decode with no "
        "mask sees the future.",
        "Without a mask the causal one is used.",
    ),
)
