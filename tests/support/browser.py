"""Pages for the tests, and a headless Chromium that opens them."""

import json
import re
import shutil
import sys

import pytest

from gpt_duet.cli import main

SMALL = ("--n-layer", "2", "--n-head", "2", "--n-embd", "16")
HOSTILE = (
    "</script><img src=x onerror=alert(1)>\n<script>alert(2)</script>"
    "\u2028{{ 7 * 7 }} &amp; '\"`\x07\u202e</pre></title><!--"
)


def page_of(folder, *words, status=0, walk=True):
    """Run a command of gpt-duet in this process; return its page.

    walk=False omits the walk through a forward pass, which takes longest to
    make.
    """
    page = folder / "page.html"
    words = ["gpt-duet", *words, "--html", page]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, words)])
        if not walk:
            patch.setattr("gpt_duet.comparison.page.render.WALK_PARAMETERS", 0)
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code or 0) == status
    return page


def make_page(folder, *arguments, status=0, walk=False):
    """Run gpt-duet compare on a small model, and return the page it writes."""
    words = ("compare", *SMALL, *arguments)
    return page_of(folder, *words, status=status, walk=walk)


def hostile_page(folder):
    """Make a page about a text that contains markup."""
    words = ("--text", HOSTILE, "--tokenizer=char", "--block-size=128")
    return make_page(folder, *words, walk=True)


def data_of(page):
    """Return the data that a page has for its scripts."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
    "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip

# A script that returns texts with too little contrast by the WCAG 2 formula.
FAINT = """
const channel = c => (c /= 255) <= .03928 ? c / 12.92
  : ((c + .055) / 1.055) ** 2.4;
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) =>
  .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !e.checkVisibility()) continue;
  if (e.closest("script, style, svg, option")) continue;
  const a = light(numbers(getComputedStyle(e).color)), b = light(behind(e));
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < 4.5) faint.push([ratio, e.className, e.textContent]);
}
return faint.slice(0, 5);
"""


class Browser:
    """A headless Chromium with one page at a time."""

    def __init__(self, profile):
        webdriver = pytest.importorskip("selenium.webdriver")
        chromium = shutil.which("chromium")
        chromedriver = shutil.which("chromedriver")
        if not chromium or not chromedriver:
            pytest.skip("no chromium and chromedriver here")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        options.arguments.extend([*FLAGS, f"--user-data-dir={profile}"])
        logs = {"browser": "ALL", "performance": "ALL"}
        options.set_capability("goog:loggingPrefs", logs)
        service = webdriver.ChromeService(chromedriver)
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(self, path, width=1440, height=900, dark=False, media="", at=""):
        """Clear the logs, then open a file in a window of this size."""
        run = self.driver.execute_cdp_cmd
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        run("Emulation.setDeviceMetricsOverride", size | {"mobile": False})
        scheme = "dark" if dark else "light"
        feature = {"name": "prefers-color-scheme", "value": scheme}
        run(
            "Emulation.setEmulatedMedia",
            {"media": media, "features": [feature]},
        )
        self.driver.get("about:blank")
        self.errors()
        self.requests()
        self.driver.get(f"{path.as_uri()}#{at}" if at else path.as_uri())
        # On a busy machine the driver may return while the page is parsed.
        self.wait_until(
            "return location.href.startsWith(arguments[0])"
            " && document.readyState === 'complete'", path.as_uri(),
        )  # fmt: skip

    def open_by_itself(self, path, **how):
        """Open a file; require that it loads nothing else and is readable."""
        self.open(path, **how)
        assert self.errors() == []
        requests = {r for r in self.requests() if not r.startswith("data:")}
        assert requests == {path.as_uri()}
        assert self.js(FAINT) == []

    def unfold(self):
        """Unfold all folded parts of the page."""
        self.js("document.querySelectorAll('details').forEach(e => {"
                "e.open = true})")  # fmt: skip

    def errors(self):
        """Return the errors in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Return the addresses that were requested since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def js(self, script, *arguments):
        """Run a script in the page and return its result."""
        return self.driver.execute_script(script, *arguments)

    def one(self, selector):
        """Return the first element that matches a selector."""
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        """Return all elements that match a selector."""
        return self.driver.find_elements("css selector", selector)

    def top(self, selector):
        """Return how far an element begins below the top of the window."""
        return self.js(
            "return document.querySelector(arguments[0])"
            ".getBoundingClientRect().top", selector,
        )  # fmt: skip

    def wait_for_focus(self, selector):
        """Wait until an element has the focus."""
        self.wait_until(
            "return document.activeElement.matches(arguments[0])", selector
        )

    def wait_until(self, script, *arguments):
        """Wait until a script returns true; an error after 5 minutes."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 300, poll_frequency=0.05).until(
            lambda _: self.js(script, *arguments)
        )

    def look_at(self, element, block="center"):
        """Scroll to an element at once; from now on, links also jump."""
        self.js("document.documentElement.style.scrollBehavior = 'auto'")
        how = {"block": block}
        self.js("arguments[0].scrollIntoView(arguments[1])", element, how)
