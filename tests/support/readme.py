"""Writes tables of READMEs: the models of the tests, what checks cost.

python tests/support/readme.py        the models, in tests/zoo/README.md
python tests/support/readme.py costs  the costs, in the checks' README:
                                some six minutes of a quiet machine
python tests/support/readme.py ways   the ways of running, in the same file
"""

import re
import sys
from functools import partial
from pathlib import Path

from broken_models import BROKEN
from correct_models import CORRECT

from gpt_duet import GPTConfig, check_model
from gpt_duet.invariants import CHECKS
from gpt_duet.mingpt_style import build_model
from gpt_duet.running.ways import CASES, EVAL, Case

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
    """The tables by the name of the markers they stand between."""
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


def ways():
    """Which checks try each way of running, but for those of eval mode."""
    tried = {}
    for name, check in CHECKS.items():
        module = vars(sys.modules[check.__module__]).values()
        own = {case for case in module if isinstance(case, Case)}
        own |= {case for case, names in CASES.items() if name in names}
        if own - {EVAL}:
            tried[name.removeprefix("check_")] = own | {EVAL}
    rows = [
        (
            case.name or "in eval mode",
            *("x" * (case in t) for t in tried.values()),
        )
        for case in CASES
    ]
    return {"ways": table(("way", *tried), rows)}


def costs():
    """What each check takes of models of three sizes."""
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
    rows["all"] = rows.pop("all")  # the last row
    return {
        "costs": table(
            ("check", *MEASURED), [(n, *r) for n, r in rows.items()]
        )
    }


def filled(text, tables):
    """The text with every table that it has a place for made anew."""
    for name, content in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = re.sub(
            f"{start}.*?{end}",
            lambda _, new=f"{start}\n\n{content}\n\n{end}": new,
            text,
            flags=re.DOTALL,
        )
    return text


OF_CHECKS = TESTS.parent / "shared" / "invariants" / "README.md"

if __name__ == "__main__":
    readme, made = TESTS / "zoo" / "README.md", tables
    if sys.argv[1:] in (["costs"], ["ways"]):
        readme, made = OF_CHECKS, {"costs": costs, "ways": ways}[sys.argv[1]]
    readme.write_text(filled(readme.read_text("utf-8"), made()), "utf-8")
