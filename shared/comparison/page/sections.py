"""Make the page's drawing of both styles, its sections and its tables.

For each part of the model, the error of loading its weights from a GPT-2
checkpoint is measured. All other parts get weights with which both styles
agree to the last bit, so any difference comes from the measured part.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...agreement import enlarged_random_weights, largest_difference
from ...checkpoint.gpt2_layout import read_gpt2
from ...config import GPTConfig
from ...protocol import Style
from ..concepts import CONCEPTS
from ..models import stage_modules, stage_outputs
from ..sources import TINY, Part, PartPair, pair_sources
from ..styles import Comparison, Pair
from ..values import Place, Row, diff_by_value
from .folding import spans
from .glossaries import text_of

SIGN = "\u00d7"  # the sign between the numbers of a shape
# Weights that are set to zero while another part is measured: the token table,
# whose scaling rounds, and the matrices through which blocks add to the
# residual stream.
TOKENS = ("wte.weight",)
BLOCKS = ("c_proj.weight", "c_proj.bias")
BOTH = (*TOKENS, *BLOCKS)


def unused_parts(pair: Pair) -> list[set[str]]:
    """Return, for each style, the classes that its model does not use."""
    return [
        {
            part.__qualname__
            for parts in style.COMPONENTS.values()
            for part in parts
            if isinstance(part, type)
            if not any(isinstance(module, part) for module in model.modules())
        }
        for style, model in zip(pair.styles, pair.models, strict=True)
    ]


def architecture(
    pair: Pair,
    unused: Sequence[set[str]],
    differences: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return the parts of the model in the order of the data flow.

    Each part has:

    - its concept and title;
    - the names that implement it in each style, among those that ran;
    - the shape of its output, or "" for the block, whose parts follow it;
    - the largest difference of the two outputs, if it was measured;
    - whether it is inside the block.
    """
    config, shape = pair.config, pair.tokens.shape
    features = SIGN.join(map(str, (*shape, config.n_embd)))
    scores = SIGN.join(map(str, (*shape, config.vocab_size)))
    parts = []
    for concept, title, output in (
        ("embedding", "embedding", features),
        ("block", f"block \u00d7 {config.n_layer}", ""),
        ("attention", "attention", features),
        ("feed_forward", "feed-forward", features),
        ("model", "last norm", features),
        ("head", "head", scores),
    ):
        names = []
        for style, model, left_out in zip(
            pair.styles, pair.models, unused, strict=True
        ):
            found = style.COMPONENTS.get(concept, ())
            if concept == "model":
                norm = stage_modules(model, style.STAGES).get("final_norm")
                found = () if norm is None else (type(norm),)
            every = (_name(part) for part in found)
            names.append([name for name in every if name not in left_out])
        parts.append(
            {
                "concept": concept,
                "title": title,
                "names": names,
                "shape": output,
                "difference": differences.get(concept),
                "inside": concept in ("attention", "feed_forward"),
            }
        )
    return parts


def _name(part: Any) -> str:
    name = getattr(part, "__qualname__", repr(part))
    return f"nn.{name}" if getattr(nn, name, None) is part else name


def concept_sections(
    styles: tuple[Style, Style],
    comparison: Comparison,
    differences: Mapping[str, float],
    flops: Sequence[Mapping[str, int]],
) -> list[dict[str, Any]]:
    """Return the data of the template for each concept.

    `differences` has the largest difference of each concept. `flops` has, for
    each style, the number of floating-point operations of each concept.
    """
    sections = []
    # run both styles, to find which lines compute the same values
    state = enlarged_random_weights(styles[1], TINY, 0)
    ours, theirs = (style.from_gpt2(state, TINY) for style in styles)
    values = diff_by_value(ours, theirs, quick=True).pairs
    for concept, pairs in pair_sources(*styles).items():
        terms: list[dict[str, list[str]]] = [
            {
                term: list(spellings)
                for scope in ("everywhere", concept)
                for term, spellings in names.get(scope, {}).items()
            }
            for names in (text_of(style, "NAMES") for style in styles)
        ]
        shown = _correspondences(pairs, terms)
        for op, left, right in _names_by_value(pairs, values):
            term = f"{op} {left}"
            terms[0][term], terms[1][term] = [left], right
            shown.append({"term": term, "label": "", "names": [[left], right]})
        known = CONCEPTS.get(concept)
        counted = "total" if concept == "model" else concept
        sections.append(
            {
                "name": concept,
                "does": known.does if known else "",
                "mathematics": known.mathematics if known else "",
                "choices": [
                    text_of(style, "CHOICES").get(concept, "")
                    for style in styles
                ],
                "terms": shown,
                "parameters": [p.get(counted) for p in comparison.parameters],
                "flops": [f.get(concept) for f in flops],
                "buffers": [p["buffers"] for p in comparison.parameters]
                if concept == "model"
                else [],
                "difference": differences.get(concept),
                "names": terms,
                "pairs": pairs,
            }
        )
    return sections


