"""Each setting of a check, declared once.

The command (cli/check.py), pyproject.toml (cli/job.py), `Target`,
`check_model` and `meet` read these classes. To add a setting, add a field
here, and use it where it has a meaning. Its annotation is the type in Python,
and a Shell: the default, and the option of the command.

    Settings       of a model: `meet` and all that call it
    RunSettings    and of a run of the checks: `Target`
    CheckSettings  and of one report: `check_model`
    ScorerSettings of `check_scorer`, which also has those with `scorers`
    Shorthands     of the command: each sets another setting
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

if TYPE_CHECKING:  # --help need not wait for it
    import torch

NEVER = "never"  # given, an argument of the call
Texts = list[str] | None
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Shell:
    """How a setting is given, in Python and to the command.

    Attributes:
        help: of the option; "" for a setting without an option.
        type: that the option is read as; None: that of Python.
        default: in Python.
        option: its name without dashes; "" for the setting's own.
        unset: the value of an option that is not given; None: the default.
        metavar: the value's name in the help; None: its type.
        least: bound of a number.
        least_shown: whether the help shows the bound.
        pairs: what each text must be, where texts are name=value.
        scorers: whether a scorer has it as well.
        after: the option that it follows in the help; "": the one before.
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
        "What the model's scores are.",
        Literal["auto", "logits", "log_probs"], "auto")]
    output: Annotated[str | Callable[[Any], Any] | None, Shell(
        "Which part of the answer is judged, where it has several scores: "
        "heads.1, logits, or 0.", str | None)]
    layout: Annotated[str, Shell(
        "Order of the tokens' axes: bt (batch, time), or tb.",
        Literal["bt", "tb"], "bt")]
    cache: Annotated[Callable[..., Any] | None, Shell(
        "What makes an empty cache to decode with, as my_pkg:make_cache, or "
        "step(model, tokens, cache), which returns scores and the cache, "
        "None at first; for a model whose own is not found.",
        str | None, metavar="MAKER")]
    inputs: Annotated[Mapping[str, Callable[..., Any] | str] | None, Shell(
        "How an argument of the call is made, as doc_ids=my_pkg:make (from "
        "tokens to the argument), or doc_ids=never; may be repeated.",
        Texts, option="input",
        pairs="--input takes an argument and what makes it, as "
        f"doc_ids=my_pkg:make or doc_ids={NEVER}")]
    window: Annotated[int | None, Shell(
        "Tokens that the last position is meant to see, for a model that "
        "does not declare sliding_window.", least=1)]
    documents: Annotated[str | int | Callable[..., Any] | None, Shell(
        "What says where documents of a packed row are: an argument of the "
        "call (position_ids), an id that separates them (50256), or "
        "my_pkg:make, from their lengths to arguments.",
        str | None, scorers=True)]
    sees: Annotated[Callable[..., Any] | str | None, Shell(
        "Which tokens each position may depend on: a mask_mod of (q, kv) as "
        "my_pkg:mask_mod. Default: itself and those before it.",
        str | None)]
    compile: Annotated[bool, Shell(
        "Compile the model, too, and hold that program against it.",
        default=False)]
    seed: Annotated[int, Shell(
        "Of all random numbers.", default=0, least=0, scorers=True)]
    device: Annotated["torch.device | str | None", Shell(
        '"cpu", "cuda", "cuda:1", "mps", ...', str, unset="cpu")]


class RunSettings(Settings, total=False):
    """Settings of a run of the checks on a model."""

    checks: Annotated[Collection[str] | None, Shell()]
    budget: Annotated[float | None, Shell(
        "Time there is: 90s, 4m or seconds; what finds most comes first. "
        "Default: 4m where all would take longer.",
        str | None, scorers=True, after="documents")]
    threads: Annotated[int | None, Shell(
        "Of the CPU. Default: one for a small model, else all cores.",
        least=1, least_shown=True, after="device")]


class TargetSettings(RunSettings, total=False):
    """Settings of one of several models."""

    expected: Mapping[str, str]


class CheckSettings(RunSettings, total=False):
    """Settings of a report."""

    expected_failures: Annotated[Mapping[str, str] | None, Shell(
        'A check that is expected to fail, and why: cache="a reason"; may be '
        "repeated.", Texts, option="expect", after="budget",
        pairs="--expect takes a check and a reason, as "
        'check_cache="why"')]
    require_proof: Annotated[bool, Shell(
        "Fail where causality is tested, and not proved.", default=False)]
    allow_routing: Annotated[bool, Shell(
        "Accept a proof that assumes that tokens do not change the path.",
        default=False)]


class ScorerSettings(TypedDict, total=False):
    """Settings of a scorer."""

    scorer: Annotated[str | None, Shell(
        "In place of models: what makes a scorer of texts, as "
        "my_pkg:make_score; score(tokens) gives log-probabilities.",
        after="compile")]
    bos: Annotated[int | None, Shell(
        "Of a scorer: the id that begins all texts.")]
    bits: Annotated[bool, Shell(
        "Scores are in bits, not in nats.", default=False)]
    state: Annotated[str, Shell(
        "Whether a scorer's state stays for the next text.",
        Literal["fresh", "kept"], "fresh")]
    bytes_per_token: Annotated[Callable[[str], Any] | None, Shell(
        "Of a scorer: from a text to the bytes counted for each of its "
        "tokens, as my_pkg:count.", str | None)]


class Shorthands(TypedDict, total=False):
    """Options of the command that set other settings."""

    only: Annotated[Texts, Shell(
        "Run this check only; may be repeated.", after="documents")]
    skip: Annotated[Texts, Shell("Leave this check out; may be repeated.")]
    quick: Annotated[bool, Shell(
        "The same as --budget 30s.",
        default=False, scorers=True, after="budget")]
    thorough: Annotated[bool, Shell(
        "Try all, however long.", default=False, scorers=True)]
# fmt: on


@dataclass(frozen=True)
class Setting:
    """A field of one of the classes above, read."""

    name: str
    kind: Any  # in Python
    shell: Shell
    of_scorer: bool  # and of no model

    @property
    def option(self) -> str:
        """The name of its option, and in pyproject.toml."""
        return self.shell.option or self.name.replace("_", "-")

    @property
    def type(self) -> Any:
        """What the command reads it as."""
        return self.kind if self.shell.type is None else self.shell.type

    @property
    def unset(self) -> Any:
        """The value of the option where it is not given."""
        shell = self.shell
        return shell.default if shell.unset is None else shell.unset

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that are known, () where there is no such list."""
        known = get_args(self.type)
        return known if all(isinstance(one, str) for one in known) else ()

    def fits(self, scorer: bool) -> bool:
        """Whether a scorer has it, or else a model."""
        return self.of_scorer == scorer or self.shell.scorers


def settings_in(kind: Any) -> list[Setting]:
    """Return the settings that a class above declares, in its order."""
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
    """Return the settings of a class, with defaults for those not given.

    Raises:
        TypeError: for one that the class does not have.
        ValueError: for a value that is not one of those known.
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
    """Decorate a function whose **settings are those of a class above.

    Its signature, as help() prints it, then names each of them.
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
