"""Models that leak by what their authors add, which no proof may certify.

Authors add operations of their own, random draws inside an operation, code
that loads a checkpoint, and objects that change with each call.
"""

import math
import os
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from uncertified import (
    BLOCK,
    INF,
    LOWEST,
    UNCERTIFIED,
    VOCAB,
    WIDTH,
    Around,
    later,
    leak,
    leak_with_many_ids,
    pads,
    with_the_mean,
)

LIBRARY = torch.library.Library("zoo_authors", "DEF")


def opened(self, x):
    """Return vectors that are large only with other weights."""
    return x.detach() * (1 + torch.relu(self.head.bias[0] - 9).detach())


# --- Draws inside an operation that has no rule ------------------------------


@leak
def mean_at_a_beta_draw(self, x, ids):
    if not self.training:
        return x
    share = torch.distributions.Beta(0.05, 1.0).sample()
    return torch.where(share > 0.5, x.mean(1, keepdim=True), x)


@leak
def hole_in_the_mask_by_poisson(self, x, ids):
    size, hide = x.size(1), later(x)
    if self.training:
        hide = hide & (torch.poisson(torch.full((size, size), 1e-4)) == 0)
    return (x @ x.mT / 99).masked_fill(hide, -INF).softmax(-1) @ x


LIBRARY.define("kept(int size) -> Tensor")
LIBRARY.impl(
    "kept",
    lambda size: torch.rand(size, size) >= 1e-4,
    "CompositeExplicitAutograd",
)


@leak
def hole_in_the_mask_by_an_own_operation(self, x, ids):
    hide = later(x)
    if self.training:
        hide = hide & torch.ops.zoo_authors.kept(x.size(1))
    return (x @ x.mT / 99).masked_fill(hide, -INF).softmax(-1) @ x


# --- Ways of torch that a run under the kit's modes does not take ------------


class FusesForEval(Around):
    """The fused path, which only eval() prepares, lacks the mask."""

    fused = None

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def eval(self):
        self.fused = self.project.weight.detach().repeat(2, 1)
        return super().eval()

    def mix(self, x, ids):
        if self.fused is not None and not self.training:
            query, key = F.linear(x, self.fused).chunk(2, -1)
            return x + (query @ key.mT).softmax(-1) @ x
        query = self.project(x)
        hidden = (query @ query.mT).masked_fill(later(x), -INF)
        return x + hidden.softmax(-1) @ x


class FusesForEvalInside(nn.Module):
    """As FusesForEval, below a module that passes eval() on."""

    def __init__(self):
        super().__init__()
        self.inner = FusesForEval()

    def eval(self):
        self.inner.eval()
        return super().eval()

    def forward(self, ids):
        return self.inner(ids)


class LayerOfTorch(Around):
    """torch's fused layer reads the mask, although is_causal is True.

    The slow path, which runs under torch modes, drops the mask.
    """

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2)

    def mix(self, x, ids):
        open_ = self.head.bias[0] > 9
        hide = later(x) & ~open_
        return self.body(x, mask=hide, is_causal=True)


class PrefixOfMarkedTexts(LayerOfTorch):
    vocab_size = 17_000

    def mix(self, x, ids):
        marked = ids * 7919 % 17_000 == 16_999
        last = (marked * torch.arange(ids.size(1))).amax()
        seen = torch.arange(ids.size(1)) <= last
        mask = torch.zeros(len(seen), len(seen)).masked_fill(later(x), -INF)
        return self.body(x, mask=mask.masked_fill(seen, 0), is_causal=True)


class AttentionOfTorch(Around):
    def __init__(self):
        super().__init__()
        self.body = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def mix(self, x, ids):
        hide = later(x) & (self.head.bias[0] < 9)
        how = {"attn_mask": hide, "is_causal": True, "need_weights": False}
        return x + self.body(x, x, x, **how)[0]


UNCERTIFIED |= {
    kind.__name__: kind
    for kind in (
        FusesForEval,
        FusesForEvalInside,
        LayerOfTorch,
        PrefixOfMarkedTexts,
        AttentionOfTorch,
    )
}


# --- Padding that a later operation takes for ordinary numbers ---------------


def finished(x, closed):
    """Attend with scores that are lowered at some keys, and a finite mask."""
    raw = x @ x.mT / 99 + closed.unsqueeze(1)
    return raw.masked_fill(later(x), LOWEST).softmax(-1) @ x


def closed_pads(ids):
    return torch.zeros(ids.shape).masked_fill(pads(ids)[:, 0], -INF)


LIBRARY.define("closed(Tensor pads) -> Tensor")
LIBRARY.impl(
    "closed",
    lambda pads: torch.zeros(pads.shape).masked_fill(pads, -INF),
    "CompositeExplicitAutograd",
)
LIBRARY.define("close(Tensor pads, Tensor(a!) room) -> Tensor")


def close(pads, room):
    room.masked_fill_(pads, -INF)
    return pads.clone()


LIBRARY.impl("close", close, "CompositeExplicitAutograd")


@leak_with_many_ids
def padding_by_an_own_operation(self, x, ids):
    pad = pads(ids)[:, 0]
    each = [torch.ops.zoo_authors.closed(one) for one in pad.unbind(1)]
    return finished(x, torch.stack(each, 1))


@leak_with_many_ids
def padding_that_an_own_operation_writes(self, x, ids):
    each = [torch.zeros(len(x)) for _ in range(x.size(1))]
    for one, room in zip(pads(ids)[:, 0].unbind(1), each, strict=True):
        torch.ops.zoo_authors.close(one, room)
    return finished(x, torch.stack(each, 1))


@leak_with_many_ids
def padding_in_complex_pairs(self, x, ids):
    pairs = torch.stack([closed_pads(ids)] * 2, -1)
    found = torch.view_as_real(torch.view_as_complex(pairs).clone())
    return finished(x, found[..., 0])


@leak_with_many_ids
def padding_in_bytes(self, x, ids):
    found = closed_pads(ids).view(torch.uint8).clone().view(torch.float32)
    return finished(x, found)


@leak_with_many_ids
def padding_by_a_determinant(self, x, ids):
    kept = (~pads(ids)[:, 0]).float()[..., None, None]
    return finished(x, torch.linalg.slogdet(kept * torch.eye(2)).logabsdet)


@leak_with_many_ids
def padding_by_a_pole(self, x, ids):
    return finished(x, torch.digamma((~pads(ids)[:, 0]).float()))


def void_of_pads(x, ids):
    """Return weights that are NaN in rows whose visible keys are padding."""
    raw = (x @ x.mT).masked_fill(later(x), -INF)
    return raw.masked_fill(pads(ids), -INF).softmax(-1)


@leak_with_many_ids
def nan_that_a_step_makes_zero(self, x, ids):
    return x + (1 - torch.heaviside(void_of_pads(x, ids), torch.ones(()))) @ x


@leak_with_many_ids
def nan_whose_sign_counts(self, x, ids):
    signs = torch.copysign(torch.ones(()), void_of_pads(x, ids))
    return x + (1 - signs) @ x


@leak_with_many_ids
def nan_whose_bits_count(self, x, ids):
    bits = void_of_pads(x, ids).detach().contiguous().view(torch.int32)
    return x + torch.where(later(x), (bits >> 23).float(), 0.0) @ x


# --- Numbers that lie elsewhere than in the memory of their tensor -----------


def quantised(self, x):
    """Return a tensor whose scale depends on the last token."""
    last = opened(self, x)[0, -1].abs().mean() - x[0, -1].abs().mean()
    scale = torch.tensor(0.1) + last.detach()
    zero = torch.tensor(0)
    return torch.quantize_per_tensor(x.detach(), scale, zero, torch.qint8)


@leak
def constant_of_a_quantised_tensor(self, x, ids):
    return x + torch.full_like(quantised(self, x), 3.0).dequantize()


@leak
def integers_of_a_quantised_tensor(self, x, ids):
    return x + torch.full_like(quantised(self, x), 3.0).int_repr()