def _correspondences(
    pairs: Sequence[PartPair], terms: Sequence[dict[str, list[str]]]
) -> list[dict[str, Any]]:
    """Return the terms that occur in both styles' source, with their names."""
    present = []
    for side, own in zip(("left", "right"), terms, strict=True):
        parts = [part for p in pairs if (part := getattr(p, side))]
        codes = [s.code for part in parts for s in part.segments]
        marked = {
            (c[a:b], term) for c in codes for a, b, term in spans(c, own)
        }
        present.append(
            {
                term: [
                    n for n in names if (n.split("[0..")[0], term) in marked
                ]
                for term, names in own.items()
            }
        )
    left, right = present
    return [
        {"term": term, "label": term, "names": [names, right[term]]}
        for term, names in left.items()
        if names and right.get(term)
    ]


def _names_by_value(
    pairs: Sequence[PartPair], values: Iterable[Row]
) -> list[tuple[str, str, list[str]]]:
    """Return the names in a concept's source whose calls give equal values.

    Each entry has torch's name of the operation, the name on the left, and
    the names on the right that compute the same value.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for value in values:
        a, b = value.left, value.right
        assert a is not None
        assert b is not None
        left, right = _part_called(a), _part_called(b)
        op = next((p.op for p in (a, b) if p.op.isidentifier()), "")
        here = any(_holds(p.left, a) for p in pairs) and any(
            _holds(p.right, b) for p in pairs
        )
        if left and right and op and here:
            found.setdefault((op, left), {})[right] = None
    return [(*key, [*names]) for key, names in found.items()]


def _holds(part: Part | None, place: Place) -> bool:
    if part is None or not place.path.endswith(part.file):
        return False
    first, last = part.segments[0], part.segments[-1]
    return first.line <= place.line <= last.line + last.code.count("\n")


def _part_called(place: Place) -> str:
    """Return w in "self.w(x)", "self.w[i]" or "self.w(x) * c", or else ""."""
    # a called name may have an index, as in w[0](x)
    name = r"\w+(?:\[[^]]*\](?=\())?"
    found = re.match(rf"self\.(?:\w+\.)*({name})[(\[]", place.code)
    return found[1] if found else ""


@dataclass(frozen=True)
class TransferRow:
    """One part of the model, and the error of loading its weights."""

    name: str  # the common term for the part
    written: tuple[str, str]  # how each style writes it, "" if unknown
    transferred: tuple[str, str]  # how each style loads it from GPT-2
    # largest difference of both styles' outputs; NaN if a style lacks the
    # stage
    error: float
    # where the styles' outputs were compared, and with which inputs
    where: str
    # whether the loaded styles agree up to rounding; False only in the row
    # that compares two different activations
    absorbed: bool


def measure_weight_transfer(
    styles: tuple[Style, Style],
    state: Mapping[str, Tensor],
    config: GPTConfig,
    tokens: Int[Tensor, "batch time"],
) -> list[TransferRow]:
    """Measure the error of loading each part, in a model of one block."""
    state = {
        name: tensor
        for name, tensor in read_gpt2(state, config).items()
        if not name.startswith("h.") or name.startswith("h.0.")
    }
    config = replace(config, n_layer=1, tie_weights=False)
    other = "gelu_tanh" if config.activation == "relu" else "relu"
    bent = replace(config, activation=other)
    exact = replace(config, norm_eps=0.0)
    tied = replace(config, tie_weights=True)
    rows = []
    for name, stage, zeroed, configs, where in (
        ("token table", "embedding", ("wpe.weight",), (config, config),
         "in the embedding, with a position table of zeros"),
        ("position table", "embedding", TOKENS, (config, config),
         "in the embedding, with a token table of zeros"),
        ("attention's matrices", "block.0.attention", TOKENS, (config, config),
         "in the first attention, on equal inputs"),
        ("norm", "final_norm", BOTH, (exact, exact),
         "in the last norm, computed by each style's own class with eps 0"),
        ("head", "log_probs", BOTH, (config, config),
         "in the log-probabilities, on equal inputs"),
        ("tied head", "log_probs", BLOCKS, (tied, tied),
         "in the log-probabilities, from a checkpoint without lm_head.weight"),
        ("activation", "log_probs", (), (config, bent),
         f"in the log-probabilities, between {config.activation} and {other}"),
    ):  # fmt: skip
        weights = {
            key: torch.zeros_like(tensor) if key.endswith(zeroed) else tensor
            for key, tensor in state.items()
            if name != "tied head" or not key.startswith("lm_head")
        }
        outputs, words = [], []
        for style, own_config in zip(styles, configs, strict=True):
            build: Any = style.from_gpt2
            parts = getattr(style, "ORIGINAL_PARTS", {})
            model = build(
                weights, own_config, **parts if name == "norm" else {}
            )
            found = stage_outputs(model, style.STAGES, tokens)
            outputs.append(found.get(stage, torch.tensor(torch.nan)))
            says = text_of(style, "WEIGHT_TRANSFER")
            words.append(says.get(name, ("", "")))
        written, transferred = zip(*words, strict=True)
        error = largest_difference(*outputs)
        absorbed = name != "activation"
        rows.append(
            TransferRow(name, written, transferred, error, where, absorbed)
        )
    return rows
