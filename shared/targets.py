"""Models that a command is given by name: a style, a module, a file."""

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import GPTConfig

OURS = Path(__file__).resolve().parent
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32}
STYLE_SIZES = {"vocab_size": 65, "block_size": 64}


def load_target(
    target: str, vocab_size: int | None, block_size: int | None
) -> Callable[..., Any]:
    """Return what a name on the command line stands for.

    Args:
        target: "package" with a build_model(config), "package.module:name",
            or "path/to/file.py:name", the name being a factory, a model or
            a function.
        vocab_size: of a package's model; None: 65.
        block_size: of a package's model; None: 64.

    Raises:
        ValueError: in one line, where there is no such thing. An exception
            of the user's own code is printed first, as theirs.
    """
    path, separator, name = target.rpartition(":")
    if not separator:
        if target.endswith(".py"):
            raise ValueError(
                f"{target} is a file: name its factory, as {target}:build"
            )
        return _style(target, vocab_size, block_size)
    if not path or not name:
        raise ValueError(
            f"{target!r} is no model: write package.module:factory or "
            f"path/to/file.py:factory"
        )
    is_file = path.endswith(".py")
    module = _load_file(Path(path)) if is_file else _import(path)
    return _bound(_attribute(module, name, path), path)


def _style(
    name: str, vocab_size: int | None, block_size: int | None
) -> Callable[..., Any]:
    module = _import(name)
    build = getattr(module, "build_model", None)
    if not callable(build):
        raise ValueError(
            f"{name} has no build_model(config): name the factory, as "
            f"{name}:build"
        )
    given = {"vocab_size": vocab_size, "block_size": block_size}
    sizes = STYLE_SIZES | {k: v for k, v in given.items() if v is not None}
    config = GPTConfig(**SMALL, **sizes)  # type: ignore[arg-type]

    def factory() -> Any:
        return build(config)

    factory.__name__ = name
    return factory


def _bound(found: Any, path: str) -> Callable[..., Any]:
    """Return a factory that finds its own folder again when it is called."""
    if not callable(found):
        raise ValueError(
            f"{path} gives {type(found).__name__}, which is no model and no "
            f"factory"
        )
    return found


def _attribute(module: ModuleType, name: str, path: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(module) if not n.startswith("_")]
            near = difflib.get_close_matches(part, public, 3, 0.5)
            hint = f"; there is {' and '.join(near)}" if near else ""
            raise ValueError(f"{path} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def _import(name: str) -> ModuleType:
    """Import a module, the current folder before all others.

    Raises:
        ValueError: where it is not there, or where a package of the user's
            own is called as one that this command is made of.
    """
    here = Path.cwd()
    if name.split(".")[0] not in sys.modules:
        _refuse_second_shared(here)
    with first_on_path(here):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if f"{name}.".startswith(f"{missing}.") and missing:
                raise ValueError(
                    f"no module {name!r}: there is no {missing!r} in {here} "
                    f"or among the installed packages"
                ) from None
            raise _theirs(name, error) from None
        except (Exception, SystemExit) as error:
            raise _theirs(name, error) from None


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module; its own `shared`, if any, is found first."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folders = dict.fromkeys((path.parent, Path.cwd()))
    with first_on_path(*folders), _their_shared(*folders):
        sys.modules.setdefault(path.stem, module)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise _theirs(str(path), error) from None
    return module


@contextmanager
def first_on_path(*folders: Path) -> Iterator[None]:
    """Put folders in front of sys.path inside."""
    added = [str(folder) for folder in folders]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            if folder in sys.path:
                sys.path.remove(folder)


def _second_shared(folder: Path) -> Path | None:
    """Return a `shared` in a folder that is not ours."""
    for other in (folder / "shared", folder / "shared.py"):
        if other.exists() and other.resolve() != OURS:
            return other
    return None


def _refuse_second_shared(folder: Path) -> None:
    other = _second_shared(folder)
    if other is not None:
        raise ValueError(
            f"there are two packages called 'shared', {other} and {OURS}: "
            f"name the file by its path (path/to/file.py:factory), or run "
            f"the check from pytest"
        )


@contextmanager
def _their_shared(*folders: Path) -> Iterator[None]:
    """Let a `shared` of the user's be imported inside instead of ours."""
    if not any(map(_second_shared, folders)):
        yield
        return
    ours = {n: m for n, m in sys.modules.items() if _is_shared(n)}
    for name in ours:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [n for n in sys.modules if _is_shared(n)]:
            del sys.modules[name]
        sys.modules.update(ours)


def _is_shared(name: str) -> bool:
    return name == "shared" or name.startswith("shared.")


def _theirs(name: str, error: BaseException) -> ValueError:
    """Print an exception of the user's code, and return ours about it."""
    show_theirs(error)
    text = " ".join(str(error).split())
    return ValueError(
        f"{name} cannot be imported: {type(error).__name__}: {text[:200]}"
    )


def show_theirs(error: BaseException) -> None:
    """Print the part of a traceback that is not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<frozen", str(OURS)))
    ]
    lines = ["Traceback (most recent call last):\n"]
    lines += traceback.format_list(traceback.StackSummary.from_list(theirs))
    lines += traceback.format_exception_only(error)
    print("".join(lines), end="", file=sys.stderr)