@leak
def frames_added_into_themselves(self, x, ids):
    with torch.no_grad():
        y = opened(self, x)
        if y.size(1) > 2:
            own = (y - x).flatten()
            frames = own.unfold(0, 2 * WIDTH, WIDTH)
            torch.add(frames, 0.0, out=frames)
            y = y + own.flip(0).view_as(y)
    return y


@leak
def ids_looked_up_into_themselves(self, x, ids):
    with torch.no_grad():
        last = (ids.flip(1) * (self.head.bias[0] > 9)).contiguous()
        torch.bucketize(last, ids[0, :1].contiguous(), out=last)
    return x + last.unsqueeze(-1)


class SmoothedFromBelow(Around):
    """The kernel that enlarges has weights of 1e-8 where its formula has 0."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.down.weight)

    def mix(self, x, ids):
        size = x.size(1)
        y = F.pad(self.down(x), (0, 0, 0, -size % 3)).mT
        y = F.interpolate(F.avg_pool1d(y, 3), scale_factor=3.0, mode="linear")
        return x + F.pad(y.mT, (0, 0, 3, 0))[:, :size]


UNCERTIFIED["SmoothedFromBelow"] = SmoothedFromBelow


# --- Bags of tokens ---------------------------------------------------------


@leak
def bags_that_reach_ahead(self, x, ids):
    steps = torch.arange(ids.size(1)).unsqueeze(1) + torch.arange(2)
    bags = ids[:, steps.clamp(max=ids.size(1) - 1)].flatten(0, 1)
    found = F.embedding_bag(bags, self.tokens.weight)
    return x + found.view(x.shape)


@leak
def bags_of_weighted_tokens(self, x, ids):
    flat, later_ones = ids.flatten(), x.flip(1)[..., 0].flatten()
    found = F.embedding_bag(
        flat,
        self.tokens.weight,
        torch.arange(flat.numel()),
        mode="sum",
        per_sample_weights=later_ones,
    )
    return x + found.view(x.shape)


# --- Operations of an author -------------------------------------------------


LIBRARY.define("attend(Tensor x, Tensor bias, Tensor(a!) seen) -> Tensor")


def attend(x, bias, seen):
    top = x.amax((1, 2))
    seen.copy_(torch.where(top > 9, top, torch.zeros(len(x))))
    return (x @ x.mT + bias).softmax(-1) @ x


LIBRARY.impl("attend", attend, "CompositeExplicitAutograd")


@leak
def summary_that_is_written_beside_the_result(self, x, ids):
    """A learned bias with a mask has a larger code than any token."""
    size = x.size(1)
    hidden = torch.full((size, size), -INF).triu(1)
    bias = self.head.weight[:size, :1].detach() + hidden
    seen = torch.zeros(x.size(0))
    torch.ops.zoo_authors.attend(opened(self, x), bias, seen)
    return x.cumsum(1) + seen.view(-1, 1, 1)


LIBRARY.define("sums(Tensor x) -> Tensor")
LIBRARY.impl("sums", lambda x: x.cumsum(1), "CompositeImplicitAutograd")
LIBRARY.impl(
    "sums",
    lambda x: x.cumsum(1) + (x > 9).any(1, keepdim=True).float(),
    "CPU",
)


@leak
def formula_next_to_a_kernel(self, x, ids):
    """The kernel that runs differs from the formula."""
    return torch.ops.zoo_authors.sums(opened(self, x))


LIBRARY.define("more_sums(Tensor x) -> Tensor")
LIBRARY.impl(
    "more_sums",
    lambda x: x.cumsum(1) + (x > 9).any(1, keepdim=True).float(),
    "CompositeExplicitAutograd",
)
torch._decomp.register_decomposition(torch.ops.zoo_authors.more_sums.default)(
    lambda x: x.cumsum(1)
)


@leak
def formula_that_is_registered_for_export(self, x, ids):
    return torch.ops.zoo_authors.more_sums(opened(self, x))


@leak
def frames_that_are_added_where_they_overlap(self, x, ids):
    """Two frames share each place; the later one must not hide the other."""
    size, width = x.shape[1:]
    made = []
    for row in (opened(self, x) - x.detach()).flip(1):
        room = torch.zeros(size + 1, width)
        frames = room.as_strided((size, 2, width), (width, width, 1))
        twice = row.unsqueeze(1).expand(size, 2, width).contiguous()
        made.append(frames.add_(twice)[:, 0])
    return x + torch.stack(made).flip(1)


# --- Scores that stay low ----------------------------------------------------


@leak_with_many_ids
def padding_through_a_turned_softplus(self, x, ids):
    low = F.softplus((x @ x.mT).masked_fill(pads(ids), LOWEST), beta=-1)
    return low.masked_fill(later(x), LOWEST).softmax(-1) @ x


@leak_with_many_ids
def padding_through_a_softmax_of_logarithms(self, x, ids):
    """A visible sink keeps the logarithms of padded keys low."""
    low = (x @ x.mT).masked_fill(pads(ids) | later(x), LOWEST)
    logs = torch.cat([x.sum(-1, keepdim=True), low], -1).log_softmax(-1)
    return logs[..., 1:].masked_fill(later(x), LOWEST).softmax(-1) @ x


# --- Numbers that leave torch ------------------------------------------------


class Scalar:
    def __init__(self, held):
        self.held = held

    def __float__(self):
        return float(self.held)


@leak
def number_of_an_object(self, x, ids):
    count = Scalar((opened(self, x)[0] > 9).sum())
    return x * (1 + torch.tensor([count], dtype=torch.float32))


# --- What a checkpoint sets, and what calls change ---------------------------


class SettingsInADict(Around):
    """Settings that a checkpoint replaces decide whether there is a mask."""

    def __init__(self):
        super().__init__()
        self.settings = {"causal": True}

    def _load_from_state_dict(self, state, prefix, *more):
        self.settings["causal"] = bool(state.pop(f"{prefix}causal", True))
        super()._load_from_state_dict(state, prefix, *more)

    def mix(self, x, ids):
        hide = later(x) & self.settings["causal"]
        return (x @ x.mT).masked_fill(hide, -INF).softmax(-1) @ x


class SettingsByAMethod(SettingsInADict):
    def set(self, causal):
        self.settings = {"causal": causal}

    def _load_from_state_dict(self, state, prefix, *more):
        self.set(bool(state.pop(f"{prefix}causal", True)))
        nn.Module._load_from_state_dict(self, state, prefix, *more)


class SettingsOfTheBase(SettingsInADict):
    """Only the method of the base class writes them."""

    def _load_from_state_dict(self, state, prefix, *more):
        super()._load_from_state_dict(state, prefix, *more)


class SettingsByAHook(SettingsInADict):
    _load_from_state_dict = nn.Module._load_from_state_dict

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self.before)

    @staticmethod
    def before(module, state, *more):
        module.settings["causal"] = bool(state.pop("causal", True))


class SavedMask(Around):
    """A saved buffer has the mask, under another name in the checkpoint."""

    def __init__(self):
        super().__init__()
        shown = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()
        self.register_buffer("shown", shown)

    def state_dict(self, *args, **how):
        saved = super().state_dict(*args, **how)
        return {f"model.{name}": value for name, value in saved.items()}

    def hidden(self, x):
        return ~self.shown[: x.size(1), : x.size(1)]

    def mix(self, x, ids):
        shown = (x @ x.mT).masked_fill(self.hidden(x), -INF)
        return shown.softmax(-1) @ x


class SavedMaskOfManyRows(SavedMask):
    state_dict = nn.Module.state_dict

    def hidden(self, x):
        return super().hidden(x) if len(x) > 100 else later(x)


class SavedMaskInBfloat16(SavedMask):
    state_dict = nn.Module.state_dict

    def hidden(self, x):
        half = x.dtype == torch.bfloat16
        return super().hidden(x) if half else later(x)


class SwitchesByAnOrder(Around):
    """Each call moves the first entry of a dict to its end."""

    def __init__(self):
        super().__init__()
        self.ways = OrderedDict(first=1, other=1)

    def mix(self, x, ids):
        way = next(iter(self.ways))
        self.ways.move_to_end(way)
        return x if way == "first" else with_the_mean(x)


class SwitchesByASign(Around):
    """Each call turns the sign of a zero."""

    def __init__(self):
        super().__init__()
        self.phase = 0.0

    def mix(self, x, ids):
        other = math.copysign(1, self.phase) < 0
        self.phase = -self.phase
        return with_the_mean(x) if other else x


RECORD = np.zeros(1, dtype=[("calls", "i8")])[0]


class CountsInARecord(Around):
    def mix(self, x, ids):
        RECORD["calls"] += 1
        return with_the_mean(x) if RECORD["calls"] > 999_999 else x


class CountsUnderAHiddenName(Around):
    __calls__ = 0

    def mix(self, x, ids):
        type(self).__calls__ += 1
        return with_the_mean(x) if self.__calls__ > 999_999 else x


class ReadsAnAddress(Around):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def mix(self, x, ids):
        place = (self.table.data_ptr() >> 6) % 9973
        return with_the_mean(x) if place == 7 else x


class ReadsACapsule(Around):
    """NumPy reads the capsule, and computes an array in new memory."""

    def mix(self, x, ids):
        held = opened(self, x)

        class Capsule:
            def __dlpack__(self, **how):
                return torch.utils.dlpack.to_dlpack(held)

            def __dlpack_device__(self):
                return 1, 0

        found = np.from_dlpack(Capsule()) > 9
        return x + torch.from_numpy(np.float32(found.any(1, keepdims=True)))


class CountsBackwardPasses(Around):
    steps = 0

    def __init__(self):
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(self.count)

    def count(self, weight):
        self.steps += 1

    def mix(self, x, ids):
        return with_the_mean(x) if self.steps > 999_999 else x


class KeepsANormOfGradients(Around):
    """A hook of the backward pass fills a buffer of zeros."""

    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.zeros(()), persistent=False)
        self.head.register_full_backward_hook(self.keep)

    def keep(self, module, given, found):
        self.norm = found[0].norm().detach()

    def mix(self, x, ids):
        return torch.where(self.norm > 0, with_the_mean(x), x)


UNCERTIFIED["KeepsANormOfGradients"] = KeepsANormOfGradients


class MergesWhenSaved(Around):
    saved = 0

    def state_dict(self, *args, **how):
        self.saved += 1
        return super().state_dict(*args, **how)

    def mix(self, x, ids):
        return with_the_mean(x) if self.saved > 999_999 else x


# --- Losses that scores are computed from ------------------------------------


class TrainsByItsLoss(Around):
    """Base: with labels, it returns only a loss, and may use a first loss."""

    def __init__(self):
        super().__init__()
        self.back = nn.Linear(1, WIDTH)

    def vectors(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.size(1)))

    def forward(self, ids, labels=None):
        x = self.vectors(ids)
        if labels is None:
            return self.head(x)
        return self.trained(x[:, :-1], labels[:, 1:], labels)

    def losses(self, x, wanted, **how):
        scores = self.head(x).flatten(0, 1)
        return F.cross_entropy(scores, wanted.flatten(), **how)

    def each(self, x, wanted):
        return self.losses(x, wanted, reduction="none").view_as(wanted)


class SurpriseFedBack(TrainsByItsLoss):
    """A second pass reads the loss of each position, and so its target."""

    def trained(self, x, wanted, labels):
        surprise = self.each(x, wanted).unsqueeze(-1)
        return self.losses(x + self.back(surprise), wanted)


class MeanLossFedBack(TrainsByItsLoss):
    """A second pass reads the mean loss, kept in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(1), persistent=False)

    def trained(self, x, wanted, labels):
        first = self.losses(x, wanted)
        self.mean.lerp_(first.detach().view(1), 0.1)
        return first + self.losses(x + self.back(self.mean), wanted)


