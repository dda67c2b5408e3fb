"""Declare each setting of the checks, in one place for all who read it.

The command (cli/check.py), pyproject.toml (cli/job.py), `Target`,
`check_model` and `meet` read these classes. To add a setting, add a field
here, and use it where it is needed. The field's annotation has the type in
Python, and a Shell with the default and the option of the command.

    Settings       settings of a model, for `meet` and its callers
    RunSettings    these and settings of a run of the checks, for `Target`
    CheckSettings  these and settings of one report, for `check_model`
    ScorerSettings for `check_scorer`, with those marked `scorers=True`
    Shorthands     options of the command that set other settings
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    get_args,
)

if TYPE_CHECKING:  # for annotations only, so that --help is fast
    import torch

NEVER = "never"  # says that the model is called without this argument
Texts = list[str] | None
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Shell:
    """The form in which a user gives a setting, in Python and in the shell.

    Attributes:
        help: help of the option; "" for a setting without an option.
        type: type of the option; None means the setting's type in Python.
        default: default in Python.
        option: name without dashes; "" means the setting's name.
        unset: value of an option that is not given; None means the default.
        metavar: name of the value in the help; None means the type's.
        least: least value of a number.
        least_shown: whether the help shows the least value.
        pairs: the message for an invalid text, if values are like name=value.
        scorers: whether scorers also have this setting.
        after: the option that precedes it in the help; "" means the setting
            above.
    """

    help: str = ""
    type: Any = None
    default: Any = None
    option: str = ""
    unset: Any = None
    metavar: str | None = None
    least: int | None = None
    least_shown: bool = False
    pairs: str = ""
    scorers: bool = False
    after: str = ""


# fmt: off
class Settings(TypedDict, total=False):
    """Settings of a model that a user may pass to check_model and meet."""

    vocab_size: Annotated[int | None, Shell(
        "Number of tokens. Default: the model's own.", least=1, scorers=True)]
    block_size: Annotated[int | None, Shell(
        "Longest sequence to try. Default: the model's own.",
        least=1, scorers=True)]
    outputs: Annotated[str, Shell(
        "Kind of the model's scores.",
        Literal["auto", "logits", "log_probs"], "auto")]
    output: Annotated[str | int | Callable[[Any], Any] | None, Shell(
        "Part of the answer to check, if it has several scores: heads.1, "
        "logits, or 0.", str | None)]
    layout: Annotated[str, Shell(
        "Order of the tokens' axes: bt (batch, time), or tb.",
        Literal["bt", "tb"], "bt")]
    cache: Annotated[Callable[..., Any] | None, Shell(
        "Function that makes an empty cache for decoding, such as "
        "my_pkg:make_cache; or step(model, tokens, cache), which returns "
        "scores and the cache, and gets None as its first cache. For a "
        "model whose cache is not found.",
        str | None, metavar="MAKER")]
    inputs: Annotated[Mapping[str, Callable[..., Any] | str] | None, Shell(
        "Function that makes an argument of the call from tokens: "
        "doc_ids=my_pkg:make; doc_ids=never leaves it out; may be repeated.",
        Texts, option="input",
        pairs="--input takes an argument and a function that makes it, as "
        f"doc_ids=my_pkg:make, or doc_ids={NEVER}")]
    window: Annotated[int | None, Shell(
        "Number of tokens that the last position is meant to see, for a "
        "model that does not declare sliding_window.", least=1)]
    documents: Annotated[str | int | Callable[..., Any] | None, Shell(
        "How documents in a packed row are marked: by an argument of the "
        "call (position_ids), an id that separates them (50256), or "
        "my_pkg:make, which makes arguments from their lengths.",
        str | None, scorers=True)]
    sees: Annotated[Callable[..., Any] | str | None, Shell(
        "Tokens that each position may depend on: a mask_mod of (q, kv), "
        "such as my_pkg:mask_mod. Default: itself and earlier tokens.",
        str | None)]
    compile: Annotated[bool, Shell(
        "Also compile the model; fail if its scores differ.",
        default=False)]
    seed: Annotated[int, Shell(
        "Random seed.", default=0, least=0, scorers=True)]
    device: Annotated["torch.device | str | None", Shell(
        '"cpu", "cuda", "cuda:1", "mps", ...', str, unset="cpu")]


class RunSettings(Settings, total=False):
    """Settings of a run of the checks on a model."""

    checks: Annotated[Collection[str] | None, Shell()]
    budget: Annotated[float | None, Shell(
        "Time limit: 90s, 4m or seconds; cases that find most faults come "
        "first. Default: 225s, or 130s for over 2 million parameters.",
        str | None, scorers=True, after="documents")]
    threads: Annotated[int | None, Shell(
        "CPU threads. Default: 1 for a small model, else all cores.",
        least=1, least_shown=True, after="device")]


class TargetSettings(RunSettings, total=False):
    """Settings of a Target, one of several models."""

    expected: Mapping[str, str]


class CheckSettings(RunSettings, total=False):
    """All settings that check_model takes, for one report."""

    expected_failures: Annotated[Mapping[str, str] | None, Shell(
        'A check that is expected to fail, and the reason: cache="a reason"; '
        "may be repeated.", Texts, option="expect", after="budget",
        pairs="--expect takes a check and a reason, as "
        'check_cache="why"')]
    require_proof: Annotated[bool, Shell(
        "Fail if causality is only tested, not proved.", default=False)]
    allow_routing: Annotated[bool, Shell(
        "Accept a proof that assumes that tokens do not change the routing.",
        default=False)]


class ScorerSettings(TypedDict, total=False):
    """Settings of a scorer."""

    scorer: Annotated[str | None, Shell(
        "Instead of models: a function that makes a scorer of texts, such as "
        "my_pkg:make_score; score(tokens) returns log-probabilities.",
        after="compile")]
    bos: Annotated[int | None, Shell(
        "For a scorer: the id with which all texts begin.")]
    bits: Annotated[bool, Shell(
        "For a scorer: scores are in bits, not in nats.", default=False)]
    state: Annotated[str, Shell(
        "For a scorer: whether its state is kept for the next text.",
        Literal["fresh", "kept"], "fresh")]
    bytes_per_token: Annotated[Callable[[str], Any] | None, Shell(
        "For a scorer: a function that returns the number of bytes of each "
        "token of a text, such as my_pkg:count.", str | None)]


QUICK = "30s"


class Shorthands(TypedDict, total=False):
    """Options of the command that set other settings."""

    only: Annotated[Texts, Shell(
        "Run only this check; may be repeated.", after="documents")]
    skip: Annotated[Texts, Shell("Skip this check; may be repeated.")]
    quick: Annotated[bool, Shell(
        f"The same as --budget {QUICK}.",
        default=False, scorers=True, after="budget")]
    thorough: Annotated[bool, Shell(
        "Run every case, without a time limit.",
        default=False, scorers=True)]
# fmt: on


@dataclass(frozen=True)
class Setting:
    """A setting, as Settings or another class of this file declares it."""

    name: str
    kind: Any  # type in Python
    shell: Shell
    of_scorer: bool  # whether only scorers have this setting

    @property
    def option(self) -> str:
        """Return the option's name, as in pyproject.toml."""
        return self.shell.option or self.name.replace("_", "-")

    @property
    def type(self) -> Any:
        """Return the type with which the command reads the setting."""
        return self.kind if self.shell.type is None else self.shell.type

    @property
    def unset(self) -> Any:
        """Return the value of an option that is not given."""
        shell = self.shell
        return shell.default if shell.unset is None else shell.unset

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the allowed values, () if all values are allowed."""
        known = get_args(self.type)
        return known if all(isinstance(one, str) for one in known) else ()

    def fits(self, scorer: bool) -> bool:
        """Return whether scorers (or models, if `scorer` is False) have it."""
        return self.of_scorer == scorer or self.shell.scorers


def settings_in(kind: Any) -> list[Setting]:
    """Return the settings that a class of this file declares, in order."""
    found = kind.__annotations__.items()
    scorer = kind is ScorerSettings
    return [
        Setting(name, field.__origin__, field.__metadata__[0], scorer)
        for name, field in found
        if hasattr(field, "__metadata__")
    ]


def _in_order_of_help() -> list[Setting]:
    order: list[Setting] = []
    for kind in (CheckSettings, ScorerSettings, Shorthands):
        at = len(order)
        for one in settings_in(kind):
            if one.shell.after:
                names = [other.name for other in order]
                at = names.index(one.shell.after) + 1
            if one.shell.help:
                order.insert(at, one)
                at += 1
    return order


OPTIONS = _in_order_of_help()


def completed(
    function: str, kind: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all settings of a class, with defaults for those not given.

    Raises:
        TypeError: for a setting that the class does not have.
        ValueError: for a value that is not allowed.
    """
    declared = settings_in(kind)
    for name in given.keys() - {one.name for one in declared}:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}"
        )
    full = {one.name: one.shell.default for one in declared} | {**given}
    for one in declared:
        value = full[one.name]
        if one.choices and value not in one.choices:
            words = f"{one.name} must be one of {', '.join(one.choices)}"
            raise ValueError(f"{words}, got {value!r}")
    return full


def takes(kind: Any) -> Callable[[Function], Function]:
    """Return a decorator that names a class's settings in a signature.

    It is for functions that take **settings, so that help() names the
    settings.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [*signature.parameters.values()]
        if own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
            raise TypeError(f"{function.__name__} takes no **settings")
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = [
            inspect.Parameter(
                one.name,
                keyword,
                default=one.shell.default,
                annotation=one.kind,
            )
            for one in settings_in(kind)
        ]
        shown = signature.replace(parameters=[*own[:-1], *named])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate
