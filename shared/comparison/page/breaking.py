"""Remove one line from a copy of a model, for the page's switches.

The source files stay as they are. A style's glossary (BREAKS) names the lines.
The file is compiled with other text on these lines. Its name and line numbers
stay the same. So if a check of the broken copy names a line, the file has it.
"""

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...names import short_name
from ...protocol import Style
from ...running.places import short_path
from .glossaries import text_of

# For each part that can be removed: what the page shows without the part.
PARTS = {
    "mask": "Without the causal mask a position looks at later tokens, so "
    "the model sees the token that it is asked to predict. Unless "
    "you have chosen a token, the page chooses the one where this raises the "
    "probability of the text\u2019s next token most. Nothing comes after the "
    "last token, and the prediction there tends to become a little worse: "
    "attention reads vectors that have mixed in later tokens, which never "
    "happened in training, with the mask. The map is red above the diagonal.",
    "scale": "Without the division by \u221ad the scores are larger, so "
    "softmax gives the highest score of a row a larger share. Nothing sees "
    "the future.",
    "positions": "Without the position table a token has the same vector "
    "wherever it stands; only the mask tells early positions from late ones. "
    "Nothing sees the future.",
    "residual": "Without the residual connections each part's output replaces "
    "the stream, and what the embedding wrote there is lost. Nothing sees "
    "the future.",
}


@dataclass(frozen=True)
class Edit:
    """A text in the source of a style, and the text that replaces it."""

    module: str  # the name of a module of the style, such as "attention"
    old: str  # the text to replace; it occurs once in the module
    new: str


@dataclass(frozen=True)
class Change:
    """A line that an edit changes."""

    path: str
    line: int
    old: str
    new: str

    @property
    def file(self) -> str:
        """Return the path in the short form that messages use."""
        return short_path(self.path)


def breaks_of(style: Style) -> Mapping[str, Sequence[Edit]]:
    """Return the edits of a style's glossary, by the part they remove."""
    known = text_of(style, "BREAKS")
    return {
        name: [Edit(*edit) for edit in known[name]]
        for name in PARTS
        if name in known
    }


def changes_of(style: Style, edits: Sequence[Edit]) -> list[Change]:
    """Return the lines that edits change, in the order of the edits.

    Raises:
        ValueError: if a text to replace does not occur exactly once.
    """
    found = []
    for edit in edits:
        path, source = _source(style, edit.module)
        if (count := source.count(edit.old)) != 1:
            raise ValueError(
                f"{path} has {edit.old!r} {count} times, not once"
            )
        before, _, after = source.partition(edit.old)
        line = before.count("\n") + 1
        start = before[before.rfind("\n") + 1 :]
        end = after.partition("\n")[0]
        old, new = (start + text + end for text in (edit.old, edit.new))
        found.append(Change(path, line, old, new))
    return found


def broken_copy(
    model: nn.Module, style: Style, edits: Sequence[Edit]
) -> nn.Module:
    """Return a copy of a model whose classes are compiled from edited source.

    The copy has its own weights; the given model is not changed.
    """
    broken = deepcopy(model)
    for module in dict.fromkeys(edit.module for edit in edits):
        own = [edit for edit in edits if edit.module == module]
        classes = _compiled(style, module, own)
        for part in broken.modules():
            cls = type(part)
            if cls.__module__ == classes["__name__"]:
                part.__class__ = classes[cls.__qualname__]
    return broken


def _compiled(
    style: Style, module: str, edits: Sequence[Edit]
) -> dict[str, Any]:
    """Run a style's module from edited source, and return its namespace."""
    path, source = _source(style, module)
    for edit in edits:
        source = source.replace(edit.old, edit.new)
    name = f"{style.__name__}.{module}"
    names = {"__name__": name, "__package__": style.__name__,
             "__file__": path}  # fmt: skip
    exec(compile(source, path, "exec", dont_inherit=True), names)
    return names


def _source(style: Style, module: str) -> tuple[str, str]:
    name = f"{style.__name__}.{module}"
    if name not in sys.modules:
        raise ValueError(f"{short_name(style.__name__)} has no {module!r}")
    path = str(sys.modules[name].__file__)
    return path, Path(path).read_text("utf-8")
