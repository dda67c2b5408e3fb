"""The tutorials' faults: each wrong result, and ours beside it."""

import builtins
import copy
import dis
import inspect
import math
import re
import textwrap
import types

import pytest
import tiktoken
import torch
import torch.nn.functional as F
from errata import FAULTS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import annotated
import mingpt_style
from shared import GPTConfig, load_tokenizer
from shared.generation import generate
from shared.masks import combine_masks, padding_mask, subsequent_mask
from shared.tokenization import TiktokenTokenizer
from shared.tokenization.texts import random_batch, split_ids
from shared.training.recipe import Recipe
from shared.training.trainer import Trainer, mean_loss

STYLES = pytest.mark.parametrize(
    "style", [annotated, mingpt_style], ids=lambda style: style.__name__
)
TINY = GPTConfig(vocab_size=11, block_size=12, n_layer=2, n_head=2, n_embd=16)


def ids(*shape, vocab=11):
    return torch.randint(vocab, shape)


def change_last(tokens):
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    return changed


def future_moves(function, x, changed):
    """How far the first position's output moves with the last's input."""
    with torch.no_grad():
        return (function(x) - function(changed))[:, 0].abs().max().item()


def masked_scores(time, rows=64):
    scores = torch.randn(rows, time, time)
    return scores.masked_fill(~subsequent_mask(time), -math.inf)


# --- D1: GPT from Scratch ----------------------------------------------------


def dropout_then_softmax(scores, p=0.1):
    return F.dropout(scores, p).softmax(-1)


