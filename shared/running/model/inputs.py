"""What a call takes beside its tokens: each argument's kind, by its name.

An argument is made from the tokens and from the lengths of the documents in
their rows, and given in the first of its forms that the model answers. Never
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
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..operations import FLEX
from .sizes import all_declared

Make = Callable[[Tensor], Any]  # from tokens (batch, time) to an argument
Packed = Callable[[Tensor, list[int]], Any]  # and from documents' lengths

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
OTHERS = "cache_position", "cache_age", "encoder_attention_mask"
CACHES = {*STRONG, *WEAK, *STARTS, *OTHERS}

ANSWER = re.compile(
    r"(return|output)_\w+|(num_)?logits_to_keep|.*loss.*|.*reduction"
    r"|ignore_index|label_smoothing|num_items_in_batch"
)
INSTEAD = re.compile(r"(decoder_)?(inputs?|tokens?)_?embed(s|ding|dings)?")
# Flags that say whether a model is causal: False is no fault of a model's.
CAUSAL = re.compile(r"(is_|use_)?causal(_mask)?|bidirectional|is_decoder")
NEVER = "never"  # the user's word for an argument that is never given
MASK = "attention_mask"
REFUSALS = ValueError, NotImplementedError  # of a call that is not supported
SHOWN = {  # by a mask, as shares of the length
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}


@dataclass(frozen=True)
class Input:
    """One form of an argument, or of some that belong together."""

    name: str  # of the argument
    kind: str  # of KINDS
    words: str  # of a message
    # the arguments by name, from tokens and lengths of documents
    values: Callable[[Tensor, list[int]], dict[str, Any]]
    visible: tuple[float, float] | None = None  # by a mask, see SHOWN
    single: bool = False  # whether a call takes one row
    own: bool = False  # the model's own call takes it, its log_probs not

    def make(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments by their names."""
        time = tokens.size(1)
        halves = [n for n in (time // 2, time - time // 2) if n]
        return self.values(tokens, halves if self.kind in PACKED else [time])


# --- How arguments are made --------------------------------------------------


def positions(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return 0, 1, 2, ... in each document of each row."""
    at = [torch.arange(n, device=tokens.device) for n in lengths]
    return torch.cat(at).repeat(len(tokens), 1)


def documents(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return each token's document, counted from 0 in each row."""
    sizes = torch.tensor(lengths, device=tokens.device)
    ids = torch.arange(len(lengths), device=tokens.device)
    return ids.repeat_interleave(sizes).repeat(len(tokens), 1)


def _one_row(tokens: Tensor, lengths: list[int]) -> Tensor:
    return documents(tokens, lengths)[0]


def _ends(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return where documents start and end, in the rows behind each other."""
    sizes = torch.tensor([0, *lengths * len(tokens)], device=tokens.device)
    return sizes.cumsum(0).unique().int()


def _seen(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return which tokens each one sees: earlier ones of its document."""
    ids = _one_row(tokens, lengths)
    return (ids.unsqueeze(1) == ids).tril()


def _four_axes(tokens: Tensor, lengths: list[int]) -> Tensor:
    return _seen(tokens, lengths).repeat(len(tokens), 1, 1, 1)


@lru_cache(maxsize=64)  # it takes as long as a call of a small model
def _block_mask(lengths: tuple[int, ...], device: torch.device) -> Any:
    make, time = sys.modules[FLEX].create_block_mask, sum(lengths)
    with torch.inference_mode(False):  # a call that trains may get it, too
        ids = _one_row(torch.empty(1, device=device), [*lengths])

        def mask_mod(row: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (ids[q] == ids[k])

        return make(mask_mod, None, None, time, time, device=device)


def labels(tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
    """Return ids 0 and 1: each row's are the same, of whatever length."""
    at = positions(tokens, [tokens.size(1)])
    return (7 * at + at // 3) % 2


def shown(visible: tuple[float, float], tokens: Tensor) -> Tensor:
    """Return 1 at positions within shares of the length, and 0 elsewhere."""
    time = tokens.size(1)
    at, (first, last) = positions(tokens, [time]), visible
    return ((at >= int(first * time)) & (at < last * time)).long()


def _padding(visible: tuple[float, float], hides: bool) -> Packed:
    return lambda tokens, _: shown(visible, tokens).bool() ^ hides


def _alone(make: Make) -> Packed:
    return lambda tokens, lengths: make(tokens)


def _flag(flag: bool) -> Packed:
    return lambda tokens, lengths: flag


def _states(width: int, tokens: Tensor, lengths: list[int]) -> Tensor:
    count = len(tokens) * 3 * width
    states = torch.linspace(-1, 1, count, device=tokens.device).sin()
    return states.view(len(tokens), 3, width)


# --- The kinds ---------------------------------------------------------------

USERS, FLAGS = "an argument of the user's", "a flag"
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
    "labels": (r"targets?|labels|y", (labels,)),
    BLOCKS: (
        r"\w*block_?masks?",
        (lambda ids, sizes: _block_mask((*sizes,), ids.device),),
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
    "states of an encoder": (r"encoder_hidden_states", ()),
    **dict.fromkeys((FLAGS, USERS), ("", ())),
}
PACKED = AGAIN, "types of tokens", "documents", "cu_seqlens"  # two in a row


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
            return lambda tokens: make(tokens, [tokens.size(1)])
    return None


def inputs_of(
    model: Any,
    parameters: Mapping[str, inspect.Parameter],
    theirs: Mapping[str, Make | Literal["never"]],
    own: bool = False,
) -> Iterator[list[list[Input]]]:
    """Yield the forms of each argument that can be given.

    Those of a form are given beside each other, forms are alternatives.

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
            yield [[one(FLAGS, _flag(f), f"{name}={f}") for f in flags]]
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

            def ends(ids: Tensor, sizes: list[int]) -> dict[str, Any]:
                longest = {n: max(sizes) for n in names if n.startswith("max")}
                return dict.fromkeys(names, _ends(ids, sizes)) | longest

            yield [Input(name, kind, name, ends, single=True, own=own)]
    if kind == "states of an encoder":
        for width in all_declared(model, WIDTHS)[:1]:
            yield [one(partial(_states, width.value))]
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
    if default is None and re.fullmatch(r"(\w+\.)?(Optional\[)?bool.*", said):
        return [] if passed_over(name) else [True, False]
    if not isinstance(default, bool):
        return None
    skip = CAUSAL.fullmatch(name) or FLAG.fullmatch(name)
    return [] if skip else [not default]


def passed_over(name: str) -> bool:
    """Whether an argument is no gap where it is not given: see above."""
    patterns = FLAG, ANSWER, INSTEAD
    return name in CACHES or any(p.fullmatch(name) for p in patterns)
