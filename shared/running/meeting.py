"""Find out how to call a model, by calling it; `meet` returns a Subject."""

import inspect
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any, Unpack

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..settings import Settings, completed, takes
from ..visibility import declared_by
from .context import (
    RecordedDraws,
    during,
    isolated,
    modes_kept,
    one_run,
    random_states,
)
from .documents import packings
from .errors import ModelRaised, UnusableModel, sentence
from .layout import require_batch_first
from .model.building import Builder, called_modules, name_of
from .model.calling import (
    BATCH_FIRST,
    IN_ARRAYS,
    LOG_PROBS,
    SCORERS,
    SCORES,
    Caller,
    Reader,
    caller_of,
    describe,
    find_scores,
    is_array,
    no_targets,
    reach,
    shared_default,
    tensors_in,
)
from .model.inputs import (
    ANSWER,
    ENCODED,
    ENCODED_MASK,
    FLAGS,
    FOUR_AXES,
    INSTEAD,
    KEEPS,
    MASK,
    OF_ANSWERS,
    PADDING,
    REFUSALS,
    Input,
    passed_over,
    together,
    with_targets,
)
from .model.kept_state import KeptState, changed, values_of
from .model.keywords import read_otherwise
from .model.sizes import (
    LENGTH,
    ROWS,
    VOCABULARY,
    Declared,
    Lengths,
    before_first_position,
    choose_sizes,
    declared,
)
from .operations import operations_through, quantised
from .program import NO_GRADIENTS, Program
from .ranks import on_any
from .subject import Subject
from .tokens import SHORT, draw
from .tolerances import FLOOR_UNITS, SPREAD_OF_AN_IDLE_MASK
from .variant import Copy, Variant, own
from .ways import (
    EVAL,
    LOSSES,
    MASKED,
    OWN,
    TRAIN_TARGETS,
    Case,
    refused_with,
    to_be_tried,
)

ON_SOME_RANKS = (
    "the scores have a gradient on some ranks only, as where stages run a "
    "backward pass by a schedule"
)
# Messages of exceptions that are not the model's fault: its device or a
# quantised kernel has no backward pass.
NO_BACKWARD = re.compile("not support backward|derivative .*not implemented")


@takes(Settings)
@one_run
def meet(
    model_or_factory: Any,
    *,
    at: tuple[int, int] | None = None,
    **settings: Unpack[Settings],
) -> Subject:
    """Call a model to find the facts that the checks need; return them.

    Args: as for `check_model`; `at` has the rows and the length of all later
        calls, if these are known. The search ends when one call of this size
        shows how to read the scores.

    Raises:
        UnusableModel: a ValueError, in one line, for a model that cannot be
            built, called or read. The user's own exception is its cause.
        ValueError: for unknown settings.
    """
    given = completed("meet", Settings, settings)
    outputs, seed, documents = (
        given[name] for name in ("outputs", "seed", "documents")
    )
    window = given["window"]
    if window is not None and window < 1:
        raise ValueError(f"window must be a positive number, got {window}")
    builder = Builder(model_or_factory, seed, given["device"], window)
    model = builder.build()
    builder.keep_shared(model)
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    name = name_of(model_or_factory) or name_of(model) or "model"
    sizes = given["vocab_size"], given["block_size"]
    vocab, block, notes = choose_sizes(model, name, *sizes)
    method = None if outputs == "logits" else LOG_PROBS
    call = caller_of(model, method, given["layout"] == "tb", given["inputs"])
    call = replace(call, output=given["output"])
    rows, limit = None, declared(model, LENGTH)  # block_size may be smaller
    if isinstance(model, Program):
        call = replace(call, alone=True, no_gradients=NO_GRADIENTS)
        notes, rows = [*notes, *model.notes], 1
        limit = limit or Declared("block_size", block)
    subject = Subject(
        name=name,
        builder=builder,
        seed=seed,
        vocab_size=vocab,
        block_size=block,
        limit=limit,
        cache_rows=room.value if (room := declared(model, ROWS)) else None,
        parameters=sum(weight.numel() for weight in weights),
        is_module=isinstance(model, nn.Module),
        caller=call,
        lengths=Lengths(1, 1, block),
        rows=rows,
        make_cache=given["cache"],
        documents=documents,
        sees=declared_by(given["sees"], block),
        compile=given["compile"],
        notes=tuple(notes),
    )
    _require_documents(documents, call, vocab)
    if subject.heavy:
        model = builder.keep(model)
    with isolated(seed), subject.few_threads(), modes_kept([model]):
        return _find_out(subject, Copy(model), outputs, at)


