"""What is kept of a measurement, judged and compared, whatever happens."""

import io
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks import app as commands
from benchmarks import generate, goals
from benchmarks.app import Outlet, app
from benchmarks.forward import COPY
from benchmarks.generate import READ, READ_ONCE, SomeTokens, measure_generate
from benchmarks.goals import judge, school_cost
from benchmarks.growth import Growth
from benchmarks.peers import ONE_GELU, PEERS
from benchmarks.results import (
    Results,
    Row,
    Run,
    changes,
    machine_facts,
    read_results,
    require_counterpart,
    unmatched,
)
from benchmarks.shapes import choose_shape
from benchmarks.tables import (
    part_of_limit,
    show_changes,
    show_goals,
    show_results,
)
from benchmarks.timing import CPU
from mingpt_style import build_model
from shared.cli import run
from shared.config import GPTConfig

FACTS = {"processor": "P", "cores": 2, "accelerator": "none", "system": "S"}
TOY = {"n_layer": 1, "n_head": 1, "n_embd": 4, "vocab_size": 11}


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(run_command):
    return partial(run_command, partial(run, app), "benchmarks")


def printed(shown):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def forward(rows, shape="S1", **setting):
    setting = {"shape": shape, "device": "cpu", "dtype": "float32"} | setting
    rows = [Row(name, [float(s)] * 3) for name, s in rows.items()]
    return Run("forward", setting, rows, reference="mingpt_style")


# Nothing is lost

ODD = "[/usr/bin/c++] [enforce fail at x.cpp:3] :smile:"


def odd_results():
    row = Row(ODD, [1.0], note=ODD, operations={ODD: 1.0})
    rows = [Row("mingpt_style", [1.0]), row]
    return Results(
        {ODD: "P"},
        [
            Run(ODD, {"shape": ODD}, rows, "mingpt_style", notes=[ODD]),
            Run("forward", {}, not_run=ODD),
        ],
    )


def test_brackets_are_printed_as_they_stand():
    old = odd_results()
    text = printed(show_results(old))
    # facts, title, speeds, picture, note of the row, its operations, the
    # run's note, the reason
    assert text.count(ODD) >= 8
    text = printed(show_changes(changes(old, old), 0.1, [ODD]))
    assert text.count(ODD) >= 3
    judged = goals.Goal(ODD, "none", ODD, None)
    text = printed(show_goals([[judged]], [ODD]))
    assert "[/usr/bin/c++]" in text
    assert ":smile:" in text


def test_brackets_reach_the_terminal(tmp_path, capsys):
    outlet = Outlet(None, None, None, 0.1, CPU)
    outlet.put(odd_results().runs, judged=True)
    assert ODD in capsys.readouterr().out
    with commands._telling() as tell:
        tell("[/usr/bin/c++]")


@pytest.mark.parametrize("fails", ["judge", "show_results"])
def test_what_was_measured_is_kept_before_it_is_shown(
    tmp_path, monkeypatch, fails
):
    def fail(_):
        raise RuntimeError("no terminal")

    monkeypatch.setattr(commands, fails, fail)
    path = tmp_path / "a.json"
    outlet = Outlet(path, None, None, 0.1, CPU)
    with pytest.raises(RuntimeError, match="no terminal"):
        outlet.put([forward({"a": 1})], judged=True)
    assert read_results(path).runs[0].row("a")


def test_what_cannot_be_written_is_printed(tmp_path, monkeypatch, capsys):
    def save(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Results, "save", save)
    outlet = Outlet(tmp_path / "a.json", None, None, 0.1, CPU)
    with pytest.raises(OSError, match="no space"):
        outlet.put([forward({"mingpt_style": 1})])
    assert "mingpt_style" in capsys.readouterr().out


FAILURES = [
    (ValueError("the styles\ndiffer"), "the styles differ"),
    (
        subprocess.CalledProcessError(1, [], stderr="Traceback\nNo: annot\n"),
        "status 1: No: annot",
    ),
    (torch.OutOfMemoryError("GPU 0 is full"), "OutOfMemoryError: GPU 0 is"),
    (RuntimeError("[enforce fail] can't allocate memory"), "[enforce fail]"),
    (MemoryError(), "MemoryError"),
]


