"""Find the arguments that a model reads from its **kwargs.

Code reads a key if it gets, pops or tests a constant name in **kwargs. If it
passes **kwargs on to a part of the model, it also reads the arguments of that
part.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..places import lines_of_code

READERS = ("get", "pop", "setdefault")
DEEP = 8  # most nested calls through which **kwargs is followed
FOREIGN = ("torch", "builtins", "functools")  # packages without model code

Found = dict[str, Any]  # keys that code reads, with their defaults


def keywords_of(function: Any) -> dict[str, inspect.Parameter]:
    """Return the arguments that a callable reads from its **kwargs."""
    found = {n: v for n, v in _reads(function, ()).items() if n.isidentifier()}
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=default)
        for name, default in found.items()
    }


def _reads(callee: Any, path: tuple[CodeType, ...]) -> Found:
    """Return the keys that a callee reads from its **kwargs."""
    function, owner = _function(callee)
    if function is None or len(path) > DEEP or function.__code__ in path:
        return {}
    rest = _rest(function)
    tree = _tree(function)
    if rest is None:
        return {}
    if tree is None:
        return dict.fromkeys(_constants_of(function.__code__, rest))
    found = _own_reads(tree, rest)
    for call in _passing_on(tree, rest):
        for inner in _callees(call.func, tree, function, owner):
            deeper = _taken(inner) | _reads(inner, (*path, function.__code__))
            given = {word.arg for word in call.keywords}
            first = [*_named(inner)][: len(call.args)]
            found = {
                name: value
                for name, value in deeper.items()
                if name not in (*given, *first)
            } | found
    own = {*inspect.signature(function).parameters}
    return {name: value for name, value in found.items() if name not in own}


def read_otherwise(function: Any) -> list[str]:
    """Return which of **kwargs and *args the code may read by any key.

    Such code copies them, loops over them or passes them on.
    """
    found = dict[str, None]()
    _read_otherwise(function, (), found)
    return [*found]


def _read_otherwise(
    callee: Any, path: tuple[CodeType, ...], found: dict[str, None]
) -> None:
    function, owner = _function(callee)
    if function is None or len(path) > DEEP or function.__code__ in path:
        return
    tree, rest = _tree(function), _rest(function)
    if tree is None:
        return
    more = "" if path else _more_positions(function)
    if more and _loads(tree, more):
        found[f"*{more}"] = None
    if rest is None:
        return
    if len(_known_loads(tree, rest, function)) < len(_loads(tree, rest)):
        found[f"**{rest}"] = None
    for call in _passing_on(tree, rest):
        for inner in _callees(call.func, tree, function, owner):
            _read_otherwise(inner, (*path, function.__code__), found)


def _more_positions(function: FunctionType) -> str:
    """Return the name of a function's *args, "" if no argument precedes it."""
    parameters = inspect.signature(function).parameters.values()
    kinds = [p.kind.name for p in parameters]
    if "VAR_POSITIONAL" not in kinds or "POSITIONAL_OR_KEYWORD" not in (
        kinds[1:] if next(iter(parameters)).name == "self" else kinds
    ):
        return ""
    return next(p.name for p in parameters if p.kind.name == "VAR_POSITIONAL")


def _loads(tree: ast.AST, name: str) -> set[int]:
    """Return ids of syntax nodes that load a name, except in `f(*name)`."""
    splats = {
        id(node.value) for node in ast.walk(tree) if type(node) is ast.Starred
    }
    return {
        id(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and (node.id, type(node.ctx)) == (name, ast.Load)
        and id(node) not in splats
    }


def _is_class(node: ast.AST, function: FunctionType) -> bool:
    """Return whether an expression names a class in a function's globals."""
    match node:
        case ast.Name(id=name):
            return isinstance(function.__globals__.get(name), type)
        case ast.Attribute(value=ast.Name(id=name), attr=attr):
            held = function.__globals__.get(name)
            return isinstance(getattr(held, attr, None), type)
    return False


def _known_loads(tree: ast.AST, rest: str, function: FunctionType) -> set[int]:
    """Return the ids of the syntax nodes that use **kwargs by known keys."""
    known: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=value, attr=attr), args=[key, *_]
            ) if attr in READERS and isinstance(_constant(key), str):
                known.add(id(value))
            case ast.Attribute(value=value, attr="update"):
                known.add(id(value))
            case ast.Subscript(value=value, slice=key) if isinstance(
                _constant(key), str
            ):
                known.add(id(value))
            case ast.Compare(left=key, comparators=[value]) if isinstance(
                _constant(key), str
            ):
                known.add(id(value))
            case ast.Call(func=func, keywords=words):
                if not _is_class(func, function):
                    known |= {id(w.value) for w in words if w.arg is None}
            case ast.Raise() | ast.Assert():
                known |= {id(part) for part in ast.walk(node)}
            case ast.If(test=test, body=[*_, ast.Raise()]):
                known |= {id(part) for part in ast.walk(test)}
    return known & _loads(tree, rest)


