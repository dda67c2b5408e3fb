"""What the benchmarks count and conclude; no real time decides a test."""

import io
import itertools
import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import annotated
from benchmarks import limits, memory, profiling, timing
from benchmarks.chart import draw
from benchmarks.competitors import (
    Competitor,
    answer,
    build_peers,
    build_styles,
    compiled,
    parameter_note,
    require_as_eager,
    require_sound,
    scores_of,
    with_log_probs,
)
from benchmarks.forward import COPY, MATMUL, OWN_MATMULS, Tokens
from benchmarks.goals import judge
from benchmarks.growth import Growth, growth
from benchmarks.peers import PEERS, build_peer
from benchmarks.results import (
    Results,
    Row,
    Run,
    changes,
    machine_facts,
    read_results,
    renewed,
)
from benchmarks.shapes import GOALS, choose_shape
from benchmarks.tables import (
    part_of_limit,
    part_of_own,
    show_goals,
    show_results,
)
from benchmarks.timing import CPU, EventClock, Timing, interleave, stopwatch
from benchmarks.train_step import training_step
from mingpt_style import build_model
from shared.config import GPTConfig

# Times


def test_rounds_are_interleaved_and_shuffled():
    calls, begun = [], []
    runs = {
        name: lambda name=name: calls.append(name) or float(len(calls))
        for name in ("a", "b", "c")
    }
    timings = interleave(runs, rounds=20, before=begun.append)
    rounds = [calls[i : i + 3] for i in range(0, 60, 3)]
    assert begun == [*range(20)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert [t.name for t in timings] == ["a", "b", "c"]
    for made in timings:
        assert len(made.seconds) == 20
        for number, r in enumerate(rounds):
            expected = 3 * number + r.index(made.name) + 1
            assert made.seconds[number] == expected


def test_one_slow_round_moves_neither_median_nor_ratio():
    fast = Timing("fast", [1.0, 1.0, 50.0, 1.0, 1.0])
    slow = Timing("slow", [2.0, 2.0, 100.0, 2.0, 2.0])
    assert fast.quartiles == (1.0, 1.0, 1.0)
    assert fast.ratio(slow) == (2.0, 2.0, 2.0)
    assert slow.ratio(fast) == (0.5, 0.5, 0.5)
    assert Timing("once", [3.0]).quartiles == (3.0, 3.0, 3.0)


def test_no_round_starts_after_the_budget(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(now))
    (made,) = interleave({"a": lambda: 1.0}, rounds=9, budget=2.5)
    assert made.seconds == [1.0] * 3
    (made,) = interleave({"a": lambda: 1.0}, rounds=9, budget=0)
    assert made.seconds == [1.0]


def test_quartiles_by_hand():
    assert Timing("a", [5.0, 1.0, 3.0, 2.0, 4.0]).quartiles == (2, 3, 4)
    assert Timing("a", [1.0, 2.0]).quartiles == (1.25, 1.5, 1.75)
    a, b = Timing("a", [1.0, 2.0, 4.0]), Timing("b", [2.0, 2.0, 2.0])
    assert a.ratio(b) == (0.75, 1.0, 1.5)


def test_a_ratio_needs_the_same_rounds():
    with pytest.raises(ValueError, match="2 rounds, b has 1"):
        Timing("a", [1.0, 2.0]).ratio(Timing("b", [1.0]))


class FakeClock:
    """A clock that only work moves on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-9  # to read it takes time, too
        return self.now


def test_a_stopwatch_leaves_the_first_run_out(monkeypatch):
    clock, ran = FakeClock(), itertools.count()
    monkeypatch.setattr(timing, "clock_for", lambda device: clock)

    def work():
        clock.now += 7.0 if next(ran) == 0 else 0.5

    assert stopwatch(work, CPU)() == pytest.approx(0.5)
    assert next(ran) == 2


def test_a_stopwatch_does_not_time_the_setup(monkeypatch):
    clock, events = FakeClock(), []
    monkeypatch.setattr(timing, "clock_for", lambda device: clock)

    def step(name, seconds):
        events.append(name)
        clock.now += seconds

    watch = stopwatch(
        lambda: step("run", 0.25), CPU, setup=lambda: step("setup", 100)
    )
    assert watch() == pytest.approx(0.25)
    assert events == ["setup", "run", "run", "setup", "run"]


def test_what_is_quick_runs_many_times(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "clock_for", lambda device: clock)

    def work():
        clock.now += 2e-6

    assert stopwatch(work, CPU)() == pytest.approx(2e-6, rel=1e-3)


def test_an_event_clock_adds_up_what_the_events_say(monkeypatch):
    made = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing
            self.log = []
            made.append(self)

        def record(self, stream):
            self.log.append("record")

        def synchronize(self):
            self.log.append("synchronize")

        def elapsed_time(self, later):
            assert later.log == ["record", "synchronize"]
            return 250.0  # milliseconds

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", str)
    device = torch.device("cuda")
    assert isinstance(timing.clock_for(device), EventClock)
    clock = EventClock(device)
    assert [clock(), clock()] == [0.25, 0.5]
    assert not isinstance(timing.clock_for(CPU), EventClock)


def test_every_round_has_tokens_of_its_own():
    tokens = Tokens(1000, 2, 50, CPU)
    tokens.draw(0)
    first = tokens.now
    tokens.draw(1)
    assert not torch.equal(first, tokens.now)
    tokens.draw(0)
    assert torch.equal(first, tokens.now)
    assert first.shape == (2, 50)
    assert 0 <= first.min() <= first.max() < 1000


# Work

SMALL = GPTConfig(11, 8, n_layer=2, n_head=2, n_embd=4, dropout=0.0)


def test_operations_by_hand():
    # a token: 2 blocks of 3*16 + 16 + 64 + 64 weights, a head of 11*4
    assert limits.forward_flops(SMALL, 1, 1) == 2 * (2 * 192 + 44) + 4 * 2 * 4
    # scores and their use: 2 products of 3 x 3 x 4 in each of 2 layers
    assert limits.forward_flops(SMALL, 5, 3) == 5 * (
        2 * 3 * (2 * 192 + 44) + 2 * 2 * (2 * 3 * 3 * 4)
    )
    narrow = SMALL.replace(n_inner=6)
    assert limits.forward_flops(narrow, 1, 1) == (
        2 * (2 * (64 + 48) + 44) + 4 * 2 * 4
    )


def test_operations_are_the_formula_of_the_goals():
    for name in GOALS:
        shape = choose_shape(name)
        c, B, T = shape.config, shape.batches[0], shape.times[0]
        L, D, V = c.n_layer, c.n_embd, c.vocab_size
        expected = 2 * B * T * (12 * L * D**2 + V * D) + 4 * L * B * T**2 * D
        assert limits.forward_flops(c, B, T) == expected


@pytest.mark.parametrize("inner", [None, 6])
@pytest.mark.parametrize("style", ["annotated", "mingpt_style"])
def test_torch_counts_the_same_operations(style, inner):
    config = SMALL.replace(n_inner=inner)
    tokens = torch.randint(11, (3, 8))
    (built,), _ = build_styles([style], config, tokens, torch.float32)
    counted = limits.count_flops(lambda: built.scores(tokens))
    assert counted == limits.forward_flops(config, 3, 8)


def test_operations_of_torchs_fused_layer_are_counted():
    (peer,), _ = build_peers(["torch-encoder"], SMALL, torch.float32, CPU)
    tokens = torch.randint(11, (3, 8))
    counted = limits.count_flops(lambda: peer.scores(tokens))
    assert counted == limits.forward_flops(SMALL, 3, 8)
    assert torch.backends.mha.get_fastpath_enabled()


def test_bytes_by_hand():
    # block: 192 weights, biases 12 + 4 + 16 + 4, two norms of 4 + 4
    block = 192 + 36 + 16
    read = 2 * block + 8 + 44  # the last norm, the head
    assert limits.least_bytes(SMALL, 1, 1, 4) == 4 * (read + 4 + 4 + 11)
    assert limits.least_bytes(SMALL, 2, 3, 2) == 2 * (
        read + 6 * 4 + 3 * 4 + 6 * 11
    )
    # keys and values of 5 tokens, 4 wide, in 2 layers
    more = limits.decoding_bytes(SMALL, 1, 5, 4) - limits.least_bytes(
        SMALL, 1, 1, 4
    )
    assert more == 4 * 2 * 5 * 4 * 2


def test_the_bytes_of_the_weights_are_those_of_the_model():
    weights = limits.parameter_count(build_model(SMALL))
    looked_up = (11 + 8) * 4
    ours = limits.least_bytes(SMALL, 1, 1, 1) - 4 - 4 - 11
    assert ours == weights - looked_up


@pytest.mark.parametrize("batch", [1, 3])
def test_own_products_are_all_of_the_formula(batch):
    run = limits.own_products(SMALL, batch, 8, torch.float32, CPU)
    expected = limits.forward_flops(SMALL, batch, 8)
    assert limits.count_flops(run) == expected


def test_what_the_machine_is_measured_with():
    square = limits.square_product(torch.float32, CPU, 16)
    assert limits.count_flops(square) == 2 * 16**3
    copied = limits.big_copy(CPU, 64)()
    assert copied.nbytes == 64
    assert copied.all()
    assert limits.big_read(CPU, 64)() == 16


FRESH_PAGES = """
import resource, torch
from benchmarks.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB, in pages of 4 kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back, kept = faults(), keep_freed_memory()
for _ in range(30):  # at first blocks are put beside old ones
    faults()
print(kept, given_back, faults())
"""


def test_freed_memory_stays_with_the_process():
    told = subprocess.check_output([sys.executable, "-c", FRESH_PAGES])
    kept, before, after = told.decode().split()
    if platform.libc_ver()[0] == "glibc":
        assert kept == "True"
        # huge pages, where there are some, are 512 times as large
        assert int(after) < int(before) / 10
    else:
        assert kept == "False"


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delattr(memory.ctypes, "CDLL")
    assert not memory.keep_freed_memory()


def test_peak_memory_is_what_was_held_at_once():
    a = torch.ones(1000, 100)  # 400 kB

    def run():
        b = a + 1
        c = b * 2
        del b
        return c.sum()

    found = profiling.peak_bytes(run, CPU)
    assert 800_000 <= found < 802_000
    assert 400_000 <= profiling.peak_bytes(lambda: a + 1, CPU) < 401_000


def test_memory_on_an_accelerator_is_what_it_says(monkeypatch):
    module = SimpleNamespace(
        reset_peak_memory_stats=lambda device: None,
        synchronize=lambda device: None,
        memory_allocated=lambda device: 100,
        max_memory_allocated=lambda device: 350,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert profiling.peak_bytes(int, torch.device("cuda")) == 250
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace()
    )
    assert profiling.peak_bytes(int, torch.device("mps")) is None


def test_a_profile_says_where_the_time_goes():
    a = torch.randn(300, 300)
    parts = profiling.time_by_operation(lambda: a @ a + 1, CPU, top=2)
    assert list(parts)[-1] == "others"
    assert len(parts) == 3
    assert sum(parts.values()) == pytest.approx(1)
    assert "aten::mm" in parts


# Competitors


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("tie", [True, False])
def test_a_peer_has_our_parameters_to_one_percent(name, tie):
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    config = choose_shape("S2").config.replace(tie_weights=tie)
    with torch.device("meta"):
        ours = limits.parameter_count(build_model(config))
        theirs = limits.parameter_count(build_peer(name, config))
    assert abs(theirs - ours) <= 0.01 * ours


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("shape", GOALS)
def test_peers_answer_in_shape_and_do_not_look_ahead(name, shape):
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    config = choose_shape(shape).config.replace(
        n_layer=2, vocab_size=65, block_size=32
    )
    (peer,), _ = build_peers([name], config, torch.float32, CPU)
    require_sound(peer, torch.randint(65, (2, 32)), 65)


def test_the_gpus_row_is_sound_and_counted_without_a_gpu():
    """Shapes and counts of the run that only an accelerator can time."""
    shape = choose_shape("gpt2", (16,), (1024,))
    config = shape.config.replace(n_layer=2)
    meta = torch.device("meta")
    tokens = torch.empty(16, 1024, dtype=torch.long, device=meta)
    # transformers' masks read values, which "meta" has not
    peers, _ = build_peers(["torch-encoder"], config, torch.bfloat16, meta)
    with meta:
        theirs = annotated.build_model(config).to(torch.bfloat16).eval()
        model = build_model(config).to(torch.bfloat16).eval()
    styles = (
        Competitor("annotated", theirs, theirs.log_probs, "log-probs"),
        Competitor("ours", model, lambda t: model(t)[0], "logits"),
    )
    for competitor in (*styles, *peers):
        require_sound(competitor, tokens, config.vocab_size)
        counted = limits.count_flops(lambda c=competitor: c.scores(tokens))
        assert counted == limits.forward_flops(config, 16, 1024)
        assert competitor.scores(tokens).dtype == torch.bfloat16


class Answers(nn.Module):
    """A model that answers whatever it is told to."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, tokens):
        return self.answer(tokens)


def one_hot(tokens):
    return nn.functional.one_hot(tokens, 11).float()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda t: one_hot(t)[:, -1], r"\(2, 11\) where \(2, 8, 11\)"),
        (lambda t: "text", "answers str where"),
        (lambda t: one_hot(t).flip(1), "sees the future"),
        (lambda t: one_hot(t) * float("nan"), "sees the future"),
        (lambda t: 1 / 0, "cannot be run: ZeroDivisionError"),
    ],
)
def test_what_is_unsound_is_refused(answer, words):
    model = Answers(answer)
    competitor = Competitor("theirs", model, model, "logits")
    with pytest.raises(ValueError, match=words) as error:
        require_sound(competitor, torch.randint(11, (2, 8)), 11)
    assert str(error.value).startswith("theirs ")
    assert "\n" not in str(error.value)