@STYLES
def test_d1_01_dropout_before_softmax_is_nan(style):
    """Minus infinity times 0 is NaN; ours stays finite in train mode."""
    wrong = dropout_then_softmax(masked_scores(8))
    assert wrong.isnan().any()
    # a tenth of the hidden scores, and with one of them the row
    hidden = F.dropout(torch.full((10**5,), -math.inf), 0.1)
    assert hidden.isnan().double().mean() == pytest.approx(0.1, abs=0.01)

    model = style.build_model(TINY).train()
    tokens = ids(4, 12)
    for _ in range(20):
        log_probs = model.log_probs(tokens)
        assert log_probs.isfinite().all()
    F.nll_loss(log_probs.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@STYLES
def test_d1_01b_the_demo_prints_the_shape_of_nan(style):
    """Twelve such layers are all NaN; only the shape looks right."""

    def layer(x):
        scores = x @ x.mT / 4
        scores = scores.masked_fill(~subsequent_mask(12), -math.inf)
        return x + dropout_then_softmax(scores) @ x

    x = torch.randn(3, 12, 16)
    for _ in range(12):
        x = F.layer_norm(layer(x), (16,))
    assert x.shape == (3, 12, 16)
    assert x.isnan().double().mean() > 0.9

    model = style.build_model(TINY)
    for mode in (model.train, model.eval):
        mode()
        assert model.log_probs(ids(3, 12)).isfinite().all()


class DropSecond(nn.Module):
    def forward(self, x):
        return x * torch.tensor([1.0, 0.0])


def test_d1_02_dropping_a_score_is_not_dropping_a_token():
    """A score of -4 that becomes 0 is attended to 40 times more."""
    scores = torch.tensor([2.0, -4.0])
    before = scores.softmax(-1)[1]
    dropped = DropSecond()(scores / 0.9).softmax(-1)[1]
    assert dropped / before == pytest.approx(39.5, abs=0.1)

    query, key = torch.ones(1, 1), scores.unsqueeze(-1)
    value, _ = annotated.attention(
        query, key, torch.eye(2), dropout=DropSecond()
    )
    assert value[0].tolist() == [scores.softmax(-1)[0].item(), 0]


def test_d1_04_the_target_is_ignored():
    """An argument without effect; ours is a loss, or is not there."""

    class Wrong(nn.Embedding):
        def forward(self, x, target=None):
            return super().forward(x)

    wrong, tokens = Wrong(11, 11), ids(2, 5)
    assert torch.equal(wrong(tokens, target="no tensor"), wrong(tokens))

    logits, loss = mingpt_style.build_model(TINY).eval()(tokens, tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert torch.equal(loss, expected)
    with pytest.raises(TypeError, match="target"):
        annotated.build_model(TINY)(tokens, target=tokens)


class WithTril(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("tril", torch.ones(size, size).tril())


def square_of_length(state, size):
    return [name for name, t in state.items() if t.shape[-2:] == (size, size)]


@STYLES
def test_d1_05_every_layer_saves_its_mask(style):
    """Masks of float32 are saved, and tie a checkpoint to its length."""
    wrong = nn.Sequential(*[WithTril(12) for _ in range(12)])
    assert len(square_of_length(wrong.state_dict(), 12)) == 12
    longer = nn.Sequential(*[WithTril(16) for _ in range(12)])
    with pytest.raises(RuntimeError, match="size mismatch"):
        longer.load_state_dict(wrong.state_dict())

    state = style.build_model(TINY).state_dict()
    assert square_of_length(state, TINY.block_size) == []


def test_d1_06_a_misspelt_setting_is_accepted():
    """num_head for num_heads builds the default; ours refuses the name."""

    class Wrong:
        num_heads = 12

        def __init__(self, **settings):
            for name, value in settings.items():
                setattr(self, name, value)

    assert Wrong(num_head=4).num_heads == 12

    with pytest.raises(TypeError, match="num_head"):
        GPTConfig(10, 12, num_head=4)
    with pytest.raises(ValueError, match="num_head"):
        GPTConfig.preset("gpt2", num_head=4)


@STYLES
def test_d1_16_a_rendering_without_indentation(style):
    """Code without its indentation is no code; ours compiles as it is."""
    source = inspect.getsource(inspect.getmodule(style.build_model))
    compile(source, "ours", "exec")
    stripped = "\n".join(line.lstrip() for line in source.splitlines())
    with pytest.raises(SyntaxError):
        compile(stripped, "rendered", "exec")


# --- D3: Let's build GPT -----------------------------------------------------


class Head(nn.Module):
    """The notebook's head: scaled by the width of its input."""

    def __init__(self, emb_dim, head_size):
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(emb_dim, head_size, bias=False) for _ in range(3)
        )

    def forward(self, x):
        weights = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5
        mask = subsequent_mask(x.size(1))
        return weights.masked_fill(~mask, -math.inf).softmax(-1) @ self.v(x)


@STYLES
def test_d3_02_the_defaults_do_not_fit_each_other(style):
    """A width of 32 and a global 16 cannot run; ours has one width."""
    head_size = 16
    wrong = nn.Sequential(Head(32, head_size), nn.Linear(32, 65))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        wrong(torch.randn(1, 8, 32))

    for width in (8, 16, 32):
        model = style.build_model(TINY.replace(n_embd=width))
        assert model.log_probs(ids(1, 8)).shape == (1, 8, 11)


def test_d3_03_sizes_in_the_other_order():
    """Swapped sizes build another module; ours refuses them by name."""
    wrong = Head(8, 32)  # meant: emb_dim=32, head_size=8
    assert wrong.q.weight.shape == (32, 8)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        wrong(torch.randn(1, 4, 32))

    with pytest.raises(ValueError, match=r"h=32 .* d_model=4"):
        annotated.MultiHeadedAttention(32, 4)
    x = torch.randn(1, 4, 32)
    assert annotated.MultiHeadedAttention(4, 32)(x, x, x).shape == x.shape


def test_d3_04_scores_scaled_by_the_wrong_width():
    """Scores of 8 heads get a variance of 1/8; ours of 1."""
    width, head = 384, 48
    q, k = torch.randn(2, 256, head), torch.randn(2, 256, head)
    wrong = q @ k.mT / math.sqrt(width)
    assert wrong.var().item() == pytest.approx(1 / 8, rel=0.1)
    assert (q @ k.mT / math.sqrt(head)).var().item() == pytest.approx(
        1, rel=0.1
    )

    out, p_attn = annotated.attention(q, k, q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, q))
    assert (p_attn - wrong.softmax(-1)).abs().max() > 0.01


class NormOverTime:
    """The notebook's LayerNorm: over axis 1, with plain tensors."""

    def __init__(self, size, eps=1e-5):
        self.eps = eps
        self.gamma, self.beta = torch.ones(size), torch.zeros(size)

    def __call__(self, x):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True)
        return self.gamma * (x - mean) / (var + self.eps).sqrt() + self.beta


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("norm", [annotated.LayerNorm, nn.LayerNorm])
def test_d3_05_a_norm_over_time(norm):
    """The first position moves with the last; ours does not."""
    x = torch.randn(2, 8, 32)
    changed = x.clone()
    changed[:, -1] += 5
    wrong = NormOverTime(32)
    assert future_moves(wrong, x, changed) > 0.1
    assert wrong(x[:, :1]).isnan().all()
    assert not isinstance(wrong, nn.Module)
    assert not wrong.gamma.requires_grad

    ours = norm(32)
    assert future_moves(ours, x, changed) == 0
    assert ours(x[:, :1]).isfinite().all()
    assert len(list(ours.parameters())) == 2
    assert ours.double()(x.double()).dtype == torch.float64


