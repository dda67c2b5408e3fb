"""All earlier tokens matter."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...proof.claims import unreached
from ...running.errors import ModelRaised
from ...running.model.sizes import WINDOW, Declared, all_declared
from ...running.tokens import SHORT, SPLITS, draw, others, spans, splits_to_try
from ...running.variant import Variant, both, build
from ...tracing.moved import influence_of, moves
from ...visibility import Declared as Visible
from ..check import Subject, check
from ..embedding import gradients_at

PROVED = "; no operation leads from there to these scores"
# most tokens of a heavy model's text that are tested without a proof
LITTLE = 3
FADED = 1e-10  # an influence below this share of the largest one has faded


@check(share=2, implied_by=("check_order_sensitivity",))
def check_context_use(subject: Subject) -> str:
    """Every token so far can change the last output, the newest included.

    Why: a window that is one token too short, a dropped first token, or late
    scores make a model worse, and no other check shows them.
    How: each token of short texts is replaced, in the fresh model and with
    larger weights. In the longest text some tokens are tested, by replacing
    them or by gradient. Tokens outside a declared window need no effect.
    Lengths near the window and near twice the window are also tried.
    If it fails: a window is too short or was not declared (`--window`), a
    first token is overwritten, or scores come one step late, so that the
    newest token is never read.
    Reports: issue huggingface/transformers 39408, a window off by one.
    """
    longest = subject.block_size
    subject.require_no_state()
    if subject.sees is not None:
        return _require_seen(subject, subject.sees)
    windows = all_declared(build(subject), WINDOW)
    window = min(windows, key=lambda w: w.value, default=None)
    generator, reported = subject.generator(), ""
    beside = [w.value for w in windows if "chunk" not in w.name]
    near = {n for w in beside for n in (w - 1, w, w + 1, 2 * w + 1)}
    lengths = {n for n in near if 1 < n < longest}
    for time in subject.fit(2, 3, 8, SHORT, longest, *lengths):
        with subject.budget.part("texts", time, 1 / 2):
            note = _require_use(subject, time, window, generator)
            reported = note or reported
    return (
        f"every token tried, at lengths to {subject.budget.reached}{reported}"
    )


def _require_seen(subject: Subject, declared: Visible) -> str:
    """Require that each token matters at the positions that may see it."""
    generator, vocab = subject.generator(), subject.vocab_size
    for time in subject.fit(2, 3, 8, SHORT):
        with subject.budget.part("texts", time, 1 / 2):
            ids = draw(vocab, 1, time, generator)
            relation = declared.of(ids)[0]
            used = torch.zeros_like(relation)
            for variant in both(subject, time):
                used |= influence_of(variant, ids[0]) > 0
                if bool((relation & ~used).any()):
                    used |= _by_gradients(variant, ids, generator)
        unused = (relation & ~used).nonzero().tolist()
        if unused:
            position, token = unused[0]
            more = f" ({len(unused)} such pairs)" * (len(unused) > 1)
            raise AssertionError(
                f"at length {time} the scores of position {position} never "
                f"change with token {token}, which {declared.name} lets it "
                f"see{more}"
            )
    reached = subject.budget.reached
    return f"every token that {declared.name} shows, at lengths to {reached}"


def _by_gradients(
    variant: Variant, ids: Int[Tensor, "1 time"], generator: torch.Generator
) -> Bool[Tensor, "time time"]:
    """Return, by gradients, which tokens affect which positions' scores."""
    time = ids.size(1)
    found = gradients_at(variant, ids, [*range(time)], generator)
    if found is None:
        return torch.zeros(time, time, dtype=torch.bool)
    return found.cpu() > 0


def _require_use(
    subject: Subject,
    time: int,
    window: Declared | None,
    generator: torch.Generator,
) -> str:
    """Require that each token matters; note those that may be unused."""
    # positions that no operation connects to the last scores
    never: list[int] = []
    if not subject.heavy or time <= LITTLE:
        with suppress(ModelRaised):
            never = unreached(subject, time)
    count = SPLITS if time <= SHORT else 6
    splits = splits_to_try(time, generator, count)
    columns = sorted({*(s - 1 for s in splits), time - 1, *never})
    used = _used(both(subject, time), time, columns, generator)
    unused = [s for s in columns if not used.get(s)]
    seen = [s for s in columns if s not in unused]
    if not unused:
        return ""
    note = f"; at length {time}"
    if window is not None and max(unused) < time - window.value:
        last = max(unused)
        return f"{note} tokens up to {last} are outside the declared {window}"
    first = min(seen, default=0)
    most = max((used[s] for s in seen), default=0.0)
    # not a fault if the influence fades towards the unused tokens
    if max(unused) < first and used[first] < FADED * most:
        return f"{note} memory fades below rounding before token {first}"
    declared = f" (declared: {window})" if window else ""
    late = ", the newest: do they come a step late?"
    raise AssertionError(
        f"at length {time} the last scores never change with "
        f"{'token' if len(unused) == 1 else 'tokens'} {spans(unused)}"
        f"{declared}{late * (unused == [time - 1])}"
        f"{PROVED * ({*unused} <= {*never})}"
        f"{_meant(unused, time) * (window is None)}"
    )


def _meant(unused: list[int], time: int) -> str:
    """Say how to declare a window, if that may explain unused tokens."""
    size = time - 1 - unused[-1]
    if unused[0] or size < 1:
        return ""
    return (
        f"; if a window is meant, set sliding_window on the model or its "
        f"config, or give window={size} (in the shell --window {size})"
    )


def _used(
    variants: Iterable[Variant],
    time: int,
    columns: list[int],
    generator: torch.Generator,
) -> dict[int, float]:
    """Return how far each token moves the last scores, if it moves them."""
    used: dict[int, float] = {}
    for variant in variants:
        vocab = variant.subject.vocab_size
        one_document = variant.subject.one_document
        for _ in range(8 if time <= SHORT else 3):
            left = [s for s in columns if not used.get(s)]
            if not left:
                return used
            text = one_document(draw(vocab, 1, time, generator))
            base = text.repeat(len(left), 1)
            changed = base.clone()
            replaced = one_document(others(base[0], vocab, generator))
            changed[range(len(left)), left] = replaced[left]
            for moved in moves(variant, base, changed, slice(-1, None)):
                sizes = zip(moved.rows, moved.by[:, 0].tolist(), strict=True)
                used |= {left[r]: by for r, by in sizes if by > moved.least}
        if all(used.get(s) for s in columns):
            return used
        # for tokens without an effect: gradients show influences below
        # rounding
        tokens = one_document(draw(vocab, 1, time, generator))
        grads = gradients_at(variant, tokens, [time - 1], generator)
        if grads is not None:
            # 0 / 0 is NaN; a share of infinity is 0
            shares = (grads[0] / grads[0].max()).tolist()
            scale = max(used.get(s, 0.0) for s in columns) or 1.0
            for s in columns:
                if shares[s] > 0:
                    used[s] = used.get(s) or shares[s] * scale
    return used
