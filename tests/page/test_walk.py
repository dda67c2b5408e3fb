"""The walk through a forward pass, in the page's data and in a browser."""

import base64
import copy
import inspect
import json
import re

import html5lib
import numpy as np
import pytest
import torch
from browser import HOSTILE, data_of, page_of
from selenium.webdriver import ActionChains
from torch import nn

from gpt_duet import GPTConfig, annotated, mingpt_style
from gpt_duet.checkpoint import SMALL_MODEL, load_checkpoint
from gpt_duet.comparison.page.folding import fold
from gpt_duet.comparison.page.kinds import name_kinds
from gpt_duet.comparison.page.value_maps import ValueMaps, find_factors
from gpt_duet.comparison.page.walk import (
    fold_steps,
    make_walk,
    next_tokens,
    without_inner,
)
from gpt_duet.comparison.values import diff_by_value
from gpt_duet.comparison.values.layouts import as_table
from gpt_duet.mingpt_style.ladder import FullGPT
from gpt_duet.tokenization.texts import default_passage
from gpt_duet.tokenization.tokenizers import DEFAULT, load_tokenizer

pytestmark = [
    # with --check-shapes, frames of the hook would be recorded
    pytest.mark.unhooked,
    pytest.mark.xdist_group("browser"),
]


def test_a_comprehension_is_named_by_its_function():
    for inner in ("listcomp", "setcomp", "dictcomp", "genexpr"):
        assert without_inner(f"Attention.project.<{inner}>") == (
            "Attention.project"
        )
    assert without_inner("make.<locals>.forward") == "make.<locals>.forward"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a page with the walk of both styles on the small model."""
    folder = tmp_path_factory.mktemp("walk")
    return page_of(folder, "diff", "annotated", "mingpt_style")


# the kinds of the steps of both styles; only the first layer is unfolded
KINDS = [
    "token", "position", "embedding", "norm", "project", "scores", "mask",
    "probabilities", "mix", "join", "residual_attention", "second_norm",
    "widen", "activation", "narrow", "residual_feed_forward", "last_norm",
    "logits", "log_probs",
]  # fmt: skip


# --- What is in the page ----------------------------------------------------


def test_a_page_of_its_own_is_small_and_strict(page):
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 1_000_000
    html5lib.HTMLParser(strict=True).parse(text)
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)
    walk = data_of(page)["walk"]
    assert len(walk["tokens"]) == 24
    assert text.count("<li id=") == len(walk["steps"])
    assert {len(step["apart"]) for step in walk["steps"]} == {1, 4}
    assert walk["opens"] == 0
    kinds = [s["kind"] for s in walk["steps"] if s["name"].isdigit()]
    assert kinds == KINDS
    for words in (
        "so a position must not look at tokens that come after it",
        "has replaced them by the checkpoint",
        "True on and below the diagonal",
        "In this run the config chose GELU by tanh; the dots are",
        "nn.LayerNorm computes the norm.",
        "In steps 6, 7, 8, mingpt_style has no line for the value",
        "query (on the map), key and value, each 1\u00d724\u00d7128",
        "Only in mingpt_style",
        "mingpt_style computes this result on the way to step 5",
        "<h3>embedding</h3>",
        "<h3>layer 0: attention <small>",
        "<h3>layer 0: feed-forward</h3>",
        "<h3>head</h3>",
    ):
        assert words in text
    # a step that only one side has is folded under the next step of both
    folded = {s["name"]: s["places"] for s in walk["steps"] if not s["kind"]}
    assert list(folded) == ["1a", "5a", "6a"]
    assert all(None in places for places in folded.values())
    assert text.count("<details>") == 3
    assert "one function: " in text
    axes = "(batch \u00d7 heads \u00d7 time \u00d7 time)"
    assert text.count(axes) == 3
    assert "`" not in text[text.index("<body>") : text.index("<script")]
    assert "layers 1 to 3 run the same lines" in text


@pytest.mark.parametrize(
    ("build", "same_line"),
    # FullGPT loops over heads; annotated writes out its norm, and adds both
    # residuals on one line
    [
        (FullGPT, []),
        (annotated.build_model, ["second_norm", "residual_feed_forward"]),
    ],
)
def test_kinds_follow_from_values_and_not_from_names(
    build, same_line, monkeypatch
):
    torch.manual_seed(0)
    model = build(GPTConfig(50, 16, n_layer=2, n_head=2, n_embd=8))
    found = diff_by_value(model, copy.deepcopy(model))
    left = found.sides[0]
    rows = [step.row for step in fold_steps(found)]
    values = left.keep({row.order[0] for row in rows})
    kinds = dict.fromkeys([*name_kinds(rows, values, left), *same_line])
    assert kinds.keys() - {""} == set(KINDS)
    monkeypatch.setattr("gpt_duet.comparison.page.walk.MAPS", len(rows))
    walk = make_walk(found, str)
    steps = walk["data"]["steps"]
    # the page has room for the maps of one layer
    assert max(len(step["layers"]) for step in steps) == 1
    said = " ".join(step.remarks[0] for step in walk["steps"])
    assert "replaced" not in said  # no checkpoint was loaded
    assert ("In this run it holds sines" in said) == bool(same_line)


def test_equal_values_are_one_map(page):
    walk = data_of(page)["walk"]
    pairs = [m for s in walk["steps"] for m in s["maps"] if None not in m]
    # each probability of the four heads equals the model's
    square = next(s for s in walk["steps"] if s["kind"] == "probabilities")
    number = square["maps"][1][0]
    assert walk["columns"][number] == [96, 96, 4, 96]
    data = base64.b64decode(walk["maps"][number])[24 * 96 :]
    shown = np.frombuffer(data, "<f4").reshape(24, 4, 24)
    small = load_checkpoint(SMALL_MODEL)
    state = small.to(torch.device("cpu"), torch.float32)
    model = annotated.from_gpt2(state, small.config).eval()
    attention = model.decoder.layers[1].self_attn
    attention.keep_attn = True
    tokens = load_tokenizer(DEFAULT).encode(default_passage())[:24]
    model.log_probs(torch.tensor([tokens]))
    own = attention.attn[0].transpose(0, 1)
    np.testing.assert_allclose(shown, own, atol=1e-5)
    assert pairs
    assert all(left == right for left, right in pairs)
    assert len(walk["maps"]) == len(walk["columns"])
    for data, (width, read, *_) in zip(
        walk["maps"], walk["columns"], strict=True
    ):
        size = len(base64.b64decode(data))
        assert size % (width + 4 * read) == 0


def test_a_map_is_what_it_shows():
    maps = ValueMaps(3, 3)
    value = torch.tensor([[0.0, 1.0, -2.0], [-torch.inf, 0.5, 2.0], [1, 1, 1]])
    left, right = maps.numbers(value.view(1, 3, 3), value.unsqueeze(1))
    assert left == right  # the right has the layout of the left
    data = np.frombuffer(base64.b64decode(maps.found[left]), np.uint8)
    assert data[:9].tolist() == [128, 192, 1, 0, 160, 255, 192, 192, 192]
    numbers = data[9:].view("<f4").reshape(3, 3)
    np.testing.assert_allclose(numbers, value.numpy(), rtol=1e-4)
    assert maps.numbers(None, None) == [None, None]
    heads = torch.arange(18.0).view(1, 2, 3, 3)
    number, _ = maps.numbers(heads, None, square=True)
    numbers = base64.b64decode(maps.found[number])[18:]
    beside = heads[0].movedim(0, 1).reshape(3, 6)  # a position's two heads
    assert np.frombuffer(numbers, "<f4").tolist() == beside.flatten().tolist()


class Biased(nn.Module):
    """A model with one head, whose scores a given function computes."""

    def __init__(self, score):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8)
        self.query, self.key, self.out = (nn.Linear(8, n) for n in (8, 8, 50))
        self.score = score

    def forward(self, tokens):
        x = self.table(tokens)
        scores = self.score(self.query(x), self.key(x))
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.out(weights @ x)


@pytest.mark.parametrize(
    ("score", "factor"),
    [
        (lambda q, k: q @ k.mT / 8**0.5, 8**-0.5),
        (lambda q, k: (q / 8**0.5) @ k.mT, 8**-0.5),
        (lambda q, k: (q / 8**0.25) @ (k / 8**0.25).mT, 8**-0.5),
        (lambda q, k: torch.einsum("btd,bsd->bts", q, k), 1),
        (lambda q, k: q @ k.mT / 8, 1 / 8),
        (lambda q, k: torch.baddbmm(torch.eye(q.size(1)), q, k.mT), None),
    ],
)
def test_scores_are_taken_apart_into_query_and_key(score, factor):
    model = Biased(score)
    twin = copy.deepcopy(model)
    side = diff_by_value(model, twin, vocab_size=50).sides[0]
    square = [v.number for v in side.values if v.shape[-2:] == (16, 16)]
    values = side.keep(square)
    scores = {
        n: v for n, v in values.items()
        if v.isfinite().all() and v.min() < 0
    }  # fmt: skip
    found = find_factors(side, scores)
    *_, last = scores
    assert (last in found) == (factor is not None)
    for number, (query, key, c, heads) in found.items():
        assert heads == 1
        products = c * query @ key.mT
        torch.testing.assert_close(products[None], values[number])
    if factor is not None:
        assert found[last][2] == pytest.approx(factor)


@pytest.mark.parametrize("size", [12, 300])
def test_the_likeliest_tokens_and_the_others_make_a_softmax(size):
    scores = torch.randn(9, size, dtype=torch.float64)
    scores[:, 2] = -torch.inf  # this token has probability 0
    tokens = [0, *range(8)]  # it follows position 2 here
    log_probs = scores.log_softmax(-1)
    found = next_tokens(log_probs, tokens, 9)
    json.dumps(found, allow_nan=False)  # JSON has no NaN
    for row, rests, log_p in zip(
        found["rows"], found["rests"], log_probs, strict=True
    ):
        ids, shown = map(list, zip(*row[: found["drawn"]], strict=True))
        for tenths, rest in enumerate(rests, 1):
            heat = tenths / 10
            parts = torch.tensor([*(x / heat for x in shown), rest])
            true = (log_p / heat).softmax(-1)[ids]
            assert parts.double().softmax(0)[:-1].allclose(true, atol=1e-3)


def test_folded_source_is_what_a_lecture_would_show():
    code = inspect.getsource(annotated.attention).rstrip()
    lines = fold(code, 75, {})
    assert [str(line.number) for line in lines if line.kind != "brief"] == [
        str(75 + n) for n in range(code.count("\n") + 1)
    ]
    shown = [x.code.striptags() for x in lines if x.kind != "fold"]
    signature = "def attention(query, key, value, mask=None, dropout=None):"
    assert shown[0] == signature
    assert len(shown) == 9
    checked = inspect.getsource(mingpt_style.GPT.embed).rstrip()
    shown = [x for x in fold(checked, 1, {}) if x.kind != "fold"]
    assert not any("raise" in line.code for line in shown)
    forward = inspect.getsource(mingpt_style.CausalSelfAttention.forward)
    shown = [x for x in fold(forward, 1, {}) if x.kind != "fold"]
    assert not any("append" in line.code for line in shown)  # no cache
    assert any("is_causal = " in line.code.striptags() for line in shown)
    assert "".join(fold("    half an", 1, {})[0].code.striptags()) == "half an"


@pytest.mark.parametrize(
    ("shape", "table", "heads"),
    [
        ((1, 5, 8), (5, 8), 1),
        ((5, 8), (5, 8), 1),
        ((1, 5, 5), (5, 5), 1),
        ((1, 2, 5, 5), (5, 10), 2),
        ((1, 2, 5, 4), (5, 8), 2),
        ((2, 5, 4), (5, 4), 1),  # of two rows, the first is shown
        ((1, 5, 1), (5, 1), 1),
        ((1, 7, 3), (1, 21), 1),
    ],
)
def test_a_value_lies_as_positions_by_features(shape, table, heads):
    value = torch.arange(float(np.prod(shape))).view(shape)
    found, side_by_side = as_table(value, 5)
    assert (tuple(found.shape), side_by_side) == (table, heads)


def test_two_models_that_part_with_hostile_names_and_texts(tmp_path):
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\n"
        "from gpt_duet.mingpt_style import GPT\n"
        "from gpt_duet.config import GPTConfig\n"
        "class Mine(GPT):\n"
        "    def forward(self, x):\n"
        "        '</script><script>alert(1)</script>'  # <img src=x>\n"
        "        return super().forward(x)\n"
        "def build(act, name=''):\n"
        "    torch.manual_seed(0)\n"
        "    return Mine(GPTConfig(1024, 128, 2, 2, 16, activation=act))\n"
    )
    evil = f"{source}:build('gelu', '</title><script>alert(3)</script>')"
    words = ("diff", f"{source}:build('relu')", evil, f"--text={HOSTILE}")
    page = page_of(tmp_path, *words, status=1)
    text = page.read_text(encoding="utf-8")
    html5lib.HTMLParser(strict=True).parse(text)
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "they first differ at mingpt_style/feed_forward.py:" in text
    assert "<h3>where they first differ</h3>" in text
    walk = data_of(page)["walk"]
    steps = {step["name"]: step for step in walk["steps"]}
    last = steps[max(steps, key=lambda name: int(name.rstrip("abc")))]
    assert walk["steps"][walk["opens"]] == last
    assert last["layers"] == []
    assert None not in last["maps"][0]


@pytest.fixture(scope="module")
def parting(tmp_path_factory):
    """Return a page about two models; only one has an extra line."""
    folder = tmp_path_factory.mktemp("parting")
    source = folder / "again.py"
    source.write_text(
        "import torch\n"
        "from gpt_duet.mingpt_style import GPT\n"
        "from gpt_duet.config import GPTConfig\n"
        "class Again(GPT):\n"
        "    def hidden(self, idx, cache=None):\n"
        "        x = super().hidden(idx, cache)\n"
        "        again = self.transformer.wte(idx)\n"
        "        return x.cos() + again\n"
        "class Detached(GPT):\n"
        "    def hidden(self, idx, cache=None):\n"
        "        return super().hidden(idx, cache).detach()\n"
        "def build(kind):\n"
        "    torch.manual_seed(0)\n"
        "    return kind(GPTConfig(29, 16, 2, 2, 8))\n"
    )
    first = f"{source}:build(GPT)"
    other = f"{source}:build(Detached)"
    words = ("diff", first, other, "--gradients")
    walk = data_of(page_of(folder, *words, status=1))["walk"]
    assert walk["opens"] == 0  # no value differs
    return page_of(folder, "diff", first, f"{source}:build(Again)", status=1)


@pytest.mark.slow
def test_the_page_opens_where_two_models_part(parting):
    walk = data_of(parting)["walk"]
    names = [step["name"] for step in walk["steps"]]
    assert names[-2:] == ["16", "16a"]  # folded under the step
    assert names[walk["opens"]] == "16"
    assert walk["steps"][walk["opens"]]["places"][1] is not None


# --- In a browser -----------------------------------------------------------

# A script that returns names from a side's remark that are not visible in its
# excerpt of code. The first line of an excerpt does not scroll.
UNSEEN = """
const side = document.getElementById(`walk-${arguments[0]}`);
const box = side.querySelector(".walk-source:not([hidden]) .cell");
const [first, ...lines] = [...box.querySelectorAll(".line")]
  .filter(e => e.checkVisibility());
