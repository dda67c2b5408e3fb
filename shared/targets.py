"""Models that are named by text: a style, a module, a file, an expression.

Each is loaded alone: the modules that one target brings from its folder are
gone before the next one, so that two folders may both have an attention.py.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from . import console
from .config import GPTConfig

LONGEST = 20  # lines of a user's traceback
OURS = Path(__file__).resolve().parent
OUR_PACKAGES = ("annotated", "benchmarks", "mingpt_style", "shared", "tests")
STYLE_SIZES = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "vocab_size": 65,
    "block_size": 64,
}


class Alone:
    """A place to import from that leaves no module behind.

    Args:
        *folders: searched before all others inside `entered`.
    """

    def __init__(self, *folders: Path):
        self._folders = folders
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
            for name in self._modules:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)

    def _has(self, module: Any) -> bool:
        """Whether a module lies in the folders, and is not installed."""
        return any(
            _lies_in(path, folder) and not _is_installed(path)
            for path in _paths(module)
            for folder in self._folders
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


class Target:
    """A factory from a named place: each call builds a model, alone.

    Args:
        name: what reports call it.
        build: returns the model.
        place: where its imports come from.
    """

    def __init__(self, name: str, build: Callable[[], Any], place: Alone):
        self.__name__ = name
        self._build = build
        self._place = place

    def __call__(self) -> Any:
        """Build the model; imports inside the factory find their folder."""
        with self._place.entered():
            return self._build()


def load_target(
    target: str,
    vocab_size: int | None = None,
    block_size: int | None = None,
) -> Callable[..., Any]:
    """Return what a name stands for: a factory, a model or a function.

    Args:
        target: "package" with a build_model(config); or "package.module:X"
            or "path/to/file.py:X", where X names a factory, a class, a model
            or a function, or is an expression that builds a model from the
            names of that module.
        vocab_size: of a package's model; None: 65.
        block_size: of a package's model; None: 64.

    Raises:
        ValueError: in one line, where there is no such thing. An exception
            of the user's own code is printed first, as theirs.
    """
    path, what = parse_target(target)
    if not what:
        return _style(target, vocab_size, block_size)
    if path.endswith(".py"):
        place = Alone(*dict.fromkeys((*_roots(Path(path)), Path.cwd())))
        with place.entered():
            module = _load_file(Path(path))
    else:
        place = Alone(Path.cwd())
        with place.entered():
            module = _import(path)
    if not all(part.isidentifier() for part in what.split(".")):
        return Target(what, _expression(module, what), place)
    found = _attribute(module, what, path)
    if not callable(found):
        raise ValueError(
            f"{path} gives {type(found).__name__}, which is no model and no "
            f"factory"
        )
    if isinstance(found, type):
        return Target(what, _from_class(found, module, target), place)
    from torch import nn  # late: a missing file is told at once

    if isinstance(found, nn.Module) or not _without_arguments(found):
        return found
    return Target(what, found, place)


def parse_target(target: str) -> tuple[str, str]:
    """Return the module or file, and what it names; "" for a package alone.

    Raises:
        ValueError: where nothing is named, or the file is not there.
    """
    # the first colon, but for the one of a Windows drive
    drive = target[1:3] in (":\\", ":/") and target[:1].isalpha()
    path, separator, what = target[2 * drive :].partition(":")
    path, what = target[: 2 * drive] + path, what.strip()
    if not separator and target.endswith(".py"):
        raise ValueError(
            f"{target} is a file: name its factory, as {target}:build"
        )
    if separator and not (path and what):
        raise ValueError(
            f"{target!r} is no model: write package.module:factory or "
            f"path/to/file.py:factory"
        )
    if path.endswith(".py") and not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    return path, what


def _style(
    name: str, vocab_size: int | None, block_size: int | None
) -> Callable[..., Any]:
    with first_on_path(Path.cwd()):
        module = _import(name)
    build = getattr(module, "build_model", None)
    if not callable(build):
        raise ValueError(
            f"{name} has no build_model(config): name the factory, as "
            f"{name}:build"
        )
    given = {"vocab_size": vocab_size, "block_size": block_size}
    sizes = STYLE_SIZES | {k: v for k, v in given.items() if v is not None}
    config = GPTConfig(**sizes)  # type: ignore[arg-type]

    def factory() -> Any:
        return build(config)

    factory.__name__ = name
    return factory


def _expression(module: ModuleType, text: str) -> Callable[[], Any]:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(
            f"{text!r} is no name and no expression: {error.msg}"
        ) from None
    code = compile(tree, f"<{text}>", "eval")

    def build() -> Any:
        names = dict(vars(module))
        for node in ast.walk(tree):
            # a package may import its names when they are asked for
            if isinstance(node, ast.Name) and hasattr(module, node.id):
                names[node.id] = getattr(module, node.id)
        return eval(code, names)

    build.__name__ = text
    return build


def _from_class(
    cls: type, module: ModuleType, target: str
) -> Callable[[], Any]:
    """Return what builds a class, from a config with defaults if need be.

    Raises:
        ValueError: for one that needs other arguments, with the expression
            to write instead.
    """
    if _without_arguments(cls):
        return cls
    needed = [
        p
        for p in inspect.signature(cls).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    configs = {
        name: found
        for name, found in vars(module).items()
        if isinstance(found, type) and is_dataclass(found) and found is not cls
    }
    if len(needed) == 1:
        wanted = needed[0].annotation
        asked = {
            n: c for n, c in configs.items() if wanted in (c, n)
        } or configs
        ready = [c for c in asked.values() if not _open_fields(c)]
        if len(ready) == 1:
            return lambda: cls(ready[0]())
        configs = asked
    arguments = ", ".join(f"{p.name}=..." for p in needed)
    if len(needed) == 1 and len(configs) == 1:
        ((name, config),) = configs.items()
        inner = ", ".join(f"{field}=..." for field in _open_fields(config))
        arguments = f"{name}({inner})"
    raise ValueError(
        f"{cls.__name__} needs arguments: write an expression, as "
        f"'{target}({arguments})'"
    )


def _open_fields(config: type) -> list[str]:
    """Return the fields of a dataclass that have no default."""
    return [
        field.name
        for field in fields(config)
        if field.init
        and field.default is MISSING
        and field.default_factory is MISSING
    ]


def _without_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


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
    """Import a module by its dotted name.

    Raises:
        ValueError: where it is not there, or raises.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{name}.".startswith(f"{missing}.") and missing:
            raise ValueError(
                f"no module {name!r}: there is no {missing!r} in "
                f"{Path.cwd()} or among the installed packages"
            ) from None
        raise _theirs(name, error) from None
    except (Exception, SystemExit) as error:
        raise _theirs(name, error) from None


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module; inside a package, as that package's."""
    path = path.resolve()
    name = ".".join((*_packages(path), path.stem))
    if "." in name:
        return _import(name)
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


