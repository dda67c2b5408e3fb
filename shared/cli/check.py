"""gpt-duet check: the invariants, for anyone's model."""

import inspect
import locale
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ..console import printable, set_debug, warn
from ..files import STDOUT, reserve_stdout, write_json
from ..project import as_words, read_project, require_fitting
from ..targets import NEVER, parse_target
from ..validation import (
    choose_device,
    require_parent,
    require_seed,
    whole_number,
)
from . import options
from .kept import ask, find

if TYPE_CHECKING:  # imported where it is used: --help need not wait for it
    from ..invariants import Report
    from ..invariants.notebooks import Progress
    from .checking import Job

# The colour of each status: groups are named for it.
STATUS = (
    r"(?m)^(?:check|scorer)_\w+ +((?P<green>passed)|(?P<red>failed|error)|"
    r"(?P<yellow>skipped)|(?P<magenta>expected))"
)
SILENCE = 10.0  # seconds until the first line, at most
# The shades of a map, where the terminal has no others.
ASCII = {0xB7: ".", **dict.fromkeys((0x2591, 0x2592, 0x2593, 0x2588), "#")}
UNITS = {"s": 1, "m": 60, "h": 3600}  # seconds
HOW_LONG = {"budget", "quick", "thorough"}


def _reserve_for(form: str) -> str:
    if form == "sarif":
        reserve_stdout()
    return form


def _write(
    file: Path | None,
    form: str,
    models: list[dict[str, Any]],
    whole: dict[str, Any],
) -> None:
    """Write the results of all models, from the first process alone.

    Args:
        file: of JSON; None: none.
        form: github or sarif, beside it.
        models: the results.
        whole: the fields of the JSON that hold for all models together.
    """
    if file is None and form == "text":
        return
    from ..invariants.report import ORIGIN
    from .formats import annotations, sarif, write_summary

    if not all(model.get("kept") for model in models):
        from ..invariants.ranks import first

        if not first():
            return
    shown = models
    if "error" in whole and not models:
        shown = [{"model": "pyproject.toml"} | whole]
    if form == "github":
        write_summary(shown)
        if text := annotations(shown):
            print(text)
    if form == "sarif" and file != STDOUT:
        from ..invariants import CHECKS

        said = {
            name: (inspect.getdoc(one) or name).split("\n")[0]
            for name, one in CHECKS.items()
        }
        said["target"] = "A target is loaded, built and called."
        write_json(STDOUT, sarif(shown, ORIGIN["version"], said))
    if file is not None:
        write_json(file, ORIGIN | whole | {"models": models})


