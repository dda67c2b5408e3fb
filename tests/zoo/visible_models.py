"""Small GPTs with a declared visibility, and faulty versions of them.

Each row of VISIBLE has a declaration, a pair of positions that it forbids, and
a pair that it allows. A faulty model sees the forbidden pair, or does not see
the allowed pair.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from gpt_duet.visibility import (
    blocks,
    chunked,
    documents,
    prefix,
    relation_of,
    through,
    tree,
    window,
)

VOCAB, BLOCK, WIDTH, HEADS = 29, 12, 16, 2
PARENTS = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6]
# spans of images: adjacent, and the last one ends the text
IMAGES = [(2, 5), (5, 9), (9, 12)]
IMAGE = 7  # consecutive tokens with this id form an image


class Seeing(nn.Module):
    """A GPT whose attention mask is a function of its ids."""

    vocab_size, block_size = VOCAB, BLOCK

    def __init__(self, relation, layers=1):
        super().__init__()
        self.relation = relation  # a function that returns the mask for ids
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        rows, time = ids.shape
        x = self.tokens(ids) + self.positions(
            torch.arange(time, device=ids.device)
        )
        mask = self.relation(ids.cpu()).to(ids.device)
        mask = mask.expand(rows, 1, time, time)
        for layer in self.layers:
            q, k, v = (
                part.view(rows, time, HEADS, -1).transpose(1, 2)
                for part in layer(x).split(WIDTH, -1)
            )
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + seen.transpose(1, 2).flatten(2)
        return self.head(x)


def of(sees, more=(), less=(), layers=1):
    """Return a factory of a model that sees what `sees` allows.

    It also sees the pairs (query, key) in `more`, and no pairs in `less`.
    """

    def relation(ids):
        found = relation_of(sees, ids.size(1)).clone()
        for pairs, shown in ((more, True), (less, False)):
            for query, key in pairs:
                if max(query, key) < len(found):
                    found[query, key] = shown
        return found

    return partial(Seeing, relation, layers)


def strided(q, kv):
    return (kv <= q) & (((q - kv) % 3 == 0) | (q - kv < 2))


def in_python(q, kv):
    # `and` and `or` work on numbers, but not on tensors
    return kv <= q or kv < 4


# declaration, layers, a pair that it forbids, a pair that it allows
VISIBLE = {
    "prefix": (prefix(5), 1, (1, 5), (1, 4)),
    "a predicate of numbers": (in_python, 1, (1, 4), (0, 3)),
    "window": (window(4), 1, (6, 2), (6, 3)),
    "window of two layers": (window(4, layers=2), 2, (9, 1), None),
    "chunks": (chunked(4), 1, (4, 3), (7, 4)),
    "images": (blocks(IMAGES), 1, (3, 5), (2, 4)),
    "images at the end": (blocks(IMAGES[2:]), 1, (8, 9), (9, 11)),
    "documents": (documents([3, 4, 9]), 1, (3, 2), (5, 3)),
    "tree": (tree(PARENTS), 1, (5, 4), (7, 1)),
    "stride": (strided, 1, (6, 4), (6, 3)),
    "stride of two layers": (through(strided, 2), 2, (1, 3), None),
}
LAYER = {"window of two layers": window(4), "stride of two layers": strided}


def sound(name):
    """Return the sound model for a declaration."""
    sees, layers, _, _ = VISIBLE[name]
    return of(LAYER.get(name, sees), layers=layers)


def leaking(name):
    """Return a model that also sees one forbidden pair."""
    sees, layers, pair, _ = VISIBLE[name]
    return of(LAYER.get(name, sees), more=[pair], layers=layers)


def forgetting(name):
    """Return a model that misses an allowed pair; None if the row has none."""
    sees, layers, _, pair = VISIBLE[name]
    return None if pair is None else of(sees, less=[pair], layers=layers)


# --- Depending on the tokens -------------------------------------------------


def by_images(tokens):
    """Return a predicate: all tokens of an image see each other."""
    is_image = tokens == IMAGE
    number = (is_image & ~is_image.roll(1)).cumsum(0) * is_image

    def sees(q, kv):
        return (kv <= q) | ((number[q] == number[kv]) & is_image[q])

    return sees


def _of_images(ids, wrong=False):
    found = []
    for row in ids:
        is_image = row == IMAGE
        begins = is_image & ~is_image.roll(1)
        number = begins.cumsum(0) * is_image
        if wrong:  # the fault: all images count as one image
            number = is_image.long()
        same = (number[:, None] == number) & is_image
        found.append(same | torch.ones_like(same).tril())
    return torch.stack(found).unsqueeze(1)


def images_by_tokens(wrong=False):
    """Return a factory of a model in which adjacent IMAGE ids are an image.

    If `wrong`, all IMAGE ids of a text together are one image.
    """
    return partial(Seeing, partial(_of_images, wrong=wrong))
