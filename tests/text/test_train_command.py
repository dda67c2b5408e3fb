"""gpt-duet train runs as a user runs it: stopped, killed, resumed, misused."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from hashlib import file_digest
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt_duet.training.lock import locked
from gpt_duet.training.recipe import Recipe
from gpt_duet.training.run_folder import last_checkpoint, open_run, read_log
from gpt_duet.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The cat sat on the mat; the dog lay on the log.\n" * 30
SMALL = (
    "--n-layer=1", "--n-head=2", "--n-embd=16", "--block-size=8",
    "--batch-size=4", "--eval-batches=2", "--dropout=0.1",
)  # fmt: skip


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def train(duet, text, tmp_path):
    """Return a function that trains on the small text and returns (folder,
    out, err)."""

    def train(*words, name="run", status=0):
        folder = tmp_path / name
        common = ("train", "--file", text, *SMALL, "--out", folder)
        found, out, err = duet(*common, *words)
        assert found == status, err
        return folder, out, err

    return train


@pytest.fixture
def quick_end(monkeypatch):
    """Let training end fast, with a short sample and an empty picture."""
    loop = "gpt_duet.cli.train_loop"
    monkeypatch.setattr(f"{loop}.SAMPLE", 9)
    monkeypatch.setattr(f"{loop}.draw_losses", lambda file, *_: file.touch())


@pytest.fixture
def finished(train, quick_end):
    """Return the folder of a finished run of two steps."""
    return train("--steps=2", "--eval-interval=1")[0]


def what_was_learnt(folder):
    """Return the losses by step, and the weights, of a run."""
    losses = [
        (record.step, record.train_loss, record.val_loss)
        for record in read_log(folder)
    ]
    weights = load_file(last_checkpoint(folder) / "model.safetensors")
    return losses, {k: v.tolist() for k, v in weights.items()}


def folder_content(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


def sha256(file):
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


# A run ---------------------------------------------------------------------


def test_a_run_from_start_to_text(done, train):
    out, written, err = train("--steps=12", "--eval-interval=5")
    log = read_log(out)
    assert [record.step for record in log] == list(range(1, 13))
    evaluated = [r.step for r in log if r.val_loss is not None]
    assert evaluated == [5, 10, 12]
    seconds = [record.seconds for record in log]
    assert 0 < seconds[0]
    assert seconds == sorted({*seconds})
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (out / "sample.txt").read_text()
    assert sample == written
    assert len(sample) == 1 + 300 + 1
    assert set(sample) <= set(TEXT)
    assert "step    12" in err
    assert re.search(r" \d,\d{3} parameters, ", err)
    # the last two checkpoints are kept; no file is a pickle
    one, last = sorted((out / "checkpoints").iterdir())
    assert (one.name, last.name) == ("step-00000010", "step-00000012")
    files = {path.suffix for path in one.iterdir()}
    assert files == {".safetensors", ".json"}
    for folder, step in ((out, 12), (one, 10)):
        written, err = done(
            "generate", "--checkpoint", folder, "--prompt=The cat",
            "--new-tokens=9", "--temperature=1",
        )  # fmt: skip
        assert written.startswith("The cat")
        assert len(written) == 7 + 9 + 1
        assert f"after {step} of 12 steps" in err


@pytest.mark.usefixtures("quick_end")
@pytest.mark.parametrize(
    ("style", "words", "stop", "last"),
    [
        ("annotated", (), None, 2),  # before the second checkpoint
        ("annotated", ("--tie-weights",), signal.SIGINT, 10),
        ("mingpt_style", (), signal.SIGTERM, 10),
        ("mingpt_style", ("--tie-weights",), None, 10),
    ],
)
def test_a_run_that_crashed_or_was_stopped_goes_on(
    done, train, monkeypatch, style, words, stop, last
):
    given = ("--steps=14", "--eval-interval=4", "--style", style, *words)
    whole, _, _ = train(*given, name="whole")
    take_step = Trainer.take_step

    def end(trainer):
        if trainer.step == last and stop is None:
            raise ValueError("the power went")
        if trainer.step == last:
            signal.raise_signal(stop)
        return take_step(trainer)

    status, saved, logged = 2, last // 4 * 4, last
    if stop:
        status, saved, logged = 128 + stop, last + 1, last + 1
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", end)
        out, _, err = train(*given, status=status)
    advice = f"continue with: gpt-duet train --resume {out}"
    assert (advice in err) == (stop is not None)
    assert open_run(out)[1].step == saved
    assert len(read_log(out)) == logged  # a signal loses no record
    _, err = done("train", "--resume", out)
    assert f"resuming after step {saved}" in err
    assert what_was_learnt(out) == what_was_learnt(whole)
    seconds = [record.seconds for record in read_log(out)]
    assert seconds == sorted({*seconds})
    # if a finished run is resumed, it only draws and writes its results again
    (out / "loss.png").unlink()
    _, err = done("train", "--resume", out)
    assert "after step 14, its last: no step is left to train" in err
    assert (out / "loss.png").is_file()
    assert what_was_learnt(out) == what_was_learnt(whole)


def test_a_finished_run_goes_on_for_longer(
    done, duet, refused, finished, monkeypatch
):
    def end(trainer):
        raise ValueError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", end)
        duet("train", "--resume", finished, "--steps", 20)
    _, err = done("train", "--resume", finished)  # --steps was stored
    assert open_run(finished)[1].step == 20
    _, err = done("train", "--resume", finished, "--steps", 30)
    line = " ".join(err.split())
    now, former = Recipe(steps=30), Recipe(steps=20)
    assert (
        "resuming after step 20, to step 30 instead of 20: the learning rate "
        "follows the schedule of 30 steps from here, "
        f"{now.lr_at(21):.2g} at step 21; step 20 had {former.lr_at(20):.2g}"
    ) in line
    assert "rises to 0.001 in 3 steps, then falls along half a cosine" in line
    assert open_run(finished)[1].step == 30
    assert [record.step for record in read_log(finished)] == [*range(1, 31)]
    err = refused("train", "--resume", finished, "--steps", 29)
    assert "--steps 29: the run has already taken 30 steps" in err


def test_bytes_in_float64_with_a_vocabulary_of_256(done, train):
    words = ("--tokenizer=bytes", "--dtype=float64", "--preset=gpt2")
    out, _, err = train(*words, "--steps=2")
    weights = load_file(last_checkpoint(out) / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float64}
    assert open_run(out)[1].config.vocab_size == 256  # not 50,257 as in gpt2
    assert "(bytes, vocabulary 256)" in err
    done("generate", "--checkpoint", out, "--prompt=é")


def test_a_nan_loss_ends_with_status_1(train):
    given = ("--steps=200", "--lr=1e30", "--eval-interval=1")
    out, _, err = train(*given, status=1)
    assert "at step" in err
    assert "the last good checkpoint is" in err
    assert "Traceback" not in err
    weights = load_file(last_checkpoint(out) / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())


# Stopped and killed --------------------------------------------------------


def python(*words):
    """Start Python with one thread, because two would round differently."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


