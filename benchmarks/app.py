"""The command: python -m benchmarks, or gpt-duet bench."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live

from shared.cli import options
from shared.validation import (
    choose_device,
    require_different,
    require_parent,
)

from .chart import draw, eager_forward, require_picture
from .competitors import STYLES
from .forward import Plan, Tell, measure_forward
from .generate import generate_setting, measure_generate
from .goals import judge, measure_goals
from .invariants import measure_invariants
from .memory import keep_freed_memory
from .peers import PEERS
from .results import (
    Results,
    Run,
    Value,
    changes,
    machine_facts,
    read_results,
    renewed,
    require_counterpart,
    require_same_machine,
    unmatched,
)
from .shapes import GOALS, choose_shape, preset_sizes
from .tables import show_changes, show_goals, show_results
from .train_step import measure_train_step

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

BOTH = ",".join(STYLES)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        help="S1 (6 layers, 384 wide, 65 characters, batch 8, time 256), "
        "S2 (GPT-2 124M, batch 1, time 256), S3 (6 layers, 512 wide, "
        "vocabulary 50257, batch 1, time 1024), or one that gpt-duet "
        "compare knows: gpt2, gpt-mini, ...",
    ),
]
Vocab = Annotated[
    int | None, typer.Option("--vocab-size", help="Number of tokens.")
]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch", help="Rows at once; several as 1,8,32. Default: preset's."
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time",
        help="Tokens in a row; several as 64,256,1024: a sweep, from three "
        "on with its growth against the formula's.",
    ),
]
Styles = Annotated[
    str,
    typer.Option(
        "--styles",
        help="Packages of styles, the last one the reference of all ratios.",
    ),
]
Peers = Annotated[
    str,
    typer.Option(
        "--peers",
        help=f"Of {', '.join(PEERS)}; none; or all that are installed.",
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="MODULE:FACTORY",
        help="Your own model, too; may be given again. The factory takes a "
        "GPTConfig or nothing; the model turns (batch, time) ids into "
        "(batch, time, vocabulary) scores.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", help="Times that everything runs, in turn."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Of the processor. Default: all cores."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help='"cpu", "cuda", "xpu", "mps", ..., or "auto": the accelerator, '
        "if there is one.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="float32, bfloat16 or float16."),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Run everything through torch.compile, too: styles in one "
        "graph (fullgraph=True), or it is an error.",
    ),
]
Operations = Annotated[
    bool,
    typer.Option("--profile", help="Say where the time of each goes."),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw it: FILE.svg or FILE.png."),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        help="A file that --json wrote on this machine: the ratio of each "
        "time to its old one. Status 1 if a model is slower by more than "
        "the tolerance.",
    ),
]
Tolerance = Annotated[
    float,
    typer.Option("--tolerance", help="Of --compare: 0.1 is a tenth."),
]


@dataclass(frozen=True)
class Outlet:
    """Where results go; what cannot work is refused before any work.

    Attributes:
        json: file to write.
        plot: picture to draw.
        compare: old file.
        tolerance: how much slower is allowed.
        device: where everything runs.
        machine: facts about it, before anything runs.

    Raises:
        ValueError: for a file that cannot be written or read, or old
            results of another version or machine.
    """

    json: Path | None
    plot: Path | None
    compare: Path | None
    tolerance: float
    device: torch.device
    machine: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse early."""
        self.machine.update(machine_facts(self.device))
        for path in (self.json, self.plot):
            require_parent(path)
        require_different(
            {"json": self.json, "plot": self.plot}, compare=self.compare
        )
        require_picture(self.plot)
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(
                f"tolerance must be a number from 0, got {self.tolerance}"
            )
        if self.compare is not None:
            old = read_results(self.compare)
            require_same_machine(old.machine, self.machine)

    def expect(self, *planned: Run) -> None:
        """Refuse old results that what is planned cannot be compared to.

        Args:
            *planned: runs with as much of their setting as is known.

        Raises:
            ValueError: naming what differs.
        """
        if self.compare is not None:
            require_counterpart(read_results(self.compare), planned)

    def put(self, runs: list[Run], judged: bool = False) -> None:
        """Write, print, draw and compare.

        What was measured is written before anything else can fail, and
        printed where it could not be written.

        Args:
            runs: what was measured.
            judged: print the table of goals, too.

        Raises:
            typer.Exit: with status 1 where something became too slow.
        """
        results = Results(self.machine, runs)
        console = _console()
        try:
            if self.json is not None:
                results.save(self.json)
        finally:
            if judged:
                console.print(show_goals([judge(results)], ["measured"]))
            console.print(show_results(results))
        if self.plot is not None:
            draw(results, self.plot)
        if self.compare is not None:
            old = read_results(self.compare)
            found = changes(old, results)
            told = unmatched(old, results)
            told += renewed(old.machine, self.machine)
            console.print(show_changes(found, self.tolerance, told))
            if any(change.slower(self.tolerance) for change in found):
                raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def benchmarks(context: typer.Context) -> None:
    """How fast a GPT is here: both styles, their peers, the machine's limit.

    Without a subcommand: forward, at its defaults, in under two minutes on
    two cores: after 50 seconds no further round starts.

    Everything runs in turn, round by round, in a shuffled order, on fresh
    random tokens; the table has medians and quartiles over the rounds. The
    first run (warming up, compiling) is told apart. A ratio is the median
    over the rounds of a time over mingpt_style's time in the same round:
    above 1, mingpt_style is faster. Before anything is timed, both styles
    must agree to rounding on the same weights, and every peer must answer
    the right shape without seeing the future.

    Every row scores all positions: it gives logits, but for annotated, whose
    head ends in log-softmax (the table says which; --log-probs lets all end
    in it).

    The limit is measured in the same rounds: "matmul" is a product of two
    1536 x 1536 matrices in the same dtype (8192 x 8192 on an accelerator),
    "copy" a copy of 128 MiB. "of limit" is the time that a row's operations
    take at the rate of the first, or its least bytes (every weight read
    once, all scores written once) at that of the second, whichever is
    longer, over its own time. "of own" is the same against "own matmuls":
    the model's own products alone, one after another.

    Operations are 2BT(12LD^2 + VD) + 4LBT^2D, checked against torch's
    counter. Peak memory is beyond the weights. The process keeps what memory
    it frees (with glibc): else some passes pay for fresh pages, up to a third
    of their time, for no reason but who ran before.

    Ends with status 0; 1 if --compare found something slower; 2 if the call
    was wrong. Other programs on the machine disturb: end them first.

    python -m benchmarks forward --preset gpt2 --time 64,256,1024

    python -m benchmarks forward --peer my_pkg.model:build --compile

    python -m benchmarks forward --json before.json

    python -m benchmarks forward --compare before.json --tolerance 0.05

    python -m benchmarks forward --device auto --dtype bfloat16 --preset gpt2
    """
    if context.invoked_subcommand is None:
        forward(budget=50)


