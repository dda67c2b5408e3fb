"""The benchmarks as a user calls them; no real time decides a test."""

import json
import sys
import threading
from functools import partial

import pytest
import torch

from benchmarks import app as commands
from benchmarks import forward as forwarding
from benchmarks import goals
from benchmarks.app import app
from benchmarks.results import Run, read_results
from benchmarks.shapes import choose_shape
from benchmarks.timing import Timing
from shared.cli import app as gpt_duet
from shared.cli import run

TOY = ["--preset", "gpt-nano", "--vocab-size", 11]
SMALL = [*TOY, "--batch", 1, "--time", 4]
FAST = [*SMALL, "--rounds", 2]
NOTHING = Run("nothing", {}, not_run="takes long")


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """A machine that is measured in no time, and threads put back."""
    monkeypatch.setattr("benchmarks.limits.square_product.__defaults__", (16,))
    monkeypatch.setattr("benchmarks.limits.big_copy.__defaults__", (2**12,))
    monkeypatch.setattr("benchmarks.limits.big_read.__defaults__", (2**13,))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(run_command):
    def bench(*arguments, command=app):
        return run_command(partial(run, command), "benchmarks", *arguments)

    return bench


def rows_of(path):
    return {
        row.name: row for one in read_results(path).runs for row in one.rows
    }


def test_forward_with_everything(bench, tmp_path):
    pytest.importorskip("x_transformers")
    file, plot = tmp_path / "found.json", tmp_path / "found.svg"
    status, out, err = bench(
        "forward", *FAST, "--own", "--profile", "--threads", 1,
        "--json", file, "--plot", plot,
    )  # fmt: skip
    assert (status, err) == (0, "")
    for word in ("threads 1", "tokens/s", "the styles agree", "of limit"):
        assert word in out
    rows = rows_of(file)
    assert [*rows] == [
        "annotated", "mingpt_style", "annotated-own",
        "transformers", "transformers-eager", "transformers-one-gelu",
        "torch-encoder", "x-transformers", "matmul 1536", "own matmuls",
        "copy",
    ]  # fmt: skip
    assert all(len(row.seconds) == 2 for row in rows.values())
    assert {row.flops for name, row in rows.items() if not row.limit} == {
        rows["own matmuls"].flops
    }
    for name in [*rows][:8]:
        assert rows[name].peak_bytes > 4 * 4 * 11
        assert rows[name].first_seconds > 0
        assert rows[name].operations
        assert name in out
    assert plot.read_text().startswith("<?xml")


def test_a_sweep_ends_in_its_growth(bench, tmp_path):
    file = tmp_path / "found.json"
    status, out, err = bench(
        "forward", *TOY, "--batch", "1,2", "--time", "2,4,8",
        "--rounds", 1, "--peers", "none", "--log-probs", "--json", file,
    )  # fmt: skip
    assert (status, err) == (0, "")
    found = read_results(file).runs
    asked = [(r.setting["batch"], r.setting["time"]) for r in found]
    assert asked == [(b, t) for b in (1, 2) for t in (2, 4, 8)]
    assert {row.gives for r in found for row in r.models} == {"log-probs"}
    assert "mingpt_style, batch 2, 2 to 8 tokens" in out


def test_without_a_subcommand_forward_is_run(bench, monkeypatch):
    plans = []

    def measure(plan, tell):
        plans.append(plan)
        return []

    monkeypatch.setattr(commands, "measure_forward", measure)
    assert bench()[0] == 0
    (plan,) = plans
    assert plan.shape == choose_shape("S1")
    assert plan.styles == ("annotated", "mingpt_style")
    assert (plan.dtype, plan.device.type) == (torch.float32, "cpu")
    assert plan.budget == 50


def test_generate_at_toy_size(bench, tmp_path):
    file = tmp_path / "found.json"
    status, out, err = bench(
        "generate", *TOY, "--prompt", 3, "--new", 2, "--rounds", 1,
        "--block-size", 124, "--dtype", "float32,bfloat16", "--json", file,
    )  # fmt: skip
    assert (status, err) == (0, "")
    rows = rows_of(file)
    assert [*rows] == [
        "annotated", "mingpt_style", "mingpt_style @100",
        "annotated bfloat16", "mingpt_style bfloat16",
        "mingpt_style bfloat16 @100", "transformers",
        "copy", "read",
    ]  # fmt: skip
    assert rows["mingpt_style"].tokens == 2
    assert (
        rows["mingpt_style"].moved == 2 * rows["mingpt_style bfloat16"].moved
    )
    assert "with a cache" in out
    for name in ("annotated", "mingpt_style @100", "transformers"):
        assert rows[name].peak_bytes > 4 * 11  # the scores at least
    (found,) = read_results(file).runs
    assert (found.setting["prompt"], found.setting["new"]) == (3, 2)
    assert "time" not in found.setting


def test_train_step_at_toy_size(bench, tmp_path):
    file = tmp_path / "found.json"
    status, _, err = bench("train-step", *FAST, "--json", file)
    assert (status, err) == (0, "")
    rows = rows_of(file)
    assert {"annotated", "mingpt_style", "transformers"} <= {*rows}
    whole = choose_shape("gpt-nano", (1,), (4,), {"vocab_size": 11})
    assert rows["annotated"].flops == 3 * forwarding.forward_flops(
        whole.config, 1, 4
    )
    # the gradients at least
    assert (
        rows["mingpt_style"].peak_bytes > 4 * rows["mingpt_style"].parameters
    )


@pytest.mark.unhooked
def test_invariants_at_toy_size(bench, tmp_path):
    file = tmp_path / "found.json"
    status, out, err = bench(
        "invariants", "mingpt_style", "--block-size", 4, "--json", file
    )
    assert (status, err) == (0, "")
    row = rows_of(file)["mingpt_style"]
    assert len(row.operations) == 5
    assert "checks" in out


def test_all_is_all(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(
        commands.choose_shape.__globals__["GOALS"],
        "S1",
        ({"vocab_size": 11, "block_size": 8, "n_layer": 1, "n_head": 1,
          "n_embd": 4}, 1, 4),
    )  # fmt: skip
    monkeypatch.setattr(commands, "measure_invariants", lambda **_: NOTHING)
    file = tmp_path / "found.json"
    status, _, err = bench("all", "--rounds", 1, "--json", file)
    assert (status, err) == (0, "")
    assert [r.what for r in read_results(file).runs] == [
        "forward", "generate", "train-step", "nothing"
    ]  # fmt: skip


@pytest.fixture
def toy_goals(monkeypatch):
    toy = {"n_layer": 1, "n_head": 1, "n_embd": 4, "vocab_size": 11}

    def shape(name, batches=(1,), times=(4,)):
        return choose_shape(
            "gpt-nano", batches, times, toy | {"block_size": 1024}
        )

    monkeypatch.setattr(goals, "choose_shape", shape)
    monkeypatch.setattr(goals, "TIMES", (2, 4, 8))
    monkeypatch.setattr(goals, "GOALS", {"S1": None})


def test_goals_are_measured_and_judged(
    bench, tmp_path, monkeypatch, toy_goals
):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    for long in ("measure_construction", "measure_imports"):
        monkeypatch.setattr(goals, long, lambda rounds, tell: NOTHING)
    file = tmp_path / "found.json"
    status, out, err = bench(
        "goals", "--rounds", 1, "--device", "cpu", "--json", file
    )
    assert (status, err) == (0, "")
    for word in ("fastest peer, S1", "GPU", "not run: there is no accel"):
        assert word in out
    status, again, err = bench("report", file, file, "--markdown")
    assert (status, err) == (0, "")
    assert again.startswith("| what | goal | found | found |")


def test_what_does_not_compile_is_told_among_the_goals(
    bench, monkeypatch, toy_goals
):
    def compile_(run, **_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(
        torch, "compile", lambda run, **_: lambda tokens: compile_(run)
    )
    nothing = [NOTHING]
    monkeypatch.setattr(goals, "measure_gpu", lambda *_: nothing)
    for long in ("construction", "imports", "generate"):
        monkeypatch.setattr(goals, f"measure_{long}", lambda *_, **__: NOTHING)
    status, out, err = bench("goals", "--rounds", 1, "--device", "cpu")
    assert (status, err) == (0, "")
    assert "annotated compiled cannot be run" in " ".join(out.split())


@pytest.mark.slow
def test_construction_and_imports_are_measured():
    built = goals.measure_construction(1, preset="openai-gpt")
    imported = goals.measure_imports(1)
    for found in (built, imported):
        assert [row.name for row in found.rows] == [
            "annotated", "mingpt_style"
        ]  # fmt: skip
        assert all(row.timing.median > 0 for row in found.rows)


@pytest.mark.slow
def test_styles_compile_in_one_graph(bench, tmp_path):
    file = tmp_path / "found.json"
    status, _, err = bench(
        "forward", *FAST, "--peers", "transformers", "--compile",
        "--json", file,
    )  # fmt: skip
    assert (status, err) == (0, "")
    compiled = [name for name in rows_of(file) if "compiled" in name]
    assert compiled == [
        "annotated compiled", "mingpt_style compiled", "transformers compiled"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", ["python -m benchmarks", "gpt-duet bench"])
def test_both_names_are_one_program(command, tmp_path):
    import subprocess

    module = "benchmarks" if "benchmarks" in command else "shared.cli"
    words = [] if module == "benchmarks" else ["bench"]
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "forward", *map(str, FAST),
         "--peers", "none", "--json", str(tmp_path / "found.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "mingpt_style" in done.stdout
    assert {*rows_of(tmp_path / "found.json")} >= {"annotated", "copy"}


@pytest.mark.unhooked  # typer's context is not of the class it names
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["forward", "--json", "x", "--help"],
        ["-h"],
        ["all", "--time", "-3"],
    ],
)
def test_gpt_duet_bench_hands_its_words_on(bench, monkeypatch, words):
    seen = []
    monkeypatch.setattr(
        commands, "app", lambda args, prog_name: seen.append(args)
    )
    status, _, err = bench("bench", *words, command=gpt_duet)
    assert (status, err) == (0, "")
    assert seen == [words]


def test_what_is_told_meanwhile_takes_no_thread(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    before = threading.active_count()
    with commands._telling() as tell:
        tell("round 1 of 2")
        assert threading.active_count() == before
    assert "round 1 of 2" in capsys.readouterr().err


def test_the_manual(bench):
    status, out, _ = bench("--help")
    assert status == 0
    words = ["forward", "generate", "train-step", "invariants", "all",
             "goals", "report", "median", "quartiles", "2BT(12LD^2 + VD)",
             "python -m benchmarks forward --json before.json"]  # fmt: skip
    assert all(word in out for word in words)


# Someone's own model

PEER = """
import torch

class Bigram(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, tokens):
        return self.table(tokens)

def build(config):
    return Bigram(config)

def bare():
    return lambda tokens: torch.nn.functional.one_hot(tokens, 11).float()

def ahead(config):
    table = torch.nn.functional.one_hot
    return lambda tokens: table(tokens, config.vocab_size).float().flip(1)

def flat(config):
    return lambda tokens: tokens.float()

def broken(config):
    raise RuntimeError("no weights")

def number():
    return 3
"""


@pytest.fixture
def own_peer(tmp_path, monkeypatch):
    (tmp_path / "bigram.py").write_text(PEER)
    monkeypatch.chdir(tmp_path)


def test_anyones_model_runs_beside_ours(bench, own_peer):
    status, _, err = bench(
        "forward", *FAST, "--peers", "none", "--json", "found.json",
        "--peer", "bigram.py:build", "--peer", "bigram.py:bare",
    )  # fmt: skip
    assert (status, err) == (0, "")
    rows = rows_of(commands.Path("found.json"))
    assert rows["bigram.py:build"].parameters == 121
    assert "parameters unknown" in rows["bigram.py:bare"].note
    assert "sees 0% of these operations" in rows["bigram.py:bare"].note


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("nowhere:build", ["no module 'nowhere'"]),
        ("bigram.py:absent", ["bigram.py has no 'absent'"]),
        ("bigram", ["no peer 'bigram'", "transformers"]),
        ("bigram.py:ahead", ["sees the future"]),
        ("bigram.py:flat", ["answers (1, 4) where (1, 4, 11)"]),
        ("bigram.py:broken", ["cannot be built", "no weights"]),
        ("bigram.py:number", ["builds int"]),
    ],
)
def test_a_peer_that_cannot_be_timed_is_refused(bench, own_peer, peer, words):
    status, out, err = bench(
        "forward", *FAST, "--peers", "none", "--peer", peer
    )
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_a_peer_that_is_not_installed_is_said_so(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, out, err = bench("forward", *FAST)
    assert (status, err) == (0, "")
    assert "transformers was not run" in out
    status, out, err = bench("forward", *FAST, "--peers", "transformers")
    assert (status, out) == (2, "")
    assert "transformers was not run" in err
    status, out, err = bench(
        "generate", *TOY, "--new", 1, "--prompt", 1, "--rounds", 1
    )
    assert (status, err) == (0, "")
    assert "transformers was not run" in out


# Old results


@pytest.fixture
def by_the_clock(monkeypatch):
    """Times as told: what was found does not depend on the machine."""
    seconds = [1.0]

    def interleave(runs, rounds, before, budget):
        return [Timing(name, seconds * rounds) for name in runs]

    monkeypatch.setattr(forwarding, "interleave", interleave)
    return seconds


def test_old_results_are_compared(bench, tmp_path, by_the_clock):
    old = tmp_path / "old.json"
    words = ["forward", *FAST, "--peers", "none"]
    assert bench(*words, "--json", old)[0] == 0
    status, out, err = bench(*words, "--compare", old)
    assert (status, err) == (0, "")
    assert "0 of 5 slower by more than 10%" in out
    by_the_clock[0] = 1.2
    status, out, err = bench(*words, "--compare", old)
    assert (status, err) == (1, "")
    assert "2 of 5 slower by more than 10%" in out
    assert "1.200" in out
    assert bench(*words, "--compare", old, "--tolerance", 0.25)[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 0}, ["version 0", "version 2"]),
        ({"machine": {"processor": "Z80"}}, ["another machine", "'Z80'"]),
        ({"runs": []}, ["nothing to compare"]),
    ],
)
def test_old_results_that_say_nothing_about_now(
    bench, tmp_path, by_the_clock, change, words
):
    old = tmp_path / "old.json"
    command = ["forward", *FAST, "--peers", "none"]
    assert bench(*command, "--json", old)[0] == 0
    old.write_text(json.dumps(json.loads(old.read_text()) | change))
    status, _, err = bench(*command, "--compare", old)
    assert status == 2
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


