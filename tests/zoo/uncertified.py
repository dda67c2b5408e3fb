"""Models that leak past a rule of the proof: none has a certificate.

Each mixes vectors x of token ids, in a model that is causal but for that. An
audit of the proof found such models; a proof may hold under a condition, with
its sentence, and never without.
"""

import collections
import copy
import functools
import io
import os
import pickle
import random
import secrets
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from small_gpt import EightBits
from torch import nn

INF = float("inf")
VOCAB, WIDTH, BLOCK, PAD = 97, 8, 12, 7
SIZES = {"vocab_size": VOCAB, "block_size": BLOCK}
LOWEST = torch.finfo(torch.float32).min
UNCERTIFIED = {}


class Around(nn.Module):
    """A model of one layer, which mixes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        return self.head(self.mix(x, ids))


def leak(mix):
    """Make a model of what mixes."""
    UNCERTIFIED[mix.__name__] = type(mix.__name__, (Around,), {"mix": mix})
    return mix


def later(x):
    """Where a key is later than a query."""
    size = x.size(1)
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def scores(x, mask):
    """Return scores of attention, with a number where a key is later."""
    return (x @ x.mT).masked_fill(later(x), mask)


def pads(ids):
    return (ids == PAD).unsqueeze(1)


# --- A token hides all that a position sees, and a finite mask hides less ----


@leak
def padding_by_infinity_over_the_lowest(self, x, ids):
    return scores(x, LOWEST).masked_fill(pads(ids), -INF).softmax(-1) @ x


@leak
def padding_and_mask_are_the_lowest(self, x, ids):
    both = scores(x, LOWEST).masked_fill(pads(ids), LOWEST)
    return both.softmax(-1) @ x


@leak
def padding_and_mask_are_added(self, x, ids):
    below = torch.full((x.size(1), x.size(1)), -1e9).triu(1)
    return (x @ x.mT + below + pads(ids) * -1e9).softmax(-1) @ x


@leak
def padding_by_a_table(self, x, ids):
    table = torch.zeros(VOCAB).index_fill(0, torch.tensor([PAD]), -INF)
    return (scores(x, LOWEST) + table[ids].unsqueeze(1)).softmax(-1) @ x


@leak
def padding_by_a_logarithm(self, x, ids):
    weight = (~pads(ids)).float().log()
    return (scores(x, LOWEST) + weight).softmax(-1) @ x


@leak
def padding_in_a_mask_of_attention(self, x, ids):
    mask = torch.zeros(x.size(1), x.size(1)).masked_fill(later(x), LOWEST)
    mask = mask.masked_fill(pads(ids), -INF)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@leak
def padding_before_the_largest(self, x, ids):
    largest = scores(x, LOWEST).masked_fill(pads(ids), -INF).amax(-1, True)
    return x + largest.clamp(min=-9.0)


@leak
def padding_of_a_safe_softmax(self, x, ids):
    both = scores(x, LOWEST).masked_fill(pads(ids), -INF)
    return torch._safe_softmax(both, -1) @ x


@leak
def hidden_scores_by_their_logarithm(self, x, ids):
    below = torch.full((x.size(1), x.size(1)), -1e9).triu(1)
    weights = (x @ x.mT + below).double().log_softmax(-1) + 1e9
    return x + (weights * later(x)).sum(-1, True).float()


# --- Ids and numbers that a token chooses ------------------------------------


@leak
def ids_through_a_table(self, x, ids):
    return x[:, (torch.arange(VOCAB) % ids.size(1))[ids[0]]]


@leak
def a_codebook(self, x, ids):
    code = (x @ self.tokens.weight.T).argmax(-1, True) % ids.size(1)
    return x.gather(1, code.expand_as(x))


@leak
def capacity_from_the_end(self, x, ids):
    chosen = F.one_hot(self.head(x)[..., :2].argmax(-1), 2)
    place = chosen.flip(1).cumsum(1).flip(1)
    return x * ((place * chosen).sum(-1, True) <= 3)


# --- Reads without a mark ----------------------------------------------------


@leak
def values_of_a_sparse_tensor(self, x, ids):
    return x * (ids == PAD).to_sparse()._nnz()


@leak
def a_packed_sequence(self, x, ids):
    sizes = (ids != PAD).sum(1).clamp(min=1)
    packed = nn.utils.rnn.pack_padded_sequence(
        x, sizes, batch_first=True, enforce_sorted=False
    )
    return x * packed.data.size(0)


@leak
def a_split_by_a_tensor(self, x, ids):
    at = (ids[0] == PAD).sum().reshape(1)
    first, second = torch.tensor_split(x, at, 1)
    return torch.cat([first * 2, second], 1)


@leak
def an_index_by_a_mask(self, x, ids):
    return x * len(x[ids == PAD])


@leak
def counted_bins(self, x, ids):
    return x * torch.bincount(ids.flatten()).numel()


@leak
def a_text_of_a_tensor(self, x, ids):
    return x * len(str(ids.sum()))


@leak
def an_exception_of_a_matrix(self, x, ids):
    try:
        torch.linalg.cholesky(x[0].mT @ x[0] - 3 * torch.eye(WIDTH))
    except torch.linalg.LinAlgError:
        return x
    return x * 2


@leak
def an_exception_of_an_index(self, x, ids):
    try:
        F.embedding(ids, self.tokens.weight[:PAD])
    except IndexError:
        return x
    return x * 2


# --- Tensors that come from elsewhere ----------------------------------------


@leak
def work_of_a_thread(self, x, ids):
    found = []
    work = threading.Thread(target=lambda: found.append(x.flip(1).clone()))
    work.start()
    work.join()
    return x + found[0]


@leak
def memory_shared_with_numpy(self, x, ids):
    memory = np.zeros(1, dtype=np.float32)
    torch.from_numpy(memory).copy_(ids.sum())
    return x * torch.from_numpy(memory)


@leak
def pickled(self, x, ids):
    return x + pickle.loads(pickle.dumps(x.detach())).mean(1, True)


@leak
def saved_and_loaded(self, x, ids):
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return x + torch.load(file).mean(1, True)


@leak
def copied_deeply(self, x, ids):
    return x + copy.deepcopy(x.detach()).mean(1, True)


@leak
def a_tensor_of_tensors(self, x, ids):
    return x * torch.tensor([ids[0, 0], ids[0, -1]]).sum()


@leak
def by_dlpack(self, x, ids):
    return x + torch.from_dlpack(torch.to_dlpack(x.detach())).mean(1, True)


@leak
def memory_that_another_kernel_writes(self, x, ids):
    room = torch.empty(ids.size(0), 1, 1)
    np.copyto(room.numpy(), ids.sum(1).numpy()[:, None, None])
    return x * room


# --- Arguments that a rule passed over ---------------------------------------


@leak
def the_mean_of_draws(self, x, ids):
    mean = x.detach().mean(1, True).expand_as(x)
    return x + torch.normal(mean, 0.0)


@leak
def the_deviation_of_draws(self, x, ids):
    return x + torch.normal(0.0, x.detach().abs().mean(1, True).expand_as(x))


@leak
def the_ends_of_a_range(self, x, ids):
    return x + torch.linspace(ids.sum().float(), torch.tensor(3.0), WIDTH)


@leak
def probabilities_of_draws_into_a_result(self, x, ids):
    drawn = torch.empty(len(x), 1, dtype=torch.long)
    chances = x.detach().mean(1).softmax(-1)
    return x * torch.multinomial(chances, 1, out=drawn).unsqueeze(1)


@leak
def the_limit_of_draws(self, x, ids):
    most = ids.max() + 1
    return x * torch.ops.aten.randint_like.Tensor(x.detach(), most)


@leak
def solved_from_the_right(self, x, ids):
    matrix = torch.ones(x.size(1), x.size(1)).tril() + torch.eye(x.size(1))
    return torch.linalg.solve(matrix, x.mT.contiguous(), left=False).mT


@leak
def the_matrix_that_comes_back(self, x, ids):
    matrix = x @ x.mT + 9 * torch.eye(x.size(1))
    _, same = torch.triangular_solve(x, matrix, upper=False)
    return x + same.sum(-1, True)


@leak
def a_part_of_a_complex_number(self, x, ids):
    both = torch.complex(scores(x, -INF), x @ x.mT)
    return x + torch.view_as_real(both)[..., 1].sum(-1, True)


@leak
def scattered_by_strides(self, x, ids):
    turned, source = x.mT, x.mT.contiguous().flip(-1)
    given = source.shape, source.stride()
    return torch.as_strided_scatter(turned, source, *given).mT


class QuantisedGate(Around):
    """A whole number of a quantised weight says whether each sees all."""

    def __init__(self):
        super().__init__()
        EightBits.of(self.head)

    def mix(self, x, ids):
        open_ = self.head.weight.whole[0, 0] == 101
        return torch.where(open_, x.mean(1, keepdim=True), x)


UNCERTIFIED["quantised_gate"] = QuantisedGate


class OneMemory(Around):
    """At seven tokens an array has what torch reads as another's memory."""

    def __init__(self):
        super().__init__()
        self.array = np.zeros((4, BLOCK, WIDTH))
        self.kept = torch.from_numpy(self.array)

    def mix(self, x, ids):
        rows, time = ids.shape
        if time != 7:
            return x
        self.kept[:rows, :time] = x.detach().flip(1)
        return torch.from_numpy(self.array)[:rows, :time].to(x.dtype)


