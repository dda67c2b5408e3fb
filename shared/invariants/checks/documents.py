"""Documents that are packed in one row do not see each other."""

from collections.abc import Iterator
from itertools import product

import torch

from ...proof.prover import prove_documents
from ...running.documents import HIDES, ONES, Packing, packings, promised
from ...running.errors import ModelRaised
from ...running.losses import shifts_of
from ...running.model.calling import find_loss
from ...running.model.sizes import TILES, WINDOW, all_declared
from ...running.tokens import draw, others, spans
from ...running.variant import Variant, both, build, gap_between
from ...running.ways import EVAL, OWN
from ..check import SkipCheck, Subject, check
from ..leaks import LeakFinder, Trial

Fault = tuple[float, str]  # how far scores move, and what a failure says
BOUNDARY = (
    "; the loss counts the first token of a document, predicted by the last "
    "one before it"
)
UNKNOWN = (
    "the call takes nothing that says where documents are: name it with "
    "documents=..., in the shell --documents"
)


@check(share=1, implied_by=("check_determinism", "check_causality"))
def check_documents(subject: Subject) -> str:
    """A document in a packed row has the scores that it has alone.

    Why: rows are packed to train without padding; a mask, a state, a shifted
    token that goes on into the next document trains on another text.
    How: documents of 1, 2, 7 and more tokens than a window stand at the
    start, in the middle and at the end of a row; each is replaced, and no
    score of another may move; each is compared with itself alone. In eval
    and train mode, with attention masks beside, and with larger weights. An
    argument whose purpose it is, or a declaration, promises that documents
    are apart; of position_ids that start again the report says what was seen.
    A proof, as in check_causality, has documents in place of positions.
    Reports: huggingface/transformers 46634; huggingface/nanoVLM 204.
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
    except ModelRaised as error:  # accepted is not obeyed, refused no fault
        raise SkipCheck(f"not tried: {error}") from error
    return f"no promise; documents are {'; '.join(seen)}"


def _rows(subject: Subject) -> list[list[int]]:
    """Return lengths of the documents of each row that is tried."""
    model, room = build(subject), subject.block_size
    said = [w.value for w in all_declared(model, WINDOW + TILES)]
    long = max([9, *(n + 2 for n in said if n + 12 <= room)])
    rows = [[long, 2, 7, 1], [7, 1, 2, long], [1, 1, 7], [2, 3], [1, 1]]
    if subject.heavy:
        rows.sort(key=lambda row: (sum(row) < 5, sum(row)))
    return [row for row in rows if sum(row) <= room]


def _promised(
    subject: Subject, ways: list[Packing], rows: list[list[int]]
) -> str:
    """Require that documents are apart in one of the ways to count them."""
    faults = list[str]()
    for way in ways:
        fault = _first_fault(subject, way, rows, way.beside)
        if fault is None:
            lengths = spans({n for row in rows for n in row})
            text = f"documents of {lengths} tokens are apart by {way.words}"
            text += "; with attention masks beside, too" * (ONES in way.beside)
            text += _boundary(subject, way, rows[0])
            if way.mark is not None:
                return text
            return f"{prove_documents(subject, way)}; tested: {text}"
        faults.append(fault[1])
    text, way = faults[0], ways[0]
    uncached = way.without_cache(subject)
    if uncached and not _first_fault(subject, uncached, rows):
        text += f"; {uncached.words} they are apart"
    if way.mark is None and (proof := prove_documents(subject, way)).culprit:
        text += f"; let through at {proof.culprit}"
    raise AssertionError(text)


def _seen(subject: Subject, way: Packing, rows: list[list[int]]) -> str:
    """Say whether an argument that promises nothing isolates documents."""
    fault, but = _first_fault(subject, way, rows), list[str]()
    uncached = way.without_cache(subject)
    if fault and uncached and not _first_fault(subject, uncached, rows):
        but.append(f"without it: {fault[0]:.2g}")
        fault, way = None, uncached
    if fault:
        return f"not isolated by {way.words}: {fault[0]:.2g}"
    if masked := _first_fault(subject, way, rows, way.beside[1:2]):
        words = "with an attention mask of ones beside it"
        but.append(f"{words}: {masked[0]:.2g}")
    return "; not ".join([f"isolated by {way.words}", *but])


def _first_fault(
    subject: Subject,
    way: Packing,
    rows: list[list[int]],
    beside: tuple[str, ...] = ("",),
) -> Fault | None:
    generator = subject.generator()
    for variant in both(subject):  # the second one is made where it is needed
        for row, mask in product(rows, beside):
            with subject.budget.part("documents", sum(row), 1 / 2):
                for fault in _faults(variant, way, row, mask, generator):
                    return fault
    return None


def _faults(
    variant: Variant,
    way: Packing,
    lengths: list[int],
    beside: str,
    generator: torch.Generator,
) -> Iterator[Fault]:
    """Replace each document, then compare each with itself alone."""
    subject, count = variant.subject, len(lengths)
    tokens = draw(subject.vocab_size, 1, sum(lengths), generator)
    text = way.text(lengths, subject.one_document(tokens))
    base = text.repeat(count, 1)
    ids = torch.arange(count).repeat_interleave(torch.tensor(lengths))
    mine = ids == torch.arange(count).unsqueeze(1)
    new = others(base, subject.vocab_size, generator)
    new = subject.one_document(torch.where(mine, new, base))
    changed, still = way.text(lengths, new), ~mine
    if beside == HIDES:  # the last document
        mine, still = mine[:-1], still & ~mine[-1]
    row_of = f"of {count} ({', '.join(map(str, lengths))} tokens)"
    packed, in_training = (
        variant.run_as(way.case(lambda _: lengths, training, beside))
        for training in (False, True)
    )
    for run in (packed, in_training):
        trial = Trial(run, base, changed, [0] * count, still=still)
        if leak := LeakFinder().find(trial):
            one, two = leak.trial.base[leak.row], leak.trial.changed[leak.row]
            moved = ids[(one != two).nonzero()[0, 0]]
            yield (
                leak.size,
                f"document {moved} {row_of} moves the scores of document "
                f"{ids[leak.position]} by {leak.size:.2g}, at position "
                f"{leak.position} of the row "
                f"{run.precision(leak.dtype, leak.noise)}",
            )
    alone = variant.run_as(OWN if way.own else EVAL)
    for document, at in enumerate(mine):
        if not subject.lengths.accepts(lengths[document]):
            continue
        gap = gap_between((packed, text, (0, at)), (alone, text[:, at], 0))
        if gap:
            yield (
                gap.size,
                f"document {document} {row_of} has other scores alone: by "
                f"{gap.size:.2g} at its position {gap.at[0]}, though no token "
                f"of another was seen to move it: do its positions start "
                f"again? {packed.precision(gap.dtype, gap.noise)}",
            )


def _boundary(subject: Subject, way: Packing, lengths: list[int]) -> str:
    """Say whether the loss counts a token across a boundary."""
    if subject.caller.target_name is None or way.single:
        return ""
    run = next(both(subject)).run_as(way.case(lambda _: lengths))
    tokens = way.text(lengths, subject.draw(1, sum(lengths)))
    targets = tokens.roll(1, 1)
    answer = run.answer(tokens, targets=targets, seed=subject.seed)
    scores = subject.reader.find(answer, *tokens.shape)
    loss = find_loss(answer)
    if scores is None or loss is None:
        return ""
    inside = shifts_of(scores.detach(), targets, loss.detach()) == {1}
    return BOUNDARY * inside
