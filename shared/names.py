"""Names of the styles' packages: annotated is gpt_duet.annotated.

The styles lie inside the kit, in an install as in a checkout, so that a
user's package of the same name does not hide them.
"""

from importlib.util import find_spec
from pathlib import Path

KIT = __name__.partition(".")[0]
STYLES = ("annotated", "mingpt_style")
_CHECKOUT = Path(__file__).resolve().parents[1]


def package_of(style: str) -> str:
    """Return the dotted name of a style's package, from the user's name."""
    return f"{KIT}.{style}" if style in STYLES else style


def short_name(package: str) -> str:
    """Return a package's name as users write it: `package_of` undone."""
    return package.removeprefix(f"{KIT}.")


def full_name(module: str) -> str:
    """Return the dotted name by which to import a module the user named.

    A module of a style is the kit's, unless the user has a package of that
    name.
    """
    top = module.partition(".")[0]
    if top not in STYLES:
        return module
    spec = find_spec(top)
    in_checkout = _CHECKOUT / top / "__init__.py"
    ours = spec is None or Path(spec.origin or "") == in_checkout
    return f"{KIT}.{module}" if ours else module
