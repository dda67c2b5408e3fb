"""Make the pictures of the README by running real commands.

PYTHONPATH=.:tests/zoo python tests/support/pictures.py

A picture of a terminal is a command's output, in colour, drawn as SVG. The
picture of the page is taken with Chromium, which must be installed.
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
from visible_models import PARENTS, of

from gpt_duet import influence
from gpt_duet.tracing.pictures import draw_map
from gpt_duet.visibility import tree

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
# rich's SVG without web fonts, because pictures must load nothing from the web
SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
PORT = (
    "diff \"transformers:GPT2LMHeadModel.from_pretrained('gpt2_folder')\" "
    "\"my_gpt.py:load('gpt2_folder')\""
)
COMMANDS = {  # each command, and the width of its terminal in columns
    "compare": ("compare", 120),
    "port": (PORT, 140),
    "generate": (
        'generate --prompt "The assert statement" --new-tokens=60',
        120,
    ),
}
STEP = "step-8"  # the step that the picture of the walk shows
# the end of my_gpt.py: nanoGPT's model, with the exact GELU as its fault
LOADER = """

def load(folder):
    from gpt_duet.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(folder)
    state = checkpoint.to(torch.device("cpu"), torch.float32)
    return nano(state, checkpoint.config)
"""


def write_port(folder):
    """Write a GPT that has one fault, and weights for it."""
    source = (ROOT / "tests/zoo/known_gpts.py").read_text("utf-8")
    faulty = source.replace(', approximate="tanh"', "") + LOADER
    (folder / "my_gpt.py").write_text(faulty, "utf-8")
    small_model = ROOT / "shared/checkpoint/small_model"
    shutil.copytree(small_model, folder / "gpt2_folder")


def draw(name, folder):
    """Run a command in a folder, and draw its output as in a terminal."""
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
    # diff finds the port's fault, so its status is 1
    assert done.returncode == (name == "port"), done.stdout
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


def draw_declaration():
    """Draw the influence map of a tree, with a leak and a missing pair."""
    sees = tree(PARENTS)
    model = of(sees, more=[(5, 4)], less=[(7, 1)])()
    drawn = draw_map(influence(model), sees.relation_of(len(PARENTS)))
    drawn.savefig(PICTURES / "visibility.png", dpi=90)


if __name__ == "__main__":
    draw_declaration()
    with tempfile.TemporaryDirectory() as folder:
        write_port(Path(folder))
        for name in COMMANDS:
            draw(name, Path(folder))
        photograph(Path(folder))
