"""The page's sections, one for each concept."""

from collections.abc import Sequence
from typing import Any

from ...protocol import Style
from ..concepts import CONCEPTS
from ..sources import Pair, describe, pair_sources
from ..styles import Comparison
from .highlight import spans, terms_of

Costs = tuple[dict[str, int], dict[str, int]]


def concept_sections(
    styles: tuple[Style, Style],
    comparison: Comparison,
    differences: dict[str, float],
    costs: Sequence[Costs],
) -> list[dict[str, Any]]:
    """Return what the template needs for each concept.

    Args:
        styles: the two.
        comparison: what comparing them found.
        differences: the largest by concept.
        costs: parameters and operations by concept, for each style.
    """
    sections = []
    for concept, pairs in pair_sources(*styles).items():
        terms = [
            terms_of(getattr(style, "NAMES", {}), concept) for style in styles
        ]
        known = CONCEPTS.get(concept)
        sections.append(
            {
                "name": concept,
                "does": describe(concept, pairs),
                "mathematics": known.mathematics if known else "",
                "choices": [
                    getattr(style, "CHOICES", {}).get(concept, "")
                    for style in styles
                ],
                "terms": _correspondences(pairs, terms),
                "parameters": [c[0].get(concept) for c in costs],
                "flops": [c[1].get(concept) for c in costs],
                "buffers": [p["buffers"] for p in comparison.parameters]
                if concept == "model"
                else [],
                "difference": differences.get(concept),
                "names": terms,
                "pairs": pairs,
                "row_count": sum(1 + len(pair.rows) for pair in pairs),
            }
        )
    return sections


def _correspondences(
    pairs: Sequence[Pair], terms: Sequence[dict[str, list[str]]]
) -> list[dict[str, Any]]:
    """The terms that stand in both styles' source, with their names."""
    sources = [
        [s.code for p in pairs if (part := side(p)) for s in part.segments]
        for side in (lambda p: p.left, lambda p: p.right)
    ]
    found = []
    for term in terms[0]:
        names = [
            _present(code, own, term)
            for code, own in zip(sources, terms, strict=True)
        ]
        if all(names):
            found.append({"term": term, "names": names})
    return found


def _present(
    codes: Sequence[str], terms: dict[str, list[str]], term: str
) -> list[str]:
    """Those names of a term that are marked in the source."""
    found = {
        code[start:end]
        for code in codes
        for start, end, name in spans(code, terms)
        if name == term
    }
    return [n for n in terms.get(term, []) if n.split("[0..")[0] in found]
