"""What the benchmarks do on an accelerator and in half precision.

Without an accelerator: what it would be asked is written down instead.
"""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import competitors, goals, invariants, timing, train_step
from benchmarks.competitors import (
    Competitor,
    build_peers,
    build_styles,
    require_as_eager,
    require_sound,
)
from benchmarks.forward import (
    MATMUL,
    STYLES_RAN,
    Plan,
    Tokens,
    matmul_limit,
    matmul_row,
    measure_forward,
)
from benchmarks.limits import square_product
from benchmarks.peers import PEERS, TorchDecoder, build_peer
from benchmarks.profiling import own_times
from benchmarks.results import Row, Run
from benchmarks.shapes import choose_shape
from benchmarks.timing import CPU, EventClock, clock_for
from benchmarks.train_step import measure_train_step
from shared.config import GPTConfig
from shared.invariants import check_model

CUDA = torch.device("cuda:1")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDE = GPTConfig(65, 1024, n_layer=2, n_head=4, n_embd=128, dropout=0.0)
SMALL = GPTConfig(11, 8, n_layer=1, n_head=2, n_embd=4, dropout=0.0)

# Half precision


class Maskless(TorchDecoder):
    """The same decoder, every position of which sees the whole text."""

    def forward(self, tokens):
        pos = torch.arange(tokens.size(1))
        return self.head(self.encoder(self.wte(tokens) + self.wpe(pos)))


def tokens_of(time):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(65, (2, time), generator=generator)


@pytest.mark.parametrize("time", [64, 256, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_mask_is_seen_in_every_precision(monkeypatch, dtype, time):
    monkeypatch.setitem(PEERS, "torch-encoder", Maskless)
    (peer,), _ = build_peers(["torch-encoder"], WIDE, dtype, CPU)
    with pytest.raises(ValueError, match="torch-encoder sees the future"):
        require_sound(peer, tokens_of(time), 65)


@pytest.mark.parametrize("time", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_models_pass_in_every_precision(dtype, time):
    names = ["transformers", "transformers-eager", "torch-encoder"]
    tokens = tokens_of(time)
    peers, _ = build_peers(names, WIDE, dtype, CPU)
    styles, _ = build_styles(competitors.STYLES, WIDE, tokens, dtype)
    for competitor in (*styles, *peers):
        require_sound(competitor, tokens, 65)


def scores_that_see(seen):
    """A competitor that scores what some other positions' tokens are."""

    def scores(tokens):
        return torch.nn.functional.one_hot(seen(tokens), 65).bfloat16()

    return Competitor("theirs", None, scores, "logits")


@pytest.mark.parametrize(
    "seen",
    [
        lambda t: t.roll(-1, 1),  # the next token
        lambda t: t[:, -1:].expand_as(t),
        lambda t: t.unflatten(1, (-1, 8)).flip(2).flatten(1),  # in parts
    ],
)
def test_a_look_at_one_later_token_is_seen(seen):
    with pytest.raises(ValueError, match="sees the future: tokens from"):
        require_sound(scores_that_see(seen), tokens_of(64), 65)
    require_sound(scores_that_see(lambda t: t), tokens_of(64), 65)


def test_an_accelerators_order_of_sums_is_no_look_ahead():
    ran = itertools.count()

    def scores(tokens):
        exact = torch.nn.functional.one_hot(tokens, 65).bfloat16()
        return exact * (1 + 2**-7 * (next(ran) % 2))

    require_sound(Competitor("a", None, scores, ""), tokens_of(64), 65)


# Clocks


def test_events_are_recorded_on_the_devices_own_stream(monkeypatch):
    recorded = []

    class Event:
        def __init__(self, device, enable_timing):
            assert device == CUDA

        def record(self, stream=None):
            recorded.append(stream)

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return 1.0

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: ("of", device)
    )
    EventClock(CUDA)()
    assert recorded == [("of", CUDA)] * 2


def test_a_clock_waits_for_any_accelerator(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 7.0)
    hpu, mps = torch.device("hpu", 0), torch.device("mps")
    assert [clock_for(d)() for d in (hpu, mps, CPU)] == [7.0] * 3
    assert waited == [hpu, "mps"]


# Limits


def test_an_accelerators_square_is_larger_and_named_so():
    meta = torch.device("meta")
    row, run = matmul_limit(torch.bfloat16, meta)
    assert run().shape == (8192, 8192)
    assert (row.name, row.flops) == ("matmul 8192", 2 * 8192**3)
    row, _ = matmul_limit(torch.bfloat16, CPU)
    assert (row.name, row.flops) == (MATMUL, 2 * 1536**3)
    assert square_product(torch.float32, CPU, 16)().shape == (16, 16)


@pytest.mark.parametrize("name", ["matmul 1536", "matmul 8192"])
def test_the_square_is_found_whatever_its_size(name):
    rows = [Row("own matmuls", [1.0]), Row(name, [2.0], limit=True)]
    assert matmul_row(Run("forward", {}, rows)) is rows[1]
    assert matmul_row(Run("forward", {}, rows[:1])) is None


# Profiles


def event(key, device_type, own, cpu=0.0, annotated=False):
    return SimpleNamespace(
        key=key,
        device_type=device_type,
        is_user_annotation=annotated,
        self_device_time_total=own,
        self_cpu_time_total=cpu,
    )


def test_a_kernels_time_is_not_counted_for_who_launched_it():
    events = [
        event("aten::mm", DeviceType.CPU, 30.0, cpu=2.0),
        event("gemm_kernel", DeviceType.CUDA, 30.0),
        event("copy_kernel", DeviceType.CUDA, 10.0),
        event("my range", DeviceType.CUDA, 40.0, annotated=True),
    ]
    assert own_times(events, accelerator=True) == {
        "gemm_kernel": 30.0,
        "copy_kernel": 10.0,
    }
    assert own_times(events[:1], accelerator=False) == {"aten::mm": 2.0}


# Peers


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x'"),
        RuntimeError("Failed to import transformers:\nno symbol"),
        ModuleNotFoundError("Could not import module 'GPT2LMHeadModel'"),
    ],
)
def test_a_broken_installation_ends_in_one_line(monkeypatch, error):
    def build(config):
        raise error

    monkeypatch.setitem(PEERS, "transformers", build)
    with pytest.raises(ValueError, match="transformers cannot be b") as told:
        build_peers(
            ["transformers"], SMALL, torch.float32, CPU, installed=True
        )
    assert "\n" not in str(told.value)
    assert str(error).split("\n")[0] in str(told.value)


