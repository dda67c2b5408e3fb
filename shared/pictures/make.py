"""Makes the pictures and outputs that the README shows, by real commands.

    python shared/pictures/make.py

A picture of a terminal is what it shows: colours and all, drawn as SVG. The
pictures of the page are taken with chromium, where it is there.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
# without the web font: a picture that asks the network for nothing
SVG = re.sub(
    r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
)

PROMPT = ["--prompt", "A long time ago"]
PICTURES = {
    "compare": ["compare"],
    "diff": ["diff", "attention", "--width", "168"],
    "generate": ["generate", *PROMPT, "--temperature", "1", "--seed", "3"],
}
# What of the page is shown: from where on, and how many pixels high.
PAGES = {"page": ("body", 1150), "page-attention": ("#concept-attention", 990)}
CHROMIUM = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def picture(arguments: list[str], width: int = 120) -> str:
    """Run gpt-duet and return its output as SVG."""
    environment = os.environ | {
        "COLUMNS": str(width),
        "FORCE_COLOR": "1",
        "TTY_INTERACTIVE": "0",  # no progress bars
    }
    done = subprocess.run(
        [sys.executable, "-m", "shared.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        cwd=HERE.parents[1],
    )
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text.from_ansi(done.stdout))
    title = shlex.join(["gpt-duet", *arguments])
    return console.export_svg(title=title, code_format=SVG, unique_id="duet")


def photograph() -> list[Path]:
    """Make the page of gpt-duet compare and take pictures of it."""
    from selenium import webdriver

    pictures = []
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        subprocess.run(
            [sys.executable, "-m", "shared.cli", "compare", "--html", page],
            stdout=subprocess.DEVNULL,
            check=True,
            cwd=HERE.parents[1],
        )
        for flag in (*CHROMIUM, f"--user-data-dir={folder}/profile"):
            options.add_argument(flag)
        driver = webdriver.Chrome(
            options, webdriver.ChromeService(shutil.which("chromedriver"))
        )
        try:
            for name, (place, height) in PAGES.items():
                pictures.append(HERE / f"{name}.png")
                driver.execute_cdp_cmd(
                    "Emulation.setDeviceMetricsOverride",
                    {"width": 1440, "height": height}
                    | {"deviceScaleFactor": 1, "mobile": False},
                )
                driver.get(page.as_uri())
                driver.execute_script(
                    "document.documentElement.style.scrollBehavior = 'auto';"
                    "document.querySelector(arguments[0]).scrollIntoView()",
                    place,
                )
                driver.save_screenshot(str(pictures[-1]))
        finally:
            driver.quit()
    return pictures


if __name__ == "__main__":
    made = []
    for name, arguments in PICTURES.items():
        columns = 168 if "--width" in arguments else 120
        made.append(HERE / f"{name}.svg")
        made[-1].write_text(picture(arguments, columns), encoding="utf-8")
    if shutil.which("chromium") and shutil.which("chromedriver"):
        made += photograph()
    else:
        print("no chromium: the pictures of the page stay as they are")
    for path in made:
        print(path.relative_to(HERE.parents[1]))
