"""Build up attention: averages of the past, then heads that weight it.

Source: the lecture "Let's build GPT". Its notebook divides the scores by the
root of the model's width; here it is the root of the head's width.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpt_duet.config import GPTConfig
from gpt_duet.masks import subsequent_mask

Stream = Float[Tensor, "batch time n_embd"]


def average_by_loop(x: Stream) -> Stream:
    """Average each position with its past, position by position."""
    means = [x[:, : t + 1].mean(dim=1) for t in range(x.size(1))]
    return torch.stack(means, dim=1)


def average_by_matrix(x: Stream) -> Stream:
    """Average each position with its past, by a lower triangular matrix."""
    T = x.size(1)
    weights = x.new_ones(T, T).tril()
    return weights / weights.sum(-1, keepdim=True) @ x


def average_by_softmax(x: Stream) -> Stream:
    """Average each position with its past, by a softmax of masked zeros."""
    T = x.size(1)
    visible = subsequent_mask(T, device=x.device)
    scores = x.new_zeros(1, T, T).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ x


class Head(nn.Module):
    """One head of causal self-attention, written out."""

    def __init__(self, n_embd: int, head_size: int):
        super().__init__()
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)

    def forward(self, x: Stream) -> Float[Tensor, "batch time head_size"]:
        """Average the past, weighted by how well its keys match the query."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        visible = subsequent_mask(x.size(1), device=x.device)
        return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


class MultiHead(nn.Module):
    """Several heads side by side, each n_embd / n_head wide."""

    def __init__(self, config: GPTConfig, project: bool):
        super().__init__()
        C, n = config.n_embd, config.n_head
        self.heads = nn.ModuleList(Head(C, C // n) for _ in range(n))
        # without a projection, each head's output stays in its columns
        self.c_proj = nn.Linear(C, C) if project else nn.Identity()

    def forward(self, x: Stream) -> Stream:
        """Run every head, and put their outputs side by side."""
        return self.c_proj(torch.cat([head(x) for head in self.heads], -1))
