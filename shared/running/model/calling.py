"""Call a model, and read its answer."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from ...settings import NEVER
from ..errors import ModelRaised
from ..operations import functions_through
from .building import Model
from .inputs import MASK, Input, inputs_of, required
from .keywords import keywords_of

# --- Arrays ------------------------------------------------------------------

IN_ARRAYS = "written in arrays: gradients cannot pass"


def is_array(value: Any) -> bool:
    """Return whether a value is an array, not a torch tensor."""
    return not isinstance(value, Tensor | type) and (
        hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    )


def as_tensor(array: Any) -> Tensor | None:
    """Return a copy of an array on the CPU, None if it has no numbers."""
    try:
        if hasattr(array, "__array__"):
            copy = np.array(array)
            if copy.dtype.kind in "biufc":
                # cast first: torch lacks foreign byte orders and long doubles
                wide = copy.dtype.itemsize > 8 and copy.dtype.kind == "f"
                native = copy.dtype.newbyteorder("=")
                copy = copy.astype(np.float64 if wide else native)
                return torch.from_numpy(copy)
        # not through NumPy, which has no bfloat16
        return torch.from_dlpack(array).cpu().clone()
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None


def shared_default(model: Model) -> str:
    """Describe a default argument that earlier calls may have changed, or "".

    Python makes a list or dict in the signature only once, so a call finds the
    items that earlier calls have put into it.
    """
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    functions = (getattr(type(part), "forward", part) for part in parts)
    for function in filter(inspect.isfunction, functions):
        for name, taken in inspect.signature(function).parameters.items():
            if isinstance(taken.default, dict | list | set) and taken.default:
                code, kind = function.__code__, type(taken.default).__name__
                at = f"{Path(code.co_filename).name}, line"
                return (
                    f"calls share state: the default of {name} is one {kind} "
                    f"for all calls ({at} {code.co_firstlineno}); "
                )
    return ""


# --- Scores before a loss ----------------------------------------------------

# Functions to which a model that returns only a loss passes its scores.
COMPARING = ("cross_entropy", "nll_loss", "log_softmax", "logsumexp")


class Comparisons:
    """Records the tensors that a model passes to its cross-entropy."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {name: [] for name in COMPARING}

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function, and record the arguments of a cross-entropy."""
        kept = self.kept.get(name)
        given = [*args[:1], kwargs.get("input")]
        if kept is not None:
            kept += [x for x in given if isinstance(x, Tensor) and x.ndim > 1]
        return func(*args, **kwargs)

    def scores(self, count: int) -> list[Tensor]:
        """Return the tensors that may be the scores of `count` tokens."""
        found = next(filter(None, self.kept.values()), [])
        if len(found) > 1 and sum(map(len, found)) == count:
            return [torch.cat(found)]
        return found


# --- Calls -------------------------------------------------------------------

TOKENS = ("input_ids", "idx", "tokens", "x", "ids", "input", "inputs")
TARGETS = re.compile(
    r"y|((lm|next|shifted)_)?(targets?|labels?)(_(ids?|seqs?|tokens?))?"
)
# Methods that return scores if the model's forward returns only a loss.
SCORERS = ("forward_logits", "get_logits", "compute_logits", "logits")
LOG_PROBS = "log_probs"
# Arguments that a model may require besides tokens, with the usual values.
REQUIRED: dict[str, Callable[[Tensor], Any]] = {
    MASK: torch.ones_like,
    "start_pos": lambda tokens: 0,
}


@dataclass(frozen=True)
class Caller:
    """Calls a model as its signature requires."""

    method: str | None  # called instead of the model: log_probs, or a SCORER
    token_name: str | None  # keyword of the ids; None: given by position
    takes_mask: bool
    target_name: str | None  # keyword of the targets in the model's forward
    own_token_name: str | None  # keyword of the ids in the model's forward
    # further arguments of each call, made from the ids
    given: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    time_first: bool = False
    alone: bool = False  # whether the model takes one text, (time,)
    optional: tuple[str, ...] = ()  # arguments that default to None
    # for each argument with a default, its alternative forms (see Input)
    forms: tuple[list[list[Input]], ...] = ()
    inputs: tuple[Input, ...] = ()  # the forms that the model accepts
    never: tuple[str, ...] = ()  # names of arguments that are never given
    arguments: tuple[str, ...] = ()  # names of arguments with defaults
    own_arguments: tuple[str, ...] = ()  # names that only forward takes
    arrays: bool = False  # whether the model gets NumPy arrays
    no_gradients: str = ""  # why no gradients can be recorded
    # whether scores are read from the arguments of the loss function
    compared: bool = False
    # whether the model leaves out the last position, so that calls add a token
    shifts: bool = False
    # the user's functions that make arguments, for calls of another method
    theirs: Mapping[str, Any] = field(default_factory=dict)
    # the part of an answer to check: a path ("heads.1"), a number, a function
    output: str | int | Callable[[Any], Any] | None = None

    @property
    def log_probs(self) -> bool:
        """Return whether the called method promises log-probabilities."""
        return self.method == LOG_PROBS

    def call(
        self,
        model: Model,
        tokens: Int[Tensor, "batch time"],
        extra: Mapping[str, Any] | None = None,
        own: bool = False,
    ) -> Any:
        """Call a model and return its answer; `own` bypasses its log_probs."""
        method = None if own else self.method
        function = getattr(model, method) if method else model
        name = self.own_token_name if own else self.token_name
        extra = {**(extra or {})}
        if self.shifts and not own:
            extra = {n: _longer(v, tokens.shape) for n, v in extra.items()}
            tokens = _longer(tokens, tokens.shape)
        extra = {n: make(tokens) for n, make in self.given.items()} | extra
        (rows, time), given = tokens.shape, self.arranged(tokens)
        for key, value in extra.items():
            if isinstance(value, Tensor) and (
                # only masks and targets have the shape of tokens
                value.shape == tokens.shape
                or (key == MASK and value.ndim == 2)
            ):
                extra[key] = self.arranged(value)
        extra = {key: self.handed(value) for key, value in extra.items()}
        positional = [self.handed(given)]
        if name is not None:
            extra[name] = positional.pop()
        with torch.no_grad() if self.no_gradients else nullcontext():
            if not self.compared:
                return self.chosen(function(*positional, **extra))
            with functions_through(Comparisons()) as comparisons:
                loss = function(*positional, **extra)
        return (*comparisons.scores(rows * (time - self.shifts)), loss)

    def chosen(self, answer: Any) -> Any:
        """Return the part of an answer that the user wants checked.

        Raises:
            ModelRaised: if an answer lacks that part.
        """
        if self.output is None:
            return answer
        if callable(self.output):
            return self.output(answer)
        keys = str(self.output).split(".")
        found = follow(
            answer, tuple(int(k) if k.isdigit() else k for k in keys)
        )
        if found is None:
            raise ModelRaised(
                f"the answer has no {self.output}: it is {describe(answer)}"
            )
        return found

    def arranged(
        self, tokens: Shaped[Tensor, "batch time"]
    ) -> Shaped[Tensor, "*axes"]:
        """Return ids, or arguments of their shape, in the model's layout."""
        if self.alone:
            (tokens,) = tokens
        return tokens.mT.contiguous() if self.time_first else tokens

    def handed(self, value: Any) -> Any:
        """Return an argument as an array if the model takes arrays."""
        if self.arrays and isinstance(value, Tensor):
            return value.detach().cpu().numpy()
        return value


