"""Documents that are packed in one row do not see each other."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from jaxtyping import Int
from torch import Tensor

from ..cases import EVAL, OWN
from ..check import SkipCheck, Subject, check
from ..dependence.prover import prove_documents
from ..documents import BESIDE, HIDES, Packing, packings
from ..errors import ModelRaised
from ..losses import shifts_of
from ..model.reading import find_loss
from ..model.sizes import TILES, WINDOW, all_declared
from ..moves.moved import moves
from ..rounding import dtype_name, real_gap
from ..tokens import draw, others, spans
from ..variant import Variant, both, build

Fault = tuple[float, str]  # how far scores move, and the sentence
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
    and train mode, with attention masks beside what says where documents
    are, and with larger weights. An argument whose purpose it is, or a
    declaration, promises that documents are apart; of position_ids that
    start again the report says what was seen. A proof, as in check_causality,
    has documents in place of positions, in both orders.
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
        return (_promised if ways[0].promised else _seen)(subject, ways, rows)
    except ModelRaised as error:  # accepted is not obeyed, refused no fault
        raise SkipCheck(f"not tried: {error}") from error


def _rows(subject: Subject) -> list[list[int]]:
    """Return lengths of the documents of each row that is tried."""
    model, room = build(subject), subject.block_size
    said = [w.value for w in all_declared(model, WINDOW + TILES)]
    fitting = [n + 2 for n in said if n + 12 <= room]
    long = max([9, *fitting])
    rows = [[long, 2, 7, 1], [7, 1, 2, long], [1, 1, 7], [2, 3], [1, 1]]
    if subject.heavy:
        rows.sort(key=lambda row: (sum(row) < 5, sum(row)))
    return [row for row in rows if sum(row) <= room]


def _promised(
    subject: Subject, ways: list[Packing], rows: list[list[int]]
) -> str:
    """Require that documents are apart in one of the ways to count them."""
    faults: list[Fault] = []
    for way in ways:
        beside = _beside(subject, way)
        fault = _first_fault(subject, way, rows, beside)
        if fault is None:
            break
        faults.append(fault)
    else:
        text, way = faults[0][1], ways[0]
        uncached = _without_cache(subject, way)
        if uncached and not _first_fault(subject, uncached, rows, [""]):
            text += f"; {uncached.words} they are apart"
        if way.mark is None:
            proof = prove_documents(subject, way)
            if proof.culprit is not None:
                text += f"; let through at {proof.culprit}"
        raise AssertionError(text)
    lengths = spans({n for row in rows for n in row})
    text = f"documents of {lengths} tokens are apart by {way.words}"
    text += "; with attention masks beside, too" * (len(beside) > 1)
    text += _boundary(subject, way, rows[0])
    if way.mark is not None:
        return text
    return f"{prove_documents(subject, way)}; tested: {text}"


def _seen(subject: Subject, ways: list[Packing], rows: list[list[int]]) -> str:
    """Say what isolates documents, where nothing promises it."""
    texts, few = [], rows[:2]
    for way in ways:
        fault = _first_fault(subject, way, few, [""])
        uncached, not_so = _without_cache(subject, way), []
        if fault is not None and uncached is not None:
            not_so = [f"without it: {fault[0]:.2g}"]
            fault = _first_fault(subject, uncached, few, [""])
            way = way if fault else uncached
        if fault is not None:
            texts.append(f"not isolated by {way.words}: {fault[0]:.2g}")
            continue
        beside = _beside(subject, way)[1:2]
        fault = _first_fault(subject, way, few, beside)
        if fault is not None:
            size = f"{fault[0]:.2g}"
            not_so.append(f"with an attention mask of ones beside it: {size}")
        texts.append("; not ".join([f"isolated by {way.words}", *not_so]))
    return f"no promise; documents are {'; '.join(texts)}"


def _without_cache(subject: Subject, way: Packing) -> Packing | None:
    """Return the way where no cache is asked for, if the call can say so."""
    flags = {*subject.caller.arguments, *subject.caller.own_arguments}
    words = f"{way.words} with use_cache=False"
    if "use_cache" not in flags:
        return None
    return replace(way, words=words, more={"use_cache": False})


def _beside(subject: Subject, way: Packing) -> list[str]:
    """Return the masks that can be given beside what a way gives."""
    return BESIDE if subject.caller.takes_mask and not way.masks else [""]


def _first_fault(
    subject: Subject,
    way: Packing,
    rows: list[list[int]],
    beside: list[str],
) -> Fault | None:
    generator = subject.generator()
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
    beside: str,
    generator: torch.Generator,
) -> Iterator[Fault]:
    """Replace each document, then compare each with itself alone."""
    subject = variant.subject
    tokens = draw(subject.vocab_size, 1, sum(lengths), generator)
    text = way.text(lengths, tokens)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    hidden = beside == HIDES  # the last document
    eval_run, train_run = (
        variant.run_as(way.case(lambda _: lengths, training, beside))
        for training in (False, True)
    )
    for run in (eval_run, train_run):
        yield from _moved(run, way, lengths, text, ids, hidden, generator)
    alone = variant.run_as(OWN if way.own else EVAL)
    for document in range(len(lengths) - hidden):
        at = (ids == document).nonzero().flatten()
        if not subject.lengths.accepts(len(at)):
            continue
        packed = partial(_scores, eval_run, text, at)
        single = partial(_scores, alone, text[:, at])
        gap = real_gap(eval_run.model, packed, single)
        if gap is not None:
            yield (
                gap.size,
                f"document {document} of {_named(lengths)} has other scores "
                f"alone: by {gap.size:.2g} at its position {gap.at[0]}, "
                f"though no token of another was seen to move it: do its "
                f"positions start again? {_where(eval_run, gap.noise)}",
            )


def _moved(
    run: Variant,
    way: Packing,
    lengths: list[int],
    text: Int[Tensor, "1 time"],
    ids: Int[Tensor, "time"],
    hidden: bool,
    generator: torch.Generator,
) -> Iterator[Fault]:
    """Yield how one document moves another."""
    count = len(lengths)
    base = text.repeat(count, 1)
    mine = ids == torch.arange(count).unsqueeze(1)
    new = others(base, run.subject.vocab_size, generator)
    changed = way.text(lengths, torch.where(mine, new, base))
    shown = ~mine & ~(hidden & (ids == count - 1))
    for moved in moves(run, base, changed):
        for row, by in zip(moved.rows, moved.by, strict=True):
            if not float((by * shown[row]).max()) > moved.least:
                continue
            one, two = base[row : row + 1], changed[row : row + 1]
            if run.case.training and run.draws(one) != run.draws(two):
                continue
            calls = partial(_scores, run, one), partial(_scores, run, two)
            gap = real_gap(run.model, *calls, shown=shown[row])
            if gap is not None:
                at = gap.at[0]
                yield (
                    gap.size,
                    f"document {row} of {_named(lengths)} moves the scores "
                    f"of document {int(ids[at])} by {gap.size:.2g}, at "
                    f"position {at} of the row {_where(run, gap.noise)}",
                )


def _scores(
    run: Variant, text: Tensor, at: Tensor | slice = slice(None)
) -> Tensor:
    return run.scores(text)[0, at]


def _named(lengths: list[int]) -> str:
    return f"{len(lengths)} ({', '.join(map(str, lengths))} tokens)"


def _where(run: Variant, noise: float) -> str:
    dtype = next((dtype_name(p.dtype) for p in run.parameters), "float32")
    return f"({dtype}{run.conditions}; rounding there is {noise:.1g})"


def _boundary(subject: Subject, way: Packing, lengths: list[int]) -> str:
    """Say whether the loss counts a token across a boundary."""
    if subject.caller.target_name is None or way.single:
        return ""
    run = next(both(subject)).run_as(way.case(lambda _: lengths))
    tokens = way.text(lengths, subject.draw(1, sum(lengths)))
    targets = tokens.roll(1, 1)
    answer = run.answer(tokens, targets=targets, seed=subject.seed)
    scores, loss = subject.find(answer, *tokens.shape), find_loss(answer)
    if scores is None or loss is None:
        return ""
    if shifts_of(scores.detach(), targets, loss.detach()) != {1}:
        return ""
    return (
        "; the loss counts the first token of a document, predicted by the "
        "last one before it"
    )
