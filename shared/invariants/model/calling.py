"""How a model is called: which method, and under which names."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .building import Model

TOKENS = ("input_ids", "idx", "tokens", "x", "ids", "input", "inputs")
TARGETS = ("targets", "target", "labels", "y")
MASK = "attention_mask"


@dataclass(frozen=True)
class Caller:
    """Calls a model as its signature asks.

    Attributes:
        method: "log_probs" where that is called; None: the model itself.
        token_name: the ids' keyword; None: they go by position.
        takes_mask: whether it takes an attention mask.
        target_name: the targets' keyword in the model's own call, or None.
        own_token_name: the ids' keyword there.
        with_targets: whether each call gets targets, all 0.
    """

    method: str | None
    token_name: str | None
    takes_mask: bool
    target_name: str | None
    own_token_name: str | None
    with_targets: bool = False

    def call(
        self, model: Model, tokens: Int[Tensor, "batch time"], **extra: Any
    ) -> Any:
        """Return a model's answer."""
        if self.with_targets and self.target_name is not None:
            extra[self.target_name] = torch.zeros_like(tokens)
        function = getattr(model, self.method) if self.method else model
        return _call(function, self.token_name, tokens, extra)

    def call_with_targets(
        self,
        model: Model,
        tokens: Int[Tensor, "batch time"],
        targets: Int[Tensor, "batch time"],
    ) -> Any:
        """Return the answer of the model itself, not of its log_probs."""
        extra = {self.target_name: targets}
        return _call(model, self.own_token_name, tokens, extra)


def _call(
    function: Model, token_name: str | None, tokens: Tensor, extra: dict
) -> Any:
    if token_name is None:
        return function(tokens, **extra)
    return function(**{token_name: tokens}, **extra)


def caller_of(model: Model, log_probs: bool) -> Caller:
    """Read from a signature how a model, or its log_probs, is called."""
    own = getattr(model, "log_probs", None) if log_probs else None
    function = own if callable(own) else model
    names, token_name = token_argument(function)
    own_names, own_token_name = token_argument(model)
    return Caller(
        method=None if function is model else "log_probs",
        token_name=token_name,
        takes_mask=MASK in names,
        target_name=next((n for n in TARGETS if n in own_names), None),
        own_token_name=own_token_name,
    )


def token_argument(function: Model) -> tuple[set[str], str | None]:
    """Return a model's argument names, and the one tokens go by, if any."""
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set(), None
    positional = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = set(parameters)
    rest = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
    keyword = next((n for n in TOKENS if n in names), None)
    if positional and (positional[0] in TOKENS or keyword is None):
        return names, None
    if keyword is None and not positional and not rest:
        keyword = TOKENS[0] if parameters else None
    return names, keyword