@STYLES
def test_d3_06_attention_without_a_mask(style):
    """The one-go module sees the future; both styles do not."""
    x = torch.randn(2, 8, 16)
    changed = x.clone()
    changed[:, -1] += 1
    wrong = nn.MultiheadAttention(16, 2, batch_first=True)
    assert future_moves(lambda x: wrong(x, x, x)[0], x, changed) > 1e-3

    tokens = ids(2, 8)
    model = style.build_model(TINY).eval()
    assert future_moves(model.log_probs, tokens, change_last(tokens)) == 0
    assert (
        model.log_probs(tokens) != model.log_probs(change_last(tokens))
    ).any()


def test_d3_12_allclose_by_luck():
    """The default tolerance fails for some seeds; ours for none."""
    failed = failed_ours = 0
    mean = torch.ones(8, 8).tril() / torch.arange(1.0, 9).unsqueeze(1)
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 8, 2, generator=generator)
        loop = torch.stack([x[:, : t + 1].mean(1) for t in range(8)], 1)
        failed += not torch.allclose(mean @ x, loop)
        failed_ours += not torch.allclose(mean @ x, loop, atol=1e-6)
    assert failed > 0
    assert failed_ours == 0


@STYLES
def test_d3_14_a_mask_in_every_head(style):
    """Masks are a fifth of the notebook's checkpoint; ours saves none."""
    masks = 3 * 8 * 256 * 256 * 4
    parameters = 5_468_993 * 4
    assert masks / (masks + parameters) == pytest.approx(0.223, abs=1e-3)
    assert WithTril(256).state_dict()["tril"].nbytes * 3 * 8 == masks

    config = TINY.replace(block_size=256)
    state = style.build_model(config).state_dict()
    assert square_of_length(state, 256) == []