def test_what_is_not_installed_is_no_broken_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError):
        build_peer("transformers", SMALL)


# Measurements


def small_plan(**changes):
    sizes = {"vocab_size": 11, "block_size": 8, "n_layer": 1, "n_embd": 4}
    shape = choose_shape("S1", (1,), (4,), sizes | {"n_head": 1})
    return Plan(shape, rounds=1, **changes)


@pytest.fixture
def _small_limits(monkeypatch):
    monkeypatch.setattr("benchmarks.limits.square_product.__defaults__", (16,))
    monkeypatch.setattr("benchmarks.limits.big_copy.__defaults__", (2**12,))


@pytest.mark.usefixtures("_small_limits")
def test_a_reader_is_told_what_ran_before_its_first_run():
    (run,) = measure_forward(small_plan(peers=()))
    assert STYLES_RAN in run.notes
    run = measure_train_step(small_plan(peers=()))
    assert any(note.startswith("first run:") for note in run.notes)


def test_what_compiling_changes_is_not_trained(monkeypatch):
    whole = train_step.compiled

    def compiled(eager):
        monkeypatch.setattr(torch, "compile", lambda run, **_: run)
        return competitors.replace(
            whole(eager), scores=lambda tokens: eager.scores(tokens) + 0.1
        )

    monkeypatch.setattr(train_step, "compiled", compiled)
    plan = small_plan(compile=True, styles=("annotated",), peers=())
    with pytest.raises(ValueError, match="compiled differs from its eager"):
        measure_train_step(plan)


def test_training_is_compared_with_gradients():
    asked = []

    def scores(tokens):
        asked.append(torch.is_grad_enabled())
        return torch.nn.functional.one_hot(tokens, 65).float()

    one = Competitor("a", None, scores, "logits")
    require_as_eager(one, one, tokens_of(4), grad=True)
    require_as_eager(one, one, tokens_of(4))
    assert asked == [True, True, False, False]


def test_a_single_round_of_checks_has_warmed_up(monkeypatch):
    asked = []

    def check(factory, *, checks=None, **sizes):
        asked.append(checks)
        return check_model(factory, checks=[invariants.QUICK], **sizes)

    monkeypatch.setattr(invariants, "check_model", check)
    invariants.measure_invariants(block_size=4, rounds=1)
    assert asked == [[invariants.QUICK]] * 2 + [None] * 2


@pytest.mark.parametrize(
    ("batch", "time"), [(10**20 - 1, 4), (2**20, 2**20), (1, 2**31)]
)
def test_more_tokens_than_anyone_has_are_refused(batch, time):
    with pytest.raises(ValueError, match=f"^{batch} rows of {time} tokens"):
        Tokens(65, batch, time, CPU)


def test_the_gpus_row_is_what_the_goals_ask_for(monkeypatch):
    plans = []
    monkeypatch.setattr(
        goals, "measure_forward", lambda plan, tell: plans.append(plan) or []
    )
    assert goals.measure_gpu(torch.device("cuda"), 7) == []
    (plan,) = plans
    assert plan == Plan(
        choose_shape("gpt2", (16,), (1024,)),
        torch.bfloat16,
        torch.device("cuda"),
        rounds=7,
        styles=("annotated", "mingpt_style"),
        peers=("transformers", "transformers-eager"),
        compile=True,
    )


# The command


def test_the_manual_names_the_command_that_was_called():
    done = subprocess.run(
        [sys.executable, "-m", "shared.cli", "bench", "forward", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage: python -m shared.cli bench forward" in done.stdout
