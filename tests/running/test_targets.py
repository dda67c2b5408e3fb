"""Models that a string names, by a file, a module or an expression.

Each target imports its own copies of modules.
"""

import sys

import pytest
import torch

import gpt_duet
from gpt_duet.targets import load_target

MODEL = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class GPTConfig:
    vocab_size: int = 11
    block_size: int = 8
    width: int = 8


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.vocab_size, self.block_size = config.vocab_size, config.block_size
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, idx):
        return self.head(self.table(idx).cumsum(1))


class Open(nn.Module):
    def __init__(self, depth, config):
        super().__init__()


def late():
    from helper import SIZE
    return GPT(GPTConfig(vocab_size=SIZE))


ready = GPT(GPTConfig(vocab_size=11))
SIZE = 3


def scores(idx):
    return ready(idx)
"""


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine", model=MODEL, helper="SIZE = 5\n")
    return tmp_path / "mine" / "model.py"


@pytest.mark.parametrize(
    ("what", "vocab_size"),
    [
        ("GPT(GPTConfig(vocab_size=7, block_size=4))", 7),
        ("(lambda size: GPT(GPTConfig(vocab_size=size)))(3)", 3),
        ("GPT", 11),  # a class that can be built without arguments
        # too long for the name of a file
        (f"GPT(GPTConfig({256 * ' '}vocab_size=7))", 7),
        ("late", 5),  # the factory itself imports from its folder
    ],
)
def test_a_target_builds_what_its_text_names(model, what, vocab_size):
    before, path = set(sys.modules), list(sys.path)
    factory = load_target(f"{model}:{what}")
    first, second = factory(), factory()
    assert first is not second
    assert first.vocab_size == vocab_size
    assert first(torch.zeros(1, 2, dtype=torch.long)).shape[-1] == vocab_size
    assert not {"model", "helper"} & (set(sys.modules) - before)
    assert sys.path == path


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("Open", r"write an expression, as '.*:Open\(depth=..., config=...\)"),
        ("GPT(", "is neither a name nor an expression"),
        ("lates", "has no 'lates': did you mean late"),
        ("xyz", "has no 'xyz'; it has GPTConfig, GPT, Open, late"),
        ("SIZE", "gives int for SIZE: expected a model"),
        (":GPT", r"write one colon before the name, as .*model.py:GPT"),
        ("", "cannot find a model in"),
    ],
)
def test_a_mistake_is_one_sentence(model, what, message):
    with pytest.raises(ValueError, match=message):
        load_target(f"{model}:{what}")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nb.ipynb", "nb.ipynb is a notebook: call check_model"),
        ("https://some.org/m.py:build", "is an address: download the file"),
        ("gpt2", r"transformers:AutoModelForCausalLM.from_pretrained\('gpt2"),
        ("one.GPT", "write a colon before the name, as one:GPT"),
        ("nothing", "the folder nothing has no Python file"),
        ("mine", "mine is a folder: .* as mine/helper.py:build"),
        (".", "is a folder: name a file and its factory, as one.py:build"),
        ("own.model:build", r"under src/: .* src/own/model.py:build"),
        ("one.py:build", "one.py has no 'build': it is empty"),
    ],
)
def test_another_spelling_of_a_name_suggests_ours(model, target, message):
    here = model.parents[1]
    (here / "nothing").mkdir()
    (here / "src" / "own").mkdir(parents=True)
    write(here, one="")
    with pytest.raises(ValueError, match=message):
        load_target(target)


def test_a_config_that_needs_values_is_spelled_out(model):
    text = model.read_text().replace("vocab_size: int = 11", "vocab_size: int")
    model.write_text(text)
    with pytest.raises(ValueError, match=r"GPT\(GPTConfig\(vocab_size=...\)"):
        load_target(f"{model}:GPT")


def test_a_model_and_a_function_are_used_unchanged(model):
    assert isinstance(load_target(f"{model}:ready"), torch.nn.Module)
    assert load_target(f"{model}:scores").__name__ == "scores"


# Modules of the same names ---------------------------------------------------

WHO = """
def build():
    import attn
    return lambda tokens: (WHO, attn.WHO)