def _require_documents(documents: Any, caller: Caller, vocab: int) -> None:
    """Require that `documents` names an argument of the call, or an id."""
    taken = *caller.given, *caller.arguments, *caller.own_arguments
    if isinstance(documents, str) and documents not in taken:
        raise ValueError(
            f"documents name {documents}, which the call does not take: it "
            f"takes {', '.join(taken) or 'only tokens'}"
        )
    if isinstance(documents, int) and not 0 <= documents < vocab:
        raise ValueError(
            f"id {documents} separates documents, and is outside the "
            f"vocabulary of {vocab}"
        )


def _find_out(
    subject: Subject, copy: Copy, outputs: str, at: tuple[int, int] | None
) -> Subject:
    """Return the subject with the facts that the model's answers show."""
    model, own = copy.model, subject.caller
    if isinstance(model, nn.Module):
        copy.built = KeptState(model)
    with called_modules() as called:
        try:
            subject, size = probe(subject, copy, at)
        except ModelRaised as error:
            raise UnusableModel(
                f"{subject.name}: {shared_default(model)}{error}"
            ) from error.__cause__
    subject.builder.require_own_modules(model, called)
    caller, reader, limit = subject.caller, subject.reader, subject.limit
    if not caller.compared:
        for name in caller.given.keys() - own.given.keys():
            subject = subject.noted(
                f"without {name} the model answers for fewer positions: it is "
                f"called with {name}, all 0"
            )
    if subject.fault:
        return subject
    for words in _unusual(caller, reader, own):
        subject = subject.noted(words)
    subject = replace(
        subject,
        block_size=subject.block_size - caller.shifts,
        limit=limit and replace(limit, value=limit.value - caller.shifts),
        says_log_probs=outputs == "log_probs"
        or caller.log_probs
        or (outputs == "auto" and LOG_PROBS in reader.path),
    )
    if size == at and (subject.builder.can_copy or not subject.is_module):
        return subject
    with suppress(ModelRaised):  # a later check will report it
        for find in (
            *(_find_gradients, find_state, require_batch_first),
            *(find_refusals, find_noise),
        ):
            subject = find(Variant(subject, copy), *size)
    return _find_cases(subject, copy)


def _unusual(caller: Caller, reader: Reader, own: Caller) -> Iterator[str]:
    """Yield notes on an unusual way to get scores; `own` is the usual call."""
    if caller.method != own.method:
        yield (
            f"the model's own call returns no scores: {caller.method} is "
            f"called for them"
        )
    if caller.compared:
        yield (
            "the model returns only a loss: the scores are the tensors that "
            "it compares with its targets"
        )
    if caller.shifts:
        yield (
            "its loss leaves out the last position: each text is called with "
            "a token more"
        )
    if reader.form != BATCH_FIRST:
        yield f"the scores are read as ({', '.join(reader.form)})"
    if reader.alike > 1:
        named = {*SCORES} & {*reader.path}
        which = reader.where if named else "the first"
        yield (
            f"the model answers with {reader.alike} tensors of scores: "
            f"{which} is checked"
        )