@STYLES
def test_d3_15_heads_that_do_not_divide(style):
    """10 wide in 3 heads fails late; ours when it is built."""
    emb_dim, num_heads = 10, 3
    heads = [Head(emb_dim, emb_dim // num_heads) for _ in range(num_heads)]
    proj = nn.Linear(emb_dim, emb_dim)
    with pytest.raises(RuntimeError, match="4x9 and 10x10"):
        proj(torch.cat([h(torch.randn(1, 4, emb_dim)) for h in heads], -1))

    with pytest.raises(ValueError, match="n_embd=10 and n_head=3"):
        style.build_model(TINY.replace(n_embd=10, n_head=3))


def test_d3_16_an_unknown_character():
    """A bare KeyError; ours names the characters."""
    text = "hello world"
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    with pytest.raises(KeyError, match="2"):
        [stoi[c] for c in "hello world 2"]

    tokenizer = load_tokenizer("char", text)
    with pytest.raises(ValueError, match=r"1 characters are not .* '2'"):
        tokenizer.encode("hello world 2")
    with pytest.raises(ValueError, match="id 65"):
        tokenizer.decode([65])


@pytest.mark.unhooked
def test_d3_18_a_loss_by_a_global_vocabulary():
    """130 scores read as twice 65 give a loss; ours is refused."""
    vocab_size = 65  # the notebook's global
    table = nn.Embedding(130, 130)
    logits, targets = table(ids(2, 4)), ids(2, 8)
    wrong = F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
    assert wrong.isfinite()
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        nn.Embedding(100, 100)(ids(2, 3)).view(-1, vocab_size)

    model = mingpt_style.build_model(TINY.replace(vocab_size=130))
    with pytest.raises(ValueError, match="targets of shape"):
        model(ids(2, 4), ids(2, 8))


def elsewhere():
    """A default device that is not the tokens': what is made without a
    device lands there, as it lands on the CPU when the tokens do not."""
    return torch.device("meta")


@STYLES
def test_d3_26_positions_on_the_cpu(style):
    """arange without a device meets a table on the GPU; ours goes along."""
    with FakeTensorMode():  # a GPU without one: shapes and devices alone
        table = torch.empty(12, 16, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            F.embedding(torch.arange(5), table)

    model, tokens = style.build_model(TINY).eval(), ids(2, 5)
    expected = model.log_probs(tokens)
    with elsewhere():
        assert torch.equal(model.log_probs(tokens), expected)


# --- D4: The Transformer architecture of GPT models --------------------------


def undefined_names(module):
    """Global names that the module's code uses and nothing defines."""
    code = compile(inspect.getsource(module), module.__name__, "exec")
    known = vars(module).keys() | vars(builtins).keys()
    missing, waiting = set(), [code]
    while waiting:
        code = waiting.pop()
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        if code.co_flags & inspect.CO_NEWLOCALS:  # a function
            missing |= {
                i.argval
                for i in dis.get_instructions(code)
                if i.opname == "LOAD_GLOBAL" and i.argval not in known
            }
    return missing


@pytest.mark.unhooked
@STYLES
def test_d4_01_names_that_nothing_imports(style):
    """math and the others are not there; ours defines all it uses."""
    wrong = types.ModuleType("wrong")
    listing = textwrap.dedent("""
        def attention(query, key):
            scores = torch.matmul(query, key.transpose(-2, -1))
            return F.softmax(scores / math.sqrt(query.size(-1)), dim=-1)
        """)
    exec(listing, vars(wrong))
    with pytest.raises(NameError, match="torch"):
        wrong.attention(torch.ones(2, 2), torch.ones(2, 2))

    for name, module in vars(style).items():
        if inspect.ismodule(module) and name != "__builtins__":
            assert undefined_names(module) == set(), name


def test_d4_04_attention_kept_with_its_graph():
    """A model that was called once cannot be copied; ours can."""

    class Wrong(nn.Linear):
        def forward(self, x):
            self.attn = super().forward(x).softmax(-1)
            return self.attn

    wrong = Wrong(4, 4)
    wrong(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(wrong)

    model, tokens = annotated.build_model(TINY), ids(2, 5)
    model(tokens)
    copy.deepcopy(model)
    attention = model.decoder.layers[0].self_attn
    assert attention.attn is None
    attention.keep_attn = True
    model(tokens)
    assert attention.attn.shape == (2, 2, 5, 5)
    assert not attention.attn.requires_grad
    copy.deepcopy(model)


def test_d4_05_dropout_does_not_reach_attention():
    """dropout=0.0 leaves a tenth in the attention; ours leaves nothing."""

    def wrong_make_model(d_model, h, dropout=0.1):
        attn = annotated.MultiHeadedAttention(h, d_model)  # as published
        return nn.ModuleList([attn, nn.Dropout(dropout)])

    def rates(model):
        return {m.p for m in model.modules() if isinstance(m, nn.Dropout)}

    wrong = wrong_make_model(16, 2, dropout=0.0)
    assert rates(wrong) == {0.0, 0.1}
    x = torch.randn(4, 9, 16)
    assert not torch.equal(wrong[0](x, x, x), wrong[0](x, x, x))

    model = annotated.make_model(11, 2, 16, 32, 2, dropout=0.0).train()
    assert rates(model) == {0.0}
    assert torch.equal(model(ids(1, 9) * 0), model(ids(1, 9) * 0))
    assert rates(annotated.make_model(11, 2, 16, 32, 2, 0.3)) == {0.3}


def test_d4_06_layers_with_equal_biases():
    """Clones drawn anew in their matrices keep equal biases, which are not
    0; ours are 0, and no two matrices are equal."""
    layers = annotated.clones(nn.Linear(16, 16), 6)
    assert all(torch.equal(layers[0].weight, x.weight) for x in layers)
    for p in layers.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    assert not torch.equal(layers[0].weight, layers[5].weight)
    assert all(torch.equal(layers[0].bias, x.bias) for x in layers)
    assert layers[0].bias.any()

    model = annotated.build_model(TINY)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert not any(m.bias.any() for m in linears)
    square = [m.weight for m in linears if m.weight.shape == (16, 16)]
    assert len(square) == 8
    for i, a in enumerate(square):
        assert not any(torch.equal(a, b) for b in square[:i])


def test_d4_07_tokens_fainter_than_positions():
    """Position is many times the token; ours are about as loud."""
    vocab, width = 50257, 64
    table = nn.init.xavier_uniform_(torch.empty(vocab, width))
    positions = annotated.PositionalEncoding(width, 0.0, 64).pe
    loudness = positions.square().mean().sqrt()
    wrong = (table * math.sqrt(width)).square().mean().sqrt()
    assert loudness / wrong > 5

    config = TINY.replace(vocab_size=vocab, n_embd=width, n_layer=1)
    embeddings = annotated.build_model(config).embed[0]
    ours = embeddings(torch.arange(vocab)[None]).square().mean().sqrt()
    assert 0.5 < loudness / ours < 1


def test_d4_08_a_mask_of_minus_a_billion():
    """No float16, and a blind row attends to what is hidden; ours has
    minus infinity and refuses such a mask."""
    scores = torch.zeros(1, 4, 4)
    mask = subsequent_mask(4)
    with pytest.raises(RuntimeError, match="without overflow"):
        scores.half().masked_fill(~mask, -1e9)
    blind = torch.zeros(4, dtype=torch.bool)
    wrong = torch.randn(4).masked_fill(~blind, -1e9).softmax(-1)
    assert torch.equal(wrong, torch.full((4,), 0.25))
    low = torch.tensor([-1e9, 0.0]).masked_fill(
        torch.tensor([False, True]), -1e9
    )
    assert low.softmax(-1)[1] == 0.5

    x = torch.randn(1, 4, 8).half()
    out, p_attn = annotated.attention(x, x, x, mask)
    assert out.dtype == torch.float16
    assert out.isfinite().all()
    assert not p_attn[~mask].any()
    padded = padding_mask(torch.tensor([[0, 0, 1, 2]]), pad=0)
    with pytest.raises(ValueError, match=r"position 0 .* nothing to see"):
        combine_masks(mask, padded)


def test_d4_09_odd_widths_and_tables_of_one_position():
    """An odd width fails and one position broadcasts; ours works, and
    refuses what is too long with both numbers."""
    position = torch.arange(5.0).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, 7, 2) * -(math.log(1e4) / 7))
    pe = torch.zeros(5, 7)
    with pytest.raises(RuntimeError, match="must match"):
        pe[:, 1::2] = torch.cos(position * div_term)
    one = torch.ones(1, 1, 8)[:, :3]
    assert (torch.zeros(2, 3, 8) + one).shape == (2, 3, 8)

    odd = annotated.PositionalEncoding(7, 0.0, max_len=5)
    assert odd(torch.zeros(1, 5, 7)).isfinite().all()
    single = annotated.PositionalEncoding(8, 0.0, max_len=1)
    with pytest.raises(ValueError, match=r"3 tokens .* 1 positions"):
        single(torch.zeros(2, 3, 8))


def test_d4_11_text_that_spells_a_special_token():
    """A crash; ours reads it as ordinary text."""
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s:.)",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
    with pytest.raises(ValueError, match="disallowed special token"):
        encoding.encode("<|endoftext|>")

    tokenizer = TiktokenTokenizer(encoding)
    assert tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")
    assert tokenizer.decode(list(b"<|endoftext|>")) == "<|endoftext|>"


def test_d4_12_a_mask_on_the_cpu():
    """A mask made without a device lands away from the scores; ours does
    not."""
    scores = torch.randn(1, 5, 5)
    with elsewhere(), pytest.raises(RuntimeError, match="device"):
        scores.masked_fill(torch.ones(1, 5, 5).tril() == 0, -1e9)

    model, tokens = annotated.build_model(TINY), ids(2, 5)
    with elsewhere():
        assert model(tokens).device == tokens.device
    assert subsequent_mask(5, device="meta").device.type == "meta"


@STYLES
def test_d4_13_log_probabilities_called_probabilities(style):
    """Negative numbers cannot be drawn from; ours are called by name."""
    wrong = nn.Linear(16, 11)(torch.randn(1, 16)).log_softmax(-1)
    with pytest.raises(RuntimeError, match="element < 0"):
        torch.multinomial(wrong, 1)

    log_probs = style.build_model(TINY).eval().next_log_probs(ids(1, 5))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(1))
    assert 0 <= torch.multinomial(log_probs.exp(), 1).item() < 11


