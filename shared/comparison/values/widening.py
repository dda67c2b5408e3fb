"""Compare two models in more ways, once they agree on one text.

The models run on other texts (longer texts, special ids, several rows, masks),
with other weights, and in train mode. Each time the scores are compared. If
they differ, all values are compared to find the first line that differs.
"""

from contextlib import suppress
from dataclasses import replace
from time import perf_counter

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...running.context import isolated
from ...running.errors import ModelRaised
from ...running.model.sizes import (
    TILES,
    WINDOW,
    all_declared,
    numbers_in_code,
    padding_ids,
    special_ids,
)
from ...running.operations import operations_through
from ...running.rounding import gaps, nudge, put_back_after
from ...running.subject import Subject
from ...running.tokens import draw
from ...running.tolerances import (
    FINE_UNIT,
    FLOOR_UNITS_OF_16_BITS,
    NUDGE_NOISES,
    UNNUDGED_UNITS,
)
from ...running.variant import Variant, own
from ...running.ways import TRAIN_WITHOUT_GRADIENTS
from .dropping import NUMBERS_KEPT, AtTheMean, compare_losses
from .pair import Pair
from .redrawing import Plan, plan_of, redraw, scale, with_model
from .scope import Kind, Scope, Trial
from .side import Side, unit_of
from .value_diff import ValueDiff

SHORT_TOKENS, MIDDLE_TOKENS = 16, 33  # length of most texts; a longer length
SCORES_AT_ONCE = 2**25  # most scores of the longest text, for each side
UNDECLARED_TOKENS = 128  # the longest text if no model declares a length
SPECIAL_IDS, NAMED_LENGTHS = 32, 8  # most ids and lengths from a model's code
ROWS = 2
GROWTH_OF_COST = 1.5  # the time of a text grows with this power of its length
GROWTH = 4  # factor from each text's length to the next
HALF_BITS = 16  # matrices are not scaled in dtypes of up to this many bits
SIZES = (1.5, 30.0, 300.0)  # sizes to which products of matrices are scaled
HEAVY_SIZE = 2.0  # the only size of products for a large model
SECONDS_FOR_LENGTHS = 1.0  # most seconds for all longer texts
LEAST_SECONDS = 0.5  # seconds that longer texts may always take
SHARE_FOR_LENGTHS = 0.5  # for longer texts: share of the first run's time
ALWAYS_TOKENS = 256  # texts up to this length are always compared
SHARE_OF_HEAVY = 0.4  # for a large model's trials: share of the first's time
COARSE_BOUNDS = 16  # factor on the bound if a coarser dtype rounds inside
MASKED_BOUNDS = 8  # factor on the bound of rounding if a text has a mask
SEED = 1  # random seed of texts and of redrawn weights

Scores = Float[Tensor, "batch time vocab"]
Stage = tuple[Scope, ValueDiff | None]


def widen(
    found: ValueDiff, pair: Pair, dtype: torch.dtype | None, seconds: float
) -> ValueDiff:
    """Compare two models with other texts, weights and modes.

    Args:
        found: the first comparison, in which both models agree, with their
            weights matched.
        pair: the two models, with the settings of the comparison.
        dtype: the dtype of the first comparison, None for float64.
        seconds: the time that the first comparison took.

    Returns:
        The first finding that differs, or else `found`. Its scope covers all
        comparisons.
    """
    run = Comparison(found, pair, dtype, seconds)
    scope = found.scope
    stages = in_other_texts, in_train_mode, with_other_weights
    if run.heavy:  # first the stage that changes rows and weights at once
        stages = with_other_weights, in_other_texts, in_train_mode
    for stage in stages:
        scope, other = stage(run, scope)
        if other is not None:
            return replace(other, scope=scope, weights=found.weights)
    return replace(found, scope=scope)


