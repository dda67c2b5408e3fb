"""Programs in any language: the protocol, the checks, and broken programs.

Each program is `tests/zoo/line_program.py` in one of its modes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import line_program
import numpy as np
import pytest
import torch

from gpt_duet import check_model, diff_by_value
from gpt_duet.invariants import prove_causality
from gpt_duet.running.exec_program import (
    LIMIT_VARIABLE,
    PIPE_BYTES,
    Child,
    ExecProgram,
)
from gpt_duet.running.model.sizes import numbers_in_code, special_ids
from gpt_duet.running.program import ProgramFailed, Refused
from gpt_duet.targets import load_target

FILE = Path(line_program.__file__)
SIZES = {"vocab_size": 7, "block_size": 12}
SCORES_ONLY = {
    *("check_shape", "check_finite", "check_determinism", "check_causality"),
    *("check_prefix_consistency", "check_order_sensitivity"),
    *("check_context_use", "check_length_limit", "check_vocabulary"),
}
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.fixture
def start():
    """Return a function that starts a program; end all after the test."""
    begun = []

    def program(mode, vocab_size=None):
        found = ExecProgram(f"{sys.executable} {FILE} '{mode}'", vocab_size)
        begun.append(found)
        return found

    yield program
    for each in begun:
        each.end()


def ids(*numbers):
    return torch.tensor(numbers)


def test_a_line_of_ids_is_answered_with_scores(start):
    program = start("sound").started()
    assert program.vocab_size == 7
    found = program(ids(3, 1, 4))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, line_program.scores([3, 1, 4]), 1e-6)
    both = program(torch.tensor([[3, 1, 4], [1, 5, 2]]))
    assert both.shape == (2, 3, 7)
    assert (both[0] == found).all()


def test_random_state_of_the_kit_is_not_the_programs(start):
    program = start("sound").started()
    assert numbers_in_code(program) == []
    assert special_ids(program, 7) == [0, 6]


def test_numbers_may_be_bytes(start):
    binary, text = start("binary").started(), start("sound")
    assert (binary(ids(3, 1, 4)) == text(ids(3, 1, 4))).all()


def test_the_first_line_may_declare_sizes(start):
    program = start("sizes").started()
    assert (program.vocab_size, program.block_size) == (7, 12)


def test_the_standard_error_passes_through(start, capfd):
    start("stderr").started()
    deadline, seen = time.monotonic() + 5, ""
    while "Loading the model" not in seen and time.monotonic() < deadline:
        seen += capfd.readouterr().err
        time.sleep(0.01)
    assert "Loading the model ..." in seen


@pytest.mark.parametrize("mode", ["sound", "exits"])
def test_checks_of_scores_run_and_others_name_what_is_missing(start, mode):
    report = check_model(start(mode), **SIZES)
    assert report.ok, str(report)
    passed = {r.name for r in report.results if r.status == "passed"}
    assert passed == SCORES_ONLY
    skipped = {
        r.name: r.message for r in report.results if r.name not in passed
    }
    gradients = "a program has no gradients here"
    for name in ("causal_gradients", "gradient_flow", "gradients"):
        assert skipped[f"check_{name}"] == gradients
    assert skipped["check_dtype"] == "a program has no weights here"
    assert "does not say cache" in skipped["check_cache"]
    assert gradients in report.notes


def test_causality_is_tested_and_not_proved(start):
    program = start("sound").started()
    proof = prove_causality(program, **SIZES)
    assert not proof.proved
    assert [one.place for one in proof.open] == [None]
    (result,) = check_model(
        program, **SIZES, checks=["causality"], require_proof=True
    ).results
    assert result.status == "failed"


def test_a_leak_has_the_smallest_case_and_a_map(start):
    report = check_model(start("leak"), **SIZES, checks=["causality"])
    (result,) = report.results
    assert result.status == "failed"
    assert (result.leak["position"], result.leak["token"]) == (2, 3)
    assert result.leak["length"] == 4
    assert "influence" in report.details["check_causality"]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("random", "check_determinism"),
        ("counts", "check_determinism"),
        ("unbounded", "check_vocabulary"),
        ("shifted", "check_cache"),
        ("stale", "check_cache"),
    ],
)
def test_a_fault_of_the_scores_fails_its_check(start, mode, name):
    report = check_model(start(mode).started(), **SIZES)
    assert name in report.failed, str(report)


def test_a_cache_is_compared_with_whole_texts(start):
    program = start("cache").started()
    (result,) = check_model(program, **SIZES, checks=["cache"]).results
    assert result.status == "passed"


def test_coarse_numbers_are_noted_but_pass(start):
    report = check_model(start("coarse").started(), **SIZES)
    assert report.ok, str(report)
    assert any("0.01" in note for note in report.notes)
    assert not start("sound").started().step


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("no start", ("exit status 3", "no such weights: w.bin")),
        ("chatty", ("'Loading the model ...'", "standard error")),
        ("late", ("with 0 numbers",)),
        ("unflushed", ("in time", "flush")),
        ("never answers", ("in time", "flush")),
    ],
)
def test_a_program_that_does_not_start_is_one_line(
    start, mode, words, monkeypatch
):
    silent = mode in ("unflushed", "never answers")
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5" if silent else "20")
    began = time.monotonic()
    with pytest.raises(ValueError, match="line_program") as caught:
        start(mode).started()
    assert time.monotonic() - began < 20
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("hangs", ("in time", "its last lines: thinking")),
        ("dies", ("exit status 5", "its last lines: out of memory")),
        pytest.param("killed", ("SIGKILL",), marks=posix),
        ("garbage", ("'token 3: 0.1 0.2'",)),
        ("60 letters", (f"'{60 * 'x'}'",)),
        ("61 letters", (f"'{60 * 'x'}...'",)),
        ("last only", ("7 numbers", "3 x 7 = 21")),
        ("late by one", ("7 numbers", "a line late")),
        ("two lines", ("'ok'",)),
    ],
)
def test_a_broken_program_gives_one_sentence(start, mode, words):
    program = start(mode).started()
    if mode == "hangs":
        program._seconds = 0.3

    def call():
        for _ in range(3):
            program(ids(3, 1, 4))
            time.sleep(0.05)

    with pytest.raises((ProgramFailed, Refused)) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    began = time.monotonic()
    try:
        report = check_model(program, **SIZES)
        said = [r.message for r in report.results if r.status == "failed"]
    except ValueError as error:
        said = [str(error)]
    assert time.monotonic() - began < 20
    assert len(said) == 1
    assert "line_program.py" in said[0]
    assert "\n" not in said[0]


@posix
def test_a_program_that_reads_nothing_is_ended_at_the_time_limit():
    """The program reads nothing, and a pipe holds only 64 KiB."""
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"])
    began = time.monotonic()
    child.send("1 " * (1 << 19), began + 0.5)
    assert child.line(time.monotonic() + 5) is None
    assert time.monotonic() - began < 5
    child.end()


def test_a_program_that_reads_a_long_line_in_time_lives_on():
    count = "import sys\nfor line in sys.stdin: print(len(line), flush=True)"
    child = Child([sys.executable, "-c", count])
    child.send("1 " * (PIPE_BYTES + 1), time.monotonic() + 0.2)
    assert child.line(time.monotonic() + 5) == str(2 * PIPE_BYTES + 3)
    time.sleep(0.4)
    child.send("1", time.monotonic() + 5)
    assert child.line(time.monotonic() + 5) == "2"
    child.end()


def test_a_refusal_keeps_the_program(start):
    program = start("sound").started()
    process = program._child.process
    with pytest.raises(Refused, match="refused one id: at most 12"):
        program(ids(7))
    program(ids(3))
    assert program._child.process is process


def test_a_missing_command_is_a_mistake():
    for command, words in (
        ("./no_such_program", "no_such_program cannot be started"),
        ("", "needs a command"),
        ("'open", "quotation"),
    ):
        with pytest.raises(ValueError, match=words):
            load_target(f"exec:{command}")
    with pytest.raises(ValueError, match="with 7 numbers; 1 x 9 = 9"):
        load_target(f"exec:{sys.executable} {FILE} sound", 9)


def test_the_limit_of_a_call_is_a_number_of_seconds(monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "soon")
    with pytest.raises(ValueError, match="seconds, got 'soon'"):
        ExecProgram("true")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] != "Z"


def gone(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@posix
def test_the_process_ends_with_the_model():
    program = ExecProgram(f"sh -c '{sys.executable} {FILE} sound'").started()
    process = program._child.process.pid
    assert alive(process)
    del program
    assert gone(process)


@posix
@pytest.mark.slow
def test_no_child_is_left_when_the_kit_ends_or_is_killed():
    code = (
        "import os, sys\n"
        "from gpt_duet.running.exec_program import ExecProgram\n"
        f"p = ExecProgram({f'{sys.executable} {FILE} hangs'!r}).started()\n"
        "print(p._child.process.pid, flush=True)\n"
        "import torch, time\n"
        "if 'call' in sys.argv: p(torch.tensor([3, 1]))\n"
    )
    # the kit exits normally, or is killed while the program hangs
    for word in ("", "call"):
        kit = subprocess.Popen(
            [sys.executable, "-c", code, word],
            stdout=subprocess.PIPE,
            cwd=FILE.parents[2],
        )
        child = int(kit.stdout.readline())
        if word:
            time.sleep(1.5)  # by now, the program runs
            assert alive(child)
            kit.send_signal(signal.SIGKILL)
        kit.wait()
        kit.stdout.close()
        assert gone(child)


def test_a_thousand_calls_cost_little(start):
    program = start("sound").started()
    tokens, began = ids(3, 1, 4, 1), time.monotonic()
    for _ in range(1000):
        program(tokens)
    assert time.monotonic() - began < 3


def test_two_programs_are_one_function_by_their_scores(start):
    one, other = start("sound").started(), start("binary").started()
    tokens = [3, 1, 4, 1, 5]
    found = diff_by_value(one, other, tokens)
    assert found.same
    assert any("a program that dumps no arrays" in n for n in found.notes)
    leaking = start("leak").started()
    assert not diff_by_value(one, leaking, tokens).same


def test_the_command_checks_a_program(duet):
    target = f"exec:{sys.executable} {FILE} "
    status, out, err = duet(
        "check", f"{target}sound", "--block-size", "12", "--json", "-"
    )
    assert status == 0, err
    (model,) = json.loads(out)["models"]
    assert model["vocab_size"] == 7
    status, out, _ = duet("check", f"{target}dies", "--block-size", "12")
    assert status == 1
    assert "exit status 5" in " ".join(out.split())
    status, _, err = duet("check", f"{target}'no start'")
    assert status == 2
    assert "exit status 3" in err.splitlines()[-1]


def test_mistakes_on_the_command_line_say_what_to_write(refused):
    target = f"exec:{sys.executable} {FILE} sound"
    assert "gpt-duet diff 'annotated'" in refused(
        "compare", "annotated", target
    )
    said = refused("diff", "annotated", target)
    assert "annotated has 65 tokens" in said
    assert "weights of the tiny model" in said
    assert "--block-size" in refused("check", target)