@pytest.mark.parametrize(("error", "words"), FAILURES)
def test_a_part_of_the_goals_that_fails_stops_no_other(
    monkeypatch, error, words
):
    def fail(*_, **__):
        raise error

    parts = ("forward", "construction", "imports", "generate")
    for part in parts:
        monkeypatch.setattr(goals, f"measure_{part}", fail)
    runs = goals.measure_goals(1, torch.device("meta"))
    whats = ["forward"] * 7 + ["construction", "import", "generate"]
    assert [r.what for r in runs] == [*whats, "forward"]
    for found in runs:
        assert words in found.not_run
        assert "\n" not in found.not_run
        assert not found.rows
    assert {g.reached for g in judge(Results({}, runs))} == {None}
    assert words in " ".join(printed(show_results(Results({}, runs))).split())


# Judgement


def against(absent=(), ours=1.0, theirs=1.2):
    rows = {name: theirs for name in PEERS if name not in absent}
    found = judge(Results({}, [forward({"mingpt_style": ours} | rows)]))
    return {g.what: g for g in found}["mingpt_style, fastest peer, S1"]


def test_the_fastest_peer_is_that_of_all():
    assert against().measured == "1.200 (transformers)"
    assert against().reached
    some = against(absent=["x-transformers", "torch-encoder"])
    assert "without torch-encoder, x-transformers" in some.measured
    assert some.reached is None
    # who is slower than one of them is slower than the fastest of all
    assert against(absent=["x-transformers"], theirs=0.9).reached is False


def test_a_peer_with_another_gelu_is_judged_apart():
    rows = dict.fromkeys(PEERS, 1.2) | {"mingpt_style": 1.0, ONE_GELU: 0.9}
    found = {
        g.what: (g.measured, g.reached)
        for g in judge(Results({}, [forward(rows)]))
    }
    as_it_comes = found["mingpt_style, fastest peer as it comes, S1"]
    assert as_it_comes == ("1.200 (transformers)", True)
    fastest = found["mingpt_style, fastest peer, S1"]
    assert fastest == (f"0.900 ({ONE_GELU})", False)
    alone = forward({"mingpt_style": 1.0, ONE_GELU: 0.9})
    for goal in judge(Results({}, [alone])):
        if "as it comes" in goal.what:
            assert (goal.measured, goal.reached) == ("not run", None)


def test_every_peers_name_is_printed_whole():
    run = forward({"mingpt_style": 1, "torch-encoder": 2})
    judged = judge(Results({}, [run]))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(show_goals([judged], ["measured"]))
    assert "…" not in console.export_text()


def test_a_narrow_miss_does_not_look_level():
    narrow = against(theirs=0.997)
    assert (narrow.measured, narrow.reached) == ("0.997 (transformers)", False)


FLOPS = [64, 137, 310, 770, 2100]


def growth_of(seconds):
    times = [64, 128, 256, 512, 1024]
    return Growth("a", 1, times, FLOPS, list(map(seconds, FLOPS)))


@pytest.mark.parametrize("power", [0.8, 1.0, 1.3])
def test_the_exponent_is_that_of_the_formula(power):
    assert growth_of(lambda f: 3 * f**power).exponent == pytest.approx(power)


def test_overhead_does_not_hide_growth():
    level = growth_of(lambda f: 50 + f)
    assert 0.9 < level.exponent < 1
    steep = growth_of(lambda f: 50 + f**1.1)
    # the endpoints alone, and an unweighted line, would call it level
    assert steep.measured < steep.expected
    assert steep.exponent > 1


def test_growth_is_judged_by_the_fit():
    def judged(seconds):
        g = growth_of(seconds)
        return goals._growth({"a": g}, "a")

    steep = judged(lambda f: 50 + f**1.1)
    assert steep.reached is False
    assert steep.measured.startswith("operations^1.0")
    assert "formula x 32.8" in steep.measured
    # one slow short text makes the endpoints look better, not the fit
    assert judged(lambda f: 50 + f).reached


