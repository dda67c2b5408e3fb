"""Makes the pictures and outputs that the README shows, by real commands.

    python shared/pictures/make.py

Each picture is what a terminal shows: colours and all, drawn as SVG.
"""

import io
import os
import re
import shlex
import subprocess
import sys
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
    "generate": ["generate", *PROMPT, "--temperature", "1", "--seed", "3"],
}


def picture(arguments: list[str], width: int = 112) -> str:
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


if __name__ == "__main__":
    for name, arguments in PICTURES.items():
        path = HERE / f"{name}.svg"
        path.write_text(picture(arguments), encoding="utf-8")
        print(path.relative_to(HERE.parents[1]))