def caller_of(
    model: Model,
    method: str | None,
    time_first: bool,
    inputs: Mapping[str, Any] | None = None,
) -> Caller:
    """Derive from a signature how to call a model or its method.

    Raises:
        ValueError: for inputs that the call does not take.
    """
    own = getattr(model, method, None) if method else None
    function = own if callable(own) else model
    parameters, token_name = token_argument(function)
    own_names, own_token_name = token_argument(model)
    ids = token_name or next(iter(parameters), None)  # or the first argument
    own_ids = own_token_name or next(iter(own_names), None)
    target_name = next(filter(TARGETS.fullmatch, own_names), None)
    theirs = dict(inputs or {})
    if theirs.get(target_name or "") == NEVER:
        target_name = None
    taken, own_taken = (
        {n: p for n, p in named(found, theirs).items() if n not in but}
        for found, but in (
            (parameters, (ids, target_name)),
            (own_names, (own_ids, target_name)),
        )
    )
    own_taken = {n: p for n, p in own_taken.items() if n not in parameters}
    for name, maker in theirs.items():
        known = [*taken, *own_taken]
        if name not in known and name not in own_names:
            raise ValueError(
                f"inputs name {name}, which the call does not take: it takes "
                f"{', '.join(known) or 'only tokens'}"
            )
        if maker != NEVER and not callable(maker):
            raise ValueError(
                f"inputs take a function from tokens to {name}, or "
                f"{NEVER!r}, got {maker!r}"
            )
    makers: dict[str, Callable[[Tensor], Any]] = {}
    for name, parameter in parameters.items():
        usual = maker_of(name) or required(name, parameter)
        maker = theirs.get(name, usual)
        given = name in taken or maker_of(name) is not None
        if parameter.default is parameter.empty and given and callable(maker):
            makers[name] = maker
    arguments, own_arguments = (
        tuple(n for n, p in found.items() if p.default is not p.empty)
        for found in (taken, own_taken)
    )
    return Caller(
        method=None if function is model else method,
        token_name=token_name,
        takes_mask=MASK in parameters and theirs.get(MASK) != NEVER,
        target_name=target_name,
        own_token_name=own_token_name,
        given=makers,
        time_first=time_first,
        optional=tuple(
            n for n, p in parameters.items() if p.default is None and n != ids
        ),
        forms=(
            *inputs_of(model, taken, theirs),
            *inputs_of(model, own_taken, theirs, own=True),
        ),
        never=tuple(n for n, maker in theirs.items() if maker == NEVER),
        arguments=arguments,
        own_arguments=own_arguments,
        theirs=theirs,
    )