def test_scores_are_found_in_what_models_answer():
    scores = torch.zeros(1)
    assert scores_of(scores) is scores
    assert scores_of((scores, None)) is scores
    assert scores_of(SimpleNamespace(logits=scores)) is scores


def test_styles_answer_as_their_schools_do():
    tokens = torch.randint(11, (2, 8))
    styles, difference = build_styles(
        ["annotated", "mingpt_style"], SMALL, tokens, torch.float32, own=True
    )
    assert [(s.name, s.gives) for s in styles] == [
        ("annotated", "log-probs"),
        ("mingpt_style", "logits"),
        ("annotated-own", "log-probs"),
    ]
    assert 0 <= difference < 1e-5
    with torch.no_grad():
        a, b, own = (with_log_probs(s).scores(tokens) for s in styles)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert not torch.equal(a, own)


def test_a_hidden_state_as_wide_as_the_vocabulary_is_no_score():
    config = SMALL.replace(vocab_size=4, n_embd=4)
    tokens = torch.randint(4, (2, 8))
    (style,), _ = build_styles(["annotated"], config, tokens, torch.float32)
    assert style.gives == "log-probs"


def test_a_style_is_compiled_in_one_graph(monkeypatch):
    asked = []

    def compile_(run, **how):
        asked.append(how["fullgraph"])
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    style = Competitor("a", None, abs, "logits")
    peer = Competitor("b", None, abs, "logits", style=False)
    assert compiled(style).name == "a compiled"
    assert compiled(peer).compiled
    assert asked == [True, False]