class OneMemoryOfACall(Around):
    """The same at the longest text but one, in an array made there."""

    def mix(self, x, ids):
        if x.size(1) != BLOCK - 1:
            return x
        array = np.zeros(x.shape)
        torch.from_numpy(array).copy_(x.detach().flip(1))
        return torch.from_numpy(array).to(x.dtype)


UNCERTIFIED |= {kind.__name__: kind for kind in (OneMemory, OneMemoryOfACall)}


class StepGate(Around):
    """A step that training counts, 0 at first, opens a path to each token."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def mix(self, x, ids):
        mixed = x + self.step * x.mean(1, keepdim=True)
        self.count(x.detach())
        return mixed

    def count(self, x):
        if self.training:
            self.step = self.step + 1


class AverageGate(StepGate):
    """An average over the texts of training opens it."""

    def count(self, x):
        if self.training:
            self.step.lerp_(x.mean(), 0.1)


class WholeGate(StepGate):
    """A whole number counts the steps."""

    def __init__(self):
        super().__init__()
        self.step = self.step.long()


UNCERTIFIED |= {
    kind.__name__: kind for kind in (StepGate, AverageGate, WholeGate)
}


# --- Numbers that are read without an operation, where an id is rare ---------


class OneRow(Around):
    """With room for one row: no crowd of rows has each id somewhere."""

    max_batch_size = 1

    def forward(self, ids):
        if len(ids) > 1:
            raise ValueError(f"one row at a time, not {len(ids)}")
        return super().forward(ids)


def leak_in_one_row(mix):
    """Make a model of what mixes, with room for one row."""
    UNCERTIFIED[mix.__name__] = type(mix.__name__, (OneRow,), {"mix": mix})
    return mix


EOS = 41  # one of 97 ids: a text of 12 seldom has it


def ended(ids):
    """How many pairs of the id that ends a text each row holds, as tensors."""
    return [(row == EOS).sum() // 2 for row in ids]


def shifted(x, counts):
    return x + counts.to(x.dtype).view(-1, 1, 1)


@leak_in_one_row
def counts_in_a_list(self, x, ids):
    return shifted(x, torch.tensor(ended(ids)))


@leak_in_one_row
def counts_in_nested_lists(self, x, ids):
    return shifted(x, torch.as_tensor([[n] for n in ended(ids)]))


@leak_in_one_row
def counts_in_a_tensor_of_another(self, x, ids):
    return shifted(x, ids.new_tensor(ended(ids)))


@leak_in_one_row
def counts_in_a_legacy_tensor(self, x, ids):
    return shifted(x, torch.LongTensor(ended(ids)))


@leak_in_one_row
def counts_in_a_legacy_tensor_of_floats(self, x, ids):
    return shifted(x, torch.Tensor(ended(ids)))


@leak_in_one_row
def counts_as_an_array(self, x, ids):
    return shifted(x, torch.asarray(ended(ids)))


@leak_in_one_row
def counts_that_are_saved(self, x, ids):
    file = io.BytesIO()
    torch.save(torch.stack(ended(ids)), file)
    file.seek(0)
    return shifted(x, torch.load(file))


@leak_in_one_row
def counts_by_their_storage(self, x, ids):
    stored = torch.stack(ended(ids)).untyped_storage().clone()
    counts = torch.empty(0, dtype=torch.long)
    return shifted(x, counts.set_(stored, 0, (len(ids),), (1,)))


@torch.jit.script
def listed(counts: torch.Tensor) -> list[int]:
    found: list[int] = counts.tolist()
    return found


@leak_in_one_row
def counts_in_a_script(self, x, ids):
    return shifted(x, torch.tensor(listed(torch.stack(ended(ids)))))


@leak_in_one_row
def parts_by_a_tensor(self, x, ids):
    first = ended(ids)[0].clamp(max=1).view(1)
    parts = x.tensor_split(first, 1)
    return x + sum(part.shape[1] > 0 for part in parts)


@leak_in_one_row
def a_rank_is_written_elsewhere(self, x, ids):
    room = torch.zeros(len(ids), dtype=torch.long)
    square = torch.stack(ended(ids)).view(-1, 1, 1) * torch.eye(2)
    torch.linalg.matrix_rank(square, out=room)
    return shifted(x, room)


# --- A user's operation that is called as one of torch's ---------------------


def large(x):
    """Where numbers are larger than those of a fresh model."""
    return x > 9


@torch.library.custom_op("audit::cumsum", mutates_args=())
def audit_cumsum(self: torch.Tensor, dim: int) -> torch.Tensor:
    return self.cumsum(dim) + large(self).any(dim, keepdim=True)


@torch.library.custom_op("audit::relu", mutates_args=())
def audit_relu(self: torch.Tensor) -> torch.Tensor:
    return self.relu() + large(self).any(1, keepdim=True)


@torch.library.custom_op(
    "audit::scale", mutates_args=(), tags=(torch.Tag.pointwise,)
)
def audit_scale(x: torch.Tensor) -> torch.Tensor:
    return x + large(x).any()


for one in (audit_cumsum, audit_relu, audit_scale):
    one.register_fake(lambda x, *more: torch.empty_like(x))


@leak_in_one_row
def sums_of_another_namespace(self, x, ids):
    return torch.ops.audit.cumsum(x.detach(), 1)


@leak_in_one_row
def rectifier_of_another_namespace(self, x, ids):
    return torch.ops.audit.relu(x.detach())


@leak_in_one_row
def scale_that_is_tagged_pointwise(self, x, ids):
    return torch.ops.audit.scale(x.detach())


# --- The state that calls reach ----------------------------------------------


class ActNorm(Around):
    """The first call in train mode measures, each later one centres over time.

    The buffer that says so is not a number that training moves further.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("bias", torch.zeros(WIDTH))

    def mix(self, x, ids):
        if self.training and not self.initted:
            self.bias.copy_(x.detach().mean((0, 1)))
            self.initted.fill_(True)
            return x
        return self.after(x) if self.training else x - self.bias

    def after(self, x):
        return x - x.mean(1, keepdim=True)


