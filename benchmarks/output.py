"""Write results to a file; print, draw and compare them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpt_duet.benchmark_results import (
    Results,
    Run,
    read_results,
)
from gpt_duet.console import warn
from gpt_duet.files import STDOUT, reserve_stdout
from gpt_duet.validation import require_different, require_parent

from .chart import draw
from .compare import Facts, compare_results, require_comparable
from .machine import load, machine_facts
from .measure import Stopped
from .plan import Tell
from .tables import show_changes, show_results


@dataclass
class Output:
    """Where results go; each place is tested before any measurement."""

    device: torch.device
    files: Mapping[str, Path | None] = field(default_factory=dict)
    compare: Path | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError if results could not be written or compared."""
        if self.files.get("json") == STDOUT:
            reserve_stdout()
        for path in self.files.values():
            require_parent(path if path != STDOUT else None)
        require_different(dict(self.files), compare=self.compare)
        plot = self.files.get("plot")
        if plot and plot.suffix not in (".svg", ".png"):
            raise ValueError(
                f"--plot takes an .svg or .png file, got {plot.name}"
            )
        if not 0 <= (given := self.tolerance) < float("inf"):
            raise ValueError(
                f"tolerance must be a number of at least 0, got {given}"
            )
        self._old = read_results(self.compare) if self.compare else None
        self._machine = machine_facts(self.device)

    def prepare(self, what: str, settings: Sequence[Facts]) -> None:
        """Raise ValueError if old results cannot be compared with a plan."""
        if self._old is not None:
            require_comparable(self._old, self._machine, what, settings)
        self._machine["load before"] = load()
        _warn_if_busy(self._machine, "load before")

    def take(self, measured: Callable[[Tell], list[Run]]) -> int:
        """Measure and output runs, even after Ctrl-C; return the status."""
        try:
            with telling() as tell:
                runs = measured(tell)
        except Stopped as error:
            self.put(error.runs)
            raise
        return int(self.put(runs))

    def keep(self, runs: list[Run]) -> None:
        """Write the measurements so far, in case the process is killed."""
        path = self.files.get("json")
        if path and path != STDOUT:
            # `put` will report why the file cannot be written
            with suppress(ValueError):
                self._results(runs).save(path)

    def _results(self, runs: list[Run]) -> Results:
        self._machine["load after"] = load()
        return Results(self._machine, runs)

    def put(self, runs: list[Run]) -> bool:
        """Write, print, draw and compare; return whether anything failed.

        A model that has become slower counts as a failure, and so does a
        failed check or test. Measurements are written first, because a later
        step may fail. If they cannot be written, they are printed.
        """
        results = self._results(runs)
        files = {name: path for name, path in self.files.items() if path}
        console = Console(stderr=files.get("json") == STDOUT)
        try:
            if "json" in files:
                results.save(files["json"])
        finally:
            print_whole(console, show_results(results))
        _warn_if_busy(self._machine, "load after")
        if "plot" in files:
            draw(results, files["plot"])
        if self._old is None:
            return any(row.failed for run in runs for row in run.rows)
        changes, notes = compare_results(self._old, results)
        print_whole(console, show_changes(changes, self.tolerance, notes))
        return any(
            change.pace(self.tolerance) == "slower"
            for change in changes
            if not change.machine
        )


def _warn_if_busy(machine: Facts, moment: str) -> None:
    """Print a warning if more processes are busy than there are cores."""
    busy, cores = float(machine.get(moment, 0)), machine["cores"]
    if busy > int(cores):
        warn(
            f"the machine is busy ({moment}: {busy} on {cores} cores), so "
            "times are unreliable (least with --threads 1)"
        )


def print_whole(console: Console, shown: Group) -> None:
    """Print tables, without cutting off numbers in a narrow terminal.

    rich cuts off lines at the console's width, so it gets a large width; the
    terminal then wraps long lines.
    """
    width = console.width
    for part in shown.renderables:
        console.width = 9999 if isinstance(part, Table) else width
        console.print(part)


@contextmanager
def telling() -> Iterator[Tell]:
    """Yield a function that shows the current step of the work in a line.

    The line is removed at the end. It is not animated: the thread of an
    animation would take time from the measurements.
    """
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(text), refresh=console.is_terminal)
