"""Read targets of gpt-duet check from the command line and pyproject.toml.

    [tool.gpt-duet]
    budget = "60s"                       # for each target

    [tool.gpt-duet.targets."my_pkg.model:build"]
    block-size = 64
    expect = {cache = "it has none yet"}

    [tool.gpt-duet.targets.perplexity]   # any name
    scorer = "my_pkg.evaluate:make_score"
    vocab-size = 256
    documents = 0                        # the id that separates documents

The settings in pyproject.toml have the same names and values as the options of
the command.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..console import given_options
from ..settings import OPTIONS, QUICK
from ..targets import parse_target
from ..validation import did_you_mean, whole_number

HOW_LONG = {"budget", "quick", "thorough"}
SETTINGS = {one.option: one for one in OPTIONS}
# parameters of the command that are not settings, and not for scorers
OF_MODELS = {"models", "map"}
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}  # seconds


@dataclass(frozen=True, eq=False)
class Job:
    """A target to check, as plain data that another process can receive."""

    target: str  # the target's name
    scorer: str | None  # the target that makes a scorer; None for a model
    # arguments of check_model or check_scorer. Targets and devices are given
    # by name; `only` and `skip` are lists of checks
    settings: dict[str, Any]
    # file in which to draw a map, None for no map
    map_file: Path | None = None
    folder: Path = Path()  # the folder to which relative file names refer


def jobs_of(context: Any) -> list[Job]:
    """Return the targets of the command line, or else those of the project.

    Raises:
        ValueError: for an unknown setting, an invalid value, or no target.
    """
    given = context.params
    known = {p.opts[0].removeprefix("--"): p for p in context.command.params}
    typed = {name.removeprefix("--") for name in given_options(context)}
    models, scorer = given["models"], given["scorer"]
    fitting = SETTINGS.keys() | (OF_MODELS if scorer else ())
    _require_fitting(typed & fitting, scorer is not None)
    folder = Path.cwd() if scorer else project_folder(Path.cwd())
    project = {} if scorer else read_project(folder)
    folder = Path.cwd() if models or scorer else folder
    targets = [scorer] if scorer else [*dict.fromkeys(models or project)]
    _require_models(models or ())
    if not targets:
        raise ValueError(
            "give a function that builds a model, as my_pkg.model:build, or "
            "list targets under [tool.gpt-duet.targets] in pyproject.toml"
        )
    typed |= HOW_LONG if typed & HOW_LONG else set()
    usage: Any = typer.BadParameter.__base__  # click's, or typer's own copy
    jobs = []
    for target in targets:
        own = project.get(target, {})
        values = dict(given)
        try:
            _require_fitting(own, "scorer" in own)
            for name in own.keys() - typed:
                option = known[name]
                text = _as_typed(own[name], option.multiple)
                if text == "":
                    raise ValueError(f"{name} is empty")
                values[option.name] = option.process_value(context, text)
        except (ValueError, usage) as error:
            words = getattr(error, "format_message", error.__str__)()
            raise ValueError(f"[tool.gpt-duet] {target}: {words}") from None
        scorer = values["scorer"]
        fit = [one for one in OPTIONS if one.fits(scorer is not None)]
        settings = {one.name: values[one.name] for one in fit}
        map_file = None if scorer else given["map_file"]
        # typer 0.20 gives a text instead of a Path
        drawn = map_file and Path(map_file)
        if drawn and len(targets) > 1:
            word = re.sub(r"[\W_]", "-", target).strip("-")
            drawn = drawn.with_stem(f"{drawn.stem}-{word}")
        read = _read(settings) | {"debug": given["debug"]}
        drawn = drawn and drawn.absolute()
        jobs.append(Job(target, scorer, read, drawn, folder))
    if len(jobs) == 1:
        parse_target(jobs[0].scorer or targets[0])
    return jobs


def _require_models(names: Collection[str]) -> None:
    """Raise ValueError if a name is that of a check, not of a target."""
    folder = Path(__file__).parents[1] / "invariants" / "checks"
    # names of checks, read from the folder without importing torch
    known = {file.stem for file in folder.iterdir()}
    for name in names:
        check = name.removeprefix("check_")
        if check in known and not Path(name).exists():
            raise ValueError(
                f"{name} is a check, not a model: give each check with "
                f"--only, as --only shape --only {name}"
            )


def project_folder(start: Path) -> Path:
    """Return the nearest folder upwards with a pyproject.toml for gpt-duet.

    If there is none, return the given folder.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and "gpt-duet" in file.read_text("utf-8", "replace"):
            with suppress(tomllib.TOMLDecodeError, TypeError):
                content = tomllib.loads(file.read_text("utf-8", "replace"))
                if "gpt-duet" not in content.get("tool", {}):
                    continue
            return folder
    return start


