"""Set-up of the whole suite: fixture folders, hypothesis, shape checks."""

import gc
import importlib
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path

import hypothesis
import pytest

# A folder next to the kit has texts, golden numbers and a cached encoding.
SIBLING = Path(__file__).resolve().parents[2] / "shared"
CACHE = SIBLING / "data" / "tiktoken_cache"
if CACHE.is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(CACHE))

SLOW_ROWS = Path(__file__).parent / "support" / "slow_rows.txt"

# Each worker uses one thread, because the workers share the cores.
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


def _require_rows(config, listed, items):
    """Raise if slow_rows.txt lists a row that its test file does not have."""
    if any("::" in word for word in config.args) or not CACHE.is_dir():
        # only a part of a file runs, or data is missing
        return
    files = {item.nodeid.partition("::")[0] for item in items}
    known = {item.nodeid for item in items}
    for row in sorted(listed - known):
        if row.partition("::")[0] in files:
            raise pytest.UsageError(f"{SLOW_ROWS.name}: there is no {row}")


def pytest_collection_finish():
    """Leave modules and tests out of garbage collection, for speed.

    The checks of heavy models collect garbage, which takes a second otherwise.
    Tests make many objects that no cycle holds, so collect less often.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before xdist adds groups to the ids
def pytest_collection_modifyitems(config, items):
    """Mark tests as slow if they are listed or use a browser.

    With --check-shapes, deselect the tests that are marked unhooked.
    """
    # the filters of pyproject.toml, except the first: "error"
    named = config.getini("filterwarnings")[1:]
    listed = {*SLOW_ROWS.read_text("utf-8").splitlines()}
    _require_rows(config, listed, items)
    for item in items:
        browser = "browser" in getattr(item, "fixturenames", ())
        if browser or item.nodeid in listed:
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            # in a slow test, other packages may give any warning
            item.add_marker(pytest.mark.filterwarnings("default", *named))
    if config.getoption("--check-shapes"):
        left = [item for item in items if item.get_closest_marker("unhooked")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    """Fix the random state, shorten timings, and do not store results."""
    import torch

    torch.default_generator.manual_seed(0)
    torch.set_warn_always(True)  # else most warnings appear only once
    monkeypatch.setattr("gpt_duet.timing.SHORTEST", 0.0)
    monkeypatch.setattr(
        "gpt_duet.cli.checking.entry_of", lambda job, factory: None
    )


@pytest.fixture(scope="session")
def sibling():
    """Return the folder of texts and golden numbers, or skip the test."""
    if not SIBLING.is_dir():
        pytest.skip("no folder of golden numbers next to the kit")
    return SIBLING


@pytest.fixture
def golden(sibling):
    """Return a function that reads a public original's weights and outputs."""
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
    """Give the small GPT one layer, which is enough for these tests."""
    from small_gpt import GPT

    monkeypatch.setattr(GPT, "layers", 1)


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that advances only during calls of a model.

    The fixture returns a function that sets the seconds of a call with the
    longest text. Calls with shorter texts take less time.
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
    """Let a call with the longest text take a second, so few calls run."""
    clock(1.0)


@pytest.fixture(scope="session", params=["annotated", "mingpt_style"])
def style(request):
    """Return each style in turn."""
    return importlib.import_module(f"gpt_duet.{request.param}")


@pytest.fixture(scope="session")
def r50k_base():
    """Return GPT-2's tokenizer, or skip the test if it is not cached."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("r50k_base needs TIKTOKEN_CACHE_DIR")
    from gpt_duet import load_tokenizer

    return load_tokenizer("r50k_base")


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Return a function that runs a command and returns (status, out, err)."""

    def run_command(main, *words):
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run_command


@pytest.fixture
def duet(run_command):
    """Return a function that runs gpt-duet, as run_command does."""
    from gpt_duet.cli import main

    return partial(run_command, main, "gpt-duet")


@pytest.fixture
def done(duet):
    """Return a function that runs gpt-duet, requires success, and returns
    (out, err)."""

    def done(*words):
        status, out, err = duet(*words)
        assert status == 0, out + err
        return out, err

    return done


@pytest.fixture
def refused(duet):
    """Return a function that runs gpt-duet with a mistake, and returns
    the message."""

    def refused(*words):
        status, out, err = duet(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("gpt-duet: ")
        return err

    return refused


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Start a headless Chromium, which all browser tests share."""
    from browser import Browser

    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.driver.quit()


@pytest.fixture
def no_network(monkeypatch):
    """Make each access to the network fail."""

    def refuse(*_arguments, **_named):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """Give tiktoken an empty cache, with no encoding loaded."""
    import tiktoken

    tiktoken.list_encoding_names()
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    folder = tmp_path / "tiktoken"
    folder.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    return folder