@app.command()
def forward(
    preset: Preset = "S1",
    batch: Batch = None,
    time: Time = None,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    vocab_size: Vocab = None,
    block_size: options.BlockSize = None,
    styles: Styles = BOTH,
    own: Annotated[
        bool,
        typer.Option(
            "--own",
            help="Also each style with its school's own parts: annotated "
            "with its own LayerNorm.",
        ),
    ] = False,
    peers: Peers = "all",
    peer: Peer = None,
    log_probs: Annotated[
        bool,
        typer.Option("--log-probs", help="Let every row end in log-softmax."),
    ] = False,
    compile_: Compile = False,
    operations: Operations = False,
    rounds: Rounds = 10,
    budget: Annotated[
        float,
        typer.Option(
            help="Seconds after which no further round starts, at each batch "
            "and time."
        ),
    ] = math.inf,
    threads: Threads = None,
    device_name: Device = "cpu",
    dtype_name: Dtype = "float32",
    json_file: options.Json = None,
    plot: Plot = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
) -> None:
    """Time the forward pass: the scores of every position."""
    device = _prepare(device_name, threads)
    outlet = Outlet(json_file, plot, compare, tolerance, device)
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    sizes |= {"vocab_size": vocab_size, "block_size": block_size}
    plan = Plan(
        choose_shape(
            preset, _counts("batch", batch), _counts("time", time), sizes
        ),
        _dtype(dtype_name, device),
        device,
        _at_least_one("rounds", rounds),
        _names("styles", styles),
        **_peers(peers, peer),
        own=own,
        log_probs=log_probs,
        compile=compile_,
        operations=operations,
        budget=budget,
    )
    outlet.expect(*_forwards(plan))
    with _telling() as tell:
        runs = measure_forward(plan, tell)
    outlet.put(runs)


