"""Make the arguments of a call besides its tokens, by their kinds and names.

An argument is made from the tokens and from the layout of their rows (the
padding and the documents of each row). Each argument has several forms, and
the model gets the first form that it accepts. Arguments that users give
together are also tried together (`together`). The following arguments are left
out on purpose:

- caches: decoding is for check_cache;
- arguments that select the form of a loss (ANSWER), except flags;
- embeddings, which replace the tokens (INSTEAD): the checks give ids, and the
  report names these arguments;
- arguments that the model's exception names, such as encoder states if no
  layer has cross-attention.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from ..operations import FLEX
from .sizes import all_declared

Make = Callable[[Tensor], Any]  # makes an argument from tokens (batch, time)


@dataclass(frozen=True)
class Layout:
    """How the rows of a call are laid out.

    Attributes:
        places: for each row, the place in a batch for which its arguments are
            made.
        lengths: lengths of the documents in each row.
    """

    places: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def alike(cls, rows: int, lengths: Sequence[int]) -> "Layout":
        """Return the layout of rows whose documents have the same lengths."""
        return cls((*range(rows),), ((*lengths,),) * rows)


Packed = Callable[[Tensor, Layout], Any]  # takes tokens and the layout

# Names of arguments that take the current cache. Those in WEAK have other uses
# too: such an argument is a cache only if the model returned its value.
STRONG = (
    *("past_key_values", "past_key_value", "kv_cache", "kv_caches"),
    *("layer_past", "past_kv", "past_kvs", "past", "caches", "cache_params"),
    *("inference_params", "incremental_state"),
)
WEAK = (
    *("cache", "kv", "mems", "memory", "hidden", "hx", "state", "states"),
    "prev_hiddens",
)
STATES = ("cache_params", *WEAK[2:])  # caches that need no mask
# Names of arguments that may take a cache, if the user declares one.
CACHED = re.compile(r"cache|past|prev|hidden|state|mem|kv")
# Names of flags without which a model neither fills nor returns a cache.
FLAG = re.compile(
    r"(use|with|return|output|enable)_?(kv_?)?"
    r"(cache|caches|kv|past|state|hidden|mems|intermediates|prev_hiddens)"
)
# Names of arguments for the start of a text piece: a number, or positions.
NUMBERS = ("start_pos", "pos", "offset", "start_index", "past_length")
STARTS = (*NUMBERS, "input_pos")
OTHERS = "cache_position", "cache_age"
ENCODED, ENCODED_MASK = "encoder_hidden_states", "encoder_attention_mask"
CACHES = {*STRONG, *WEAK, *STARTS, *OTHERS}

ANSWER = re.compile(
    r"(\w+_)?loss(es)?|(\w+_)?reduction|ignore_index|label_smoothing"
    r"|num_items_in_batch"
)
OF_ANSWERS = re.compile(r"(return|output)_")  # flags that set an answer's form
INSTEAD = re.compile(r"(decoder_)?(inputs?|tokens?)_?embed(s|ding|dings)?")
# Flags that switch causality on or off; they keep their defaults.
CAUSAL = re.compile(r"(is_|use_)?causal(_mask)?|bidirectional|is_decoder")
MASK = "attention_mask"
REFUSALS = ValueError, NotImplementedError  # exceptions that refuse a call
SHOWN = {  # start and end of what a mask shows in a row, as shares
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}
PARTS = 1.0, 0.5, 0.0  # shares of the padding in rows 0, 1, 2


@dataclass(frozen=True)
class Input:
    """One form of an argument, or of arguments that belong together."""

    name: str  # the argument's name
    kind: str  # one of KINDS
    words: str  # the argument in words, for messages
    # returns the arguments by name, from tokens and the layout of their rows
    values: Callable[[Tensor, Layout], dict[str, Any]]
    visible: tuple[float, float] | None = None  # what a mask shows, see SHOWN
    single: bool = False  # whether a call with it takes only one row
    own: bool = False  # whether only forward takes it, not log_probs
    packed: bool = False  # whether it tells where documents are
    keeps: bool = False  # whether a call may leave a cache in the model

    @property
    def by_rows(self) -> bool:
        """Return whether a row's arguments are independent of other rows."""
        return not self.single and self.kind != USERS

    def make(
        self, tokens: Tensor, places: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """Return the values of the arguments by name.

        Args:
            tokens: tokens of the same call.
            places: places of the rows in their batch; () means 0, 1, 2, ...
        """
        places = places or (*range(len(tokens)),)
        lengths = tuple(self.lengths(tokens.size(1), at) for at in places)
        return self.values(tokens, Layout(places, lengths))

    def lengths(self, time: int, place: int) -> tuple[int, ...]:
        """Return the lengths of the documents in a row."""
        if not self.packed:
            return (time,)
        cut = int(CUTS[place % len(CUTS)] * time)
        return tuple(n for n in (cut, time - cut) if n)


# --- How arguments are made --------------------------------------------------


def positions(tokens: Tensor, layout: Layout) -> Tensor:
    """Return 0, 1, 2, ... in each document of each row."""
    rows = [torch.cat([*map(torch.arange, n)]) for n in layout.lengths]
    return torch.stack(rows).to(tokens.device)


def documents(tokens: Tensor, layout: Layout) -> Tensor:
    """Return the number of each token's document, from 0 in each row."""
    rows = [
        torch.arange(len(n)).repeat_interleave(torch.tensor(n))
        for n in layout.lengths
    ]
    return torch.stack(rows).to(tokens.device)


def _one_row(tokens: Tensor, layout: Layout) -> Tensor:
    return documents(tokens, layout)[0]


def _ends(tokens: Tensor, layout: Layout) -> Tensor:
    """Return where documents start and end, with all rows joined into one."""
    sizes = torch.tensor([0, *chain(*layout.lengths)], device=tokens.device)
    return sizes.cumsum(0).unique().int()


def _seen(tokens: Tensor, layout: Layout) -> Tensor:
    """Return which tokens each token sees: those up to it in its document."""
    ids = _one_row(tokens, layout)
    return (ids.unsqueeze(1) == ids).tril()


def _four_axes(tokens: Tensor, layout: Layout) -> Tensor:
    ids = documents(tokens, layout)
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)


