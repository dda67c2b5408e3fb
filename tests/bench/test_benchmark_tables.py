"""Times are summarised, stored and shown; no test here measures a time."""

import io
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from gpt_duet import timing
from gpt_duet.benchmark_results import Results, Row, Run, read_results
from gpt_duet.benchmarks import output
from gpt_duet.benchmarks.chart import draw
from gpt_duet.benchmarks.compare import compare_results
from gpt_duet.benchmarks.machine import machine_facts
from gpt_duet.benchmarks.output import Output
from gpt_duet.benchmarks.plan import CPU
from gpt_duet.benchmarks.tables import (
    disagreements,
    show_changes,
    show_results,
)
from gpt_duet.timing import (
    clock_for,
    interleave,
    percentile,
    quartiles,
    stopwatch,
)

CUDA = torch.device("cuda:1")
FACTS = {"processor": "P", "cores": 2, "torch": "2"}


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch):
    monkeypatch.setattr(output, "load", lambda: 0.5)


def forward(*rows, **setting):
    """Return a run with one row for each (name, seconds) pair."""
    setting = {"shape": "S1", "batch": 1, "time": 8} | setting
    rows = [r if isinstance(r, Row) else Row(r[0], [r[1]]) for r in rows]
    return Run("forward", setting, rows, reference="mingpt_style")


def results(*seconds, facts=FACTS, **setting):
    rows = [
        Row("mingpt_style", list(seconds or (1.0, 1.0, 1.0)), tokens=4),
        Row("matmul", [1.0] * len(seconds or "abc"), limit=True, flops=5),
    ]
    return Results(dict(facts), [forward(*rows, **setting)])


def printed(shown):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


# Times


def test_rounds_are_interleaved_and_shuffled(monkeypatch):
    calls, begun = [], []
    runs = {
        name: lambda name=name: calls.append(name) or float(len(calls))
        for name in ("a", "b", "c")
    }
    found = interleave(runs, rounds=20, before=begun.append)
    rounds = [calls[i : i + 3] for i in range(0, 60, 3)]
    assert begun == [*range(20)]
    assert all(sorted(r) == [*found] == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    for name, seconds in found.items():
        for number, r in enumerate(rounds):
            assert seconds[number] == 3 * number + r.index(name) + 1
    # once the budget is spent, no further round starts
    now = itertools.count()
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(now))
    runs = {"a": lambda: 1.0}
    assert interleave(runs, rounds=9, budget=2.5) == {"a": [1.0] * 3}
    assert interleave(runs, rounds=9, budget=0) == {"a": [1.0]}


def test_quartiles_and_ratios_equal_those_computed_by_hand():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2, 3, 4)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert quartiles([3.0]) == (3, 3, 3)
    assert percentile([*map(float, range(1, 22))], 95) == 20
    assert percentile([3.0], 95) == 3
    assert Row("a", [1.0, 2.0], tokens=6).tokens_per_second == 4
    # one slow round in five changes neither the median nor the ratio
    fast = Row("fast", [1.0, 1.0, 50.0, 1.0, 1.0])
    slow = Row("slow", [2.0, 2.0, 100.0, 2.0, 2.0])
    assert (fast.median, slow.ratio(fast), fast.ratio(slow)) == (1, 2, 0.5)
    # the ratio is the median of the rounds' ratios, not the ratio of medians
    a, b = Row("a", [1.0, 2.0, 4.0]), Row("b", [4.0, 1.0, 2.0])
    assert a.ratio(b) == 2


def test_a_stopwatch_leaves_the_first_run_out(monkeypatch):
    now, ran = 0.0, itertools.count()

    def clock():  # each reading advances the clock
        nonlocal now
        now += 1e-9
        return now

    def work():
        nonlocal now
        now += 7.0 if next(ran) == 0 else 0.5

    monkeypatch.setattr(timing, "clock_for", lambda device: clock)
    assert stopwatch(work, CPU)() == pytest.approx(0.5)
    assert next(ran) == 2

    def quick():  # so short that the stopwatch runs it many times
        nonlocal now
        now += 2e-6

    assert stopwatch(quick, CPU)() == pytest.approx(2e-6, rel=1e-3)