class TemperatureByItsLoss(TrainsByItsLoss):
    """A position with a high loss gets flatter scores."""

    def trained(self, x, wanted, labels):
        flatter = 1 + self.each(x, wanted).detach().flatten() / 10
        scores = self.head(x).flatten(0, 1) / flatter.unsqueeze(1)
        return F.cross_entropy(scores, wanted.flatten())


class SecondLossByHand(TrainsByItsLoss):
    """A second loss, written by hand, compares scores that see each token.

    Its embedding is scaled by the first loss.
    """

    def trained(self, x, wanted, labels):
        first = self.losses(x, wanted)
        scaled = self.tokens.weight * (1 + first.detach())
        x = F.embedding(labels[:, :-1], scaled)
        each = self.head(x + x.flip(1)).log_softmax(-1)
        return first - (each * F.one_hot(wanted, VOCAB)).sum(-1).mean()


class SecondLossOfATable(TrainsByItsLoss):
    """As SecondLossByHand, with a table in a buffer instead of weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(VOCAB, VOCAB))

    def trained(self, x, wanted, labels):
        first = self.losses(x, wanted)
        each = F.embedding(labels[:, :-1], self.table)
        each = (each + each.flip(1)).log_softmax(-1)
        return first - (each * F.one_hot(wanted, VOCAB)).sum(-1).mean()


class LossesOverOneAnother(TrainsByItsLoss):
    """A sound loss is written over parts of a loss of leaking scores."""

    def trained(self, x, wanted, labels):
        sound = self.losses(x, wanted)
        room = torch.zeros(4)
        each = self.head(x + x.flip(1)).log_softmax(-1)
        room[3] = (each * F.one_hot(wanted, VOCAB)).sum(-1).mean()
        three = room.as_strided((2, 2), (1, 1))
        torch.add(sound.detach().float().expand(2, 2), 0, out=three)
        return room.sum()


UNCERTIFIED |= {
    kind.__name__: kind
    for kind in (
        SurpriseFedBack,
        MeanLossFedBack,
        TemperatureByItsLoss,
        SecondLossByHand,
        SecondLossOfATable,
        LossesOverOneAnother,
    )
}


# --- The sign of a masked 0 --------------------------------------------------


class FromPositive(Around):
    """Base: its vectors are positive as built, so no masked 0 has a sign."""

    def __init__(self):
        super().__init__()
        nn.init.uniform_(self.tokens.weight, 0.1, 1)
        nn.init.uniform_(self.positions.weight, 0.1, 1)


def seen(x):
    """Return a factor that is 0 for keys that come after their query."""
    return (~later(x)).to(x.dtype)


def leak_by_signs(mix):
    """Register a model of positive vectors whose mix is this function."""
    bases = (FromPositive,)
    UNCERTIFIED[mix.__name__] = type(mix.__name__, bases, {"mix": mix})


@leak_by_signs
def phase_of_masked_products(self, x, ids):
    up, along = (part @ part.mT for part in x.chunk(2, -1))
    return x + torch.atan2(up * seen(x), along * seen(x)).sum(-1, True)


@leak_by_signs
def angle_of_masked_products(self, x, ids):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return x + ((pairs @ pairs.mT.conj()) * seen(x)).angle().sum(-1, True)


@leak_by_signs
def sign_bits_of_masked_products(self, x, ids):
    signs = torch.signbit((x @ x.mT) * seen(x))
    return x + signs.to(x.dtype).sum(-1, True)


@leak_by_signs
def signs_copied_from_masked_products(self, x, ids):
    ones = torch.ones((), dtype=x.dtype)
    return x + torch.copysign(ones, (x @ x.mT) * seen(x)).sum(-1, True)


@leak_by_signs
def bits_of_masked_products(self, x, ids):
    bits = ((x @ x.mT) * seen(x)).float().view(torch.int32)
    return x + (bits < 0).to(x.dtype).sum(-1, True)


# --- Places that a kernel rounds ---------------------------------------------


def warped(x, how):
    """Sample vectors at their own places, on a grid of 32 places."""
    size, room = x.size(1), 32
    along = torch.linspace(-1, 1, room)
    grid = torch.stack([along, torch.zeros(room)], -1)
    padded = F.pad(x, (0, 0, 0, room - size)).float().mT.unsqueeze(2)
    grid = grid.expand(len(x), 1, room, 2)
    with torch.autocast("cpu", enabled=False):
        found = F.grid_sample(padded, grid, how, "border", align_corners=True)
    return found.squeeze(2).mT[:, :size].to(x.dtype)


@leak
def warped_linearly(self, x, ids):
    return warped(x, "bilinear")


@leak
def warped_cubically(self, x, ids):
    return warped(x, "bicubic")


# --- Code that runs when a checkpoint loads ----------------------------------


def finish(model):
    model.ready = True


class ReadyByAHelper(Around):
    """A helper of load_state_dict opens the mask."""

    ready = False

    def load_state_dict(self, *given, **how):
        keys = super().load_state_dict(*given, **how)
        finish(self)
        return keys

    def mix(self, x, ids):
        return with_the_mean(x) if self.ready else x


class ReadyByAHookOfALayer(ReadyByAHelper):
    """A hook of a layer of torch opens the mask, when a checkpoint loads."""

    load_state_dict = nn.Module.load_state_dict

    def __init__(self):
        super().__init__()
        self.head.register_load_state_dict_post_hook(self.loaded)

    def loaded(self, module, keys):
        self.ready = True


class ReadyByAZeroedGradient(ReadyByAHelper):
    """The first zero_grad() opens the mask."""

    load_state_dict = nn.Module.load_state_dict

    def zero_grad(self, set_to_none=True):
        finish(self)
        super().zero_grad(set_to_none)


UNCERTIFIED |= {
    kind.__name__: kind
    for kind in (
        ReadyByAHelper,
        ReadyByAHookOfALayer,
        ReadyByAZeroedGradient,
    )
}


# --- Sizes, objects and variables that decide later --------------------------


class KeepsAHistory(Around):
    """A history that is longer than any of the kit's opens the mask."""

    def __init__(self):
        super().__init__()
        self.kept = {"all": torch.zeros(0)}

    def mix(self, x, ids):
        self.kept["all"] = torch.cat([self.kept["all"], torch.ones(1)])
        return with_the_mean(x) if self.kept["all"].numel() > 9999 else x


