"""Writes the tables of models in tests/README.md from the models.

python tests/readme.py
"""

import re
from pathlib import Path

from broken_models import BROKEN
from correct_models import CORRECT

TESTS = Path(__file__).resolve().parent


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
    return {
        "broken": table(("fault", "caught by", "what it does"), broken),
        "correct": table(("model", "what is unusual about it"), correct),
    }


def filled(text):
    """The text with every table that it has a place for made anew."""
    for name, content in tables().items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = re.sub(
            f"{start}.*?{end}",
            lambda _, new=f"{start}\n\n{content}\n\n{end}": new,
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    readme = TESTS / "README.md"
    readme.write_text(filled(readme.read_text("utf-8")), "utf-8")
