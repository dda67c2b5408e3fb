"""Dtypes, devices, and the ends of lengths and vocabularies."""

import re

import torch
from torch import nn

from ..errors import ModelRaised, SkipCheck, sentence
from ..model.subject import Model, Subject
from ..model.tokens import draw

# An operation that lacks a dtype altogether; mixed dtypes read otherwise.
NO_KERNEL = re.compile(
    r"not implemented for '|to be Float32, BFloat16 or Float16|"
    r"MPS framework doesn't support float64"
)
ALL_IDS = 1 << 36  # parameters times ids: up to here every id is tried


def check_dtype(subject: Subject) -> str:
    """.double() and .bfloat16() work, and .to(device) moves everything.

    Why: a tensor that is no buffer stays behind, in another dtype or on
    another device; and a model that answers in less than it was asked for
    hides its own rounding.
    How: a forward in each dtype; one on the given device, else on "meta",
    where a forward that must read values cannot be judged.
    Cost: three builds and forwards.
    Reports: masks and positions made with torch.arange(T), without the
    device ("Let's build GPT", cell 82).
    """
    if not isinstance(subject.build(), nn.Module):
        raise SkipCheck("a function has no dtype to change")
    if not subject.can_copy:
        raise SkipCheck("the model cannot be copied")
    generator = torch.Generator().manual_seed(subject.seed)
    time = min(5, subject.block_size)
    tokens = draw(subject.vocab_size, 2, time, generator)
    answers = {
        dtype: _answer_in(subject, dtype, tokens)
        for dtype in (torch.float64, torch.bfloat16)
    }
    fixed = answers[torch.bfloat16]
    notes = []
    for dtype, answer in answers.items():
        if answer is None:
            notes.append(f"no kernel for {_short(dtype)}")
        elif answer == dtype:
            notes.append(_short(dtype))
        elif _bits(answer) < min(_bits(dtype), 32) or (
            answer != fixed and _bits(answer) < _bits(dtype)
        ):
            raise AssertionError(
                f"a model in {_short(dtype)} answers in {_short(answer)}"
            )
        else:
            # always float32: a decision, as in many models' heads
            notes.append(f"{_short(dtype)} answers in {_short(answer)}")
    notes.append(_check_device(subject, tokens))
    return ", ".join(notes)


def _answer_in(
    subject: Subject, dtype: torch.dtype, tokens: torch.Tensor
) -> torch.dtype | None:
    """Return the dtype of the scores of a model in a dtype.

    None where PyTorch has no kernel for it, which is not the model's fault.
    """
    model = subject.build()
    assert isinstance(model, nn.Module)
    try:
        scores = subject.scores(model.to(dtype), tokens.to(subject.device))
    except (ModelRaised, TypeError) as error:
        if NO_KERNEL.search(str(error)):
            return None
        raise AssertionError(
            f"in {_short(dtype)} {error}"
        ) from error.__cause__
    if not bool(torch.isfinite(scores).all()):
        raise AssertionError(f"in {_short(dtype)} scores are NaN or infinite")
    return scores.dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _check_device(subject: Subject, tokens: torch.Tensor) -> str:
    model = subject.build()
    assert isinstance(model, nn.Module)
    if subject.device is not None and subject.device.type != "cpu":
        scores = subject.scores(model, tokens.to(subject.device))
        if scores.device.type != subject.device.type:
            raise AssertionError(
                f"on {subject.device} the answer is on {scores.device}"
            )
        return str(scores.device)
    model = model.to("meta").eval()
    meta = tokens.to("meta")
    try:
        with torch.no_grad():
            answer = subject.call(model, meta, **subject.fixed_arguments(meta))
        scores = subject.read(answer, meta)
    except Exception as error:
        text = str(error)
        if "meta" in text and "cpu" in text and "device" in text:
            raise AssertionError(
                f"not everything moves with .to(device): {sentence(error)}"
            ) from error
        return "meta not judged (the forward reads values)"
    if scores.device.type != "meta":
        raise AssertionError(
            f"moved to another device, the model answers on {scores.device}"
        )
    return "meta"