const [top, end] = [first.offsetHeight, box.clientHeight]
  .map(n => n + box.scrollTop);
const seen = [first, ...lines.filter(e => e.offsetTop >= top
  && e.offsetTop < end)].map(e => e.textContent).join("");
// the first of the scrolled lines is whole, and every line of the step seen
const whole = lines.some(e => e.offsetTop === top);
const away = lines.filter(e => e.matches(".lit, .named") &&
  (e.offsetTop < top || e.offsetTop + e.offsetHeight > end));
return [...side.querySelectorAll(".walk-remark code")]
  .map(e => e.textContent).filter(name => !seen.includes(name))
  .concat(whole ? [] : ["a cut line"], away.map(e => e.textContent));
"""


def at(browser):
    return browser.js("return document.getElementById('walk-at').textContent")


def lit(browser, side):
    return browser.js(
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(e => e.checkVisibility()).map(e => e.textContent.trim())",
        f"#walk-{side} .line.lit",
    )


def press(browser, key, times=1):
    from selenium.webdriver.common.keys import Keys

    for _ in range(times):
        ActionChains(browser.driver).send_keys(getattr(Keys, key)).perform()


def test_arrow_keys_and_buttons_go_step_by_step(browser, page):
    browser.open(page)
    assert browser.errors() == []
    assert at(browser).startswith("step 1 of ")
    assert "self.lut(x)" in lit(browser, "left")[0]
    place = browser.one("#walk-left .walk-place").text
    line = "annotated/embedding.py:29 self.lut(x) * math.sqrt(self.d_model)"
    assert place == line
    assert "self.transformer.wte(idx)" in lit(browser, "right")[0]
    browser.look_at(browser.one("#walk-title"))
    browser.one("#walk-title").click()
    press(browser, "ARROW_RIGHT")  # skips a step that only one side has
    assert at(browser).startswith("step 2 of ")
    title = browser.one("#walk-title").text
    assert title == "Look the positions up"
    assert "replaced" in browser.one("#walk-left .walk-remark").text
    assert "self.transformer.wpe(pos)" in lit(browser, "right")[0]
    assert browser.js("return location.hash") == "#step-2"
    browser.look_at(browser.one("#step-1 summary"))
    browser.one("#step-1 summary").click()
    press(browser, "ARROW_LEFT")
    assert at(browser).startswith("step 1a of ")
    assert (
        "equals a result of mingpt_style"
        in browser.one("#walk-right .walk-place").text
    )
    assert lit(browser, "right") == []  # the right side has no such step
    browser.look_at(browser.one("#walk-on"))
    browser.one("#walk-on").click()
    press(browser, "ARROW_LEFT", 5)  # stop at the first step
    assert at(browser).startswith("step 1 of ")
    back = browser.one("#walk-back")
    assert back.get_attribute("aria-disabled") == "true"
    back.click()
    assert browser.driver.switch_to.active_element == back


def test_the_step_where_two_models_part_is_shown(browser, parting):
    browser.open(parting)
    assert at(browser) == "step 16 of 16"
    (line,) = lit(browser, "right")
    assert line.endswith("return x.cos() + again")
    browser.open(parting, at="step-3")
    assert at(browser) == "step 3 of 16"


def test_a_click_goes_to_a_line_in_the_list_or_in_the_source(browser, page):
    browser.open(page)
    item = next(e for e in browser.all(".walk-list li") if "softmax" in e.text)
    browser.look_at(item)
    item.find_element("css selector", "a").click()
    browser.wait_for_focus("#walk-title")
    assert 0 < browser.top("#walk-title") < 200
    assert "scores.softmax(dim=-1)" in lit(browser, "left")[0]
    before = at(browser)
    line = next(
        e
        for e in browser.all("#walk-left .line")
        if e.is_displayed() and "weights @ value" in e.text
    )
    browser.look_at(line)
    line.click()
    assert at(browser) != before
    assert "weights @ value" in lit(browser, "left")[0]
    for name in "6789":  # a click on a call shows the next step
        line = browser.one("#walk-right .walk-source:not([hidden]) .lit")
        browser.look_at(line)
        line.click()
        assert at(browser).startswith(f"step {name} of ")


def test_text_map_and_buttons_are_in_one_view(browser, page):
    tops = []
    for number in range(1, len(KINDS)):  # the last step has bars
        browser.open(page, at=f"step-{number}")
        browser.wait_for_focus("#walk-title")
        bottom = browser.js(
            "return document.querySelector('#walk-left canvas')"
            ".getBoundingClientRect().bottom"
        )
        assert 0 < browser.top("#walk-title") < bottom < 900, number
        tops.append(browser.top("#walk-left canvas"))
        for side in ("left", "right"):
            assert browser.js(UNSEEN, side) == [], number
    assert max(tops[5:9]) - min(tops[5:9]) < 1  # from scores to mixed values
    browser.js("scrollBy({top: 300, behavior: 'instant'})")
    assert 0 <= browser.top(".walk-bar") < 60
    browser.js("document.activeElement.blur()")
    browser.js("scrollTo({top: 0, behavior: 'instant'})")
    press(browser, "ARROW_LEFT")  # the key scrolls to the step
    browser.wait_for_focus("#walk-title")
    assert 0 <= browser.top(".walk-bar") < 60
    tiles = browser.all("#walk-tokens button")
    assert min(tile.size["height"] for tile in tiles) >= 32
    for number in range(1, len(KINDS)):
        browser.open(page, width=390, at=f"step-{number}")
        browser.wait_for_focus("#walk-title")
        for side in ("left", "right"):
            assert browser.js(UNSEEN, side) == [], number
        if number == 7:  # the step in which a line sets the mask to None
            line = browser.one("#walk-right .walk-source:not([hidden]) .named")
            assert "mask, is_causal = None, True" in line.text
    for width in (1280, 1440, 1920):  # no line is cut off at these widths
        browser.open(page, width=width, at="step-7")
        browser.one("#walk-all").click()
        cut = browser.js(
            "return [...document.querySelectorAll('.walk-side .cell')]"
            ".some(e => e.scrollWidth > e.clientWidth)"
        )
        assert not cut, width


def test_a_link_leads_to_its_step(browser, page):
    browser.open(page)
    last = len(KINDS)
    browser.driver.get(f"{page.as_uri()}#step-{last}")
    assert at(browser) == f"step {last} of {last}"
    what = browser.one("#walk .bars").text
    assert what.startswith("After token 5, where the text so far ends")
    # the likeliest tokens, the actual next token if it is not one of them, and
    # the rest
    assert what.count("%") in (21, 22)
    assert what.count("\u2190 in the text") == 1
    assert not browser.one("#walk-left canvas").is_displayed()
    top = browser.js(
        "return document.getElementById('walk').getBoundingClientRect().top"
    )
    assert abs(top) < 400


def test_temperature_and_top_k_reweigh_the_stored_scores(browser, page):
    browser.open(page)
    token = 7
    browser.all("#next .tiles button")[token].click()
    model = load_checkpoint(SMALL_MODEL)
    state = model.to(torch.device("cpu"), torch.float64)
    tokens = load_tokenizer(DEFAULT).encode(default_passage())[: token + 1]
    scores = mingpt_style.from_gpt2(state, model.config).eval()
    scores = scores.log_probs(torch.tensor([tokens]))[0, -1].detach()
    for heat, keep in ((10, 21), (5, 21), (17, 21), (7, 3)):
        browser.js(
            "document.querySelectorAll('#next input').forEach((e, i) => {"
            "e.value = arguments[0][i];"
            "e.dispatchEvent(new Event('input', {bubbles: true}))})",
            [heat, keep],
        )
        weights = scores * 10 / heat
        if keep <= 20:
            weights = weights.topk(keep).values
        expected = weights.softmax(0).sort(descending=True).values
        shares = [
            float(re.search(r"([\d.]+) %", e.text)[1])
            for e in browser.all("#next .bars li")
        ]
        count = min(20, len(expected))
        np.testing.assert_allclose(
            shares[:count], 100 * expected[:count], atol=0.06
        )
        rest = 0 if keep <= 20 else 100 * float(expected[20:].sum())
        assert shares[-1] == pytest.approx(rest, abs=0.06)
        assert sum(shares[keep:20]) == 0


def test_the_values_of_a_layer_lie_on_the_curve_that_ran(browser, page):
    browser.open(page, at="step-14")
    browser.wait_for_focus("#walk-title")
    dots = browser.js(
        "return [...document.querySelectorAll('#walk-lesson circle')].map("
        "e => ['cx', 'cy', 'r'].map(name => Number(e.getAttribute(name))))"
    )
    assert 24 < len(dots) <= 6 * 24
    x, y, _ = torch.tensor(dots, dtype=torch.float64).T
    gelu = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(-y, gelu, atol=1e-6, rtol=0)
    assert sum(r > 0.1 for *_, r in dots) <= 6


def test_a_token_is_followed_through_all_steps(browser, page):
    from selenium.webdriver.support.wait import WebDriverWait

    browser.open(page)
    button = browser.one("#walk-play")
    browser.look_at(button)
    button.click()
    assert button.text == "Pause"
    WebDriverWait(browser.driver, 10).until(
        lambda _: at(browser).startswith("step 3 of ")
    )
    press(browser, "ARROW_RIGHT")  # stepping pauses the walk
    assert button.text == "Play"
    assert at(browser).startswith("step 4 of ")
    browser.js("scrollTo({top: 0, behavior: 'instant'});"
               "document.getElementById('walk-layer').focus()")  # fmt: skip
    browser.driver.switch_to.active_element.send_keys("p")  # no layer
    assert button.text == "Pause"
    assert 0 <= browser.top("#walk-title") < 450
    browser.js("scrollBy({top: 900, behavior: 'instant'})")
    browser.js("document.getElementById('walk-on').click()")
    assert 0 <= browser.top("#walk-title") < 450
    button.click()
    browser.js("document.getElementById('walk-play').click()")
    assert button.text == "Play"


def test_a_cell_s_score_is_worked_out(browser, page):
    from selenium.webdriver.support.select import Select

    model = load_checkpoint(SMALL_MODEL)
    state = model.to(torch.device("cpu"), torch.float64)
    style = annotated.from_gpt2(state, model.config).eval()
    heads = {}
    attention = style.decoder.layers[2].self_attn
    for name, linear in zip("qk", attention.linears, strict=False):
        linear.register_forward_hook(
            lambda *given, name=name: heads.update({name: given[-1][0]})
        )
    tokens = load_tokenizer(DEFAULT).encode(default_passage())[:24]
    style.log_probs(torch.tensor([tokens]))
    q, k = (heads[name].view(24, 4, 32)[:, 1].detach() for name in "qk")
    browser.open(page, at="step-6", width=390)
    for name, value in (("layer", "2"), ("head", "1")):
        Select(browser.one(f"#walk-{name}")).select_by_value(value)
    canvas = browser.one("#walk-left canvas")
    browser.js(
        "const [e, ...at] = arguments, box = e.getBoundingClientRect();"
        "e.dispatchEvent(new MouseEvent('click', {bubbles: true,"
        " clientX: box.left + (at[1] + .5) / 24 * box.width,"
        " clientY: box.top + (at[0] + .5) / 24 * box.height}))",
        canvas, 9, 7,
    )  # fmt: skip
    browser.js("arguments[0].focus()", canvas)
    press(browser, "ARROW_UP")
    for row, column in ((8, 7), (8, 8), (8, 9)):
        said = browser.one("#walk-left .walk-work").text
        terms = re.findall(r"(-?\d\.\d\d)\u00d7\s*(-?\d\.\d\d)", said)
        shown = torch.tensor([[*map(float, two)] for two in terms])
        both = torch.stack([q[row], k[column]], 1)
        torch.testing.assert_close(shown.double(), both, atol=0.0051, rtol=0)
        numbers = re.search(
            r" = (\S+)\nq\u00b7k / \u221a32 = (\S+) / \u221a32 = (\S+)", said
        )
        dot, over, score = map(float, numbers.groups())
        assert dot == over == pytest.approx(float(q[row] @ k[column]), 1e-3)
        assert score == pytest.approx(dot / 32**0.5, 1e-3)
        assert "mask" not in said
        cell = browser.one("#walk-left .walk-cell").text
        assert float(cell.rpartition(" ")[2]) == pytest.approx(score, 0.06)
        press(browser, "ARROW_RIGHT")
    # the cell stays chosen while the next steps mask it and exponentiate it
    press(browser, "ARROW_LEFT")
    for step, words in ((7, "it becomes \u2212\u221e."), (8, "is 0.")):
        browser.js("location.hash = arguments[0]", f"step-{step}")
        browser.wait_for_focus("#walk-title")
        said = browser.one("#walk-left .walk-work").text
        assert "The mask hides this score, as “ate” comes later" in said
        assert said.endswith(words)
        browser.js("arguments[0].focus()", canvas)
        press(browser, "ARROW_LEFT")
        said = browser.one("#walk-left .walk-work").text
        assert "mask" not in said
        taken = re.search(
            r"exp.* = (\S+), divided by (\S+), .* probability (0\S+)\.$", said
        )
        assert bool(taken) == (step == 8)
        if taken:
            weight, total, share = map(float, taken.groups())
            whole = (q[8] @ k[:9].T / 32**0.5).exp().sum()
            assert total == pytest.approx(float(whole), rel=1e-3)
            assert weight / total == pytest.approx(share, rel=5e-3)
        press(browser, "ARROW_RIGHT")
    browser.js("location.hash = 'step-9'")
    browser.wait_for_focus("#walk-title")
    assert browser.one("#walk-left .walk-work").text == ""


def test_layer_and_token_are_chosen(browser, page):
    from selenium.webdriver.support.select import Select

    browser.open(page)
    browser.driver.get(f"{page.as_uri()}#step-10")

    def pixels():
        return browser.js(
            "return document.querySelector('#walk-left canvas').toDataURL()"
        )

    def numbers():
        return browser.one("#walk-left .walk-numbers").text

    def cell(row, column):  # move to the middle of a cell
        canvas = browser.one("#walk-left canvas")
        browser.look_at(canvas)
        size = canvas.size["width"] / 24
        at = ((column + 0.5) * size - canvas.size["width"] / 2,
              (row + 0.5) * size - canvas.size["height"] / 2)  # fmt: skip
        return ActionChains(browser.driver).move_to_element_with_offset(
            canvas, *map(round, at)
        )

    first, said = pixels(), numbers()
    Select(browser.one("#walk-layer")).select_by_value("3")
    assert pixels() != first
    assert "layer 3: " in browser.one("#walk-what").text
    Select(browser.one("#walk-token")).select_by_value("0")
    assert numbers() != said
    canvas = browser.one("#walk-left canvas")
    browser.look_at(canvas)
    canvas.click()  # its middle is between two rows
    chosen = browser.one("#walk-token").get_attribute("value")
    assert chosen in ("11", "12")
    assert numbers().startswith(chosen)
    assert not browser.one("#walk-right figure").is_displayed()  # a shared map
    assert browser.one("#walk-both").is_displayed()
    # choose a token, then a cell, then a head of the probabilities
    browser.driver.get(f"{page.as_uri()}#step-8")
    browser.all("#walk-tokens button")[3].click()
    assert browser.one("#walk-token").get_attribute("value") == "3"
    assert numbers().startswith('3 “"” attends (looks) most to ')
    said = browser.one("#walk-left .walk-cell")
    assert said.text.startswith("Choose a cell, or use the arrow keys")
    cell(6, 5).perform()
    words = r"“·used” attends to “·is”: (0\.\d\d)"
    share = re.fullmatch(words, said.text)[1]
    cell(6, 5).click().perform()
    assert browser.one("#walk-token").get_attribute("value") == "6"
    assert f"“·is” {float(share):.2g}" in numbers()
    cell(0, 0).click().perform()
    # here nothing is masked
    assert numbers() == "0 “The” attends (looks) most to “The” 1"
    cell(0, 6).click().perform()
    assert "may not look at “·used”" in said.text
    press(browser, "ARROW_RIGHT")  # the map has the focus
    assert "may not look at “·to”" in said.text
    assert [e.text for e in browser.all("#walk-left .columns span")][4] == "4"
    first = pixels()
    Select(browser.one("#walk-head")).select_by_value("2")
    assert pixels() != first


def test_the_whole_source_is_one_box_away(browser, page):
    browser.open(page, at="step-7")

    def shown():
        return browser.js(
            "return [...document.querySelectorAll('#walk-left .line')]"
            ".filter(e => e.checkVisibility()).map(e => e.textContent)"
        )

    before = shown()
    assert len(before) == 9
    assert "mask=None, dropout=None):" in before[0]
    browser.one("#walk-all").click()
    assert any("Differs from the original" in line for line in shown())
    assert before[0] not in shown()


def test_a_walk_of_two_models_that_differ_predicts_nothing(browser, tmp_path):
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\n"
        "from gpt_duet.mingpt_style import GPT\n"
        "from gpt_duet.config import GPTConfig\n"
        "def build(act):\n"
        "    torch.manual_seed(0)\n"
        "    return GPT(GPTConfig(1024, 128, 2, 2, 16, activation=act))\n"
    )
    targets = [f"{source}:build('{name}')" for name in ("relu", "gelu")]
    browser.open(page_of(tmp_path, "diff", *targets, status=1))
    browser.wait_for_focus("#walk-title")
    assert browser.one("#walk-title").text == "where they first differ"
    assert browser.all(".bars") == []


@pytest.mark.parametrize("media", ["print", "screen"])
def test_printed_or_without_javascript_it_is_a_list(
    browser, page, tmp_path, media
):
    if media == "screen":
        text = page.read_text(encoding="utf-8")
        page = tmp_path / "still.html"
        page.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    browser.open(page, media=media)
    assert not browser.one("#walk-stage").is_displayed()
    assert not browser.one("#walk .keys").is_displayed()
    assert len(browser.all(".walk-list li")) > 20
    assert browser.all(".walk-list li")[-1].is_displayed()
    height, shown = browser.js(
        "const e = document.querySelector('.walk-list');"
        "return [e.scrollHeight, e.clientHeight]"
    )
    assert height == shown  # nothing is cut off
    if media == "print":
        item = browser.one(".walk-list li")
        assert item.value_of_css_property("break-inside") == "avoid"