@app.command()
def generate(
    preset: Preset = "gpt2",
    batch: Annotated[int, typer.Option(help="Rows at once.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens to begin with.")] = 16,
    new: Annotated[int, typer.Option(help="Tokens to append.")] = 32,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    vocab_size: Vocab = None,
    block_size: options.BlockSize = None,
    styles: Styles = BOTH,
    peers: Annotated[
        str, typer.Option("--peers", help="transformers, none, or all.")
    ] = "all",
    rounds: Rounds = 3,
    threads: Threads = None,
    device_name: Device = "cpu",
    dtype_name: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Of the weights; several as float32,bfloat16: then also "
            "the styles in the others.",
        ),
    ] = "float32",
    json_file: options.Json = None,
    plot: Plot = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
) -> None:
    """Time greedy decoding, and one token early and late in a text.

    "of limit" is the time that a row's least bytes take at the rate of
    "read", a sum of 128 MiB, over its own time.
    """
    device = _prepare(device_name, threads)
    outlet = Outlet(json_file, plot, compare, tolerance, device)
    for name, count in (("batch", batch), ("prompt", prompt), ("new", new)):
        _at_least_one(name, count)
    chosen = _names("peers", peers)
    if chosen not in (("transformers",), ("none",), ("all",)):
        raise ValueError(
            f"peers must be transformers, none or all, got {peers!r}"
        )
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    sizes |= {"vocab_size": vocab_size, "block_size": block_size}
    # a preset that leaves its block open gets room for the whole text
    times = () if "block_size" in preset_sizes(preset) else (prompt + new,)
    shape = choose_shape(preset, (batch,), times, sizes)
    dtypes = [_dtype(n, device) for n in _names("dtype", dtype_name)]
    setting = generate_setting(shape, prompt, new, dtypes[0], device)
    outlet.expect(Run("generate", setting))
    with _telling() as tell:
        run = measure_generate(
            shape,
            dtypes=dtypes,
            device=device,
            prompt=prompt,
            new=new,
            rounds=_at_least_one("rounds", rounds),
            styles=_names("styles", styles),
            transformers=chosen != ("none",),
            installed=chosen == ("all",),
            tell=tell,
        )
    outlet.put([run])


