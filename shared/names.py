"""Translate between a style's short name and the name of its package.

"annotated" means the package gpt_duet.annotated. The styles are inside the kit
so that a user's package of the same name does not hide them.
"""

from importlib.util import find_spec
from pathlib import Path

KIT = __name__.partition(".")[0]
STYLES = ("annotated", "mingpt_style")
_CHECKOUT = Path(__file__).resolve().parents[1]


def package_of(style: str) -> str:
    """Return the dotted name of the package that a style's name means."""
    return f"{KIT}.{style}" if style in STYLES else style


def short_name(package: str) -> str:
    """Return a package's name as users write it (reverses package_of)."""
    return package.removeprefix(f"{KIT}.")


def full_name(module: str) -> str:
    """Return the dotted name by which to import a module that a user names.

    A style's name means the kit's style, unless the user has a package of the
    same name.
    """
    top = module.partition(".")[0]
    if top not in STYLES:
        return module
    spec = find_spec(top)
    in_checkout = _CHECKOUT / top / "__init__.py"
    ours = spec is None or Path(spec.origin or "") == in_checkout
    return f"{KIT}.{module}" if ours else module