@lru_cache(maxsize=64)  # because making a mask takes as long as a small call
def _block_mask(
    lengths: tuple[tuple[int, ...], ...], device: torch.device
) -> Any:
    """Return a BlockMask for rows of these documents; equal rows share one."""
    make, time = sys.modules[FLEX].create_block_mask, sum(lengths[0])
    alike = len({*lengths}) == 1
    with torch.inference_mode(False):  # training calls may get it as well
        ids = documents(
            torch.empty(1, device=device),
            Layout((), lengths[: 1 if alike else None]),
        )

        def mask_mod(row: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
            at = 0 if alike else row
            return (q >= k) & (ids[at, q] == ids[at, k])

        rows = None if alike else len(lengths)
        return make(mask_mod, rows, None, time, time, device=device)


def _positions(tokens: Tensor) -> Tensor:
    """Return 0, 1, 2, ... in each row."""
    return torch.arange(tokens.size(1), device=tokens.device).repeat(
        len(tokens), 1
    )


def labels(tokens: Tensor, layout: Layout | None = None) -> Tensor:
    """Return targets of 0 and 1 that do not depend on the rows' length."""
    at = _positions(tokens)
    return (7 * at + at // 3) % 2


def shown(
    visible: tuple[float, float],
    tokens: Tensor,
    places: tuple[int, ...] = (),
) -> Tensor:
    """Return 1 at the positions that a mask shows, and 0 elsewhere.

    The rows of a batch are padded differently: the first one by the given
    shares of the length, the second half as much, the third not at all.
    """
    time, (first, last) = tokens.size(1), visible
    parts = [PARTS[at % len(PARTS)] for at in places or range(len(tokens))]
    starts = [int(first * part * time) for part in parts]
    ends = [math.ceil((1 - (1 - last) * part) * time) for part in parts]
    at = _positions(tokens)
    low, high = torch.tensor([starts, ends], device=at.device).unsqueeze(2)
    return ((at >= low) & (at < high)).long()


def _counted(mask: Tensor) -> Tensor:
    """Return positions that count only the tokens that a mask shows."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _padding(visible: tuple[float, float], hides: bool) -> Packed:
    return lambda tokens, layout: (
        shown(visible, tokens, layout.places).bool() ^ hides
    )


def _alone(make: Make) -> Packed:
    return lambda tokens, layout: make(tokens)


def _flag(flag: bool) -> Packed:
    return lambda tokens, layout: flag


def _states(width: int, tokens: Tensor, layout: Layout) -> Tensor:
    rows = torch.tensor(layout.places, device=tokens.device)
    states = torch.linspace(-1, 1, 3 * width, device=tokens.device)
    return (states + rows.unsqueeze(1)).sin().view(len(rows), 3, width)


def _shown_states(tokens: Tensor, layout: Layout) -> Tensor:
    return tokens.new_ones(len(tokens), 3)


# --- The kinds ---------------------------------------------------------------

USERS, FLAGS = "an argument of the user's", "a flag"
KEEPS = "a flag of a cache"
TOGETHER = "arguments together"
MASK_AND_TARGETS = "a mask with targets"
TARGETS_TOO = "an argument with targets"
FOUR_AXES, PADDING = "a mask of four axes", "a mask of another name"
BLOCKS, AGAIN = "a BlockMask", "positions that start again"
POSITIONS = r"pos|positions?|pos(ition)?_ids?"
CU_SEQLENS = r"(cu_?seq_?lens?|max_?(seq_?len|length))(_(q|k|kv))?"
WIDTHS = "hidden_size", "d_model", "n_embd"
# For each kind: a pattern of argument names, and functions that make forms.
KINDS: dict[str, tuple[str, tuple[Packed, ...]]] = {
    "positions": (POSITIONS, (positions,)),
    AGAIN: (POSITIONS, (positions,)),
    "types of tokens": (r"token_types?(_ids?)?|types?_ids?", (documents,)),
    "documents": (
        r"(\w+_)?seg(ment)?(s|ation)?(_?ids?)?|docs?|documents?|"
        r"(docs?|documents?|seq|sequence|sample|example)_?(ids?|idx|index)",
        (documents, lambda *of: documents(*of).int(), _one_row),
    ),
    "cu_seqlens": (CU_SEQLENS, ()),
    "scores to keep": (
        r"(num_)?logits_to_keep",
        (lambda ids, layout: ids.size(1),),
    ),
    "labels": (r"targets?|(shift_)?labels|y", (labels,)),
    BLOCKS: (
        r"\w*block_?masks?",
        (lambda ids, layout: _block_mask(layout.lengths, ids.device),),
    ),
    PADDING: (
        r"(?!encoder_|\w*head)\w*mask",
        (
            _seen,
            lambda *of: ~_seen(*of),
            lambda *of: torch.where(_seen(*of), 0.0, -torch.inf),
            _four_axes,
        ),
    ),
    FOUR_AXES: (MASK, (_four_axes,)),
    "states of an encoder": (ENCODED, ()),
    **dict.fromkeys((FLAGS, KEEPS, USERS, TOGETHER), ("", ())),
}
# kinds that tell where documents are
PACKED = AGAIN, "types of tokens", "documents", "cu_seqlens"
CUTS = 1 / 2, 1 / 4, 3 / 4  # start of the second document in rows 0, 1, 2
NO_MASK = FOUR_AXES, PADDING, BLOCKS, AGAIN, TOGETHER, "labels"


def _kinds(name: str, parameter: inspect.Parameter) -> list[str]:
    said = "BlockMask" in str(parameter.annotation)
    if FLEX in sys.modules and (said or re.fullmatch(KINDS[BLOCKS][0], name)):
        return [BLOCKS]
    kinds = [kind for kind in KINDS if re.fullmatch(KINDS[kind][0], name)]
    return [kind for kind in kinds if kind != BLOCKS]


def required(name: str, parameter: inspect.Parameter) -> Make | None:
    """Return a function that makes an argument without a default, or None."""
    for kind in _kinds(name, parameter):
        if kind in ("positions", "documents", BLOCKS):
            make = KINDS[kind][1][0]
            return lambda tokens: make(
                tokens, Layout.alike(len(tokens), [tokens.size(1)])
            )
    return None


def inputs_of(
    model: Any,
    parameters: Mapping[str, inspect.Parameter],
    theirs: Mapping[str, Make | Literal["never"]],
    own: bool = False,
) -> Iterator[list[list[Input]]]:
    """Yield the possible forms of each argument.

    A form is a list of Inputs, such as masks with different padding. The model
    is called with each Input of the first form that it accepts.

    Args:
        model: the model, whose width the states of an encoder must have.
        parameters: parameters by name, without tokens and targets.
        theirs: the user's functions that make arguments.
        own: whether only forward takes these parameters, and not log_probs.
    """
    for name, parameter in parameters.items():
        one, maker = partial(_input, name, own), theirs.get(name)
        flags = _flags(name, parameter)
        if callable(maker):
            yield [[one(USERS, _alone(maker))]]
        elif flags is not None and maker is None:
            kind = KEEPS if keeps(name) else FLAGS
            yield [[one(kind, _flag(f), f"{name}={f}") for f in flags]]
        elif maker is None:
            for kind in _kinds(name, parameter):
                if kind != PADDING or own or name != MASK:
                    yield [*_forms(model, parameters, name, own, kind)]


def _input(
    name: str, own: bool, kind: str, make: Packed, words: str = "", **more: Any
) -> Input:
    return Input(
        name,
        kind,
        words or name,
        lambda *of: {name: make(*of)},
        own=own,
        packed=kind in PACKED,
        keeps=kind == KEEPS,
        **more,
    )


def _forms(
    model: Any,
    parameters: Mapping[str, inspect.Parameter],
    name: str,
    own: bool,
    kind: str,
) -> Iterator[list[Input]]:
    one = partial(_input, name, own, kind)
    if kind == "cu_seqlens":
        names = [n for n in parameters if re.fullmatch(CU_SEQLENS, n)]
        if name == next((n for n in names if n.startswith("cu")), None):

            def ends(ids: Tensor, layout: Layout) -> dict[str, Any]:
                most = max(chain(*layout.lengths))
                longest = {n: most for n in names if n.startswith("max")}
                return dict.fromkeys(names, _ends(ids, layout)) | longest

            given = Input(name, kind, name, ends, single=True, own=own)
            yield [replace(given, packed=True)]
    if kind == "states of an encoder":
        for width in all_declared(model, WIDTHS)[:1]:
            states = one(partial(_states, width.value))
            mask = _input(ENCODED_MASK, own, kind, _shown_states)
            both = replace(_joined(states, mask), kind=kind)
            yield [states, both] if ENCODED_MASK in parameters else [states]
    for hides in (False, True) if kind == PADDING else ():
        yield [
            one(_padding(at, hides), f"{how} {name}", visible=at)
            for how, at in SHOWN.items()
        ]
    words = {FOUR_AXES: kind, AGAIN: f"{name} that start again"}.get(kind, "")
    for make in KINDS[kind][1]:
        yield [one(make, words, single=make is _one_row)]


def _flags(name: str, parameter: inspect.Parameter) -> list[bool] | None:
    """Return a flag's values besides its default, None if it is no flag."""
    default = parameter.default
    said = str(getattr(parameter.annotation, "__name__", parameter.annotation))
    says_so = re.fullmatch(r"(\w+\.)?(Optional\[)?bool.*", said)
    named_so = FLAG.fullmatch(name) or OF_ANSWERS.match(name)
    if default is None and (says_so or named_so):
        return [True] if named_so or passed_over(name) else [True, False]
    if not isinstance(default, bool):
        return None
    return [] if CAUSAL.fullmatch(name) else [not default]


def keeps(name: str) -> bool:
    """Return whether an argument is for a cache that a call may fill."""
    return name in CACHES or bool(FLAG.fullmatch(name))


def passed_over(name: str) -> bool:
    """Return whether a name is that of a cache, loss option or embedding."""
    patterns = ANSWER, INSTEAD
    return name in CACHES or any(p.fullmatch(name) for p in patterns)


# --- Arguments that occur together -------------------------------------------


def together(found: Sequence[Input], takes_mask: bool) -> Iterator[Input]:
    """Yield combinations of arguments that real calls give, each as an Input.

    Each argument is combined with a padding mask. Positions and flags of
    caches get a mask for left padding, as in generation. Other arguments get a
    mask for right padding. Documents are combined with positions that restart.

    Args:
        found: the arguments that the model accepts separately.
        takes_mask: whether the call takes a padding mask.
    """
    packed = _packed_with_positions(found)
    yield from packed
    for given in found if takes_mask else ():
        left = given.kind in ("positions", KEEPS)
        mask = mask_input("a left-padded" if left else "a right-padded")
        if given.kind == "positions":
            yield _positions_of(mask, given)
        elif given.kind not in NO_MASK and given.visible is None:
            yield _joined(mask, given)
    for given in packed if takes_mask else ():
        yield _joined(mask_input("a right-padded"), given)


def with_targets(found: Sequence[Input], takes_mask: bool) -> Iterator[Input]:
    """Yield arguments that are given with targets in a training call."""
    for how in ("a left-padded", "a right-padded") if takes_mask else ():
        yield replace(mask_input(how), kind=MASK_AND_TARGETS)
    for given in (*_packed_with_positions(found), *found):
        if given.kind != "labels":
            yield replace(given, kind=TARGETS_TOO)


def _packed_with_positions(found: Sequence[Input]) -> list[Input]:
    """Return documents and positions that restart, as one Input."""
    places = [i for i in found if i.kind == "positions"]
    packed = [i for i in found if i.kind in ("documents", "cu_seqlens")]
    return [_joined(packed[0], places[0])] if packed and places else []


def mask_input(how: str) -> Input:
    """Return the padding mask that has this name in SHOWN, as an Input."""
    visible = SHOWN[how]
    return Input(
        MASK,
        TOGETHER,
        f"{how} {MASK}",
        lambda ids, layout: {MASK: shown(visible, ids, layout.places)},
        visible=visible,
    )


def _positions_of(mask: Input, given: Input) -> Input:
    """Return a mask, with positions that count only the visible tokens."""

    def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
        made = mask.values(tokens, layout)
        return made | {given.name: _counted(made[MASK])}

    words = f"{mask.words} and {given.words}"
    return replace(mask, words=words, values=values, own=given.own)


def _joined(*parts: Input) -> Input:
    """Join several Inputs into one."""

    def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
        made = [part.values(tokens, layout) for part in parts]
        return {name: value for each in made for name, value in each.items()}

    shares = [part.visible for part in parts if part.visible is not None]
    return Input(
        parts[0].name,
        TOGETHER,
        " and ".join(part.words for part in parts),
        values,
        visible=shares[0] if shares else None,
        single=any(part.single for part in parts),
        own=any(part.own for part in parts),
        packed=any(part.packed for part in parts),
        keeps=any(part.keeps for part in parts),
    )