@app.command("train-step")
def train_step(
    preset: Preset = "S1",
    batch: Annotated[
        int | None, typer.Option(help="Rows. Default: the preset's.")
    ] = None,
    time: Annotated[
        int | None, typer.Option(help="Tokens in a row. Default: preset's.")
    ] = None,
    n_layer: options.NLayer = None,
    n_head: options.NHead = None,
    n_embd: options.NEmbd = None,
    vocab_size: Vocab = None,
    block_size: options.BlockSize = None,
    styles: Styles = BOTH,
    peers: Peers = "all",
    peer: Peer = None,
    compile_: Compile = False,
    operations: Operations = False,
    rounds: Rounds = 5,
    threads: Threads = None,
    device_name: Device = "cpu",
    dtype_name: Dtype = "float32",
    json_file: options.Json = None,
    plot: Plot = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
) -> None:
    """Time one step of training: loss, gradients, update by AdamW."""
    device = _prepare(device_name, threads)
    outlet = Outlet(json_file, plot, compare, tolerance, device)
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    sizes |= {"vocab_size": vocab_size, "block_size": block_size}
    batches = () if batch is None else (_at_least_one("batch", batch),)
    times = () if time is None else (_at_least_one("time", time),)
    plan = Plan(
        choose_shape(preset, batches, times, sizes),
        _dtype(dtype_name, device),
        device,
        _at_least_one("rounds", rounds),
        _names("styles", styles),
        **_peers(peers, peer),
        compile=compile_,
        operations=operations,
    )
    facts = plan.shape.facts(
        plan.shape.batches[0], plan.shape.times[0], plan.dtype, device
    )
    outlet.expect(Run("train-step", facts | {"compile": compile_}))
    with _telling() as tell:
        run = measure_train_step(plan, tell)
    outlet.put([run])


@app.command()
def invariants(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Styles, or MODULE:FACTORY. Default: both styles.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Number of tokens of the small models.")
    ] = 65,
    block_size: Annotated[
        int, typer.Option(help="Longest text that is tried.")
    ] = 64,
    rounds: Rounds = 1,
    threads: Threads = None,
    device_name: Device = "cpu",
    json_file: options.Json = None,
    plot: Plot = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
) -> None:
    """Time the checks of gpt-duet check, and say which take longest."""
    device = _prepare(device_name, threads)
    outlet = Outlet(json_file, plot, compare, tolerance, device)
    for name, size in (("vocab-size", vocab_size), ("block-size", block_size)):
        _at_least_one(name, size)
    sizes: dict[str, Value] = {"vocabulary": vocab_size, "block": block_size}
    outlet.expect(Run("invariants", sizes | _where(device)))
    with _telling() as tell:
        run = measure_invariants(
            models or STYLES,
            vocab_size=vocab_size,
            block_size=block_size,
            rounds=_at_least_one("rounds", rounds),
            device=device,
            tell=tell,
        )
    outlet.put([run])


@app.command("all")
def all_(
    preset: Preset = "S1",
    rounds: Annotated[
        int | None,
        typer.Option(help="Times that everything runs. Default: each its own"),
    ] = None,
    threads: Threads = None,
    device_name: Device = "cpu",
    dtype_name: Dtype = "float32",
    json_file: options.Json = None,
    plot: Plot = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
) -> None:
    """Run forward, generate, train-step and invariants, one after another."""
    device = _prepare(device_name, threads)
    outlet = Outlet(json_file, plot, compare, tolerance, device)
    dtype = _dtype(dtype_name, device)
    shape = choose_shape(preset)
    given = None if rounds is None else _at_least_one("rounds", rounds)
    plan = Plan(shape, dtype, device, given or 10)
    room = shape.config.block_size
    if room < 2:
        raise ValueError(f"{preset} has {room} positions: at least 2 needed")
    new = min(32, room // 2)
    # the other three are of the same preset, dtype and device
    outlet.expect(*_forwards(plan), Run("invariants", _where(device)))
    with _telling() as tell:
        runs = measure_forward(plan, tell)
        runs.append(
            measure_generate(
                replace(shape, batches=(1,)),
                dtypes=(dtype,),
                device=device,
                prompt=min(16, room - new),
                new=new,
                rounds=given or 3,
                tell=tell,
            )
        )
        step = replace(plan, rounds=given or 5)
        runs.append(measure_train_step(step, tell))
        runs.append(
            measure_invariants(rounds=given or 1, device=device, tell=tell)
        )
    outlet.put(runs)


@app.command()
def goals(
    rounds: Rounds = 10,
    threads: Threads = None,
    device_name: Device = "auto",
    json_file: options.Json = None,
    plot: Plot = None,
    compare: Compare = None,
    tolerance: Tolerance = 0.1,
) -> None:
    """Measure this project's goals, and say which are reached.

    Takes some 20 minutes on two cores at --rounds 10, a good part of them
    for compiling, which fewer rounds do not shorten: S1, S2 and S3 with all
    peers, compiled and not; growth with the text; construction; imports;
    decoding; and on an accelerator, where there is one, GPT-2 124M in
    bfloat16. A part that fails is told with its reason, and the others go
    on.
    """
    device = _prepare(device_name, threads)
    outlet = Outlet(json_file, plot, compare, tolerance, device)
    rounds = _at_least_one("rounds", rounds)
    plans = [Plan(choose_shape(name)) for name in GOALS]
    outlet.expect(*(run for plan in plans for run in _forwards(plan)))
    with _telling() as tell:
        runs = measure_goals(rounds, device, tell)
    outlet.put(runs, judged=True)


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files that --json wrote.", show_default=False),
    ],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As a table for a README.")
    ] = False,
    plot: Plot = None,
) -> None:
    """Print the table of goals from files, and draw the first of them.

    Nothing is measured. The picture has the eager forward passes; the
    README's is made so.
    """
    require_parent(plot)
    require_picture(plot)
    kept = [read_results(path) for path in files]
    names = [path.stem for path in files]
    shown = show_goals([judge(results) for results in kept], names, markdown)
    _console(soft_wrap=markdown).print(shown)
    if plot is not None:
        draw(eager_forward(kept[0]), plot)


