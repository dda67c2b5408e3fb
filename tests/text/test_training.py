"""Training: its steps, loss estimates and checkpoints."""

import copy
import errno
import json
import os

import pytest
import torch
import torch.nn.functional as F
from both_styles import STYLES
from torch import nn

from gpt_duet import GPTConfig, mingpt_style
from gpt_duet.names import short_name
from gpt_duet.tokenization.texts import random_batch
from gpt_duet.training.processes import Processes
from gpt_duet.training.recipe import Recipe, generator_for, seed_for
from gpt_duet.training.run_folder import (
    Facts,
    append_log,
    cut_log,
    load_trained,
    open_run,
    read_log,
    save,
)
from gpt_duet.training.trainer import Record, Trainer, TrainingFailed

CONFIG = GPTConfig(
    vocab_size=7, block_size=6, n_layer=2, n_head=2, n_embd=8, dropout=0.2
)
RECIPE = Recipe(steps=12, batch_size=4, eval_interval=5, eval_batches=3)
IDS = torch.arange(300) ** 2 % 7
TRAIN, VAL = IDS[:250], IDS[250:]


def trainer(style=mingpt_style, recipe=RECIPE, config=CONFIG):
    torch.manual_seed(recipe.seed)
    return Trainer(style.build_model(config), TRAIN, VAL, recipe)


def keep(folder, trainer, style=mingpt_style):
    """Save a trainer, and return the folder of the checkpoint."""
    facts = Facts(
        style=short_name(style.__name__), dtype="float32", tokenizer="char",
        characters="abcdefg",
    )  # fmt: skip
    return save(folder, trainer, facts)


def weights(trainer):
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a)


# The recipe ----------------------------------------------------------------


def test_the_rate_rises_and_falls_to_a_tenth():
    recipe = Recipe(steps=2000, lr=1e-3)
    rates = [recipe.lr_at(step) for step in range(1, 2001)]
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert max(rates) == pytest.approx(1e-3, rel=1e-4)
    assert recipe.lr_at(1050) == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == pytest.approx(1e-4)
    assert recipe.lr_at(3000) == rates[-1]  # constant after the last step
    assert Recipe(steps=1).lr_at(1) == pytest.approx(1e-4)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": -2}, "batch_size .* got -2"),
        ({"eval_batches": 1.5}, r"eval_batches .* got 1\.5"),
        ({"lr": 0.0}, r"lr must be a number above 0, got 0\.0"),
        ({"lr": float("nan")}, "lr .* got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, f"seed must be at most {2**63 - 1:,}, got {2**63}"),
    ],
)
def test_an_impossible_recipe_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**setting)


def test_seeds_depend_on_every_word():
    purposes = [("a", 0, 1), ("a", 1, 0), ("b", 0, 1), ("a", 0, 11)]
    seeds = {seed_for(*purpose) for purpose in purposes}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for("a", 0, 1) == seed_for("a", 0, 1)


# Steps ---------------------------------------------------------------------


def test_a_step_is_adamw_on_the_mean_loss(style):
    config = CONFIG.replace(dropout=0.0)
    run = trainer(style, config=config)
    # in float64, because the gradient of a key bias is only rounding noise
    run.model.double()
    mine = copy.deepcopy(run.model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in mine.parameters() if p.dim() > 1],
             "weight_decay": 0.1},  # only matrices decay
            {"params": [p for p in mine.parameters() if p.dim() < 2],
             "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
    )  # fmt: skip
    for step in range(1, 4):
        record = run.take_step()
        x, y = random_batch(TRAIN, 4, 6, generator_for("batch", 0, step))
        loss = F.nll_loss(mine.log_probs(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.lr_at(step)
        optimizer.step()
        assert record.step == run.step == step
        assert record.train_loss == pytest.approx(float(loss.detach()))
    for name, tensor in mine.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor)


def test_an_estimate_is_a_mean_that_leaves_the_model_as_it_was():
    run = trainer()
    run.model.train()
    run.model.transformer.h[0].eval()
    modes = [m.training for m in run.model.modules()]
    before = weights(run)
    losses = run.estimate_losses()
    assert losses.keys() == {"train", "val"}
    assert run.estimate_losses() == losses  # same batches, no dropout
    assert [m.training for m in run.model.modules()] == modes
    assert same(weights(run), before)
    assert all(p.grad is None for p in run.model.parameters())

    run.model.eval()
    for part, ids in (("train", TRAIN), ("val", VAL)):
        drawing = generator_for("eval", 0, part)
        single = []
        for _ in range(3):
            x, y = random_batch(ids, 4, 6, drawing)
            log_probs = run.model.log_probs(x).flatten(0, 1)
            single.append(float(F.nll_loss(log_probs, y.flatten()).detach()))
        assert losses[part] == pytest.approx(sum(single) / 3)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("loss", "loss is nan at step 2"),
        ("gradient", r"norm is (inf|nan) at step 2"),
    ],
)
def test_a_nan_stops_training_before_the_weights_change(broken, message):
    run = trainer()
    run.take_step()
    if broken == "loss":
        with torch.no_grad():
            run.model.transformer.wte.weight[2] = float("nan")
    else:
        weight = run.model.lm_head.weight
        weight.register_hook(lambda grad: grad * float("inf"))
    before = weights(run)
    with pytest.raises(TrainingFailed, match=message):
        run.take_step()
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(weights(run), before, **exactly)
    assert run.step == 1