def test_what_compiling_changes_is_refused():
    tokens = torch.randint(11, (2, 8))
    eager = Competitor("a", None, one_hot, "logits")
    wrong = Competitor("b", None, lambda t: one_hot(t) * 1.01, "logits")
    require_as_eager(eager, eager, tokens)
    with pytest.raises(ValueError, match="b differs from its eager self"):
        require_as_eager(wrong, eager, tokens)


def test_a_break_in_a_styles_graph_is_an_error():
    def scores(tokens):
        torch._dynamo.graph_break()
        return tokens

    style = compiled(Competitor("a", None, scores, "logits"))
    with pytest.raises(ValueError, match="a compiled cannot be run") as error:
        answer(style, torch.zeros(1, 1))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("extra", "tie", "told"),
    [
        (0, False, ""),
        (50, False, ""),
        (-32 + 11, False, "-2.1% parameters"),
        (100_000, False, "+10000.0% parameters"),
    ],
)
def test_a_row_says_why_its_parameters_differ(extra, tie, told):
    config = SMALL.replace(tie_weights=tie)
    ours = 10_000 if extra == 50 else 1000
    model = nn.Linear(ours + extra, 1, bias=False)
    competitor = Competitor("x", model, model, "logits")
    assert parameter_note(competitor, config, ours).startswith(told)
    assert bool(told) == bool(parameter_note(competitor, config, ours))


