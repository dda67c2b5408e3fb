"""Define the command gpt-duet bench."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Context, Option

from gpt_duet.console import given_options, stopped_by_ctrl_c
from gpt_duet.validation import choose_device, whole_number

from . import PEERS, STYLES, Kind

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # rich's tables are too narrow for the help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


ROUNDS: dict[Kind, int] = {"forward": 10, "generate": 3, "train-step": 5}
MOST_ROUNDS = 1000  # default of --rounds if --until is given

# options that may be given with --all
WITH_ALL = {"--all", "--device", "--json"}
Size = int | None
Text = str | None
File = Path | None


@app.command()
@stopped_by_ctrl_c()
def bench(
    call: Context,
    kind: Annotated[Kind | None, Argument(
        help="What to time. Default: forward, for about a minute.")] = None,
    everything: Annotated[bool, Option("--all",
        help="Time forward passes of S1, S2 and S3 in each dtype, decoding, "
        "the checks, the tests marked gpu, and compiled passes, within eight "
        "minutes; list the parts that there was no time for. Write --json "
        "after each part. Allows only --device and --json.")] = False,
    preset: Annotated[Text, Option(
        help="S1 (6 layers, 384 wide, 65 characters, batch 8, time 256), "
        "S2 (GPT-2 124M, batch 1, time 256), S3 (6 layers, 512 wide, "
        "vocabulary 50257, batch 1, time 1024), or one of GPTConfig's: "
        "gpt2, gpt-mini, ... Default: S1; with generate: gpt2.")] = None,
    n_layer: Annotated[Size, Option(help="Number of blocks.")] = None,
    n_head: Annotated[Size, Option(help="Attention heads in a block.")] = None,
    n_embd: Annotated[Size, Option(help="Width of the features.")] = None,
    vocab_size: Annotated[Size, Option(help="Number of tokens.")] = None,
    block_size: Annotated[Size, Option(help="Longest sequence.")] = None,
    batch: Annotated[Text, Option(help="Rows: 8, or 1,8,32.")] = None,
    time: Annotated[Text, Option(help="Tokens in a row: 64,256.")] = None,
    prompt: Annotated[Text, Option(
        help="With generate: tokens in the prompt. Default: 16.")] = None,
    new: Annotated[Size, Option("--new-tokens", "--new",
        help="With generate: tokens to append. Default: 32.")] = None,
    styles: Annotated[str, Option(help="Packages of styles; ratios are to "
        "the time of the last style.")] = ",".join(STYLES),
    own: Annotated[bool, Option("--own",
        help="Also time annotated with its own LayerNorm.")] = False,
    peers: Annotated[str, Option(help="Other decoders of the same shape: "
        "transformers, transformers-eager, transformers-one-gelu, "
        "torch-encoder, x-transformers; none; or all that are installed. "
        "With generate: only transformers.")] = "all",
    peer: Annotated[list[str] | None, Option(metavar="MODULE:FACTORY",
        help="Also time your own model; may be repeated. The factory takes a "
        "GPTConfig or nothing; the model turns (batch, time) ids into (batch, "
        "time, vocabulary) scores. With generate, the model decodes with a "
        "cache if it implements the kit's protocol, is from transformers, or "
        "--cache is given; otherwise it reads the whole text for each "
        "token.")] = None,
    cache: Annotated[Text, Option(metavar="MAKER", help="With generate: a "
        "function that makes an empty cache for --peer, such as "
        "my_pkg:make_cache.")] = None,
    only_peers: Annotated[bool, Option("--only-peers", help="Time only the "
        "models of --peer; ratios are to the time of the last one.")] = False,
    log_probs: Annotated[bool, Option("--log-probs",
        help="Let every model end in log-softmax.")] = False,
    compile_: Annotated[bool, Option("--compile",
        help="Also time every model compiled.")] = False,
    dtype_name: Annotated[str, Option("--dtype", help="float32, bfloat16 or "
        "float16. Generate accepts several: float32,bfloat16 runs the styles "
        "in each.")] = "float32",
    device_name: Annotated[str, Option("--device",
        help='"cpu", "cuda", "xpu", "mps", ...')] = "cpu",
    threads: Annotated[Size, Option(help="CPU threads. Default, at each size: "
        "1 for a small model, else all cores.")] = None,
    rounds: Annotated[Size, Option(help="Number of rounds; each runs "
        "everything once. Default: 10; with generate: 3; with train-step: "
        "5.")] = None,
    budget: Annotated[float | None, Option(
        help="Seconds at each size after which no new round starts.")] = None,
    until: Annotated[Text, Option(metavar="ERROR", help="Run rounds until "
    "the error of each ratio is below this, such as 1%. Stops after "
    "--rounds, by default 1000, and after --budget, by default 120.")] = None,
    cold: Annotated[bool, Option("--cold", help="Empty the caches before each "
        "run, with generate before each token: a small model then reads its "
        "weights from memory, as between other work.")] = False,
    limits: Annotated[bool, Option("--limits/--no-limits",
        help="Also measure the best speed of this machine.")] = True,
    json_file: Annotated[File, Option("--json", help="Also write all results "
        "to this file. - is the standard output; the tables then go to "
        "stderr.")] = None,
    plot: Annotated[File, Option(help="Draw the times as FILE.svg or "
        "FILE.png; three or more lengths, or numbers of rows, become "
        "lines.")] = None,
    compare: Annotated[File, Option(help="Compare with a file that --json "
        "wrote on this machine: show how each time has changed, and whether "
        "there are enough rounds to be sure. The status is 1 if a model is "
        "certainly slower by more than the tolerance.")] = None,
    tolerance: Annotated[float, Option(
        help="Tolerance of --compare; 0.1 is a tenth.")] = 0.1,
) -> None:  # fmt: skip
    """Measure the speed of both styles, their peers, and the machine's limit.

    Everything runs in turn, in shuffled rounds, on new random tokens. Ratios
    are computed within a round. First, both styles must agree up to rounding,
    and every model must answer the right shape and not see the future. Stop
    other programs first, since they disturb the times.

    The exit status is 0; 1 if --compare found a slower model, or if a check
    or test of --all failed; 2 if the command is wrong.

    gpt-duet bench forward --preset gpt2 --time 64,256,1024 --plot time.svg

    gpt-duet bench forward --peer my_pkg.model:build --json before.json

    gpt-duet bench train-step --device cuda --dtype bfloat16 --compile
    """
    if everything and given_options(call).keys() - WITH_ALL:
        raise ValueError("--all takes only --device and --json")
    error = 0.0 if until is None else _fraction("until", until)
    if budget is None:
        budget = 120 if error else math.inf if kind else 50
    if not budget >= 0:
        raise ValueError(
            f"budget must be a number of at least 0, got {budget}"
        )
    kind = kind or "forward"
    decoding = kind == "generate"
    others = "--time, --own, --log-probs or --compile"
    if decoding and any((time, own, log_probs, compile_)):
        raise ValueError(f"generate takes no {others}")
    if not decoding and (prompt or new):
        others = "--prompt and --new-tokens"
        raise ValueError(f"{others} are for generate, not {kind}")
    if cache and not (decoding and peer):
        raise ValueError("--cache requires generate and --peer")
    if only_peers and (own or not peer):
        raise ValueError("--only-peers requires --peer, and excludes --own")
    if threads is not None:
        whole_number("threads", threads, 1)
    from .machine import dtype_on, keep_freed_memory
    from .output import Output
    from .plan import make_plan
    from .run import run_plan

    keep_freed_memory()
    device = choose_device(device_name)
    files = {"json": json_file, "plot": plot}
    output = Output(device, files, compare, tolerance)
    if everything:
        from .everything import measure_all

        output.prepare("", [])
        every = partial(measure_all, device, keep=output.keep)
        raise typer.Exit(output.take(every))
    if rounds is None:
        rounds = MOST_ROUNDS if error else ROUNDS[kind]
    dtypes = [dtype_on(device, n) for n in _names("dtype", dtype_name)]
    if len(dtypes) > 1 and not decoding:
        raise ValueError(f"{kind} takes one dtype, got {dtype_name!r}")
    known = ["transformers"] if decoding else list(PEERS)
    chosen = known if peers == "all" else _names("peers", peers)
    if only_peers:
        chosen = ["none"]
    if decoding and chosen not in (known, ["none"]):
        words = f"generate has the peer transformers, not {peers!r}"
        raise ValueError(f"{words}; give your own with --peer")
    asked = prompt if decoding else time
    size = preset or "S1"
    if decoding:
        size, batch = preset or "gpt2", batch or "1"
        time, new = prompt or "16", 32 if new is None else new
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    given = {"vocabulary": vocab_size, "time": asked, "prompt": asked}
    open_ = {name for name, size in given.items() if size is None}
    plan = make_plan(
        size,
        _counts("batch", batch),
        _counts("prompt" if decoding else "time", time),
        whole_number("new", new or 0, 1 if decoding else 0),
        sizes | {"vocab_size": vocab_size, "block_size": block_size},
        kind=kind, dtypes=dtypes, device=device, threads=threads,
        rounds=whole_number("rounds", rounds, 1), budget=budget,
        styles=[] if only_peers else _names("styles", styles),
        peers=[p for p in chosen if p != "none"] + (peer or []),
        installed=peers == "all", cache=cache, own=own, log_probs=log_probs,
        compile=compile_, limits=limits, cold=cold, until=error,
        open=frozenset(open_ if only_peers and preset is None else ()),
        shaped=not only_peers,
    )  # fmt: skip
    output.prepare(kind, [plan.setting(*size) for size in plan.sizes])
    raise typer.Exit(output.take(partial(run_plan, plan)))


def main() -> None:
    """Run the command, and let messages show its name."""
    app(prog_name="gpt-duet bench")


def _names(option: str, text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if "" in names or len({*names}) < len(names):
        raise ValueError(f"{option} has an empty or repeated name: {text!r}")
    return names


def _fraction(option: str, text: str) -> float:
    """Return the number in "0.01" or "1%", or raise ValueError."""
    try:
        value = float(text.removesuffix("%")) / (100 if "%" in text else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ValueError(f"{option} must be a share like 1%, got {text!r}")
    return value


def _counts(option: str, text: str | None) -> list[int]:
    numbers: list[int | str] = [
        int(name) if name.lstrip("-").isdecimal() else name
        for name in ([] if text is None else _names(option, text))
    ]
    return [whole_number(option, n, 1, 2**31 - 1) for n in numbers]