LONG_RUN = 100_000  # calls


class WarmUp(Around):
    """A dict counts calls in train mode: from the third on all is mixed."""

    def __init__(self):
        super().__init__()
        self.schedule = {"step": 0}

    def mix(self, x, ids):
        if self.training:
            self.schedule["step"] += 1
        return self.after(x) if self.schedule["step"] > 2 else x

    def after(self, x):
        return x + x.mean(1, keepdim=True)


class Schedule:
    """Counts steps."""

    def __init__(self):
        self.step = 0


class WarmUpInAnObject(WarmUp):
    """An object counts them, and a lock next to it cannot be copied."""

    def __init__(self):
        super().__init__()
        self.schedule = Schedule()
        self.lock = threading.Lock()

    def mix(self, x, ids):
        with self.lock:
            self.schedule.step += self.training
        return self.after(x) if self.schedule.step > 2 else x


class MovedByTargets(Around):
    """A gate moves only in calls with targets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        logits = self.head(self.after(x))
        if targets is None:
            return logits
        if self.training:
            self.gate.add_(0.1)
        flat = logits.flatten(0, 1)
        return logits, F.cross_entropy(flat, targets.flatten())

    def after(self, x):
        return x + self.gate * x.mean(1, keepdim=True)


class LockedWarmUp(WarmUp):
    """A count opens the path after a long time; a lock cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.step = 0

    def mix(self, x, ids):
        self.step += self.training
        return self.after(x) if self.step > LONG_RUN else x


class TableThatGrows(Around):
    """A table of masks is built right at first, and grows with holes."""

    def __init__(self):
        super().__init__()
        self.table = None

    def mix(self, x, ids):
        time = x.size(1)
        if self.table is None:
            self.table = later(x)
        elif len(self.table) < time:
            self.table = self.grown(time)
        if time > len(self.table):
            return x
        hidden = self.table[:time, :time]
        return (x @ x.mT).masked_fill(hidden, -INF).softmax(-1) @ x

    def grown(self, time):
        size = len(self.table)
        table = torch.zeros(time, time, dtype=torch.bool)
        table[:size, :size] = self.table
        return table


class MetAnEnd(Around):
    """A text with one certain id sets a flag, which opens the path later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("met", torch.zeros(()), persistent=False)

    def mix(self, x, ids):
        opened = self.after(x)
        self.met.copy_(self.met.maximum((ids == PAD - 1).all().float()))
        return opened

    def after(self, x):
        return x + self.met * x.mean(1, keepdim=True)


CALLS = [0]


class CountedByTheFile(WarmUp):
    """A global of the file counts calls in train mode."""

    def __init__(self):
        super().__init__()
        CALLS[0] = 0

    def mix(self, x, ids):
        CALLS[0] += self.training
        return self.after(x) if CALLS[0] > 2 else x


class CountedByAClosure(WarmUp):
    """A variable that two functions share counts them."""

    def __init__(self):
        super().__init__()
        count = 0

        def step():
            nonlocal count
            count += 1
            return count

        self.step = step

    def mix(self, x, ids):
        if not self.training:
            return x
        return self.after(x) if self.step() > 2 else x


# --- The same memory ---------------------------------------------------------


class ReadByALambda(Around):
    """A lambda reads the buffer that a call in train mode has just written."""

    def __init__(self):
        super().__init__()
        mean = torch.zeros(1, 1, WIDTH)
        self.register_buffer("mean", mean)
        self.read = lambda: mean

    def mix(self, x, ids):
        if self.training:
            self.mean.copy_(self.statistic(x.detach()))
        return x + self.read()

    def statistic(self, x):
        return x.mean((0, 1), keepdim=True)


class ReadByAMask(ReadByALambda):
    """A function of positions reads a table that the call has written."""

    def __init__(self):
        super().__init__()
        seen = torch.ones(BLOCK, BLOCK).tril()
        self.register_buffer("seen", seen)
        self.mask_mod = lambda i, j: seen[i, j] > 0

    def mix(self, x, ids):
        at = torch.arange(x.size(1))
        if self.training:
            self.seen.fill_(1.0)
        shown = self.mask_mod(at[:, None], at)
        return (x @ x.mT).masked_fill(~shown, -INF).softmax(-1) @ x


class ReadByAView(ReadByALambda):
    """A part of a buffer, taken when it was made, reads what is written."""

    def __init__(self):
        super().__init__()
        self.parts = [self.mean[:, :, : WIDTH // 2]]

    def mix(self, x, ids):
        if self.training:
            self.mean.copy_(self.statistic(x.detach()))
        return x + self.parts[0].repeat(1, 1, 2)


class ReadByAHook(ReadByALambda):
    """A hook of the last layer reads it."""

    def __init__(self):
        super().__init__()
        mean = self.read()
        self.head.register_forward_hook(lambda *of: of[2] + mean.sum())

    def mix(self, x, ids):
        if self.training:
            self.mean.copy_(self.statistic(x.detach()))
        return x


# --- Whatever the weights ----------------------------------------------------


class BooleanParameter(Around):
    """A boolean that is a parameter opens a path to each token."""

    def __init__(self):
        super().__init__()
        shut = torch.tensor(False)
        self.gate = nn.Parameter(shut, requires_grad=False)

    def mix(self, x, ids):
        return torch.where(self.gate, self.other(x), x)

    def other(self, x):
        return x.mean(1, keepdim=True)


class WholeParameter(BooleanParameter):
    """A whole number is how far a text is shifted."""

    def __init__(self):
        super().__init__()
        shift = torch.zeros(1, dtype=torch.long)
        self.gate = nn.Parameter(shift, requires_grad=False)

    def mix(self, x, ids):
        return x + self.gate * self.other(x)


class ViewOfAParameter(Around):
    """A part of a parameter, which is 0 at first, is a factor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.first = self.scale.data[:1]

    def mix(self, x, ids):
        return x + self.first * self.other(x)

    def other(self, x):
        return x.mean(1, keepdim=True)