def test_an_untied_head_and_a_fixed_table_are_named():
    config = choose_shape("S2").config
    with torch.device("meta"):
        ours = limits.parameter_count(build_model(config))
        untied = build_model(config.replace(tie_weights=False))
        theirs = annotated.build_model(config)
    note = parameter_note(Competitor("x", untied, abs, ""), config, ours)
    assert note == "+31.0% parameters: its head is not tied to its embedding"
    note = parameter_note(Competitor("x", theirs, abs, ""), config, ours)
    assert note.endswith("not tied, its position table not trained")
    assert parameter_note(Competitor("x", abs, abs, ""), config, 1) == (
        "parameters unknown"
    )


def test_a_training_step_learns():
    tokens = Tokens(11, 2, 9, CPU)
    (style,), _ = build_styles(
        ["mingpt_style"], SMALL, tokens.now[:, :-1], torch.float32
    )
    step = training_step(style, tokens)
    losses = [step() for _ in range(300)]
    assert losses[-1] < losses[0] - 1e-3
    assert all(p.grad is None for p in style.model.parameters())


# Parts of the limit


def make_run(what="forward", rows=(), **setting):
    setting = {"shape": "S1", "batch": 1, "time": 8} | setting
    return Run(what, setting, list(rows), reference="mingpt_style")