class Comparison:
    """Two models that agree on a first text, their copies, and a clock.

    `gap` compares the scores in a trial (one text, weights and mode).
    `finding` compares all values. To compare in one more way, add a stage to
    `widen`. A stage that changes the copies' weights must first call
    `compare_copies`. Then `finding` runs the copies, not the originals.

    Args:
        found, pair, dtype, seconds: as for `widen`.
    """

    def __init__(
        self,
        found: ValueDiff,
        pair: Pair,
        dtype: torch.dtype | None,
        seconds: float,
    ):
        self.found, self.pair, self.dtype = found, pair, dtype
        self.subjects = pair.subjects
        self.heavy = any(subject.heavy for subject in self.subjects)
        # whether a side is a program or a function of arrays, which may be
        # slow
        self.foreign = any(subject.in_arrays for subject in self.subjects)
        self.unit = unit_of(*found.sides)
        self.fine = self.unit < FINE_UNIT  # whether rounding is float64's
        self.seconds, self.started = seconds, perf_counter()
        self.seconds_of_a_token = 0.0  # seconds per token in the last trial
        self.variants = (
            self._copy(found.sides[0], self.subjects[0]),
            self._copy(found.sides[1], self.subjects[1]),
        )

    def _copy(self, side: Side, subject: Subject) -> Variant:
        """Return a copy of a model; the copy of a large one keeps its dtype.

        A large model is faster in its own dtype. If scores then differ by more
        than the rounding of this dtype, all values are compared in float64.
        """
        plain = subject.in_arrays or (self.heavy and self.dtype is None)
        return own(subject) if plain else side.variant()

    @property
    def models(self) -> tuple[nn.Module, nn.Module] | None:
        """Return the copies, if both are modules with weights to change."""
        left, right = (variant.model for variant in self.variants)
        free = all(subject.builder.can_copy for subject in self.subjects)
        if isinstance(left, nn.Module) and isinstance(right, nn.Module):
            return (left, right) if free else None
        return None

    def compare_copies(self) -> None:
        """Let `finding` run the copies, because a stage will change them."""
        left, right = self.models or (None, None)
        assert left is not None
        assert right is not None
        one, other = self.subjects
        sides = with_model(one, left), with_model(other, right)
        self.pair = replace(self.pair, sides=sides)

    def has_time_for(self, tokens: int) -> bool:
        """Return whether enough time is left for a trial of this many tokens.

        The time is limited only for large models.
        """
        spent = perf_counter() - self.started
        needed = self.seconds_of_a_token * tokens
        return not self.heavy or (
            spent + needed <= SHARE_OF_HEAVY * self.seconds
        )

    def scores(
        self, trial: Trial, variants: tuple[Variant, ...] = ()
    ) -> tuple[Scores, Scores]:
        """Return both sides' scores in a trial, from `variants` if given.

        Raises:
            ModelRaised: if a side raises.
        """
        started = perf_counter()
        found = []
        for variant in variants or self.variants:
            seed = variant.subject.seed
            mask = None if trial.mask is None else trial.mask.long()
            with isolated(seed), torch.no_grad():
                scores = variant.scores(trial.tokens, mask=mask, seed=seed)
            found.append(scores.cpu())
        spent = perf_counter() - started
        self.seconds_of_a_token = spent / trial.tokens.numel()
        return found[0], found[1]

    def gap(self, trial: Trial, scores: tuple[Scores, Scores]) -> float:
        """Return the scores' difference, divided by what rounding explains.

        Return 0 if both models return a NaN.
        """
        eps = max(torch.finfo(s.dtype).eps for s in scores)
        ours, theirs = (s.double().log_softmax(-1) for s in scores)
        shown = torch.ones(ours.shape[:2], dtype=torch.bool)
        shown = shown if trial.mask is None else trial.mask
        if bool(ours[shown].isnan().any() and theirs[shown].isnan().any()):
            return 0.0
        largest = float(ours[ours.isfinite()].abs().max())
        wide = eps <= torch.finfo(torch.float32).eps
        units = UNNUDGED_UNITS if wide else FLOOR_UNITS_OF_16_BITS
        bound = max(self.found.rounding, units * eps * largest)
        return float(gaps(ours, theirs).where(shown, 0.0).max()) / bound

    def differs(self, trial: Trial) -> bool:
        """Return whether scores differ in a trial by more than rounding."""
        return self.gap(trial, self.scores(trial)) > 1

    def is_noise(self, trial: Trial) -> bool:
        """Return whether rounding explains a difference of the scores.

        To measure this, the left's weights are changed by a unit of rounding.
        """
        if self.fine:
            return False
        first, theirs = self.scores(trial)
        model = self.variants[0].model
        weights = [*model.parameters()]
        with put_back_after(weights):
            nudge(weights, self.unit / 2, SEED)
            nudged, _ = self.scores(trial)
        bounds = NUDGE_NOISES * self.gap(trial, (first, nudged))
        return self.gap(trial, (first, theirs)) <= bounds

    def finding(self, trial: Trial) -> ValueDiff | None:
        """Compare all values in a trial; return None if the scores agree.

        `differs` runs a large model in its own dtype, but this method in
        float64. So `differs` may return True where this method returns None.
        Inner values count only if the scores differ.
        """
        found = self.pair.during(trial, self.dtype)
        # larger weights enlarge the rounding of a dtype coarser than float64
        bounds = 1 if self.fine else COARSE_BOUNDS
        if found.same or found.apart <= bounds * found.rounding:
            return None
        return replace(found, trial=trial)


