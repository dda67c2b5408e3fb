"""Load a model that is named by text: style, module, file, expression."""

import ast
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import GPTConfig
from .importing import (
    Alone,
    NotInstalled,
    first_on_path,
    import_file,
    import_module,
    roots,
)
from .names import STYLES, full_name, package_of
from .settings import NEVER
from .validation import did_you_mean

# parts of a target: module or file, colon, name (the colon of a Windows drive
# belongs to the file)
PARTS = re.compile(r"(?s)((?:[A-Za-z]:[\\/])?[^:]*)(:?)(.*)")
PREFIX = "exec:"  # prefix of a program's command
# usual beginnings of a factory's name
BUILDS = re.compile("build|make|create|get")
# default sizes of a style's model
STYLE_SIZES = {
    "vocab_size": 65, "block_size": 64, "n_layer": 2, "n_head": 4,
    "n_embd": 32,
}  # fmt: skip


def _alone(
    name: str, build: Callable[[], Any], place: Alone
) -> Callable[[], Any]:
    """Return a factory that imports from the folders of `place`."""

    def factory() -> Any:
        with place.entered():
            return build()

    factory.__name__ = name
    return factory


def load_target(
    target: str, vocab_size: int | None = None, block_size: int | None = None
) -> Callable[..., Any]:
    """Return the factory, model or function that a name refers to.

    Args:
        target: "package", "package.module:X", "path/to/file.py:X" or
            "exec:COMMAND". A package has a build_model(config). X names a
            factory, a class, a model or a function, or is an expression of
            names in the module. A command starts a program in any language
            that implements the protocol of `running/exec_program.py`.
        vocab_size: number of tokens of a package's model, or of a program.
            None takes the size in STYLE_SIZES, or the number of scores that
            the program answers for one id.
        block_size: longest sequence of a package's model; None takes
            the size in STYLE_SIZES.

    Raises:
        ValueError: in one line, if the target does not exist. An exception of
            the user's code is printed first.
    """
    if target.startswith(PREFIX):
        from .running.exec_program import ExecProgram

        return ExecProgram(target.removeprefix(PREFIX), vocab_size).started()
    path, what = parse_target(target)
    if not what:
        return _style(target, vocab_size, block_size)
    if path.endswith(".py"):
        place = Alone(*dict.fromkeys((*roots(Path(path)), Path.cwd())))
        with place.entered():
            module = import_file(Path(path))
    else:
        place = Alone(Path.cwd())
        with place.entered():
            module = import_module(full_name(path))
    if not all(part.isidentifier() for part in what.split(".")):
        return _alone(what, _expression(module, what), place)
    found = _attribute(module, what, path)
    if not callable(found):
        raise ValueError(
            f"{path} gives {type(found).__name__} for {what}: expected a "
            f"model or a function that returns one"
        )
    if isinstance(found, type):
        return _alone(what, _from_class(found, module, target), place)
    from torch import nn  # here, so that errors before this line are fast

    if isinstance(found, nn.Module) or needed_arguments(found):
        return found
    return _alone(what, found, place)