def test_parts_of_the_limit_by_hand():
    matmul = Row(MATMUL, [2.0], limit=True, flops=200)  # 100 a second
    copy = Row(COPY, [4.0], limit=True, moved=40)  # 10 a second
    own = Row(OWN_MATMULS, [1.0], limit=True, flops=80)  # 80 a second
    worked = Row("a", [4.0], flops=200, moved=10)
    moved = Row("b", [8.0], flops=200, moved=40)
    run = make_run(rows=[matmul, copy, own, worked, moved])
    assert part_of_limit(run, worked) == 0.5  # 2 s of work in 4
    assert part_of_limit(run, moved) == 0.5  # 4 s of moving in 8
    assert part_of_limit(run, matmul) == 1
    assert part_of_own(run, worked) == 50 / 80
    assert part_of_own(run, own) is None
    assert part_of_limit(make_run(rows=[worked]), worked) is None


# Growth


def test_growth_of_times_that_follow_the_operations():
    flops = [10, 30, 100]
    exact = Growth("a", 1, [1, 2, 4], flops, [1.0, 3.0, 10.0])
    assert exact.exponent == pytest.approx(1)
    assert exact.measured == exact.expected == 10
    square = Growth("a", 1, [1, 2, 4], flops, [1.0, 9.0, 100.0])
    assert square.exponent == pytest.approx(2)


def test_growth_is_over_runs_that_differ_in_time_alone():
    def run(time, seconds, **setting):
        rows = [Row("a", [seconds], flops=time * 10), Row(COPY, [1.0], True)]
        return make_run(rows=rows, time=time, **setting)

    runs = [run(8, 1.0), run(16, 2.0), run(4, 0.4), run(32, 9.0, batch=2)]
    (found,) = growth(runs)
    assert (found.name, found.times) == ("a", [4, 8, 16])
    assert found.seconds == [0.4, 1.0, 2.0]
    assert growth(runs[:2]) == []


# Results

FACTS = {
    "processor": "P",
    "cores": 2,
    "accelerator": "none",
    "system": "S",
    "torch": "2",
}


def results(seconds=(1.0, 1.0, 1.0), facts=FACTS, **setting):
    rows = [
        Row("mingpt_style", list(seconds), flops=10, tokens=4),
        Row(MATMUL, [1.0, 1.0, 1.0], limit=True, flops=5),
    ]
    return Results(dict(facts), [make_run(rows=rows, **setting)])


def test_what_is_saved_is_read(tmp_path):
    path = tmp_path / "a.json"
    results().save(path)
    assert read_results(path) == results()
    assert json.loads(path.read_text())["version"] == 2


def test_the_machine_is_described():
    facts = machine_facts(CPU)
    assert facts["cores"] >= 1
    assert facts["processor"]
    assert facts["accelerator"] == "none"
    assert facts["torch"] == torch.__version__
    assert all(isinstance(v, str | int | float) for v in facts.values())


def broken(**changes):
    row = {"name": "a", "seconds": [1.0]} | changes
    runs = [{"what": "forward", "setting": {}, "rows": [row]}]
    return {"version": 2, "machine": {}, "runs": runs}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "no 'version'"),
        ({}, "no 'version'"),
        ({"version": 0}, "has version 0, this reads version 2"),
        ({"version": 2}, "no 'machine'"),
        ({"version": 2, "machine": {}, "runs": 3}, "int where a list"),
        ({"version": 2, "machine": [], "runs": []}, "list where names"),
        ({"version": 2, "machine": {}, "runs": [{}]}, "no 'rows'"),
        (broken(seconds=[]), "seconds of 'a'"),
        (broken(seconds=[0]), "seconds of 'a'"),
        (broken(seconds=["1"]), "seconds of 'a'"),
        (broken(name=3), "name of a row is 3"),
        (broken(flops="many"), "flops of 'a' is 'many'"),
        (broken(colour="red"), "colour"),
    ],
)
def test_a_file_that_is_no_benchmark_is_refused(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as error:
        read_results(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("now", "tolerance", "slower"),
    [
        ((1.0, 1.0, 1.0), 0.0, False),
        ((1.09, 1.09, 9.0), 0.1, False),  # one slow round is not the median
        ((1.11, 1.11, 1.0), 0.1, True),
        ((0.5, 0.5, 0.5), 0.1, False),
        ((2.0, 2.0, 2.0), 1.5, False),
    ],
)
def test_the_verdict_on_a_change(now, tolerance, slower):
    found = changes(results(), results(now, rounds=7))
    assert [c.row.name for c in found] == ["mingpt_style", MATMUL]
    assert [c.slower(tolerance) for c in found] == [slower, False]


def test_a_change_has_a_spread():
    old, new = results((1.0, 2.0, 3.0)), results((2.0, 4.0, 6.0))
    change = changes(old, new)[0]
    assert (change.low, change.ratio, change.high) == (3 / 2.5, 2, 5 / 1.5)


def test_a_slower_machine_is_not_a_slower_model():
    new = results()
    limit = new.runs[0].rows[1]
    limit.seconds[:] = [9.0] * 3
    assert not any(c.slower(0.1) for c in changes(results(), new))


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (results(facts=FACTS | {"cores": 64}), "cores was 2, here it is 64"),
        (results(facts=FACTS | {"processor": "Q"}), "'P', here it is 'Q'"),
        (results(time=9), "no run of this setting"),
    ],
)
def test_what_cannot_be_compared_is_refused(new, words):
    with pytest.raises(ValueError, match=words):
        changes(results(), new)


def test_another_torch_on_the_same_machine_is_compared_and_named():
    new = results(facts=FACTS | {"torch": "3"})
    assert len(changes(results(), new)) == 2
    assert renewed(results().machine, new.machine) == ["torch was 2, is 3"]
    assert renewed(new.machine, new.machine) == []


# Goals


def goal_results(ours=1.0, theirs=1.1):
    def forward(shape, *rows, **setting):
        setting = {"device": "cpu", "dtype": "float32"} | setting
        return make_run(rows=rows, shape=shape, **setting)

    def row(name, seconds, **facts):
        return Row(name, [seconds] * 3, **facts)

    runs = [
        forward(
            shape,
            row("annotated", 2.0, flops=80),
            row("mingpt_style", ours, flops=80),
            row("transformers", theirs, flops=80),
            *(row(name, 4.0) for name in PEERS if name != "transformers"),
            row(MATMUL, 1.0, limit=True, flops=100),
        )
        for shape in GOALS
    ]
    runs.append(
        forward("S1", row("annotated", 1.0), row("annotated compiled", 1.1))
    )
    runs += [
        forward("S3", row("annotated", t * 1.0, flops=t * t), time=t, n=1)
        for t in (1, 2, 4)
    ]
    runs.append(make_run("construction", [row("mingpt_style", 2.9)]))
    runs.append(make_run("import", [row("annotated", 0.31)]))
    runs.append(
        make_run(
            "generate",
            [
                row("mingpt_style", 1.0),
                row("transformers", 1.2),
                row("mingpt_style @900", 2.0),
                row("mingpt_style @100", 1.5),
            ],
        )
    )
    return Results(dict(FACTS), runs)


