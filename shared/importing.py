"""Imports of a user's files: from their folders, and gone afterwards.

Each is imported alone: the modules that one brings from its folder are gone
before the next one, so that two folders may both have an attention.py.
"""

import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from . import console
from .names import STYLES
from .validation import did_you_mean, is_installed

LONGEST = 20  # lines of a user's traceback
OURS = Path(__file__).resolve().parent
OUR_PACKAGES = ("annotated", "benchmarks", "mingpt_style", "shared", "tests")


imported_files: set[str] = set()  # of modules that an Alone put away


class NotInstalled(ValueError):
    """There is no such module, here or among the installed packages."""


class Alone:
    """A place to import from that leaves no module behind."""

    def __init__(self, *folders: Path):
        self._folders = folders  # searched first inside `entered`
        self._modules: dict[str, Any] = {}  # not all are modules
        self._depth = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Import from the folders first; afterwards what came is put away.

        Entered again, the same modules are there again.
        """
        if self._depth:
            yield
            return
        hidden = {n: m for n, m in sys.modules.items() if self._hides(n, m)}
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(self._modules)
        before = dict(sys.modules)
        self._depth += 1
        try:
            with first_on_path(*self._folders):
                yield
        finally:
            self._depth -= 1
            for name, module in list(sys.modules.items()):
                if before.get(name) is not module and self._has(module):
                    self._modules[name] = module
                    imported_files.update(map(str, _paths(module)))
            for name in self._modules:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)

    def _has(self, module: Any) -> bool:
        """Whether a module lies in the folders, and is the user's."""
        ours = [OURS.parent / name for name in OUR_PACKAGES]
        return any(
            any(_lies_in(path, folder) for folder in self._folders)
            and not any(_lies_in(path, folder) for folder in ours)
            and not is_installed(str(path))
            for path in _paths(module)
        )

    def _hides(self, name: str, module: Any) -> bool:
        """Whether a folder has a package of its own that is called as ours."""
        top = name.partition(".")[0]
        return top in OUR_PACKAGES and any(
            (folder / top / "__init__.py").is_file()
            or (folder / f"{top}.py").is_file()
            for folder in self._folders
            if not any(_lies_in(path, folder) for path in _paths(module))
        )


def import_module(name: str) -> ModuleType:
    """Import a module by its dotted name.

    Raises:
        ValueError: where it is not there, or raises.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if not missing or not f"{name}.".startswith(f"{missing}."):
            raise _theirs(name, error) from None
        if near := did_you_mean(missing, _inside(missing)):
            raise ValueError(f"no module {name!r}{near}") from None
        if "." not in missing and Path("src", missing).is_dir():
            raise ValueError(
                f"no module {name!r}: {missing!r} is under src/: install "
                f"your package (pip install -e .), or name its file, as "
                f"src/{name.replace('.', '/')}.py:build"
            ) from None
        here = [path.stem for path in Path.cwd().iterdir()]
        near = did_you_mean(missing, (*STYLES, *here))
        if near:
            raise ValueError(f"no module {name!r}{near}") from None
        raise NotInstalled(
            f"no module {name!r}: there is no {missing!r} in {Path.cwd()} or "
            f"among the installed packages"
        ) from None


def _inside(name: str) -> list[str]:
    """Return the modules, and what else is callable, of a name's package."""
    parent = name.rpartition(".")[0]
    package = sys.modules.get(parent)
    modules = pkgutil.iter_modules(getattr(package, "__path__", []))
    held = getattr(package, "__dict__", {})
    return [f"{parent}.{module.name}" for module in modules] + [
        f"{parent}:{n}"
        for n, value in held.items()
        if callable(value) and not n.startswith("_")
    ]


def import_file(path: Path) -> ModuleType:
    """Run a file as a module; inside a package, as that package's."""
    path = path.resolve()
    packages = _packages(path)
    # a module's name has no dots: model.v2.py is model_v2
    name = ".".join((*packages, path.stem.replace(".", "_")))
    if packages and "." not in path.stem:
        return import_module(name)
    if packages:
        import_module(".".join(packages))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _theirs(str(path), error) from None
    return module


def _packages(path: Path) -> list[str]:
    """Return the packages that a file lies in, from the outermost."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def roots(path: Path) -> tuple[Path, ...]:
    """Return where a file's imports start: its package's folder, its own."""
    path = path.resolve()
    return path.parents[len(_packages(path))], path.parent


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


@contextmanager
def theirs_shown() -> Iterator[None]:
    """Run models from here inside; print an exception of their code.

    Raises:
        ValueError: the kit's own, without its cause, which is printed, and
            for a model that ends the program.
    """
    try:
        with first_on_path(Path.cwd()):
            yield
    except ValueError as error:
        places = _places_in(error)
        if error.__cause__ is not None:
            show_theirs(error.__cause__)
        raise console.MistakeAt(str(error), places) from None
    except SystemExit as error:
        places = _places_in(error)
        show_theirs(error)
        words = f"the model ends the program: SystemExit: {error.code}"
        raise console.MistakeAt(words, places) from None


def held_by(module: Any, name: str) -> Any:
    """Return an attribute that a module holds already, or None.

    A module may import another one to answer for what it does not hold, and
    that one may be missing.
    """
    return getattr(module, "__dict__", {}).get(name)


def _paths(module: Any) -> list[Path]:
    spec = held_by(module, "__spec__")
    origin = spec.origin if getattr(spec, "has_location", False) else None
    file = held_by(module, "__file__") or origin
    if file:
        return [Path(file)]
    folders = getattr(spec, "submodule_search_locations", None)
    return [Path(p) for p in held_by(module, "__path__") or folders or []]


def _lies_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _theirs(name: str, error: BaseException) -> ValueError:
    """Print an exception of the user's code, and return ours about it."""
    places = _places_in(error)
    show_theirs(error)
    text = " ".join(str(error).split())
    return console.MistakeAt(
        f"{name} cannot be imported: {type(error).__name__}: {text[:200]}",
        places,
    )


def _places_in(error: BaseException) -> list[dict[str, Any]]:
    from .running.errors import places_in  # late: it brings torch

    if isinstance(error, console.MistakeAt):
        return error.places
    return places_in(error)


def show_theirs(error: BaseException) -> None:
    """Print the user's own part of a traceback, its end if it is long.

    With --debug all of it is printed.
    """
    from .running.errors import with_their_frames  # late: it brings torch

    if not console.debug:
        error = with_their_frames(error) or error.with_traceback(None)
    text = "".join(traceback.format_exception(error, chain=False))
    lines = text.splitlines()
    if len(lines) > LONGEST and not console.debug:
        lines[1 : 2 - LONGEST] = ["  ..."]
    print(console.printable("\n".join(lines)), file=sys.stderr)
