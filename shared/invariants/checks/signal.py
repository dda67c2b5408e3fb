"""Each part's output depends on its input; no attention is saturated."""

from typing import Any

import torch
from torch import Tensor, nn

from ...running.model.building import hooked, is_mapped
from ...running.model.calling import tensors_in
from ...running.operations import functions_through
from ...running.rounding import minus
from ...running.variant import Variant, larger, precise
from ..check import SkipCheck, Subject, check

TIME = 31  # tokens of the text: a prime, so that no head has this width
CHOICE = 8  # fewest visible positions of a row of attention that counts
# limit of the mean largest probability: training survives 0.53, but not 0.76
SHARP = 0.6
NORMED = 1e-3  # vectors whose lengths differ by at most this share are normed
# vectors that differ by at most this share of the largest entry are the same
SAME = 1e-6
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
SCALING = ("mul", "mul_", "div", "div_")
# operations that keep a tensor's entries, in another shape or dtype
KEEPING = (
    *("view", "reshape", "transpose", "permute", "contiguous", "unflatten"),
    *("flatten", "clone", "to", "float", "__get__"),
)


@check(implied_by=("check_context_use",), needs="modules")
def check_signal(subject: Subject) -> str:
    """Each part depends on its input; fresh attention is not saturated.

    Why: after a norm that ignores its input, a layer adds a constant. If
    scores are multiplied by the root of the head's width, each position
    attends to a single other position from the start. Both models still train,
    to a worse loss.
    How: with larger weights, the output of each module with weights must
    differ if its input does. A fresh model fails if it multiplies products of
    queries and keys by more than 1, and attention's largest probability is
    near 1 on average. Normed queries are left out.
    If it fails: a norm that ignores its argument has a constant output. If one
    position gets nearly all attention, scores are probably multiplied by the
    root of the head's width instead of divided by it. In narrow heads with
    small weights that does no harm. The attention of a trained model is not
    judged.
    Reports: Vaswani et al. 2017, section 3.2.1, on large products.
    """
    enlarged = larger(subject)
    if enlarged is not None:
        _require_parts_that_move(enlarged)
    if not subject.builder.fresh:
        return "every part moves; a trained attention may have decided"
    time = subject.lengths.fit(TIME)
    with functions_through(_Choices(time)) as choices:
        precise(subject).scores(subject.draw(2, time))
    if enlarged is None and not choices.found:
        raise SkipCheck("no part and no attention can be seen")
    unscaled = ""
    for first, times, width in choices.found:
        scale = f"products of queries and keys are multiplied by {times:.4g}"
        if times > 1 and first > SHARP:
            raise AssertionError(
                f"a fresh model's attention has decided: the largest "
                f"probability is {first:.2f} on average over {time} "
                f"positions; {scale}, where 1 / sqrt({width}) = "
                f"{width**-0.5:.4g} keeps them small"
            )
        if times >= 1 and width > 1:
            unscaled = f"; {scale} where 1/sqrt({width}) is usual"
    count = len(choices.found)
    chosen = "1 part chooses" if count == 1 else f"{count} parts choose"
    return f"every part moves; {chosen} positions{unscaled}"


def _require_parts_that_move(variant: Variant) -> None:
    moves: dict[str, bool] = {}
    modules = variant.model.named_modules()
    names = {module: name for name, module in modules}

    def look(module: nn.Module, args: Any, kwargs: Any, answer: Any) -> None:
        given, put_out = _spread((args, kwargs)), _spread(answer)
        if given > SAME and put_out >= 0:
            name = f"{names[module]} ({type(module).__name__})"
            moves[name] = moves.get(name, False) or not put_out <= SAME

    tokens = variant.subject.draw(3, 7)
    with hooked((m for m in names if [*m.parameters()]), look):
        variant.scores(tokens)
    still = [name for name, moved in moves.items() if not moved]
    if still:
        raise AssertionError(
            f"{still[0]} puts out the same vector for every input, at all "
            f"positions of {len(tokens)} texts"
        )