def test_d4_14_no_mask_is_no_causality():
    """forward wants a mask, and None shows everything; ours builds it."""

    class Wrong(annotated.DecoderModel):
        def forward(self, x, mask):
            return self.decode(x, mask)

        def decode(self, x, mask):
            return self.decoder(self.embed(x), mask)

    ours = annotated.build_model(TINY).eval()
    wrong = Wrong(ours.decoder, ours.embed, ours.generator).eval()
    tokens = ids(2, 8)
    changed = change_last(tokens)
    with pytest.raises(TypeError, match="mask"):
        wrong(tokens)
    blind = future_moves(lambda x: wrong.decode(x, None), tokens, changed)
    assert blind > 1e-3

    assert future_moves(ours, tokens, changed) == 0
    assert future_moves(ours.decode, tokens, changed) == 0


# --- Generation: the loops of all three --------------------------------------


class Watched(nn.Module):
    """Notes how many tokens a model is shown, and in which mode."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config
        self.vocab_size, self.block_size = model.vocab_size, model.block_size
        self.shown, self.modes = [], []

    def log_probs(self, tokens):
        self.shown.append(tokens.size(1))
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.model.log_probs(tokens)


def append_greedily(model, tokens, count, crop=None):
    """The tutorials' loop: no eval mode, and a crop they get wrong."""
    for _ in range(count):
        seen = tokens if crop is None else tokens[:, -crop:]
        new = model.log_probs(seen)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


