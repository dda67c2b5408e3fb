"""A text beyond the last position is refused."""

from ...running.errors import SkipCheck, sentence
from ...running.model.sizes import before_first_position, has_position_table
from ...running.program import Program
from ...running.tokens import draw
from ..check import Subject, check
from ..refusals import on_cpu, refusal


@check()
def check_length_limit(subject: Subject) -> str:
    """A model with a last position refuses a text that is one token longer.

    Why: if positions wrap around, or a mask is too short, the answer looks
    like any other.
    How: on the CPU, a text of the declared length must work, and texts with
    one or seven more tokens must raise. A model with neither a position table
    nor the method log_probs is allowed to answer. The report says so.
    If it fails: raise a ValueError that names both lengths; do not cut, clamp
    or wrap around. Without a table of positions the report states which longer
    texts the model answers.
    Reports: "GPT from Scratch" under python -O, not causal past its mask.
    """
    if subject.limit is None:
        raise SkipCheck("no limit declared")
    limit = subject.limit.value
    if limit > max(subject.block_size, 4096):
        raise SkipCheck(f"{subject.limit} is too long to try")
    offset = ""
    variant = on_cpu(subject)
    fewer = before_first_position(variant.model, limit)
    if fewer and subject.block_size == limit - fewer:
        offset = f"{limit} tokens are declared, {limit - fewer} are taken: "
        offset += "positions start after the padding id; "
        limit -= fewer
    tokens = draw(subject.vocab_size, 1, limit + 7, subject.generator())
    if error := refusal(variant, tokens[:, :limit]):
        raise AssertionError(
            f"the model declares {subject.limit}, but {error}"
        ) from error.__cause__
    reasons = []
    for time in (limit + 1, limit + 7):
        if error := refusal(variant, tokens[:, :time]):
            reasons.append(sentence(error.__cause__ or error))
            continue
        words = (
            f"the model declares {subject.limit} and answers {time} tokens "
            f"without an error"
        )
        if subject.caller.log_probs or has_position_table(
            variant.model, subject.limit.value, subject.vocab_size
        ):
            raise AssertionError(words)
        if isinstance(variant.model, Program):
            if variant.model.block_size:
                raise AssertionError(words)
            return f"{time} tokens are answered without an error"
        return f"{words}: it has no table of as many positions"
    return f"{offset}{limit + 1} tokens: {reasons[0][:80]}"