start = partial(python, "-m", "gpt_duet.cli", "train")
TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
)  # fmt: skip


def end(process, status=0):
    """Wait for a process to end, and return what it wrote to stderr."""
    _, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    return err


def wait_for_steps(process, folder, steps):
    """Wait until the log has this many lines, or the process has ended."""
    log, deadline = folder / "log.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.is_file() and log.read_bytes().count(b"\n") >= steps:
            return
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Unix kills so")
def test_training_killed_twenty_times_reaches_its_end(text, tmp_path):
    common = ("--file", text, *SMALL, "--steps=3000", "--eval-interval=7")
    whole, out = tmp_path / "whole", tmp_path / "run"
    end(start(*common, "--out", whole))
    moments = random.Random(0)
    for _ in range(20):
        # the folder does not exist before its first checkpoint
        new = not out.is_dir()
        done = 0 if new else len(read_log(out))
        process = start(*((*common, "--out") if new else ("--resume",)), out)
        wait_for_steps(process, out, done + moments.randrange(1, 100))
        time.sleep(moments.random() * 0.02)
        process.kill()
        end(process, -signal.SIGKILL)
        _, saved = open_run(out)  # the checkpoint that was written is valid
        assert len(read_log(out)) - saved.step <= 7
    assert saved.step > 0
    end(start("--resume", out))
    assert what_was_learnt(out) == what_was_learnt(whole)


