"""All state that a model can reach is read, compared and restored."""

import random
import threading
from collections import OrderedDict, deque
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from gpt_duet.running.model.building import deep_copy
from gpt_duet.running.model.kept_state import KeptState, changed, values_of
from gpt_duet.running.model.reach import Walk, is_theirs
from gpt_duet.validation import is_installed

COUNT = 0
TABLE = torch.zeros(3)
WIDTH = ContextVar("WIDTH", default=3)


class Slots:
    """An object that has slots instead of a dict."""

    __slots__ = ("left",)


class Model(nn.Module):
    """A model with a counter in every place that a forward pass may change."""

    shared = 0

    def __init__(self):
        super().__init__()
        seen = 0
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("later", None)
        self.first = self.mean[:1]
        self.table, self.names, self.last = {"n": 0}, {1}, deque([1], 2)
        self.array, self.lock = np.zeros(2), threading.Lock()
        self.random, self.draws = random.Random(0), np.random.default_rng(0)
        self.slots, self.object = Slots(), threading.local()
        self.slots.left = self.object.right = 0

        def see():
            nonlocal seen
            seen += 1
            return self.mean.sum() + seen

        self.see = see

    def forward(self):
        global COUNT
        COUNT += 1
        TABLE.add_(1)
        type(self).shared += 1
        WIDTH.set(WIDTH.get() + 1)
        self.mean.add_(1)
        self.later = self.mean.clone()
        self.table["n"] += 1
        self.table["new"] = torch.ones(1)
        self.names.add(2)
        self.last.append(2)
        self.array += 1
        self.slots.left += 1
        self.object.right += 1
        self.fresh = [1]
        self.random.random()
        self.draws.random()
        return self.see()


NAMES = [
    *("COUNT", "TABLE", "shared", "WIDTH", "mean", "later", "table['n']"),
    *("table['new']", "names[2]", "last[1]", "array", "slots.left"),
    *("object.right", "fresh", "random", "draws", "see.seen"),
]


def last(name):
    return name.rpartition("test_kept_state.")[2].removeprefix("Model.")


def test_each_change_by_a_call_is_named():
    model = Model()
    before = values_of(model)
    model()
    found = {last(n) for n in changed(before, values_of(model))}
    assert found >= {*NAMES}, {*NAMES} - found


def test_changes_by_a_call_are_restored_in_place():
    model = Model()
    before, state = values_of(model), KeptState(model)
    held = model.mean, model.table, model.names, model.last
    model()
    model()
    state.put_back(always=True)
    assert not changed(before, values_of(model))
    found = model.mean, model.table, model.names, model.last
    assert all(a is b for a, b in zip(held, found, strict=True))
    assert model.first.data_ptr() == model.mean.data_ptr()
    first = float(model())
    state.put_back(always=True)
    assert float(model()) == first


def test_nothing_is_written_where_no_buffer_was_changed():
    model = Model()
    state = KeptState(model)
    model.table["n"] = 5
    state.put_back()
    assert model.table["n"] == 5
    model.mean.add_(1)
    state.put_back()
    assert model.table["n"] == 0


def test_resized_or_transposed_memory_is_restored():
    model = Model()
    model.turned = torch.arange(6.0).view(2, 3)
    state = KeptState(model)
    model.turned.t_()
    model.mean.resize_(40).fill_(7)
    state.put_back(always=True)
    assert model.turned.shape == (2, 3)
    assert model.mean.equal(torch.zeros(3))


def test_a_generator_draws_other_numbers_with_another_seed():
    model = Model()
    state = KeptState(model)
    drawn = []
    for seed in (1, 2, 1):
        state.put_back(always=True)
        state.reseed(seed)
        drawn.append((model.random.random(), model.draws.random()))
    assert drawn[0] == drawn[2] != drawn[1]


def test_unreadable_state_is_named():
    model = Model()
    model.steps = iter(range(9))
    assert KeptState(model).unread == {"steps": "range_iterator"}


class Lazy(OrderedDict):
    """A mapping that raises when its items are read, as registries may."""

    def items(self):
        raise AssertionError("it was asked")

    keys = values = __iter__ = clear = update = items


class LazyList(list):
    def __iter__(self):
        raise AssertionError("it was asked")

    clear = extend = __iter__


def test_contents_are_restored_without_code_of_a_subclass():
    model = Model()
    model.lazy, model.steps = Lazy(), LazyList()
    model.lazy["a"] = 1
    model.steps.append(3)
    before, state = values_of(model), KeptState(model)
    model.lazy["c"] = 4
    model.steps.append(5)
    now = values_of(model)
    assert {*changed(before, now)} == {"lazy['c']", "steps[1]"}
    state.put_back(always=True)
    assert not changed(before, values_of(model))
    assert len(model.lazy) == len(model.steps) == 1


def test_an_entry_of_a_read_only_view_has_the_name_of_its_path():
    table = {"steps": 1}
    model = Model()
    model.view = MappingProxyType(table)
    before = values_of(model)
    table["steps"] = 2
    assert {*changed(before, values_of(model))} == {"view['steps']"}


def test_a_walk_through_an_array_leaves_numpy_installed():
    Walk(np.zeros(2), by_code=False)
    assert not is_theirs(np.__file__)


def test_a_package_in_another_folder_on_the_path_is_installed(
    tmp_path, monkeypatch
):
    (tmp_path / "pack-1.0.dist-info").mkdir()
    record = tmp_path / "pack-1.0.dist-info" / "RECORD"
    record.write_text("pack/model.py,sha256=0,1\nsingle.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed(str(tmp_path / "pack" / "model.py"))
    assert is_installed(str(tmp_path / "single.py"))
    assert not is_installed(str(tmp_path / "mine.py"))
    assert not is_installed(__file__)


def reads(tensor):
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    held = getattr(model, tensor)
    model.read = lambda: held
    return model


def test_a_copy_shares_a_buffer_that_a_function_reads():
    model = reads("mean")
    assert deep_copy(model).mean is model.mean
    # arguments of a partial are copied with the model
    model.read = partial(torch.mul, model.mean)
    copied = deep_copy(model)
    assert copied.mean is copied.read.args[0] is not model.mean


def test_a_parameter_that_a_function_or_a_view_reads_is_not_copied():
    with pytest.raises(ValueError, match="function reads weight"):
        deep_copy(reads("weight"))
    model = nn.Linear(2, 2)
    model.row = model.weight.data[0]
    with pytest.raises(ValueError, match="row is a view of weight"):
        deep_copy(model)
