"""Bind a copy of the model to a case (ways.py): checks call such variants.

These rules choose the precision:

- To find a leak of 1e-9, scores are compared in float64 if the model runs in
  it.
- Calls of equal shape round equally. So a heavy model runs them in its own
  precision until two calls differ (`double_on_suspicion`).
- If time is short, a heavy model runs long sequences in its own precision.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .context import RecordedDraws, during, free_bytes, isolated, seed_all
from .errors import ModelRaised, SkipCheck
from .model.building import Model, cast
from .model.calling import MASK, describe
from .model.kept_state import KeptState
from .operations import is_plain, operations_through
from .position_losses import PositionLosses
from .program import NO_WEIGHTS
from .ranks import current, local, on_any, same
from .rounding import Gap, floor, gaps, real_gap
from .subject import Subject
from .tokens import SHORT, rows_at_once
from .ways import CROWD_OF, ENLARGED, EVAL, LARGER, Case

# --- Variants ----------------------------------------------------------------

DROPOUT_SEED = 1234
ENOUGH = 256  # tokens in a call; more do not speed up a heavy model


# Fields of a case that concern the weights of a copy.
WEIGHTS = "dtype", "frozen", "size", "changed"


class CopyFailed(Exception):
    """Raised if a copy with changed weights or dtype raises or gives NaN."""


@dataclass
class Copy:
    """A copy of the model, with its state when it was made."""

    model: Any  # the model, as built or changed
    device: torch.device | None = None  # if not that of the subject
    may_fail: bool = (
        False  # whether its exceptions and NaN are not faults of the model
    )
    rough: bool = False  # whether a heavy copy still runs in its own precision
    losses: PositionLosses = field(default_factory=PositionLosses)
    built: KeptState | None = None  # the copy's state before calls change it


@dataclass(frozen=True)
class Variant:
    """A copy of the model, bound to a case (a way to call it)."""

    subject: Subject
    copy: Copy
    case: Case = EVAL

    @property
    def model(self) -> Any:
        """Return the copy itself."""
        return self.copy.model

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the copy's weights; a function has no known weights."""
        return list(getattr(self.model, "parameters", list)())

    def run_as(self, case: Case) -> "Variant":
        """Return the same copy, bound to another case (way to call it)."""
        kept = {n: getattr(self.case, n) for n in WEIGHTS}
        return replace(self, case=replace(case, **kept))

    @property
    def conditions(self) -> str:
        """Return the call and the copy in words, for a failure's message.

        float64 is left out, because the failure names the dtype.
        """
        case = self.case
        if case.dtype == torch.float64:
            case = replace(case, dtype=None)
        return "".join(f", {part}" for part in (case.how, case.copy) if part)

    def precision(self, dtype: str, noise: float) -> str:
        """Say in which precision a difference was measured, for a failure."""
        return f"({dtype}{self.conditions}; rounding there is {noise:.1g})"

    @property
    def double(self) -> bool:
        """Return whether the copy is in float64."""
        return torch.float64 in {p.dtype for p in self.parameters}

    def rows_at_once(self, time: int) -> int:
        """Return how many rows fit into a call: few for a heavy model."""
        if self.case.crowd:
            return 1 + CROWD_OF // time
        room = rows_at_once(self.subject.vocab_size, time)
        few = max(2, ENOUGH // time)
        return min(room, few) if self.subject.heavy else room

    def in_rows(self, *texts: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Yield texts in batches of as many rows as one call takes.

        Args:
            texts: tokens, then tensors with as many rows, or None.
        """
        given, tokens = self.case.given, texts[0]
        assert tokens is not None
        rows = self.subject.rows or len(tokens)
        if given is not None and given.single:
            rows = 1
        for start in range(0, len(tokens), rows):
            end = start + rows
            yield tuple(None if t is None else t[start:end] for t in texts)

    def scores(
        self,
        tokens: Int[Tensor, "batch time"],
        strict: bool = False,
        **how: Any,
    ) -> Float[Tensor, "batch time vocab"]:
        """Call the model and return its scores, as (batch, time, vocab).

        `strict` is as in `Reader.read`, other arguments are as in `answer`.
        With `grad`, the scores have their autograd graph.

        Raises:
            ModelRaised: with the model's exception as its cause, or for an
                answer without scores of the right shape.
            CopyFailed: if the copy has `may_fail`, and raises or gives NaN or
                infinity.
            OutOfTime: if the time for this part of the check is over.
        """
        (batch, time), mask = tokens.shape, how.pop("mask", None)
        parts = [*self.in_rows(tokens, mask)]
        if len(parts) > 1:
            variants = self._split(batch, len(parts[0][0]))
            return torch.cat(
                [
                    one.scores(ids, strict, mask=m, **how)
                    for one, (ids, m) in zip(variants, parts, strict=True)
                ]
            )
        how["mask"] = mask
        budget = self.subject.budget
        budget.call()
        try:
            if self.case.losses:
                given = self.case.arguments(tokens, self.subject.caller)
                scores = self.copy.losses.read(
                    lambda targets: self.answer(tokens, targets=targets),
                    *given.values(),
                )
            else:
                answer = self.answer(tokens, **how)
                scores = self._read(answer, batch, time, strict)
        except ModelRaised as error:
            if self.copy.may_fail:
                raise CopyFailed(str(error)) from error
            raise
        if scores.is_inference():
            scores = scores.clone()
        scores = same(scores, _apart)
        if scores.requires_grad:
            scores.register_hook(budget.count_backward)
        if self.copy.may_fail and not bool(torch.isfinite(scores).all()):
            raise CopyFailed("the scores are not finite")
        return scores if how.get("grad") else scores.detach()

    def _split(self, batch: int, rows: int) -> list["Variant"]:
        """Return a variant for each part of a batch, with `rows` rows each."""
        places = self.case.places or range(batch)
        return [
            replace(self, case=self.case.at(*places[first : first + rows]))
            for first in range(0, batch, rows)
        ]

    def _read(
        self, answer: Any, rows: int, time: int, strict: bool
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in the model's answer to a call of this case."""
        case = self.case
        if not (case.own or case.targets or case.pieces):
            return self.subject.read(answer, rows, time, strict=strict)
        found = self.subject.reader.find(answer, rows, time)
        if found is None:
            raise ModelRaised(
                f"no scores come back {self.case.how}, but {describe(answer)}"
            )
        return self.subject.without_hidden(found)

    def answer(
        self,
        tokens: Int[Tensor, "batch time"],
        *,
        grad: bool = False,
        seed: int | None = None,
        mask: Int[Tensor, "batch time"] | None = None,
        targets: Int[Tensor, "batch time"] | None = None,
        go_on: bool = False,
        as_given: bool = False,
    ) -> Any:
        """Call the model and return its answer, without counting the call.

        Args:
            tokens: ids, on any device.
            grad: whether to record gradients, even if the case does not.
            seed: seed of the global generators. If None, they continue; in
                train mode they start from a fixed state.
            mask: an attention mask that replaces the case's.
            targets: targets that replace the case's.
            go_on: whether the copy continues from the state of its last call.
            as_given: whether the model gets these ids instead of a copy.
        """
        subject, case = self.subject, self.case
        if not go_on:
            self.start_again()
        if seed is None and not go_on:
            seed = case.seed or (DROPOUT_SEED if case.training else None)
        given = case.given is not None  # a flag may request random draws
        if seed is None and (subject.noisy or given) and not case.training:
            seed = subject.seed
        if seed is not None:
            seed_all(seed)
        # a copy, so that the model cannot change the ids of the next check
        device = self.copy.device or subject.device
        ids = tokens.to(device, copy=not as_given)
        named = ((MASK, mask), (subject.caller.target_name, targets))
        extra = {
            name: value.to(device)
            for name, value in named
            if name is not None and value is not None
        }
        what = f"on tokens of shape {tuple(tokens.shape)}, {case.mode}"
        masked = mask is not None or case.visible is not None
        what += ", with an attention mask" * masked
        if targets is not None:
            what += f", with {subject.caller.target_name}"
        with during(what), torch.set_grad_enabled(case.grad or grad):
            self.set_mode()
            try:
                return case.call(subject.caller, self.model, ids, extra)
            finally:
                if case.keeps:  # other cases need the first state
                    self.start_again()

    def set_mode(self) -> None:
        """Set the train or eval mode of the case, as an author's code does."""
        mode = self.case.training
        if getattr(self.model, "training", mode) == mode:
            return
        if mode or not isinstance(self.model, nn.Module):
            self.model.train(mode)
        else:
            self.model.eval()  # a model may prepare a faster path here

    def start_again(self) -> None:
        """Restore the copy's first state, including running statistics."""
        copy = self.copy
        if not isinstance(copy.model, nn.Module):
            return
        always = self.subject.keeps_state or self.case.keeps
        if always or self.case.training:
            copy.built = copy.built or KeptState(copy.model)
            copy.built.put_back(always)
        if copy.built is not None and self.case.seed:
            copy.built.reseed(self.case.seed)

    def draws(self, tokens: Int[Tensor, "batch time"]) -> list[tuple]:
        """Return each random draw of a call: its shape and generator state.

        If the draws of two texts are equal, so are their random numbers.
        """
        with operations_through(RecordedDraws()) as seen:
            self.scores(tokens)
        return seen.drawn


Part = tuple[Variant, Tensor, Any]  # copy, tokens, index of compared scores


def gap_between(
    one: Part, other: Part, known: tuple[Tensor, Tensor] | None = None
) -> Gap | None:
    """Return the largest difference of two calls' scores beyond rounding.

    `known` has the selected scores of both calls, if they have run.
    """

    def scores(part: Part) -> Tensor:
        variant, tokens, at = part
        return variant.scores(tokens)[at]

    ways = partial(scores, one), partial(scores, other)
    return real_gap(one[0].model, *ways, known)


def _apart(scores: Tensor, others: Tensor) -> tuple[float, float, int]:
    """Return the largest gap as a multiple of `floor`, its size and place."""
    moved = gaps(scores, others)
    size, least = float(moved.max()), max(floor(others), 1e-300)
    return size / least, size, int(moved.amax(0).argmax())


# --- How copies are made -----------------------------------------------------


COPIES = 3  # float64 copies of all weights that a check may hold at once


def build(
    subject: Subject,
    seed: int | None = None,
    device: torch.device | None = None,
) -> Model:
    """Build the model again.

    Args:
        subject: the model.
        seed: another seed for its weights.
        device: another device.
    """
    if scarce(subject):
        subject.kept.clear()
    return subject.builder.build(seed, device)


def scarce(subject: Subject) -> str:
    """Return why there is no memory for float64 copies of a model, or "".

    If memory is scarce, one copy is made at a time, in the model's own dtype.
    The answer stays the same for all checks of a model.
    """
    builder = subject.builder
    if builder.scarce is None:
        needed = COPIES * 8 * subject.parameters
        free = free_bytes(builder.device) if subject.heavy else math.inf
        builder.scarce = ""
        if on_any(needed > free):
            builder.scarce = (
                f"float64 copies need {needed / 1e9:,.1f} GB of memory, "
                f"{free / 1e9:,.1f} GB are free"
            )
            builder.notes.append(
                f"{builder.scarce}: the model is judged in its own precision"
            )
    return builder.scarce


def own(subject: Subject) -> Variant:
    """Return a new copy in the model's own precision."""
    return Variant(subject, Copy(build(subject)))


def changeable(
    subject: Subject, for_a_function: str = "", case: Case = EVAL
) -> Variant:
    """Return a new copy that the check may change, or skip the check."""
    subject.kept.clear()  # the copy may need the memory
    variant = own(subject)
    if not isinstance(variant.model, nn.Module):
        raise SkipCheck(for_a_function)
    if not subject.builder.can_copy:
        raise SkipCheck("the model cannot be copied")
    return variant.run_as(case)


def precise(subject: Subject, time: int = 0, masked: bool = False) -> Variant:
    """Return a read-only copy, in float64 if possible.

    `time` is the longest sequence of its calls; `masked`: whether some get a
    mask.
    """
    spare = time > SHORT and subject.heavy and subject.budget.limited
    double = not spare and in_double(subject, masked)
    key = "precise", double
    copy = subject.kept.get(key)
    if copy is None:
        copy = own(subject).copy
        if double:
            copy.model.double()
        if subject.budget.limited:
            subject.kept[key] = copy
    return Variant(subject, copy)


def copy_for(subject: Subject, case: Case) -> Variant:
    """Return a new copy for a case, with the weights of the built model.

    A heavy model gets float64 only on demand: see `double_on_suspicion`.

    Raises:
        SkipCheck: for a case with another dtype or with frozen weights, if the
            model is a function or cannot be copied.
    """
    if not case.copy:
        return own(subject).run_as(case)
    if case.dtype == torch.float64:
        variant = own(subject)
        if subject.heavy:
            case, variant.copy.rough = replace(case, dtype=None), True
        else:
            doubled(subject, variant.model, case.visible is not None)
    else:
        variant = changeable(subject, "a function has no weights to cast")
        if case.dtype is not None:
            cast(variant.model, case.dtype)
            variant.copy.may_fail = True  # the copy may not run in this dtype
    if case.frozen:
        variant.model.requires_grad_(False)
    return replace(variant, case=case)


def doubled(subject: Subject, model: Any, masked: bool = False) -> Any:
    """Convert a model to float64, if possible."""
    if isinstance(model, nn.Module) and in_double(subject, masked):
        return model.double()
    return model


def in_double(subject: Subject, masked: bool = False) -> bool:
    """Return whether a float64 copy answers in float64, with finite scores.

    Scores may be finite only in float32. For example, a mask with float64's
    lowest number is minus infinity for a softmax in float32.
    """
    known = subject.builder.in_double
    if masked in known:
        return known[masked]
    known[masked] = False
    if scarce(subject):
        return False
    tokens = torch.zeros(1, subject.lengths.fit(4), dtype=torch.long)
    hidden = int(masked and tokens.size(1) > 1)
    mask = (torch.arange(tokens.size(1)) >= hidden).long().unsqueeze(0)

    def answer(double: bool) -> Tensor:
        variant = changeable(subject)
        if double:
            variant.model.double()
        scores = variant.scores(tokens, mask=mask if masked else None)
        return scores[:, hidden:]

    # check_dtype reports an exception; other checks keep the model's dtype
    with subject.budget.overtime(), suppress(Exception):
        scores = answer(True)
        if scores.dtype != torch.float64:
            return False
        finite = bool(scores.isfinite().all())
        known[masked] = finite or not bool(answer(False).isfinite().all())
        if not known[masked]:
            how = " with a left-padded attention mask" if masked else ""
            subject.builder.notes.append(
                f"in float64 the scores are NaN or infinite{how}; in the "
                f"model's own precision they are finite, so it is judged there"
            )
    return known[masked]


def double_on_suspicion(variant: Variant) -> None:
    """Convert a copy to float64, unless it already is."""
    variant.start_again()
    copy, masked = variant.copy, variant.case.visible is not None
    copy.rough, copy.built = False, None
    doubled(variant.subject, copy.model, masked)


# --- Copies with larger weights ----------------------------------------------

LARGEST_FACTOR = 3000.0  # largest factor for a weight


def both(subject: Subject, time: int = 0) -> Iterator[Variant]:
    """Yield the fresh model, then a copy with larger weights, if any.

    Both are read-only, and in float64 if the model runs in it. `time` is the
    longest sequence that a check gives them.
    """
    yield precise(subject, time)
    if (variant := larger(subject)) is not None:
        yield variant


def one_by_one(subject: Subject, time: int = 0) -> Iterator[Variant]:
    """Yield the copies of `both`, but hold a heavy model's one at a time."""
    if subject.heavy:
        subject.kept.clear()
    yield precise(subject, time)
    if subject.heavy:
        subject.kept.clear()
    if (variant := larger(subject)) is not None:
        yield variant


def larger(
    subject: Subject, case: Case = ENLARGED[0], time: int = 0
) -> Variant | None:
    """Return a copy with larger weights, or None if that is impossible.

    Zeros in trainable parameters are redrawn, and vectors of equal entries get
    unequal ones. Each matrix is scaled up until its products have the case's
    size (a root mean square).

    Args:
        subject: the model; its budget records why no copy is possible.
        case: a case, whose `size` the products get.
        time: 0 for a read-only copy; otherwise the longest sequence of a new
            copy that may fail. All calls of a new copy have equal shapes.
    """
    key = LARGER, case.size
    try:
        known = None if time else subject.kept.get(key)
        copy = known or _enlarged(subject, case, time)
    except CopyFailed as error:
        subject.budget.give_up(LARGER, str(error))
        return None
    if not time:
        subject.kept[key] = copy
    return Variant(
        subject, copy, replace(case, dtype=None) if copy.rough else case
    )


def _enlarged(subject: Subject, case: Case, time: int) -> Copy:
    if not subject.is_module:
        function = "a function has no weights to enlarge"
        raise CopyFailed(NO_WEIGHTS if subject.is_program else function)
    if not subject.builder.can_copy:
        raise CopyFailed("the model cannot be copied")
    model = build(subject)
    rough = subject.heavy and time > 0
    if not rough:
        model = doubled(subject, model, case.visible is not None)
    assert isinstance(model, nn.Module)
    copy = Copy(model, may_fail=True)
    variant = Variant(subject, copy, Case(size=case.size))
    generator = subject.generator()
    with isolated(subject.seed):
        redraw_zeros(model, generator)
        spread_equal(model, generator)
        scale_up(model, case.size)
        variant.scores(subject.draw(2, 8, generator))
        if time > 8:
            variant.scores(subject.draw(1, time, generator))
    copy.may_fail, copy.rough = time > 0, rough
    return copy


@torch.no_grad()
def redraw_zeros(
    model: nn.Module, generator: torch.Generator, matrices: bool = False
) -> None:
    """Replace each 0 in trainable parameters by a random number.

    Parameters whose gradient hooks may preserve zeros keep their zeros.

    Args:
        model: the model to change.
        generator: source of the numbers.
        matrices: whether to replace every entry of a matrix, not only zeros,
            with random numbers of the same root mean square.
    """
    for index, parameter in enumerate(model.parameters()):
        hooks = getattr(parameter, "_backward_hooks", None)
        plain = is_plain(type(local(parameter)))
        if not parameter.requires_grad or hooks or not plain:
            continue
        parameter = local(parameter)
        if not parameter.numel():
            continue
        if current() is not None:  # only some ranks may have zeros
            generator = torch.Generator().manual_seed(index)
        numbers = parameter.shape[1:].numel()
        fan_in = max(1, numbers) if parameter.ndim > 1 else 4
        chosen, size = parameter == 0, fan_in**-0.5
        if matrices and parameter.ndim > 1:
            chosen = torch.ones_like(chosen)
            count = parameter.numel()
            size = float(parameter.norm()) * count**-0.5 or size
        if not chosen.any():
            continue
        # saves memory: no second tensor of the parameter's dtype
        noise = torch.randn(parameter.shape, generator=generator)
        if chosen.all():
            parameter.copy_(noise).mul_(size)
        else:
            noise = noise[chosen.to(noise.device)].to(parameter) * size
            parameter.masked_scatter_(chosen, noise)


@torch.no_grad()
def spread_equal(model: nn.Module, generator: torch.Generator) -> None:
    """Scale equal entries of trainable vectors by unequal factors, 0.5 to 1.

    A gain of ones would hide that it is used twice, or not at all. No factor
    is above 1, because a decay above 1 would make a state grow without bound.
    """
    for index, parameter in enumerate(model.parameters()):
        p = local(parameter)
        hooks = getattr(parameter, "_backward_hooks", None)
        if not parameter.requires_grad or hooks or not is_plain(type(p)):
            continue
        if max(p.shape, default=1) != p.numel() or not p.is_floating_point():
            continue
        if bool((p == p.flatten()[:1]).all()) and bool(p.any()):
            if current() is not None:  # the result must be equal on each rank
                generator = torch.Generator().manual_seed(index)
            p.mul_(1 - torch.rand(p.shape, generator=generator).to(p) / 2)


@torch.no_grad()
def scale_up(model: nn.Module, size: float) -> None:
    """Scale matrices up until inputs of size 1 would give outputs of `size`.

    Tables of embeddings, and tensors tied to them, do not change. Frozen
    matrices, which look like constants of the architecture, change only if no
    matrix is trained.
    """
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters()
    }
    matrices = [
        p
        for p in model.parameters()
        if p.ndim > 1
        and p.is_floating_point()
        and id(p) not in tables
        and is_plain(type(local(p)))
    ]
    for p in map(local, [p for p in matrices if p.requires_grad] or matrices):
        rms = float(p.double().square().sum() / len(p)) ** 0.5
        if rms > 0:
            p.mul_(min(max(size / rms, 1.0), LARGEST_FACTOR))