@STYLES
def test_d1_12_the_sequence_outgrows_the_model(style):
    """Feeding everything back dies at the model's length; ours slides."""
    model = Watched(style.build_model(TINY).eval())
    with pytest.raises(ValueError, match=r"13 tokens .* 12 positions"):
        append_greedily(model, ids(1, 1), 20)
    assert generate(model, ids(1, 1), 20).shape == (1, 21)
    assert max(model.shown[-20:]) == 12


@STYLES
def test_d3_01_the_crop_is_thrown_away(style):
    """A crop of something else does not shorten what the model sees."""
    model = Watched(style.build_model(TINY).eval())
    context = ids(1, 12)
    stale = ids(1, 4)

    def listing(ctx):
        cropped = stale[:, -12:]  # computed, and not used
        assert cropped.size(1) == 4
        return model.log_probs(ctx)

    listing(context)
    with pytest.raises(ValueError, match="13 tokens"):
        listing(torch.cat([context, ids(1, 1)], dim=1))
    rows = generate(model, context, 5)
    assert rows[:, :12].equal(context)
    expected = append_greedily(model, context, 5, crop=12)
    assert rows.equal(expected)


@STYLES
def test_d3_07_the_crop_is_not_the_models_own(style):
    """Cropped to a global 8 tokens, most positions are never used."""
    model = Watched(style.build_model(TINY.replace(block_size=64)).eval())
    prompt = ids(1, 30)
    append_greedily(model, prompt, 3, crop=8)
    assert model.shown == [8, 8, 8]
    model.shown.clear()
    generate(model, prompt, 3)
    assert model.shown == [30, 31, 32]


