"""diff --cache on a model whose attention keeps its keys and values."""

import pytest
import torch
from small_gpt import positions
from torch import nn

from gpt_duet.comparison.values.decoding import diff_cache

pytestmark = pytest.mark.unhooked


class Attention(nn.Module):
    """Attention that keeps its keys and values, as in Raschka's books."""

    def __init__(self, fault):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.cache_k, self.cache_v, self.seen = None, None, 0
        self.fault = fault

    def forward(self, x, use_cache=False):
        q, k, v = self.qkv(x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        start = self.seen if use_cache else 0
        if use_cache:
            k, v = self.remember(k, v)
            self.seen += x.size(1)
        at = torch.arange(start, start + x.size(1)).unsqueeze(1)
        keys = torch.arange(start + x.size(1))[-k.size(2) :]
        scores = q @ k.transpose(2, 3) / 8**0.5
        weights = scores.masked_fill(at < keys, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def remember(self, k, v):
        if self.cache_k is not None:
            if self.fault == "stale":
                v = self.cache_v[:, :, -1:]
            k = torch.cat([self.cache_k.to(k), k], 2)
            v = torch.cat([self.cache_v.to(v), v], 2)
            if self.fault == "k for v":
                v = torch.cat([self.cache_v, k[:, :, -1:]], 2)
            if self.fault == "window":
                k = k[:, :, -4:]
                v = v[:, :, -4:]
        self.cache_k, self.cache_v = k, v
        if self.fault == "bfloat16":
            self.cache_k, self.cache_v = k.bfloat16(), v.bfloat16()
        return k, v


class Book(nn.Module):
    """A model that counts positions, and has a method to reset the count."""

    vocab_size = 29

    def __init__(self, fault):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = (
            nn.Embedding(29, 16),
            nn.Embedding(16, 16),
        )
        self.layers = nn.ModuleList(Attention(fault) for _ in range(3))
        self.head = nn.Linear(16, 29)
        self.current_pos, self.fault = 0, fault

    def forward(self, ids, use_cache=False):
        at = positions(ids) + (self.current_pos if use_cache else 0)
        if use_cache:
            twice = self.fault == "position" and self.current_pos
            self.current_pos += ids.size(1) * (1 + bool(twice))
        x = self.tokens(ids) + self.positions(at)
        for i, layer in enumerate(self.layers):
            wrong = (
                self.layers[i - 1] if self.fault == "layer" and i else layer
            )
            if use_cache and wrong is not layer and layer.seen:
                layer.cache_k = wrong.cache_k[:, :, :-1]
            x = x + layer(x, use_cache=use_cache)
        return self.head(x)

    def reset_kv_cache(self):
        self.current_pos = 0
        for layer in self.layers:
            layer.cache_k, layer.cache_v, layer.seen = None, None, 0


@pytest.mark.parametrize(
    ("fault", "position", "layer", "code"),
    [
        ("", None, None, ""),
        ("stale", 1, 0, "torch.cat([self.cache_v.to(v), v], 2)"),
        ("k for v", 1, 0, "[self.cache_v, k[:, :, -1:]], 2"),
        ("window", 4, 0, "k[:, :, -4:]"),
        ("layer", 1, 1, "torch.cat([self.cache_k.to(k), k], 2)"),
        # the ninth token also lacks a row in the table of positions
        ("position", 2, None, "self.positions(at)"),
    ],
)
def test_the_line_of_a_cache_is_named(fault, position, layer, code):
    found = diff_cache(Book(fault))
    assert found.says == "reset_kv_cache() and use_cache=True"
    assert found.position == position, found.sentence
    if fault:
        place = found.line.place
        assert code in place.code, found.sentence
        assert place.layer == layer, found.sentence
        kept = "it keeps 4 of 5 positions" in found.sentence
        assert kept == (fault == "window"), found.sentence


def test_a_cache_in_bfloat16_is_rounding():
    found = diff_cache(Book("bfloat16"))
    assert found.same, found.sentence
    assert max(found.apart) > 1e-6 > found.rounding
    assert "in a coarser dtype inside explains it" in found.sentence


class Sums(nn.Module):
    """A model without a cache; a function outside it keeps a sum."""

    vocab_size = 29

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)

    def forward(self, ids):
        return self.head(self.table(ids).cumsum(1))


def sound_step(model, ids, state):
    sums = model.table(ids).cumsum(1)
    sums = sums if state is None else sums + state
    return model.head(sums), sums[:, -1:]


def stale_step(model, ids, state):
    scores, new = sound_step(model, ids, state)
    return scores, new if state is None else state


@pytest.mark.parametrize("step", [sound_step, stale_step])
def test_a_step_of_the_users_own_decodes(step):
    found = diff_cache(Sums(), cache=step)
    assert found.says == f"{step.__name__}(model, ids, state)"
    assert found.position == (None if step is sound_step else 2)
    if step is stale_step:
        assert found.line.place.function == "sound_step", found.sentence
