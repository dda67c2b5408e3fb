import json
import sys

import pytest

from benchmarks.forward import Timing, app, interleave
from shared.cli import run


@pytest.fixture
def bench(monkeypatch, capsys):
    def bench(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            run(app)
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return bench


def test_rounds_are_interleaved_and_shuffled():
    calls = []
    runs = {
        name: lambda name=name: calls.append(name) or float(len(calls))
        for name in ("a", "b", "c")
    }
    timings = interleave(runs, rounds=20)
    rounds = [calls[i : i + 3] for i in range(0, 60, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert [t.name for t in timings] == ["a", "b", "c"]
    for timing in timings:
        assert len(timing.seconds) == 20
        for number, r in enumerate(rounds):
            expected = 3 * number + r.index(timing.name) + 1
            assert timing.seconds[number] == expected


def test_one_slow_round_moves_neither_median_nor_ratio():
    fast = Timing("fast", [1.0, 1.0, 50.0, 1.0, 1.0])
    slow = Timing("slow", [2.0, 2.0, 100.0, 2.0, 2.0])
    assert fast.quartiles == (1.0, 1.0, 1.0)
    assert fast.ratio(slow) == 2.0
    assert slow.ratio(fast) == 0.5
    assert Timing("once", [3.0]).quartiles == (3.0, 3.0, 3.0)


def test_forward_at_toy_size(bench, tmp_path):
    file = tmp_path / "found.json"
    status, out, err = bench(
        "forward", "--preset", "gpt-nano", "--batch", 1, "--time", 4,
        "--rounds", 3, "--json", file,
    )  # fmt: skip
    assert (status, err) == (0, "")
    for word in ("annotated", "mingpt_style", "tokens/s", "outputs agree"):
        assert word in out
    found = json.loads(file.read_text())
    assert [len(s) for s in found["seconds"].values()] == [3, 3]


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
    status, out, err = bench("forward", "--preset", "gpt-nano", "--time", 4)
    assert (status, out) == (2, "")
    assert "the styles differ by" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], ["batch", "at least 1", "0"]),
        (["--time", "-3"], ["time", "at least 1", "-3"]),
        (["--rounds", "0"], ["rounds", "at least 1", "0"]),
        (["--preset", "huge"], ["'huge'", "gpt2"]),
        (["--device", "toaster"], ["'toaster'"]),
    ],
)
def test_a_mistake_ends_in_one_line(bench, arguments, words):
    status, out, err = bench("forward", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
