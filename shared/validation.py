"""Check numbers, dtypes, devices and paths."""

import difflib
import math
import operator
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported only where used, so that --help is fast
    import torch

DTYPES = ("float32", "float64", "bfloat16", "float16")
EXACT_DTYPES = ("float32", "float64")  # styles agree up to rounding in these


def whole_number(
    name: str, value: object, at_least: int = 0, at_most: int = 2**63 - 1
) -> int:
    """Return a whole number as an int; accept NumPy's integers.

    Raises:
        ValueError: with the number's name, its bound and the value.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"{name} must be a whole number, got {value!r}"
        ) from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    if number > at_most:
        raise ValueError(f"{name} must be at most {at_most:,}, got {number}")
    return number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the known names with similar spelling, as a question."""
    near = difflib.get_close_matches(name, list(known), 3, 0.5)
    return f": did you mean {' or '.join(near)}?" if near else ""


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, including NumPy's scalars."""
    if isinstance(value, int):  # isfinite fails for a large integer
        return not isinstance(value, bool)
    return isinstance(value, Real) and math.isfinite(value)


def choose_dtype(
    name: str, known: Iterable[str] = EXACT_DTYPES
) -> "torch.dtype":
    """Return the dtype with a name, or raise ValueError."""
    import torch

    if name not in known:
        raise ValueError(f"dtype must be {' or '.join(known)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name of a dtype for messages: "float64"."""
    return str(dtype).removeprefix("torch.")


def choose_device(name: str) -> "torch.device":
    """Return the device with a name, or raise ValueError."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (
        RuntimeError,
        AssertionError,
        ImportError,
        NotImplementedError,
    ) as error:
        there = ["cpu"]
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator()
            there.append(str(kind))
        # shorten torch's list of all kinds of devices in the message
        reason = re.sub(
            r"Expected one of .* device type",
            "no such kind",
            str(error).split("\n")[0].split(". ")[0],
        )
        reason = reason.partition(" at start")[0]
        raise ValueError(
            f"no device {name!r} here ({reason}); there is "
            f"{' and '.join(there)}"
        ) from None
    return device


def require_parent(path: Path | None) -> None:
    """Raise ValueError, before any work, if a path cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not an ordinary file")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    try:
        tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}."
        ).close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def require_different(outputs: dict[str, Path | None], **inputs: Any) -> None:
    """Raise ValueError if an output path is the file of another option."""
    seen: dict[Path, str] = {
        Path(path).resolve(): f"--{name}"
        for name, path in inputs.items()
        if path is not None
    }
    for name, path in outputs.items():
        if path is None:
            continue
        if other := seen.get(path.resolve()):
            raise ValueError(f"{other} and --{name} are one file, {path}")
        seen[path.resolve()] = f"--{name}"


@cache
def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package.

    The file is in site-packages, or in another folder of sys.path with
    metadata of packages, such as `pip install --target` writes.
    """
    if "-packages" in path:
        return True
    for root in filter(None, sys.path):
        inside = os.path.join(os.path.abspath(root), "")
        if path.startswith(inside):
            top = path.removeprefix(inside).partition(os.sep)[0]
            if top in _installed_in(inside):
                return True
    return False


@cache
def _installed_in(folder: str) -> set[str]:
    """Return the names in a folder that installed packages have made."""
    found = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        lines = record.read_text(errors="replace").splitlines()
        found |= {re.split("[/,]", line, maxsplit=1)[0] for line in lines}
    return found
