"""Documents that are packed in one row do not see each other."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch
from jaxtyping import Bool
from torch import Tensor

from ...proof.claims import prove_documents
from ...running.documents import (
    NUMBERS,
    UNLIKE,
    Beside,
    Numbering,
    Packing,
    drawn,
    packings,
    promised,
    split,
)
from ...running.errors import FailureAt, ModelRaised
from ...running.losses import shifts_of
from ...running.model.calling import find_loss
from ...running.model.sizes import TILES, WINDOW, all_declared
from ...running.rounding import differ, floor, gaps
from ...running.tokens import SHORT, draw, others, spans
from ...running.variant import (
    CopyFailed,
    Variant,
    both,
    build,
    copy_for,
    gap_between,
    own,
    precise,
)
from ...running.ways import EVAL, HALF, OWN, Case
from ..check import SkipCheck, Subject, check
from ..leaks import LeakFinder, Trial

SOME = 8  # most documents of a row to compare with separate calls
MIDDLE = 13  # tokens of a row if the rows of a batch are packed differently
Fault = tuple[float, str]  # how far scores move, and the failure in words
BOUNDARY = (
    "; the loss counts the first token of a document, predicted from the "
    "document before"
)
UNKNOWN = (
    "the call takes nothing that says where documents are: name it with "
    "documents=..., in the shell --documents"
)


@check(
    share=1,
    implied_by=("check_determinism", "check_causality"),
    needs="arguments",
)
def check_documents(subject: Subject) -> str:
    """A document has the same scores in a packed row as in a separate call.

    Why: rows are packed to train without padding. If a mask, a state or a
    shifted token continues into the next document, the model trains on wrong
    text.
    How: documents of 1, 2 and 7 tokens, and one longer than a window, are at
    the start, in the middle and at the end of a row. Other rows have sixteen
    documents of one token, or random boundaries. When a document is replaced,
    no score of another document may move. Some documents are also run
    separately. The check runs in eval and train mode, with attention masks,
    and with larger weights. Ids of documents are large, have gaps and are
    repeated. Rows of one batch are packed differently, and so are consecutive
    calls. Documents must be isolated if an argument is for documents or the
    user declares them. For position_ids that restart, the report only states
    the result. There is a proof as in check_causality, with documents instead
    of positions.
    If it fails: isolation is required for an argument with this purpose
    (segments, documents, cu_seqlens, seq_idx) and for `documents=...`. With
    position_ids that restart, the check passes and reports the result. Look
    for states, convolutions, shifted tokens and hashes that continue into the
    next document. Also look for an attention mask of ones that is given as
    well, and for positions that do not restart.
    Reports: issues huggingface/transformers 46634, huggingface/nanoVLM 204.
    """
    ways = packings(subject)
    if not ways:
        raise SkipCheck(UNKNOWN)
    subject.require_no_state()
    subject.require_no_noise()
    rows = [r for r in _rows(subject) if subject.lengths.accepts(sum(r))]
    if not rows:
        raise SkipCheck("no row of two documents is as long as the model asks")
    try:
        if promised(subject):
            return _promised(subject, ways, rows)
        seen = [_seen(subject, way, rows[:2]) for way in ways]
    except ModelRaised as error:  # to refuse arguments is not a fault
        raise SkipCheck(f"not tried: {error}") from error
    return f"no promise; documents are {'; '.join(seen)}"


def _rows(subject: Subject) -> list[list[int]]:
    """Return the lengths of the documents in each tried row."""
    model, room = build(subject), subject.block_size
    said = [w.value for w in all_declared(model, WINDOW + TILES)]
    long = max([9, *(n + 2 for n in said if n + 12 <= room)])
    rows = [[long, 2, 7, 1], [7, 1, 2, long], [1, 1, 7], [2, 3], [1, 1]]
    rows.append([1] * SHORT)
    if room > SHORT and not subject.heavy:
        rows += [drawn(room, room // SHORT + 1), [room - room // 4, room // 4]]
    if subject.heavy:
        rows.sort(key=lambda row: (sum(row) < 5, sum(row)))
    return [row for row in rows if sum(row) <= room]


def _promised(
    subject: Subject, ways: list[Packing], rows: list[list[int]]
) -> str:
    """Require that one of several ways to give documents isolates them."""
    faults = list[str]()
    for way in ways:
        fault = _first_fault(subject, way, rows, way.beside)
        numbered, refused = way, ""
        time = subject.lengths.fit(MIDDLE)
        if way.mark is None and not subject.keeps_state:
            with subject.budget.part("rows of other documents", time, 1 / 2):
                fault = fault or _among_others(subject, way, time)
                fault = fault or _kept(subject, way, time)
        if fault is None and way.ids:
            with subject.budget.part("other ids", time, 1 / 2):
                found = _other_numbers(subject, way, max(rows, key=len))
                fault, numbered, refused = found
        if fault is None:
            lengths = spans({n for row in rows for n in row})
            text = f"documents of {lengths} tokens are apart by {way.words}"
            masked = Beside.ONES in way.beside
            text += "; with attention masks as well" * masked
            text += refused + _boundary(subject, way, rows[0])
            if way.mark is not None:
                return text
            proved = prove_documents(subject, numbered).sentence
            return f"{proved}; tested: {text}"
        faults.append(fault[1])
    text, way = faults[0], ways[0]
    uncached = way.without_cache(subject)
    if uncached and not _first_fault(subject, uncached, rows):
        text += f"; {uncached.words} they are apart"
    proof = prove_documents(subject, way) if way.mark is None else None
    culprit = proof.culprit if proof else None
    if proof is not None and culprit is not None:
        way_of_a_token = f"; way: {proof.way}" * bool(proof.way)
        text += f"; let through at {culprit}{way_of_a_token}"
    raise FailureAt(text, culprit)


def _seen(subject: Subject, way: Packing, rows: list[list[int]]) -> str:
    """Say whether an argument with another purpose isolates documents."""
    fault, but = _first_fault(subject, way, rows), list[str]()
    uncached = way.without_cache(subject)
    if fault and uncached and not _first_fault(subject, uncached, rows):
        but.append(f"without it: {fault[0]:.2g}")
        fault, way = None, uncached
    if fault:
        return f"not isolated by {way.words}: {fault[0]:.2g}"
    if masked := _first_fault(subject, way, rows, way.beside[1:2]):
        words = "together with an attention mask of ones"
        but.append(f"{words}: {masked[0]:.2g}")
    return "; not ".join([f"isolated by {way.words}", *but])


def _first_fault(
    subject: Subject,
    way: Packing,
    rows: list[list[int]],
    beside: tuple[Beside, ...] = (Beside.NOTHING,),
) -> Fault | None:
    generator = subject.generator()
    # the copy with larger weights is built only if needed
    for variant in both(subject):
        for row, mask in product(rows, beside):
            with subject.budget.part("documents", sum(row), 1 / 2):
                for fault in _faults(variant, way, row, mask, generator):
                    return fault
    return None


def _faults(
    variant: Variant,
    way: Packing,
    lengths: list[int],
    beside: Beside,
    generator: torch.Generator,
) -> Iterator[Fault]:
    """Yield faults found by replacing documents, and by separate calls."""
    subject, count = variant.subject, len(lengths)
    tokens = draw(subject.vocab_size, 1, sum(lengths), generator)
    text = way.text(lengths, subject.one_document(tokens))
    ids = torch.arange(count).repeat_interleave(torch.tensor(lengths))
    mine = ids == torch.arange(count).unsqueeze(1)
    runs = [
        variant.run_as(way.case(lambda *_: lengths, training, beside))
        for training in (False, True)
    ]
    hides = beside is Beside.HIDES
    # positions that a mask hides: the last document's
    hidden = lengths[-1] if hides else 0
    for run in runs:
        if fault := _moved(run, way, text, lengths, mine, hidden):
            yield fault
    packed, alone = runs[0], variant.run_as(OWN if way.own else EVAL)
    row_of = _row_of(lengths)
    for document in _some(range(count - bool(hidden))):
        at = mine[document]
        if not subject.lengths.accepts(lengths[document]):
            continue
        gap = gap_between((packed, text, (0, at)), (alone, text[:, at], 0))
        if gap:
            yield (
                gap.size,
                f"document {document} {row_of} has other scores in a separate "
                f"call: by {gap.size:.2g} at its position {gap.at[0]}, though "
                f"no token of another document was seen to change them: do "
                f"its positions start again? "
                f"{packed.precision(gap.dtype, gap.noise)}",
            )


def _some(numbers: Sequence[int]) -> list[int]:
    """Return the first document, the last, and some between them."""
    step = max(1, len(numbers) // SOME)
    return sorted({*numbers[::step], *numbers[-1:]})


def _row_of(lengths: list[int]) -> str:
    words = ", ".join(map(str, lengths[:SOME]))
    more = len(lengths) - SOME
    return f"of {len(lengths)} ({words}{', ...' * (more > 0)} tokens)"


def _moved(
    run: Variant,
    way: Packing,
    text: Tensor,
    lengths: list[int],
    mine: Bool[Tensor, "documents time"],
    hidden: int = 0,
) -> Fault | None:
    """Replace each document of a row; return how this changes others' scores.

    Args:
        run: the model, with the packing as an argument.
        way: the packing, which tells the model where documents are.
        text: the row.
        lengths: the lengths of the row's documents.
        mine: the positions of each document; documents with the same id count
            as one.
        hidden: positions at the end that a mask hides.
    """
    subject, count = run.subject, len(mine)
    base, still = text.repeat(count, 1), ~mine
    still[:, text.size(1) - hidden :] = False
    new = others(base, subject.vocab_size, subject.generator())
    new = subject.one_document(torch.where(mine, new, base))
    changed = way.text(lengths, new)
    trial = Trial(run, base, changed, [0] * count, still=still)
    leak = LeakFinder().find(trial)
    if leak is None:
        return None
    one, two = leak.trial.base[leak.row], leak.trial.changed[leak.row]
    ids = mine.long().argmax(0)
    return (
        leak.size,
        f"document {ids[(one != two).nonzero()[0, 0]]} {_row_of(lengths)} "
        f"moves the scores of document {ids[leak.position]} by "
        f"{leak.size:.2g}, at position {leak.position} of the row "
        f"{run.precision(leak.dtype, leak.noise)}",
    )


# --- Other document ids, other rows in the batch, the next call --------------


def _other_numbers(
    subject: Subject, way: Packing, lengths: list[int]
) -> tuple[Fault | None, Packing, str]:
    """Try other ids of documents, in the model's precision and in 16 bits.

    Returns:
        The first fault, the packing with which to prove isolation, and in
        words the numberings that the model refused.
    """
    numbered, refused = way, ""
    mine = _by_document(lengths)
    in_turns = torch.stack([mine[::2].any(0), mine[1::2].any(0)])
    for numbering in NUMBERS:
        other = way.numbered(numbering)
        turns = numbering is Numbering.IN_TURNS
        groups = in_turns if turns else mine
        try:
            fault = _by_numbers(subject, other, lengths, groups)
        except ModelRaised as error:
            refused += f"; not tried: {numbering.value} ({error})"
            continue
        if fault is not None:
            return fault, numbered, refused
        numbered = numbered if turns else other
    return None, numbered, refused


def _by_document(lengths: list[int]) -> Bool[Tensor, "documents time"]:
    """Return a mask with the positions of each document in a row."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return ids == torch.arange(len(lengths)).unsqueeze(1)


