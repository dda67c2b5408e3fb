"""The log of a run: log.jsonl, one JSON object a line for each step."""

import json
import operator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .trainer import Record

LOG = "log.jsonl"


def append_log(folder: Path, record: Record) -> None:
    """Add a step to the log."""
    line = {k: v for k, v in asdict(record).items() if v is not None}
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the log's lines, without one that a killed process cut off.

    Raises:
        ValueError: for a line that is no step's.
    """
    path = folder / LOG
    if not path.is_file():
        return []
    *whole, _cut_off = path.read_bytes().split(b"\n")
    log = []
    for number, line in enumerate(whole, start=1):
        try:
            log.append(json.loads(line))
            operator.index(log[-1]["step"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path} is damaged: line {number} is no step; move the log "
                "away to go on without it"
            ) from None
    return log


def cut_log(folder: Path, step: int) -> None:
    """Drop what the log says about steps after a checkpoint."""
    kept = [line for line in read_log(folder) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    write_atomically(folder / LOG, text)