def maker_of(name: str) -> Callable[[Tensor], Any] | None:
    """Return a function that makes a required argument with a known name."""
    return no_targets if TARGETS.fullmatch(name) else REQUIRED.get(name)


def no_targets(tokens: Tensor) -> Tensor:
    """Return targets of zeros, in int64 as losses require."""
    return torch.zeros_like(tokens, dtype=torch.long)


def _longer(value: Any, shape: torch.Size) -> Any:
    """Add a position to ids, or to an argument of their shape."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return value
    return torch.cat([value, value[:, :1]], 1)


def named(
    parameters: Mapping[str, inspect.Parameter], more: Mapping[str, Any]
) -> dict[str, inspect.Parameter]:
    """Return the arguments by name, including those that **kwargs takes."""
    found = dict[str, inspect.Parameter]()
    for name, p in parameters.items():
        if p.kind is p.VAR_KEYWORD:
            new = [n for n in more if n not in found]
            keyword = p.replace(kind=p.KEYWORD_ONLY, annotation=p.empty)
            found |= {n: keyword.replace(name=n, default=None) for n in new}
        elif p.kind is not p.VAR_POSITIONAL:
            found[name] = p
    return found


def token_argument(
    function: Model,
) -> tuple[dict[str, inspect.Parameter], str | None]:
    """Return a model's arguments, and the keyword of its tokens, if any."""
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}, None
    kinds = {name: p.kind.name for name, p in parameters.items()}
    if "VAR_KEYWORD" in kinds.values():
        read = keywords_of(function)
        parameters |= {n: p for n, p in read.items() if n not in parameters}
    positional = [n for n in kinds if kinds[n].startswith("POSITIONAL_")]
    rest = [n for n in kinds if kinds[n] == "VAR_POSITIONAL"]
    keyword = next((n for n in TOKENS if n in {*parameters} - {*rest}), None)
    if positional and (positional[0] in TOKENS or keyword is None):
        return parameters, None
    if keyword is None and not positional and not rest:
        keyword = TOKENS[0] if parameters else None
    return parameters, keyword


# --- Answers -----------------------------------------------------------------

SPARE = 128  # most scores beyond the ids, in a padded vocabulary
SCORES = ("logits", "log_probs")
LOSSES = ("loss",)

Keys = tuple[str | int, ...]


Form = tuple[str, ...]  # the axes of scores, named by what they index
BATCH_FIRST: Form = ("batch", "time", "vocab")
TIME_FIRST: Form = ("time", "batch", "vocab")
FORMS: tuple[Form, ...] = (  # the likeliest first
    ("batch * time", "vocab"),
    BATCH_FIRST,
    ("batch", "vocab", "time"),
    TIME_FIRST,
)


def shape_of(form: Form, batch: int, time: int, vocab: int) -> tuple[int, ...]:
    """Return the shape of scores whose axes are in the order of a form."""
    sizes = {"batch": batch, "time": time, "batch * time": batch * time}
    return tuple(sizes.get(axis, vocab) for axis in form)