def test_the_goals_are_judged():
    found = {g.what: (g.measured, g.reached) for g in judge(goal_results())}
    fastest = "mingpt_style, fastest peer, S1"
    assert found[fastest] == ("1.100 (transformers)", True)
    mean = "mingpt_style, transformers sdpa, mean"
    assert found[mean] == ("1.100 (1.100, 1.100, 1.100)", True)
    part = "mingpt_style, part of the matmul rate, S1"
    assert found[part] == ("80.0%", True)
    eager = "annotated compiled, its eager self, S1"
    assert found[eager] == ("0.909", False)
    assert found["annotated compiled, its eager self, S2"] == ("not run", None)
    growth_ = "annotated, growth with the text"
    told = "operations^0.500 (x 4.0, formula x 16.0)"
    assert found[growth_] == (told, True)
    assert found["mingpt_style, growth with the text"][1] is None
    assert found["construction of mingpt_style"] == ("2.900 s", True)
    assert found["import of annotated"] == ("0.310 s", False)
    assert found["decoding, transformers' generate"] == ("1.200", True)
    assert found["a token at 900, one at 100"] == ("0.750", True)
    on_gpu = "mingpt_style compiled on the GPU, transformers compiled"
    assert found[on_gpu] == ("not run", None)


def test_the_gpus_goals_are_judged():
    rows = [
        Row("mingpt_style", [2.0], flops=80),
        Row("mingpt_style compiled", [1.0]),
        Row("annotated", [2.0]),
        Row("annotated compiled", [0.7]),
        Row("transformers", [2.2]),
        Row("transformers compiled", [1.05]),
        Row(MATMUL, [1.0], limit=True, flops=80),
    ]
    run = make_run(rows=rows, device="cuda", dtype="bfloat16")
    goals = judge(Results({}, [run]))
    assert [(g.measured, g.reached) for g in goals[-5:]] == [
        ("50.0%", None), ("1.100", True), ("1.100", True),
        ("1.500", True), ("1.050", False),
    ]  # fmt: skip
    assert {g.measured for g in goals[:-5]} == {"not run"}


def test_a_goal_that_is_missed_is_said_so():
    found = {g.what: g for g in judge(goal_results(ours=1.25))}
    assert not found["mingpt_style, fastest peer, S1"].reached
    assert not found["mingpt_style, transformers sdpa, mean"].reached
    part = found["mingpt_style, part of the matmul rate, S1"]
    assert (part.measured, part.reached) == ("64.0%", False)


def test_without_measurements_nothing_is_reached():
    goals = judge(Results({}, []))
    assert {g.measured for g in goals} == {"not run"}
    assert {g.reached for g in goals} == {None}


def test_the_table_of_goals_for_a_readme():
    columns = [judge(goal_results()), judge(goal_results(ours=1.25))]
    lines = show_goals(columns, ["1", "2"], markdown=True).splitlines()
    assert lines[:2] == [
        "| what | goal | 1 | 2 |",
        "| --- | --- | --- | --- |",
    ]
    assert lines[2].endswith(
        "| 1.100 (transformers), reached | 0.880 (transformers), missed |"
    )


# Pictures


def printed(shown):
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_a_run_that_was_not_run_says_why():
    run = Run("forward", {"shape": "gpt2"}, not_run="no accelerator")
    assert "not run: no accelerator" in printed(
        show_results(Results({}, [run]))
    )


def test_only_what_does_the_same_work_has_a_ratio():
    rows = [
        Row("mingpt_style", [1.0], tokens=4),
        Row("theirs", [1.5], tokens=4),
        Row("one token", [0.25], tokens=1),
        Row(MATMUL, [7.0], limit=True),
    ]
    lines = printed(show_results(Results({}, [make_run(rows=rows)])))
    shown = {}
    for line in lines.splitlines():  # the table comes before the picture
        shown.setdefault(line[:12].strip(), line)
    assert "1.50" in shown["theirs"]
    assert "0.25" not in shown["one token"]
    assert "7.00" not in shown[MATMUL]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_is_the_same_every_time(tmp_path, kind):
    paths = [tmp_path / f"{n}.{kind}" for n in "ab"]
    for path in paths:
        draw(results(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    start = paths[0].read_bytes()[:100]
    assert b"<?xml" in start if kind == "svg" else b"PNG" in start


def test_a_picture_has_all_bars_and_the_growth(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bars, lines = [], []
    whole_bar, whole_plot = Axes.barh, Axes.plot
    monkeypatch.setattr(
        Axes,
        "barh",
        lambda self, y, width, **k: (
            bars.append(width) or whole_bar(self, y, width, **k)
        ),
    )
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda self, x, y, **k: lines.append(y) or whole_plot(self, x, y, **k),
    )
    draw(goal_results(), tmp_path / "a.svg")
    assert bars.count(1100.0) == 4  # transformers thrice; once compiled
    assert lines == [[1e3, 2e3, 4e3], [1e3, 4e3, 16e3]]


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(Results({}, []), tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