def _with_mistakes(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate the command: it writes its results after a mistake, too."""

    @wraps(command)
    def run(**given: Any) -> None:
        file = given["json_file"]
        if file not in (None, STDOUT):
            file = file.absolute()  # a model may change the folder
        try:
            command(**given)
        except ValueError as error:
            wrong = {"ok": False, "error": str(error)}
            models = [{"model": m} | wrong for m in given["models"] or []]
            with suppress(ValueError):  # no such folder
                _write(file, given["form"], models, wrong)
            raise

    return run


@_with_mistakes
def check(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        Argument(
            help="What builds each model: package.module:factory, "
            "path/to/file.py:factory, an expression in place of the factory, "
            "or a package with build_model(config), such as annotated. "
            "Default: the targets of [tool.gpt-duet] in pyproject.toml.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, Option(help="Number of tokens. Default: the model's own.")
    ] = None,
    block_size: Annotated[
        int | None,
        Option(help="Longest sequence to try. Default: the model's own."),
    ] = None,
    outputs: Annotated[
        Literal["auto", "logits", "log_probs"],
        Option(help="What the model's scores are."),
    ] = "auto",
    layout: Annotated[
        Literal["bt", "tb"],
        Option(help="Order of the tokens' axes: bt (batch, time), or tb."),
    ] = "bt",
    cache: options.Cache = None,
    inputs: Annotated[
        list[str] | None,
        Option(
            "--input",
            help="How an argument of the call is made, as "
            "doc_ids=my_pkg:make (from tokens to the argument), or "
            "doc_ids=never; may be repeated.",
            show_default=False,
        ),
    ] = None,
    documents: Annotated[
        str | None,
        Option(
            help="What says where documents of a packed row are: an "
            "argument of the call (position_ids), an id that separates them "
            "(50256), or my_pkg:make, from their lengths to arguments.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None, Option(help="Run this check only; may be repeated.")
    ] = None,
    skip: Annotated[
        list[str] | None, Option(help="Leave this check out; may be repeated.")
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            help="Time there is: 90s, 4m or seconds; what finds most comes "
            "first. Default: 4m where all would take longer.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="The same as --budget 30s.")
    ] = False,
    thorough: Annotated[
        bool, Option("--thorough", help="Try all, however long.")
    ] = False,
    expect: Annotated[
        list[str] | None,
        Option(
            help='A check that is expected to fail, and why: cache="a '
            'reason"; may be repeated.',
            show_default=False,
        ),
    ] = None,
    require_proof: Annotated[
        bool,
        Option(
            "--require-proof",
            help="Fail where causality is tested, and not proved.",
        ),
    ] = False,
    allow_routing: Annotated[
        bool,
        Option(
            "--allow-routing",
            help="Let a proof for texts that take the same path be enough.",
        ),
    ] = False,
    compiled: Annotated[
        bool,
        Option(
            "--compile",
            help="Compile the model, too, and hold that program against it.",
        ),
    ] = False,
    show_list: Annotated[
        bool, Option("--list", help="List the checks, and run none.")
    ] = False,
    scorer: Annotated[
        str | None,
        Option(
            help="In place of models: what makes a scorer of texts, as "
            "my_pkg:make_score; score(tokens) gives log-probabilities.",
            show_default=False,
        ),
    ] = None,
    bos: Annotated[
        int | None, Option(help="Of a scorer: the id that begins all texts.")
    ] = None,
    bits: Annotated[
        bool, Option("--bits", help="Scores are in bits, not in nats.")
    ] = False,
    state: Annotated[
        Literal["fresh", "kept"],
        Option(help="Whether a scorer's state stays for the next text."),
    ] = "fresh",
    bytes_per_token: Annotated[
        str | None,
        Option(
            help="Of a scorer: from a text to the bytes counted for each of "
            "its tokens, as my_pkg:count.",
            show_default=False,
        ),
    ] = None,
    seed: options.Seed = 0,
    device_name: options.Device = "cpu",
    threads: options.Threads = None,
    json_file: options.Json = None,
    form: Annotated[
        Literal["text", "github", "sarif"],
        Option(
            "--format",
            callback=_reserve_for,
            help="github: also write annotations for a workflow, and the "
            "step's summary; sarif: write SARIF to the standard output, and "
            "all else to the standard error.",
        ),
    ] = "text",
    verbose: Annotated[
        bool,
        Option(
            "--verbose",
            "-v",
            help="In a terminal, too, show all that a check says that passed.",
        ),
    ] = False,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Show failures alone.")
    ] = False,
    fresh: Annotated[
        bool,
        Option(
            "--fresh",
            help="Run anew what passed in an earlier run of the same files, "
            "settings and versions, whose result is kept in "
            ".gpt_duet_cache.",
        ),
    ] = False,
    map_file: Annotated[
        Path | None,
        Option(
            "--map",
            help="Draw which token influences which position, in a .png or "
            ".html file.",
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Check that models do not see future tokens, and much else.

    The exit status is 0 if everything holds, 1 if a check failed, 2 if the
    call was wrong, and 130 after Ctrl-C.
    """
    project = {} if scorer else read_project(Path.cwd())
    targets = models or [scorer] if scorer else models or list(project)
    if not targets and not show_list:
        raise ValueError(
            "name what builds a model, as my_pkg.model:build, or list targets "
            "under [tool.gpt-duet.targets] in pyproject.toml"
        )
    typed = options.given(context)
    options_given = {name.removeprefix("--") for name in typed}
    require_fitting(options_given, scorer is not None)
    if scorer and (models or map_file):
        also = f"model, got {models}" if models else "--map"
        raise ValueError(f"--scorer takes no {also}")
    makes = [make for make in _makers(inputs or []).values() if make != NEVER]
    if documents and ":" in documents:
        makes.append(documents)
    alone = targets if len(targets) == 1 else []
    alone = [project.get(name, {}).get("scorer", name) for name in alone]
    for model in filter(
        None, [*alone, cache, scorer, bytes_per_token, *makes]
    ):
        parse_target(model)
    if verbose and quiet:
        raise ValueError("--verbose and --quiet: choose one")
    _require_numbers(context.params)
    if json_file == STDOUT and form == "sarif":
        raise ValueError("--json - and --format sarif: choose one")
    require_parent(json_file)
    require_parent(map_file)
    if map_file is not None and map_file.suffix not in (".png", ".html"):
        raise ValueError(f"a map ends in .png or .html, got {map_file.name}")
    if json_file not in (None, STDOUT):
        json_file = json_file.absolute()  # a model may change the folder
    asked = {t: ask(t, typed, project.get(t, {})) for t in targets}
    found = {} if fresh else {t: find(one) for t, one in asked.items()}
    kept = {target: report for target, report in found.items() if report}
    console = Console(stderr=json_file == STDOUT or form == "sarif")
    brief = console.is_terminal and not verbose
    shown = None if quiet else console
    results: list[dict[str, Any]] = []
    if kept and len(kept) == len(targets):  # torch is not imported
        for target in targets:
            results.append(_show_kept(kept[target], shown, brief))
        return _write(json_file, form, results, {"ok": True})
    from ..invariants import CHECKS
    from ..invariants.notebooks import Progress
    from ..invariants.ranks import current
    from .checking import check_alone, check_here

    if show_list:
        width = max(map(len, CHECKS))
        for name, one in CHECKS.items():
            line = (inspect.getdoc(one) or "").split("\n")[0]
            if one.slow:
                line += f" Slow: --only {name.removeprefix('check_')}."
            print(f"{name:<{width}}  {line}")
        return
    jobs = [job_of(context, t, project.get(t, {})) for t in targets]
    in_turn = len(targets) > 1 and current() is None
    check_target = check_alone if in_turn else check_here
    mistake: ValueError | None = None
    stopped = False
    try:
        for target, job in zip(targets, jobs, strict=True):
            if target in kept:
                results.append(_show_kept(kept[target], shown, brief))
                continue
            drawn = map_file and _map_path(map_file, target, len(targets))
            drawn = None if job.scorer else drawn
            job = replace(
                job, map_file=drawn and drawn.absolute(), asked=asked[target]
            )
            slow = Timer(SILENCE, warn, [f"{target} is slow to build or call"])
            slow.start()
            try:
                with Progress() as progress:
                    tell = partial(_show, shown, slow, brief, progress)
                    report = check_target(job, tell)
            except ValueError as error:
                if len(targets) == 1:
                    raise
                mistake = error
                warn(str(error))
                wrong = {"model": target, "ok": False, "error": str(error)}
                results.append(wrong)
                continue
            finally:
                slow.cancel()
            results.append(report.to_dict())
            if not quiet:
                _print(console, report.ending(console.width))
            elif not report.ok:
                _print(console, report.failures(console.width))
            if stopped := report.interrupted:
                break
            if drawn or not quiet:
                _print(console, f"map: {drawn}\n" if drawn else "")
    except KeyboardInterrupt:  # while a model was built, or a map drawn
        stopped = True
    ok = not stopped and all(result["ok"] for result in results)
    _write(json_file, form, results, {"ok": ok})
    if not ok:
        raise typer.Exit(130 if stopped else 2 if mistake else 1)


def job_of(context: Any, target: str, own: Mapping[str, Any]) -> "Job":
    """Return what is to be checked, and how.

    Args:
        context: of the command, as it was typed.
        target: its name.
        own: its settings in pyproject.toml, which are read as options are;
            what was typed goes before them.

    Raises:
        ValueError: for a value that no option takes.
    """
    from ..invariants.scorer import LENGTH
    from .checking import Job

    typed = {name.removeprefix("--") for name in options.given(context)}
    typed |= HOW_LONG if typed & HOW_LONG else set()
    words = as_words({k: v for k, v in own.items() if k not in typed})
    usage: Any = typer.BadParameter.__base__  # of click, or typer's own of it
    try:
        file = context.command.make_context(target, words)
    except usage as error:
        text = error.format_message()
        raise ValueError(f"[tool.gpt-duet] {target}: {text}") from None
    set_debug(context.params["debug"])
    given = context.params | options.given(file, by_option=False)
    documents, scorer = given["documents"], given["scorer"]
    same = ("vocab_size", "block_size", "seed", "debug")
    settings = {name: given[name] for name in same}
    _require_numbers(given)
    settings["budget"] = _seconds(given)
    if scorer:
        if documents and not documents.isdecimal():
            raise ValueError(
                f"--documents of a scorer is the id between documents, got "
                f"{documents!r}"
            )
        own_names = ("bos", "bits", "state", "bytes_per_token")
        settings |= {name: given[name] for name in own_names}
        settings["block_size"] = given["block_size"] or LENGTH
        settings["documents"] = int(documents) if documents else None
        return Job(target, settings, scorer=scorer)
    alike = ("outputs", "layout", "threads", "require_proof", "allow_routing")
    settings |= {name: given[name] for name in alike}
    settings |= {
        "checks": _checks(given["only"], given["skip"]),
        "expected_failures": _expected(given["expect"] or []),
        "compile": given["compiled"],
        "device": choose_device(given["device_name"]),
    }
    inputs = _makers(given["inputs"] or [])
    return Job(target, settings, None, given["cache"], inputs, documents)


def _require_numbers(given: Mapping[str, Any]) -> None:
    """Refuse sizes, a seed or a time that are out of range."""
    for name in ("vocab_size", "block_size"):
        if given[name] is not None:
            words = f"--{name.replace('_', '-')}"
            whole_number(words, given[name], at_least=1)
    require_seed(given["seed"])
    _seconds(given)


def _seconds(given: Mapping[str, Any]) -> float | None:
    """Return the time for the checks, None for the default.

    Raises:
        ValueError: for a text that is no time, and for two of the options.
    """
    if sum(map(bool, map(given.get, HOW_LONG))) > 1:
        raise ValueError("--thorough, --quick and --budget: choose one")
    text = "30s" if given["quick"] else given["budget"]
    if text is None:
        return math.inf if given["thorough"] else None
    unit = UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"--budget takes 90s, 4m or seconds, got {text!r}")
    return seconds


