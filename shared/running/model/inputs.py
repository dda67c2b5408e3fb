"""What a call takes next to its tokens: each argument's kind, by its name.

An argument is made from the tokens and from the layout of their rows (which
are padded differently, and hold other documents), and given in the first of
its forms that the model answers. Those that occur together in the field are
given together, too (`together`). Never given, and no gap in what is tried, are

- caches: decoding is for check_cache;
- what chooses the form of an answer or of a loss (ANSWER), but for flags;
- embeddings, which take the place of the tokens (INSTEAD): a report names
  them, since it is about ids;
- arguments that a model refuses by an exception that names them, such as
  states of an encoder where no layer attends to one.
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

Make = Callable[[Tensor], Any]  # from tokens (batch, time) to an argument


@dataclass(frozen=True)
class Layout:
    """How the rows of a call are laid out.

    Attributes:
        places: of each row, in the batch whose arguments the rows get.
        lengths: of the documents in each row.
    """

    places: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def alike(cls, rows: int, lengths: Sequence[int]) -> "Layout":
        """Return the layout of rows whose documents have the same lengths."""
        return cls((*range(rows),), ((*lengths,),) * rows)


Packed = Callable[[Tensor, Layout], Any]  # and from the layout of their rows

# Arguments of a call that take the cache so far. The weak names also stand
# for other things: only a value that the model itself returned is a cache.
STRONG = (
    *("past_key_values", "past_key_value", "kv_cache", "kv_caches"),
    *("layer_past", "past_kv", "past_kvs", "past", "caches", "cache_params"),
    *("inference_params", "incremental_state"),
)
WEAK = (
    *("cache", "kv", "mems", "memory", "hidden", "hx", "state", "states"),
    "prev_hiddens",
)
STATES = ("cache_params", *WEAK[2:])  # of a recurrence: nothing to hide later
# Names of arguments that may take a cache, which the user then names.
CACHED = re.compile(r"cache|past|prev|hidden|state|mem|kv")
# Flags without which no cache is filled, or none comes back.
FLAG = re.compile(
    r"(use|with|return|output|enable)_?(kv_?)?"
    r"(cache|caches|kv|past|state|hidden|mems|intermediates|prev_hiddens)"
)
# Arguments that say where a piece starts, as a number or as positions.
NUMBERS = ("start_pos", "pos", "offset", "start_index", "past_length")
STARTS = (*NUMBERS, "input_pos")
OTHERS = "cache_position", "cache_age"
ENCODED, ENCODED_MASK = "encoder_hidden_states", "encoder_attention_mask"
CACHES = {*STRONG, *WEAK, *STARTS, *OTHERS}

ANSWER = re.compile(
    r"(return|output)_\w+|(num_)?logits_to_keep|.*loss.*|.*reduction"
    r"|ignore_index|label_smoothing|num_items_in_batch"
)
INSTEAD = re.compile(r"(decoder_)?(inputs?|tokens?)_?embed(s|ding|dings)?")
# Flags that say whether a model is causal: False is not a fault of a model's.
CAUSAL = re.compile(r"(is_|use_)?causal(_mask)?|bidirectional|is_decoder")
MASK = "attention_mask"
REFUSALS = ValueError, NotImplementedError  # of a call that is not supported
SHOWN = {  # by a mask, as shares of the length
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}
PARTS = 1.0, 0.5, 0.0  # of such padding, in each of the rows of a batch


@dataclass(frozen=True)
class Input:
    """One form of an argument, or of some that belong together."""

    name: str  # of the argument
    kind: str  # of KINDS
    words: str  # of a message
    # the arguments by name, from tokens and the layout of their rows
    values: Callable[[Tensor, Layout], dict[str, Any]]
    visible: tuple[float, float] | None = None  # by a mask, see SHOWN
    single: bool = False  # whether a call takes one row
    own: bool = False  # the model's own call takes it, its log_probs not
    packed: bool = False  # whether it says where documents are
    keeps: bool = False  # whether a call may leave a cache in the model

    @property
    def by_rows(self) -> bool:
        """Whether each row has arguments that no other row changes."""
        return not self.single and self.kind != USERS

    def make(
        self, tokens: Tensor, places: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """Return the arguments by their names.

        Args:
            tokens: that the call gets with them.
            places: of the rows in their batch; (): the first ones.
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
    """Return each token's document, counted from 0 in each row."""
    rows = [
        torch.arange(len(n)).repeat_interleave(torch.tensor(n))
        for n in layout.lengths
    ]
    return torch.stack(rows).to(tokens.device)


def _one_row(tokens: Tensor, layout: Layout) -> Tensor:
    return documents(tokens, layout)[0]


def _ends(tokens: Tensor, layout: Layout) -> Tensor:
    """Return where documents start and end, in the rows behind each other."""
    sizes = torch.tensor([0, *chain(*layout.lengths)], device=tokens.device)
    return sizes.cumsum(0).unique().int()


def _seen(tokens: Tensor, layout: Layout) -> Tensor:
    """Return which tokens each one sees: earlier ones of its document."""
    ids = _one_row(tokens, layout)
    return (ids.unsqueeze(1) == ids).tril()


def _four_axes(tokens: Tensor, layout: Layout) -> Tensor:
    ids = documents(tokens, layout)
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)


