"""What is neither style: the kit around them.

    config.py      GPTConfig: the sizes, and what weights do not show
    masks.py       boolean masks: causal, padding, combined
    files.py       files and folders written whole or not at all
    validation.py  numbers, dtypes, devices and paths, checked
    protocol.py    what a language model and a style must offer
    tokenization/  text to ids, and texts to batches
    checkpoint/    weights on disk, and from style to style
    generation/    ids to more ids
    training/      a model learns a text
    invariants/    the checks, for anyone's model
    comparison/    two models side by side
    targets.py     a model named on the command line, loaded
    importing.py   imports of a user's files, each alone
    console.py     messages to the user, and how a command ends
    cli/           the command gpt-duet

This folder has two names, and each of its modules is loaded once:
`shared.config` is `gpt_duet.config`. The styles import `gpt_duet`, so that
they work beside any other package that is called shared.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

import gpt_duet

_FOLDER = __path__[0]


class _SameModule(Loader):
    """Gives a module of gpt_duet a second name."""

    def __init__(self, spec: ModuleSpec):
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the one module there is."""
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is: it has run under its first name."""
        module.__spec__ = self._spec  # an import has just replaced it

    def get_code(self, fullname: str) -> CodeType | None:
        """Return its code, for python -m shared.cli."""
        assert isinstance(self._spec.loader, InspectLoader)
        return self._spec.loader.get_code(self._spec.name)


class _Finder(MetaPathFinder):
    """Finds shared.x as gpt_duet.x, in this folder and in no other."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return gpt_duet.x for shared.x, and nothing for a stranger's."""
        top, _, rest = fullname.partition(".")
        if top != __name__ or not path or not path[0].startswith(_FOLDER):
            return None
        found = find_spec(f"{gpt_duet.__name__}.{rest}")
        if found is None:
            return None
        spec = ModuleSpec(fullname, _SameModule(found), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    """Return the names that gpt_duet itself has."""
    return getattr(gpt_duet, name)