def _find_gradients(variant: Variant, batch: int, time: int) -> Subject:
    """Find out whether the model has gradients on this device."""
    subject = variant.subject
    tokens = subject.draw(batch, time)
    try:
        scores = variant.scores(tokens, grad=True)
        if quantised(variant.model) and scores.requires_grad:
            with during("in the backward pass"):
                scores.sum().backward()
            variant.model.zero_grad()
        if on_any(scores.requires_grad) and on_any(not scores.requires_grad):
            caller = replace(subject.caller, no_gradients=ON_SOME_RANKS)
            return replace(subject, caller=caller)
    except ModelRaised as error:
        cause = error.__cause__
        if cause is None or not NO_BACKWARD.search(str(cause)):
            raise
        why = f"no gradients on this device ({sentence(cause)})"
        if "CPU" in str(cause):
            why += "; --device cuda runs them"
        caller = replace(subject.caller, no_gradients=why)
        subject = replace(subject, caller=caller)
        replace(variant, subject=subject).scores(tokens)
        return subject.noted(f"{why}: all calls are made without")
    return subject


def _find_cases(subject: Subject, copy: Copy) -> Subject:
    """Find the cases, or ways to call the model, that yield no scores."""
    # if this fails, try only cases without arguments
    with suppress(ModelRaised):
        subject = find_inputs(Variant(subject, copy))
    unanswered: list[Case] = []
    # by kind of exception: the first exception, and the cases that raise it
    refused: dict[str, tuple[ModelRaised, list[str]]] = {}
    for case in to_be_tried(subject.caller):
        if case in unanswered:
            continue
        if case is LOSSES and TRAIN_TARGETS not in unanswered:
            # with targets it returns scores, which show more than losses
            unanswered.append(case)
            continue
        # two rows: with one, a mask of a wrong shape would fit as well
        rows = 1 if case.visible is None else subject.fit_rows(2)
        try:
            _require_answer(subject, copy, case, subject.draw(rows, 5))
        except ModelRaised as error:
            unanswered.append(case)
            if case in MASKED:
                unanswered += refused_with(case)
                words = sentence(error.__cause__ or error)
                refused.setdefault(words, (error, []))[1].append(case.how)
            elif case.given is not None and not case.of_several:
                subject = subject.noted(f"not tried: {error}")
    for first, cases in refused.values():
        subject = subject.noted(f"not tried {' and '.join(cases)}: {first}")
    return replace(subject, unanswered=tuple(unanswered))


def _require_answer(
    subject: Subject, copy: Copy, case: Case, tokens: Int[Tensor, "batch time"]
) -> None:
    """Call a model; if it raises, call a fresh copy as well.

    The first copy may have raised only because of state from earlier calls.
    """
    try:
        Variant(subject, copy, case).scores(tokens)
    except ModelRaised:
        if subject.heavy:
            raise
        own(subject).run_as(case).scores(tokens)


# --- Scores ------------------------------------------------------------------

Size = tuple[int, int]  # of batch and time
OTHER_KIND = TypeError, AttributeError  # usual where tensors do not fit


def probe(
    subject: Subject, copy: Copy, at: Size | None = None
) -> tuple[Subject, Size]:
    """Find how to call a model and read its answer; if impossible, say why.

    The size `at` is tried first, then other sizes, then single texts of shape
    (time,). Targets are added if the model scores fewer positions without
    them.

    Returns:
        The subject, with a caller and either a reader or a fault; and a size
        that the model answered.

    Raises:
        ModelRaised: if the model answers at no size.
    """
    vocab = subject.vocab_size
    unread: list[tuple[Caller, Size, Any]] = []
    raised: list[tuple[ModelRaised, Caller]] = []
    ways = (True,) if subject.caller.alone else (False, True)
    for alone, sizes in product(ways, _sizes(vocab, subject.block_size, at)):
        if alone and (unread or max(rows for rows, _ in sizes) > 1):
            continue
        given = replace(subject.caller, alone=alone)
        for caller in _callers(given, copy.model):
            called = replace(subject, caller=caller)
            try:
                answers = [_call(called, copy, size, vocab) for size in sizes]
            except ModelRaised as error:
                raised.append((error, caller))
                continue
            padded = declared(copy.model, VOCABULARY) is not None
            pairs = [*zip(answers, sizes, strict=True)]
            reader = _find_reader(pairs, vocab, padded, caller.time_first)
            if reader is not None:
                found = replace(called, reader=reader)
                if alone and raised:
                    found = replace(found, rows=1).noted(
                        f"texts go through one by one, as ids (time,): "
                        f"{raised[0][0]}"
                    )
                found = _with_arrays(found, answers[-1])
                if sizes[-1] == at:
                    scores = found.read(answers[-1], *at)
                    found = _without_hidden(found, scores)
                return found, sizes[-1]
            unread.append((caller, sizes[-1], answers[-1]))
    if unread:
        caller, size, answer = unread[0]
        fault = _unreadable(answer, size, vocab)
        return replace(subject, caller=caller, fault=fault), size
    if not subject.is_module:  # exceptions of OTHER_KIND come last
        raised.sort(key=lambda r: isinstance(r[0].__cause__, OTHER_KIND))
    first, caller = raised[0]
    subject = replace(subject, caller=caller)
    return replace(subject, fault=_refused(subject, copy, first)), (1, 1)


