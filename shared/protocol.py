"""Define the protocols that a language model and a style must implement."""

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
        config: sizes, and facts that the shapes of weights do not show.
        vocab_size: number of tokens.
        block_size: longest sequence, in tokens.
    """

    config: GPTConfig

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""

    @property
    def block_size(self) -> int:
        """Return the longest sequence, in tokens."""

    def log_probs(
        self, tokens: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Return the normalised log-probabilities of all next tokens.

        Raises:
            ValueError: for more than block_size tokens.
        """


@runtime_checkable
class CacheReader(Protocol):
    """Reads a text in pieces with a key-value cache, each token once.

    A CacheReader may also have `next_log_probs(tokens, cache)`. It works as
    `decode`, but returns only the last position's log-probabilities.
    """

    def init_cache(self, batch: int) -> Any:
        """Return an empty cache for `batch` rows."""

    def decode(
        self, tokens: Int[Tensor, "batch time"], cache: Any
    ) -> Float[Tensor, "batch time vocab"]:
        """Return log_probs for tokens that continue the text in the cache.

        The tokens are added to the cache.

        Raises:
            ValueError: for more than block_size tokens in all.
        """


@runtime_checkable
class CachedLanguageModel(LanguageModel, CacheReader, Protocol):
    """A decoder that is also a CacheReader.

    Other decoders may have a method `with_cache()` that returns a CacheReader.
    """


def cache_reader(model: object) -> CacheReader | None:
    """Return the CacheReader of a model, or None."""
    if isinstance(model, CachedLanguageModel):
        return model
    make = getattr(model, "with_cache", None)
    return make() if isinstance(model, LanguageModel) and make else None


@runtime_checkable
class Style(Protocol):
    """A style: an importable package that implements the decoder.

    Attributes:
        COMPONENTS: for each concept (such as attention), the classes,
            functions or methods that implement it, in reading order.
        STAGES: for each stage of the computation, the dotted path of the
            submodule that computes it. {i} stands for the layer's number.

    A style may also have ORIGINAL_PARTS: arguments with which from_gpt2 keeps
    parts as in the style's paper or code. Such parts may agree only roughly
    with other styles. ORIGINAL_PARTS_NOTES says how the part differs. Texts
    for the comparison page are optional: see comparison/page/glossaries.
    """

    __name__: str
    COMPONENTS: dict[str, tuple[object, ...]]
    STAGES: dict[str, str]

    def build_model(self, config: GPTConfig) -> nn.Module:
        """Build a fresh model for a config."""

    def from_gpt2(
        self, state: Mapping[str, Tensor], config: GPTConfig
    ) -> nn.Module:
        """Build a model from weights in the GPT-2 layout."""

    def to_gpt2(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's weights in the GPT-2 layout."""


STYLE_NAMES = ("build_model", "from_gpt2", "to_gpt2", "COMPONENTS", "STAGES")


def load_style(name: str) -> Style:
    """Import a style by the name of its package, or raise ValueError."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"no style {name!r}: not the name of a package")
    try:
        module = importlib.import_module(package_of(name))
    except ModuleNotFoundError as error:
        # raise the error itself if it comes from an import in the package
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        near = did_you_mean(name, STYLES)
        raise ValueError(f"no style {name!r}{near or f': {error}'}") from None
    if missing := _missing(module):
        raise ValueError(
            f"{name!r} is not a style: it has no {', '.join(missing)}"
        )
    return cast(Style, module)


def style_of(model: nn.Module) -> Style:
    """Find the style of a model from the module of its class.

    Raises:
        ValueError: if no package that contains the class is a style.
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
