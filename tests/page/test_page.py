"""gpt-duet compare --html: what the page shows, and how it is built."""

import base64
import re
import time
from html import unescape

import numpy as np
import pytest
import torch
from browser import data_of, hostile_page, make_page

from gpt_duet import GPTConfig, annotated, mingpt_style
from gpt_duet.agreement import enlarged_random_weights
from gpt_duet.benchmark_results import Results, Row, Run
from gpt_duet.comparison.models import count_flops, difference_by_concept
from gpt_duet.comparison.page.folding import highlight, spans
from gpt_duet.comparison.page.sections import measure_weight_transfer
from gpt_duet.comparison.page.value_maps import influence_maps, sizes
from gpt_duet.comparison.sources import read_part

STYLES = (annotated, mingpt_style)
TOKENS = torch.arange(12)[None]
CONFIG = GPTConfig(20, 16, n_layer=3, n_head=2, n_embd=8, n_inner=20)


def random_weights():
    state = enlarged_random_weights(mingpt_style, CONFIG, 1)
    return {name: tensor.double() for name, tensor in state.items()}


@pytest.fixture
def models():
    return [s.from_gpt2(random_weights(), CONFIG) for s in STYLES]


@pytest.fixture
def scale_weights(monkeypatch):
    """Return a function that makes annotated scale one tensor wrongly."""
    right = annotated.from_gpt2

    def scale(name, factor):
        def wrong(state, config, **parts):
            if name in state:
                state = dict(state) | {name: factor * state[name]}
            return right(state, config, **parts)

        monkeypatch.setattr(annotated, "from_gpt2", wrong)

    return scale


# The page


def test_the_page_is_one_small_valid_file_with_every_section(tmp_path):
    html5lib = pytest.importorskip("html5lib")
    page = hostile_page(tmp_path)
    with page.open("rb") as file:
        tree = html5lib.HTMLParser(
            strict=True, namespaceHTMLElements=False
        ).parse(file)
    with pytest.raises(html5lib.html5parser.ParseError):
        html5lib.HTMLParser(strict=True).parse("<!doctype html><p></b>")
    text = page.read_text(encoding="utf-8")
    assert data_of(page)["walk"]["others"] == {}  # only the user's text
    assert len(text.encode()) < 2_000_000
    assert not re.findall(r'(?:src|href|action|data)="(?!#|data:)[^"]*', text)
    assert text.index('id="walk"') < text.index('id="concepts"')
    assert "@import" not in text
    assert "url(" not in text
    for words in (
        "<strong>One function</strong>",
        f"PyTorch {torch.__version__}",
        "2 layers, 2 attention heads, 16 wide",
        "d_model = n_embd",
        "h = n_head",
        "N = n_layer",
        "linears[0..2] = c_attn",
        "a_2 = weight * sqrt(n / (n - 1))",
        "exactly 0 above the diagonal",
        "Not measured here",
    ):
        assert words in text, words
    assert 'class="gap far"' not in text
    # both last norms are torch's; the style's own norm did not run
    assert text.count("<span>nn.LayerNorm</span>") == 2
    assert text.count("<span>LayerNorm</span>") == 0
    assert text.count("(not in the model that ran)") == 3
    # the page has all of the source, with line numbers
    lines = {
        "".join(e.itertext()).rstrip("\n")
        for e in tree.iterfind(".//span[@class]")
        if e.get("class").split()[0] == "line"
    }
    for style in STYLES:
        for concept, components in style.COMPONENTS.items():
            assert f'id="concept-{concept}"' in text
            assert f'href="#concept-{concept}"' in text
            if concept == "attention":  # named in the drawing
                assert f"<span>{components[0].__name__}</span>" in text
            for component in components:
                for segment in read_part(component).segments:
                    code = segment.code.split("\n")
                    for number, line in enumerate(code, segment.line):
                        assert not line or f"{number}{line}" in lines


def test_two_functions_are_told_apart(tmp_path, scale_weights):
    scale_weights("h.1.attn.c_attn.weight", 1.1)
    page = make_page(tmp_path, "--text", "abc def", status=1, walk=True)
    text = page.read_text()
    assert "<strong>Two functions</strong>" in text
    assert 'class="gap far"' in text
    walk = data_of(page)["walk"]
    place = f'<a href="#step-{walk["steps"][walk["opens"]]["name"]}">'
    assert f"{place}Where they first differ</a>" in text


@pytest.mark.slow
def test_a_style_that_sees_the_future_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr("third_style.CAUSAL", False)
    words = ("annotated", "third_style")
    page = make_page(tmp_path, *words, status=1, walk=True)
    assert page.read_text().count("sees the future: up to") == 1
    assert "does not show a forward pass" not in page.read_text()
    early = data_of(page)["influence"]["early"]
    assert early[0] == 0
    assert early[1] > 1e-4