def _checks(
    only: Sequence[str] | None, skip: Sequence[str] | None
) -> list[str]:
    """Return the full names of the checks to run; ValueError if none."""
    from ..invariants.checks import choose_checks

    left_out = choose_checks(skip or [])
    names = [
        name for name in choose_checks(only or None) if name not in left_out
    ]
    if not names:
        raise ValueError("no check is left to run")
    return names


def _makers(given: list[str]) -> dict[str, str]:
    """Return what makes each argument, from texts such as x=my_pkg:make."""
    makers = {}
    for text in given:
        name, _, make = map(str.strip, text.partition("="))
        if not name.isidentifier() or not make:
            raise ValueError(
                f"--input takes an argument and what makes it, as "
                f"doc_ids=my_pkg:make or doc_ids={NEVER}, got {text!r}"
            )
        makers[name] = make
    return makers


def _expected(given: list[str]) -> dict[str, str]:
    """Return reasons by check, from texts such as cache="no positions"."""
    reasons = {}
    for text in given:
        name, _, reason = map(str.strip, text.partition("="))
        if not reason:
            raise ValueError(
                f'--expect takes a check and a reason, as check_cache="why", '
                f"got {text!r}"
            )
        reasons[f"check_{name.removeprefix('check_')}"] = reason
    return reasons


