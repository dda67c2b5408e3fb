"""Where a model's own code goes another way for longer texts."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from torch import nn

BRANCHES = (ast.If, ast.IfExp, ast.While)
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
LENGTH = (
    r"\b([tTnNLS]|time|seq\w*|\w*len(gth)?|position\w*)\b|\.(size|shape)\b"
)


def branches_on_length(
    model: object, longest: int
) -> Iterator[tuple[int, str, int, str]]:
    """Yield where modules compare a length with a larger integer.

    Each as the integer, the file, the line and the comparison. A branch that
    only raises is none.
    """
    for part in model.modules() if isinstance(model, nn.Module) else ():
        kinds = [k for k in type(part).__mro__ if "forward" in vars(k)]
        own = [k for k in kinds if not k.__module__.startswith("torch.")]
        for method in (m for kind in own for m in vars(kind).values()):
            if isinstance(method, FunctionType):
                file = method.__code__.co_filename
                for line, test in _comparisons(method):
                    if (number := _number(part, test)) > longest:
                        yield number, file, line, ast.unparse(test)


@cache
def _comparisons(method: FunctionType) -> list[tuple[int, ast.Compare]]:
    """Return the comparisons that a method's branches depend on."""
    try:
        lines, first = inspect.getsourcelines(method)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # of code that is in no file
        return []
    nodes = (node for node in ast.walk(tree) if isinstance(node, BRANCHES))
    return [
        (first + part.lineno - 1, part)
        for node in nodes
        if not (
            isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        )
        for part in ast.walk(node.test)
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ORDER)
    ]


def _number(part: nn.Module, test: ast.Compare) -> int:
    """Return the integer that a length is compared with, or 0.

    It stands there, or the module holds it.
    """
    sides = [test.left, test.comparators[0]]
    for side, other in (sides, sides[::-1]):
        value = getattr(side, "value", None)
        if isinstance(side, ast.Attribute):
            own = ast.unparse(side.value) == "self"
            value = vars(part).get(side.attr) if own else None
        if type(value) is int and re.search(LENGTH, ast.unparse(other)):
            return value
    return 0