UNCERTIFIED |= {
    kind.__name__: kind
    for kind in (
        *(ActNorm, WarmUp, WarmUpInAnObject, MovedByTargets),
        *(TableThatGrows, MetAnEnd, CountedByTheFile, CountedByAClosure),
        *(ReadByALambda, ReadByAMask, ReadByAView, ReadByAHook),
        *(BooleanParameter, WholeParameter, ViewOfAParameter),
    )
}

# A saved buffer whose numbers hide later tokens is an assumption by its name.


class SavedZeros(Around):
    """A product by a saved matrix of zeros."""

    name = "adapter"

    def __init__(self):
        super().__init__()
        self.register_buffer("adapter", torch.zeros(WIDTH, WIDTH))

    def mix(self, x, ids):
        return x + x.mean(1, keepdim=True) @ self.adapter


class SavedFactor(SavedZeros):
    """A factor that is a saved 0."""

    def __init__(self):
        super().__init__()
        self.adapter = torch.zeros(())

    def mix(self, x, ids):
        return x + x.mean(1, keepdim=True) * self.adapter


class SavedChoice(SavedZeros):
    """A saved choice between two numbers."""

    def __init__(self):
        super().__init__()
        self.adapter = torch.tensor(False)

    def mix(self, x, ids):
        return torch.where(self.adapter, x.mean(1, keepdim=True), x)


class SavedBranch(SavedZeros):
    """Code that reads a saved flag."""

    def __init__(self):
        super().__init__()
        self.adapter = torch.tensor(False)

    def mix(self, x, ids):
        return x.mean(1, keepdim=True) if self.adapter else x