def _spread(value: Any) -> float:
    """Return the share by which a value's vectors differ; -1 for none."""
    shares = [-1.0]
    for _, x in tensors_in(value):
        rows = x.detach().flatten(0, -2) if x.ndim > 1 else x.new_empty(0)
        if x.is_floating_point() and len(rows) > 1 and x.numel():
            gap = minus(rows, rows[:1].expand_as(rows)).abs().max()
            shares.append(float(gap / rows.abs().max().clamp(1e-300)))
    return max(shares)


class _Choices:
    """Records the largest attention probability of each softmax.

    The probabilities are recomputed from the products of queries and keys and
    a causal mask. Biases that the model adds to its scores are left out,
    because a bias can legitimately favour one position. Normed queries are not
    judged.
    """

    def __init__(self, time: int):
        self.time = time
        # for each attention: the mean of its rows' largest probabilities, the
        # factor on its products, and the width of its queries
        self.found: list[tuple[float, float, int]] = []
        self._products = self._query = self._key = torch.empty(0)

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function, and record attention's largest probabilities."""
        answer = func(*args, **kwargs)
        if is_mapped() or not isinstance(answer, Tensor):
            return answer
        if name in SCALING or name in KEEPING:
            times = _times(next(iter(args), None)) * _factor(name, args)
            if times != 1:
                answer.multiplied_by = times  # type: ignore[attr-defined]
        elif name == "scaled_dot_product_attention":
            named = dict(zip(("query", "key"), args, strict=False))
            self._fused(**named, **kwargs)
        elif answer.shape[-2:] == (self.time, self.time):
            if name in PRODUCTS:
                # the last two are the factors: baddbmm has a bias first
                given = [*args, *kwargs.values()]
                tensors = [x for x in given if isinstance(x, Tensor)]
                self._query, self._key = tensors[-2:]
                self._products = answer.clone()
            elif name == "softmax" and self._products.shape == args[0].shape:
                # compare neighbours that no mask hides (their probability is
                # not 0); take a median, because scores may include biases
                shown = (answer > 0)[..., 1:] & (answer > 0)[..., :-1]
                x, y = (
                    values.double().diff()[shown]
                    for values in (self._products, args[0])
                )
                if (x != 0).any():
                    scale = float((y / x)[x != 0].median())
                    self._note(self._products, scale)
        return answer

    def _fused(
        self, query: Tensor, key: Tensor, scale: float | None = None, **_: Any
    ) -> None:
        if query.size(-2) == key.size(-2) == self.time:
            self._query, self._key = query, key
            # a key's head may serve several heads of queries
            if query.ndim == 4:
                key = key.repeat_interleave(query.size(1) // key.size(1), 1)
            self._note(query @ key.mT, scale or query.size(-1) ** -0.5)

    def _note(self, products: Tensor, scale: float) -> None:
        sizes = self._query.norm(dim=-1)
        if self.time < CHOICE or sizes.std() <= NORMED * sizes.mean():
            return
        future = torch.ones_like(products, dtype=torch.bool).triu(1)
        scores = (products * scale).masked_fill(future, -torch.inf)
        first = scores.softmax(-1)[..., CHOICE - 1 :, :].amax(-1).mean()
        times = scale * _times(self._query) * _times(self._key)
        self.found.append((float(first), times, self._query.size(-1)))


def _times(x: object) -> float:
    """Return the factor by which a tensor was multiplied, as recorded."""
    return getattr(x, "multiplied_by", 1.0)


def _factor(name: str, args: tuple[Any, ...]) -> float:
    """Return the factor by which an operation multiplies, or 1."""
    by = args[1] if name in SCALING and len(args) > 1 else 1.0
    if isinstance(by, Tensor) and by.numel() == 1:
        by = by.item()
    if not isinstance(by, int | float) or by == 0:
        return 1.0
    return by if name.startswith("mul") else 1 / by
