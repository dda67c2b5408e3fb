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

The names are those of the options of `gpt-duet check`, and a setting is read
as that option is.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .validation import did_you_mean

OF_BOTH = {
    "vocab-size", "block-size", "documents", "seed", "budget", "quick",
    "thorough",
}  # fmt: skip
OF_SCORERS = {"scorer", "bos", "bits", "state", "bytes-per-token"}
OF_MODELS = {
    "outputs", "layout", "cache", "input", "compile", "only", "skip",
    "expect", "device", "threads", "require-proof", "allow-routing",
}  # fmt: skip
FLAGS = {
    "bits", "compile", "require-proof", "allow-routing", "quick", "thorough",
}  # fmt: skip
SETTINGS = OF_BOTH | OF_SCORERS | OF_MODELS


def read_project(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the targets of a folder's pyproject.toml, with their settings.

    Without a table for the kit there are none. A setting of all targets goes
    to those that have it: a model, or what a scorer is made by.

    Raises:
        ValueError: for a file that is not TOML, and an unknown setting.
    """
    file = folder / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is no TOML: {error}") from None
    common = dict(table.get("tool", {}).get("gpt-duet", {}))
    targets = common.pop("targets", {})
    tables = [targets, *getattr(targets, "values", list)()]
    if not all(isinstance(one, dict) for one in tables):
        raise ValueError(
            f"[tool.gpt-duet] targets is a table of tables, as "
            f'[tool.gpt-duet.targets."my_pkg.model:build"], got {targets!r}'
        )
    if "scorer" in common:  # a target of its own
        made = str(common.pop("scorer"))
        targets = {made: {"scorer": made}} | targets
    for name in {*common, *(name for own in targets.values() for name in own)}:
        if name not in SETTINGS:
            raise ValueError(
                f"[tool.gpt-duet] has no setting {name!r}"
                f"{did_you_mean(name, SETTINGS)}"
            )
    found = {}
    for target, own in targets.items():
        others = OF_MODELS if "scorer" in own else OF_SCORERS
        fit = {name: common[name] for name in common if name not in others}
        found[target] = fit | own
        try:
            require_fitting(found[target], "scorer" in own)
        except ValueError as error:
            raise ValueError(f"[tool.gpt-duet] {target}: {error}") from None
    return found


def require_fitting(names: Collection[str], scorer: bool) -> None:
    """Refuse settings of models with a scorer, and the other way round."""
    if wrong := (OF_MODELS if scorer else OF_SCORERS) & {*names}:
        if scorer:
            raise ValueError(f"--scorer takes no --{min(wrong)}")
        raise ValueError(f"--{min(wrong)} goes with --scorer")
    if scorer and "vocab-size" not in names:
        raise ValueError("--scorer needs --vocab-size, the number of ids")


def as_words(own: Mapping[str, Any]) -> list[str]:
    """Return settings as they are typed in the shell."""
    words = []
    for name, value in own.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            values = [f"{key}={text}" for key, text in value.items()]
        if name in FLAGS and isinstance(value, bool):
            words += [f"--{name}"] * value
        else:
            words += [f"--{name}={one}" for one in values]
    return words
