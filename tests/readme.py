"""Writes the README's tables from the data of the tests.

python tests/readme.py
"""

import re
from pathlib import Path

from broken_models import BROKEN
from correct_models import CORRECT
from errata import FAULTS

README = Path(__file__).resolve().parents[1] / "README.md"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


def tables():
    """The tables by the name of the markers they stand between."""
    broken = [
        (
            b.name.replace("_", " "),
            f"`{b.check}`" + (" only" if b.only else ""),
            b.sentence + (f" ({b.report})" if b.report else ""),
        )
        for b in BROKEN
    ]
    correct = [(c.name.replace("_", " "), c.note) for c in CORRECT]
    faults = [(f.number, f.sentence, f.ours) for f in FAULTS]
    return {
        "broken": table(("fault", "caught by", "what it does"), broken),
        "correct": table(("model", "what is unusual about it"), correct),
        "faults": table(("", "the tutorial", "here"), faults),
    }


def filled(text):
    """The README's text with every table made anew."""
    for name, content in tables().items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.escape(start) + ".*?" + re.escape(end)
        new = f"{start}\n\n{content}\n\n{end}"
        text, count = re.subn(
            pattern, lambda _, new=new: new, text, flags=re.DOTALL
        )
        assert count == 1, f"the README has {count} places for {name}"
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text("utf-8")), "utf-8")
