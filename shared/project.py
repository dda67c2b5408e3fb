"""The settings of a user's project: [tool.gpt-duet] in pyproject.toml.

    [tool.gpt-duet]
    budget = "60s"                       # of each target

    [tool.gpt-duet.targets."my_pkg.model:build"]
    block-size = 64
    expect = {cache = "it has none yet"}

    [tool.gpt-duet.targets.perplexity]   # any name
    scorer = "my_pkg.evaluate:make_score"
    vocab-size = 256
    documents = 0                        # the id between them

The names are those of the options of `gpt-duet check`.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .validation import choose_device, did_you_mean, whole_number

UNITS = {"s": 1, "m": 60, "h": 3600}  # seconds
# Settings by name: their type, and the argument of check_model.
KNOWN: dict[str, tuple[type | tuple[type, ...], str]] = {
    "vocab-size": (int, "vocab_size"),
    "block-size": (int, "block_size"),
    "outputs": (str, "outputs"),
    "layout": (str, "layout"),
    "cache": (str, "cache"),
    "input": (dict, "inputs"),
    "documents": ((str, int), "documents"),
    "compile": (bool, "compile"),
    "only": (list, "checks"),
    "skip": (list, "checks"),
    "expect": (dict, "expected_failures"),
    "budget": ((str, int, float), "budget"),
    "seed": (int, "seed"),
    "device": (str, "device"),
    "threads": (int, "threads"),
    "require-proof": (bool, "require_proof"),
    "allow-routing": (bool, "allow_routing"),
    "scorer": (str, "scorer"),
    "bos": (int, "bos"),
    "bits": (bool, "bits"),
    "state": (str, "state"),
    "bytes-per-token": (str, "bytes_per_token"),
}
ONLY_OF_SCORERS = {"scorer", "bos", "bits", "state", "bytes-per-token"}
OF_SCORERS = ONLY_OF_SCORERS | {
    "vocab-size", "block-size", "documents", "budget", "seed",
}  # fmt: skip
ALSO = {"--quick": "budget", "--thorough": "budget"}  # in the shell


def read_project(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the targets of a folder's pyproject.toml, with their settings.

    Without a table for the kit there are none. A setting of all targets goes
    to those that have it: a model, or what a scorer is made by.

    Raises:
        ValueError: for a file that is not TOML, an unknown setting, and a
            value of another type.
    """
    file = folder / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is no TOML: {error}") from None
    table = table.get("tool", {}).get("gpt-duet", {})
    common = {k: v for k, v in table.items() if k != "targets"}
    targets = table.get("targets", {})
    made = common.pop("scorer", None)  # a target of its own
    if not isinstance(targets, dict):
        raise ValueError(
            f"[tool.gpt-duet] targets is a table of tables, as "
            f'[tool.gpt-duet.targets."my_pkg.model:build"], got {targets!r}'
        )
    if made is not None:
        _require_known("scorer", made)
        targets = {made: {"scorer": made}} | targets
    found = {}
    for target, own in targets.items():
        if not isinstance(own, dict):
            raise ValueError(
                f"[tool.gpt-duet] {target} is a table of settings, got {own!r}"
            )
        for name, value in (common | own).items():
            _require_known(name, value)
        scores = "scorer" in own
        fitting = OF_SCORERS if scores else KNOWN.keys() - ONLY_OF_SCORERS
        if wrong := own.keys() - fitting:
            whose = "a scorer" if scores else "a model"
            raise ValueError(
                f"[tool.gpt-duet] {whose} takes no {min(wrong)}: {target}"
            )
        found[target] = {k: common[k] for k in common if k in fitting} | own
        if scores and "vocab-size" not in found[target]:
            raise ValueError(
                f"[tool.gpt-duet] a scorer needs vocab-size: {target}"
            )
    return found


def _require_known(name: str, value: object) -> None:
    if name not in KNOWN:
        raise ValueError(
            f"[tool.gpt-duet] has no setting {name!r}"
            f"{did_you_mean(name, KNOWN)}"
        )
    kinds = KNOWN[name][0]
    if not isinstance(value, kinds) or (
        isinstance(value, bool) and kinds is not bool
    ):
        names = kinds if isinstance(kinds, tuple) else (kinds,)
        words = " or ".join(kind.__name__ for kind in names)
        raise ValueError(f"[tool.gpt-duet] {name} is {words}, got {value!r}")


def as_arguments(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a target's settings as arguments of what checks it.

    But for scorer, bytes_per_token, cache, inputs and documents, which keep
    their targets' names.

    Raises:
        ValueError: for a value that the shell would refuse.
    """
    from .invariants.checks import choose_checks  # late: it imports torch

    found = {KNOWN[name][1]: value for name, value in own.items()}
    for name in ("vocab_size", "block_size", "threads"):
        if name in found:
            whole_number(name, found[name], at_least=1)
    for name, values in (
        ("outputs", ("auto", "logits", "log_probs")),
        ("layout", ("bt", "tb")),
        ("state", ("fresh", "kept")),
    ):
        if found.get(name, values[0]) not in values:
            raise ValueError(
                f"{name} is one of {', '.join(values)}, got {found[name]!r}"
            )
    if "checks" in found:
        found["checks"] = checks_without(own.get("only"), own.get("skip"))
    if "budget" in found:
        found["budget"] = seconds_of(str(own["budget"]))
    if "device" in found:
        found["device"] = choose_device(own["device"])
    if "expect" in own:
        found["expected_failures"] = {
            full: reason
            for name, reason in own["expect"].items()
            for full in choose_checks([name])
        }
    return found


def checks_without(
    only: list[str] | None, skip: list[str] | None
) -> list[str]:
    """Return the full names of the checks to run; ValueError if none."""
    from .invariants.checks import choose_checks

    left_out = choose_checks(skip or [])
    names = [name for name in choose_checks(only) if name not in left_out]
    if not names:
        raise ValueError("no check is left to run")
    return names


def seconds_of(text: str | None) -> float | None:
    """Return a time as it is typed (90s, 4m, 90) in seconds."""
    if text is None:
        return None
    unit = UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"--budget takes 90s, 4m or seconds, got {text!r}")
    return seconds