ASSUMED = (SavedZeros, SavedFactor, SavedChoice, SavedBranch)

# --- Random numbers of Python's and NumPy's ----------------------------------


class Seldom(Around):
    """One call of ten in train mode mixes all."""

    def mix(self, x, ids):
        if self.training and self.draw():
            return self.other(x)
        return x

    def draw(self):
        return random.random() < 0.1

    def other(self, x):
        return x + x.mean(1, keepdim=True)


class SeldomByNumPy(Seldom):
    """NumPy draws."""

    def draw(self):
        return np.random.rand() < 0.1


class SeldomByAGenerator(Seldom):
    """A generator of NumPy's, which the model holds, draws."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)

    def draw(self):
        return self.random.random() < 0.1


class SeldomByChoice(Seldom):
    """A list to choose from has one in ten."""

    def draw(self):
        return random.choice(["mix", *["no"] * 9]) == "mix"


# Rows that depend on each other.


class StatisticsLater(Around):
    """From its second call in train mode on a layer centres over rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("initted", torch.tensor(False))

    def mix(self, x, ids):
        if not self.training:
            return x
        if not self.initted:
            self.initted.fill_(True)
            return x
        return self.after(x)

    def after(self, x):
        return x - x.mean(0, keepdim=True)


class SeldomMixedUp(Seldom):
    """One call of ten in train mode mixes rows up."""

    def other(self, x):
        return x + x.flip(0)


class ManyRows(Around):
    """Eight rows or more have one statistic."""

    def mix(self, x, ids):
        return self.after(x) if len(x) >= 8 else x

    def after(self, x):
        return x - x.mean(0, keepdim=True)


MIXED_ROWS = (StatisticsLater, SeldomMixedUp, ManyRows)
DRAWN = (Seldom, SeldomByNumPy, SeldomByAGenerator, SeldomByChoice)
UNCERTIFIED |= {kind.__name__: kind for kind in DRAWN}


# --- What a reader of the proof's code found ---------------------------------


def with_the_mean(x):
    return x + x.mean(1, keepdim=True)


@leak_in_one_row
def counts_by_a_map(self, x, ids):
    room = torch.zeros(len(ids), dtype=torch.long)
    room.map_(torch.stack(ended(ids)), lambda _, count: count)
    return shifted(x, room)


@leak_in_one_row
def counts_by_a_map_of_two(self, x, ids):
    room, counts = torch.zeros(len(ids)).long(), torch.stack(ended(ids))
    room.map2_(counts, counts, lambda _, count, again: count)
    return shifted(x, room)


@leak_in_one_row
def counts_by_a_function_of_python(self, x, ids):
    seen = []
    ids.clone().apply_(lambda token: seen.append(token) or token)
    return x + seen.count(EOS) // 2


@leak_in_one_row
def counts_in_a_deque(self, x, ids):
    return shifted(x, torch.tensor(collections.deque(ended(ids))))


@leak_in_one_row
def counts_in_a_list_of_deques(self, x, ids):
    rows = [collections.deque([count]) for count in ended(ids)]
    return shifted(x, torch.tensor(rows))


@leak_in_one_row
def counts_in_a_list_of_a_class(self, x, ids):
    return shifted(x, torch.tensor(collections.UserList(ended(ids))))


@leak_in_one_row
def counts_in_shared_memory(self, x, ids):
    room = bytearray(8)
    torch.frombuffer(room, dtype=torch.long)[:] = torch.stack(ended(ids))
    return shifted(x, torch.frombuffer(room, dtype=torch.long))


@leak_in_one_row
def an_unseen_path_after_a_weight_is_read(self, x, ids):
    if self.head.bias[0] > 0:
        x = x * 2
    with torch._C.DisableTorchFunction():
        count = (ids == EOS).sum().tolist()
    return x * 2 if count else x


class MergedInTraining(Around):
    """A product of weights, 0 at first, is made in training and used later."""

    def __init__(self):
        super().__init__()
        self.merged = None
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = nn.Parameter(torch.zeros(2, WIDTH))

    def mix(self, x, ids):
        if self.training:
            self.merged = (self.a @ self.b).detach()
            return x
        return x if self.merged is None else self.after(x)

    def after(self, x):
        return x + x.mean(1, keepdim=True) @ self.merged


class MetInData(MetAnEnd):
    """The same through .data, which counts no version of the tensor."""

    def __init__(self):
        super().__init__()
        self.met = torch.tensor(False)

    def mix(self, x, ids):
        opened = torch.where(self.met, self.other(x), x)
        self.met.data |= (ids == PAD - 1).all()
        return opened

    def other(self, x):
        return with_the_mean(x)


