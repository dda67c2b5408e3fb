"""Makes the pictures that the README shows, by real commands.

PYTHONPATH=. python tests/support/pictures.py

A picture of a terminal is what it shows, colours and all, drawn as SVG. That
of the page is taken with chromium, where it is there.
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

from browser import Browser, page_of
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "shared/pictures"
# without the web font: a picture that asks the network for nothing
SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
PORT = (
    "diff \"transformers:GPT2LMHeadModel.from_pretrained('gpt2_folder')\" "
    "\"my_gpt.py:load('gpt2_folder')\""
)
COMMANDS = {  # and the columns of their terminals
    "compare": ("compare", 120),
    "port": (PORT, 140),
    "generate": (
        'generate --prompt "The assert statement" --new-tokens=60',
        120,
    ),
}
STEP = "step-8"  # of the walk on the page: the one that is shown
# my_gpt.py: nanoGPT's layout, with the exact GELU where GPT-2 has tanh's
LOADER = """

def load(folder):
    from gpt_duet.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(folder)
    state = checkpoint.to(torch.device("cpu"), torch.float32)
    return nano(state, checkpoint.config)
"""


def write_port(folder):
    """Write a GPT with one fault, and weights for it."""
    source = (ROOT / "tests/zoo/known_gpts.py").read_text("utf-8")
    faulty = source.replace(', approximate="tanh"', "") + LOADER
    (folder / "my_gpt.py").write_text(faulty, "utf-8")
    small_model = ROOT / "shared/checkpoint/small_model"
    shutil.copytree(small_model, folder / "gpt2_folder")


def draw(name, folder):
    """Run a command in a folder, and draw what a terminal shows."""
    command, width = COMMANDS[name]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(width),
        "FORCE_COLOR": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    done = subprocess.run(
        [sys.executable, "-m", "gpt_duet.cli", *shlex.split(command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    assert done.returncode == (name == "port"), done.stdout  # its fault
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text.from_ansi(done.stdout))
    title = f"gpt-duet {command}"
    drawn = console.export_svg(title=title, code_format=SVG, unique_id="duet")
    (PICTURES / f"{name}.svg").write_text(drawn, "utf-8")


def photograph(folder):
    """Make the page of gpt-duet compare, and take a picture of its walk."""
    browser = Browser(folder / "profile")
    browser.open(page_of(folder, "compare"), height=1270, at=STEP)
    browser.look_at(browser.one("#walk"), "start")
    browser.driver.save_screenshot(str(PICTURES / "walk.png"))
    browser.driver.quit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_port(Path(folder))
        for name in COMMANDS:
            draw(name, Path(folder))
        photograph(Path(folder))
