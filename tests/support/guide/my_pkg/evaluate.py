"""A scorer that returns the log-probability of each token of a text."""

import torch

from .model import build


def make_score():
    model = build().eval()

    @torch.no_grad()
    def score(tokens):
        found = []
        for end in range(1, len(tokens)):
            text = tokens[max(0, end - model.block_size) : end]
            found.append(model(text[None])[0, -1].log_softmax(-1)[tokens[end]])
        return torch.stack(found)

    return score
