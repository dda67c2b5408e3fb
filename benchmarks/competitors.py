"""What is timed: both styles from one set of weights, and their peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.comparison.models import largest_difference
from shared.comparison.styles import enlarged_random_weights, rounding_bound
from shared.config import GPTConfig
from shared.protocol import load_style

from .limits import parameter_count
from .peers import PEERS, build_peer

STYLES = ("annotated", "mingpt_style")
OWN = "-own"  # after the name of a style with its school's own parts

Scores = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Competitor:
    """Something that scores the next token at every position.

    Attributes:
        name: in the table.
        model: what computes.
        scores: from (batch, time) ids to (batch, time, vocab) scores.
        gives: "logits" or "log-probs".
        note: what a reader of its row has to know.
        style: whether it is a style, not a peer.
        compiled: whether torch.compile made it.
    """

    name: str
    model: Any
    scores: Scores = field(repr=False)
    gives: str
    note: str = ""
    style: bool = True
    compiled: bool = False

    @property
    def parameters(self) -> int | None:
        """Number of parameters; None for a peer that is no module."""
        if not hasattr(self.model, "parameters"):
            return None
        return parameter_count(self.model)


def scores_of(output: Any) -> Any:
    """Return the scores in a model's answer: itself, .logits, or the first.

    transformers' outputs have `logits`; minGPT's are (logits, loss).
    """
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, tuple | list) else output


def build_styles(
    names: Sequence[str],
    config: GPTConfig,
    tokens: Tensor,
    dtype: torch.dtype,
    *,
    own: bool = False,
) -> tuple[list[Competitor], float]:
    """Build styles from one set of weights, and check that they agree.

    They are compared in float32, whatever they run in later: there a
    difference is a mistake, and not the rounding of a short format.

    Args:
        names: packages; the last one draws the weights.
        config: what to build.
        tokens: ids of all positions; the first row is compared.
        dtype: what they shall run in.
        own: add each style with its school's own parts, which no other
            agrees with to rounding.

    Returns:
        The styles, and the largest difference of their log-probabilities.

    Raises:
        ValueError: for two styles that differ by more than rounding.
    """
    state = enlarged_random_weights(load_style(names[-1]), config, seed=0)
    state = {k: v.to(tokens.device) for k, v in state.items()}
    built: list[tuple[str, Any, str]] = []
    for name in names:
        style = load_style(name)
        built.append((name, style.from_gpt2(state, config).eval(), ""))
    row, worst = tokens[:1], 0.0
    if len(built) > 1:
        bound = rounding_bound(built[-1][1], row)
        with torch.inference_mode():
            expected = built[-1][1].log_probs(row)
            for name, model, _ in built[:-1]:
                difference = largest_difference(model.log_probs(row), expected)
                if not difference <= bound:
                    raise ValueError(
                        f"the styles differ by {difference:.2g} (bound "
                        f"{bound:.2g}) in float32: {name} and {names[-1]}; "
                        "what computes something else is not timed"
                    )
                worst = max(worst, difference)
    for name in names if own else ():
        style = load_style(name)
        parts = getattr(style, "ORIGINAL_PARTS", None)
        if parts:
            model = style.from_gpt2(state, config, **parts).eval()
            words = ", ".join(part.__name__ for part in parts.values())
            built.append((name + OWN, model, f"with its school's {words}"))
    return [
        _native(Competitor(name, model.to(dtype), model.log_probs, "log-probs",
                           note), row)
        for name, model, note in built
    ], worst  # fmt: skip


def _native(style: Competitor, tokens: Tensor) -> Competitor:
    """Let a style answer as it does when called, if that scores all ids.

    Some schools' call gives logits, others' stops at hidden states.
    """
    model = style.model
    with torch.inference_mode():
        called = scores_of(model(tokens))
        expected = model.log_probs(tokens)
        same = called.shape == expected.shape and torch.allclose(
            called.log_softmax(-1).float(), expected.float(), atol=1e-3
        )
    if not same:
        return style

    return replace(style, scores=_called(model), gives="logits")


def _called(model: Any) -> Scores:
    """Return what a model answers when it is called, as scores alone."""

    def scores(tokens: Tensor) -> Tensor:
        return scores_of(model(tokens))

    return scores


def build_peers(
    names: Sequence[str],
    config: GPTConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    installed: bool = False,
) -> tuple[list[Competitor], list[str]]:
    """Build peers of a config's shape, ready to run.

    Args:
        names: of PEERS, or MODULE:FACTORY.
        config: the shape.
        dtype: what they run in.
        device: where.
        installed: leave out those of the box that are not installed.

    Returns:
        The peers, and a sentence for each that was left out.

    Raises:
        ValueError: for a peer that cannot be had.
    """
    peers, left_out = [], []
    for name in names:
        try:
            with torch.random.fork_rng(devices=[]), device:
                torch.manual_seed(0)
                model = build_peer(name, config)
        except ModuleNotFoundError as error:
            told = f"{name} was not run: there is no module {error.name!r}"
            if not installed or name not in PEERS:
                raise ValueError(told) from None
            left_out.append(told)
            continue
        if isinstance(model, torch.nn.Module):
            model = model.to(device, dtype).eval()
        if not callable(model):
            raise ValueError(
                f"{name} builds {type(model).__name__}, which cannot be called"
            )
        scores = _called(model)
        peers.append(Competitor(name, model, scores, "logits", style=False))
    return peers, left_out


def with_log_probs(competitor: Competitor) -> Competitor:
    """Return a competitor that ends in log-softmax, as all then do."""
    if competitor.gives == "log-probs":
        return competitor
    inner = competitor.scores

    def scores(tokens: Tensor) -> Tensor:
        return F.log_softmax(inner(tokens), dim=-1)

    return replace(competitor, scores=scores, gives="log-probs")


def compiled(competitor: Competitor) -> Competitor:
    """Return a competitor through torch.compile; a style in one graph.

    A break in a style's graph is an error; a peer may have some.
    """
    scores = torch.compile(
        competitor.scores, fullgraph=competitor.style, dynamic=False
    )
    return replace(
        competitor,
        name=f"{competitor.name} compiled",
        scores=scores,
        note="",
        compiled=True,
    )


def answer(
    competitor: Competitor, tokens: Tensor, *, grad: bool = False
) -> Any:
    """Run a competitor once.

    Args:
        competitor: what runs.
        tokens: (batch, time) ids.
        grad: run it as in training; what is compiled has a graph for each.

    Raises:
        ValueError: in one line, for one that cannot be run or compiled.
    """
    try:
        with torch.inference_mode(not grad):
            return competitor.scores(tokens)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{competitor.name} cannot be run: {told[:300]}"
        ) from None


def require_sound(
    competitor: Competitor, tokens: Tensor, vocab_size: int
) -> None:
    """Refuse what answers another shape, or looks into the future.

    A model without a causal mask is another model, and often a faster one.
    Half of the text is changed, where one token among many would be lost in
    the rounding of a short format, and the last token alone, for a model
    that looks ahead only within its last part.

    Raises:
        ValueError: naming the competitor, and both numbers.
    """
    name = competitor.name
    scores = answer(competitor, tokens)
    expected = (*tokens.shape, vocab_size)
    found = getattr(scores, "shape", None)
    if found is None or tuple(found) != expected:
        shown = type(scores).__name__ if found is None else tuple(found)
        raise ValueError(
            f"{name} answers {shown} where {expected} is asked for"
        )
    if scores.device.type == "meta" or tokens.size(1) < 2:
        return
    row = tokens[:1]  # one row leaks as all do, and is quick
    once, again = (answer(competitor, row) for _ in range(2))
    tolerance = _rounding(once, again)
    for first in sorted({row.size(1) // 2, row.size(1) - 1}):
        changed = row.clone()
        changed[:, first:] = (changed[:, first:] + 1) % vocab_size
        leak = _farthest(answer(competitor, changed), once, first)
        if not leak <= tolerance:
            raise ValueError(
                f"{name} sees the future: tokens from {first} on move earlier "
                f"scores by {leak:.2g} (rounding {tolerance:.2g}); it is not "
                "timed"
            )


def _farthest(a: Tensor, b: Tensor, time: int | None = None) -> float:
    """Return the largest difference of scores, of the first positions."""
    return (a.float() - b.float())[:, :time].abs().max().item()


def _rounding(once: Tensor, again: Tensor) -> float:
    """Return how far rounding may move the scores of the same tokens.

    Sums of the same numbers in the same shapes are rounded alike in any
    format, so that what float32 would allow is enough in all of them; where
    an accelerator's order of sums varies, what it varies is added, up to
    what the format explains.
    """
    spread = once.float().std().item()
    least, most = (
        16 * torch.finfo(dtype).eps * spread
        for dtype in (torch.float32, once.dtype)
    )
    return least + min(_farthest(again, once), most)


def require_as_eager(
    compiled: Competitor,
    eager: Competitor,
    tokens: Tensor,
    *,
    grad: bool = False,
) -> None:
    """Refuse a compiled competitor that computes something else.

    Args:
        compiled: made of the eager one.
        eager: with the same weights.
        tokens: (batch, time) ids.
        grad: compare what they compute in training.

    Raises:
        ValueError: with the difference and what rounding explains.
    """
    found, expected = (
        answer(c, tokens, grad=grad).detach() for c in (compiled, eager)
    )
    difference = (found - expected).abs().max().item()
    spread = expected.float().std().item()
    # the order of sums changes: some roundings, none of them systematic
    tolerance = 4 * torch.finfo(expected.dtype).eps ** 0.5 * spread
    if not difference <= tolerance:
        raise ValueError(
            f"{compiled.name} differs from its eager self by {difference:.2g} "
            f"(bound {tolerance:.2g}); it is not timed"
        )


def parameter_note(
    competitor: Competitor, config: GPTConfig, ours: int
) -> str:
    """Say why a competitor has not the parameters of ours to 1 %, if so."""
    count = competitor.parameters
    if count is None:
        return "parameters unknown"
    extra = count - ours
    if abs(extra) <= 0.01 * ours:
        return ""
    head = config.vocab_size * config.n_embd if config.tie_weights else 0
    table = config.block_size * config.n_embd
    reasons = {
        "its head is not tied to its embedding": head,
        "its position table is not trained": -table,
        "its head is not tied, its position table not trained": head - table,
    }
    # a bias at the head is too small to be named
    near = 0.002 * ours + config.vocab_size
    told = [why for why, n in reasons.items() if n and abs(extra - n) <= near]
    return f"{extra / ours:+.1%} parameters" + "".join(
        f": {why}" for why in told[:1]
    )