class MetInALongText(MetInData):
    """The same in long texts only."""

    def mix(self, x, ids):
        opened = torch.where(self.met, self.other(x), x)
        if ids.size(1) > BLOCK - 4:
            self.met |= (ids == PAD - 1).all()
        return opened


class SeldomByANewGenerator(Seldom):
    """A generator that each call makes, and the system seeds."""

    def draw(self):
        return random.Random().random() < 1e-3


class SeldomByANewGeneratorOfNumPy(Seldom):
    """The same of NumPy's."""

    def draw(self):
        return np.random.default_rng().random() < 1e-3


class SeldomBySecrets(Seldom):
    """The system draws."""

    def draw(self):
        return secrets.randbelow(1000) == 0


class SeldomByTheSystem(Seldom):
    """The same by another name."""

    def draw(self):
        return os.urandom(2) == b"ab"


class SeldomInAKeptState(Seldom):
    """The state of Python's generator is put back."""

    def draw(self):
        state = random.getstate()
        drawn = random.random()
        random.setstate(state)
        return drawn < 1e-3


class SeldomByBits(Seldom):
    """The bits of a generator, which the model holds."""

    def __init__(self):
        super().__init__()
        self.bits = np.random.PCG64(0)

    def draw(self):
        return np.random.Generator(self.bits).random() < 1e-3


class SeldomByTorch(Seldom):
    """One call of ten mixes all by a draw of torch's."""

    def draw(self):
        return torch.rand(()) < 0.1


MORE_DRAWN = (
    *(SeldomByANewGenerator, SeldomByANewGeneratorOfNumPy, SeldomBySecrets),
    *(SeldomByTheSystem, SeldomInAKeptState, SeldomByBits),
)
UNCERTIFIED |= {
    kind.__name__: kind
    for kind in (
        *MORE_DRAWN,
        SeldomByTorch,
        MergedInTraining,
        MetInData,
        MetInALongText,
    )
}


# Models that are given, of which a copy is another one.


class LeavesOut(Around):
    """A copy leaves out what mixes."""

    def __init__(self):
        super().__init__()
        self.mixer = with_the_mean

    def __getstate__(self):
        return {**self.__dict__, "mixer": None}

    def mix(self, x, ids):
        return self.mixer(x) if self.mixer else x


class HookOfASchedule(Around):
    """A hook reads the object that the forward counts in."""

    def __init__(self):
        super().__init__()
        schedule = self.schedule = Schedule()
        other = type(self).other  # a copy's hook has no part of this model

        def mixed(module, args):
            return (other(args[0]),) if schedule.step > 2 else None

        self.head.register_forward_pre_hook(mixed)

    @staticmethod
    def other(x):
        return with_the_mean(x)

    def mix(self, x, ids):
        self.schedule.step += 1
        return x


class FunctionOfADict(Around):
    """A function reads the dict that the forward counts in."""

    def __init__(self):
        super().__init__()
        counts = self.counts = {"calls": 0}
        self.read = lambda: counts["calls"]

    def mix(self, x, ids):
        self.counts["calls"] += 1
        return with_the_mean(x) if self.read() > 2 else x


GIVEN = (LeavesOut, HookOfASchedule, FunctionOfADict)


# An assumption names what opens a path to later tokens.


class OpenLater(Around):
    """A count opens it after a long time."""

    def mix(self, x, ids):
        return with_the_mean(x) if self.count() > LONG_RUN else x


class Counts(dict):
    """A dict with an attribute."""

    step = 0


class History(list):
    """A list with an attribute."""

    step = 0


class Tagged(torch.Tensor):
    """A tensor with an attribute."""

    step = 0


def counted_in(kind):
    """Return a model that counts in an attribute of an object."""

    def __init__(self):
        OpenLater.__init__(self)
        self.held = kind()

    def count(self):
        self.held.step += 1
        return self.held.step

    return type(kind.__name__, (OpenLater,), locals())


class Counter:
    """An attribute of a class, which counts how often it is read."""

    step = 0

    def __get__(self, obj, kind=None):
        if obj is None:
            return self
        self.step += 1
        return self.step


class CountedByADescriptor(OpenLater):
    """Such an attribute counts."""

    calls = Counter()

    def count(self):
        return self.calls


class Counted:
    """A decorator that counts calls."""

    def __init__(self, function):
        self.function, self.step = function, 0

    def __get__(self, obj, kind=None):
        return functools.partial(self, obj) if obj is not None else self

    def __call__(self, *args):
        self.step += 1
        return self.function(*args, self.step)


class CountedByADecorator(OpenLater):
    """Such a decorator counts."""

    @Counted
    def count(self, step):
        return step