def _with_arrays(subject: Subject, answer: Any) -> Subject:
    """Record whether the scores in an answer are an array, not a tensor."""
    caller = subject.caller
    if caller.arrays or is_array(reach(answer, subject.reader.path)):
        why = caller.no_gradients or IN_ARRAYS
        return replace(subject, in_arrays=True).noted(why)
    return subject


def _unreadable(answer: Any, size: Size, vocab: int) -> str:
    """Return the message for an answer in which no scores are found."""
    fault = (
        f"the scores for tokens of shape {size} should have shape "
        f"{(*size, vocab)} (batch, time, vocab), got {describe(answer)}"
    )
    if isinstance(answer, Tensor) and answer.numel() == 1:
        fault += (
            f", a loss: give the model a method {SCORERS[0]}(tokens) that "
            f"returns the scores"
        )
    return fault


def _refused(subject: Subject, copy: Copy, first: ModelRaised) -> str:
    """Return the message for a model that answers id 0, but no drawn ids.

    Raises:
        ModelRaised: the first exception, if the model does not answer id 0.
    """
    vocab = subject.vocab_size
    try:
        _call(subject, copy, (1, 1), 1)  # one row with one token, id 0
    except ModelRaised:
        raise first from first.__cause__
    try:
        for rows, time in probe_sizes(vocab, subject.block_size):
            size = 1 if subject.caller.alone else rows, time
            _call(subject, copy, size, 1)
    except ModelRaised as error:  # more tokens, all of id 0, are refused
        return f"one token is answered, but {error}"
    return f"of {vocab} ids some are refused: {first}"


def _call(subject: Subject, copy: Copy, size: Size, top: int) -> Any:
    """Call a model in eval mode on random ids below top, including top - 1."""
    tokens = torch.randint(top, size, generator=subject.generator())
    tokens[-1, -1] = top - 1
    variant = Variant(subject, copy)
    with suppress(ModelRaised):  # state left by an earlier call may raise
        return variant.answer(tokens, seed=subject.seed)
    stateful = replace(variant, subject=replace(subject, keeps_state=True))
    return stateful.answer(tokens, seed=subject.seed)


def _callers(caller: Caller, model: Any) -> Iterator[Caller]:
    """Yield ways to call a model: as given, then with targets of zeros.

    A function that refuses tensors may take arrays. If a module returns only a
    loss, its scores come from another method, or are the tensors that the
    module compares with the targets.
    """
    kinds = [caller]
    if not isinstance(model, nn.Module):
        kinds.append(replace(caller, arrays=True))
    yield from kinds
    if caller.method is not None:
        return
    names = [caller.target_name, *caller.optional]
    for name in dict.fromkeys(n for n in names if n is not None):
        if name not in caller.given:
            given = caller.given | {name: no_targets}
            for kind in kinds:
                yield replace(kind, given=given, target_name=name)
    if isinstance(model, nn.Module) and caller.target_name is not None:
        for name in SCORERS:
            if inspect.ismethod(getattr(model, name, None)):
                scorer = caller_of(
                    model, name, caller.time_first, caller.theirs
                )
                yield replace(scorer, alone=caller.alone)
        given = caller.given | {caller.target_name: no_targets}
        for shifts in (False, True):
            yield replace(caller, given=given, compared=True, shifts=shifts)