"""


def test_two_folders_may_have_modules_of_one_name(tmp_path):
    models = {}
    for name in ("left", "right"):
        source = f"from attn import WHO\n{WHO}"
        folder = write(tmp_path / name, attn=f"WHO = {name!r}", model=source)
        models[name] = load_target(f"{folder}/model.py:build")
    for name, build in 2 * [*models.items()]:
        assert build()(None) == (name, name)


def test_a_file_in_a_package_imports_from_its_package(tmp_path):
    source = "from .attn import WHO\nfrom pkg import attn\n"
    source += "def build():\n    return lambda tokens: (WHO, attn.WHO)\n"
    write(tmp_path / "pkg", __init__="", attn="WHO = 'pkg'", model=source)
    model = load_target(f"{tmp_path}/pkg/model.py:build")()
    assert model(None) == ("pkg", "pkg")


@pytest.mark.parametrize("name", ["shared", "annotated", "tests"])
def test_a_package_called_as_ours_is_the_users_own(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, __init__="", attn="WHO = 'user'")
    write(tmp_path, mine=f"from {name} import attn\nWHO = attn.WHO\n"
          "def build():\n    return lambda tokens: WHO\n")  # fmt: skip
    for target in ("mine:build", "mine.py:build"):
        assert load_target(target)()(None) == "user"
    assert sys.modules["gpt_duet"] is gpt_duet


def test_lazily_imported_names_of_a_package_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "def __getattr__(name):\n    return {'SIZE': 3}[name]\n"
    write(tmp_path, lazy=source)
    build = load_target("lazy:(lambda: lambda tokens: SIZE)()")
    assert build()(None) == 3


# Modules that import on first use --------------------------------------------

LATE = """
import importlib, sys
from types import ModuleType


class Alias(ModuleType):
    def __getattr__(self, name):
        raise ModuleNotFoundError(f"no module for {name}", name="not_there")


for name in ("by_class", "by_function", "with_a_file"):
    kind = Alias if name == "by_class" else ModuleType
    alias = sys.modules[f"old_{name}"] = kind(f"old_{name}")
    if name != "by_class":
        alias.__getattr__ = lambda name: importlib.import_module("not_there")
    if name == "with_a_file":
        alias.__file__ = None
"""


@pytest.fixture
def late(model):
    """Return the file of a model that registers aliases of missing modules."""
    path = model.with_name("aliased.py")
    path.write_text(LATE + MODEL)
    yield path
    for name in [name for name in sys.modules if name.startswith("old_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("what", "vocab_size"),
    [("GPT", 11), ("late", 5), ("GPT(GPTConfig(vocab_size=7))", 7)],
)
def test_an_alias_of_a_missing_module_is_not_imported(late, what, vocab_size):
    factory = load_target(f"{late}:{what}")
    for _ in range(2):
        assert factory().vocab_size == vocab_size
    assert "old_by_class" in sys.modules


def test_a_module_of_the_users_is_known_by_its_spec(model):
    """A module that replaces itself in sys.modules may lack __file__."""
    source = "import sys\nfrom types import ModuleType\nSPEC = __spec__\n"
    source += "new = ModuleType(__name__)\nnew.__spec__ = SPEC\n"
    source += "new.SIZE = 4\nsys.modules[__name__] = new\n"
    write(model.parent, replaced=source)
    text = model.read_text() + "\nimport replaced\n"
    text += "def build():\n    return GPT(GPTConfig(replaced.SIZE))\n"
    model.write_text(text)
    assert load_target(f"{model}:build")().vocab_size == 4
    assert "replaced" not in sys.modules


def test_a_name_whose_import_fails_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "def __getattr__(name):\n    import not_there\n"
    write(tmp_path, lazy=source)
    words = "lazy cannot import 'GPT': ModuleNotFoundError: No module named"
    with pytest.raises(ValueError, match=words):
        load_target("lazy:GPT")
