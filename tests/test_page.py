"""gpt-duet compare --html: the page in a real browser, and what is in it."""

import base64
import itertools
import json
import re
import sys
import time
from html import unescape

import numpy as np
import pytest
import third_style
import torch
from browser import FAINT, Browser

import annotated
import mingpt_style
from shared import GPTConfig
from shared.cli import main
from shared.comparison.attention_maps import attention_maps
from shared.comparison.costs import count_flops, difference_by_concept
from shared.comparison.page.bench import read_bench
from shared.comparison.page.highlight import highlight, spans
from shared.comparison.page.numbers import BUDGET, attention_data, sizes
from shared.comparison.sources import read_part, whole
from shared.comparison.styles import enlarged_random_weights
from shared.comparison.weight_transfer import measure_weight_transfer

HOSTILE = (
    "</script><img src=x onerror=alert(1)>\n<script>alert(2)</script>"
    "\u2028{{ 7 * 7 }} &amp; '\"`\x07\u202e</pre></title><!--"
)
SMALL = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16"]
CONCEPTS = ["embedding", "attention", "feed_forward", "block", "model", "head"]
MAPS = ["map-left", "map-right", "map-difference"]


def command(*arguments):
    """Run gpt-duet in this process and return its status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpt-duet", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
    return exit_.value.code or 0


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page about a hostile text."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert command(
        "compare", "--text", HOSTILE, "--tokenizer", "char",
        "--block-size", 128, *SMALL, "--html", path,
    ) == 0  # fmt: skip
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.driver.quit()


def data_of(path):
    text = path.read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def pixels(browser, canvas):
    return browser.js(
        f"return document.getElementById('{canvas}').toDataURL()"
    )


# In the browser


@pytest.mark.parametrize("dark", [False, True])
def test_no_error_and_no_request(browser, page, dark):
    browser.open(page, dark=dark)
    assert browser.errors() == []
    requests = browser.requests()
    assert page.as_uri() in requests
    assert [r for r in requests if not r.startswith(("file:", "data:"))] == []
    assert [r for r in requests if r.startswith("file:")] == [page.as_uri()]


def test_what_is_smuggled_in_does_not_run(browser, page, tmp_path):
    # were the escaping to fail, the page's own policy would still hold;
    # and the console is shown to speak up
    tampered = tmp_path / "tampered.html"
    smuggled = (
        "<main><img src=x onerror='window.smuggled=1'>"
        "<script>window.smuggled=2</script>"
        "<script src='file:///other.js'></script>"
    )
    text = page.read_text(encoding="utf-8")
    tampered.write_text(text.replace("<main", smuggled + "<main", 1))
    browser.open(tampered)
    assert browser.js("return window.smuggled") is None
    assert len(browser.errors()) >= 3


def test_a_hostile_text_is_text(browser, page):
    browser.open(page)
    shown = browser.js("return document.getElementById('excerpt').textContent")
    spelt = HOSTILE.replace("\u2028", r"\u2028").replace("\x07", r"\x07")
    assert shown == spelt.replace("\u202e", r"\u202e")
    assert browser.js("return document.images.length") == 0
    assert len(browser.all("script")) == 2
    pieces = [
        e.get_attribute("textContent") for e in browser.all(".tokens .piece")
    ]
    assert pieces[:9] == list("</script>")
    assert "49" not in shown


def test_a_hostile_file_name_is_text(browser, tmp_path):
    name = "<img src=x onerror=alert(1)>&quot;\n\udcff.txt"
    (tmp_path / name).write_text("fine text")
    path = tmp_path / "page.html"
    assert command("compare", "--file", tmp_path / name, *SMALL,
                   "--html", path) == 0  # fmt: skip
    browser.open(path)
    facts = browser.one(".facts").text
    assert r"<img src=x onerror=alert(1)>&quot;\n\udcff.txt" in facts
    assert browser.errors() == []


@pytest.mark.parametrize("width", [1440, 390])
def test_a_click_in_the_drawing_leads_to_the_concept(browser, page, width):
    browser.open(page, width=width)
    browser.js("document.documentElement.style.scrollBehavior = 'auto'")
    links = [a for a in browser.all(".drawing a") if a.is_displayed()]
    targets = [
        browser.js("return arguments[0].href.baseVal", a) for a in links
    ]
    assert sorted(set(targets)) == sorted(f"#concept-{c}" for c in CONCEPTS)
    assert len(targets) == 2 * len(CONCEPTS)
    for link, target in zip(links, targets, strict=True):
        browser.js("scrollTo(0, 0)")
        rect = link.find_element("css selector", "text.title")
        browser.js("arguments[0].scrollIntoView({block: 'center'})", rect)
        rect.click()
        assert browser.js("return location.hash") == target
        top = browser.js(
            "return document.querySelector(arguments[0])"
            ".getBoundingClientRect().top", target,
        )  # fmt: skip
        assert 0 <= top < 200


def test_every_link_leads_somewhere(browser, page):
    browser.open(page)
    missing = browser.js(
        "return [...document.querySelectorAll('a')]"
        ".map(a => a.href.baseVal ?? a.getAttribute('href'))"
        ".filter(h => h[0] !== '#' || !document.getElementById(h.slice(1)))"
    )
    assert missing == []


def test_layer_and_head_change_the_maps(browser, page):
    browser.open(page)
    seen = []
    for layer in ("0", "1"):
        for head in ("0", "1"):
            browser.one("#layer").send_keys(layer)
            browser.one("#head").send_keys(head)
            assert browser.one("#layer").get_attribute("value") == layer
            seen.append(tuple(pixels(browser, m) for m in MAPS))
            label = browser.one("#map-left").get_attribute("aria-label")
            assert f"layer {layer}, head {head}" in label
            assert "largest difference" in browser.one("#largest").text
    for side in (0, 1):
        assert len({maps[side] for maps in seen}) == 4


def test_the_maps_show_the_numbers(browser, page):
    browser.open(page)
    data = data_of(page)["attention"]
    T = data["time"]
    left = np.frombuffer(base64.b64decode(data["left"]), "<u2") / 65535
    rgb = browser.js(
        "const c = document.getElementById('map-left');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data]"
    )
    red = np.array(rgb).reshape(T, T, 4)[..., 0]
    share = np.sqrt(left[: T * T].reshape(T, T))
    low, full = 255, 154
    assert np.abs(red - (low + (full - low) * share)).max() <= 1
    assert (red[np.triu_indices(T, 1)] == low).all()


def test_a_cell_tells_its_numbers(browser, page):
    browser.open(page)
    canvas = browser.one("#map-left")
    canvas.send_keys("\ue015\ue015\ue014")  # down, down, right
    told = browser.one("#map-readout").text
    assert told.startswith("2 \u201cs\u201d looks at 1 \u201c/\u201d: 0.")
    assert "in annotated" in told
    assert "in mingpt_style" in told
    browser.one("#influence-right").send_keys("\ue015")
    told = browser.one("#influence-readout").text
    assert "moves the prediction after 1" in told


def test_names_that_correspond_light_up_together(browser, page):
    browser.open(page)
    browser.js("document.documentElement.style.scrollBehavior = 'auto'")
    lit = "#concept-attention .code .lit"
    assert browser.all(lit) == []
    name = browser.one("#concept-attention .code.left [data-term='heads']")
    browser.js("arguments[0].scrollIntoView({block: 'center'})", name)
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver).move_to_element(name).perform()
    assert {e.text for e in browser.all(lit)} == {"h", "n_head"}
    button = browser.one("#concept-attention .term-button[data-term^='query']")
    assert "linears[0..2] = c_attn" in button.text
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    kept = {e.text for e in browser.all("#concept-attention .code .kept")}
    assert kept == {"linears", "c_attn"}
    button.click()
    assert browser.all("#concept-attention .code .kept") == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1180, 1440, 2200])
def test_nothing_overflows(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    wide = browser.js("return document.documentElement.scrollWidth")
    assert wide <= width
    cut = browser.js(
        "return [...document.querySelectorAll('main *')].filter(e => {"
        "const r = e.getBoundingClientRect();"
        "return r.width && (r.right > innerWidth + 1 || r.left < -1)"
        " && !e.closest('.code, .scroll')}).map(e => e.outerHTML).slice(0, 3)"
    )
    assert cut == []


@pytest.mark.parametrize("width", [390, 1440])
def test_texts_stay_in_their_boxes(browser, page, width):
    browser.open(page, width=width)
    out = browser.js(
        "return [...document.querySelectorAll('.drawing a')].flatMap(a => {"
        "const box = a.querySelector('rect').getBoundingClientRect();"
        "return [...a.querySelectorAll('text')].filter(t => {"
        "const r = t.getBoundingClientRect(); return r.width &&"
        "(r.left < box.left || r.right > box.right || r.bottom > box.bottom)"
        "}).map(t => t.textContent)})"
    )
    assert out == []


def test_columns_on_a_desk_and_stacked_on_a_phone(browser, page):
    places = (
        "return ['left', 'right'].map(side => document.querySelector("
        "`#concept-attention .code.${side}`).getBoundingClientRect())"
        ".map(r => [r.left, r.top])"
    )
    browser.open(page, width=1440)
    left, right = browser.js(places)
    assert right[0] > left[0] + 400
    assert right[1] == left[1]
    browser.open(page, width=390)
    left, right = browser.js(places)
    assert right[0] == left[0]
    assert right[1] > left[1]


def test_the_code_fits_its_column_on_a_desk(browser, page):
    browser.open(page, width=1440)
    cut = browser.js(
        "return [...document.querySelectorAll('.cell.code')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".map(e => e.ariaLabel)"
    )
    assert cut == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_contrast(browser, page, dark):
    browser.open(page, dark=dark)
    assert browser.js(FAINT) == []
    back = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", back)[0]) < 128) == dark


def test_the_maps_follow_the_theme(browser, page):
    browser.open(page)
    light = pixels(browser, "map-left")
    browser.open(page, dark=True)
    assert pixels(browser, "map-left") != light


def test_it_prints(browser, page):
    browser.open(page, width=1047, media="print")
    assert browser.js("return document.documentElement.scrollWidth") <= 1047
    assert not browser.one("nav").is_displayed()
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert 5 < pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/") < 80


def test_headings_and_names_for_those_who_listen(browser, page):
    browser.open(page)
    levels = browser.js(
        "return [...document.querySelectorAll('h1,h2,h3,h4')]"
        ".map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    nameless = browser.js(
        "return [...document.querySelectorAll("
        "'canvas, [role=region], svg[role], button, select, nav')]"
        ".filter(e => !(e.ariaLabel || e.textContent.trim()"
        " || e.closest('label'))).length"
    )
    assert nameless == 0
    assert browser.js("return document.documentElement.lang") == "en"


# What is in it


def test_it_is_valid_html(page):
    html5lib = pytest.importorskip("html5lib")
    with page.open("rb") as file:
        html5lib.HTMLParser(strict=True).parse(file)
    with pytest.raises(html5lib.html5parser.ParseError):
        html5lib.HTMLParser(strict=True).parse("<!doctype html><p></b>")


def test_it_is_one_small_file(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 2_000_000
    outside = re.findall(r'(?:src|href|action|data)="(?!#|data:)[^"]*', text)
    assert outside == []
    assert "@import" not in text
    assert "url(" not in text


def test_every_section_is_filled(page):
    text = page.read_text(encoding="utf-8")
    for words in (
        "<strong>One function</strong>",
        f"PyTorch {torch.__version__}",
        "2 layers, 2 heads, 16 wide",
        "d_model = n_embd",
        "h = n_head",
        "N = n_layer",
        "linears[0..2] = c_attn",
        "a_2 = weight * sqrt(n / (n - 1))",
        "exactly 0 above the diagonal",
        "Not measured here",
    ):
        assert words in text, words
    assert 'class="apart far"' not in text
    for concept in CONCEPTS:
        assert f'id="concept-{concept}"' in text
        assert f'href="#concept-{concept}"' in text


def test_all_of_the_source_is_there(page):
    html5lib = pytest.importorskip("html5lib")
    tree = html5lib.parse(page.read_text(), namespaceHTMLElements=False)
    lines = {
        "".join(e.itertext()).rstrip("\n")
        for e in tree.iterfind(".//span[@class='line']")
    }
    for style in (annotated, mingpt_style):
        for components in style.COMPONENTS.values():
            for component in components:
                part = read_part(component)
                first = part.segments[0].line
                code = whole(part).split("\n")
                for number, line in enumerate(code, start=first):
                    if line:
                        assert f"{number}{line}" in lines


def test_the_maps_are_the_models_own(tmp_path):
    path = tmp_path / "page.html"
    found = tmp_path / "found.json"
    command("compare", "--text", "so it goes", "--tokenizer", "bytes", *SMALL,
            "--seed", 7, "--html", path, "--json", found)  # fmt: skip
    config = GPTConfig(**json.loads(found.read_text())["config"])
    state = enlarged_random_weights(mingpt_style, config, 7)
    model = annotated.from_gpt2(state, config).eval()
    for layer in model.decoder.layers:
        layer.self_attn.keep_attn = True
    model.log_probs(torch.tensor([list(b"so it goes")]))
    data = data_of(path)["attention"]
    shape = (config.n_layer, config.n_head, data["time"], data["time"])
    for side in ("left", "right"):
        codes = np.frombuffer(base64.b64decode(data[side]), "<u2")
        shown = codes.reshape(shape) / 65535
        for i, layer in enumerate(model.decoder.layers):
            own = layer.self_attn.attn[0].numpy()
            assert np.abs(shown[i] - own).max() < 1e-5


def test_two_functions_are_told_apart(tmp_path, monkeypatch):
    whole = annotated.from_gpt2

    def wrong(state, config, **parts):
        name = "h.1.attn.c_attn.weight"
        return whole(dict(state) | {name: 1.1 * state[name]}, config, **parts)

    # one layer only, as in the rows about weights, must not matter
    def wrong_where_there(state, config, **parts):
        there = "h.1.attn.c_attn.weight" in state
        return (wrong if there else whole)(state, config, **parts)

    monkeypatch.setattr(annotated, "from_gpt2", wrong_where_there)
    path = tmp_path / "page.html"
    assert command("compare", "--text", "abc def", *SMALL, "--html", path) == 1
    text = path.read_text()
    assert "<strong>Two functions</strong>" in text
    assert 'class="apart far"' in text
    assert "In one function they would coincide." in text
    largest = np.array(data_of(path)["attention"]["largest"])
    assert largest[0].max() < 1e-6
    assert largest[1].min() > 1e-6


@pytest.fixture
def third(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, **how):
        return third_style.write(tmp_path, name, **how)

    return write


def test_a_third_style(browser, third, tmp_path):
    name = third("third_on_page")
    path = tmp_path / "page.html"
    assert command("compare", "annotated", name, *SMALL, "--html", path) == 0
    text = path.read_text()
    assert "(does not say)" in text
    assert 'class</span> <span class="nc">Heads' in text
    largest = np.array(data_of(path)["attention"]["largest"])
    assert largest.max() < 1e-6
    browser.open(path, width=390)
    assert browser.errors() == []
    assert browser.js("return document.documentElement.scrollWidth") <= 390


def test_a_style_whose_attention_cannot_be_watched(browser, third, tmp_path):
    name = third("third_by_hand", by_hand=True)
    path = tmp_path / "page.html"
    assert (
        command("compare", name, "mingpt_style", *SMALL, "--html", path) == 0
    )
    browser.open(path)
    assert browser.errors() == []
    assert "could not be watched" in browser.one("#no-maps").text
    assert browser.all("#map-left") == []


def test_a_style_that_sees_the_future_is_caught(third, tmp_path):
    name = third("third_leaks", causal=False)
    path = tmp_path / "page.html"
    assert command("compare", "annotated", name, *SMALL, "--html", path) == 1
    assert path.read_text().count("sees the future: up to") == 1
    assert data_of(path)["influence"]["early"][0] == 0
    assert data_of(path)["influence"]["early"][1] > 1e-4


def test_float64_and_a_bound_of_1e_12(tmp_path):
    path = tmp_path / "page.html"
    assert command("compare", "--text", "abc", *SMALL, "--dtype", "float64",
                   "--html", path) == 0  # fmt: skip
    assert "rounding in float64 explains up to 1.0e-12" in path.read_text()


@pytest.mark.slow
def test_a_long_text_and_many_heads_stay_small(tmp_path):
    path = tmp_path / "page.html"
    assert command("compare", "--n-layer", 12, "--n-head", 12, "--n-embd", 24,
                   "--block-size", 512, "--html", path) == 0  # fmt: skip
    assert path.stat().st_size < 2_000_000
    data = data_of(path)["attention"]
    assert (data["layers"], data["heads"]) == (12, 12)
    assert 16 <= data["time"] < 64
    assert f"on the first {data['time']} tokens" in path.read_text()


def test_very_many_heads_show_the_first_layers():
    config = GPTConfig(20, 16, n_layer=80, n_head=32, n_embd=32)
    model = mingpt_style.build_model(config)
    tokens = torch.arange(16)[None]
    data = attention_data((mingpt_style,) * 2, (model, model), tokens)
    assert 1 <= data["layers"] < 80
    cells = data["layers"] * 32 * data["time"] ** 2
    assert 5 * cells * 4 / 3 <= BUDGET


@pytest.mark.slow
def test_the_default_is_made_in_time(tmp_path):
    path = tmp_path / "page.html"
    start = time.process_time()
    assert command("compare", "--html", path) == 0
    assert time.process_time() - start < 40  # 20 s on each of 2 cores


# Its parts


def small_models(dtype=torch.float64):
    config = GPTConfig(20, 16, n_layer=3, n_head=2, n_embd=8, n_inner=20)
    state = enlarged_random_weights(mingpt_style, config, 1)
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    models = [s.from_gpt2(state, config) for s in (annotated, mingpt_style)]
    return config, state, models


def test_watching_leaves_the_model_as_it_was():
    _, _, models = small_models()
    tokens = torch.arange(12)[None]
    for style, model in zip((annotated, mingpt_style), models, strict=True):
        model.train()
        before = model.state_dict()
        maps = attention_maps(model, style.STAGES, tokens)
        assert maps.shape == (3, 2, 12, 12)
        assert torch.allclose(maps.sum(-1), torch.ones(()).double())
        assert model.training
        assert all(not m._forward_hooks for m in model.modules())
        assert all(not m._forward_pre_hooks for m in model.modules())
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_both_maps_agree_to_rounding():
    _, _, models = small_models()
    tokens = torch.arange(12)[None]
    left, right = (
        attention_maps(m, s.STAGES, tokens)
        for s, m in zip((annotated, mingpt_style), models, strict=True)
    )
    assert (left - right).abs().max() < 1e-14
    assert (left.triu(1) == 0).all()


def test_flops_are_the_formulas():
    config, _, models = small_models()
    T, C, V, inner = 12, config.n_embd, config.vocab_size, config.n_inner
    tokens = torch.arange(T)[None]
    attention = 3 * (8 * T * C * C + 4 * T * T * C)
    feed_forward = 3 * 4 * T * C * inner
    for style, model in zip((annotated, mingpt_style), models, strict=True):
        assert count_flops(model, style.STAGES, tokens) == {
            "embedding": 0,
            "attention": attention,
            "feed_forward": feed_forward,
            "block": attention + feed_forward,
            "model": attention + feed_forward + 2 * T * C * V,
            "head": 2 * T * C * V,
        }


def test_differences_are_the_largest_of_all_layers():
    found = difference_by_concept(
        {"block.0": 1.0, "block.10": 3.0, "block.1.attention": 9.0},
        {"block": "block.{i}", "head": "log_probs"},
    )
    assert found == {"block": 3.0}
    nan = {"block.0": 1.0, "block.1": float("nan"), "block.2": 0.5}
    found = difference_by_concept(nan, {"block": "block.{i}"})
    assert found["block"] != found["block"]


ROWS = ["token table", "position table", "projections", "norm", "head"]
ROWS += ["tied head", "activation"]


def carries():
    config, state, _ = small_models()
    tokens = torch.arange(12)[None]
    styles = (annotated, mingpt_style)
    return {
        row.name: row
        for row in measure_weight_transfer(styles, state, config, tokens)
    }


def test_every_row_is_absorbed_to_rounding():
    rows = carries()
    assert list(rows) == ROWS
    for name, row in rows.items():
        assert all(row.written), name
        if row.absorbed:
            assert row.error < 1e-13, name
        else:
            assert name == "activation"
            assert row.error > 1e-4


@pytest.mark.parametrize(
    ("tensor", "row"),
    [
        ("wte.weight", "token table"),
        ("wpe.weight", "position table"),
        ("h.0.attn.c_attn.weight", "projections"),
        ("ln_f.weight", "norm"),
        ("lm_head.weight", "head"),
    ],
)
def test_a_slip_shows_in_its_own_row(monkeypatch, tensor, row):
    whole = annotated.from_gpt2

    def wrong(state, config, **parts):
        if tensor in state:
            state = dict(state) | {tensor: 1.01 * state[tensor]}
        return whole(state, config, **parts)

    monkeypatch.setattr(annotated, "from_gpt2", wrong)
    rows = carries()
    assert rows[row].error > 1e-5
    for name in ("token table", "position table"):
        if name != row:
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


# A benchmark's file


def write_bench(path, **changes):
    def row(name, *seconds, limit=False):
        return {
            "name": name,
            "seconds": list(seconds),
            "limit": limit,
            "tokens": None if limit else 16,
        }

    run = {
        "what": "forward",
        "setting": {"preset": "gpt-nano", "batch": 2, "time": 8},
        "rows": [
            row("annotated", 2e-3, 1e-3, 3e-3),
            row("<b>x", 4e-3),
            row("matmul", 9.0, limit=True),
        ],
    }
    path.write_text(json.dumps({"version": 1, "runs": [run | changes]}))
    return path


def test_a_benchmark_is_drawn(browser, tmp_path):
    bench = write_bench(tmp_path / "bench.json")
    path = tmp_path / "page.html"
    assert command("compare", *SMALL, "--html", path, "--bench", bench) == 0
    browser.open(path)
    assert browser.errors() == []
    text = browser.one("#speed").text
    assert "preset gpt-nano, batch 2, time 8" in text
    assert "2 ms" in text
    assert "8,000" in text  # 16 tokens in 2 ms
    assert "<b>x" in text
    widths = browser.js(
        "return [...document.querySelectorAll('.bench rect')]"
        ".map(r => r.getBoundingClientRect().width)"
    )
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)


def test_what_the_benchmark_writes_can_be_read(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from benchmarks.app import app

    path = tmp_path / "bench.json"
    done = CliRunner().invoke(
        app,
        ["forward", "--preset", "gpt-nano", "--batch", "1", "--time", "4",
         "--rounds", "2", "--peers", "none", "--json", str(path)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    bench = read_bench(path)
    assert [bar.name for bar in bench.bars] == ["annotated", "mingpt_style"]
    assert all(bar.first <= bar.median <= bar.third for bar in bench.bars)
    assert all(bar.speed == 4 / bar.median for bar in bench.bars)


def one_row(seconds):
    row = f'{{"name": "a", "seconds": {seconds}, "limit": false, "tokens": 1}}'
    return f'{{"runs": [{{"what": "x", "setting": {{}}, "rows": [{row}]}}]}}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[1]", "is no benchmark: it has no rows of times"),
        ("{}", "is no benchmark: it has no rows of times"),
        ('{"runs": []}', "is no benchmark"),
        ('{"runs": [{}]}', "is no benchmark"),
        ('{"runs": [{"rows": [], "setting": {}}]}', "is no benchmark"),
        (one_row("[]"), "seconds of 'a'"),
        (one_row("[0]"), "seconds of 'a'"),
        (one_row("[NaN]"), "seconds of 'a'"),
        (one_row('["1"]'), "seconds of 'a'"),
        (one_row("[true]"), "seconds of 'a'"),
        (one_row("3"), "seconds of 'a'"),
    ],
)
def test_a_file_that_is_no_benchmark(tmp_path, capsys, content, words):
    bench = tmp_path / "bench.json"
    if content is not None:
        bench.write_text(content)
    path = tmp_path / "page.html"
    status = command("compare", *SMALL, "--html", path, "--bench", bench)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
    assert not path.exists()


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "no/such/page.html"], ["no folder", "no/such"]),
        (["--html", "."], ["is a folder"]),
        (["--html", "/dev/null"], ["/dev/null", "no ordinary file"]),
        (["--html", "/proc/page.html"], ["cannot write /proc/page.html"]),
        (["--bench", "b.json"], ["--bench", "--html"]),
        (["--html", "x", "--json", "./x"], ["--json and --html", "one file"]),
        (["--file", "old.txt", "--html", "old.txt"], ["--file and --html"]),
        (["annotated", "nowhere", "--html", "x"], ["no style 'nowhere'"]),
    ],
)
def test_a_mistake_ends_in_one_line_and_nothing_is_lost(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.txt").write_text("kept")
    status = command("compare", *SMALL, *arguments)
    _, err = capsys.readouterr()
    assert status == 2
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert [p.name for p in tmp_path.iterdir()] == ["old.txt"]
    assert (tmp_path / "old.txt").read_text() == "kept"


def test_an_old_page_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    assert command("compare", "--text", "abc", *SMALL, "--html", path) == 0
    assert path.read_text().endswith("</html>\n")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_an_old_page_stays_where_the_new_one_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr("os.replace", full)
    assert command("compare", "--text", "abc", *SMALL, "--html", path) == 2
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