def read_project(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the targets of a folder's pyproject.toml, with their settings.

    A file without a table for gpt-duet has no targets. A setting outside the
    targets' tables applies to every target that accepts it. Some settings are
    only for models, others only for scorers.

    Raises:
        ValueError: for invalid TOML, or an unknown setting.
    """
    file = folder / "pyproject.toml"
    try:
        text = file.read_text("utf-8") if file.is_file() else ""
        content = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{file.name} is not valid TOML: {error}") from None
    common = _table(_table(content, "tool"), "gpt-duet")
    named = _table(common, "targets")
    targets = {name: _table(named, name) for name in named}
    common.pop("targets", None)
    if "scorer" in common:  # refused: a scorer cannot be common to all targets
        made = str(common.pop("scorer"))
        targets = {made: {"scorer": made}} | targets
    for name in {*common}.union(*targets.values()) - SETTINGS.keys():
        raise ValueError(
            f"[tool.gpt-duet] has no setting {name!r}"
            f"{did_you_mean(name, SETTINGS)}"
        )
    for target, own in targets.items():
        scorer = "scorer" in own
        fit = [name for name in common if SETTINGS[name].fits(scorer)]
        targets[target] = {name: common[name] for name in fit} | own
    return targets


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of pyproject.toml, or an empty one if it has none."""
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(
            f"pyproject.toml: {name} must be a table, as "
            f'[tool.gpt-duet.targets."my_pkg.model:build"], got {found!r}'
        )
    return found


def _require_fitting(names: Collection[str], scorer: bool) -> None:
    """Raise ValueError if a scorer has a model's settings, or vice versa."""
    fit = {one.option for one in OPTIONS if one.fits(scorer)}
    if wrong := [name for name in names if name not in fit]:
        if scorer:
            also = "model" if "models" in wrong else f"--{min(wrong)}"
            raise ValueError(f"--scorer takes no {also}")
        raise ValueError(f"--{min(wrong)} requires --scorer")
    if scorer and "vocab-size" not in names:
        raise ValueError("--scorer requires --vocab-size, the number of ids")


def _as_typed(value: Any, several: bool) -> str | list[str]:
    """Return a setting's value as a user would type it in the shell."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        values = [f"{key}={text}" for key, text in value.items()]
    texts = [str(one) for one in values]
    return texts if several else " ".join(texts)


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options into arguments of check_model or check_scorer."""
    settings = {n: v for n, v in given.items() if v is not None}
    quick, thorough = settings.pop("quick"), settings.pop("thorough")
    settings["budget"] = _seconds(quick, thorough, settings.get("budget"))
    scorer = settings.pop("scorer", None)
    for one in OPTIONS:
        if one.shell.least is not None and one.name in settings:
            value, least = settings[one.name], one.shell.least
            whole_number(f"--{one.option}", value, at_least=least)
        if one.shell.pairs and not scorer:
            given_pairs = settings.get(one.name, ())
            settings[one.name] = _pairs(given_pairs, one.shell.pairs)
    if settings.get("documents", "").isdecimal():
        settings["documents"] = int(settings["documents"])
    return settings


def _seconds(quick: bool, thorough: bool, text: str | None) -> float | None:
    """Return how many seconds the checks may take; None is the default."""
    if quick + thorough + (text is not None) > 1:
        raise ValueError("--thorough, --quick and --budget: choose one")
    text = QUICK if quick else "inf" if thorough else text
    if text is None:
        return None
    found = re.fullmatch(r"(\d*\.?\d+|inf)([smh]?)", text)
    if not found or float(found[1]) == 0:
        raise ValueError(f"--budget takes 90s, 4m or seconds, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def _pairs(texts: Iterable[str], wanted: str) -> dict[str, str]:
    """Read names and values from texts such as x=my_pkg:make.

    If a text is invalid, `wanted` begins the message.
    """
    pairs = {}
    for text in texts:
        name, _, value = map(str.strip, text.partition("="))
        if not (name.isidentifier() and value):
            raise ValueError(f"{wanted}, got {text!r}")
        pairs[name] = value
    return pairs