def _by_numbers(
    subject: Subject,
    way: Packing,
    lengths: list[int],
    mine: Bool[Tensor, "documents time"],
) -> Fault | None:
    """Replace the documents that share an id, in both modes and two dtypes."""
    text = subject.one_document(subject.draw(1, sum(lengths)))
    copies = [precise(subject)]
    with suppress(SkipCheck, CopyFailed):
        copies.append(copy_for(subject, HALF[0]))
    for variant, training in product(copies, (False, True)):
        run = variant.run_as(way.case(lambda *_: lengths, training))
        with suppress(CopyFailed):
            if fault := _moved(run, way, text, lengths, mine):
                return fault
    return None


def _among_others(subject: Subject, way: Packing, time: int) -> Fault | None:
    """Pack rows of a batch differently; compare each with a separate call."""
    rows = 1 if way.single else subject.fit_rows(UNLIKE)
    run = precise(subject).run_as(way.case(split))
    tokens = subject.draw(rows, time)
    for row in range(rows if rows > 1 else 0):
        alone = run.run_as(run.case.at(row)), tokens[row : row + 1], 0
        gap = gap_between((run, tokens, row), alone)
        if gap:
            lengths = _row_of(split(time, row))
            return gap.size, (
                f"the row {lengths} has other scores among rows of other "
                f"documents than in a separate call: by {gap.size:.2g} at "
                f"position {gap.at[0]} {run.precision(gap.dtype, gap.noise)}"
            )
    return None