@pytest.mark.parametrize(
    ("cut", "end", "processes", "message"),
    [
        (6, 256, 1, "256 tokens, 6 for training and 250 for validation"),
        (250, 256, 1, "a window of 6 and its target require 7 in each part"),
        (7, 14, 3, "4 windows cannot be shared evenly by 3 processes"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    cut, end, processes, message
):
    model = mingpt_style.build_model(CONFIG)
    Trainer(model, IDS[:7], IDS[7:14], RECIPE)
    with pytest.raises(ValueError, match=message):
        Trainer(
            model, IDS[:cut], IDS[cut:end], RECIPE, Processes(0, processes)
        )


def test_processes_share_a_batch():
    batch = torch.arange(12).view(6, 2)
    shares = [Processes(rank, 3).share(batch) for rank in range(3)]
    assert torch.cat(shares).equal(batch)
    assert {len(share) for share in shares} == {2}


# Checkpoints ---------------------------------------------------------------


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    run = trainer()
    keep(tmp_path, run)
    run.take_step()

    def crash(*arguments):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(ValueError, match="no space left"):
            keep(tmp_path, run)
    assert open_run(tmp_path)[1].step == 0
    # the next save removes what a killed process has left
    folder = tmp_path / "checkpoints"
    (folder / ".step-00000001.77").mkdir()
    strays = {".DS_Store", "step-00000001.zip"}  # files of other programs
    for name in strays:
        (folder / name).touch()
    keep(tmp_path, run)
    assert open_run(tmp_path)[1].step == 1
    names = {"step-00000000", "step-00000001"} | strays
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize("other", [None, *STYLES])
def test_a_trained_model_is_loaded_in_either_style(tmp_path, style, other):
    run = trainer(style)
    for _ in range(5):
        run.take_step()
    keep(tmp_path, run, style)
    model, tokenizer, saved = load_trained(tmp_path, other)
    assert short_name(type(model).__module__).startswith(
        other or short_name(style.__name__)
    )
    assert tokenizer.decode([0, 6]) == "ag"
    assert saved.step == 5
    run.model.eval()
    tokens = IDS[:6].view(1, 6)
    got, want = model.log_probs(tokens), run.model.log_probs(tokens)
    # the styles differ only in where a norm adds eps
    bound = 1e-6 if other in (None, short_name(style.__name__)) else 1e-2
    assert (got - want).abs().max() < bound


# The log -------------------------------------------------------------------


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    for step in range(1, 6):
        append_log(tmp_path, Record(step, 1.0, 2.0, 3.0))
    append_log(tmp_path, Record(6, 1.0, 2.0, 3.0, 0.9, 0.8))
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "train_lo')  # the process was killed here
    lines = read_log(tmp_path)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.val_loss for line in lines[4:]] == [None, 0.8]
    cut_log(tmp_path, 4)
    text = (tmp_path / "log.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": step, "train_loss": 1, "tokens_per_second": 2, "seconds": 3}
        for step in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    "content", [b"nonsense\n", b'{"step": "1"}\n', b'{"step": 1\n{}\n']
)
def test_a_damaged_log_is_named(tmp_path, content):
    log = tmp_path / "log.jsonl"
    log.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{log} is damaged: "):
        read_log(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "other"}', "\x00\x01"]
)
def test_an_invalid_checkpoint_is_refused(tmp_path, content):
    (keep(tmp_path, trainer()) / "run.json").write_text(content)
    with pytest.raises(ValueError, match="damaged, or not a checkpoint"):
        open_run(tmp_path)
