"""Write tables into Markdown: the tests' models, or the costs of checks.

python tests/support/readme.py        the models, in tests/zoo/README.md
python tests/support/readme.py costs  the costs, in docs/explanation/time.md,
                                which takes six minutes on a quiet machine
"""

import re
import sys
from functools import partial
from pathlib import Path

from broken_models import BROKEN
from correct_models import CORRECT

from gpt_duet import GPTConfig, check_model
from gpt_duet.mingpt_style import build_model

TESTS = Path(__file__).resolve().parents[1]
MEASURED = {
    "small": GPTConfig(65, 64, n_layer=2, n_head=4, n_embd=32),
    "10 million": GPTConfig(65, 256, n_layer=6, n_head=6, n_embd=384),
    "124 million": GPTConfig.preset("gpt2"),
}


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


def tables():
    """Return the tables of models, each under the name of its markers."""
    broken = [
        (
            b.name.replace("_", " "),
            f"`{b.check}`" + (" only" if b.only else ""),
            b.sentence,
        )
        for b in BROKEN
    ]
    correct = [(c.name.replace("_", " "), c.sentence) for c in CORRECT]
    opened = [(c.name.replace("_", " "), c.open) for c in CORRECT if c.open]
    return {
        "open": table(("model", "why its causality is not proved"), opened),
        "broken": table(("fault", "caught by", "what it does"), broken),
        "correct": table(("model", "what is unusual about it"), correct),
    }


def costs():
    """Measure the cost of each check on models of three sizes."""
    rows = {}
    for config in MEASURED.values():
        report = check_model(partial(build_model, config))
        rows.setdefault("all", []).append(
            f"{sum(r.seconds for r in report.results):.0f} s"
        )
        for r in report.results:
            name = r.name.removeprefix("check_")
            cost = f"{r.forwards} / {r.backwards}, {r.seconds:.3g} s"
            cost = "no time" if r.message.startswith("no time") else cost
            rows.setdefault(name, []).append(cost)
    rows["all"] = rows.pop("all")  # move the sum to the last row
    return {
        "costs": table(
            ("check", *MEASURED), [(n, *r) for n, r in rows.items()]
        )
    }


def filled(text, tables):
    """Return the text with a new table between each pair of markers."""
    for name, content in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = re.sub(
            f"{start}.*?{end}",
            lambda _, new=f"{start}\n\n{content}\n\n{end}": new,
            text,
            flags=re.DOTALL,
        )
    return text


COSTS = TESTS.parent / "docs" / "explanation" / "time.md"

if __name__ == "__main__":
    readme, made = TESTS / "zoo" / "README.md", tables
    if sys.argv[1:] == ["costs"]:
        readme, made = COSTS, costs
    readme.write_text(filled(readme.read_text("utf-8"), made()), "utf-8")