def _kept(subject: Subject, way: Packing, time: int) -> Fault | None:
    """Require that a packing does not affect the next call of equal shape.

    The next call is packed differently, or has no documents. The test does not
    apply if even plain calls affect the next call.
    """
    first, other, tokens = subject.draw(3, time).split(1)

    def after(text: Tensor, case: Case, then: Case) -> Tensor:
        run, seed = own(subject), subject.seed
        run.run_as(case).scores(text)
        return run.run_as(then).scores(tokens, go_on=True, seed=seed)

    for training in (False, True):
        plain = replace(OWN if way.own else EVAL, training=training)
        one, two = (
            way.case(split, training).at(row) for row in (0, UNLIKE - 1)
        )
        for then in (two, plain):
            left = after(first, plain, then)
            if differ(left, after(other, plain, then)):
                break
            size = float(gaps(left, after(first, one, then)).max())
            if size > floor(left):
                call = "packed differently" if then is two else "not packed"
                return size, (
                    f"the documents of a call move the scores of the next "
                    f"one, {call}, by {size:.2g} at length {time} {plain.mode}"
                )
    return None


def _boundary(subject: Subject, way: Packing, lengths: list[int]) -> str:
    """Say whether the loss counts a target that is in the next document."""
    if subject.caller.target_name is None or way.single:
        return ""
    run = next(both(subject)).run_as(way.case(lambda *_: lengths))
    tokens = way.text(lengths, subject.draw(1, sum(lengths)))
    targets = tokens.roll(1, 1)
    answer = run.answer(tokens, targets=targets, seed=subject.seed)
    scores = subject.reader.find(answer, *tokens.shape)
    loss = find_loss(answer)
    if scores is None or loss is None:
        return ""
    inside = shifts_of(scores.detach(), targets, loss.detach()) == {1}
    return BOUNDARY * inside