@pytest.mark.slow
def test_training_in_two_processes_equals_training_in_one(text, tmp_path):
    common = ("--file", text, *SMALL, "--dropout=0", "--steps=4", "--out")
    one, two = tmp_path / "one", tmp_path / "two"
    end(start(*common, one))
    end(python(*TORCHRUN, "-m", "gpt_duet.cli", "train", *common, two))
    logs = [read_log(folder) for folder in (one, two)]
    assert [len(log) for log in logs] == [4, 4]  # only one rank writes
    for a, b in zip(*logs, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)
    near = pytest.approx(logs[1][-1].val_loss, abs=1e-5)
    assert logs[0][-1].val_loss == near
    # AdamW's moments are averages of the gradients
    moments = [load_file(last_checkpoint(folder) / "optimizer.safetensors")
               for folder in (one, two)]  # fmt: skip
    torch.testing.assert_close(*moments, atol=1e-6, rtol=1e-4)
    # each run can resume from the checkpoint of the other
    end(start("--resume", two))


@pytest.mark.slow
def test_all_processes_end_when_one_loss_is_nan(text, tmp_path):
    out = tmp_path / "run"
    err = end(
        python(
            *TORCHRUN, "-m", "gpt_duet.cli", "train", "--file", text, *SMALL,
            "--steps=9", "--eval-interval=1", "--lr=1e30", "--out", out,
        ),
        status=1,
    )  # fmt: skip
    assert err.count("is nan at step 1: stopped") == 2
    assert "Connection closed by peer" not in err
    assert open_run(out)[1].step == 0