@lru_cache(maxsize=64)  # it takes as long as a call of a small model
def _block_mask(
    lengths: tuple[tuple[int, ...], ...], device: torch.device
) -> Any:
    """Return the mask of rows; (rows) is left out where they are alike."""
    make, time = sys.modules[FLEX].create_block_mask, sum(lengths[0])
    alike = len({*lengths}) == 1
    with torch.inference_mode(False):  # a call that trains may get it as well
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
    """Return ids 0 and 1: each row's are the same, of whatever length."""
    at = _positions(tokens)
    return (7 * at + at // 3) % 2


def shown(
    visible: tuple[float, float],
    tokens: Tensor,
    places: tuple[int, ...] = (),
) -> Tensor:
    """Return 1 at the positions that a mask shows, and 0 elsewhere.

    The rows of a batch are padded differently: the first one as the shares of
    the length say, the next one by half as much, the third not at all.
    """
    time, (first, last) = tokens.size(1), visible
    parts = [PARTS[at % len(PARTS)] for at in places or range(len(tokens))]
    starts = [int(first * part * time) for part in parts]
    ends = [math.ceil((1 - (1 - last) * part) * time) for part in parts]
    at = _positions(tokens)
    low, high = torch.tensor([starts, ends], device=at.device).unsqueeze(2)
    return ((at >= low) & (at < high)).long()


def _counted(mask: Tensor) -> Tensor:
    """Return positions that do not count what a mask hides."""
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
# By name: the kind, and the forms of its argument.
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
PACKED = AGAIN, "types of tokens", "documents", "cu_seqlens"  # two in a row
CUTS = 1 / 2, 1 / 4, 3 / 4  # between the two, in each of the rows
NO_MASK = FOUR_AXES, PADDING, BLOCKS, AGAIN, TOGETHER, "labels"


def _kinds(name: str, parameter: inspect.Parameter) -> list[str]:
    said = "BlockMask" in str(parameter.annotation)
    if FLEX in sys.modules and (said or re.fullmatch(KINDS[BLOCKS][0], name)):
        return [BLOCKS]
    kinds = [kind for kind in KINDS if re.fullmatch(KINDS[kind][0], name)]
    return [kind for kind in kinds if kind != BLOCKS]


def required(name: str, parameter: inspect.Parameter) -> Make | None:
    """Return how an argument without a default is made, if it is known."""
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
    """Yield the forms of each argument that can be given.

    Those of a form are given next to each other, forms are alternatives.

    Args:
        model: whose states have a width.
        parameters: by their names, without those of tokens and targets.
        theirs: the user's own makers.
        own: whether the model's own call takes them, and its log_probs not.
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
    """Return the other states of a flag, or None for what is none."""
    default = parameter.default
    said = str(getattr(parameter.annotation, "__name__", parameter.annotation))
    says_so = re.fullmatch(r"(\w+\.)?(Optional\[)?bool.*", said)
    named_so = FLAG.fullmatch(name) or re.match("(return|output)_", name)
    if default is None and (says_so or named_so):
        return [True] if named_so or passed_over(name) else [True, False]
    if not isinstance(default, bool):
        return None
    return [] if CAUSAL.fullmatch(name) else [not default]


def keeps(name: str) -> bool:
    """Whether an argument has to do with a cache, which a call may fill."""
    return name in CACHES or bool(FLAG.fullmatch(name))


def passed_over(name: str) -> bool:
    """Whether an argument is no gap where it is not given: see above."""
    patterns = ANSWER, INSTEAD
    return name in CACHES or any(p.fullmatch(name) for p in patterns)


# --- Arguments that occur together -------------------------------------------


def together(found: Sequence[Input], takes_mask: bool) -> Iterator[Input]:
    """Yield arguments that calls in the field give together, as one.

    Each other argument gets a mask of padding: on the left with
    positions and flags of caches, as where a text is generated, else on the
    right. Documents come with positions that start again.

    Args:
        found: the arguments that the model answers, each by itself.
        takes_mask: whether the call takes a mask of padding.
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
    """Yield the arguments that a training call gives with its targets."""
    for how in ("a left-padded", "a right-padded") if takes_mask else ():
        yield replace(mask_input(how), kind=MASK_AND_TARGETS)
    for given in (*_packed_with_positions(found), *found):
        if given.kind != "labels":
            yield replace(given, kind=TARGETS_TOO)


def _packed_with_positions(found: Sequence[Input]) -> list[Input]:
    """Return documents and positions that start again, as one."""
    places = [i for i in found if i.kind == "positions"]
    packed = [i for i in found if i.kind in ("documents", "cu_seqlens")]
    return [_joined(packed[0], places[0])] if packed and places else []


def mask_input(how: str) -> Input:
    """Return a mask of padding, as SHOWN has it, as an argument."""
    visible = SHOWN[how]
    return Input(
        MASK,
        TOGETHER,
        f"{how} {MASK}",
        lambda ids, layout: {MASK: shown(visible, ids, layout.places)},
        visible=visible,
    )


def _positions_of(mask: Input, given: Input) -> Input:
    """Return a mask, and positions that do not count what it hides."""

    def values(tokens: Tensor, layout: Layout) -> dict[str, Any]:
        made = mask.values(tokens, layout)
        return made | {given.name: _counted(made[MASK])}

    words = f"{mask.words} and {given.words}"
    return replace(mask, words=words, values=values, own=given.own)


def _joined(*parts: Input) -> Input:
    """Return several arguments as one."""

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