def _why(trial: Trial, error: Exception) -> str:
    return f"not compared {trial.words}: {error}"


# --- Other texts -------------------------------------------------------------


def in_other_texts(run: Comparison, scope: Scope) -> Stage:
    """Compare the scores for rows, special ids, masks and longer texts."""
    for stage in (_ids_and_rows, _lengths, _masks):
        scope, other = stage(run, scope)
        if other is not None:
            return scope, other
    return scope, None


def _ids_and_rows(run: Comparison, scope: Scope) -> Stage:
    """Compare the scores of texts with special ids, and those of two rows."""
    time = min(_longest(run), SHORT_TOKENS)
    if run.heavy and scope.batch:  # stage with_other_weights compared rows
        return scope, None
    ids, several = _special_ids(run), max(1, time // 2)
    parts = [ids[i : i + several] for i in range(0, len(ids), several)]
    trials = [_with_ids(run, part, time) for part in parts]
    for trial in (*trials, _rows(run, time)):
        if not run.has_time_for(trial.tokens.numel()):
            return scope.without(
                f"not compared {trial.words}: time is up"
            ), None
        try:
            if run.differs(trial):
                other = run.finding(_narrowed(run, trial))
                if other is not None:
                    return scope, other
        except (ModelRaised, ValueError) as error:
            scope = scope.without(_why(trial, error))
            continue
        if trial.kind is Kind.SPECIAL:
            scope = replace(scope, ids=(*scope.ids, *trial.ids))
        else:
            scope = replace(scope, batch=ROWS, padded=True)
    return scope, None


def _lengths(run: Comparison, scope: Scope) -> Stage:
    """Compare the scores of longer texts, the shortest first."""
    longest, vocab = _longest(run), run.subjects[0].vocab_size
    text = draw(vocab, 1, longest, _generator())
    cost, before = run.seconds_of_a_token * SHORT_TOKENS, SHORT_TOKENS
    started = perf_counter()
    most = max(SHARE_FOR_LENGTHS * run.seconds, LEAST_SECONDS)
    most = min(most, SECONDS_FOR_LENGTHS)
    for time in _planned_lengths(run, longest):
        trial = Trial(Kind.LENGTH, text[:, :time])
        begun = perf_counter()
        late = (
            begun - started + cost * (time / before) ** GROWTH_OF_COST > most
        )
        late &= time > ALWAYS_TOKENS or run.foreign
        if late or not run.has_time_for(time):
            left = f"not compared at {time:,} tokens and more: time is up"
            return scope.without(left), None
        try:
            other = run.finding(trial) if run.differs(trial) else None
        except (ModelRaised, ValueError) as error:
            return scope.without(_why(trial, error)), None
        if other is not None:
            return scope, _at_the_shortest(run, text, other, before)
        cost, before = perf_counter() - begun, time
        scope = replace(scope, lengths=(*scope.lengths, time))
    return scope, None


def _at_the_shortest(
    run: Comparison, text: Tensor, found: ValueDiff, agrees: int
) -> ValueDiff:
    """Return the finding for the shortest text that differs.

    Bisect between a length at which both agree and one at which they differ.
    """
    assert found.trial is not None
    differs = found.trial.tokens.size(1)
    longest = differs
    with suppress(ModelRaised, ValueError):  # a side may refuse some length
        while differs - agrees > 1 and not run.heavy:
            middle = (agrees + differs) // 2
            if run.differs(Trial(Kind.LENGTH, text[:, :middle])):
                differs = middle
            else:
                agrees = middle
        if differs < longest:
            shorter = Trial(Kind.LENGTH, text[:, :differs])
            return run.finding(shorter) or found
    return found


def _masks(run: Comparison, scope: Scope) -> Stage:
    """Compare two rows with a mask; the second row is padded at its start."""
    if not all(subject.caller.takes_mask for subject in run.subjects):
        return scope, None
    trial = _rows(run, min(_longest(run), SHORT_TOKENS))
    mask = torch.ones_like(trial.tokens, dtype=torch.bool)
    mask[1:, : trial.tokens.size(1) // 4] = False
    trial = replace(trial, kind=Kind.MASKED, mask=mask)
    if not run.has_time_for(trial.tokens.numel()):
        return scope, None
    try:
        scores = run.scores(trial)
        if any(bool(s[mask].isnan().any()) for s in scores):
            # run in the models' own dtype, because a softmax in float32 turns
            # the lowest float64 number of a mask into -inf
            plain = tuple(own(subject) for subject in run.subjects)
            scores = run.scores(trial, plain)
    except (ModelRaised, ValueError) as error:
        return scope.without(_why(trial, error)), None
    if any(bool(s[mask].isnan().any()) for s in scores):
        return scope.without(f"not compared {trial.words}: NaN"), None
    times = run.gap(trial, scores)
    if times > MASKED_BOUNDS:
        ours, theirs = (s.double().log_softmax(-1) for s in scores)
        apart = float(gaps(ours, theirs).where(mask, 0.0).max())
        # report only the scores, not the first line that differs
        other = replace(run.found, apart=apart, trial=trial)
        return scope, replace(other, rounding=apart / times)
    return replace(scope, masked=True), None


def _longest(run: Comparison) -> int:
    """Return the longest text to compare, within what both models declare."""
    said = [s.limit.value for s in run.subjects if s.limit is not None]
    room = max(SCORES_AT_ONCE // run.subjects[0].vocab_size, 1)
    return min(room, *said) if said else min(room, UNDECLARED_TOKENS)


def _planned_lengths(run: Comparison, longest: int) -> list[int]:
    """Return lengths up to the longest, some of them from the models' code."""
    first, planned = run.found.sides[0].tokens.size(1), {MIDDLE_TOKENS}
    power = SHORT_TOKENS * GROWTH
    if run.heavy:
        planned.add(power + 1)
    else:
        planned.add(longest)
        while power < longest:
            planned.add(power)
            power *= GROWTH
    for variant in () if run.heavy else run.variants:
        model = variant.model
        near = [
            n
            for n in numbers_in_code(model)
            if first < n < longest and n != variant.subject.vocab_size
        ]
        near += [w.value for w in all_declared(model, WINDOW + TILES)]
        for n in near[:NAMED_LENGTHS]:
            planned |= {n, n + 1}
    return sorted(n for n in planned if first < n <= longest)


def _special_ids(run: Comparison) -> tuple[int, ...]:
    vocab = run.subjects[0].vocab_size
    found = set[int]()
    for variant in run.variants:
        ids = special_ids(variant.model, vocab)
        first = [*padding_ids(variant.model), 0, vocab - 1, *ids]
        found |= {*[*dict.fromkeys(first)][:SPECIAL_IDS]}
    return tuple(sorted(i for i in found if 0 <= i < vocab))


def _with_ids(run: Comparison, ids: tuple[int, ...], time: int) -> Trial:
    """Return a text of drawn ids, with the special ids in between."""
    tokens = draw(run.subjects[0].vocab_size, 1, time, _generator())
    row = torch.tensor(ids)
    tokens[0, 1 : 2 * len(ids) : 2] = row[: len(tokens[0, 1::2])]
    tokens[0, -1] = row[0]
    return Trial(Kind.SPECIAL, tokens, ids=ids)


def _rows(run: Comparison, time: int) -> Trial:
    """Return two different rows, the second with padding at its end."""
    vocab = run.subjects[0].vocab_size
    tokens = draw(vocab, ROWS, time, _generator())
    padding = [i for v in run.variants for i in padding_ids(v.model)]
    padding = [i for i in padding if 0 <= i < vocab] or [0]
    tokens[1:, time - time // 4 :] = padding[0]
    return Trial(Kind.ROWS, tokens, ids=(padding[0],))


def _narrowed(run: Comparison, trial: Trial) -> Trial:
    """Reduce a trial to one special id that still shows the difference."""
    if trial.kind is not Kind.SPECIAL:
        return trial
    for id_ in trial.ids:
        one = _with_ids(run, (id_,), trial.tokens.size(1))
        if run.differs(one):
            return one
    return trial


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


# --- Train mode --------------------------------------------------------------


def in_train_mode(run: Comparison, scope: Scope) -> Stage:
    """Compare the scores in train mode, and both sides' dropout."""
    models, tokens = run.models, run.found.sides[0].tokens
    trial = Trial(Kind.TRAIN, tokens)
    if models is None or not run.has_time_for(2 * tokens.numel()):
        why = "time is up" if models else "a side is not a module to copy"
        return scope.without(f"not compared in train mode: {why}"), None
    try:
        (ours, mean), (theirs, other_mean) = (
            _trained(variant, side, tokens)
            for variant, side in zip(
                run.variants, run.found.sides, strict=True
            )
        )
        others = [*mean.others, *other_mean.others]
        if run.gap(trial, (ours, theirs)) > 1:
            if others:
                why = f"random numbers are drawn at {others[0]}"
                return scope.without(f"train mode not compared: {why}"), None
            if (other := run.finding(trial)) is not None:
                return scope, other
    except (ModelRaised, ValueError) as error:
        return scope.without(_why(trial, error)), None
    losses = mean.losses, other_mean.losses
    dropped = None
    if mean.full or other_mean.full:
        left = f"dropout not compared: over {NUMBERS_KEPT:,} numbers"
        scope = scope.without(left)
    else:
        dropped = compare_losses(run.pair.names, models, losses, run.unit)
    return replace(scope, trained=True, dropped=dropped), None


def _trained(
    variant: Variant, side: Side, tokens: Int[Tensor, "batch time"]
) -> tuple[Scores, AtTheMean]:
    """Return the scores in train mode, and what the model's dropout drops."""
    trained, seed = variant.run_as(TRAIN_WITHOUT_GRADIENTS), side.subject.seed
    mean = AtTheMean()
    with isolated(seed), side.below(), operations_through(mean):
        scores = trained.scores(tokens, seed=seed)
    variant.model.eval()
    return scores.cpu(), mean


# --- Other weights -----------------------------------------------------------


def with_other_weights(run: Comparison, scope: Scope) -> Stage:
    """Compare models with zeros and ones redrawn, then with larger matrices.

    For a large model, one trial makes both changes. It also has two rows, so
    rows need no trial of their own.
    """
    models = run.models
    rows = _rows(run, min(_longest(run), SHORT_TOKENS))
    tokens = rows.tokens if scope.batch or run.heavy else rows.tokens[:1]
    if models is None or not run.has_time_for(2 * tokens.numel()):
        why = "time is up" if models else "a side is not a module to copy"
        return scope.without(f"no weights were redrawn: {why}"), None
    plan = plan_of(*models, run.found.weights)
    scope = replace(scope, constant=plan.constant)
    run.compare_copies()
    for size in _sizes(plan, run):
        if size in (0.0, HEAVY_SIZE):
            redraw(*models, plan, SEED)
        if size and scale(*models, plan, size) == 1.0 and size > SIZES[0]:
            break
        trial = Trial(Kind.REDRAWN, tokens, size=size)
        try:
            real = run.differs(trial) and not run.is_noise(trial)
            other = run.finding(trial) if real else None
        except (ModelRaised, ValueError) as error:
            return scope.without(_why(trial, error)), None
        if other is not None:
            return scope, other
        scope = _with_weights(scope, plan, size)
        if run.heavy:
            scope = replace(scope, batch=ROWS, padded=True)
    return scope, None


def _with_weights(scope: Scope, plan: Plan, size: float) -> Scope:
    """Add to the scope a size that products were scaled to."""
    sizes = (*scope.sizes, size) if size else scope.sizes
    return replace(scope, redrawn=plan.redrawn, sizes=sizes)


def _sizes(plan: Plan, run: Comparison) -> tuple[float, ...]:
    """Return the sizes to scale products to; 0 means to redraw vectors."""
    kind = run.found.sides[0].dtype
    scalable = all(plan.matrices) and torch.finfo(kind).bits > HALF_BITS
    vectors = (0.0,) if plan.pairs else ()
    if run.heavy:
        return (HEAVY_SIZE,) if scalable else vectors
    return (*vectors, *SIZES) if scalable else vectors
