"""Meets a model: writes the Subject that all checks read."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import nn

from ..cases import LOSSES, MASKED, TRAIN_TARGETS, Case, to_be_tried
from ..context import isolated, modes_kept, one_run
from ..errors import FoundOut, ModelRaised, UnusableModel, during, sentence
from ..model.building import Builder, KeptState, called_modules, name_of
from ..model.calling import (
    LAYOUTS,
    LOG_PROBS,
    caller_of,
    shared_default,
)
from ..model.reading import BATCH_FIRST, SCORES
from ..model.sizes import LENGTH, Lengths, choose_sizes, declared
from ..operations import quantised
from ..ranks import on_any
from ..subject import Subject
from ..variant import Copy, Variant
from .inputs import find_inputs
from .probing import (
    find_noise,
    find_refusals,
    find_state,
    probe,
    require_batch_first,
)

# No fault of a model: its device or a quantised kernel lacks it.
ON_SOME_RANKS = (
    "the scores have a gradient on some ranks alone, as where stages run a "
    "backward pass by a schedule"
)
NO_BACKWARD = re.compile("not support backward|derivative .*not implemented")
OUTPUTS = ("auto", "logits", "log_probs")


class Settings(TypedDict, total=False):
    """Settings of a model that a user may pass to check_model and meet."""

    vocab_size: int | None
    block_size: int | None
    outputs: str
    seed: int
    device: torch.device | str | None
    layout: str
    cache: Callable[..., Any] | None
    inputs: Mapping[str, Callable[..., Any] | str] | None
    documents: str | int | Callable[..., Any] | None
    compile: bool


@one_run
def meet(
    model_or_factory: Any,
    *,
    vocab_size: int | None = None,
    block_size: int | None = None,
    outputs: str = "auto",
    seed: int = 0,
    device: torch.device | str | None = None,
    layout: str = "bt",
    cache: Callable[..., Any] | None = None,
    inputs: Mapping[str, Callable[..., Any] | str] | None = None,
    documents: str | int | Callable[..., Any] | None = None,
    compile: bool = False,
    at: tuple[int, int] | None = None,
) -> Subject:
    """Return the facts of a model, found out by calling it.

    Args: as for `check_model`; `at` are the rows and the length of the only
        calls that will be made: where one such call shows how the scores are
        read, nothing else is found out.

    Raises:
        UnusableModel: a ValueError, in one line, for a model that cannot be
            built, called or read; the user's own exception is its cause.
        ValueError: for settings that are none.
    """
    for name, value, known in (
        ("outputs", outputs, OUTPUTS),
        ("layout", layout, LAYOUTS),
    ):
        if value not in known:
            words = f"{name} must be one of {', '.join(known)}"
            raise ValueError(f"{words}, got {value!r}")
    builder = Builder(model_or_factory, seed, device)
    model = builder.build()
    parameters = 0
    if isinstance(model, nn.Module):
        parameters = sum(p.numel() for p in model.parameters())
    name = name_of(model_or_factory) or name_of(model) or "model"
    vocab, block, notes = choose_sizes(model, name, vocab_size, block_size)
    subject = Subject(
        name=name,
        builder=builder,
        seed=seed,
        vocab_size=vocab,
        block_size=block,
        limit=declared(model, LENGTH),  # block_size may be less
        parameters=parameters,
        is_module=isinstance(model, nn.Module),
        caller=caller_of(
            model,
            None if outputs == "logits" else LOG_PROBS,
            layout == "tb",
            inputs,
        ),
        lengths=Lengths(1, 1, block),
        make_cache=cache,
        documents=documents,
        compile=compile,
        notes=tuple(notes),
    )
    call = subject.caller
    taken = *call.given, *call.arguments, *call.own_arguments
    if isinstance(documents, str) and documents not in taken:
        raise ValueError(
            f"documents name {documents}, which the call does not take: it "
            f"takes {', '.join(taken) or 'tokens alone'}"
        )
    if isinstance(documents, int) and not 0 <= documents < vocab:
        raise ValueError(
            f"id {documents} separates documents, and is outside the "
            f"vocabulary of {vocab}"
        )
    if subject.heavy:
        model = builder.keep(model)
    with isolated(seed), subject.few_threads(), modes_kept([model]):
        return _find_out(subject, Copy(model), outputs, at)


def _find_out(
    subject: Subject, copy: Copy, outputs: str, at: tuple[int, int] | None
) -> Subject:
    """Return the subject as its answers show it."""
    model, own = copy.model, subject.caller
    if isinstance(model, nn.Module):
        copy.built = KeptState(model)
    with called_modules() as called:
        try:
            subject, size = probe(subject, copy, at)
        except ModelRaised as error:
            shared = shared_default(model)
            words = f"{shared}; {error}" if shared else str(error)
            raise UnusableModel(f"{subject.name}: {words}") from (
                error.__cause__
            )
    subject.builder.require_own_modules(model, called)
    subject = subject.noted(
        *(
            f"without {name} the model answers for fewer positions: it is "
            f"called with {name}, all 0"
            for name in subject.caller.given.keys() - own.given.keys()
            if not subject.caller.compared
        ),
    )
    if subject.fault:
        return subject
    if subject.caller.method != own.method:
        subject = subject.noted(
            f"the model's own call returns no scores: {subject.caller.method} "
            f"is called for them"
        )
    if subject.caller.compared:
        subject = subject.noted(
            "the model returns a loss alone: the scores are what it compares "
            "with its targets"
        )
    if subject.caller.shifts:
        limit = subject.limit
        subject = replace(
            subject.noted(
                "its loss leaves out the last position: each text is called "
                "with a token more"
            ),
            block_size=subject.block_size - 1,
            limit=limit and replace(limit, value=limit.value - 1),
        )
    reader = subject.reader
    says_so = (
        outputs == "log_probs"
        or subject.caller.log_probs
        or (outputs == "auto" and "log_probs" in reader.path)
    )
    subject = replace(subject, says_log_probs=says_so)
    if reader.form != BATCH_FIRST:
        subject = subject.noted(f"the scores are read as {reader.form}")
    if reader.alike > 1 and not set(SCORES) & {*reader.path}:
        subject = subject.noted(
            f"the model answers with {reader.alike} tensors of scores: the "
            f"first is checked",
        )
    if size == at and (subject.builder.can_copy or not subject.is_module):
        return subject
    with suppress(ModelRaised):  # a check will meet the exception, too
        subject = _find_gradients(subject, copy, size)
        for find in (find_state, require_batch_first, find_refusals):
            subject = find(subject, _calling(subject, copy), *size)
        subject = find_noise(subject, _calling(subject, copy), size[0])
    return _find_cases(subject, copy)


def _find_gradients(
    subject: Subject, copy: Copy, size: tuple[int, int]
) -> Subject:
    """Find out whether this device records gradients of the model at all."""
    try:
        scores = _calling(subject, copy).scores(subject.draw(*size), grad=True)
        if quantised(copy.model) and scores.requires_grad:
            with during("in the backward pass"):
                scores.sum().backward()
            copy.model.zero_grad()
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
        _calling(replace(subject, caller=caller), copy).scores(
            subject.draw(*size)
        )
        return replace(subject, caller=caller).noted(
            f"{why}: all calls are made without"
        )
    return subject


def _find_cases(subject: Subject, copy: Copy) -> Subject:
    """Find the cases to call a model in which no scores come back."""
    with suppress(ModelRaised):  # of the call without arguments
        subject = find_inputs(subject, _calling(subject, copy))
    unanswered: list[Case] = []
    for case in to_be_tried(subject.caller):
        if case is LOSSES and TRAIN_TARGETS not in unanswered:
            unanswered.append(case)  # its scores say more
            continue
        # one row would fit the axes of other masks, too
        rows = 1 if case.visible is None else subject.fit_rows(2)
        try:
            _calling(subject, copy).run_as(case).scores(subject.draw(rows, 5))
        except ModelRaised as error:
            unanswered.append(case)
            if case.visible is not None:
                kind = case.boolean
                unanswered += [c for c in MASKED if c.boolean == kind]
            if case.given is not None or case.visible is not None:
                subject = subject.noted(f"not tried: {error}")
    return replace(subject, unanswered=tuple(unanswered))


def _calling(subject: Subject, copy: Copy) -> Variant:
    return Variant(subject, copy)


def learn(subject: Subject, found: FoundOut) -> Subject:
    """Return a subject with the facts that a check has found out."""
    return replace(subject, **found.facts)