# Mistakes


def test_what_differs_is_not_timed(bench, monkeypatch):
    import annotated

    whole = annotated.from_gpt2
    monkeypatch.setattr(
        annotated,
        "from_gpt2",
        lambda state, config: whole(
            state | {"ln_f.bias": state["ln_f.bias"] + 1}, config
        ),
    )
    status, out, err = bench("forward", *FAST)
    assert (status, out) == (2, "")
    assert "the styles differ by" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["forward", "--batch", "0"], ["batch", "at least 1", "0"]),
        (["forward", "--time", "-3"], ["time", "at least 1", "-3"]),
        (["forward", "--time", "8,x"], ["time", "'8,x'"]),
        (["forward", "--time", "8,8"], ["time", "twice"]),
        (["forward", "--rounds", "0"], ["rounds", "at least 1", "0"]),
        (["forward", "--threads", "0"], ["threads", "at least 1", "0"]),
        (["forward", "--preset", "huge"], ["'huge'", "S1", "gpt2"]),
        (["forward", "--preset", "gpt2", "--time", "2048"], ["2048", "1024"]),
        (["forward", "--preset", "S1", "--time", "257"], ["257", "256"]),
        (["forward", "--n-head", "5"], ["n_head=5", "n_embd=384"]),
        (["forward", "--device", "toaster"], ["'toaster'"]),
        (["forward", "--device", "meta"], ["'meta'"]),
        (["forward", "--dtype", "float8"], ["'float8'", "bfloat16"]),
        (["forward", "--styles", "annotated,"], ["styles", "empty"]),
        (["forward", "--styles", "nowhere"], ["no style 'nowhere'"]),
        (["forward", "--peers", "keras"], ["no peer 'keras'", "--peer"]),
        (["forward", "--plot", "a.gif"], [".svg or .png", "a.gif"]),
        (["forward", "--plot", "no/where.svg"], ["no folder"]),
        (["forward", "--json", "no/where.json"], ["no folder"]),
        (["forward", "--json", "a.svg", "--plot", "a.svg"], ["one file"]),
        (["forward", "--compare", "absent.json"], ["absent.json"]),
        (["forward", "--tolerance", "-1"], ["tolerance", "-1"]),
        (["forward", "--tolerance", "nan"], ["tolerance", "nan"]),
        (["generate", "--new", "0"], ["new", "at least 1"]),
        (["generate", "--new", "1020"], ["1020", "1024"]),
        (["generate", "--peers", "keras"], ["transformers", "'keras'"]),
        (["generate", "--dtype", "float32,int8"], ["'int8'"]),
        (["train-step", "--batch", "0"], ["batch", "at least 1"]),
        (["invariants", "--block-size", "0"], ["block-size", "at least 1"]),
        (["invariants", "nowhere"], ["no module 'nowhere'"]),
        (["report", "absent.json"], ["absent.json", "No such file"]),
    ],
)
def test_a_mistake_ends_in_one_line(
    bench, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not [*tmp_path.iterdir()]


def test_a_dtype_that_the_device_lacks(bench, monkeypatch):
    def mm(a, b):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", mm)
    status, out, err = bench("forward", *FAST, "--dtype", "float16")
    assert (status, out) == (2, "")
    assert "cpu has no float16" in err
    assert err.count("\n") == 1


def test_auto_takes_the_accelerator_where_there_is_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(
        commands.options, "choose_device", lambda n: chosen.append(n)
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda: torch.device("cuda"),
    )
    commands._prepare("auto", None)
    assert chosen == ["cuda"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert commands._prepare("auto", None) == torch.device("cpu")