def _function(callee: Any) -> tuple[FunctionType | None, Any]:
    """Return the function that a callee runs, and the object it belongs to."""
    if isinstance(callee, nn.Module):
        callee = callee.forward
    owner = getattr(callee, "__self__", None)
    function = callee.__func__ if isinstance(callee, MethodType) else callee
    try:
        function = inspect.unwrap(function)
    except ValueError:
        return None, owner
    if not isinstance(function, FunctionType):
        return None, owner
    home = (function.__module__ or "").split(".")[0]
    return (None if home in FOREIGN else function), owner


def _rest(function: FunctionType) -> str | None:
    """Return the name of a function's **kwargs, or None."""
    code = function.__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    at = code.co_argcount + code.co_kwonlyargcount
    at += bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[at]


@cache
def _tree_of(code: CodeType) -> ast.AST | None:
    lines = lines_of_code(code)
    try:
        return ast.parse(textwrap.dedent("".join(lines))) if lines else None
    except SyntaxError:  # the source of a lambda inside a call
        return None


def _tree(function: FunctionType) -> ast.AST | None:
    return _tree_of(function.__code__)


def _constants_of(code: CodeType, rest: str) -> Iterator[str]:
    """Yield the strings in a function whose source cannot be read."""
    if rest in code.co_varnames or rest in code.co_cellvars:
        yield from (v for v in code.co_consts[1:] if isinstance(v, str))


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _constant(node: ast.AST) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _own_reads(tree: ast.AST, rest: str) -> Found:
    """Return the constant keys that code reads from its **kwargs."""
    found: Found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=value, attr=attr), args=[key, *more]
            ) if _is(value, rest) and attr in READERS:
                name = _constant(key)
                default = _constant(more[0]) if more else None
            case ast.Subscript(value=value, slice=key) if _is(value, rest):
                name, default = _constant(key), None
            case ast.Compare(
                left=key,
                ops=[ast.In() | ast.NotIn()],
                comparators=[value],
            ) if _is(value, rest):
                name, default = _constant(key), None
            case _:
                continue
        if isinstance(name, str):
            found.setdefault(name, default)
            found[name] = default if found[name] is None else found[name]
    return found


def _passing_on(tree: ast.AST, rest: str) -> Iterator[ast.Call]:
    """Yield the calls to which code passes its **kwargs on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            word.arg is None and _is(word.value, rest)
            for word in node.keywords
        ):
            yield node


def _named(callee: Any) -> dict[str, inspect.Parameter]:
    """Return the arguments of a callee that can be given by name."""
    try:
        function = getattr(callee, "forward", callee)
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    variable = (
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    return {n: p for n, p in parameters.items() if p.kind not in variable}


def _taken(callee: Any) -> Found:
    """Return a callee's arguments with defaults: **kwargs may contain them."""
    function, _ = _function(callee)
    return {
        name: p.default
        for name, p in (_named(callee) if function else {}).items()
        if p.default is not p.empty
    }


# --- Where **kwargs is passed on ---------------------------------------------


def _callees(
    node: ast.AST, tree: ast.AST, function: FunctionType, owner: Any
) -> Iterator[Any]:
    """Yield the objects that a called expression may refer to."""
    match node:
        case ast.Attribute(
            value=ast.Call(func=ast.Name(id="super")), attr=attr
        ):
            yield from _above(function, owner, attr)
        case ast.Attribute(value=value, attr=attr):
            for held in _callees(value, tree, function, owner):
                found = getattr(held, attr, None)
                if found is not None:
                    yield found
        case ast.Subscript(value=value):
            for held in _callees(value, tree, function, owner):
                yield from _parts(held)
        case ast.Call(func=func, args=args):  # such as enumerate(self.blocks)
            inner = args if isinstance(func, ast.Name) else [func]
            for part in inner:
                yield from _callees(part, tree, function, owner)
        case ast.Name(id=name):
            yield from _names(name, tree, function, owner)


def _names(
    name: str, tree: ast.AST, function: FunctionType, owner: Any
) -> Iterator[Any]:
    """Yield what a name may refer to: self, a loop's variable, a global."""
    first = function.__code__.co_varnames[:1]
    if owner is not None and (name,) == first:
        yield owner
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and any(
            _is(part, name) for part in ast.walk(node.target)
        ):
            for held in _callees(node.iter, tree, function, owner):
                yield from _parts(held)
    known = {**vars(builtins), **function.__globals__}
    known |= inspect.getclosurevars(function).nonlocals
    if callable(known.get(name)) and not isinstance(known[name], type):
        yield known[name]


def _parts(held: Any) -> Iterable[Any]:
    """Return one module of each class in a list of modules."""
    if isinstance(held, nn.ModuleDict | dict):
        held = held.values()
    modules = nn.ModuleList | nn.Sequential | list | tuple
    if isinstance(held, modules) or hasattr(held, "mapping"):
        return {type(part): part for part in held}.values()
    return ()


def _above(function: FunctionType, owner: Any, attr: str) -> Iterator[Any]:
    """Yield the method of a base class that super() calls."""
    kinds = type(owner).__mro__ if owner is not None else ()
    own = [function in map(inspect.unwrap, vars(k).values()) for k in kinds]
    start = own.index(True) + 1 if any(own) else len(kinds)
    for kind in kinds[start:]:
        if attr in vars(kind):
            yield MethodType(vars(kind)[attr], owner)
            return