# Mistakes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --out for a new run, or --resume"),
        (("--out", "new", "--resume", "run"), "give --out for a new run"),
        (("--out", "run"), "exists and is not empty"),
        (("--out", "text.txt"), "exists and is not a folder"),
        (("--out", "new/deep/er"), "there is no folder"),
        (("--out", "new", "--style=nobody"), "no style 'nobody'"),
        (("--out", "new", "--file=short"), "is too short: a window of 8"),
        (("--out", "new", "--lr=-1"), "lr must be a number above 0"),
        (("--out", "new", "--from=default"), "--from determines the sizes"),
        (("--out", "new", "--device=abacus"), "no device 'abacus'"),
        (("--out", "new", "--dtype=int8"), "dtype must be float32 or"),
        (("--resume", "absent"), "there is no folder"),
        (("--resume", "folder"), "has no checkpoints"),
        (
            ("--resume", "run/checkpoints/step-00000001"),
            "step-00000001 is a checkpoint: give --resume the folder of",
        ),
        (("--resume", "run", "--n-embd=32"), "leave out --n-embd"),
        (("--resume", "run", "--file=short"), "is not the text of"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    refused, text, finished, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("abcdefgh")
    (tmp_path / "folder").mkdir()
    before = folder_content(tmp_path)
    if "--resume" not in arguments:
        arguments = ("--file", text, *SMALL, *arguments)
    assert message in " ".join(refused("train", *arguments).split())
    assert folder_content(tmp_path) == before


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_damaged_checkpoint_is_not_resumed(refused, finished, name):
    file = last_checkpoint(finished) / f"{name}.safetensors"
    whole = file.read_bytes()
    one_bit = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    for content in (whole[:-1], b"", one_bit):
        file.write_bytes(content)
        for command in (("train", "--resume"), ("generate", "--checkpoint")):
            err = refused(*command, finished)
            assert f"{file.name} has changed since it was written; rem" in err
            assert "to continue from step-00000001" in err


def test_sizes_and_nan_in_a_run_are_named(refused, finished):
    folder = last_checkpoint(finished)
    saved, file = folder / "run.json", folder / "model.safetensors"
    whole = saved.read_text()
    for name, said in (
        ("n_layer", "n_layer 1000000000, n_embd 16 and vocab_size"),
        ("vocab_size", "n_embd 16 and vocab_size 1000000000, at least 16,000"),
    ):
        size = rf'"{name}":\d+'
        saved.write_text(re.sub(size, f'"{name}":{10**9}', whole))
        for command in (("train", "--resume"), ("generate", "--checkpoint")):
            err = refused(*command, finished)
            assert said in err
            assert "model.safetensors holds " in err
    weights = load_file(file)
    weights["transformer.wte.weight"][1, :3] = torch.nan
    before = sha256(file)
    save_file(weights, file)
    saved.write_text(whole.replace(before, sha256(file)))
    for command in (("train", "--resume"), ("generate", "--checkpoint")):
        err = refused(*command, finished)
        count = weights["transformer.wte.weight"].numel()
        assert f"transformer.wte.weight holds 3 NaN of {count}" in err


@contextmanager
def full_disk(size):
    """Limit the size of files, so that writes fail as on a full disk."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.usefixtures("quick_end")
def test_a_full_disk_is_one_line(done, refused, train, tmp_path):
    with full_disk(20_000):  # AdamW's moments need more than 20,000 bytes
        out, _, err = train("--steps=4", "--eval-interval=2", status=2)
        last = err.splitlines()[-1]
        assert last.startswith("gpt-duet: cannot write the folder ")
        assert "File too large" in last
        assert "Traceback" not in err
    files = {path.name for path in last_checkpoint(out).parent.rglob("*")}
    parts = {"model.safetensors", "optimizer.safetensors", "run.json"}
    assert files == {"step-00000000", *parts}
    assert open_run(out)[1].step == 0
    words = (
        "convert",
        "--to=gpt2",
        "--checkpoint",
        out,
        "--out",
        tmp_path / "x",
    )
    with full_disk(1_000):
        assert "cannot write the folder" in refused(*words)
    assert not (tmp_path / "x").exists()
    done("train", "--resume", out)
    assert open_run(out)[1].step == 4


@pytest.mark.usefixtures("quick_end")
def test_one_process_trains_a_run(done, refused, finished):
    lock = finished / "lock"
    assert not lock.exists()
    with locked(finished):
        assert lock.read_text() == str(os.getpid())
        before = folder_content(finished)
        err = refused("train", "--resume", finished, "--steps=4")
        assert f"process {os.getpid()} is training the run in" in err
        assert folder_content(finished) == before
    lock.write_text("4194305")  # the lock that a killed process has left
    _, err = done("train", "--resume", finished, "--steps=4")
    assert "process 4194305 ended without removing " in err
    assert "taking over its lock" in " ".join(err.split())
    assert not lock.exists()


@pytest.mark.usefixtures("quick_end")
@pytest.mark.parametrize(
    "style",
    ["annotated", pytest.param("mingpt_style", marks=pytest.mark.slow)],
)
def test_training_goes_on_from_the_small_model(done, tmp_path, style):
    run = tmp_path / "run"
    done(
        "train", "--from=default", "--style", style, "--steps=2",
        "--eval-interval=2", "--eval-batches=2", "--lr=1e-5", "--out", run,
    )  # fmt: skip
    # with random weights, the loss would be ln(1024) = 6.9
    assert read_log(run)[-1].val_loss < 4.5
    # a style may untie the weights; both styles must read the checkpoint
    words = ("--style=mingpt_style", "--new-tokens=9")
    done("generate", "--checkpoint", run, *words)