def _sizes(vocab: int, block: int, at: Size | None) -> Iterator[list[Size]]:
    """Yield sizes of calls whose answers show where the scores are.

    The size `at` comes first, by itself, if the axes of its scores differ in
    length.
    """
    if at is not None and len({*at, vocab}) == 3 and at[1] <= block:
        yield [at]
    pair = probe_sizes(vocab, block)
    yield pair
    yield [(1, time) for _, time in pair]
    for step in (8, 32, 64, 256, block):
        if step <= block:
            last = min(2 * step, block - block % step)
            yield [(3, step), (2, last)]
            yield [(1, step), (1, last)]


def probe_sizes(vocab: int, block: int) -> list[Size]:
    """Return two sizes (batch, time), if possible without equal axes."""

    def shared(size: Size) -> int:
        numbers = [*size, vocab, size[0] * size[1], 1]
        return len(numbers) - len(set(numbers))

    sizes = [(b, t) for t in range(min(7, block), 0, -1) for b in (3, 2, 5)]
    sizes.sort(key=shared)  # stable: of equal keys, the longest stays first
    first = sizes[0]
    others = [s for s in sizes if s[0] != first[0] and s[1] != first[1]]
    return [first, (others or sizes[1:])[0]]


def _find_reader(
    answers: list[tuple[Any, Size]], vocab: int, padded: bool, time_first: bool
) -> Reader | None:
    """Return a reader of scores that are at the same place in all answers."""
    if time_first:
        answers = [(answer, size[::-1]) for answer, size in answers]
    last, size = answers[-1]
    wider = [
        tensor.size(2)
        for _, tensor in tensors_in(last)
        if padded and tensor.ndim == 3 and tensor.shape[:2] == size
    ]
    for width in (vocab, *wider[:1]):
        places = [
            find_scores(answer, *size, width) for answer, size in answers
        ]
        both = [place for place in places[0] if place in places[-1]]
        if both and width >= vocab:
            path, form = both[0]
            alike = sum(other == form for _, other in both)
            return Reader(path, form, width, vocab, alike, time_first)
    return None


# --- Lengths and rows --------------------------------------------------------

# a model that accepts these and the longest length counts as accepting all
PROBED_TOKENS = (1, 2, 3, 7)
MANY_ROWS = 64  # rows to try: nearly as many as the checks give at once


def find_lengths(
    accepts: Callable[[int], bool], longest: int, known: int
) -> Lengths:
    """Try a few lengths, and return which lengths a model accepts.

    `known` is a length that is accepted; no length above `longest` is tried.
    """
    accepts = cache(accepts)
    if all(accepts(t) for t in (*PROBED_TOKENS, longest) if t <= longest):
        return Lengths(1, 1, longest)
    powers = [1 << k for k in range(5, longest.bit_length())]
    for some in (range(1, min(SHORT, longest) + 1), powers, [known]):
        taken = [t for t in some if accepts(t)]
        if taken:
            break
    step = min((b - a for a, b in pairwise(taken)), default=taken[0])
    least = low = taken[-1] - taken[-1] % step
    while least > step and accepts(least - step):
        least -= step
    end = longest - longest % step
    if accepts(end):
        return Lengths(least, step, end)
    longer = range(low + step, end, step)
    count = bisect(longer, False, key=lambda t: not accepts(t))
    return Lengths(least, step, low + count * step)


