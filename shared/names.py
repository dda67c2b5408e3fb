"""Names of the kit's packages: annotated is gpt_duet.annotated.

An install brings gpt_duet alone. In a checkout the folders have short names,
too: each module is loaded once, as gpt_duet's, and its short name is an
alias. A user's package may have one of these names, and is left alone.
"""

import sys
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KIT = __name__.partition(".")[0]
STYLES = ("annotated", "mingpt_style")
NAMES = {
    "shared": "gpt_duet",
    "annotated": "gpt_duet.annotated",
    "mingpt_style": "gpt_duet.mingpt_style",
    "benchmarks": "gpt_duet.benchmarks",
}


def package_of(style: str) -> str:
    """Return the dotted name of a style's package, by the user's name.

    The kit's own styles lie inside the kit, so that a folder of the user's
    with the name of one hides none.
    """
    return f"{KIT}.{style}" if style in STYLES else style


def short_name(package: str) -> str:
    """Return a package's name as users write it: `package_of` undone."""
    return package.removeprefix(f"{KIT}.")


class _Alias(Loader):
    """Gives a module of gpt_duet a second name."""

    def __init__(self, spec: ModuleSpec):
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that gpt_duet has."""
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the module has run under its first name."""
        module.__spec__ = self._spec  # an import has just replaced it
        _name_what_is_loaded()

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for python -m benchmarks."""
        assert isinstance(self._spec.loader, InspectLoader)
        return self._spec.loader.get_code(self._spec.name)


class _Finder(MetaPathFinder):
    """Finds annotated.x as gpt_duet.annotated.x in this checkout alone."""

    def find_spec(
        self,
        fullname: str,
        path: Any,  # a namespace has a path that is no sequence
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of an alias, None for another's package."""
        top = fullname.partition(".")[0]
        if top not in NAMES:
            return None
        if top == fullname:
            spec = PathFinder.find_spec(fullname)
            ours = spec is not None and _is_ours(spec.origin, top)
        else:
            ours = _is_ours(
                getattr(sys.modules.get(top), "__file__", None), top
            )
        found = find_spec(_full(fullname)) if ours else None
        if found is None:
            return None
        alias = ModuleSpec(fullname, _Alias(found), origin=found.origin)
        alias.submodule_search_locations = found.submodule_search_locations
        return alias


def use_both_names() -> None:
    """Let the short names find gpt_duet's modules from now on.

    A module whose import under a short name has brought us here, or is still
    running, gives way to the one of gpt_duet.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in list(sys.modules):
        top = name.partition(".")[0]
        file = getattr(sys.modules[name], "__file__", None)
        if top in NAMES and file and Path(file).is_relative_to(ROOT / top):
            sys.modules[name] = import_module(_full(name))
    _name_what_is_loaded()


def _name_what_is_loaded() -> None:
    """Alias every loaded module of the packages that have an alias.

    An import of annotated.attention would replace the function of that name
    in the package by the module.
    """
    for short, full in NAMES.items():
        if short in sys.modules and sys.modules[short] is sys.modules.get(
            full
        ):
            for name in [n for n in sys.modules if n.startswith(f"{full}.")]:
                alias = short + name.removeprefix(full)
                sys.modules.setdefault(alias, sys.modules[name])


def _full(name: str) -> str:
    top, dot, rest = name.partition(".")
    return NAMES[top] + dot + rest


def _is_ours(file: str | None, top: str) -> bool:
    return file is not None and Path(file) == ROOT / top / "__init__.py"