def test_float64_and_a_bound_of_1e_12_replace_an_old_page(tmp_path):
    (tmp_path / "page.html").write_text("old")
    text = make_page(tmp_path, "--text=abc", "--dtype=float64").read_text()
    assert "float64 rounding can cause up to 1.0e-12" in text
    # make_page sets this limit
    assert "or have more than 0 parameters" in text
    assert text.endswith("</html>\n")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.slow
def test_the_default_is_made_in_time_and_small(duet, tmp_path):
    start = time.process_time()
    status, _, _ = duet("compare", "--html", tmp_path / "page.html")
    assert status == 0
    # 40 s of CPU time: 20 s on each of 2 cores
    assert time.process_time() - start < 40
    assert (tmp_path / "page.html").stat().st_size < 2**21


# The parts of the page


def test_flops_are_the_formulas(models):
    T, C, V, inner = 12, CONFIG.n_embd, CONFIG.vocab_size, CONFIG.n_inner
    attention = 3 * (8 * T * C * C + 4 * T * T * C)
    feed_forward = 3 * 4 * T * C * inner
    for style, model in zip(STYLES, models, strict=True):
        assert count_flops(model, style.STAGES, TOKENS) == {
            "embedding": 0,
            "attention": attention,
            "feed_forward": feed_forward,
            "block": attention + feed_forward,
            "model": attention + feed_forward + 2 * T * C * V,
            "head": 2 * T * C * V,
        }


def test_differences_are_the_largest_of_all_layers():
    found = difference_by_concept(
        {"block.0": 1.0, "block.10": 3.0, "block.1.attention": 9.0}
    )
    assert found == {"attention": 9.0, "block": 3.0}
    nan = {"block.0": 1.0, "block.1": float("nan"), "block.2": 0.5}
    assert np.isnan(difference_by_concept(nan)["block"])


def weight_transfer():
    rows = measure_weight_transfer(STYLES, random_weights(), CONFIG, TOKENS)
    return {row.name: row for row in rows}


def test_every_row_is_absorbed_to_rounding():
    rows = weight_transfer()
    assert list(rows) == [
        "token table", "position table", "attention's matrices", "norm",
        "head", "tied head", "activation",
    ]  # fmt: skip
    for name, row in rows.items():
        assert all(row.written), name
        assert row.absorbed == (name != "activation")
        assert row.error < 1e-13 if row.absorbed else row.error > 1e-4, name


@pytest.mark.parametrize(
    ("tensor", "row"),
    [
        ("wte.weight", "token table"),
        ("wpe.weight", "position table"),
        ("h.0.attn.c_attn.weight", "attention's matrices"),
        ("ln_f.weight", "norm"),
        ("lm_head.weight", "head"),
    ],
)
def test_a_slip_shows_in_its_own_row(scale_weights, tensor, row):
    scale_weights(tensor, 1.01)
    rows = weight_transfer()
    assert rows[row].error > 1e-5
    for name in {"token table", "position table"} - {row}:
        assert rows[name].error < 1e-13


def test_marked_names_are_whole_names():
    terms = {"projection": ["linears[-1]"], "three": ["linears[0..2]"]}
    code = "linears[-1](x), self.linears, my_linears, linears_"
    found = [(code[a:b], term) for a, b, term in spans(code, terms)]
    assert found == [("linears[-1]", "projection"), ("linears", "three")]


def test_highlighting_loses_nothing_and_escapes():
    code = 'def f(x):\n    """<b>&\n\n    x"""\n    return x < "</script>"\n'
    lines = highlight(code, {"the input": ["x"]})
    text = [re.sub(r"<[^>]*>", "", str(line)) for line in lines]
    assert "\n".join(map(unescape, text)) == code
    assert not any("</script>" in line for line in lines)
    assert 'data-term="the input">x</span>' in lines[0]


def test_sizes_of_numbers_travel():
    values = torch.tensor([0.0, 1e-30, 1e-20, 1e-8, -1.0, 1e5, 1e9, torch.nan])
    codes = np.frombuffer(base64.b64decode(sizes(values)), np.uint8)
    assert codes[0] == 0
    assert codes[1] == codes[2] == 1
    assert (codes[-3:] == 255).all()
    back = 10 ** (-20 + (codes[3:5].astype(float) - 1) * 25 / 254)
    assert np.allclose(np.log10(back), [-8, 0], atol=0.06)


def test_a_leak_to_the_next_position_is_the_largest_early_influence():
    sound = torch.ones(4, 4).tril()
    found = influence_maps([sound, sound + torch.eye(4).roll(1, 1).triu() / 2])
    assert found["early"] == [0.0, 0.5]
    assert found["largest"] == [1.0, 1.0]


# A benchmark's file


def test_a_benchmark_without_rows_of_models(refused, tmp_path):
    bench, page = tmp_path / "bench.json", tmp_path / "page.html"
    limits = Run("x", {}, [Row("matmul", [1.0], limit=True)])
    for runs in ([], [limits]):
        Results({}, runs).save(bench)
        err = refused("compare", "--html", page, "--bench", bench)
        assert "it has no rows of" in err
    assert not page.exists()
