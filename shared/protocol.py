"""The contracts: what a language model and a style must offer."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol, cast, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from .config import GPTConfig
from .names import STYLES, package_of
from .validation import did_you_mean


@runtime_checkable
class LanguageModel(Protocol):
    """A decoder that predicts the next token at every position.

    Attributes:
        config: sizes and what weights do not show.
        vocab_size: number of tokens.
        block_size: longest sequence, in tokens.
    """

    config: GPTConfig

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def block_size(self) -> int:
        """Longest sequence, in tokens."""

    def log_probs(
        self, tokens: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Return normalised log-probabilities of each next token.

        Raises:
            ValueError: for more than block_size tokens.
        """


@runtime_checkable
class CacheReader(Protocol):
    """Reads a text in pieces with a key-value cache, each token once.

    It may have `next_log_probs(tokens, cache)`, decode's last position alone.
    """

    def init_cache(self, batch: int) -> Any:
        """Return an empty cache for so many rows."""

    def decode(
        self, tokens: Int[Tensor, "batch time"], cache: Any
    ) -> Float[Tensor, "batch time vocab"]:
        """Return log_probs of tokens that go on where the cache ends.

        The tokens are added to the cache.

        Raises:
            ValueError: for more than block_size tokens in all.
        """


@runtime_checkable
class CachedLanguageModel(LanguageModel, CacheReader, Protocol):
    """A decoder that is its own CacheReader.

    Another decoder may return one: `with_cache()`.
    """


def cache_reader(model: object) -> CacheReader | None:
    """Return what decodes with a model's cache; None for one without."""
    if isinstance(model, CachedLanguageModel):
        return model
    make = getattr(model, "with_cache", None)
    return make() if isinstance(model, LanguageModel) and make else None


@runtime_checkable
class Style(Protocol):
    """A style: an importable package that writes the decoder in its own way.

    Attributes:
        COMPONENTS: for each concept the classes, functions or methods that
            implement it, in reading order.
        STAGES: for each stage the dotted path of the submodule whose output
            it is, {i} standing for the layer.

    A style may also have ORIGINAL_PARTS: arguments of from_gpt2 that keep a
    part as the style's source wrote it, though it agrees with others only
    roughly; ORIGINAL_PARTS_NOTES says how it differs. Texts for the page
    are optional: see comparison/page/glossaries.
    """

    __name__: str
    COMPONENTS: dict[str, tuple[object, ...]]
    STAGES: dict[str, str]

    def build_model(self, config: GPTConfig) -> nn.Module:
        """Build a fresh model."""

    def from_gpt2(
        self, state: Mapping[str, Tensor], config: GPTConfig
    ) -> nn.Module:
        """Build a model from weights in the GPT-2 layout."""

    def to_gpt2(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's weights in the GPT-2 layout."""


STYLE_NAMES = ("build_model", "from_gpt2", "to_gpt2", "COMPONENTS", "STAGES")


def load_style(name: str) -> Style:
    """Import a style by the name of its package; ValueError for none."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"no style {name!r}: that is no package's name")
    try:
        module = importlib.import_module(package_of(name))
    except ModuleNotFoundError as error:
        # An import that fails inside the package is the package's own fault.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        near = did_you_mean(name, STYLES)
        raise ValueError(f"no style {name!r}{near or f': {error}'}") from None
    if missing := _missing(module):
        raise ValueError(
            f"{name!r} is no style: it has no {', '.join(missing)}"
        )
    return cast(Style, module)


def style_of(model: nn.Module) -> Style:
    """Find the style that a model belongs to, by where its class lives.

    Raises:
        ValueError: where no package above the class is a style.
    """
    for cls in type(model).__mro__:
        name = cls.__module__
        while name:
            module = importlib.import_module(name)
            if not _missing(module):
                return cast(Style, module)
            name = name.rpartition(".")[0]
    raise ValueError(f"{type(model).__qualname__} belongs to no style")


def _missing(module: ModuleType) -> list[str]:
    return [name for name in STYLE_NAMES if not hasattr(module, name)]
