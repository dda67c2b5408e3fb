"""The package gpt_duet in a checkout, where its folder is called shared.

An install does not bring this file: gpt_duet is a folder there, with the
styles and the benchmarks in it, which the second entry of the path is for.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared import *  # noqa: F403

if __name__ == "__main__":  # python -m gpt_duet, in a checkout
    from gpt_duet.cli import main

    sys.exit(main())

_ROOT = Path(__file__).resolve().parent
_spec = spec_from_file_location(
    __name__,
    _ROOT / "shared" / "__init__.py",
    submodule_search_locations=[str(_ROOT / "shared"), str(_ROOT)],
)
assert _spec is not None
assert _spec.loader is not None
_module = sys.modules[__name__] = module_from_spec(_spec)
_spec.loader.exec_module(_module)
