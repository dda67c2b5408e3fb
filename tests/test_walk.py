"""The walk through a forward pass: what is in the page, and in a browser."""

import base64
import re

import html5lib
import numpy as np
import pytest
import torch
from browser import HOSTILE, data_of, page_of

from shared.comparison.page.value_maps import ValueMaps, as_table

pytestmark = [
    pytest.mark.unhooked,  # as for every diff by value
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The walk of both styles on the small model."""
    folder = tmp_path_factory.mktemp("walk")
    return page_of(folder, "diff", "annotated", "mingpt_style")


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
    assert "one function: " in text
    assert "layers 1 to 3 as layer 0" in text


def test_equal_values_are_one_map(page):
    walk = data_of(page)["walk"]
    pairs = [m for s in walk["steps"] for m in s["maps"] if None not in m]
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
    left, right = maps.numbers(value.view(1, 3, 3), value.mT.unsqueeze(0))
    assert left == right  # the right is laid out as the left
    data = np.frombuffer(base64.b64decode(maps.found[left]), np.uint8)
    assert data[:9].tolist() == [128, 192, 1, 0, 160, 255, 192, 192, 192]
    numbers = data[9:].view("<f4").reshape(3, 3)
    np.testing.assert_allclose(numbers, value.numpy(), rtol=1e-4)
    assert maps.numbers(None, None) == [None, None]


@pytest.mark.parametrize(
    ("shape", "table", "heads"),
    [
        ((1, 5, 8), (5, 8), 1),
        ((5, 8), (5, 8), 1),
        ((1, 5, 5), (5, 5), 1),
        ((1, 2, 5, 5), (5, 10), 2),
        ((1, 2, 5, 4), (5, 8), 2),
        ((2, 5, 4), (5, 4), 1),  # two rows: the first
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
        "from mingpt_style import GPT\n"
        "from shared.config import GPTConfig\n"
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
    assert "they part at mingpt_style/feed_forward.py:" in text
    assert "<h3>where they part</h3>" in text
    last = data_of(page)["walk"]["steps"][-1]
    assert last["layers"] == []
    assert None not in last["maps"][0]


# --- In a browser -----------------------------------------------------------


def at(browser):
    return browser.js("return document.getElementById('walk-at').textContent")


def lit(browser, side):
    return browser.js(
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(e => e.checkVisibility()).map(e => e.textContent.trim())",
        f"#walk-{side} .line.lit",
    )


def press(browser, key, times=1):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    for _ in range(times):
        ActionChains(browser.driver).send_keys(getattr(Keys, key)).perform()


def test_arrow_keys_and_buttons_go_step_by_step(browser, page):
    browser.open(page)
    assert browser.errors() == []
    assert at(browser).startswith("step 1 of ")
    assert "self.lut(x)" in lit(browser, "left")[0]
    place = browser.one("#walk-left .walk-place").text
    assert place == "annotated/embedding.py:29 self.lut(x)"
    assert "times mingpt_style" in browser.one("#walk-right .walk-place").text
    assert lit(browser, "right") == []  # a step of the left alone
    press(browser, "ARROW_RIGHT")
    assert at(browser).startswith("step 2 of ")
    assert "self.transformer.wte(idx)" in lit(browser, "right")[0]
    assert browser.js("return location.hash") == "#step-2"
    browser.one("#walk-on").click()
    press(browser, "ARROW_LEFT", 5)  # not beyond the first
    assert at(browser).startswith("step 1 of ")
    assert browser.one("#walk-back").get_attribute("disabled")


def test_a_click_goes_to_a_line_in_the_list_or_in_the_source(browser, page):
    browser.open(page)
    item = next(e for e in browser.all(".walk-list li") if "softmax" in e.text)
    browser.look_at(item)
    item.find_element("css selector", "a").click()
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


def test_a_link_leads_to_its_step(browser, page):
    browser.open(page)
    last = len(data_of(page)["walk"]["steps"])
    browser.driver.get(f"{page.as_uri()}#step-{last}")
    assert at(browser) == f"step {last} of {last}"
    what = browser.js("return document.getElementById('walk-what').innerText")
    assert "Likeliest next: " in what
    assert what.count("%") == 3  # the same ones on both sides
    top = browser.js(
        "return document.getElementById('walk').getBoundingClientRect().top"
    )
    assert abs(top) < 400


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

    first, said = pixels(), numbers()
    Select(browser.one("#walk-layer")).select_by_value("3")
    assert pixels() != first
    assert "layer 3: " in browser.one("#walk-what").text
    Select(browser.one("#walk-token")).select_by_value("0")
    assert numbers() != said
    canvas = browser.one("#walk-right canvas")
    browser.look_at(canvas)
    canvas.click()  # in the middle, between two rows
    chosen = browser.one("#walk-token").get_attribute("value")
    assert chosen in ("11", "12")
    assert numbers().startswith(chosen)
    assert numbers() == browser.one("#walk-right .walk-numbers").text


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
    assert len(browser.all(".walk-list li")) > 20
    assert browser.all(".walk-list li")[-1].is_displayed()
    height, shown = browser.js(
        "const e = document.querySelector('.walk-list');"
        "return [e.scrollHeight, e.clientHeight]"
    )
    assert height == shown  # nothing is hidden