def find_refusals(variant: Variant, batch: int, time: int) -> Subject:
    """Find the lengths and numbers of rows that a model refuses."""
    subject = variant.subject
    refused: dict[tuple[int, int], ModelRaised] = {}

    def answers(rows: int, length: int) -> bool:
        ids = draw(subject.vocab_size, rows, length, subject.generator())
        try:
            variant.scores(ids)
        except ModelRaised as error:
            refused[rows, length] = error
        return (rows, length) not in refused

    rows, longest = 1 if answers(1, time) else batch, subject.block_size
    refused.clear()
    lengths = find_lengths(lambda length: answers(rows, length), longest, time)
    refusals = []
    fewer = longest - before_first_position(variant.model, longest)
    if refused and lengths != Lengths(1, 1, fewer):
        refusals.append((refused[min(refused)], f"{lengths} are answered"))
    subject = replace(
        subject,
        lengths=lengths,
        block_size=lengths.longest,
        refusals=tuple(refusals),
    )
    if subject.caller.alone:
        return subject
    refused.clear()
    length = lengths.fit(7)
    if answers(MANY_ROWS, length):
        return subject
    more = range(batch + 1, MANY_ROWS)
    count = batch + bisect(more, False, key=lambda n: not answers(n, length))
    said = declared(variant.model, ROWS)
    if said is not None and said.value == count:
        note = f"at most {count} rows at once: {said}"
        return replace(subject, rows=count).noted(note)
    refusals.append((refused[min(refused)], f"{count} rows are answered"))
    return replace(subject, rows=count, refusals=tuple(refusals))


# --- Repeated calls ----------------------------------------------------------

NEVER = -9e3  # an id whose scores are all below this has probability 0


def find_state(variant: Variant, batch: int, time: int) -> Subject:
    """Find out whether a call changes later calls, and can be undone."""
    subject = variant.subject
    tokens, between = subject.draw(2 * batch, time).split(batch)

    def differs(variant: Variant) -> bool:
        try:
            variant.scores(between)
            scores = variant.scores(tokens, seed=subject.seed)
        except ModelRaised:
            return True
        return not torch.allclose(scores, first, 0, noise, True)

    stateful = replace(subject, keeps_state=True)
    undone = replace(variant, subject=stateful)
    undone.start_again()
    first = variant.scores(tokens, seed=subject.seed)
    largest = float(first.abs().nan_to_num_(posinf=0.0).max())
    noise = FLOOR_UNITS * torch.finfo(first.dtype).eps * largest
    if not differs(variant):
        return subject
    if differs(undone):
        why = "the state that a call leaves cannot be undone"
        return replace(stateful, lost_state=f"{why}: see check_determinism")
    with operations_through(RecordedDraws()) as draws:
        undone.scores(tokens)
    stateful = stateful.noted(_words(variant, tokens))
    # if random numbers were drawn, the model has its own generator
    return replace(stateful, noisy=bool(draws.drawn))


def _words(variant: Variant, tokens: Tensor) -> str:
    """Return a note that names the state that a call changes."""
    before = values_of(variant.model)
    with suppress(ModelRaised):
        variant.scores(tokens)
    names = changed(before, values_of(variant.model))
    names = names if variant.subject.is_module else []
    buffers = dict(variant.model.named_buffers()) if names else {}
    name = min(names, key=lambda name: name not in buffers, default="")
    name = f" ({name})" if name else ""
    return (
        f"a call changes the scores of the next one{name}, which "
        "check_determinism reports: all other checks start each call from "
        "the state that the model was built in"
    )


def _without_hidden(subject: Subject, scores: Tensor) -> Subject:
    """Record the ids whose scores are minus infinity at every position."""
    hidden = (scores < NEVER).flatten(0, 1).all(0)
    if not hidden.any() or hidden.all():
        return subject
    ids = tuple(hidden.nonzero().flatten().tolist())
    return replace(subject, hidden=ids).noted(
        f"the scores of {len(ids)} ids are minus infinity, or as good as, "
        f"at every position ({ids[0]} is the first): they are left out"
    )


def find_noise(variant: Variant, batch: int, time: int) -> Subject:
    """Find ids without a score, and whether scores are random in eval mode."""
    subject = variant.subject
    tokens = subject.draw(batch, 7)
    first, again = (variant.scores(tokens, seed=1) for _ in "ab")
    other = variant.scores(tokens, seed=2)
    subject = _without_hidden(subject, first)
    if not first.equal(again) or first.equal(other):
        return subject
    before = random_states()
    with operations_through(RecordedDraws()) as draws:
        variant.scores(tokens)
    if not draws.drawn and random_states() == before:
        words = _words(variant, tokens)
        return replace(subject, keeps_state=True).noted(words)
    return replace(subject, noisy=True).noted(
        "random numbers are drawn in eval mode, which check_determinism "
        "reports: all other checks run the model from a fixed random state"
    )


