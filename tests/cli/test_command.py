"""The command gpt-duet: its subcommands, their help, and its response time."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpt_duet
from gpt_duet.benchmarks.app import bench
from gpt_duet.benchmarks.peers import PEERS
from gpt_duet.cli import COMMANDS
from gpt_duet.cli.train import train
from gpt_duet.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from gpt_duet.cli import main

for words in sys.argv[1:]:
    sys.argv = ["gpt-duet", *words.split()]
    try:
        main()
    except SystemExit as ended:
        print("status", ended.code or 0, "of", words, file=sys.stderr)
    assert "torch" not in sys.modules, words
"""


def test_the_package_runs_as_a_command(tmp_path):
    """The package runs after an install, and in the folder of a checkout."""
    for folder in (tmp_path, ROOT):
        run = [sys.executable, "-m", "gpt_duet", "--version"]
        done = subprocess.run(
            run, cwd=folder, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"gpt-duet {gpt_duet.__version__}\n"


CALLS = {
    "--help": 0,
    "--version": 0,
    "nonsense": 2,
    **{f"{name} --help": 0 for name in COMMANDS},
    "check annotated --nonsense": 2,
    "check annotated --block-size=0": 2,
    "compare --seed=-1": 2,
    "train": 2,
    "ladder --out=x.gif": 2,
    "generate --json=no/where.json": 2,
    "convert --to=gpt3 --out=x": 2,
    "bench nonsense": 2,
    "bench forward --new=3": 2,
}


def test_help_and_mistakes_do_not_wait_for_torch():
    done = subprocess.run(
        [sys.executable, "-c", RUN, *CALLS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    told = re.findall(r"^status (\d) of (.+)$", done.stderr, re.M)
    assert {words: int(status) for status, words in told} == CALLS


def test_options_have_the_defaults_of_the_code():
    [peers] = (
        inspect.signature(bench).parameters["peers"].annotation.__metadata__
    )
    assert f": {', '.join(PEERS)};" in peers.help
    given = inspect.signature(train).parameters
    for field, value in vars(Recipe()).items():
        assert field not in given or given[field].default == value


@pytest.mark.parametrize("name", COMMANDS)
def test_descriptions_are_wide_enough_in_80_columns(done, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    shown = done(name, "--help")[0]
    assert "Options:\n" in shown
    # the text next to an option starts in one column on all lines
    starts = {
        len(line) - len(line.lstrip())
        for line in shown.partition("Options:\n")[2].splitlines()
        if not line.lstrip().startswith("-")
    }
    assert max(starts | {0}) <= 34
    assert max(map(len, shown.splitlines())) <= 80


STOPPED = {
    "compare": "gpt_duet.comparison.styles.compare_pair",
    "diff annotated mingpt_style": "gpt_duet.cli.diff.diff_values",
    "ladder": "gpt_duet.cli.choices.choose_text",
    "train --out {folder}/run": "torch.manual_seed",
    "bench": "gpt_duet.benchmarks.run.run_plan",
}


@pytest.mark.unhooked
@pytest.mark.parametrize("words", STOPPED)
def test_ctrl_c_prints_one_word(words, duet, tmp_path, monkeypatch):
    def interrupt(*_arguments, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(STOPPED[words], interrupt)
    status, out, err = duet(*words.format(folder=tmp_path).split())
    assert status == 130
    assert (out + err).splitlines()[-1].split(": ")[-1] == "stopped"


@pytest.mark.parametrize(
    "words",
    [
        "compare annotated annotated",
        "check annotated --only shape",
        "train --steps 1 --eval-batches 1 --block-size 8 --out {folder}/run",
        "ladder --steps 1 --eval-batches 1 --out {folder}/ladder.png",
    ],
)
def test_the_number_of_threads_can_be_set(words, duet, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 64)
    words = words.format(folder=tmp_path).split()
    more = [] if words[0] == "check" else ["--file", text]
    assert duet(*words, *more, "--threads", 7)[0] == 0
    assert 7 in asked