def _roots(path: Path) -> tuple[Path, ...]:
    """Return where a file's imports start: its package's folder, its own."""
    path = path.resolve()
    above = path.parents[len(_packages(path))]
    return tuple(dict.fromkeys((above, path.parent)))


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


def _paths(module: Any) -> list[Path]:
    file = getattr(module, "__file__", None)
    if file:
        return [Path(file)]
    return [Path(path) for path in getattr(module, "__path__", [])]


def _is_installed(path: Path) -> bool:
    """Whether a module is nobody's own folder's: installed, or the kit's."""
    ours = [OURS.parent / name for name in OUR_PACKAGES]
    return not {"site-packages", "dist-packages"}.isdisjoint(
        path.parts
    ) or any(_lies_in(path, folder) for folder in ours)


def _lies_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _theirs(name: str, error: BaseException) -> ValueError:
    """Print an exception of the user's code, and return ours about it."""
    show_theirs(error)
    text = " ".join(str(error).split())
    return ValueError(
        f"{name} cannot be imported: {type(error).__name__}: {text[:200]}"
    )


def show_theirs(error: BaseException) -> None:
    """Print the part of a traceback that is not ours, its end if it is long.

    With --debug all of it is printed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if console.debug
        or not frame.filename.startswith(("<frozen", str(OURS)))
    ]
    lines = ["Traceback (most recent call last):\n"]
    lines += traceback.format_list(traceback.StackSummary.from_list(theirs))
    lines += traceback.format_exception_only(error)
    lines = "".join(lines).splitlines()
    if len(lines) > LONGEST and not console.debug:
        lines[1 : 2 - LONGEST] = ["  ..."]
    print("\n".join(lines), file=sys.stderr)