def _on_cpu(subject: Subject) -> Model:
    """Return the model on the CPU, where a wrong index is an exception.

    On CUDA it would end the process.
    """
    model = subject.build()
    if isinstance(model, nn.Module):
        return model.cpu()
    if subject.device is not None and subject.device.type != "cpu":
        raise SkipCheck(f"a function on {subject.device} cannot be moved")
    return model


def check_length_limit(subject: Subject) -> str:
    """A model that declares a limit refuses one token more.

    Why: positions that wrap around, or a mask that no longer reaches, give
    an answer that looks like any other.
    How: the limit itself must work, and one token and seven more must
    raise. On the CPU.
    Cost: three forwards of that length.
    Reports: "GPT from Scratch" under python -O: a length beyond the mask is
    accepted, and not causal.
    """
    if subject.limit is None:
        raise SkipCheck(subject.no_limit)
    limit = subject.limit.value
    if limit > subject.block_size and limit > 4096:
        raise SkipCheck(f"{subject.limit} is too long to try")
    generator = torch.Generator().manual_seed(subject.seed)
    with subject.on("cpu"):
        model = _on_cpu(subject)
        for time in (limit, limit + 1, limit + 7):
            tokens = draw(subject.vocab_size, 1, time, generator)
            try:
                subject.scores(model, tokens)
            except ModelRaised as error:
                if time == limit:
                    raise AssertionError(
                        f"the model declares {subject.limit}, but {error}"
                    ) from error.__cause__
                if error.__cause__ is None:
                    raise
                reason = sentence(error.__cause__)
            else:
                if time > limit:
                    raise AssertionError(
                        f"the model declares {subject.limit} and answers "
                        f"{time} tokens without an error"
                    )
    return f"{limit + 1} tokens: {reason[:80]}"


def check_vocabulary(subject: Subject) -> str:
    """Every id in [0, vocab) works, and an id outside raises.

    Why: an id that wraps around or is clamped is another token's text.
    How: all ids go through, or of a large model both ends, powers of two
    and some drawn ones; then vocab, vocab + 100 and -1, first and last in
    the sequence. On the CPU.
    Cost: vocab tokens, of a large model some 600.
    Reports: karpathy/nanoGPT pads its vocabulary to 50304, and samples ids
    that no tokenizer knows.
    """
    vocab = subject.vocab_size
    generator = torch.Generator().manual_seed(subject.seed)
    with subject.on("cpu"):
        model = _on_cpu(subject)
        ids = torch.arange(vocab)
        weights = (
            sum(p.numel() for p in model.parameters())
            if isinstance(model, nn.Module)
            else 0
        )
        if weights * vocab > ALL_IDS or vocab > 1 << 14:
            edges = [1 << k for k in range(vocab.bit_length() - 1)]
            drawn = torch.randint(vocab, (512,), generator=generator)
            near = {e + d for e in edges for d in (-1, 0)} | {vocab - 1}
            ids = torch.tensor(sorted(near | set(drawn.tolist())))
        time = min(subject.block_size, 64)
        filled = torch.cat([ids, ids[: -len(ids) % time]])
        if len(filled) % time:
            filled = ids.repeat(time)[: time * -(-len(ids) // time)]
        rows = filled.view(-1, time)
        at_once = max(1, (1 << 24) // (time * vocab))
        for first in range(0, len(rows), at_once):
            scores = subject.scores(model, rows[first : first + at_once])
            bad = ~torch.isfinite(scores).all(-1)
            if bad.any():
                where = rows[first : first + at_once][bad][0]
                raise AssertionError(
                    f"id {int(where)} gives scores that are NaN or infinite"
                )
        short = min(3, subject.block_size)
        for outside in (vocab, vocab + 100, -1):
            for position in sorted({0, short - 1}):
                tokens = draw(vocab, 2, short, generator)
                tokens[1, position] = outside
                try:
                    subject.scores(model, tokens)
                except ModelRaised as error:
                    if error.__cause__ is None:
                        raise
                    continue
                raise AssertionError(
                    f"id {outside} at position {position} is answered "
                    f"without an error; the vocabulary has {vocab} ids"
                )
    return f"{len(ids)} of {vocab} ids"