def test_a_clock_waits_for_any_accelerator(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 7.0)
    hpu, mps = torch.device("hpu", 0), torch.device("mps")
    assert [clock_for(d)() for d in (CUDA, hpu, mps, CPU)] == [7.0] * 4
    assert waited == [CUDA, hpu, "mps"]


# Files


def content(version=3, run=None, **row):
    row = {"name": "a", "seconds": [1.0]} | row
    made = {"what": "x", "setting": {}, "rows": [row]} | (run or {})
    return {"version": version, "machine": FACTS, "runs": [made]}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("{", "is not a benchmark: Input data was truncated"),
        (content(version=2), "has version 2, but gpt-duet reads version 3"),
        (content(run={"rows": []}), "length >= 1"),
        (content(seconds=[0]), "`float` > 0.0"),
        (content(colour="red"), "unknown field `colour`"),
        (
            content(run={"rows": [{"name": n, "seconds": [1.0] * len(n)}
                                  for n in ("a", "bb")]}),
            "rows have 1 and 2 rounds",
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_ends_in_one_line(tmp_path, found, words):
    path = tmp_path / "a.json"
    text = found if isinstance(found, str) else json.dumps(found)
    path.write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        read_results(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


# New results compared with old ones


@pytest.mark.parametrize(
    ("now", "tolerance", "slower"),
    [
        ((1.0, 1.0, 1.0), 0.0, False),
        # no verdict, because only one round of three is slow
        ((1.09, 1.09, 9.0), 0.1, False),
        ((1.11, 1.11, 1.11), 0.1, True),
        ((1.0, 1.5, 1.5), 0.1, True),  # the quartiles are 1.25 and 1.5
        ((1.0, 1.0, 1.2, 1.2, 1.2), 0.1, False),  # the lower quartile is 1.0
        ((0.5, 0.5, 0.5), 0.1, False),
        ((2.0, 2.0, 2.0), 1.5, False),
    ],
)
def test_slower_depends_on_median_and_quartiles(now, tolerance, slower):
    # if the old time varied a lot, a slower one proves nothing
    (change, _), _ = compare_results(results(1, 2, 3), results(2, 3, 4))
    assert change.plain.value == 1.5
    assert change.verdict(0.1) != "slower"
    found, notes = compare_results(results(), results(*now, rounds=7))
    assert [c.row.name for c in found] == ["mingpt_style", "matmul"]
    verdicts = [c.verdict(tolerance) == "slower" for c in found]
    assert verdicts == [slower, False]
    assert notes == []
    verdict = f"{int(slower)} of 1 slower, by more than {tolerance:.0%}"
    assert verdict in printed(show_changes(found, tolerance))


@pytest.mark.parametrize(
    ("was", "now", "verdict"),
    [
        ((1.0,) * 5, (1.05,) * 5, "level"),
        ((1.0,) * 5, (1.2,) * 5, "slower"),
        ((1.0,) * 5, (0.8,) * 5, "faster"),
        ((1.0,), (1.2,), "too noisy to say: run at least 5 rounds"),
        # the quartiles are 0.9 and 1.1, so the median may be wrong by 0.185
        (
            (0.8, 0.9, 1.0, 1.1, 1.2), (1.0,) * 5,
            "too noisy to say: run about 18 rounds",
        ),
        ((1.0,) * 5, (0.1, 1.0, 1.1, 9.0, 9.0), "too noisy to say; more"),
    ],
)  # fmt: skip
def test_each_row_has_a_verdict(was, now, verdict):
    found, _ = compare_results(results(*was), results(*now))
    assert found[0].verdict(0.1).startswith(verdict)
    shown = printed(show_changes(found, 0.1))
    assert verdict in shown
    noisy = verdict.startswith("too noisy")
    assert f"{int(noisy)} too noisy to say" in " ".join(shown.split())


def test_compared_rows_are_named_by_their_settings():
    runs = [forward(("mingpt_style", 1.0), time=t) for t in (8, 16)]
    both = Results(FACTS, runs)
    changes, _ = compare_results(both, both)
    shown = printed(show_changes(changes, 0.1))
    assert [f"batch 1, time {t}" in shown for t in (8, 16)] == [True, True]


def test_a_slower_machine_is_not_a_slower_model():
    new = results()
    new.runs[0].rows[1].seconds[:] = [9.0] * 3
    found, _ = compare_results(results(), new)
    shown = printed(show_changes(found, 0.1))
    assert "0 of 1 slower" in shown
    assert "the machine itself" in shown
    assert "matmul, unchanged, is 9.00: the machine changed; there is" in shown
    assert "1 too noisy to say" in shown


OWN = "my_pkg.model:build"


def of_rounds(*means, drift=(1.0, 1.1, 0.9, 1.05, 0.95)):
    """Return results of a user's model and of others, with these means.

    All times drift together from round to round.
    """
    names = (OWN, "mingpt_style", "transformers")[: len(means)]
    drifting = {
        name: [mean * part for part in drift]
        for name, mean in zip(names, means, strict=True)
    }
    run = forward(*((n, 1.0) for n in drifting))
    for row in run.rows:
        row.seconds[:] = drifting[row.name]
    return Results(FACTS, [run])


@pytest.mark.parametrize(
    ("now", "verdict", "ratio"),
    [
        ((0.727, 0.659), "slower", 0.727 / 0.659),
        ((0.659, 0.659), "level", 1.0),
        ((0.5, 0.659), "faster", 0.5 / 0.659),
        ((2.2, 2.0), "slower", 1.1),
        ((2.0, 2.0), "level", 1.0),
    ],
)
def test_on_another_speed_of_the_machine_ratios_within_a_run_are_judged(
    now, verdict, ratio
):
    old, new = of_rounds(1.0, 1.0), of_rounds(*now)
    found, _ = compare_results(old, new)
    own, style = found
    assert own.verdict(0.05) == verdict
    assert own.judged(0.05).value == pytest.approx(ratio)
    assert own.judged(0.05).error == pytest.approx(0)
    assert style.machine
    shown = " ".join(printed(show_changes(found, 0.05)).split())
    assert f"mingpt_style, unchanged, is {now[1]:.2f}: the machine" in shown
    assert f"{int(verdict == 'slower')} of 1 slower" in shown


def test_a_machine_of_the_same_speed_leaves_the_plain_ratio():
    found, _ = compare_results(of_rounds(1.0, 1.0), of_rounds(1.5, 1.02))
    assert found[0].judged(0.05) is found[0].plain
    assert found[0].verdict(0.05) == "slower"
    assert "machine changed" not in printed(show_changes(found, 0.05))


def test_one_changed_row_among_three_is_not_the_machine():
    was, now = (of_rounds(1, n, 1, drift=(1.0,) * 5) for n in (1, 3))
    found, _ = compare_results(was, now)
    assert found[0].unchanged.ratio == 1.0
    assert found[0].verdict(0.05) == "level"


def test_a_style_of_the_users_own_is_not_taken_for_ours():
    """The name of a user's package may begin like the name of a style."""
    old, new = of_rounds(1.0, 1.0), of_rounds(1.5, 1.0)
    for results in (old, new):
        results.runs[0].rows[0].name = "mingpt_style_of_mine"
    found, _ = compare_results(old, new)
    assert [c.machine for c in found] == [False, True]
    assert found[0].unchanged.name == "mingpt_style"


def test_styles_are_judged_against_their_peers():
    old, new = of_rounds(1.0, 1.0, 1.0), of_rounds(1.0, 2.0, 2.0)
    for results in (old, new):
        results.runs[0].rows.pop(0)
    found, _ = compare_results(old, new)
    assert [c.row.name for c in found] == ["mingpt_style", "transformers"]
    assert [c.machine for c in found] == [False, True]
    assert found[0].unchanged.name == "transformers"
    assert found[0].verdict(0.1) == "level"


def test_rows_that_are_not_compared_are_named():
    a, b, gone = (("a", 1.0), ("b", 1.0), ("gone", 1.0))
    old = Results(FACTS, [forward(a, gone), forward(a, time=16)])
    new = [forward(a, b), forward(a, time=9)]
    changes, notes = compare_results(old, Results(FACTS | {"torch": "3"}, new))
    assert [change.row.name for change in changes] == ["a"]
    assert notes == [
        "not in the old file: b of forward, shape S1, batch 1, time 8",
        "only in the old file: gone of forward, shape S1, batch 1, time 8",
        "not in the old file: forward, shape S1, batch 1, time 9",
        "torch was 2, is 3",
    ]


# Tables


def test_shares_of_the_peak_equal_those_computed_by_hand():
    matmul = Row("matmul", [2.0], limit=True, flops=200)  # 100 flop/s
    copy = Row("copy", [4.0, 9.0], limit=True, least_bytes=40)  # 10 bytes/s
    read = Row("read", [2.0], limit=True, least_bytes=40)  # 20 bytes/s
    worked = Row("a", [4.0], flops=200, least_bytes=10)
    moved = Row("b", [8.0], flops=200, least_bytes=80)
    rows = [matmul, copy, read, worked, moved]
    # 2 s of work in a run of 4 s
    assert forward(*rows).part_of_peak(worked) == 0.5
    # 4 s of moving in a run of 8 s
    assert forward(*rows).part_of_peak(moved) == 0.5
    assert forward(copy, moved).part_of_peak(moved) == 1
    assert forward(worked).part_of_peak(worked) is None
    assert forward(*rows).part_of_peak(Row("c", [1.0])) is None
    # small amounts may come from a fast cache, large ones cannot
    cache = Row("cache", [0.1], limit=True, least_bytes=8)  # 80 bytes/s
    small = Row("d", [1.0], least_bytes=8)
    assert forward(copy, read, small).part_of_peak(small) is None
    assert forward(copy, read, cache, small).part_of_peak(small) == 0.1
    assert forward(copy, read, cache, moved).part_of_peak(moved) == 0.5


def test_a_share_above_the_limit_is_not_printed():
    matmul = Row("matmul", [1.0], limit=True, flops=100)
    quick = Row("mingpt_style", [0.1], flops=100)
    shown = printed(show_results(Results(FACTS, [forward(quick, matmul)])))
    assert "1000%" not in shown
    assert "mingpt_style was faster than the measured limits" in shown


def test_a_table_without_numbers_is_left_out():
    run = Run("checks", {}, [Row("only once", [1.0])])
    assert printed(show_results(Results(FACTS, [run]))).count("only once") == 1


def test_a_narrow_console_cuts_no_number(capsys):
    name = "long_name.py:" + 80 * "x"
    Output(CPU).put([forward((name, 1.25))])
    assert "\u2026" not in (out := capsys.readouterr().out)
    assert "1.25 s" in out


def test_two_ratios_that_differ_are_both_named():
    ours = Row("mingpt_style", [1.0, 2.0, 4.0], flops=2_500_000, tokens=1)
    near = Row("near", [1.04, 2.0, 4.0], least_bytes=999)
    far = Row("far", [4.0, 1.0, 2.0])
    (line,) = disagreements(forward(ours, near, far))
    assert "medians: far 0.50 and 1.00; the machine's speed changed" in line
    assert disagreements(forward(ours, near)) == []
    shown = printed(show_results(Results(FACTS, [forward(ours, near, far)])))
    assert line[:60] in " ".join(shown.split())
    for word in ("least", "95th", "3.8 s", "2.5 MFLOP", "999 B"):
        assert word in shown
    # columns keep their order, even if the first row lacks a value
    assert re.search("operations +bytes +tokens/s", shown)


ODD = "[/usr/bin/c++] [enforce fail at x.cpp:3] :smile:"


def test_brackets_are_printed_as_they_stand(capsys):
    row = Row(ODD, [1.0], note=ODD)
    rows = [Row("mingpt_style", [1.0]), row]
    run = Run(ODD, {"shape": ODD, "rounds": 7}, rows, notes=[ODD])
    text = printed(show_results(Results({ODD: "P"}, [run])))
    # the name with brackets is in the facts, the title, two tables, two notes
    assert text.count(ODD) >= 6
    assert "ran 1 of 7 rounds" in text
    old = Results(FACTS, [run])
    changes, _ = compare_results(old, old)
    text = " ".join(printed(show_changes(changes, 0.1, [ODD])).split())
    assert text.count(ODD) >= 3
    Output(CPU).put([run])
    with output.telling() as tell:
        tell("[/usr/bin/c++]")
    assert ODD in capsys.readouterr().out


# Where results go


def test_results_are_written_or_else_printed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.json"
    with monkeypatch.context() as patch:
        patch.setattr(output, "show_results", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Output(CPU, {"json": path}).put(results().runs)
    assert read_results(path).runs[0].row("mingpt_style")
    monkeypatch.setattr(Results, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Output(CPU, {"json": path}).put(results().runs)
    assert "mingpt_style" in capsys.readouterr().out


def test_a_busy_machine_is_reported_before_and_after(monkeypatch, capsys):
    cores = machine_facts(CPU)["cores"]
    busy = iter([cores + 2.5, float(cores)])
    monkeypatch.setattr(output, "load", lambda: next(busy))
    where = Output(CPU)
    where.prepare("forward", [])
    err = capsys.readouterr().err
    assert f"(load before: {cores + 2.5} on" in err
    assert "--threads 1" in err
    where.put(results().runs)
    out, err = capsys.readouterr()
    # no warning, because by default there are as many threads as cores
    assert err == ""
    loads = f"load before {cores + 2.5}, load after {float(cores)}"
    assert loads in " ".join(out.split())


# Pictures


@pytest.fixture
def drawn(monkeypatch):
    """Collect the axes of each picture that is saved during a test."""
    axes = []

    def savefig(figure, path, **how):
        axes.extend(figure.axes)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return axes


def test_a_plot_has_bars_and_lines_from_three_times_on(tmp_path, drawn):
    swept = [forward(("a", t * 1.0), time=t) for t in (4, 1, 2)]
    alone = [forward(("a", 3.0), ("b", 5.0), batch=2, time=t) for t in (1, 2)]
    draw(Results(FACTS, [*swept, *alone]), tmp_path / "a.svg")
    (line,) = drawn[0].lines
    assert line.get_xydata().tolist() == [[1, 1e3], [2, 2e3], [4, 4e3]]
    for bars in drawn[1:]:
        assert [bar.get_width() for bar in bars.patches] == [5e3, 3e3]


def test_a_grid_of_sizes_has_lines_by_each(tmp_path, drawn):
    grid = [(b, p) for b in (1, 2, 4) for p in (8, 16, 32)]
    runs = [
        Run("generate", {"batch": b, "prompt": p}, [Row("a", [float(b * p)])])
        for b, p in grid
    ]
    draw(Results(FACTS, runs), tmp_path / "a.svg")
    labels = [ax.get_xlabel() for ax in drawn]
    assert labels == ["tokens read"] * 3 + ["rows"] * 3
    (line,) = drawn[3].lines
    assert line.get_xydata().tolist() == [[1, 8e3], [2, 16e3], [4, 32e3]]


def test_the_results_of_the_readme_can_be_read():
    folder = Path(output.__file__).parent / "measured"
    kept = read_results(folder / "cpu.json")
    shapes = [run.setting["shape"] for run in kept.runs]
    assert {"S1", "S2", "S3", "gpt2"} == {*shapes}
