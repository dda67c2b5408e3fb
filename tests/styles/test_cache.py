"""A cache does not change the scores, and lets each token be read once."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_duet import GPTConfig, annotated, generate, mingpt_style
from gpt_duet.generation import stream_tokens
from gpt_duet.invariants import check_model
from gpt_duet.protocol import (
    CachedLanguageModel,
    CacheReader,
    cache_reader,
)
from gpt_duet.testing.strategies import (
    configs,
    random_model,
    random_tokens,
    seeds,
)

CONFIG = GPTConfig(
    vocab_size=13, block_size=12, n_layer=2, n_head=2, n_embd=16, dropout=0.3
)


@pytest.fixture
def model(style):
    return random_model(style, CONFIG)


@given(st.data())
@settings(max_examples=40)
def test_any_pieces_equal_the_full_forward(data):
    config = data.draw(configs())
    style = data.draw(st.sampled_from([annotated, mingpt_style]))
    model = random_model(style, config, data.draw(seeds))
    batch = data.draw(st.integers(1, 4))
    tokens = random_tokens(config, batch, config.block_size, data.draw(seeds))
    cuts = data.draw(st.sets(st.integers(1, config.block_size)))
    bounds = sorted({0, *cuts, config.block_size})
    reader = cache_reader(model)
    cache = reader.init_cache(batch)
    *most, last = pairwise(bounds)
    pieces = [reader.decode(tokens[:, a:b], cache) for a, b in most]
    if data.draw(st.booleans()):
        with torch.no_grad():
            tail = reader.next_log_probs(tokens[:, slice(*last)], cache)
            want = model.next_log_probs(tokens)
        assert (tail - want).abs().max() < 1e-11
        return
    pieces.append(reader.decode(tokens[:, slice(*last)], cache))
    got = torch.cat(pieces, dim=1)
    want = model.log_probs(tokens)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-11


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25)
def test_cached_uncached_and_the_other_style_write_the_same(data):
    config = data.draw(configs(min_embd=4))
    seed = data.draw(seeds)
    model = random_model(mingpt_style, config, seed)
    time = data.draw(st.integers(1, config.block_size + 3))
    tokens = random_tokens(config, data.draw(st.integers(1, 3)), time)
    count = config.block_size + 4  # the window fills, then slides
    cached = generate(model, tokens, count)
    names = "config", "vocab_size", "block_size", "log_probs"
    uncached = SimpleNamespace(**{n: getattr(model, n) for n in names})
    assert cached.equal(generate(uncached, tokens, count))
    other = random_model(annotated, config, seed)
    assert cached.equal(generate(other, tokens, count))


def test_each_token_is_read_once_until_the_window_slides(model, style):
    read, scored = [], []
    path = style.STAGES["block.{i}.feed_forward"].format(i=1)
    model.get_submodule(path).register_forward_hook(
        lambda module, args, out: read.append(out.size(1))
    )
    (head,) = [
        module
        for module in model.modules()
        if getattr(module, "out_features", 0) == CONFIG.vocab_size
    ]
    head.register_forward_hook(
        lambda module, args, out: scored.append(out.numel() // out.size(-1))
    )
    generate(model, random_tokens(CONFIG, 1, 4), 11)
    # the prompt, single tokens up to the block size, then full windows
    assert read == [4, *[1] * 8, 12, 12]
    assert scored == [1] * 11  # each call scores only the last position


def test_streams_of_one_model_do_not_share_a_cache(model):
    def streams():
        return [stream_tokens(model, [p], 9) for p in ([1, 2], [3, 4])]

    alone = [list(stream) for stream in streams()]
    in_turns = [*zip(*streams(), strict=True)]
    assert in_turns == [*zip(*alone, strict=True)]


def test_a_cache_has_room_for_the_block_from_the_start():
    model = random_model(mingpt_style, CONFIG)
    cache = model.init_cache(3)
    assert len(cache) == CONFIG.n_layer
    places = [past.k.data_ptr() for past in cache]
    for past in cache:
        assert past.k.shape == past.v.shape == (3, 2, 12, 8)
        assert past.k.dtype == torch.float64
    out = model.train().decode(random_tokens(CONFIG, 3, 12), cache)
    assert not out.requires_grad  # the cache stores no graph
    assert not cache[0].k.requires_grad
    assert [past.k.data_ptr() for past in cache] == places
    assert [past.length for past in cache] == [12, 12]


def test_a_full_cache_refuses_more(model):
    reader = cache_reader(model)
    cache = reader.init_cache(1)
    tokens = random_tokens(CONFIG, 1, 9)
    assert not reader.decode(tokens, cache).requires_grad
    with pytest.raises(ValueError, match=r"13 tokens .* 12 positions"):
        reader.decode(tokens[:, :4], cache)
    # the refused call did not change the cache
    tail = random_tokens(CONFIG, 1, 3, seed=1)
    want = model.log_probs(torch.cat([tokens, tail], dim=1))[:, -3:]
    torch.testing.assert_close(reader.decode(tail, cache), want)


@pytest.mark.parametrize(("rows", "given"), [(3, 1), (1, 3)])
def test_a_cache_for_other_rows_is_refused(model, rows, given):
    reader = cache_reader(model)
    with pytest.raises(ValueError, match=f"for {rows} rows, got {given}"):
        reader.decode(random_tokens(CONFIG, given, 2), reader.init_cache(rows))


def test_a_cache_is_found_by_its_two_methods():
    ours = mingpt_style.build_model(CONFIG)
    assert cache_reader(ours) is ours
    # in annotated, `decode` is everything before the generator
    other = annotated.build_model(CONFIG)
    assert not isinstance(other, CachedLanguageModel)
    assert isinstance(cache_reader(other), CacheReader)
    # a method of the right name that does something else
    bare = SimpleNamespace(with_cache=print)
    assert cache_reader(bare) is None


def test_check_cache_holds_for_both_styles(style):
    report = check_model(
        partial(style.build_model, CONFIG), checks=["cache"], budget=30
    )
    (found,) = report.results
    assert found.status == "passed"
    assert "init_cache and decode" in found.message
    assert "lengths to 12, one by one, whole and in pieces" in found.message


def test_a_memory_that_forgets_is_found(monkeypatch):
    whole = annotated.CachedAttention.__call__

    def short(self, x, mask):
        self.key, self.value = (a[:, :, -3:] for a in (self.key, self.value))
        return whole(self, x, mask[..., -self.key.size(2) - x.size(1) :])

    monkeypatch.setattr(annotated.CachedAttention, "__call__", short)
    report = check_model(
        partial(annotated.build_model, CONFIG), checks=["cache"], budget=30
    )
    assert report.failed == ["check_cache"]