@STYLES
def test_d3_08_sampling_in_train_mode(style):
    """In train mode dropout moves the scores, and gradients are kept."""
    model = Watched(style.build_model(TINY.replace(dropout=0.5))).train()
    tokens = ids(1, 6)
    wrong = model.log_probs(tokens)
    assert wrong.requires_grad
    assert not wrong.equal(model.log_probs(tokens))
    model.modes.clear()
    first = generate(model, tokens, 6)
    assert set(model.modes) == {(False, False)}
    assert model.training
    assert generate(model, tokens, 6).equal(first)


@STYLES
def test_d4_02_no_seed(style):
    """Without a seed no choice comes back; ours takes a generator."""
    model = style.build_model(TINY)
    tokens = ids(8, 2)
    wrong = [generate(model, tokens, 8, temperature=1.0) for _ in range(2)]
    assert not wrong[0].equal(wrong[1])
    ours = [
        generate(
            model,
            tokens,
            8,
            temperature=1.0,
            generator=torch.Generator().manual_seed(5),
        )
        for _ in range(2)
    ]
    assert ours[0].equal(ours[1])


@STYLES
def test_d4_03_greedy_with_dropout(style):
    """Four copies of one prompt give different rows; ours give one."""
    model = style.build_model(TINY.replace(dropout=0.5)).train()
    copies = ids(1, 4).repeat(4, 1)
    wrong = append_greedily(model, copies, 8)
    assert len({tuple(row) for row in wrong.tolist()}) > 1
    ours = generate(model, copies, 8)
    assert len({tuple(row) for row in ours.tolist()}) == 1


# --- Training: the loop of D3 ------------------------------------------------


TEXT = torch.arange(2000) ** 2 % 11


def whole_text_batch(length):
    """The tutorial's batch: from all of the text, as long as a global."""
    return random_batch(TEXT, 4, length)


def estimate_by_batches(model, get_batch, count):
    """The tutorial's estimate: a number, and train mode whatever was."""
    model.eval()
    losses = [mean_loss(model, *get_batch("train")) for _ in range(count)]
    model.train()
    return torch.stack(losses).mean().item()


def trainer_of(style, **sizes):
    model = style.build_model(TINY.replace(**sizes))
    recipe = Recipe(batch_size=4, eval_batches=5)
    return Trainer(model, *split_ids(TEXT), recipe)


@STYLES
def test_d3_09_a_batch_without_a_split(style, monkeypatch):
    """The call crashes, half way through eval mode; ours knows both parts."""
    model = style.build_model(TINY).train()
    with pytest.raises(TypeError, match="0 positional arguments but 1"):
        estimate_by_batches(model, lambda: whole_text_batch(8), 2)
    assert not model.training

    trainer = trainer_of(style)
    trainer.model.train()
    drawn = []

    def draw(ids, size, length, generator):
        drawn.append(ids)
        if len(drawn) > 7:
            raise ValueError("the seventh is the last")
        return random_batch(ids, size, length, generator)

    monkeypatch.setattr("shared.training.trainer.random_batch", draw)
    with pytest.raises(ValueError, match="the seventh is the last"):
        trainer.estimate_losses()
    train, val = split_ids(TEXT)
    assert all(ids.equal(train) for ids in drawn[:5])
    assert all(ids.equal(val) for ids in drawn[5:])
    assert all(module.training for module in trainer.model.modules())


