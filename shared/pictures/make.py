"""Makes the pictures and outputs that the README shows, by real commands.

    python shared/pictures/make.py

A picture of a terminal is what it shows: colours and all, drawn as SVG. The
picture of the page is taken with chromium, where it is there.
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
ROOT = HERE.parents[1]
# without the web font: a picture that asks the network for nothing
SVG = re.sub(
    r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
)

PROMPT = ["--prompt", "The assert statement", "--new-tokens=60"]
PICTURES = {
    "compare": ["compare"],
    "port": [
        "diff",
        "transformers:GPT2LMHeadModel.from_pretrained('gpt2_folder')",
        "my_gpt.py:load('gpt2_folder')",
        "--width=140",
    ],
    "generate": ["generate", *PROMPT],
}
STEP, HEIGHT = 11, 1010  # of the walk on the page: the one that is shown
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


# my_gpt.py: nanoGPT's layout, with the exact GELU where GPT-2 has tanh's
LOADER = """

def load(folder):
    from gpt_duet.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(folder)
    state = checkpoint.to(torch.device("cpu"), torch.float32)
    return nano(state, checkpoint.config)
"""


def write_port(folder: Path) -> None:
    """Write a GPT with one fault, and weights for it."""
    source = (ROOT / "tests/known_gpts.py").read_text(encoding="utf-8")
    faulty = source.replace(', approximate="tanh"', "") + LOADER
    (folder / "my_gpt.py").write_text(faulty, encoding="utf-8")
    small_model = ROOT / "shared/checkpoint/small_model"
    shutil.copytree(small_model, folder / "gpt2_folder")


def picture(arguments: list[str], folder: Path) -> str:
    """Run gpt-duet in a folder and return its output as SVG."""
    widths = [a[8:] for a in arguments if a.startswith("--width=")]
    width = int(widths[0]) if widths else 120
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(width),
        "FORCE_COLOR": "1",
        "TTY_INTERACTIVE": "0",  # no progress bars
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "shared.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    if "diff" not in arguments:  # which ends with status 1 at a fault
        done.check_returncode()
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text.from_ansi(done.stdout))
    words = [f'"{a}"' if "'" in a else shlex.quote(a) for a in arguments]
    title = " ".join(["gpt-duet", *words])
    return console.export_svg(title=title, code_format=SVG, unique_id="duet")


def photograph() -> Path:
    """Make the page of gpt-duet compare and take a picture of its walk."""
    from selenium import webdriver

    walk = HERE / "walk.png"
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        subprocess.run(
            [sys.executable, "-m", "shared.cli", "compare", "--html", page],
            stdout=subprocess.DEVNULL,
            check=True,
            cwd=ROOT,
        )
        for flag in (*CHROMIUM, f"--user-data-dir={folder}/profile"):
            options.add_argument(flag)
        driver = webdriver.Chrome(
            options, webdriver.ChromeService(shutil.which("chromedriver"))
        )
        try:
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 1440, "height": HEIGHT}
                | {"deviceScaleFactor": 1, "mobile": False},
            )
            driver.get(f"{page.as_uri()}#step-{STEP}")
            driver.execute_script(
                "document.documentElement.style.scrollBehavior = 'auto';"
                "document.getElementById('walk').scrollIntoView()"
            )
            driver.save_screenshot(str(walk))
        finally:
            driver.quit()
    return walk


if __name__ == "__main__":
    made = []
    with tempfile.TemporaryDirectory() as folder:
        write_port(Path(folder))
        for name, arguments in PICTURES.items():
            made.append(HERE / f"{name}.svg")
            drawn = picture(arguments, Path(folder))
            made[-1].write_text(drawn, encoding="utf-8")
    if shutil.which("chromium") and shutil.which("chromedriver"):
        made.append(photograph())
    else:
        print("no chromium: the picture of the page stays as it is")
    for path in made:
        print(path.relative_to(ROOT))