def test_both_styles_are_judged_on_a_gpu():
    what = [g.what for g in judge(Results({}, [])) if "on the GPU" in g.what]
    assert what == [
        f"{style}{kind} on the GPU, transformers{kind}"
        for kind in ("", " compiled")
        for style in ("annotated", "mingpt_style")
    ]


def test_what_the_schools_norm_costs():
    run = forward(
        {"annotated": 3, "annotated-own": 4, "mingpt_style": 3}
        | dict.fromkeys(PEERS, 5)
    )
    assert school_cost(run, "annotated") == 0.25
    assert school_cost(run, "mingpt_style") is None
    found = {g.what: g for g in judge(Results({}, [run]))}
    told = found["annotated, its school's LayerNorm, S1"]
    assert (told.measured, told.reached) == ("25.0% of the pass", None)
    words = "annotated-own: its school's own parts take 25.0% of the pass"
    assert words in printed(show_results(Results({}, [run])))


# Old results


def test_rows_without_a_counterpart_are_named():
    old = Results(FACTS, [forward({"a": 1, "gone": 1}), forward({}, "S3")])
    new = Results(FACTS, [forward({"a": 1, "b": 1}), forward({"a": 1}, "S2")])
    told = unmatched(old, new)
    assert told[0].startswith("not in the old file: b of forward, shape S1")
    assert told[1].startswith("only in the old file: gone of forward")
    assert "shape S2" in told[2]
    assert "shape was S1, here S2" in told[2]
    assert len(told) == 3
    shown = printed(show_changes(changes(old, new), 0.1, told))
    assert "not in the old file: b of" in shown
    assert "0 of 1 slower" in shown


def test_a_setting_that_comes_twice_is_compared_in_order():
    both = Results(FACTS, [forward({"a": 1, "peer": 1}), forward({"a": 2})])
    found = changes(both, both)
    assert [c.ratio for c in found] == [1, 1, 1]
    assert unmatched(both, both) == []


