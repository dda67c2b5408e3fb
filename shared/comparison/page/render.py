"""Fill the templates of the page with the results of a comparison."""

import base64
import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from importlib.metadata import version
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...benchmark_results import Run
from ...tokenization.texts import default_passage
from ...tokenization.tokenizers import Tokenizer
from ..models import count_flops, difference_by_concept
from ..styles import Comparison, Pair
from ..text import token_text, visible
from ..values import ValueDiff, diff_by_value
from .cache_steps import cache_sources
from .folding import fold
from .live import Live
from .sections import (
    SIGN,
    architecture,
    concept_sections,
    measure_weight_transfer,
    unused_parts,
)
from .value_maps import influence_data
from .walk import WALK_PARAMETERS, make_walk

# how many tokens the steps of a forward pass show: few, so that the page loads
# fast
WALK_TOKENS = 16
TEXTS = {
    "Everyday English": "The cat sat on the mat because it was tired, and the "
    "dog lay beside it, because the dog was tired, too.",
    "Python code": "def add(a, b):\n    return a + b\n\n\n"
    "def double(a):\n    return add(a, a)\n",
    "One, two, three, again and again": " ".join(8 * ["one two three"]),
}  # by title: texts that a reader can choose instead of the command's text
# the page offers other texts only if the maps of one text fit these bytes
ROOM = 400_000


def render_page(
    pair: Pair,
    comparison: Comparison,
    tokenizer: Tokenizer,
    text: Mapping[str, Any],
    bench: Run | None = None,
    bench_file: str = "",
    live: Live | None = None,
) -> str:
    """Return the page of two styles, with all scripts and data inside.

    Args:
        pair: both styles, with their models, weights and outputs.
        comparison: the differences and costs to show.
        tokenizer: tokenizer of the text.
        text: facts about the text: source, characters, sha256, tokenizer and
            tokens_in_text.
        bench: the times to draw, if they were measured.
        bench_file: the name of the file with these times.
        live: the object that answers questions about other texts; only a
            served page has one.
    """
    config, styles, tokens = pair.config, pair.styles, pair.tokens
    differences = difference_by_concept(comparison.differences)
    flops = [
        count_flops(model, style.STAGES, tokens)
        for style, model in zip(styles, pair.models, strict=True)
    ]
    bound = None if comparison.one_function else comparison.bound
    walk = _walk(pair, tokenizer) if live is None else live.walk()
    unused = unused_parts(pair)
    piece_of = partial(token_text, tokenizer)
    pieces = [*map(piece_of, tokens[0].tolist())]
    influence = influence_data(pair.models, tokens)
    return fill(
        "page.html",
        ["walk.js", "page.js"] + ["live.js"] * (live is not None),
        live=live and live.describe() | {"weights": comparison.weights},
        caches=cache_sources(styles),
        comparison=comparison,
        too_far=lambda apart: bound is not None and not apart <= bound,
        names=comparison.styles,
        abouts=[(s.__doc__ or "").partition("\n")[0] for s in styles],
        text=text,
        walk=walk,
        walk_parameters=WALK_PARAMETERS,
        shape=SIGN.join(map(str, tokens.shape)),
        unused=unused,
        architecture=architecture(pair, unused, differences),
        concepts=concept_sections(styles, comparison, differences, flops),
        tokens=list(zip(tokens[0].tolist(), pieces, strict=True)),
        influence=influence,
        data={
            "styles": comparison.styles,
            "tokens": pieces,
            "influence": influence,
            "walk": walk["data"] if walk else None,
            "live": live and {"most": live.most},
        },
        piece_of=piece_of,
        weight_transfer=measure_weight_transfer(
            styles, pair.state, config, tokens
        ),
        bench=bench,
        bench_file=bench_file,
    )


def render_diff(found: ValueDiff, text_of: Callable[[int], str]) -> str:
    """Return the page of a diff by value, with scripts and data inside.

    Both models run again, to compute the values that the page shows.
    """
    walk = make_walk(found, text_of)
    data = {"walk": walk["data"]}
    return fill("diff.html", ["walk.js"], walk=walk, data=data)


def _walk(pair: Pair, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the steps on the first tokens, or None for a large model."""
    if sum(tensor.numel() for tensor in pair.state.values()) > WALK_PARAMETERS:
        return None
    # convert before loading, so that a style scales its weights in float64
    doubled = {n: tensor.cpu().double() for n, tensor in pair.state.items()}
    left, right = (s.from_gpt2(doubled, pair.config) for s in pair.styles)
    text_of = partial(token_text, tokenizer)
    used = pair.tokens[:, :WALK_TOKENS].cpu()

    def walk_on(ids: torch.Tensor) -> dict[str, Any] | None:
        found = diff_by_value(left, right, ids, names=pair.names, quick=True)
        return None if found.shares_nothing else make_walk(found, text_of)

    def ids_of(text: str) -> list[int]:
        # a "char" tokenizer may lack a character of the text
        with suppress(ValueError):
            return tokenizer.encode(text)[: used.size(1)]
        return []

    walk = walk_on(used)
    if (
        walk is None
        or walk["data"]["following"] is None
        or used[0].tolist() != ids_of(default_passage())
        or sum(map(len, walk["data"]["maps"])) > ROOM
    ):
        return walk
    for name, text in TEXTS.items():
        ids = ids_of(text)
        whole = len(ids) == used.size(1)
        other = walk_on(torch.tensor([ids])) if whole else None
        if other and _steps(other) == _steps(walk):
            walk["data"]["others"][name] = other["data"]
    return walk


def _steps(walk: Mapping[str, Any]) -> list[Any]:
    """Return the data that all texts of a page must have in common.

    These are the lines of each step, and whether the likeliest next tokens
    are missing.
    """
    places = [step["places"] for step in walk["data"]["steps"]]
    return [places, walk["data"]["following"] is None]


def fill(template: str, scripts: Sequence[str], **content: Any) -> str:
    """Return a page: a template filled with content, scripts and styles.

    Every text of the content is escaped, unless it is Markup.
    """
    environment = Environment(
        loader=PackageLoader(str(__package__), "files"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": lambda n: f"{n:,}",
        "large": _large,
        "marked": _marked,
        "tiny": _tiny,
        "visible": visible,
        "fold": fold,
    }
    environment.globals["live"] = None  # only a served page has live data
    files = resources.files(__package__) / "files"
    styles = ["page.css", "walk.css", "live.css"]
    script, style = (
        "".join((files / name).read_text("utf-8") for name in names)
        for names in (scripts, styles if content.get("live") else styles[:2])
    )
    # the page's security policy allows only a script with this hash
    digest = hashlib.sha256(script.encode()).digest()
    return environment.get_template(template).render(
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
        style=Markup(style),
        versions={
            "gpt-duet": version("gpt-duet"),
            "PyTorch": str(torch.__version__),
            "Python": platform.python_version(),
        },
        **content,
    )


def _marked(text: str) -> Markup:
    """Return a text as HTML; words in backticks become code."""
    marks = Markup("{}"), Markup("<code>{}</code>")
    parts = enumerate(visible(text).split("`"))
    return Markup().join(marks[i % 2].format(part) for i, part in parts)


def _tiny(number: float) -> str:
    if number == 0:
        return "0"
    return f"{number:.1e}" if number < 0.1 else f"{number:.2g}"


def _large(count: float) -> str:
    """Return a count with three digits and a unit letter."""
    for letter in ("", " K", " M", " G", " T"):
        if count < 999.5:
            return f"{count:.3g}{letter}"
        count /= 1000
    return f"{count:.3g} P"
