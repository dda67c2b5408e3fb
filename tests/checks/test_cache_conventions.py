"""check_cache recognises how each model takes a cache, and finds faults."""

import re

import pytest
import torch
from cache_conventions import (
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
from rows import first_of, slow_unless
from small_gpt import CachedGPT, Past

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
# for each fault: operations that the message may name as the first line that
# differs
PLACES = {
    "position": ["embedding"],
    "mask": ["masked_fill"],
    "rows": ["mT", "cat"],
    "twice": ["embedding"],  # positions depend on the cache's length
    "window": ["embedding", "cat"],
}
EACH = [*ROWS, *((kind, "") for kind in CONVENTIONS)]
FIRST_OF_KIND = first_of(lambda kind, _: kind, ROWS)
FIRST_OF_FAULT = first_of(lambda _, fault: fault, ROWS)


def in_the_fast_suite(*row):
    """Return whether a row is the first of its convention or its fault."""
    return FIRST_OF_KIND(*row) or FIRST_OF_FAULT(*row)


FIRST = {"position": 1, "mask": 1, "rows": 1, "twice": 1, "window": 6}


def checked(kind, fault=""):
    parts = {"fault": fault, "__module__": kind.__module__}
    model = type(kind.__name__, (kind,), parts)
    report = check_model(
        model, checks=["cache"], cache=kind.make_cache, block_size=16
    )
    return report.results[0]


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_a_convention_is_found_and_passes(kind):
    result = checked(kind)
    assert result.status == "passed", result.message
    assert f"decoding: {kind.found}" in result.message


@pytest.mark.parametrize(
    ("kind", "fault"), slow_unless(in_the_fast_suite, ROWS)
)
def test_a_fault_is_found_at_its_first_position(kind, fault):
    """The message names the piece of text, the line, and the line's module."""
    result = checked(kind, fault)
    assert result.status == "failed", result.message
    if fault in FIRST and "generate" not in kind.found:
        words = rf"position {FIRST[fault]} of .* in the piece of 1 after"
        assert re.search(words, result.message), result.message
        place = r"first seen at \w+\.py:\d+ `.*` \((wpe|blocks|cell)\S*\)$"
        assert re.search(place, result.message), result.message


@pytest.mark.parametrize(
    ("kind", "fault"),
    slow_unless(first_of(lambda _, fault: fault, EACH), EACH),
)
def test_diff_cache_names_the_line_that_leaves_the_full_pass(kind, fault):
    torch.manual_seed(0)
    parts = {"fault": fault, "__module__": kind.__module__}
    model = type(kind.__name__, (kind,), parts)(block_size=16)
    if "generate" in kind.found or fault == "reset":
        words = "stay in the cache" if fault == "reset" else "no cache was fou"
        with pytest.raises(ValueError, match=words):
            diff_cache(model, cache=kind.make_cache)
        return
    found = diff_cache(model, cache=kind.make_cache)
    assert found.says.split(", ")[0] in kind.found
    # these are not faults, or the comparison does not show them
    same = fault in ("", "given", "stale", "float32")
    assert found.same == same, found.sentence
    if not same:
        assert found.position == FIRST[fault], found.sentence
        place = found.line.place
        cells = ["lstm", "gru", "flip"]  # operations of recurrent models
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


def test_a_convention_does_not_depend_on_its_name(monkeypatch):
    """The kit compares the fields of a convention, not its printed name."""
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


def test_a_convention_without_positions_is_found_in_a_copy():
    model, subject = left_out()
    decoder = Decoder(subject, enlarged=False)
    said = decoder.convention.says
    copy = model(block_size=16)
    decoder.bind(copy)
    assert decoder.convention.says == said
    assert decoder.convention.function is copy


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MadeInSingle, "; not in bfloat16: in_single() takes no dtype"),
        (RoomInSingle, "; not in bfloat16: room_of() takes no dtype"),
        (RoomOnDevice, "; not in bfloat16: Mover() takes no dtype"),
        (WindowOfPieces, "; pieces of more than 4 tokens are refused"),
        (WindowOfThree, "; pieces of more than 3 tokens are refused"),
        (WindowThenOne, "4 tokens are refused, and later pieces of more"),
    ],
)
def test_missing_promises_of_a_cache_are_noted(kind, words):
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
def test_promises_of_a_cache_are_required(kind, maker, words):
    report = check_model(kind, checks=["cache"], cache=maker, block_size=16)
    assert report.results[0].status == "failed"
    assert words in report.results[0].message


class CacheOfAnyName(CachedGPT):
    """A model with a cache in an argument whose name does not say so.

    Without that argument, a call neither reads nor returns a cache.
    """

    init_cache = None

    def forward(self, x, pack=None, rem=None):
        if rem is None:
            return super().forward(x)
        return self.decode(x, rem)


class CacheOfNoDefault(CacheOfAnyName):
    """A model whose cache argument has a default other than None."""

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
def test_a_cache_of_an_unknown_name_is_found(kind, maker, status, words):
    result = check_model(kind, checks=["cache"], cache=maker).results[0]
    assert result.status == status, result.message
    assert words in result.message


def test_the_zoo_has_enough_conventions_of_caches():
    assert len(CONVENTIONS) >= 12
    assert {fault for _, fault in ROWS} == FAULTS.keys()
