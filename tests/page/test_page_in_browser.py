"""The page of gpt-duet compare --html in a real browser."""

import base64
import itertools
import re

import pytest
from browser import HOSTILE, data_of, hostile_page, make_page, page_of
from selenium.webdriver.support.select import Select

from gpt_duet.benchmark_results import Results, Row, Run
from gpt_duet.comparison.page.render import TEXTS, WALK_TOKENS
from gpt_duet.comparison.text import token_text
from gpt_duet.tokenization.texts import default_passage
from gpt_duet.tokenization.tokenizers import DEFAULT, load_tokenizer

pytestmark = pytest.mark.xdist_group("browser")

CONCEPTS = ["embedding", "attention", "feed_forward", "block", "model", "head"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return hostile_page(tmp_path_factory.mktemp("page"))


def pixels(browser, canvas):
    return browser.js(
        f"return document.getElementById('{canvas}').toDataURL()"
    )


def test_a_page_in_either_theme_has_no_error_no_request_and_contrast(
    browser, page
):
    maps = []
    for dark in (False, True):
        browser.open_by_itself(page, dark=dark)
        back = browser.js(
            "return getComputedStyle(document.body).backgroundColor"
        )
        assert (int(re.findall(r"\d+", back)[0]) < 128) == dark
        maps.append(pixels(browser, "influence-left"))
    assert maps[0] != maps[1]


def test_what_is_smuggled_in_does_not_run(browser, page, tmp_path):
    # Even if the escaping failed, the page's content security policy would
    # block scripts. The test also shows that the console reports errors.
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
    pieces = [
        e.get_attribute("textContent")
        for e in browser.all("#numbers .tokens .piece")
    ]
    spelt = {"\u2028": r"\u2028", "\x07": r"\x07", "\u202e": r"\u202e",
             "\n": r"\n", " ": "\u00b7"}  # fmt: skip
    assert pieces == [spelt.get(c, c) for c in HOSTILE]
    assert browser.js("return document.images.length") == 0
    assert len(browser.all("script")) == 2


@pytest.mark.parametrize("width", [1440, 390])
def test_a_click_in_the_drawing_leads_to_the_concept(browser, page, width):
    browser.open(page, width=width)
    links = browser.all(".drawing a")
    targets = [a.get_dom_attribute("href") for a in links]
    assert sorted(targets) == sorted(2 * [f"#concept-{c}" for c in CONCEPTS])
    for link, target in zip(links, targets, strict=True):
        browser.js("scrollTo(0, 0)")
        title = link.find_element("css selector", ".title")
        browser.look_at(title)
        title.click()
        assert browser.js("return location.hash") == target
        assert browser.one(f"details[open] {target}").is_displayed()
        top = browser.js(
            "return document.querySelector(arguments[0])"
            ".closest('article').getBoundingClientRect().top", target,
        )  # fmt: skip
        assert 0 <= top < 150  # the heading is above the source


def test_the_influence_maps_tell_their_numbers(browser, page):
    browser.open(page)
    browser.one("#influence-right").send_keys("\ue015")
    readout = browser.one("#influence-readout").text
    assert "moves the log-probabilities after 1" in readout


def test_names_that_correspond_light_up_together(browser, page):
    # a link to the section unfolds it
    browser.open(page, at="concept-attention")
    concept = "#concept-attention .code"
    assert browser.all(f"{concept} .lit") == []
    name = browser.one(f"{concept}.left .brief [data-term='heads']")
    browser.look_at(name)
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver).move_to_element(name).perform()
    lit = {e.get_attribute("textContent")
           for e in browser.all(f"{concept} .lit")}  # fmt: skip
    assert lit == {"h", "n_head"}
    button = browser.one("#concept-attention .term-button[data-term^='query']")
    assert "linears[0..2] = c_attn" in button.text
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    kept = {e.text for e in browser.all(f"{concept} .kept")} - {""}
    assert kept == {"linears", "c_attn"}
    button.click()
    assert browser.all(f"{concept} .kept") == []


@pytest.mark.parametrize("width", [320, 390, 768, 1180, 1440, 2200])
def test_nothing_overflows(browser, page, width):
    browser.open(page, width=width)
    browser.unfold()
    wide = browser.js("return document.documentElement.scrollWidth")
    assert wide <= width
    cut = browser.js(
        "return [...document.querySelectorAll('main *')].filter(e => {"
        "const r = e.getBoundingClientRect();"
        "return r.width && (r.right > innerWidth + 1 || r.left < -1)"
        " && !e.closest('.code, .scroll')}).map(e => e.outerHTML).slice(0, 3)"
    )
    assert cut == []
    out = browser.js(  # the texts in the drawing that their boxes cut off
        "return [...document.querySelectorAll('.drawing a > *')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1 ||"
        " e.clientHeight > 1.5 * parseFloat(getComputedStyle(e).lineHeight))"
        ".map(e => e.textContent)"
    )
    assert out == []