def test_the_nearest_setting_says_what_differs():
    old = Results(FACTS, [forward({"a": 1}, threads=2, time=8)])
    require_counterpart(old, [forward({}, threads=2)])
    with pytest.raises(ValueError, match="threads was 2, here 16"):
        require_counterpart(old, [forward({}, "S2", threads=9),
                                  forward({}, threads=16)])  # fmt: skip
    with pytest.raises(ValueError, match="no run of generate"):
        require_counterpart(old, [Run("generate", {})])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["forward", "--batch", 3], "batch was 8, here 3"),
        (["forward", "--compile"], "compile was False, here True"),
        (["generate"], "no run of generate"),
        (["train-step"], "no run of train-step"),
        (["invariants"], "no run of invariants"),
        (["all", "--preset", "S2"], "shape was S1, here S2"),
        (["goals", "--threads", 2], "threads was 1, here 2"),
    ],
)
def test_what_cannot_be_compared_is_not_measured(
    bench, tmp_path, monkeypatch, words, told
):
    shape = choose_shape("S1")
    torch.set_num_threads(1)
    setting = shape.facts(8, 256, torch.float32, CPU)
    setting |= {"compile": False, "log_probs": False}
    path = tmp_path / "old.json"
    old = Run("forward", setting, [Row("a", [1.0])])
    Results(machine_facts(CPU), [old]).save(path)
    for name in ("forward", "generate", "train_step", "invariants", "goals"):
        monkeypatch.delattr(commands, f"measure_{name}")
    status, out, err = bench(*words, "--device", "cpu", "--compare", path)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def damaged(setting=None, run=None, **row):
    row = {"name": "a", "seconds": [1.0]} | row
    runs = [{"what": "x", "setting": setting or {}, "rows": [row]}]
    runs[0] |= run or {}
    return {"version": 2, "machine": {}, "runs": runs}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (damaged({"batch": [1]}), "'batch' of a setting is [1]"),
        (damaged({"batch": "x"}), "batch is 'x'"),
        (damaged({"time": 1.5}), "time is 1.5"),
        (damaged({"time": True}), "time is True"),
        (damaged({"time": 0}), "time is 0"),
        (damaged({"a": {}}), "'a' of a setting is {}"),
        (damaged({"a": float("nan")}), "'a' of a setting is nan"),
        (damaged(operations=3), "int where names"),
        (damaged(operations={"mm": "half"}), "operation 'mm' of 'a'"),
        (damaged(first_seconds="x"), "first_seconds of 'a' is 'x'"),
        (damaged(seconds=[10**400]), "seconds of 'a'"),
        (damaged(flops=10**400), "flops of 'a' is 1000"),
        (damaged(flops=-1), "flops of 'a' is -1"),
        (damaged(limit="yes"), "limit of 'a' is 'yes'"),
        (damaged(gives=None), "gives of 'a' is None"),
        (damaged(note=["x"]), "note of 'a' is ['x']"),
        (damaged(run={"notes": "text"}), "str where a list"),
        (damaged(run={"notes": [3]}), "a note is 3"),
        (damaged(run={"reference": 3}), "reference is 3"),
        (damaged(run={"not_run": []}), "not_run is []"),
        (damaged(run={"what": 3}), "what is 3"),
        (damaged(run={"setting": []}), "list where names"),
        (
            damaged(run={"rows": [{"name": n, "seconds": [1.0] * len(n)}
                                  for n in ("a", "bb")]}),
            "rows have 1 and 2 rounds",
        ),
        ({"version": 2, "machine": {"cores": []}, "runs": []}, "'cores' of"),
    ],
)  # fmt: skip
def test_a_damaged_file_ends_in_one_line(bench, tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no benchmark") as error:
        read_results(path)
    for told in (str(error.value), bench("report", path)[2]):
        assert words in told
        assert str(path) in told
        assert len(told.strip().splitlines()) == 1


def test_a_number_that_no_reader_takes(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"version": 2' + "0" * 5000 + "}")
    with pytest.raises(ValueError, match="is no JSON") as error:
        read_results(path)
    assert str(path) in str(error.value)


# Decoding


def test_transformers_that_was_asked_for_must_be_there(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, out, err = bench(
        "generate", "--preset", "gpt-nano", "--vocab-size", 11,
        "--new", 1, "--prompt", 1, "--rounds", 1, "--peers", "transformers",
    )  # fmt: skip
    assert (status, out) == (2, "")
    assert "transformers was not run: there is no module" in err


def test_only_models_with_a_cache_are_optimized_for_decoding(monkeypatch):
    optimized = []
    monkeypatch.setattr(
        generate, "optimize_for_decoding", lambda m: optimized.append(type(m))
    )
    for limit in ("big_copy", "big_read"):
        small = (2**13,)
        monkeypatch.setattr(f"benchmarks.limits.{limit}.__defaults__", small)
    shape = choose_shape("gpt-nano", (1,), (4,), TOY)
    found = measure_generate(
        shape, prompt=2, new=2, rounds=1, transformers=False
    )
    names = [kind.__module__.split(".")[0] for kind in optimized]
    assert names == ["mingpt_style"]
    # two tokens' scores, and what is between
    assert all(row.peak_bytes > 4 * 2 * 11 for row in found.models)


def test_several_tokens_are_read_and_told_as_one():
    config = GPTConfig(**TOY, block_size=64, dropout=0.0)
    model, seen = build_model(config).eval(), []
    whole = model.decode

    def decode(tokens, cache):
        seen.append(tokens.size(1))
        return whole(tokens, cache)

    model.decode = decode
    some = SomeTokens(model, 1, 10, CPU)
    some.prepare()
    assert seen == [10]
    assert some.read().shape == (1, 1, 11)
    assert seen == [10] + [1] * READ
    assert generate._each(lambda: 4.0)() == 4.0 / READ
    assert generate._places(1024) == [100, 900]
    assert generate._places(900 + 3 * READ - 1) == [100]


def test_decoding_is_held_against_the_rate_of_reading():
    copy = Row(COPY, [4.0], limit=True, moved=40)  # 10 a second
    read = Row(READ_ONCE, [2.0], limit=True, moved=40)  # 20 a second
    row = Row("a", [4.0], moved=40)
    assert part_of_limit(Run("generate", {}, [copy, read, row]), row) == 0.5
    assert part_of_limit(Run("forward", {}, [copy, row]), row) == 1
