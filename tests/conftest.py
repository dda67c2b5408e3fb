"""Set-up for the whole suite: fixtures' folders, hypothesis, shape checks."""

import importlib
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path

import hypothesis
import pytest

# Texts, golden numbers and a cached encoding, where they lie beside the kit.
SIBLING = Path(__file__).resolve().parents[2] / "shared"
CACHE = SIBLING / "data" / "tiktoken_cache"
if CACHE.is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(CACHE))

SLOW_ROWS = Path(__file__).parent / "support" / "slow_rows.txt"

# Workers share the cores: one thread each, or they wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile(
    "kit", deadline=None, derandomize="CI" in os.environ, max_examples=50
)
hypothesis.settings.load_profile("kit")


def pytest_addoption(parser):
    parser.addoption(
        "--check-shapes",
        action="store_true",
        help="check every shape annotation at run time, with beartype",
    )


def pytest_configure(config):
    if config.getoption("--check-shapes"):
        from jaxtyping import install_import_hook

        hypothesis.settings.register_profile(
            "shapes", hypothesis.settings.get_profile("kit"), max_examples=10
        )
        hypothesis.settings.load_profile("shapes")
        install_import_hook(["gpt_duet"], "shape_checker.check")


def pytest_collection_modifyitems(config, items):
    """Call slow what opens a browser or is listed; leave out what hides."""
    listed = {*SLOW_ROWS.read_text("utf-8").splitlines()}
    for item in items:
        browser = "browser" in getattr(item, "fixturenames", ())
        if browser or item.nodeid in listed:
            item.add_marker("slow")
    if config.getoption("--check-shapes"):
        left = [item for item in items if item.get_closest_marker("unhooked")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    """Start from one random state; time in no time, and keep no results."""
    import torch

    torch.default_generator.manual_seed(0)
    torch.set_warn_always(True)  # torch would say most of them once
    monkeypatch.setattr("gpt_duet.timing.SHORTEST", 0.0)
    monkeypatch.setattr(
        "gpt_duet.cli.checking.entry_of", lambda job, factory: None
    )


@pytest.fixture(scope="session")
def sibling():
    """The folder of golden numbers and texts; absent on most machines."""
    if not SIBLING.is_dir():
        pytest.skip("no folder of golden numbers beside the kit")
    return SIBLING


@pytest.fixture
def golden(sibling):
    """Read what a public original answered: weights, answers, sizes."""
    from safetensors import safe_open

    def golden(name):
        path = sibling / "golden" / f"{name}.safetensors"
        weights, answers = {}, {}
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                into = weights if key.startswith("weights.") else answers
                into[key.removeprefix("weights.")] = file.get_tensor(key)
            sizes = {k: json.loads(v) for k, v in file.metadata().items()}
        return weights, answers, sizes

    return golden


@pytest.fixture
def one_layer(monkeypatch):
    """Take a layer from the small GPT, where what is asked is not deep."""
    from small_gpt import GPT

    monkeypatch.setattr(GPT, "layers", 1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls of models advance; set the seconds of a call.

    A call of the longest text takes all of them, one without tokens 1/20.
    """
    from gpt_duet.running import budget, variant

    now, seconds = [0.0], [0.0]
    scores = variant.Variant.scores

    def counted(self, tokens, *given, **how):
        answer = scores(self, tokens, *given, **how)
        share = tokens.size(1) / self.subject.block_size
        now[0] += seconds[0] * (0.05 + 0.95 * share)
        return answer

    def take(count):
        seconds[0] = count

    monkeypatch.setattr(budget, "now", lambda: now[0])
    monkeypatch.setattr(variant.Variant, "scores", counted)
    return take


@pytest.fixture
def calls_of_a_second(clock):
    """Let each call of the longest text take a second: few have time."""
    clock(1.0)


@pytest.fixture(scope="session", params=["annotated", "mingpt_style"])
def style(request):
    """Both styles in turn."""
    return importlib.import_module(f"gpt_duet.{request.param}")


@pytest.fixture(scope="session")
def r50k_base():
    """GPT-2's tokenizer, where tiktoken has it in its cache."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("r50k_base needs TIKTOKEN_CACHE_DIR")
    from gpt_duet import load_tokenizer

    return load_tokenizer("r50k_base")


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Run a command in this process: its status, stdout and stderr."""

    def run_command(main, *words):
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run_command


@pytest.fixture
def duet(run_command):
    """Run gpt-duet in this process: its status, stdout and stderr."""
    from gpt_duet.cli import main

    return partial(run_command, main, "gpt-duet")


@pytest.fixture
def done(duet):
    """Run gpt-duet where it must succeed: its stdout and stderr."""

    def done(*words):
        status, out, err = duet(*words)
        assert status == 0, out + err
        return out, err

    return done


@pytest.fixture
def refused(duet):
    """Run gpt-duet on a mistake; return the one line it answers."""

    def refused(*words):
        status, out, err = duet(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("gpt-duet: ")
        return err

    return refused


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, headless; tests that share it are in one xdist_group."""
    from browser import Browser

    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.driver.quit()


@pytest.fixture
def no_network(monkeypatch):
    """Whoever asks the network fails."""

    def refuse(*_arguments, **_named):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """An empty folder in place of tiktoken's cache, and nothing loaded."""
    import tiktoken

    tiktoken.list_encoding_names()
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    folder = tmp_path / "tiktoken"
    folder.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    return folder