def load_makers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check's settings, with functions loaded from their names.

    Raises:
        ValueError: as in load_target.
    """
    made = dict(settings)
    named = ["cache", "bytes_per_token"]
    named += ["documents"] if ":" in str(made.get("documents")) else []
    for name in named:
        if name in made:
            made[name] = load_target(made[name])
    if isinstance(made.get("sees"), str):
        made["sees"] = load_sees(made["sees"])
    for name, make in made.get("inputs", {}).items():
        if make != NEVER:
            made["inputs"] = made["inputs"] | {name: load_target(make)}
    return made


def load_sees(text: str) -> Any:
    """Return the declaration of visibility that a text names.

    The text names a predicate, as my_pkg:mask_mod, or is an expression that
    returns a predicate. Without a module, names are those of
    gpt_duet.visibility: window(64, layers=2).
    """
    if ":" not in text:
        text = f"gpt_duet.visibility:{text}"
    found = load_target(text)
    return found if needed_arguments(found) else found()


def parse_target(target: str) -> tuple[str, str]:
    """Return a target's module or file, and its name ("" for a package).

    Raises:
        ValueError: if the target is incomplete, its file does not exist, or it
            has another tool's syntax. The message has the right syntax.
    """
    if target.startswith(PREFIX):
        return PREFIX, target.removeprefix(PREFIX)
    path, separator, what = PARTS.findall(target)[0]
    there, alone, what = os.path.isfile(path), not separator, what.strip()
    module, _, name = target.rpartition(".")
    own = f"{module.replace('.', '/')}.py"
    dotted = alone and name != "py" and os.path.isfile(own)
    folder = target not in STYLES and os.path.isdir(target)
    files = sorted(Path(target).glob("*.py")) if folder else []
    first = files[0].as_posix() if files else ""
    defined = _defined(path) if alone and path.endswith(".py") else []
    for wrong, words in (
        ("://" in target, f"{target} is an address: download the file, and "
         f"give path/to/file.py:factory"),
        (path.endswith(".ipynb"), f"{path} is a notebook: call check_model in "
         f"a cell, or move the model into a file"),
        (what.startswith(":"), f"{target}: write one colon before the name, "
         f"as {path}:{what.lstrip(':')}"),
        (folder and not files, f"the folder {target} has no Python file"),
        (folder and Path(target, "__init__.py") not in files, f"{target} is a "
         f"folder: name a file and its factory, as {first}:build"),
        (dotted, f"{target}: write a colon before the name, as "
         f"{module}:{name}"),
        (alone and path.endswith(".py"), f"{target} is a file: name its "
         f"factory, as {target}:{[*defined, 'build'][0]}; it has "
         f"{', '.join(defined[:5]) or 'no function and no class'}"),
        (not (path and (alone or what)), f"cannot find a model in {target!r}: "
         f"write package.module:factory or path/to/file.py:factory"),
        (path.endswith(".py") and not there, f"there is no file {path}"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(words)
    return path, what


def _defined(path: str | None) -> list[str]:
    """Return functions and classes of a file; likely builders come first."""
    file = Path(path or "")
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    names = re.findall(r"(?m)^(?:def|class) ([A-Za-z]\w*)", text)
    return sorted(names, key=lambda name: not BUILDS.match(name))


def _style(
    name: str, vocab_size: int | None, block_size: int | None
) -> Callable[..., Any]:
    try:
        with first_on_path(Path.cwd()):
            module = import_module(package_of(name))
    except NotInstalled as error:
        raise ValueError(
            f"{error}; for a model of transformers, write "
            f"\"transformers:AutoModelForCausalLM.from_pretrained('{name}')\""
        ) from None
    build = getattr(module, "build_model", None)
    if not callable(build):
        raise ValueError(
            f"{name} has no build_model(config): name the factory, as "
            f"{name}:{[*_defined(vars(module).get('__file__')), 'build'][0]}"
        )
    given = {"vocab_size": vocab_size, "block_size": block_size}
    own = {key: size for key, size in given.items() if size is not None}
    sizes: dict[str, Any] = STYLE_SIZES | own
    return _alone(name, partial(build, GPTConfig(**sizes)), Alone())


def _expression(module: ModuleType, text: str) -> Callable[[], Any]:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(
            f"{text!r} is neither a name nor an expression: {error.msg}"
        ) from None
    code = compile(tree, f"<{text}>", "eval")

    def build() -> Any:
        names = dict(vars(module))
        for node in ast.walk(tree):
            # hasattr makes a package import a name that it imports lazily
            if isinstance(node, ast.Name) and hasattr(module, node.id):
                names[node.id] = getattr(module, node.id)
        return eval(code, names)

    return build


def _from_class(
    cls: type, module: ModuleType, target: str
) -> Callable[[], Any]:
    """Return a factory for a class, with a default config if it takes one.

    Raises:
        ValueError: for a class that requires other arguments, with the
            expression to write instead.
    """
    needed = needed_arguments(cls)
    if not needed:
        return cls
    arguments = ", ".join(f"{name}=..." for name in needed)
    if len(needed) == 1:
        configs = [
            found
            for found in vars(module).values()
            if isinstance(found, type) and is_dataclass(found)
        ]
        wanted = inspect.signature(cls).parameters[needed[0]].annotation
        fit = [c for c in configs if wanted in (c, c.__name__)] or configs
        ready = [c for c in fit if not needed_arguments(c)]
        if len(ready) == 1:
            return lambda: cls(**{needed[0]: ready[0]()})
        if len(fit) == 1:
            inner = ", ".join(
                f"{name}=..." for name in needed_arguments(fit[0])
            )
            arguments = f"{fit[0].__name__}({inner})"
    raise ValueError(
        f"{cls.__name__} requires arguments: write an expression, as "
        f"'{target}({arguments})'"
    )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the arguments without a default; for a function in C, "..."."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["..."]
    open_ = [p for p in parameters if p.default is p.empty]
    some = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in open_ if p.kind not in some]


def _attribute(module: ModuleType, name: str, path: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        there = _defined(vars(module).get("__file__")) or public
        words = (
            f"; it has {', '.join(there[:5])}" if there else ": it is empty"
        )
        near = did_you_mean(name, public) or words
        raise ValueError(f"{path} has no {name!r}{near}") from None
    except ImportError as error:  # the name is imported when first used
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot import {name!r}: {words}") from None
