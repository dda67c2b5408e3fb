"""gpt-duet itself: its commands, their help, and how soon it answers."""

import inspect
import re
import subprocess
import sys
from importlib import import_module

from shared.cli import COMMANDS, options
from shared.cli.train import train
from shared.tokenization import DEFAULT
from shared.training import Recipe

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
CALLS = {
    "--help": 0,
    "--version": 0,
    "nonsense": 2,
    **{f"{name} --help": 0 for name in COMMANDS if name != "bench"},
    "check annotated --nonsense": 2,
    "check annotated --block-size=0": 2,
    "compare --seed=-1": 2,
    "train": 2,
    "ladder --out=x.gif": 2,
    "generate --json=no/where.json": 2,
    "convert --to=gpt3 --out=x": 2,
}


def test_help_and_mistakes_do_not_wait_for_torch():
    done = subprocess.run(
        [sys.executable, "-c", RUN, *CALLS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    told = re.findall(r"^status (\d) of (.+)$", done.stderr, re.M)
    assert {words: int(status) for status, words in told} == CALLS


def test_the_list_of_commands_says_what_each_says_of_itself():
    for name, line in COMMANDS.items():
        function = getattr(import_module(f"shared.cli.{name}"), name)
        assert inspect.getdoc(function).startswith(line)


def test_defaults_that_the_options_repeat():
    assert options.TOKENIZER == DEFAULT
    given = inspect.signature(train).parameters
    for field, value in vars(Recipe()).items():
        assert field not in given or given[field].default == value