@STYLES
def test_d3_10_a_loss_taken_for_a_dict(style):
    """A number cannot be asked for "val"; ours has both, and two modes."""
    model = style.build_model(TINY).eval()
    wrong = estimate_by_batches(model, lambda split: whole_text_batch(8), 2)
    with pytest.raises(TypeError, match="not subscriptable"):
        wrong["val"]
    assert model.training

    trainer = trainer_of(style)
    for mode in (True, False):
        trainer.model.train(mode)
        losses = trainer.estimate_losses()
        assert losses.keys() == {"train", "val"}
        assert losses["train"] != losses["val"]
        assert trainer.model.training == mode


def positions_taught(model, x, y):
    """Positions whose row of the table gets a gradient."""
    model.zero_grad()
    mean_loss(model, x, y).backward()
    moved = model.transformer.wpe.weight.grad.abs().sum(-1) > 0
    return moved.nonzero().flatten().tolist()


@STYLES
def test_d3_11_windows_that_are_too_short(style):
    """8 of 256 positions learn, and the text to be tested on is learnt."""
    model = mingpt_style.build_model(TINY.replace(block_size=256))
    x, y = whole_text_batch(8)
    assert positions_taught(model, x, y) == list(range(8))
    starts = random_batch(torch.arange(2000), 500, 8)[0][:, 0]
    assert (starts >= 1800).any()  # of the last tenth

    trainer = trainer_of(style, block_size=180)
    x, y = trainer._batch("train", 1)
    assert x.shape == y.shape == (4, 180)
    if style is mingpt_style:  # the other's positions are sines, not learnt
        taught = positions_taught(trainer.model, x, y)
        assert taught == list(range(180))
    train, val = split_ids(TEXT)
    assert trainer.texts["train"].equal(train)
    assert trainer.texts["val"].equal(val)
    assert torch.cat([train, val]).equal(TEXT)


# --- The table, and the texts themselves -------------------------------------


def test_every_fault_of_the_table_is_pinned_by_a_test():
    numbers = [fault.number for fault in FAULTS]
    assert len(set(numbers)) == len(numbers)
    pinned = {
        match[0]
        for name in globals()
        if (match := re.match(r"test_d\d_\d+b?(?=_)", name))
    }
    assert pinned == {
        f"test_{number.lower().replace('-', '_')}" for number in numbers
    }


def test_the_table_holds_every_serious_fault(sibling):
    rows = (sibling / "ERRATA.md").read_text(encoding="utf-8")
    serious = re.findall(r"^\| (D\d-\d+b?) \| \**S[12]", rows, re.M)
    assert len(serious) > 30
    assert set(serious) == {fault.number for fault in FAULTS}


def listings(path):
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_the_first_text_prints_the_shape_of_nan(sibling):
    """Its own listings, run in order: the last tensor is all NaN."""
    names = {}
    for listing in listings(sibling / "texts" / "gpt-from-scratch.md"):
        exec(listing, names)
    config = names["GPT1Config"](10, 12)
    answer = names["GPT"](config)(ids(3, 12, vocab=10))
    assert answer.shape == (3, 12, 10)
    assert answer.isnan().all()


def test_the_third_text_keeps_dropout_in_its_attention(sibling):
    """Its own listings, with the names that it forgot to import."""
    names = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "math": math,
        "copy": copy,
        "Variable": torch.autograd.Variable,
    }
    path = sibling / "texts" / "architecture-of-gpt-models.md"
    for listing in listings(path)[1:]:
        exec(listing, names)
    model = names["make_model"](11, N=1, d_model=16, d_ff=32, dropout=0.0)
    rates = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.0, 0.1}
