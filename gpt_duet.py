"""Make the folder shared importable as gpt_duet in a checkout.

An install does not contain this file, because gpt_duet is a folder there,
which also contains the styles and the benchmarks. In a checkout these lie
beside shared, so the second entry of the package's search path is the root.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared import *  # noqa: F403

if __name__ == "__main__":  # true for python -m gpt_duet in a checkout
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