def _show(
    console: Console | None,
    slow: Timer,
    brief: bool,
    line: "Progress",
    report: "Report",
) -> None:
    """Print the newest row of a report, and below it the check under way."""
    from ..invariants import CHECKS

    slow.cancel()
    line.show("")
    if console is not None and report.interim:
        warn(report.interim)
    elif console is not None:
        width = console.width
        if report.results:
            _print(console, report.row(report.results[-1], width, brief))
        else:
            _print(console, report.heading(width))
        for name in report.names[len(report.results) :][:1]:
            if name in CHECKS and CHECKS[name].slow:
                warn(f"{name} trains the model, which takes a while")
    line.show(report.under_way)


def _show_kept(
    report: "Report", console: Console | None, brief: bool
) -> dict[str, Any]:
    """Print a report that was kept, if there is a console; return its data."""
    if console is not None:
        rows = [report.row(r, console.width, brief) for r in report.results]
        _print(console, report.heading(console.width))
        _print(console, "\n".join([*rows, report.ending(console.width), ""]))
    return report.to_dict()


def _print(console: Console, text: str) -> None:
    encodings = f"{console.encoding} {locale.getencoding()}"
    if encodings.lower().count("utf") < 2:
        text = text.translate(ASCII)
    shown = Text(printable(text))
    shown.highlight_regex(STATUS)
    console.print(shown, soft_wrap=True)


def _map_path(path: Path, target: str, count: int) -> Path:
    """Return a file for each model, where there are several."""
    if count == 1:
        return path
    word = "".join(c if c.isalnum() else "-" for c in target).strip("-")
    return path.with_name(f"{path.stem}-{word}{path.suffix}")
