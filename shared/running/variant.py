"""A copy of the model, bound to a case: every check calls the model by it.

The rule of precision is here:

- scores are compared in float64 where the model can, so that a leak of 1e-9
  is seen;
- pairs of equal shapes round alike: a heavy model compares them in its own
  precision until two calls differ (`double_on_suspicion`);
- where time is short, long sequences go through a heavy model in its own
  precision.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .context import RecordedDraws, during, isolated, seed_all
from .errors import ModelRaised, SkipCheck
from .model.building import Model, cast
from .model.calling import MASK, describe
from .model.kept_state import KeptState
from .operations import is_plain, operations_through
from .position_losses import PositionLosses
from .program import NO_WEIGHTS
from .ranks import current, local, same
from .rounding import Gap, floor, gaps, real_gap
from .subject import Subject
from .tokens import SHORT, rows_at_once
from .ways import CROWD_OF, ENLARGED, EVAL, LARGER, Case

# --- Variants ----------------------------------------------------------------

DROPOUT_SEED = 1234
ENOUGH = 256  # tokens of a call: with more, each costs a heavy model the same


class CopyFailed(Exception):
    """A copy with other weights or dtypes raised, or its scores are NaN."""


@dataclass
class Copy:
    """A copy of the model, and what it held when it was made."""

    model: Any  # as built, or changed
    device: torch.device | None = None  # of its tokens, if another
    may_fail: bool = False  # its exceptions and NaN are no fault of the model
    rough: bool = False  # a heavy one, still in its own precision
    losses: PositionLosses = field(default_factory=PositionLosses)
    built: KeptState | None = None  # before the first call that changes it


@dataclass(frozen=True)
class Variant:
    """A copy of the model, bound to a case."""

    subject: Subject
    copy: Copy
    case: Case = EVAL

    @property
    def model(self) -> Any:
        """The copy itself."""
        return self.copy.model

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights of the copy; a function shows none."""
        return list(getattr(self.model, "parameters", list)())

    def run_as(self, case: Case) -> "Variant":
        """Return the same copy, called in another way."""
        kept = {n: getattr(self.case, n) for n in ("dtype", "frozen", "size")}
        return replace(self, case=replace(case, **kept))

    @property
    def conditions(self) -> str:
        """The words of a failure for the call and the copy.

        The precision of float64 is left out: a failure names its dtype.
        """
        case = self.case
        if case.dtype == torch.float64:
            case = replace(case, dtype=None)
        return "".join(f", {part}" for part in (case.how, case.copy) if part)

    def precision(self, dtype: str, noise: float) -> str:
        """Return the words of a failure for all that its size depends on."""
        return f"({dtype}{self.conditions}; rounding there is {noise:.1g})"

    @property
    def double(self) -> bool:
        """Whether the copy is in float64."""
        return torch.float64 in {p.dtype for p in self.parameters}

    def rows_at_once(self, time: int) -> int:
        """Return how many sequences go in one call, few to a heavy model."""
        if self.case.crowd:
            return 1 + CROWD_OF // time
        room = rows_at_once(self.subject.vocab_size, time)
        few = max(2, ENOUGH // time)
        return min(room, few) if self.subject.heavy else room

    def in_rows(self, *texts: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Yield texts by as many rows as one call takes.

        Args:
            texts: tokens, and what has a row for each of theirs, or None.
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
        """Call the model and return its scores in the common form.

        Strict is that of `Reader.read`, all else is as in `answer`; with
        grad the scores have their graph.

        Raises:
            ModelRaised: with the model's own exception as its cause, or for
                an answer without scores of the right shape.
            CopyFailed: where a copy may fail, for NaN and infinity as well.
            OutOfTime: after the end of the part of a check.
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
        """Return the variant for a few rows of a batch at a time."""
        places = self.case.places or range(batch)
        return [
            replace(self, case=self.case.at(*places[first : first + rows]))
            for first in range(0, batch, rows)
        ]

    def _read(
        self, answer: Any, rows: int, time: int, strict: bool
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the scores in an answer, of whichever call of the model."""
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
        """Call the model and return its answer, uncounted.

        Args:
            tokens: ids, on any device.
            grad: whether gradients are recorded, also if not by the case.
            seed: of the global generators; None: these go on, and in train
                mode start from a fixed state.
            mask: an attention mask, instead of the case's.
            targets: instead of the case's.
            go_on: whether the copy keeps what the last call left in it.
            as_given: whether it gets these very ids, not a copy of them.
        """
        subject, case = self.subject, self.case
        if not go_on:
            self.start_again()
        if seed is None and not go_on:
            seed = case.seed or (DROPOUT_SEED if case.training else None)
        given = case.given is not None  # a flag may ask for random draws
        if seed is None and (subject.noisy or given) and not case.training:
            seed = subject.seed
        if seed is not None:
            seed_all(seed)
        if getattr(self.model, "training", case.training) != case.training:
            self.model.train(case.training)
        # what a model does to its input must not reach the next check
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
            try:
                return case.call(subject.caller, self.model, ids, extra)
            finally:
                if case.keeps:  # the next call of another case shares it
                    self.start_again()

    def start_again(self) -> None:
        """Put back what the copy held at first: state, running statistics."""
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
        """Return the shapes of all random numbers that a call draws.

        One seed gives equal parts of two texts equal numbers if these match.
        """
        with operations_through(RecordedDraws()) as seen:
            self.scores(tokens)
        return seen.shapes


Part = tuple[Variant, Tensor, Any]  # a call by its tokens, and which scores


def gap_between(
    one: Part, other: Part, known: tuple[Tensor, Tensor] | None = None
) -> Gap | None:
    """Return where the same scores of two calls really differ, or None.

    Known holds these scores of both.
    """

    def scores(part: Part) -> Tensor:
        variant, tokens, at = part
        return variant.scores(tokens)[at]

    ways = partial(scores, one), partial(scores, other)
    return real_gap(one[0].model, *ways, known)


def _apart(scores: Tensor, others: Tensor) -> tuple[float, float, int]:
    """Return how far scores are apart, in floors and as it is, and where."""
    moved = gaps(scores, others)
    size, least = float(moved.max()), max(floor(others), 1e-300)
    return size / least, size, int(moved.amax(0).argmax())


# --- How copies are made -----------------------------------------------------


def build(subject: Subject, seed: int | None = None) -> Model:
    """Return the model again; seed is that of its weights, if another."""
    return subject.builder.build(seed)


def own(subject: Subject) -> Variant:
    """Return a new copy in the model's own precision."""
    return Variant(subject, Copy(build(subject)))


def changeable(
    subject: Subject, for_a_function: str = "", case: Case = EVAL
) -> Variant:
    """Return a module of one's own, to be changed, or skip the check."""
    subject.kept.clear()  # the copy may need the memory
    variant = own(subject)
    if not isinstance(variant.model, nn.Module):
        raise SkipCheck(for_a_function)
    if not subject.builder.can_copy:
        raise SkipCheck("the model cannot be copied")
    return variant.run_as(case)


def precise(subject: Subject, time: int = 0, masked: bool = False) -> Variant:
    """Return a copy in float64 where it can be, not to be changed.

    Time is the longest sequence that it gets, masked whether it gets masks.
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
    """Return a new copy for a case of weights as they are built.

    A copy in float64 is one to compare pairs of equal shape in: see above.

    Raises:
        SkipCheck: for a function, or a model that cannot be copied, where
            the case has another dtype or frozen weights.
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
            variant.copy.may_fail = True  # it need not be able to run so
    if case.frozen:
        variant.model.requires_grad_(False)
    return replace(variant, case=case)


def doubled(subject: Subject, model: Any, masked: bool = False) -> Any:
    """Turn a model that was built into float64, where it can be."""
    if isinstance(model, nn.Module) and in_double(subject, masked):
        return model.double()
    return model


def in_double(subject: Subject, masked: bool = False) -> bool:
    """Whether a copy in float64 answers in it, and with numbers.

    The lowest float64 in a mask, say, is minus infinity to a softmax in
    float32.
    """
    known = subject.builder.in_double
    if masked in known:
        return known[masked]
    known[masked] = False
    tokens = torch.zeros(1, subject.lengths.fit(4), dtype=torch.long)
    hidden = int(masked and tokens.size(1) > 1)
    mask = (torch.arange(tokens.size(1)) >= hidden).long().unsqueeze(0)

    def answer(double: bool) -> Tensor:
        variant = changeable(subject)
        if double:
            variant.model.double()
        scores = variant.scores(tokens, mask=mask if masked else None)
        return scores[:, hidden:]

    # check_dtype reports an exception; the others do without
    with subject.budget.overtime(), suppress(Exception):
        scores = answer(True)
        if scores.dtype != torch.float64:
            return False
        finite = bool(scores.isfinite().all())
        known[masked] = finite or not bool(answer(False).isfinite().all())
        if not known[masked]:
            how = " with a left-padded attention mask" if masked else ""
            subject.builder.notes.append(
                f"in float64 the scores are NaN or infinite{how}, in the "
                f"model's own precision they are not: it is judged in that"
            )
    return known[masked]


def double_on_suspicion(variant: Variant) -> None:
    """Turn a copy that is still rough into float64."""
    variant.start_again()
    copy, masked = variant.copy, variant.case.visible is not None
    copy.rough, copy.built = False, None
    doubled(variant.subject, copy.model, masked)


# --- Copies with larger weights ----------------------------------------------

LARGEST_FACTOR = 3000.0  # of a weight


def both(subject: Subject, time: int = 0) -> Iterator[Variant]:
    """Yield the fresh model, then a copy with larger weights, if any.

    Both are read-only, and in float64 where the model can; time is the
    longest sequence that a check gives them.
    """
    yield precise(subject, time)
    if (variant := larger(subject)) is not None:
        yield variant


def larger(
    subject: Subject, case: Case = ENLARGED[0], time: int = 0
) -> Variant | None:
    """Return a copy with larger weights, or None where there is none.

    Zeros in trainable parameters are redrawn, vectors of equal numbers are
    spread, and each matrix is scaled up until its products have a size (a
    root mean square).

    Args:
        subject: the model; its budget notes why there is no such copy.
        case: its size is that of products.
        time: 0: a copy that is not to be changed; else a new one to compare
            pairs of equal shape in, to this length: it may fail.
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

    Parameters with hooks on their gradients keep their zeros: those may be
    how the model keeps a structure.

    Args:
        model: is changed.
        generator: of the numbers.
        matrices: whether all numbers of matrices are replaced, by some of
            their size.
    """
    for index, parameter in enumerate(model.parameters()):
        hooks = getattr(parameter, "_backward_hooks", None)
        plain = is_plain(type(local(parameter)))
        if not parameter.requires_grad or hooks or not plain:
            continue
        parameter = local(parameter)
        if current() is not None:  # what other ranks draw depends on zeros
            generator = torch.Generator().manual_seed(index)
        numbers = parameter.shape[1:].numel()
        fan_in = max(1, numbers) if parameter.ndim > 1 else 4
        chosen, size = parameter == 0, fan_in**-0.5
        if matrices and parameter.ndim > 1:
            chosen = torch.ones_like(chosen)
            size = float(parameter.square().mean().sqrt()) or size
        if chosen.any():
            noise = torch.randn(parameter.shape, generator=generator)
            noise = noise.to(parameter) * size
            parameter.copy_(torch.where(chosen, noise, parameter))


@torch.no_grad()
def spread_equal(model: nn.Module, generator: torch.Generator) -> None:
    """Scale each number of trainable vectors of equal ones by 0.5 to 1.

    A gain of ones hides where it is used twice, or not at all. No factor is
    above 1: a decay would grow without a bound.
    """
    for index, parameter in enumerate(model.parameters()):
        p = local(parameter)
        hooks = getattr(parameter, "_backward_hooks", None)
        if not parameter.requires_grad or hooks or not is_plain(type(p)):
            continue
        if max(p.shape, default=1) != p.numel() or not p.is_floating_point():
            continue
        if bool((p == p.flatten()[:1]).all()) and bool(p.any()):
            if current() is not None:  # the same on each rank
                generator = torch.Generator().manual_seed(index)
            p.mul_(1 - torch.rand(p.shape, generator=generator).to(p) / 2)


@torch.no_grad()
def scale_up(model: nn.Module, size: float) -> None:
    """Scale each matrix up by its own numbers, as if its inputs were 1.

    Tables of embeddings stay as they are, and so does what is tied to them.
    Where no parameter is trained all matrices are scaled: a frozen weight
    cannot be distinguished there from a constant of the architecture.
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
