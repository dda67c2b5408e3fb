"""Show the result of a diff: the lines of both models, and a sentence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import chain, groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from ...console import printable
from ...running.places import Place
from ...tracing.value import HEAD, NAMES
from ..printing import TWO_COLUMNS, print_trimmed
from .rows import NOWHERE, Divergence, Row, Section
from .scope import Scope, Trial
from .side import Side
from .terminal import Numbers, tables
from .weights import WeightMatch, describe

FIRST_TEXT = Scope(1, 0)
# style of a result in HTML
WIDE = "white-space: pre; overflow-x: auto; line-height: 1.35"


@dataclass(frozen=True)
class ValueDiff:
    """The result of diff_by_value.

    It has the rows (lines paired by value, and lines without a counterpart),
    the first difference if there is one, and the scope of the comparison.
    `sentence` puts the finding in words; `show`, `to_json` and `_repr_html_`
    render it. To add a fact to the result, add a field to this class, fill it
    in `findings.findings`, and give it a name in `to_json`.
    """

    names: tuple[str, str]  # names of the two sides
    sides: tuple[Side, Side]  # both sides, which can run again
    layers: frozenset[int]  # layers of both sides
    only_scores: bool  # whether only the scores of a side are known
    pairs: Sequence[Row]  # lines with equal values, in the left's order
    alone: Mapping[str, Sequence[Row]]  # unpaired lines, by "left" and "right"
    parted: Divergence | None  # the first difference; None if all agree
    nearest: Sequence[Row]  # the closest values, if no value is shared
    notes: Sequence[str]  # sentences on what was not recorded, and on dtypes
    counts: Sequence[tuple[int, int]]  # by side: unpaired values, all values
    apart: float  # distance of the log-probabilities; 0 if there are none
    rounding: float  # how far rounding can move the log-probabilities
    scored: bool  # whether both sides have scores
    coarse: str  # why the two are equal only in a coarser dtype, or ""
    weights: Sequence[WeightMatch] = ()  # counterparts of the right's weights
    gradient: str = ""  # a sentence on the first gradient that differs
    gradients: int = 0  # how many gradients were compared
    scope: Scope = FIRST_TEXT  # what was compared
    trial: Trial | None = None  # a later comparison, if it found a difference

    @property
    def same(self) -> bool:
        """Return whether both models agree in everything that was compared.

        This includes the gradients, if gradients were compared.
        """
        dropped = self.scope.dropped
        drops_alike = dropped is None or not dropped.fault
        agree = self.parted is None and self.trial is None and drops_alike
        return agree and not self.gradient

    @property
    def shares_nothing(self) -> bool:
        """Return whether the two sides have no value in common."""
        return not self.pairs and not self._recorded

    @property
    def sentence(self) -> str:
        """Return the finding in one sentence."""
        if self.gradient:
            return self.gradient
        if self.trial is not None:
            return f"{self.trial.words}: {self._difference}"
        dropped = self.scope.dropped
        if dropped is not None and dropped.fault:
            return (
                f"one function in eval mode, another in train mode: "
                f"{dropped.words}"
            )
        if self.parted is None:
            return f"{self._agreement}; {self.scope.words}"
        return self._difference

    @property
    def _agreement(self) -> str:
        """Return the sentence for two sides that agree."""
        if self.sides[1].reduce is not None:
            alone, count = self.counts[1]
            return (
                f"no difference in {NAMES} of {count - alone} of {count} "
                f"arrays{self.coarse}; this does not detect reordered "
                f"numbers in an array, such as swapped positions"
            )
        one = f"{self._hidden}one function"
        if (top := self.sides[1].top) is not None:
            one += f" as far as the {top.size(-1)} likeliest tokens tell"
        one += self.coarse
        if not self.scored:
            return f"{one} as far as these values tell"
        found = "scores"
        if not self.only_scores:
            found = (
                f"{len(self.pairs)} intermediate values of all layers "
                f"agree on both sides up to rounding; log-probabilities"
            )
        count = self.gradients
        equal = f", {count} gradients equal" if count else ""
        return (
            f"{one}: {found} {self.apart:.1g} apart, rounding can cause "
            f"up to {self.rounding:.1g}{equal}{self._coverage}"
        )

    @property
    def _difference(self) -> str:
        """Return the sentence for two sides that differ."""
        if self.pairs and self.parted is not None:
            rounded = any("rounded" in match.how for match in self.weights)
            more = f"; {self.weights_sentence}" if rounded else ""
            return f"{self._hidden}{self.parted}{self._coverage}{more}"
        if self.only_scores or self.parted is None:
            return (
                f"two functions: scores {self.apart:.2g} apart, rounding "
                f"explains {self.rounding:.1g}"
            )
        if self._recorded:
            return (
                f"{self.parted}; the left computes none of the arrays: are "
                f"weights and tokens the same?"
            )
        near = "; ".join(
            f"{row.left} and {row.right}, {row.difference:.2g} apart"
            for row in self.nearest
        )
        return (
            f"two functions that share no value, not even at the embedding, "
            f"scores {self.apart:.2g} apart: are these the same weights? "
            f"{self.weights_sentence}; the nearest values: "
            f"{near or 'no two values have one size'}"
        )

    @property
    def weights_sentence(self) -> str:
        """Say which weights have a counterpart, or return ""."""
        return describe([*self.weights]) if self.weights else ""

    @property
    def _all_notes(self) -> list[str]:
        return [*self.notes, *self.scope.notes]

    @property
    def _coverage(self) -> str:
        """Say how many values have a counterpart."""
        if self.only_scores or self._hidden:
            return ""
        (alone, left), (lone, right) = self.counts
        return (
            f"; values with a counterpart: {left - alone} of {left} on the "
            f"left, {right - lone} of {right} on the right"
        )

    @property
    def _hidden(self) -> str:
        """Describe a difference that the scores do not show, or return ""."""
        alone, count = self.counts[1]
        of = f"{count} values of {self.names[1]} have"
        if not self.scored:
            return (
                f"{count - alone} of {of} a counterpart, and no scores were "
                f"compared; "
            )
        if self.parted is None or self.apart > self.rounding:
            return ""
        return (
            f"two functions: {alone} of {of} no counterpart, though rounding "
            f"explains the scores; "
        )

    @property
    def _recorded(self) -> bool:
        place = None if self.parted is None else self.parted.right
        return place is not None and place.recorded

    def rows(self) -> list[Row]:
        """Return paired and unpaired lines in the order of the run.

        An unpaired line of the right comes after the pair before it. Lines
        after the first difference are left out, because their values differ.
        Values that are computed head by head make one row.
        """
        orders = [pair.order for pair in self.pairs]

        def place(row: Row) -> tuple[int, bool]:
            if row.left is not None:
                return row.order[0], False
            before = (n for n, r in orders if r < row.order[1])
            return max(before, default=-1), True

        every = sorted(chain(self.pairs, *self.alone.values()), key=place)
        return _last_steps(
            _join_heads(row for row in every if row.why != NOWHERE)
        )

    def sections(self, layer: int | None = None) -> list[Section]:
        """Return the rows by layer, with equal neighbouring layers folded.

        If a layer is given, return only its rows.
        """
        sections: list[Section] = []
        for number, group in groupby(self.rows(), key=lambda row: row.layer):
            if layer not in (None, number):
                continue
            rows = list(group)
            keys = [row.key for row in rows]
            last = sections[-1] if sections else Section((), [[]])
            layers = () if number is None else (number,)
            if layers and last.layers and keys == [r.key for r in last.rows]:
                layers, every = (*last.layers, number), last.rows_by_layer
                sections[-1] = Section(layers, [*every, rows])
            else:
                sections.append(Section(layers, [rows]))
        return sections

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""

        def described(row: Row, *more: str) -> dict[str, Any]:
            names = "left", "right", "shape", "difference", "why", *more
            return {name: _as_json(getattr(row, name)) for name in names}

        parts = "layer", "inputs", "cause", "shown"
        return {
            "same": self.same,
            "sentence": self.sentence,
            "apart": self.apart if self.scored else None,
            "rounding": self.rounding if self.scored else None,
            "counts": dict(zip(("left", "right"), self.counts, strict=True)),
            "weights": [asdict(match) for match in self.weights],
            "gradient": self.gradient or None,
            "parted": self.parted and described(self.parted, *parts),
            "pairs": [*map(described, self.pairs)],
            "alone": {
                side: [*map(described, rows)]
                for side, rows in self.alone.items()
            },
            "compared": self.scope.to_json(),
            "trial": self.trial and self.trial.to_json(),
            "notes": self._all_notes,
        }

    def __str__(self) -> str:
        return self._page().export_text().rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        page = self._page(whole=False)
        pre = f'<pre style="{WIDE}">{{code}}</pre>'
        return page.export_html(inline_styles=True, code_format=pre)

    def _page(self, whole: bool = True) -> Console:
        """Print the result into a console, from which it can be exported."""
        how: Any = {"highlight": False, "force_jupyter": False}
        page = Console(file=StringIO(), width=TWO_COLUMNS, record=True, **how)
        self.show(page, whole=whole)
        return page

    def show(
        self,
        console: Console,
        layer: int | None = None,
        whole: bool = True,
        numbers: Numbers | None = None,
    ) -> None:
        """Print the rows of one layer or of all layers, then the sentence.

        Unpaired lines are left out unless `whole` is set. `numbers` has the
        entries of values, as text to print below their lines.
        """
        sections = self.sections(layer)
        wide = console.width >= TWO_COLUMNS
        print_trimmed(
            console, *tables(sections, self.names, wide, whole, numbers or {})
        )
        alone = [row for s in sections for row in s.rows]
        folded = sum(None in (row.left, row.right) for row in alone)
        dim = []
        if folded and not whole:
            dim.append(f"lines of only one side: {folded}; --all shows them")
        if self.parted is not None and any(self.alone.values()):
            left, right = (
                sum(row.why == NOWHERE for row in self.alone[side])
                for side in ("left", "right")
            )
            dim.append(
                f"after the first difference: {left} values of the left and "
                f"{right} of the right are different"
            )
        dim += ["", *filter(None, [self.weights_sentence]), *self._all_notes]
        for line in dim:
            console.print(Text(printable(line), style="dim"), soft_wrap=True)
        colour = "bold green" if self.same else "bold red"
        sentence = Text(printable(self.sentence), style=colour)
        console.print(sentence, soft_wrap=True)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_as_json, value)]
    return value.to_dict() if isinstance(value, Place) else value


def _join_heads(rows: Iterable[Row]) -> list[Row]:
    """Merge rows of one line that runs several times, as for each head."""
    found: dict[object, Row] = {}
    for row in rows:
        left, right = (
            place and replace(place, inside=HEAD.sub("", place.inside))
            for place in (row.left, row.right)
        )
        row = replace(row, left=left, right=right)
        key = row.layer, row.key
        if first := found.get(key):
            apart = [a.difference or 0.0 for a in (first, row)]
            both = row.difference is not None
            row = replace(
                first,
                difference=max(apart) if both else None,
                times=first.times + 1,
            )
        found[key] = row
    return list(found.values())


def _last_steps(rows: Iterable[Row]) -> list[Row]:
    """Keep only the last of a line's unpaired steps that come in a row."""

    def line(row: Row) -> object:
        if row.difference is not None:
            return row  # each paired value keeps its own row
        return row.place.path, row.place.line, row.left is None, row.why

    return [list(group)[-1] for _, group in groupby(rows, key=line)]
