"""Build the models to time: both styles from one set of weights, and peers."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_duet.agreement import (
    enlarged_random_weights,
    largest_difference,
    rounding_bound,
)
from gpt_duet.protocol import load_style
from gpt_duet.running.conventions import Text
from gpt_duet.running.decoding import Decoder
from gpt_duet.running.errors import OtherVocabulary, UnknownSize
from gpt_duet.running.meeting import meet
from gpt_duet.running.program import Program
from gpt_duet.targets import load_target
from gpt_duet.validation import dtype_name

from .candidates import Candidate
from .peers import PEERS, build_peer
from .plan import Plan, Tell, Tokens


def build_all(
    plan: Plan, tell: Tell
) -> tuple[Plan, list[Candidate], list[str]]:
    """Build a plan's styles and peers.

    Returns:
        The plan, with sizes from the peers added; the candidates to time; and
        sentences on the models that were left out.
    """
    tell("building")
    peers, left_out = build_peers(plan)
    plan = fit_to_peers(plan, peers)
    longest = Tokens(plan, 1, max(plan.times)).ids
    styles, notes = build_styles(plan, longest)
    return plan, styles + peers, notes + left_out


def build_styles(
    plan: Plan, tokens: Tensor
) -> tuple[list[Candidate], list[str]]:
    """Build a plan's styles from one set of weights, in each of its dtypes.

    The styles must agree on the first row of the tokens. They are compared in
    float32, where a difference is a mistake and not the rounding of a 16-bit
    dtype. The last style draws the weights.

    Returns:
        The candidates, and a sentence on how far the styles agree.
    """
    if not plan.styles:
        return [], []
    config, names, row = plan.config, plan.styles, tokens[:1]
    state = enlarged_random_weights(load_style(names[-1]), config, seed=0)
    state = {k: v.to(plan.device) for k, v in state.items()}
    built = [
        (name, load_style(name).from_gpt2(state, config).eval(), "")
        for name in names
    ]
    notes = []
    if len(built) > 1:
        difference = _difference(built, row)
        notes = [f"in float32 the styles agree to {difference:.1e}"]
    for name in names if plan.own else ():
        style = load_style(name)
        if parts := getattr(style, "ORIGINAL_PARTS", None):
            model = style.from_gpt2(state, config, **parts).eval()
            words = ", ".join(part.__name__ for part in parts.values())
            built.append((f"{name}-own", model, f"with its own {words}"))
    main, *more = plan.dtypes
    further = [
        (f"{name} {dtype_name(d)}", deepcopy(model).to(d), note)
        for d in more
        for name, model, note in built
    ]
    built = [(name, model.to(main), note) for name, model, note in built]
    return [_as_called(*one, row) for one in built + further], notes


def _difference(built: Sequence[tuple[str, Any, str]], row: Tensor) -> float:
    """Return the largest difference of styles; ValueError if too large."""
    last, model, _ = built[-1]
    with torch.inference_mode():
        expected = model.log_probs(row)
        bound = rounding_bound(model, row, expected)
        found = {
            name: largest_difference(other.log_probs(row), expected)
            for name, other, _ in built[:-1]
        }
    for name, apart in found.items():
        if not apart <= bound:
            raise ValueError(
                f"the styles differ by {apart:.2g} (bound {bound:.2g}) in "
                f"float32: {name} and {last}; styles that do not agree are "
                "not timed"
            )
    return max(found.values())


def _as_called(name: str, model: Any, note: str, tokens: Tensor) -> Candidate:
    """Return a style as a candidate that calls its model as a module.

    If that does not return all scores, the candidate calls log_probs instead.
    """
    style = Candidate(name, model, model.log_probs, "log-probs", note=note)
    called = replace(style, call=model, output="logits")
    with torch.inference_mode():
        found, expected = called.scores(tokens), style.scores(tokens)
        same = found.shape == expected.shape and torch.allclose(
            found.log_softmax(-1).float(), expected.float(), atol=1e-3
        )
    return called if same else style


def build_peers(plan: Plan) -> tuple[list[Candidate], list[str]]:
    """Build a plan's peers, each with its own random weights.

    Returns:
        The peers, and a sentence for each peer that was left out.
    """
    peers, left_out = [], []
    for name in plan.peers:
        known = name in PEERS
        try:
            with torch.random.fork_rng(devices=[]), plan.device:
                torch.manual_seed(0)
                model, configured = build_peer(name, plan.config)
        except ValueError:
            raise
        except Exception as error:
            # transformers raises ModuleNotFoundError without a name for a
            # broken module
            absent = isinstance(error, ModuleNotFoundError) and error.name
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if not (absent and plan.installed and known):
                why = f"{name} cannot be built: {reason[:200]}"
                raise ValueError(why) from None
            left_out.append(f"{name} was not run: {reason}")
            continue
        if isinstance(model, torch.nn.Module):
            model = model.to(plan.device, plan.dtypes[0]).eval()
        peer = Candidate(
            name, model, model, style=False, configured=configured
        )
        peers.append(peer if known else _as_checked(peer, plan))
    return peers, left_out


def _as_checked(peer: Candidate, plan: Plan) -> Candidate:
    """Return a peer that calls and reads a user's model as the checks do.

    Raises:
        ValueError: if the scores do not have the plan's vocabulary, the model
            cannot read the plan's longest text, or the given cache does not
            work.
    """
    name, vocab = peer.name, plan.config.vocab_size
    # most tokens of a row that a model reads
    longest = max(plan.times) + plan.new
    cache = load_target(plan.cache) if plan.cache else None
    met = partial(meet, lambda: peer.model, block_size=longest, cache=cache)
    met = partial(met, outputs="logits")
    own = "vocabulary" in plan.open and not peer.configured
    try:
        try:
            subject = met(vocab_size=None if own else vocab)
        except UnknownSize:
            subject = met(vocab_size=vocab)
        subject.require_scores()
    except ValueError as error:
        ours = f"the benchmark's vocabulary is {vocab} (--vocab-size sets it)"
        words = f"{error}; {ours}"
        if isinstance(error, OtherVocabulary):
            words = f"{ours}, but {error.has}"
        raise ValueError(f"{name}: {words}") from None
    if subject.block_size < longest and "time" not in plan.open:
        raise ValueError(
            f"{name} reads at most {subject.block_size} tokens, but the text "
            f"has {longest}: set --time (with generate, --prompt and "
            "--new-tokens)"
        )
    reader = None
    # find the way to decode on a float64 copy; the model itself is timed
    if plan.cache:
        decoder = Decoder(subject, enlarged=False)
        if decoder.convention is None:
            reason = f": {decoder.reason}" if decoder.reason else ""
            raise ValueError(f"{name}: no cache was found{reason}")
        decoder.bind(peer.model)
        reader = partial(_read_on, decoder)
    given = subject.caller.given

    def call(tokens: Tensor) -> Tensor:
        # a program takes one row at a time
        if isinstance(peer.model, Program):
            return torch.from_numpy(peer.model(tokens))
        answer = subject.caller.call(peer.model, tokens)
        return subject.read(answer, *tokens.shape)

    return replace(
        peer,
        call=call,
        note=f"called with {', '.join(given)}" if given else "",
        vocab_size=subject.vocab_size,
        longest=subject.block_size,
        reader=reader,
    )


def _read_on(decoder: Decoder, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a function that reads a new text in pieces, with a cache."""
    if not decoder.convention.apart:
        decoder.start_again()
    return partial(decoder.scores, Text(decoder.convention, rows))


def fit_to_peers(plan: Plan, peers: Sequence[Candidate]) -> Plan:
    """Return the plan with its open sizes filled in from the peers.

    Raises:
        ValueError: if the peers have different vocabularies.
    """
    shaped = bool(plan.styles) or any(peer.configured for peer in peers)
    plan, open_ = replace(plan, shaped=shaped, open=frozenset()), plan.open
    found = {p.vocab_size: p.name for p in peers if p.vocab_size}
    if "vocabulary" in open_ and found:
        size, *more = found
        if more:
            each = ", ".join(f"{n} has {v}" for v, n in found.items())
            raise ValueError(
                f"all rows read the same ids, but the vocabularies differ: "
                f"{each}; measure each model separately"
            )
        plan = replace(plan, config=plan.config.replace(vocab_size=size))
    lengths = [peer.longest for peer in peers if peer.longest]
    if "time" in open_ and lengths:
        time = max(1, min(*plan.times, *lengths, min(lengths) - plan.new))
        plan = replace(plan, times=(time,))
    return plan