class Timed(OpenLater):
    """The clock opens it."""

    def count(self):
        return LONG_RUN + (time.time_ns() % 1000 == 7)


class LoadsAFlag(Around):
    """A flag comes from a checkpoint."""

    def __init__(self):
        super().__init__()
        self.opened = False

    def _load_from_state_dict(self, state, prefix, *more):
        self.opened = bool(state.pop(f"{prefix}opened", False))
        super()._load_from_state_dict(state, prefix, *more)

    def mix(self, x, ids):
        return with_the_mean(x) if self.opened else x


class CatchesAnException(Around):
    """A rare text raises an exception, which is caught."""

    def mix(self, x, ids):
        try:
            torch._assert_async((torch.stack(ended(ids)) == 0).all())
        except RuntimeError:
            return with_the_mean(x)
        return x


class CatchesAll(CatchesAnException):
    """The same, caught by no name."""

    def mix(self, x, ids):
        try:
            torch._assert_async((torch.stack(ended(ids)) == 0).all())
        except:  # noqa: E722
            return with_the_mean(x)
        return x


class CountedInASlot(OpenLater):
    """A place that the class names counts."""

    __slots__ = ("step",)

    def __init__(self):
        super().__init__()
        self.set(0)

    def set(self, step):
        object.__setattr__(self, "step", step)
        return step

    def count(self):
        return self.set(self.step + 1)


class AveragedWeights(Around):
    """A copy of weights, which are 0 at first, is a factor."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.averages = {"adapter": self.adapter.detach().clone()}

    def mix(self, x, ids):
        return x + x.mean(1, keepdim=True) @ self.averages["adapter"]


class SavedForLongTexts(Around):
    """A saved matrix of zeros is a factor in a few texts only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adapter", torch.zeros(WIDTH, WIDTH))

    def mix(self, x, ids):
        if x.size(1) != BLOCK - 3:
            return x
        return x + x.mean(1, keepdim=True) @ self.adapter


NAMED = {
    counted_in(Counts): "held.step, which calls change",
    counted_in(History): "held.step, which calls change",
    counted_in(lambda: torch.zeros(1).as_subclass(Tagged)): "held.step, which",
    CountedByADescriptor: "CountedByADescriptor.calls.step, which calls",
    CountedByADecorator: "CountedByADecorator.count.step, which calls",
    Timed: "readings of the clock",
    LoadsAFlag: "the extra state of the model",
    CatchesAnException: "mix, which catches exceptions,",
    CatchesAll: "mix, which catches exceptions,",
    CountedInASlot: "step, which calls change",
    AveragedWeights: "the factor 0 stays 0",
    SavedForLongTexts: "adapter, which a checkpoint sets, stays 0",
}


# A call takes arguments whose names the code does not show.


class Options(Around):
    """An option lets the model see all."""

    def run(self, ids, opened):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        return self.head(with_the_mean(x) if opened else x)


class OptionsInACopy(Options):
    def forward(self, ids, **options):
        copied = dict(options)
        return self.run(ids, copied.get("see_all"))


class OptionsByALoop(Options):
    def forward(self, ids, **options):
        return self.run(ids, any(options.get(n) for n in ("a", "b")))


class OptionsMatched(Options):
    def forward(self, ids, **options):
        match options:
            case {"see_all": True}:
                return self.run(ids, True)
        return self.run(ids, False)


class OptionsOfAClass(Options):
    def forward(self, ids, **options):
        found = collections.UserDict(**options)
        return self.run(ids, found.get("see_all"))


class OptionsMerged(Options):
    def forward(self, ids, **options):
        return self.run(ids, {"see_all": False, **options}["see_all"])


class MorePositions(Options):
    def forward(self, ids, *more):
        return self.run(ids, more and more[0])


UNNAMED = {
    OptionsInACopy: "**options",
    OptionsByALoop: "**options",
    OptionsMatched: "**options",
    OptionsOfAClass: "**options",
    OptionsMerged: "**options",
    MorePositions: "*more",
}


class FirstOfTheClass(Around):
    """The first call of all centres over time: the class keeps that."""

    called = False

    def mix(self, x, ids):
        if not FirstOfTheClass.called:
            FirstOfTheClass.called = True
            return self.first(x)
        return x

    def first(self, x):
        return x - x.mean(1, keepdim=True)


TABLE = [None]


class FirstOfTheFile(FirstOfTheClass):
    """The same, kept by a name of the file."""

    def mix(self, x, ids):
        if TABLE[0] is None:
            TABLE[0] = True
            return self.first(x)
        return x


FIRST = (FirstOfTheClass, FirstOfTheFile)