def _prepare(device_name: str, threads: int | None) -> torch.device:
    """Set threads and memory up; return the device, if it is there."""
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(_at_least_one("threads", threads))
    if device_name != "auto":
        return choose_device(device_name)
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        return choose_device(str(found))
    return torch.device("cpu")


def _console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that prints every character as it stands."""
    return Console(
        stderr=stderr,
        soft_wrap=soft_wrap,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _where(device: torch.device) -> dict[str, Value]:
    return {"device": str(device), "threads": torch.get_num_threads()}


def _forwards(plan: Plan) -> list[Run]:
    """What is known of a plan's runs before they are measured."""
    return [
        Run("forward", plan.setting(batch, time))
        for batch, time in product(plan.shape.batches, plan.shape.times)
    ]


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name, if the device multiplies in it."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(DTYPES)}, got {name!r}")
    try:
        x = torch.ones(4, 4, dtype=DTYPES[name], device=device)
        torch.mm(x, x).sum().item()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{device} has no {name} ({reason})") from None
    return DTYPES[name]


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ValueError(f"{option} has an empty name: {text!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{option} has a name twice: {text!r}")
    return names


def _counts(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{option} must be whole numbers, as 1,8,32; got {text!r}"
        ) from None
    if len(set(counts)) < len(counts):
        raise ValueError(f"{option} has a number twice: {text!r}")
    return tuple(_at_least_one(option, count) for count in counts)


def _at_least_one(option: str, count: int | None) -> int:
    if count is None or count < 1:
        raise ValueError(f"{option} must be at least 1, got {count}")
    return count


def _peers(chosen: str, own: list[str] | None) -> dict[str, Any]:
    """Return a plan's peers: those that are asked for must be there."""
    names = _names("peers", chosen)
    everything = names == ("all",)
    if everything:
        names = tuple(PEERS)
    elif names == ("none",):
        names = ()
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(
            f"no peer {unknown[0]!r}; there is {', '.join(PEERS)}; your own "
            "goes to --peer"
        )
    return {"peers": (*names, *(own or ())), "installed": everything}


@contextmanager
def _telling() -> Iterator[Tell]:
    """Show on a terminal what is going on, in one line that goes away.

    Without an animation: its thread would take time from what is measured.
    """
    console = _console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(text, refresh=console.is_terminal)
