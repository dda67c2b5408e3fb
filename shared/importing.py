"""Import a user's files, and isolate each file from the others.

Modules from a file's folder are removed before the next file is imported, so
that two folders may both have an attention.py.
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

LONGEST = 20  # most lines of a user's traceback to print
OURS = Path(__file__).resolve().parent
OUR_PACKAGES = ("annotated", "benchmarks", "mingpt_style", "shared", "tests")


# files of imported modules that were removed from sys.modules
imported_files: set[str] = set()


class NotInstalled(ValueError):
    """Raised for a module that is neither in a user's folder nor installed."""


class Alone:
    """Imports modules from folders, and removes these modules afterwards.

    Import inside of `entered`. A module counts as the user's if `_has` says
    so. Modules of the kit and of installed packages stay imported.
    """

    def __init__(self, *folders: Path):
        # folders that are searched first inside `entered`
        self._folders = folders
        # the removed modules by name; any object can stand in sys.modules
        self._modules: dict[str, Any] = {}
        self._depth = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Import from the folders first; remove their modules afterwards.

        If it is entered again later, it restores the same modules.
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
        """Return whether a module is the user's and lies in the folders."""
        ours = [OURS.parent / name for name in OUR_PACKAGES]
        return any(
            any(_lies_in(path, folder) for folder in self._folders)
            and not any(_lies_in(path, folder) for folder in ours)
            and not is_installed(str(path))
            for path in _paths(module)
        )

    def _hides(self, name: str, module: Any) -> bool:
        """Return whether this module of the kit hides a user's module."""
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
        ValueError: if the module does not exist, or raises an exception.
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
                f"your package (pip install -e .), or give its file, as "
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
    """Return the modules and public callables in the package of a name."""
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
    """Run a file as a module, inside its package if it has one."""
    path = path.resolve()
    packages = _packages(path)
    # the module's name: model_v2 for model.v2.py, because a dot ends a name
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
    """Return the packages that contain a file, the outermost first."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def roots(path: Path) -> tuple[Path, ...]:
    """Return the folders in which a file's imports are searched.

    They are the folder that contains its outermost package, and the file's own
    folder.
    """
    path = path.resolve()
    return path.parents[len(_packages(path))], path.parent


@contextmanager
def first_on_path(*folders: Path) -> Iterator[None]:
    """Put folders first on sys.path during the body."""
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
    """Import models from the current folder; print exceptions of their code.

    Raises:
        ValueError: for an error of the user's code, which is printed first, or
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
    """Return an attribute that a module already has, or None.

    `getattr` is not used, because it can make a package import another module,
    which may be missing.
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
    """Print an exception of the user's code, and return the kit's error."""
    places = _places_in(error)
    show_theirs(error)
    text = " ".join(str(error).split())
    return console.MistakeAt(
        f"{name} cannot be imported: {type(error).__name__}: {text[:200]}",
        places,
    )


def _places_in(error: BaseException) -> list[dict[str, Any]]:
    from .running.errors import places_in  # it imports torch

    if isinstance(error, console.MistakeAt):
        return error.places
    return places_in(error)


def show_theirs(error: BaseException) -> None:
    """Print the user's part of a traceback, or its end if it is long.

    With --debug, print the whole traceback.
    """
    from .running.errors import with_their_frames  # it imports torch

    if not console.debug:
        error = with_their_frames(error) or error.with_traceback(None)
    text = "".join(traceback.format_exception(error, chain=False))
    lines = text.splitlines()
    if len(lines) > LONGEST and not console.debug:
        lines[1 : 2 - LONGEST] = ["  ..."]
    print(console.printable("\n".join(lines)), file=sys.stderr)