@pytest.mark.unhooked  # with --check-shapes, the page shows frames of the hook
def test_columns_on_a_desk_and_stacked_on_a_phone(browser, page):
    places = (
        "return ['left', 'right'].map(side => document.querySelector("
        "`#concept-attention .code.${side}`).getBoundingClientRect())"
        ".map(r => [r.left, r.top])"
    )
    browser.open(page, width=1440)
    browser.unfold()
    left, right = browser.js(places)
    assert right[0] > left[0] + 400
    assert right[1] == left[1]
    cut = browser.js(
        "return [...document.querySelectorAll('.cell.code')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".map(e => e.ariaLabel)"
    )
    assert cut == []
    browser.open(page, width=390)
    browser.unfold()
    left, right = browser.js(places)
    assert right[0] == left[0]
    assert right[1] > left[1]


def test_the_page_is_printed_with_what_is_folded(browser, page):
    browser.open(page, width=1047, media="print")
    assert browser.js("return document.documentElement.scrollWidth") <= 1047
    assert not browser.one("nav").is_displayed()
    shown = "return document.querySelector(arguments[0]).checkVisibility()"
    # in print the source is shown, though on a screen it is folded
    assert browser.js(shown, "#concept-attention .code")
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert 5 < pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/") < 80


def test_links_headings_and_names_for_those_who_listen(browser, page):
    browser.open(page)
    missing = browser.js(
        "return [...document.querySelectorAll('a')]"
        ".map(a => a.getAttribute('href'))"
        ".filter(h => h[0] !== '#' || !document.getElementById(h.slice(1)))"
    )
    assert missing == []
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


def test_the_page_shows_a_third_style(browser, tmp_path):
    page = make_page(tmp_path, "annotated", "third_style")
    text = page.read_text()
    assert "(does not say)" in text
    assert 'class</span> <span class="nc">Heads' in text
    browser.open(page, width=390)
    assert browser.errors() == []
    assert browser.js("return document.documentElement.scrollWidth") <= 390


def test_another_text_is_chosen(browser, tmp_path, monkeypatch):
    page = make_page(tmp_path, walk=True)
    walk = data_of(page)["walk"]
    assert walk["others"].keys() == TEXTS.keys()
    tokenizer = load_tokenizer(DEFAULT)
    browser.open(page, width=390)
    words = browser.js("return document.body.innerText").split()
    assert 1000 < len(words) < 3000
    for name, text in [*TEXTS.items(), (None, default_passage())]:
        other = walk["others"].get(name, walk)
        ids = tokenizer.encode(text)[:WALK_TOKENS]
        tokens = [token_text(tokenizer, id) for id in ids]
        assert other["tokens"] == tokens
        assert [row[-1][0] for row in other["following"]["rows"][:-1]] == (
            ids[1:]
        )
        select = Select(browser.one("#walk-text"))
        select.select_by_visible_text(name or "Python's documentation")
        for tiles in ("#next .tiles", "#walk-tokens"):
            pieces = browser.all(f"{tiles} button .piece")
            assert [e.get_attribute("textContent") for e in pieces] == tokens
        assert browser.one("#walk-token").text.split("\n")[3].strip() == (
            f"3 {tokens[3]}"
        )
        said = browser.one("#next .bars-said").text
        assert "".join(tokens[1:6]) in said
    assert browser.errors() == []
    monkeypatch.setattr("gpt_duet.comparison.page.render.ROOM", 0)
    lone = make_page(tmp_path, walk=True)
    assert data_of(lone)["walk"]["others"] == {}


def test_the_ladders_page(browser, tmp_path):
    text = tmp_path / "text"
    text.write_text(HOSTILE.replace("\u2028", " ") * 20)
    words = (f"--file={text}", "--steps=2", "--eval-batches=1",
             f"--out={tmp_path}/x.png")  # fmt: skip
    page = page_of(tmp_path, "ladder", *words)
    for dark in (False, True):
        browser.open_by_itself(page, width=390, dark=dark)
        wide = browser.js("return document.documentElement.scrollWidth")
        assert wide <= 390
    assert len(browser.all("svg")) == 8
    assert len(browser.all("script")) == 2


def test_a_benchmark_is_drawn(browser, tmp_path):
    rows = [
        Row("annotated", [2e-3, 1e-3, 3e-3], tokens=16),
        Row("<b>x", [4e-3] * 3, tokens=16),
        Row("matmul", [9.0] * 3, limit=True),
    ]
    setting = {"preset": "gpt-nano", "batch": 2, "time": 8}
    file = tmp_path / "bench.json"
    Results({}, [Run("forward", setting, rows)]).save(file)
    browser.open(make_page(tmp_path, "--bench", file))
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
