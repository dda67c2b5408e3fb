"""gpt-duet compare --serve in a real browser, from its start to Ctrl-C."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from browser import FAINT

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.xdist_group("browser"),
]


@dataclass
class Address:
    """The address of a server, which Browser opens as if it were a file."""

    url: str

    def as_uri(self):
        return self.url


@pytest.fixture(scope="module")
def command():
    """Start the command, which serves the small model on a free port."""
    words = ["-m", "gpt_duet", "compare", "--serve", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in process.stdout:
            if found := re.match(r"live page: (\S+) \(Ctrl-C", line):
                process.address = Address(found[1])
                break
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(browser, script):
    browser.wait_until(f"return {script}")


def said(browser, words):
    script = "document.getElementById('live-said').textContent.includes('{}')"
    wait_for(browser, script.format(words))


def tiles(browser):
    script = "return [...document.querySelectorAll('#live-tokens .piece')]"
    return browser.js(f"{script}.map(e => e.textContent)")


def bars(browser):
    script = "return [...document.querySelectorAll('#live-bars li')]"
    return browser.js(f"{script}.map(e => e.textContent)")


def red_cells(browser, canvas):
    """Return how many pixels of a map have the colour of a leak."""
    return browser.js(
        "const c = document.getElementById(arguments[0]);"
        "const {data} = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height);"
        "let n = 0; for (let i = 0; i < data.length; i += 4)"
        " n += data[i] > 200 && data[i + 1] < 150"
        " && data[i + 1] < data[i + 2];"
        "return n", canvas,
    )  # fmt: skip


def click(browser, element):
    browser.look_at(element)
    element.click()


def choose(browser, part):
    click(browser, browser.one(f"[name=part][value='{part}']"))


def verdict(browser, side, status):
    wait_for(
        browser,
        f"document.querySelector('#live-verdict-{side}.{status} strong')"
        f"?.textContent === '{status}:'",
    )
    # textContent includes the rest of the result, which is folded
    return browser.one(f"#live-verdict-{side}").get_property("textContent")


@pytest.mark.parametrize("width", [1440, 390])
def test_a_reader_types_steps_writes_breaks_and_mends(browser, command, width):
    browser.open(command.address, width=width)
    said(browser, "both styles ran them")
    field = browser.one("#live-text")
    field.clear()
    field.send_keys("The list is <b>sorted</b>")
    wait_for(browser, "document.querySelectorAll('#live-tokens li').length"
             " === 13")  # fmt: skip
    said(browser, "13 of at most 64 tokens")
    assert "".join(tiles(browser)) == "The·list·is·<b>sorted</b>"
    first = bars(browser)
    assert len(first) == 8

    # a step of the walk has the tokens of this text, and shows a cell's value
    idle(browser)  # answers that arrive move what is below them
    click(browser, browser.one("#walk-on"))
    assert browser.one("#walk-at").text == "step 2 of 19"
    assert "1\u00d713\u00d7128" in browser.one("#walk-what").text
    click(browser, browser.one("#walk-left canvas"))
    assert re.match(r"number \d+ of .*: -?\d",
                    browser.one("#walk-left .walk-cell").text)  # fmt: skip

    # let the page write ten tokens, then write on, and stop it
    for count in range(14, 17):
        click(browser, browser.one("#live-one"))
        said(browser, f"{count} of at most 64 tokens; both styles ran")
    click(browser, browser.one("#live-write"))
    wait_for(browser, "document.querySelectorAll('#live-tokens li').length"
             " >= 23")  # fmt: skip
    click(browser, browser.one("#live-write"))
    said(browser, "both styles ran them")
    written = tiles(browser)
    assert 23 <= len(written) < 64
    assert "".join(written[:13]) == "The·list·is·<b>sorted</b>"
    assert browser.one("#walk-token").get_attribute("value") == str(
        len(written) - 1
    )

    # take the mask out, and put it back
    idle(browser)  # afterwards, the maps of the text are drawn
    assert browser.js(
        "return document.getElementById('live-map-left').width"
    ) == min(len(written), 32)
    assert browser.all(".live-maps .bad") == []
    before, whole = bars(browser), browser.js(
        "return document.getElementById('live-map-left').toDataURL()"
    )  # fmt: skip
    assert red_cells(browser, "live-map-left") == 0
    choose(browser, "mask")
    for side, file in (("left", "annotated"), ("right", "mingpt_style")):
        text = verdict(browser, side, "failed")
        assert f"{file}/attention.py" in text
        assert red_cells(browser, f"live-map-{side}") > 100
    assert bars(browser) != before
    assert browser.one("#live-changes del").text.startswith("scores.masked")
    taken = browser.js("return [...document.querySelectorAll('.line.taken')]"
                       ".map(e => e.dataset.line)")  # fmt: skip
    assert taken == ["116", "76"]
    browser.js("location.hash = '#step-7'")
    wait_for(browser, "document.getElementById('walk-what').textContent"
             ".includes('a line is taken out')")  # fmt: skip
    choose(browser, "")
    verdict(browser, "left", "passed")
    assert bars(browser) == before
    assert whole == browser.js(
        "return document.getElementById('live-map-left').toDataURL()"
    )
    assert browser.all(".line.taken") == []

    # the texts of the rows of the cache's tables
    said_of = ("Tokens 0 to", "Only tokens", "Only token ")
    for piece, words in enumerate(said_of):
        click(browser, browser.all("#cache-pieces button")[piece])
        assert words in browser.one("#cache-said").text
    assert "bit for bit" in browser.one("#cache-said").text
    assert browser.js("return document.documentElement.scrollWidth") <= width
    # the function red_cells causes these warnings
    errors = [e for e in browser.errors() if "willReadFrequently" not in e]
    assert errors == []
    assert browser.js(FAINT) == []
    asked = {r for r in browser.requests() if not r.startswith("data:")}
    assert all(r.startswith(command.address.url) for r in asked)


def test_two_pages_do_not_disturb_each_other(browser, command):
    browser.open(command.address)
    said(browser, "both styles ran them")
    choose(browser, "positions")
    said(browser, "both styles ran them")
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    browser.open(command.address)
    said(browser, "both styles ran them")
    assert not browser.one("#live-was").is_displayed()
    browser.driver.close()
    browser.driver.switch_to.window(first)
    assert browser.one("#live-was").is_displayed()


# A script that holds the page's requests to one path until release() runs.
HOLD = """
const [held] = arguments, ask = window.fetch;
const gate = new Promise((open) => { window.release = open; });
window.fetch = async (path, how) => {
  if (path === held) await gate;
  return ask(path, how);
};
"""


def opened(browser, command, **how):
    """Open the page, and wait for the answers about its first text."""
    browser.open(command.address, **how)
    said(browser, "both styles ran them")
    idle(browser)


def idle(browser):
    wait_for(browser, "document.getElementById('live-busy').hidden"
             " && !document.querySelector('[aria-busy=true]')")  # fmt: skip


def type_text(browser, text):
    from selenium.webdriver.common.keys import Keys

    field = browser.one("#live-text")
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, text or Keys.DELETE)


def test_an_emptied_field_empties_the_page(browser, command):
    opened(browser, command)
    type_text(browser, "")
    wait_for(browser, "!document.querySelector('#live-tokens li')")
    assert bars(browser) == []
    assert browser.one("#live-said").text.startswith("Type a text")
    for button in ("#live-one", "#live-write"):
        assert not browser.one(button).is_enabled()
    for part in (".live-influence", "#cache-pieces", ".cache-sides"):
        assert not browser.one(part).is_displayed()
    click(browser, browser.one("#live-run"))
    assert browser.one("#live-said").text.startswith("Type a text")
    assert tiles(browser) == []
    # writing goes on from the text that was typed
    type_text(browser, "for i in")
    wait_for(browser, "!document.getElementById('live-one').disabled")
    click(browser, browser.one("#live-one"))
    said(browser, "4 of at most 64 tokens; both styles ran")
    assert "".join(tiles(browser)).startswith("for\u00b7i\u00b7in")
    assert browser.one("#live-text").get_property("value")[:8] == "for i in"
    assert browser.errors() == []


def test_a_full_text_is_not_written_further(browser, command):
    opened(browser, command)
    type_text(browser, 70 * "x ")
    said(browser, "64 of at most 64 tokens; the first 64 of ")
    click(browser, browser.one("#live-one"))
    said(browser, "The text has all 64 tokens: nothing more is written.")
    choose(browser, "scale")  # the page still sends all
    said(browser, "64 of at most 64 tokens; the first 64 of ")
    idle(browser)
    assert browser.errors() == []


def test_writing_before_the_text_has_run_writes_after_that_text(
    browser, command
):
    opened(browser, command)
    browser.js(
        "const field = document.getElementById('live-text');"
        "field.value = 'for i in'; field.dispatchEvent(new Event('input'));"
        "document.getElementById('live-one').click()"
    )
    said(browser, "4 of at most 64 tokens; both styles ran")
    assert "".join(tiles(browser)).startswith("for\u00b7i\u00b7in")


def test_a_text_of_two_tokens_clears_the_cache(browser, command):
    opened(browser, command)
    shown = ("#cache-pieces", "#cache-choices", "#cache-left", "#cache-right")
    assert all(browser.one(part).is_displayed() for part in shown)
    timed = browser.one("#cache-left").text
    assert re.search(r"medians of \d+ alternating runs", timed), timed
    type_text(browser, "The list")
    wait_for(browser, "document.getElementById('cache-said').textContent"
             ".endsWith('This text has 2.')")  # fmt: skip
    assert "needs at least 3 tokens" in browser.one("#cache-said").text
    assert not any(browser.one(part).is_displayed() for part in shown)
    type_text(browser, "The list is")
    wait_for(browser, "document.getElementById('cache-said').textContent"
             ".startsWith('Only token 2')")  # fmt: skip
    assert all(browser.one(part).is_displayed() for part in shown)


def test_the_newest_switch_wins(browser, command):
    opened(browser, command)
    browser.js(
        "window.seen = []; new MutationObserver(() => window.seen.push("
        "document.getElementById('live-changes').textContent)).observe("
        "document.getElementById('live-changes'), {childList: true})"
    )
    browser.js(HOLD, "/read")
    before = bars(browser)
    choose(browser, "mask")
    busy = browser.one("#live-busy")
    wait_for(browser, "!document.getElementById('live-busy').hidden")
    assert "running\u2026 your text" in busy.get_property("textContent")
    assert "without the causal mask: being compared" in banner(browser)
    choose(browser, "scale")
    # the old bars stay, but the page does not say that they are new
    assert bars(browser) == before
    assert not browser.one("#live-was").is_displayed()
    assert browser.one("[data-part=scale]").is_displayed()
    assert not browser.one("[data-part=mask]").is_displayed()
    browser.js("window.release()")
    wait_for(browser, "document.querySelector('#live-changes li')")
    assert "math.sqrt" in browser.one("#live-changes").text
    assert not any("masked_fill" in text for text in browser.js("return seen"))
    assert "without the scale 1/\u221ad: still one function" in banner(browser)
    idle(browser)


def banner(browser):
    return browser.js("return document.getElementById('verdict').textContent")


def test_the_banner_is_about_the_pair_that_runs(browser, command):
    opened(browser, command)
    whole = banner(browser)
    assert "One function" in whole
    assert browser.one(".walk-verdict").is_displayed()
    choose(browser, "residual")
    assert not browser.one(".walk-verdict").is_displayed()
    wait_for(browser, "document.getElementById('verdict').textContent"
             ".includes('residuals: still one function')")  # fmt: skip
    found = re.search(r"log-probabilities is (\S+); rounding can cause up to "
                      r"(\S+)\. ", banner(browser))  # fmt: skip
    assert 0 < float(found[1]) < float(found[2]) == 1e-12
    choose(browser, "")
    assert banner(browser) == whole
    assert browser.one(".walk-verdict").is_displayed()


def test_a_switch_keeps_the_chosen_token(browser, command):
    opened(browser, command)
    click(browser, browser.all("#live-tokens button")[2])
    choose(browser, "mask")
    wait_for(browser, "!document.getElementById('live-was').hidden")
    assert browser.one("#live-after").text.startswith("After token 2,")
    assert browser.one("#walk-token").get_attribute("value") == "2"
    type_text(browser, "The list is sorted")  # a new text has a new last token
    wait_for(browser, "document.getElementById('live-after').textContent"
             ".includes('sorted')")  # fmt: skip
    pressed = browser.all("#live-tokens [aria-pressed=true]")
    assert [e.get_attribute("value") for e in pressed] == [
        str(len(tiles(browser)) - 1)
    ]


def test_a_check_says_that_it_runs_and_the_page_goes_on(browser, command):
    opened(browser, command)
    browser.js(HOLD, "/causality")
    choose(browser, "positions")
    wait_for(browser, "document.getElementById('live-busy').textContent"
             ".includes('check_causality, a few seconds')")  # fmt: skip
    for side in ("left", "right"):
        text = browser.one(f"#live-verdict-{side}").text
        assert "runs on this model, a few seconds" in text
    # the page keeps the token, the step and the cache's table that were chosen
    before = bars(browser)
    click(browser, browser.all("#live-tokens button")[2])
    assert bars(browser) != before
    click(browser, browser.one("#walk-on"))
    assert browser.one("#walk-at").text == "step 2 of 19"
    # a text that is typed meanwhile runs, and the check's result stays
    type_text(browser, "The list is sorted")
    browser.js("window.release()")
    said(browser, "of at most 64 tokens; both styles ran")
    wait_for(browser, "document.querySelectorAll('.live-verdict.passed')"
             ".length === 2")  # fmt: skip
    assert len(tiles(browser)) < 10
    box = browser.one("#live-verdict-left")
    more = box.find_element("css selector", "details")
    first = box.find_element("css selector", ":scope > span").text
    # if the machine is fast, it tries all lengths
    assert re.fullmatch(r"proved at lengths [\d, -]*8: no position sees a "
                        "later token", first)  # fmt: skip
    assert not more.get_property("open")
    more.click()
    assert more.find_element("css selector", "span").text


def test_a_changed_line_links_to_its_step(browser, command):
    opened(browser, command)
    choose(browser, "mask")
    wait_for(browser, "document.querySelectorAll('#live-changes a')"
             ".length === 2")  # fmt: skip
    idle(browser)
    links = browser.all("#live-changes a")
    for link, side in ((0, "left"), (1, "right"), (1, "right")):
        browser.js("arguments[0].click()", links[link])
        wait_for(browser, "document.getElementById('walk-at').textContent"
                 " === 'step 7 of 19'")  # fmt: skip
        assert browser.js("return location.hash") == "#step-7"
        seen = browser.js(
            "const line = document.querySelector(arguments[0])"
            ".getBoundingClientRect();"
            "const box = document.querySelector(arguments[0])"
            ".closest('.cell').getBoundingClientRect();"
            "return line.height > 0 && line.top >= box.top"
            " && line.bottom <= box.bottom",
            f"#walk-{side} .walk-source:not([hidden]) .line.taken",
        )
        assert seen, side
        browser.js("document.getElementById('walk-on').click()")
        assert browser.one("#walk-at").text == "step 8 of 19"


def test_the_bars_follow_the_sliders(browser, command):
    opened(browser, command)
    move = (
        "const slider = document.getElementById(arguments[0]);"
        "slider.value = arguments[1];"
        "for (const kind of ['input', 'change'])"
        " slider.dispatchEvent(new Event(kind))"
    )
    assert browser.one("#live-drawn").text == (
        "At temperature 1.0, from all tokens."
    )
    browser.js(move, "live-keep", 3)
    wait_for(browser, "document.querySelectorAll('#live-bars li').length"
             " === 3")  # fmt: skip
    assert browser.one("#live-drawn").text == (
        "At temperature 1.0, from the 3 likeliest tokens."
    )
    percents = [e.text for e in browser.all("#live-bars .percent")]
    shares = [float(percent.split(" ")[0]) for percent in percents]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    browser.js(move, "live-heat", 0)
    wait_for(browser, "document.querySelectorAll('#live-bars li').length"
             " === 1")  # fmt: skip
    assert "100.0 %" in bars(browser)[0]


def test_tokens_of_raw_bytes_are_explained(browser, command):
    opened(browser, command)
    assert not browser.one("#live-raw").is_displayed()
    type_text(browser, "na\u00efve")
    wait_for(browser, "document.querySelectorAll('#live-tokens .raw').length"
             " === 2")  # fmt: skip
    assert "raw bytes, in hexadecimal" in browser.one("#live-raw").text
    titles = [e.get_attribute("title") for e in browser.all(".tiles .raw")]
    assert titles == 4 * ["raw bytes of a character that takes several tokens"]
    type_text(browser, "\u8a9e")
    wait_for(browser, "document.querySelectorAll('#live-after .raw').length"
             " === 3")  # fmt: skip
    assert browser.one("#live-after").rect["height"] < 40  # on one line
    last = "#walk .bars-said .raw"
    browser.js("document.querySelector('#step-19 > a').click()")
    assert [e.text for e in browser.all(last)] == ["e8", "aa", "9e"]
    type_text(browser, "nave")
    wait_for(browser, "!document.querySelector('#live-tokens .raw')")
    assert not browser.one("#live-raw").is_displayed()


def test_examples_stand_below_the_field_and_run(browser, command):
    opened(browser, command)
    examples = browser.all(".live-try button")
    assert examples[0].rect["y"] > browser.one("#live-run").rect["y"]
    # for the first examples, a lower bound of the small model's probability in
    # percent
    for example, end, piece, least in zip(
        examples[:2], ("else", "\u00b7is"), (":", "\u00b7raised"), (75, 55),
        strict=True,
    ):  # fmt: skip
        click(browser, example)
        wait_for(browser, "document.getElementById('live-after').textContent"
                 f".endsWith('{end}\u201d:')")  # fmt: skip
        idle(browser)
        text = example.get_property("value")
        assert browser.one("#live-text").get_property("value") == text
        found = re.match(r"(\S+?)([\d.]+) %", bars(browser)[0])
        assert found[1] == piece
        assert float(found[2]) > least


def shares_of(row):
    """Return two percentages: of a bar, and of the model with all parts."""
    return [float(x) for x in re.findall(r"([\d.]+) %", row.text)]


@pytest.mark.parametrize("width", [1440, 390])
def test_without_the_mask_a_token_that_sees_the_future_is_chosen(
    browser, command, width
):
    opened(browser, command, width=width)
    click(browser, browser.all(".live-try button")[3])
    wait_for(browser, "document.getElementById('live-after').textContent"
             ".includes('3.')")  # fmt: skip
    choose(browser, "mask")
    wait_for(browser, "document.getElementById('live-after').textContent"
             " === 'After token 0, \u2026\u201cC\u201d:'")  # fmt: skip
    follower = browser.one("#live-bars .actual")
    assert follower.text.startswith("hanged")
    now, was = shares_of(follower)
    assert now > was + 30
    assert browser.one("#live-actual").is_displayed()
    assert browser.one("#walk-token").get_attribute("value") == "0"
    # if a text is long, its tiles scroll to the chosen token
    choose(browser, "")
    wait_for(browser, "document.getElementById('live-after').textContent"
             ".startsWith('After token 6,')")  # fmt: skip
    type_text(browser, "Changed in version 3." + 50 * " x")
    said(browser, "57 of at most 64 tokens")
    idle(browser)
    choose(browser, "mask")
    wait_for(browser, "!document.getElementById('live-was').hidden")
    pressed = browser.one("#live-tokens [aria-pressed=true]")
    assert int(pressed.get_attribute("value")) < 56
    seen = browser.js(
        "const tile = document.querySelector("
        "'#live-tokens [aria-pressed=true]').getBoundingClientRect();"
        "const box = document.getElementById('live-tokens')"
        ".getBoundingClientRect();"
        "return tile.top >= box.top && tile.bottom <= box.bottom"
    )
    assert seen
    idle(browser)
    assert browser.one("#live-cut").text == (
        "The maps are of the first 32 of 57 tokens."
    )
    caption = browser.one(".live-maps figcaption").text
    assert "log-probabilities above the diagonal move by up to" in caption


def test_a_step_without_its_line_is_described_as_it_runs(browser, command):
    opened(browser, command)
    same = browser.one("#walk-same").text
    assert "compute the same value" in same
    remarks = {
        "mask": (7, "nothing is masked", "is_causal is False"),
        "scale": (6, "divides by nothing", "scale=1.0"),
        "positions": (2, "No line reads pe", "No line reads wpe"),
        "residual": (11, "adds it to nothing", "adds nothing"),
    }
    for part, (step, *both) in remarks.items():
        choose(browser, part)
        wait_for(browser, "document.querySelector('#live-changes li')")
        idle(browser)
        name = browser.one(f"[name=part][value='{part}']").find_element(
            "xpath", ".."
        )
        words = f"both without the {name.text}."
        assert browser.one("#walk-same").text.endswith(words)
        browser.js(f"document.querySelector('#step-{step} > a').click()")
        assert "taken out of both" in browser.one("#walk-lesson .gone").text
        for side, expected in zip(("left", "right"), both, strict=True):
            remark = browser.one(f"#walk-{side} .walk-remark").text
            assert expected in remark, part
        assert browser.one("#walk-left .walk-place.gone").is_displayed()
    # the line of the norm has changed, but the norm still runs
    browser.js("document.querySelector('#step-4 > a').click()")
    assert "still normalises" in browser.one("#walk-left .walk-remark").text
    assert browser.all(".walk-place.gone") == []
    choose(browser, "")
    wait_for(browser, "!document.querySelector('#walk-lesson .gone')")
    assert browser.one("#walk-same").text == same
    browser.js("document.querySelector('#step-7 > a').click()")
    assert "True here" in browser.one("#walk-right .walk-remark").text


def test_a_step_leads_back_to_the_bars(browser, command):
    opened(browser, command, width=390, height=844)
    browser.js("document.documentElement.style.scrollBehavior = 'auto'")
    choose(browser, "mask")
    wait_for(browser, "document.querySelector('#live-changes a')")
    idle(browser)
    in_sight = (
        "const title = document.getElementById('h-live-bars')"
        ".getBoundingClientRect();"
        "const above = document.querySelector('.live-switch')"
        ".getBoundingClientRect();"
        "return title.top >= above.bottom && title.bottom < innerHeight"
    )
    browser.js("document.querySelector('#live-changes a').click()")
    wait_for(browser, "document.getElementById('walk-at').textContent"
             " === 'step 7 of 19'")  # fmt: skip
    wait_for(browser, "document.getElementById('walk-stage')"
             ".getBoundingClientRect().top < 100")  # fmt: skip
    assert not browser.js(in_sight)
    back = browser.one("#walk-return").rect["y"]
    assert abs(back - browser.one("#walk-play").rect["y"]) < 20  # one row
    browser.one("#walk-return").click()
    wait_for(browser, f"(() => {{ {in_sight} }})()")


def test_each_difference_names_its_precision(browser, command):
    opened(browser, command)
    assert "float32 rounding" in banner(browser)
    assert "bit for bit the same keys and values" in (
        browser.one("#cache-said").text
    )
    assert re.search(r"The log-probabilities at the end, .* are \S+ apart in "
                     "float32: ", browser.one(".cache-time").text)  # fmt: skip
    browser.js("document.querySelector('#step-5 > a').click()")
    assert re.search(r"largest difference \S+, in float64$",
                     browser.one("#walk-what").text)  # fmt: skip
    choose(browser, "mask")
    wait_for(browser, "document.getElementById('verdict').textContent"
             ".includes('On your text, in float64, the largest')")  # fmt: skip


def test_a_touch_screen_has_no_keys_to_press(browser, command):
    touch = "Emulation.setTouchEmulationEnabled"
    words = (".keys", ".cache-cell", "#influence-readout")
    opened(browser, command)
    shown = [browser.one(part).text for part in words]
    assert "(key: P)" in shown[0]
    assert shown[1] == "Point at a cell to read its number."
    assert "arrow keys" in shown[2]
    try:
        browser.driver.execute_cdp_cmd(touch, {"enabled": True})
        opened(browser, command, width=390)
        browser.js("document.querySelector('#step-8 > a').click()")
        shown = [browser.one(part).text for part in words]
        assert "key" not in shown[0] + shown[2]
        assert shown[1] == "Tap a cell to read its number."
        cell = browser.one("#walk-left .walk-cell").text
        assert cell == "Tap a cell: its score is worked out."
    finally:
        browser.driver.execute_cdp_cmd(touch, {"enabled": False})


def test_on_a_phone_the_switches_stay_with_what_they_change(browser, command):
    opened(browser, command, width=390, height=844)
    show = (
        "document.querySelector(arguments[0]).scrollIntoView({{block:'{}'}})"
    )
    browser.js("document.documentElement.style.scrollBehavior = 'auto'")
    box = "return document.querySelector(arguments[0]).getBoundingClientRect()"
    browser.js(show.format("start"), ".live-switch")
    switch, shown = (browser.js(box, f".live-{name}")
                     for name in ("switch", "next"))  # fmt: skip
    assert 0 <= switch["top"] < shown["top"]
    assert shown["bottom"] < 844
    for below in ("#live-maps", ".live-break"):
        browser.js(show.format("end"), below)
        switch, shown = browser.js(box, ".live-switch"), browser.js(box, below)
        assert 0 <= switch["top"] < switch["bottom"] < 250
        assert switch["bottom"] < shown["bottom"] < 845


def test_ctrl_c_ends_the_command_in_one_line(browser, command):
    opened(browser, command)
    command.send_signal(signal.SIGINT)
    rest = command.stdout.read()
    assert rest == "stopped\n"
    assert command.wait(20) == 0
    click(browser, browser.one("#live-run"))
    said(browser, "gpt-duet does not answer: is it still running?")
    assert tiles(browser) == bars(browser) == []  # the text did not run
