"""check_cache finds each convention, accuses none, and finds each fault."""

import re

import pytest
import torch
from cached_models import (
    CONVENTIONS,
    FAULTS,
    MadeInSingle,
    PositionsLeftOut,
    Recurrent,
    RoomInSingle,
    RoomOnDevice,
    WindowCrash,
    WindowOfPieces,
    WindowOfThree,
    WindowThenOne,
    in_any,
)
from small_gpt import CachedGPT, Past
from strategies import one_in

from gpt_duet.comparison.values.decoding import diff_cache
from gpt_duet.invariants import check_model
from gpt_duet.running.conventions import Empty, First, Setup, Way
from gpt_duet.running.decoding import Decoder
from gpt_duet.running.meeting import meet

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    pytest.mark.unhooked,
]
ROWS = [(kind, fault) for kind in CONVENTIONS for fault in kind.faults]
PLACES = {  # the operations of the first line that differs
    "position": ["embedding"],
    "mask": ["masked_fill"],
    "rows": ["mT", "cat"],
    "twice": ["embedding"],  # positions follow from the cache's length
    "window": ["embedding", "cat"],
}
FIRST = {"position": 1, "mask": 1, "rows": 1, "twice": 1, "window": 6}


def checked(kind, fault=""):
    parts = {"fault": fault, "__module__": kind.__module__}
    model = type(kind.__name__, (kind,), parts)
    report = check_model(
        model, checks=["cache"], cache=kind.make_cache, block_size=16
    )
    return report.results[0]


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_a_convention_is_found_and_not_accused(kind):
    result = checked(kind)
    assert result.status == "passed", result.message
    assert f"decoding: {kind.found}" in result.message


@pytest.mark.parametrize(("kind", "fault"), one_in(5, ROWS))
def test_a_fault_is_found_at_its_first_position(kind, fault):
    """With the piece, the line and its module."""
    result = checked(kind, fault)
    assert result.status == "failed", result.message
    if fault in FIRST and "generate" not in kind.found:
        words = rf"position {FIRST[fault]} of .* in the piece of 1 after"
        assert re.search(words, result.message), result.message
        place = r"first seen at \w+\.py:\d+ `.*` \((wpe|blocks|cell)\S*\)$"
        assert re.search(place, result.message), result.message


@pytest.mark.parametrize(
    ("kind", "fault"),
    one_in(6, [*ROWS, *((kind, "") for kind in CONVENTIONS)]),
)
def test_the_line_that_parts_from_the_full_pass(kind, fault):
    torch.manual_seed(0)
    parts = {"fault": fault, "__module__": kind.__module__}
    model = type(kind.__name__, (kind,), parts)(block_size=16)
    if "generate" in kind.found or fault == "reset":
        words = "stay for the text" if fault == "reset" else "no cache was fou"
        with pytest.raises(ValueError, match=words):
            diff_cache(model, cache=kind.make_cache)
        return
    found = diff_cache(model, cache=kind.make_cache)
    assert found.says.split(", ")[0] in kind.found
    same = fault in ("", "given", "stale", "float32")  # in other calls
    assert found.same == same, found.sentence
    if not same:
        assert found.position == FIRST[fault], found.sentence
        place = found.line.place
        cells = ["lstm", "gru", "flip"]  # of its rows
        recurrent = issubclass(kind, Recurrent)
        assert place.op in (cells if recurrent else PLACES[fault])
        within = place.op not in ("embedding", *cells)
        assert place.layer == (0 if within else None)
        assert f" at {found.line}" in found.sentence
        assert f"position {found.position} at " in found.sentence


def left_out():
    parts = {"fault": "position", "__module__": PositionsLeftOut.__module__}
    model = type("LeftOut", (PositionsLeftOut,), parts)
    return model, meet(model, block_size=16)


def test_words_choose_no_way(monkeypatch):
    """The record decides, whatever a report calls it."""
    monkeypatch.setattr(Way, "says", "one name for all ways")
    _, subject = left_out()
    way = Decoder(subject, enlarged=False).convention.way
    assert way == Way(
        Setup.ARGUMENT,
        "past_key_values",
        First(Empty.LEFT_OUT),
        flags=("use_cache",),
    )
    assert way.omitted == "position_ids"


def test_a_way_that_omits_positions_is_found_in_another_copy():
    model, subject = left_out()
    decoder = Decoder(subject, enlarged=False)
    said = decoder.convention.says
    copy = model(block_size=16)
    decoder.bind(copy)
    assert decoder.convention.says == said
    assert decoder.convention.function is copy


@pytest.mark.parametrize(
    ("kind", "words"),
    one_in(
        3,
        [
            (MadeInSingle, "; not in bfloat16: in_single() takes no dtype"),
            (RoomInSingle, "; not in bfloat16: room_of() takes no dtype"),
            (RoomOnDevice, "; not in bfloat16: Mover() takes no dtype"),
            (WindowOfPieces, "; pieces of more than 4 tokens are refused"),
            (WindowOfThree, "; pieces of more than 3 tokens are refused"),
            (WindowThenOne, "4 tokens are refused, and after the first of m"),
        ],
    ),
)
def test_what_a_cache_does_not_promise_is_said(kind, words):
    result = checked(kind)
    assert result.status == "passed"
    assert words in result.message


@pytest.mark.parametrize(
    ("kind", "maker", "words"),
    [
        (MadeInSingle, in_any, "in bfloat16 the full forward answers, and d"),
        (WindowCrash, None, "the model raised RuntimeError: the size of a"),
        *(
            (type(kind.__name__, (kind,), {"fault": fault}), None, "fed as ")
            for kind in (WindowOfPieces, WindowOfThree, WindowThenOne)
            for fault in ("position", "mask", "rows")
        ),
    ],
)
def test_what_a_cache_promises_is_required(kind, maker, words):
    report = check_model(kind, checks=["cache"], cache=maker, block_size=16)
    assert report.results[0].status == "failed"
    assert words in report.results[0].message


class CacheOfAnyName(CachedGPT):
    """Takes its cache by a name that says nothing; None is refused."""

    init_cache = None

    def forward(self, x, pack=None, rem=None):
        if rem is None:
            return super().forward(x)
        return self.decode(x, rem)


class CacheOfNoDefault(CacheOfAnyName):
    """The same, and without a cache it has a value of its own."""

    def forward(self, x, pack=None, rem="none"):
        return super().forward(x, rem=None if rem == "none" else rem)


def past(batch):
    return Past()


def step(model, x, rem):
    return model(x, rem=rem or Past())


@pytest.mark.parametrize(
    ("kind", "maker", "status", "words"),
    [
        (CacheOfAnyName, past, "passed", "decoding: rem=past(): lengths to"),
        (
            CacheOfNoDefault,
            past,
            "skipped",
            "past makes a cache, but no argument of forward(x, pack, rem) is "
            "known to take it: give a step(model, tokens, cache)",
        ),
        (CacheOfNoDefault, step, "passed", "decoding: step(model, x, rem): "),
    ],
)
def test_a_cache_of_an_unknown_name(kind, maker, status, words):
    result = check_model(kind, checks=["cache"], cache=maker).results[0]
    assert result.status == status, result.message
    assert words in result.message


def test_there_are_enough_conventions():
    assert len(CONVENTIONS) >= 12
    assert {fault for _, fault in ROWS} == FAULTS.keys()