# --- Arguments ---------------------------------------------------------------

# The model gets the first form of an argument that it accepts. If a mask's
# name does not show which value hides a token, a mask that hides nothing is
# tried. In its right form, this mask changes no score.


def find_inputs(variant: Variant) -> Subject:
    """Find a form of each argument that the model accepts; list the others."""
    subject, caller = variant.subject, variant.subject.caller
    with_own = bool(caller.own_arguments) and _scores(variant, OWN) is not None
    names = [*caller.arguments, *(caller.own_arguments if with_own else ())]
    found, never = list[Input](), list[str]()
    closed = {*caller.given, *caller.never, *[MASK] * caller.takes_mask}
    for forms in filter(any, caller.forms):
        first = forms[0][0]
        four_axes, name = first.kind == FOUR_AXES, first.name
        if first.own > with_own or four_axes > caller.takes_mask:
            continue
        for alike in forms:
            answered, errors = _answered(variant, alike)
            if answered:
                break
        found += answered
        if four_axes or not errors:
            continue
        cause = errors[0].__cause__
        if isinstance(cause, REFUSALS) and name in sentence(cause):
            closed |= {name, ENCODED_MASK if name == ENCODED else name}
            words = type(cause).__name__
            subject = subject.noted(f"the model refuses {name} ({words})")
        elif ANSWER.fullmatch(name) or OF_ANSWERS.match(name):
            closed |= {name}  # with this argument the model returns no scores
        else:
            subject = subject.noted(f"not tried: {errors[0]}")
            if first.kind in (FLAGS, KEEPS) and answered:
                never += [e.words for e in alike if e not in answered]
    said, tokens = subject.documents, subject.draw(subject.fit_rows(2), 5)
    closed |= {name for each in found for name in each.make(tokens)}
    if callable(said) or (isinstance(said, str) and said not in closed):
        met = replace(subject, caller=replace(caller, inputs=tuple(found)))
        declared = packings(met)[0]
        answered, _ = _answered(variant, [declared])
        found += answered
        closed |= {*declared.make(tokens)} if answered else set()
    never += [n for n in names if n not in closed and not passed_over(n)]
    called = getattr(variant.model, caller.method or "", variant.model)
    for function in (called, variant.model)[: 1 + with_own]:
        never += [n for n in read_otherwise(function) if n not in never]
    masked = caller.takes_mask
    found += together(found, masked)
    if caller.target_name is not None:
        found += with_targets(found, masked)
    return replace(
        subject,
        caller=replace(caller, inputs=tuple(found)),
        never_given=tuple(never),
        without=tuple(n for n in names if n not in {*closed, *never}),
        instead=tuple(n for n in names if INSTEAD.fullmatch(n)),
    )


def _answered(
    variant: Variant, alike: list[Input]
) -> tuple[list[Input], list[ModelRaised]]:
    """Return the inputs that the model accepts, and the others' exceptions."""
    answered, errors = list[Input](), list[ModelRaised]()
    for each in alike:
        try:
            scores = _scores(variant, Case("with ").with_input(each))
        except ModelRaised as error:
            errors.append(error)
            continue
        if each.kind in (PADDING, FOUR_AXES) and not answered:
            plain = _scores(variant, OWN if each.own else EVAL)
            apart = (scores - plain).abs().max()  # NaN fails the comparison
            if not bool(apart <= SPREAD_OF_AN_IDLE_MASK * plain.std()):
                break
        answered.append(each)
    return answered, errors


def _scores(variant: Variant, case: Case) -> Tensor:
    subject = variant.subject
    time = subject.lengths.fit(5)
    tokens = subject.draw(subject.fit_rows(2 if time != 2 else 3), time)
    return variant.run_as(case).scores(tokens, seed=subject.seed)
