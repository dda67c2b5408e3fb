"""What a call takes beside its tokens: each argument's kind, by its name.

An argument is given in the first of its forms that the model answers. Never
given, and no gap in what is tried, are

- caches and their flags: decoding is the matter of check_cache;
- what chooses the form of an answer or of a loss (ANSWER);
- embeddings, which take the place of the tokens (INSTEAD): a report names
  them, since it is about ids;
- arguments that a model refuses by an exception that names them, such as
  states of an encoder where no layer attends to one.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..stances import FLEX

Make = Callable[[Tensor], Any]  # from tokens (batch, time) to an argument

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
CACHES = {*STRONG, *WEAK, *STARTS, "cache_position", "cache_age"}

ANSWER = re.compile(
    r"(return|output)_\w+|(num_)?logits_to_keep|.*loss.*|.*reduction"
    r"|ignore_index|label_smoothing|num_items_in_batch"
)
INSTEAD = re.compile(r"(decoder_)?(inputs?|tokens?)_?embed(s|ding|dings)?")
# Flags that say whether a model is causal: False is no fault of a model's.
CAUSAL = re.compile(r"(is_|use_)?causal(_mask)?|bidirectional|is_decoder")
NEVER = "never"  # the user's word for an argument that is never given
USERS, FLAGS = "an argument of the user's", "a flag"
FOUR_AXES, PADDING = "a mask of four axes", "a mask of another name"
BLOCKS = "a BlockMask"  # of FlexAttention
MASK = "attention_mask"
SHOWN = {  # by a mask, as shares of the length
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}


@dataclass(frozen=True)
class Input:
    """One form of an argument, or of some that belong together.

    Attributes:
        name: of the argument.
        kind: of KINDS.
        words: of a message.
        make: returns the arguments by their names.
        visible: the positions that a mask shows, as shares of the length.
        single: whether a call takes one row.
        form: forms of an argument are alternatives, in this order.
        own: whether the model's own call takes it, and its log_probs not.
    """

    name: str
    kind: str
    words: str
    make: Callable[[Tensor], dict[str, Any]]
    visible: tuple[float, float] | None = None
    single: bool = False
    form: int = 0
    own: bool = False


# --- How arguments are made --------------------------------------------------


def positions(tokens: Tensor) -> Tensor:
    """Return 0, 1, 2, ... in each row."""
    at = torch.arange(tokens.size(1), device=tokens.device)
    return at.expand(len(tokens), -1).clone()


def halves(tokens: Tensor) -> Tensor:
    """Return 0 in the first half of each row, and 1 in the second."""
    return (positions(tokens) >= tokens.size(1) // 2).long()


def _again(tokens: Tensor) -> Tensor:
    """Return positions of two documents in each row."""
    return positions(tokens) - halves(tokens) * (tokens.size(1) // 2)


def _one_row(tokens: Tensor) -> Tensor:
    return halves(tokens)[0]


def _ends(tokens: Tensor) -> Tensor:
    """Return where documents start and end, in the rows behind each other."""
    rows, time = tokens.shape
    half = [row * time + time // 2 for row in range(rows)] if time > 1 else []
    ends = sorted({*half, *range(0, rows * time + 1, time)})
    return torch.tensor(ends, dtype=torch.int32, device=tokens.device)


def labels(tokens: Tensor) -> Tensor:
    """Return ids 0 and 1: each row's are the same, of whatever length."""
    at = positions(tokens)
    return (7 * at + at // 3) % 2


def shown(visible: tuple[float, float], tokens: Tensor) -> Tensor:
    """Return 1 at positions within shares of the length, and 0 elsewhere."""
    time = tokens.size(1)
    at, (first, last) = positions(tokens), visible
    return ((at >= int(first * time)) & (at < last * time)).long()


def _earlier(tokens: Tensor) -> Tensor:
    size = tokens.size(1)
    ones = torch.ones(size, size, dtype=torch.bool, device=tokens.device)
    return ones.tril()


def _four_axes(tokens: Tensor) -> Tensor:
    mask = _earlier(tokens)
    return mask.expand(len(tokens), 1, *mask.shape).clone()


def _added(tokens: Tensor) -> Tensor:
    mask = _earlier(tokens)
    return torch.zeros(mask.shape, device=mask.device).masked_fill(
        ~mask, -torch.inf
    )


@lru_cache(maxsize=64)  # it takes as long as a call of a small model
def blocks(lengths: tuple[int, ...], device: torch.device) -> Any:
    """Return a BlockMask: causal, within documents of some lengths."""
    make = sys.modules[FLEX].create_block_mask
    with torch.inference_mode(False):  # a call that trains may get it, too
        sizes = torch.tensor(lengths, device=device)
        ids = torch.arange(len(lengths), device=device)
        ids, time = ids.repeat_interleave(sizes), sum(lengths)

        def mask_mod(
            row: Tensor, head: Tensor, q: Tensor, k: Tensor
        ) -> Tensor:
            return (q >= k) & (ids[q] == ids[k])

        return make(mask_mod, None, None, time, time, device=device)


def _blocks(tokens: Tensor) -> Any:
    return blocks((tokens.size(1),), tokens.device)


def _states(width: int, tokens: Tensor) -> Tensor:
    count = len(tokens) * 3 * width
    states = torch.linspace(-1, 1, count, device=tokens.device).sin()
    return states.view(len(tokens), 3, width)


# --- The kinds ---------------------------------------------------------------

DOCUMENT = r"(docs?|documents?|seq|sequence|sample|example)_?(ids?|idx|index)"
CU_SEQLENS = re.compile(r"cu_?seq_?lens?(_(q|k|kv))?")
MAX_SEQLEN = re.compile(r"max_?(seq_?len|length)(_(q|k|kv))?")
# By name: the kind, and the forms of its argument.
KINDS: dict[str, tuple[str, tuple[Make, ...]]] = {
    "positions": (r"pos|positions?|pos(ition)?_ids?", ()),
    "types of tokens": (r"token_types?(_ids?)?|types?_ids?", (halves,)),
    "segments": (r"(\w+_)?seg(ment)?(s|ation)?(_?ids?)?", (halves, _one_row)),
    "documents": (
        rf"{DOCUMENT}|docs?|documents?",
        (halves, lambda tokens: halves(tokens).int(), _one_row),
    ),
    "cu_seqlens": (CU_SEQLENS.pattern, ()),
    "labels": (r"targets?|labels|y", (labels,)),
    PADDING: (r"(?!encoder_|\w*head)\w*mask", ()),
    FOUR_AXES: (MASK, (_four_axes,)),
    BLOCKS: (r"\w*block_?masks?", ()),
    "states of an encoder": (r"encoder_hidden_states", ()),
    FLAGS: ("", ()),
    USERS: ("", ()),
}
WIDTHS = "hidden_size", "d_model", "n_embd"


def takes_blocks(name: str, parameter: inspect.Parameter) -> bool:
    """Whether an argument is a BlockMask, by its name or annotation."""
    named = re.fullmatch(KINDS[BLOCKS][0], name)
    said = "BlockMask" in str(parameter.annotation)
    return FLEX in sys.modules and (said or bool(named))


def required(name: str, parameter: inspect.Parameter) -> Make | None:
    """Return how an argument without a default is made, if it is known."""
    if takes_blocks(name, parameter):
        return _blocks
    for kind, (names, _) in KINDS.items():
        if kind in ("positions", "segments", "documents") and re.fullmatch(
            names, name
        ):
            return positions if kind == "positions" else torch.zeros_like
    return None


def inputs_of(
    model: Any,
    parameters: Mapping[str, inspect.Parameter],
    theirs: Mapping[str, Make | Literal["never"]],
    own: bool = False,
) -> Iterator[Input]:
    """Yield the forms of each argument that can be given.

    Args:
        model: whose states have a width.
        parameters: by their names, without those of tokens and targets.
        theirs: the user's own makers.
        own: whether the model's own call takes them, and its log_probs not.
    """
    for name, parameter in parameters.items():
        maker = theirs.get(name)
        if callable(maker):
            forms = [[_input(name, USERS, maker)]]
        elif maker is not None:
            continue
        elif (flags := _flags(name, parameter)) is not None:
            forms = [[_flag(name, flag) for flag in flags]]
        else:
            forms = [*_forms(model, parameters, name, own)]
        for form, alike in enumerate(forms):
            yield from (replace(one, form=form, own=own) for one in alike)


def _input(name: str, kind: str, make: Make, words: str = "") -> Input:
    return Input(name, kind, words or name, lambda ids: {name: make(ids)})


def _flag(name: str, flag: bool) -> Input:
    return _input(name, FLAGS, lambda ids: flag, f"{name}={flag}")


def _forms(
    model: Any,
    parameters: Mapping[str, inspect.Parameter],
    name: str,
    own: bool,
) -> Iterator[list[Input]]:
    """Yield the alternatives of an argument whose kind its name says."""
    if takes_blocks(name, parameters[name]):
        yield [_input(name, BLOCKS, _blocks)]
    for kind, (names, makes) in KINDS.items():
        if not re.fullmatch(names, name):
            continue
        if kind == "positions":
            again = _input(name, kind, _again, f"{name} that start again")
            yield [_input(name, kind, positions), again]
        for make in makes:
            words = kind if kind == FOUR_AXES else name
            one = _input(name, kind, make, words)
            yield [replace(one, single=make is _one_row)]
        if kind == "cu_seqlens":
            ends = [n for n in parameters if CU_SEQLENS.fullmatch(n)]
            longest = [n for n in parameters if MAX_SEQLEN.fullmatch(n)]
            make = partial(_packed, ends, longest)
            if name == ends[0]:
                yield [Input(name, kind, name, make, single=True)]
        if kind == PADDING and (own or name != MASK):
            for hides in (False, True):
                yield [
                    replace(
                        _input(
                            name,
                            kind,
                            partial(_padding, visible, hides),
                            f"{how} {name}",
                        ),
                        visible=visible,
                    )
                    for how, visible in SHOWN.items()
                ]
            for make in (_earlier, _later, _added, _four_axes):
                yield [_input(name, kind, make)]
        if kind == "states of an encoder":
            config = getattr(model, "config", None)
            sizes = [getattr(config, width, None) for width in WIDTHS]
            for width in [n for n in sizes if isinstance(n, int)][:1]:
                yield [_input(name, kind, partial(_states, width))]


def passed_over(name: str) -> bool:
    """Whether an argument is no gap where it is not given: see above."""
    names = FLAG, ANSWER, INSTEAD
    with_states = "encoder_attention_mask"
    return name in (*CACHES, with_states) or any(
        pattern.fullmatch(name) for pattern in names
    )


def _packed(ends: list[str], longest: list[str], tokens: Tensor) -> dict:
    cu_seqlens = _ends(tokens)
    found: dict[str, Any] = {name: cu_seqlens.clone() for name in ends}
    return found | dict.fromkeys(longest, int(cu_seqlens.diff().max()))


def _flags(name: str, parameter: inspect.Parameter) -> list[bool] | None:
    """Return the other states of a flag, or None for what is none."""
    default = parameter.default
    said = str(getattr(parameter.annotation, "__name__", parameter.annotation))
    if default is None and re.fullmatch(r"(\w+\.)?(Optional\[)?bool.*", said):
        return [] if passed_over(name) else [True, False]
    if not isinstance(default, bool):
        return None
    skip = CAUSAL.fullmatch(name) or FLAG.fullmatch(name)
    return [] if skip else [not default]


def _padding(
    visible: tuple[float, float], hides: bool, tokens: Tensor
) -> Tensor:
    return shown(visible, tokens).bool() ^ hides


def _later(tokens: Tensor) -> Tensor:
    return ~_earlier(tokens)
