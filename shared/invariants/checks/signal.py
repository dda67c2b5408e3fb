"""What comes into a part of the model gets through it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import SkipCheck
from ..model.reading import tensors_in
from ..model.subject import Subject
from ..model.tokens import draw
from ..search.larger_weights import amplified

TIME = 31  # a prime: the width of no head is taken for it
CHOICE = 8  # positions that a row has to choose from, at least
SHARP = 0.8  # share of the first choice, on average; normal scores of spread 7
NORMED = 1e-3  # share by which lengths of vectors differ, at most
SAME = 1e-6  # share of the largest entry by which rows differ, at most
PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


def check_signal(subject: Subject) -> str:
    """Each part moves with its input, and no fresh attention has decided.

    Why: behind a norm that forgets its input a layer adds a constant; where
    scores are multiplied by the root of the head's width instead of divided,
    each position attends to one other from the start, and hardly learns
    which. Both train, to a worse loss.
    How: what a module with weights puts out must differ between positions or
    texts where its input does: zeros redrawn, weights larger. In a fresh
    model the largest probability of attention, among eight positions or
    more, must not be near 1 on average; queries that are normed choose their
    own sharpness.
    Cost: two forwards.
    Reports: Vaswani et al. 2017, section 3.2.1: large products push the
    softmax to where its gradients are extremely small.
    """
    model = amplified(subject)
    if model is not None:
        _require_parts_that_move(subject, model)
    if not subject.builder.fresh:
        return "every part moves; a trained attention may have decided"
    time = subject.lengths.fit(TIME)
    with _Choices(time) as choices:
        tokens = draw(subject.vocab_size, 2, time, subject.generator())
        subject.scores(subject.precise(), tokens)
    if model is None and not choices.largest:
        raise SkipCheck("no part and no attention can be seen")
    for number, largest in enumerate(choices.largest, start=1):
        if largest > SHARP:
            raise AssertionError(
                f"a fresh model's attention has decided: in softmax {number} "
                f"of {len(choices.largest)} the largest probability is "
                f"{largest:.2f} on average over rows of {time} positions; "
                f"are scores multiplied by the root of the head's width?"
            )
    if not choices.largest:
        return "every part moves; no attention of its own is seen"
    return f"every part moves; first choices get {max(choices.largest):.2f}"


def _require_parts_that_move(subject: Subject, model: nn.Module) -> None:
    moves: dict[str, bool] = {}
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, args: Any, kwargs: Any, answer: Any) -> None:
        given, put_out = _spread((args, kwargs)), _spread(answer)
        if given > SAME and put_out >= 0:
            name = f"{names[module]} ({type(module).__name__})"
            moves[name] = moves.get(name, False) or not put_out <= SAME

    handles = [
        module.register_forward_hook(look, with_kwargs=True)
        for module in names
        if next(module.parameters(), None) is not None
    ]
    time = subject.lengths.fit(7)
    tokens = draw(subject.vocab_size, 3, time, subject.generator())
    try:
        subject.scores(model, tokens)
    finally:
        for handle in handles:
            handle.remove()
    still = [name for name, moved in moves.items() if not moved]
    if still:
        raise AssertionError(
            f"{still[0]} puts out the same vector whatever comes in, at all "
            f"positions of {len(tokens)} texts"
        )


def _spread(value: Any) -> float:
    """Return the share by which rows of vectors differ; -1: there are none."""
    shares = [-1.0]
    for _, x in tensors_in(value):
        if x.is_floating_point() and x.ndim > 1 and x[..., 0].numel() > 1:
            rows = x.detach().flatten(0, -2)
            gap = torch.where(rows == rows[0], 0.0, (rows - rows[0]).abs())
            shares.append(float(gap.max() / rows.abs().max().clamp(1e-300)))
    return max(shares)


class _Choices(TorchFunctionMode):
    """Notes how much attention each softmax gives to one position.

    Attributes:
        largest: mean of the largest probability of a row, by softmax.
    """

    def __init__(self, time: int):
        super().__init__()
        self.time = time
        self.largest: list[float] = []
        self._normed = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            given = dict(zip(("query", "key"), args, strict=False))
            self._fused(**given, **kwargs)
        elif not isinstance(answer, Tensor):
            pass
        elif answer.shape[-2:] == (self.time, self.time):
            if name in PRODUCTS:
                query = next(x for x in args if isinstance(x, Tensor))
                self._normed = _is_normed(query)
            elif name == "softmax" and not self._normed:
                self._note(answer)
        return answer

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        **_rest: Any,
    ) -> None:
        """Note what a fused kernel does not show, as if it were causal."""
        time, width = query.shape[-2:]
        if not time == key.size(-2) == self.time or _is_normed(query):
            return
        if query.ndim == 4:  # a key's head may serve several queries'
            shared = query.size(1) // key.size(1)
            key = key.repeat_interleave(shared, 1)
        scores = query @ key.mT * (scale or width**-0.5)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        self._note(scores.masked_fill(future, -torch.inf).softmax(-1))

    def _note(self, chances: Tensor) -> None:
        rows = (chances > 0).sum(-1) >= CHOICE
        if rows.any():
            self.largest.append(float(chances.amax(-1)[rows].mean()))


def _is_normed(query: Tensor) -> bool:
    """Whether all vectors have one length."""
    sizes = query.detach().norm(dim=-1)
    return bool(sizes.std() <= NORMED * sizes.mean())