@dataclass(frozen=True)
class Reader:
    """Reads the scores in each answer of a model."""

    path: Keys = ()  # keys from an answer to its scores
    form: Form = BATCH_FIRST  # the order of the scores' axes
    width: int = 0  # scores at a position: one for each id, or more
    vocab_size: int = 0  # number of ids
    alike: int = 1  # how many tensors in the answer could be scores
    time_first: bool = False  # whether the model takes (time, batch)

    @property
    def where(self) -> str:
        """Return the name of the scores in an answer, or "" for a tensor."""
        return ".".join(map(str, self.path))

    def read(
        self, answer: Any, batch: int, time: int, strict: bool = False
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, as (batch, time, vocab).

        Unless strict, dropped axes of size 1 are restored, and scores beyond
        the vocabulary are cut off. So such answers fail only check_shape.

        Raises:
            ModelRaised: if an answer has no scores of the right shape.
        """
        spare = self.width - self.vocab_size
        padded = 0 < spare < SPARE and self.width % 8 == 0
        if strict and spare and not padded:
            raise ModelRaised(
                f"the scores are {self.width} wide, the vocabulary has "
                f"{self.vocab_size} ids"
            )
        size = (time, batch) if self.time_first else (batch, time)
        shape = shape_of(self.form, *size, self.width)
        found = follow(answer, self.path)
        if isinstance(found, Tensor) and not strict:
            sizes = [[n for n in x if n != 1] for x in (found.shape, shape)]
            if sizes[0] == sizes[1]:
                found = found.reshape(shape)
        if isinstance(found, Tensor) and found.shape == shape:
            return self._common(found, self.form, size)
        for path, form in find_scores(answer, *size, self.width):
            if form == self.form:
                return self._common(follow(answer, path), form, size)
        raise ModelRaised(
            f"the scores for tokens of shape {size} should have shape "
            f"{(*size, self.vocab_size)}, got {describe(answer)}"
        )

    def find(
        self, answer: Any, batch: int, time: int
    ) -> Float[Tensor, "batch time vocab"] | None:
        """Return the scores, which may be anywhere in an answer.

        A tensor with its axes in the order of earlier answers is preferred.
        """
        size = (time, batch) if self.time_first else (batch, time)
        found = find_scores(answer, *size, self.width)
        if not found:
            return None
        path, form = max(found, key=lambda place: place[1] == self.form)
        return self._common(follow(answer, path), form, size)

    def _common(
        self, scores: Tensor, form: Form, size: tuple[int, int]
    ) -> Float[Tensor, "batch time vocab"]:
        if len(form) == 2:
            scores = scores.unflatten(0, size)
        else:
            scores = scores.permute([form.index(axis) for axis in BATCH_FIRST])
        scores = scores[..., : self.vocab_size]
        return scores.transpose(0, 1) if self.time_first else scores


def find_scores(
    answer: Any, batch: int, time: int, vocab: int
) -> list[tuple[Keys, Form]]:
    """Return the places of scores in an answer, the likeliest first."""
    return [
        (path, form)
        for path, tensor in tensors_in(answer)
        for form in FORMS
        if tensor.shape == shape_of(form, batch, time, vocab)
        and tensor.is_floating_point()
    ]


def tensors_in(answer: Any, path: Keys = ()) -> Iterator[tuple[Keys, Tensor]]:
    """Yield the tensors of an answer; those named like scores come first."""
    if is_array(answer):
        answer = as_tensor(answer)
    if isinstance(answer, Tensor):
        yield path, answer
    elif len(path) < 3:
        for key, value in sorted(
            _items(answer), key=lambda item: item[0] not in SCORES
        ):
            yield from tensors_in(value, (*path, key))


def _items(answer: Any) -> list[tuple[Any, Any]]:
    if hasattr(answer, "_asdict"):  # a named tuple
        answer = answer._asdict()
    if isinstance(answer, Mapping):
        return list(answer.items())
    if isinstance(answer, list | tuple):
        return list(enumerate(answer))
    names = [*SCORES, *LOSSES]
    if dataclasses.is_dataclass(answer):
        names = [field.name for field in dataclasses.fields(answer)]
    return [(n, getattr(answer, n)) for n in names if hasattr(answer, n)]


def follow(answer: Any, path: Keys) -> Any:
    """Return the value at a path or None; an array becomes a tensor."""
    found = reach(answer, path)
    return as_tensor(found) if is_array(found) else found


def reach(answer: Any, path: Keys) -> Any:
    """Return the value at a path, unchanged, or None."""
    for key in path:
        if isinstance(answer, Mapping):
            answer = answer.get(key)
        elif isinstance(key, str):
            answer = getattr(answer, key, None)
        elif isinstance(answer, list | tuple) and key < len(answer):
            answer = answer[key]
        else:
            return None
    return answer


def find_loss(answer: Any) -> Float[Tensor, ""] | None:
    """Return the loss in an answer: a scalar, preferably one named loss."""
    for _, tensor in sorted(
        tensors_in(answer), key=lambda item: LOSSES[0] not in item[0]
    ):
        if tensor.numel() == 1 and tensor.is_floating_point():
            return tensor.reshape(())
    return None


def describe(answer: Any) -> str:
    """Return the shapes of the tensors in an answer, in a few words."""
    if isinstance(answer, Tensor):
        return f"shape {tuple(answer.shape)}"
    shapes = [tuple(tensor.shape) for _, tensor in tensors_in(answer)]
    kind = type(answer).__name__
    if not shapes:
        return f"a {kind} without tensors"
    return f"a {kind} of shapes {', '.join(map(str, shapes[:4]))}"
