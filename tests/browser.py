"""A real headless Chromium for the tests, and what can be asked of it."""

import json
import shutil

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Contrast of every text with what is behind it, by the formulas of WCAG 2.
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
    """Chromium with one page at a time."""

    def __init__(self, profile):
        webdriver = pytest.importorskip("selenium.webdriver")
        chromium = shutil.which("chromium")
        chromedriver = shutil.which("chromedriver")
        if not chromium or not chromedriver:
            pytest.skip("no chromium and chromedriver here")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        logs = {"browser": "ALL", "performance": "ALL"}
        options.set_capability("goog:loggingPrefs", logs)
        service = webdriver.ChromeService(chromedriver)
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(self, path, *, width=1440, dark=False, media=""):
        """Open a file at a width; forget what was logged before."""
        run = self.driver.execute_cdp_cmd
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
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
        self.driver.get(path.as_uri())

    def errors(self):
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Addresses that were asked for since this was last asked."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def js(self, script, *arguments):
        """Run a script in the page and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def one(self, selector):
        """The first element that a selector finds."""
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        """Every element that a selector finds."""
        return self.driver.find_elements("css selector", selector)