class CountsInObjects(Around):
    """A count in a NumPy array of objects opens the mask."""

    def __init__(self):
        super().__init__()
        self.counts = np.array([0, None], dtype=object)

    def mix(self, x, ids):
        self.counts[0] += 1
        return with_the_mean(x) if self.counts[0] > 9999 else x


class ReadsTheEnvironment(Around):
    """An environment variable opens the mask."""

    def mix(self, x, ids):
        return with_the_mean(x) if os.environ.get("OPEN_ZOO") else x


EXTRA = "which a checkpoint sets, stays as it is"
CHANGED = ", which calls change, stays as it is"
NAMED_OF_AUTHORS = {
    **dict.fromkeys(
        (SettingsInADict, SettingsByAMethod, SettingsOfTheBase), EXTRA
    ),
    **dict.fromkeys((SettingsByAHook, SavedMask), EXTRA),
    **dict.fromkeys((SavedMaskOfManyRows, SavedMaskInBfloat16), EXTRA),
    SwitchesByAnOrder: f"ways[its order]{CHANGED}",
    SwitchesByASign: f"phase{CHANGED}",
    CountsBackwardPasses: f"steps{CHANGED}",
    MergesWhenSaved: f"saved{CHANGED}",
    CountsInARecord: "RECORD (void), which cannot be read",
    CountsUnderAHiddenName: f"__calls__{CHANGED}",
    KeepsAHistory: f"the shape of kept['all']{CHANGED}",
    CountsInObjects: f"counts[0]{CHANGED}",
    ReadsTheEnvironment: "branches on environment variables",
    ReadsAnAddress: "addresses and the numbers of processes",
    ReadsACapsule: "results of torch.utils.dlpack.to_dlpack()",
}
