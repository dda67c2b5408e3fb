"""Checkpoints of other programs are read in both styles and written back."""

import json
import os
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from both_styles import STYLES, changed
from known_gpts import ScratchGPT
from safetensors.torch import load_file, save_file, save_model

from gpt_duet import GPTConfig, mingpt_style
from gpt_duet.agreement import enlarged_random_weights
from gpt_duet.checkpoint import (
    TINY_MODEL,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from gpt_duet.checkpoint.config_json import (
    our_config,
    read_config,
    transformers_config,
)
from gpt_duet.files import new_folder, write_atomically

CONFIG = GPTConfig(
    vocab_size=13, block_size=6, n_layer=2, n_head=2, n_embd=8, dropout=0.0
)
OURS = json.loads(our_config(CONFIG))
TOKENS = torch.arange(12).view(2, 6)


def enlarged(config=CONFIG):
    return enlarged_random_weights(mingpt_style, config, seed=0)


def scratch_state(dtype=torch.float32):
    """Return random weights, under the names that GPT from Scratch uses."""
    state = ScratchGPT(CONFIG).state_dict()
    for i in range(2):
        state[f"blocks.{i}.attn.mask"] = torch.empty(1, 1, 6, 6)
    return {k: torch.randn_like(v).to(dtype) for k, v in state.items()}


def write(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    copies = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(copies, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(checkpoint, style, tokens=TOKENS):
    model = STYLES[style].from_gpt2(checkpoint.state, checkpoint.config)
    with torch.no_grad():
        return model.eval().log_probs(tokens)


def assert_near(found, expected, atol):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def refused(message, folder, **options):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, **options)


# The public originals ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "habit", "title"),
    [
        ("mingpt", "gelu_tanh", "minGPT"),
        ("nanogpt", "gelu", "nanoGPT"),
        ("gpt_from_scratch", "gelu", "GPT from Scratch"),
        ("hf_gpt2", None, "transformers"),
    ],
)
def test_a_checkpoint_has_the_scores_of_its_original(
    golden, tmp_path, name, habit, title
):
    weights, answers, _ = golden(name)
    given = {} if habit else {"activation": "gelu_tanh"}
    found = load_checkpoint(write(tmp_path, weights), n_head=4, **given)
    assert title in found.notes[0]
    assert "n_head 4 (--n-head)" in found.notes[-1]
    tokens, logits = answers["tokens"], answers["logits"]
    for style in STYLES:
        got = run(found, style, tokens)
        assert_near(got, logits.log_softmax(-1), 1e-5)
    if name in ("mingpt", "nanogpt"):
        ours = mingpt_style.from_nanogpt(weights, found.config).eval()
        assert ours.state_dict().keys() == weights.keys()
        assert_near(ours(tokens)[0], logits, 1e-5)
    if habit:
        assert found.config.activation == habit
        assert f"activation {habit} (the layout's default)" in found.notes[-1]
        other = load_checkpoint(tmp_path, n_head=4, activation="relu")
        assert other.config.activation == "relu"


# transformers --------------------------------------------------------------


def their_model(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=13, n_positions=6, n_layer=2, n_head=2, n_embd=8,
        bos_token_id=None, eos_token_id=None, **changes,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def their_logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def read_back(folder):
    """Read a folder with transformers; require that the keys are right."""
    from transformers import GPT2LMHeadModel

    model, loading = GPT2LMHeadModel.from_pretrained(
        folder, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    return their_logits(model.eval())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation_function": "relu", "n_inner": 20},
        {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    ],
)
def test_what_transformers_saves_is_read_and_written_back(tmp_path, changes):
    theirs = their_model(**changes)
    theirs.save_pretrained(tmp_path / "theirs")
    want = their_logits(theirs)
    found = load_checkpoint(tmp_path / "theirs")
    double = found.to(torch.device("cpu"), torch.float64)
    exact = their_logits(theirs.double()).log_softmax(-1)
    tied = changes.get("tie_word_embeddings", True)
    assert found.config.tie_weights is tied
    for name, style in STYLES.items():
        assert_near(run(found, name), want.log_softmax(-1), 2e-5)
        # the tanh GELUs of transformers and torch differ only by rounding
        assert_near(run(replace(found, state=double), name), exact, 1e-10)
        # the style writes to the disk, and transformers reads it
        model = style.from_gpt2(found.state, found.config)
        save_checkpoint(tmp_path / name, style.to_gpt2(model), found.config)
        assert_near(read_back(tmp_path / name), want, 2e-5)
    # the round trip through nanoGPT's layout is exact
    save_checkpoint(tmp_path / "nano", found.state, found.config, "nanogpt")
    second = load_checkpoint(tmp_path / "nano")
    assert second.config == found.config
    save_checkpoint(tmp_path / "gpt2", second.state, second.config, "gpt2")
    assert read_back(tmp_path / "gpt2").equal(want)


# Files as other programs write them ----------------------------------------


def test_masks_and_prefixes_in_a_file_are_ignored(tmp_path):
    state = mingpt_style.build_model(CONFIG).state_dict()
    plain = load_checkpoint(write(tmp_path / "plain", state, OURS))
    odd = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    odd["_orig_mod.transformer.h.1.attn.bias"] = torch.ones(6, 6).bool()
    odd["_orig_mod.transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    found = load_checkpoint(write(tmp_path / "odd", odd, OURS))
    assert run(found, "annotated").equal(run(plain, "annotated"))


def test_a_tied_matrix_that_is_saved_once_is_read(tmp_path):
    config = CONFIG.replace(tie_weights=True, activation="gelu")
    model = mingpt_style.build_model(config).eval()
    save_model(model, str(tmp_path / "model.safetensors"))
    kept = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in kept) != ("transformer.wte.weight" in kept)
    found = load_checkpoint(tmp_path, n_head=2)
    assert found.config.tie_weights
    with torch.no_grad():
        assert run(found, "mingpt_style").equal(model.log_probs(TOKENS))


def test_nanogpts_model_args_are_a_config(tmp_path):
    sizes = ("n_layer", "n_embd", "block_size", "vocab_size")
    args = {name: OURS[name] for name in sizes}
    args |= {"n_head": 4, "bias": True, "dropout": 0.0}
    write(tmp_path, mingpt_style.build_model(CONFIG).state_dict(), args)
    config = load_checkpoint(tmp_path).config
    assert (config.n_head, config.dropout) == (4, 0.0)
    # an untied head, as in minGPT, which has gelu_tanh
    assert config.activation == "gelu_tanh"


@pytest.mark.parametrize("bias", [torch.float16, torch.bfloat16])
def test_mixed_precision_is_read_at_the_widest(tmp_path, bias):
    state = scratch_state(torch.float16)
    state["fc.bias"] = state["fc.bias"].to(bias)
    found = load_checkpoint(write(tmp_path, state), n_head=2)
    widest = torch.promote_types(torch.float16, bias)
    assert {tensor.dtype for tensor in found.state.values()} == {widest}


def test_the_file_may_have_another_name(tmp_path):
    file = write(tmp_path, scratch_state()) / "model.safetensors"
    file.rename(tmp_path / "ckpt.safetensors")
    assert load_checkpoint(tmp_path, n_head=2).config.n_layer == 2
    shutil.copy(tmp_path / "ckpt.safetensors", tmp_path / "b.safetensors")
    refused(r"has 2 \.safetensors files", tmp_path, n_head=2)


def test_only_padding_of_a_vocabulary_is_left_out():
    config = CONFIG.replace(vocab_size=1024, tie_weights=True)
    state = enlarged(config)
    state["lm_head.weight"] = state["wte.weight"]
    found = Checkpoint(state, config, ("x",))
    assert found.for_vocabulary(1024, "t") is found
    cut = found.for_vocabulary(1001, "t")
    assert cut.config.vocab_size == 1001
    assert "23 rows" in cut.notes[-1]
    # the tokens that remain have the same scores
    tokens = torch.tensor([[1, 1000]])
    want = run(found, "mingpt_style", tokens)[..., :1001].log_softmax(-1)
    assert_near(run(cut, "mingpt_style", tokens), want, 1e-5)
    for other in (256, 960, 1025, 2000):
        with pytest.raises(ValueError, match=f"t has {other} tokens.* 1024"):
            found.for_vocabulary(other, "t")


# Refused files -------------------------------------------------------------


FUSED = "h.0.attn.c_attn.weight"
POSTS_KEY, POSTS_FF = "blocks.0.attn.key.weight", "blocks.0.ff.0.weight"


@pytest.mark.parametrize(
    ("state", "change", "message"),
    [
        (dict, {}, "no tensors"),
        (dict, {f"{i}.w": torch.ones(1) for i in range(9)}, r"0\.w, .* and 5"),
        (dict, {FUSED: torch.ones(8)}, "neither GPT-2's"),
        (dict, {FUSED: torch.ones(8, 8)}, "neither GPT-2's"),
        (dict, {FUSED: torch.ones(24, 24)}, "neither GPT-2's"),
        (enlarged, {"h.5.ln_1.bias": torch.ones(8)}, "the weights have 3"),
        (enlarged, {"wte.weight": None}, r"missing wte\.weight"),
        (enlarged, {"wpe.weight": torch.ones(6)}, r"has shape \(6,\)"),
        (enlarged, {"ln_f.bias": torch.ones(8).int()}, r"ln_f\.bias is int32"),
        (enlarged, {"lm_head.weight": None}, "which is not tied"),
        (scratch_state, {"blocks.1.attn.key.bias": None}, "missing h.1.attn"),
        (scratch_state, {POSTS_KEY: torch.ones(8, 7)}, "unknown h.0.attn.k"),
        (scratch_state, {"pos_embed": torch.ones(2, 6, 8)}, r"\(2, 6, 8\)"),
        (scratch_state, {POSTS_FF: torch.ones(1, 2, 3)}, r"\(1, 2, 3\)"),
        (
            enlarged,
            {"wpe.weight": torch.tensor([[torch.nan] * 8] + [[0.0] * 8] * 5)},
            r"model\.safetensors: wpe\.weight holds 8 NaN of 48",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, state, change, message):
    config = OURS if state is enlarged else None
    write(tmp_path, changed(state(), change), config)
    refused(message, tmp_path, n_head=2)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle ran",))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin", "ckpt.pt", "x.safetensors"],
)
def test_a_pickle_is_refused_and_never_run(tmp_path, name):
    file = tmp_path / name
    for zipped in (True, False):
        torch.save(Bomb(), file, _use_new_zipfile_serialization=zipped)
        refused("is a pickle, a program that runs", tmp_path)
        refused("is a pickle", file)
    file.unlink()
    # a pickle of each protocol, under any file name
    for protocol in (2, 3, 4, 5):
        (tmp_path / "model").write_bytes(pickle.dumps({}, protocol))
        refused("is a pickle", tmp_path)


def test_a_damaged_file_is_refused(tmp_path):
    file = write(tmp_path, scratch_state()) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:4], b"", b"{}" * 50):
        file.write_bytes(damaged)
        refused("is damaged, or not", tmp_path, n_head=2)


def test_a_folder_without_weights_is_refused(tmp_path):
    refused("there is no folder", tmp_path / "nowhere")
    refused(r"has no model\.safetensors", tmp_path)
    file = write(tmp_path, scratch_state()) / "model.safetensors"
    refused("is a file: give its folder", file)


def test_settings_that_weights_do_not_show_must_be_given(tmp_path):
    post = write(tmp_path / "post", scratch_state())
    refused(r"show n_head, .* no config\.json with it: give", post)
    refused("got n_embd=8 and n_head=3", post, n_head=3)
    gpt2 = write(tmp_path / "gpt2", enlarged())
    refused("give --n-head", gpt2)
    write(gpt2, enlarged(), changed(OURS, {"activation": None}))
    refused(r"show activation, .*give --activation", gpt2)
    found = load_checkpoint(gpt2, activation="relu")
    assert found.config.activation == "relu"
    refused("n_head is 2, --n-head says 4", gpt2, n_head=4)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 14, "says vocab_size is 14, the weights have 13"),
        ("block_size", 7, "says block_size is 7, the weights have 6"),
        ("n_layer", 3, "says n_layer is 3, the weights have 2"),
        # so many layers that a search would not end
        ("n_layer", 10**9, "have 2"),
        ("n_embd", 10, "says n_embd is 10, the weights have 8"),
        ("n_inner", 31, "says n_inner is 31, the weights have 32"),
        ("tie_weights", True, r"wte\.weight by up to 0"),
        *[("activation", v, "activation") for v in (None, {}, "silu")],
        *[("n_layer", v, "n_layer must be") for v in (None, "2")],
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(
    tmp_path, field, value, message
):
    refused(message, write(tmp_path, enlarged(), OURS | {field: value}))


# config.json ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": None}, "has no n_head"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "llama"}, "'llama' model"),
        ({"activation_function": "silu"}, "'silu'; known: gelu_new"),
        ({"scale_attn_weights": False}, "scale_attn_weights to False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "layer_idx to True"),
        ({"add_cross_attention": True}, "add_cross_attention to True"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "has no vocab_size, block_size, n_layer, n_head, n_embd"),
        (json.dumps(OURS | {"n_iner": 3}), "unknown fields: n_iner"),
    ],
)
def test_an_invalid_config_json_is_refused(tmp_path, change, message):
    if isinstance(change, dict):
        theirs = json.loads(transformers_config(CONFIG))
        change = json.dumps(changed(theirs, change))
    (tmp_path / "config.json").write_text(change)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "config.json")


# Writing -------------------------------------------------------------------


def test_a_head_with_a_bias_is_refused(tmp_path):
    found = load_checkpoint(
        write(tmp_path / "post", scratch_state()), n_head=2
    )
    out = tmp_path / "out"
    for layout in ("gpt2", "nanogpt", "flat"):
        with pytest.raises(ValueError, match=f"{layout} cannot store lm_head"):
            save_checkpoint(out, found.state, found.config, layout)
    assert not out.exists()
    zero = found.state | {"lm_head.bias": torch.zeros(13)}
    save_checkpoint(out, zero, found.config)
    assert "lm_head.bias" not in load_file(out / "model.safetensors")


def read_flat(folder):
    """Read a flat file as a port does: a line of text, then all weights."""
    with (folder / "model.bin").open("rb") as file:
        word, *sizes = file.readline().decode().split()
        numbers = np.frombuffer(file.read(), "<f4")
    return word, sizes, numbers


@pytest.mark.parametrize("tied", [False, True])
def test_the_flat_layout_is_a_line_and_numbers_in_order(tied, tmp_path):
    config = CONFIG.replace(tie_weights=tied, n_inner=20)
    state = enlarged(config)
    save_checkpoint(tmp_path / "flat", state, config, "flat")
    word, sizes, numbers = read_flat(tmp_path / "flat")
    assert word == "gpt-duet-flat"
    assert sizes == ["13", "6", "2", "2", "8", "20", "gelu_tanh", "1e-05"]
    index = json.loads((tmp_path / "flat" / "model.json").read_text())
    assert index["header"].split()[1:] == sizes
    data = (tmp_path / "flat" / "model.bin").read_bytes()
    seen = 0
    for name, where in index["arrays"].items():
        count = np.prod(where["shape"])
        array = np.frombuffer(data, "<f4", count, where["offset"])
        assert (array == numbers[seen : seen + count]).all()
        seen += count
        array = torch.tensor(array).view(where["shape"])
        layers = range(2) if "*" in name else [None]
        for i in layers:
            ours = state.get(name.replace("*", str(i)), state["wte.weight"])
            found = array if i is None else array[i]
            is_linear = "c_" in name and "weight" in name
            assert found.equal(ours.t() if is_linear else ours), name
    assert seen == len(numbers)
    assert len(index["arrays"]) == 17


def test_the_tiny_model_is_small_and_the_same_in_both_layouts(tmp_path):
    for name in ("model.safetensors", "model.bin"):
        assert (TINY_MODEL / name).stat().st_size < 100_000
    found = load_checkpoint(TINY_MODEL)
    sizes = found.config.n_layer, found.config.n_embd, found.config.vocab_size
    assert sizes == (4, 16, 65)
    save_checkpoint(tmp_path / "flat", found.state, found.config, "flat")
    for name in ("model.bin", "model.json"):
        again = (tmp_path / "flat" / name).read_bytes()
        assert (TINY_MODEL / name).read_bytes() == again


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "keep").write_text("me")
    with pytest.raises(ValueError, match="is not empty"):
        save_checkpoint(tmp_path, enlarged(), CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
    with pytest.raises(
        ValueError, match="'scratch'; known: gpt2, nanogpt, flat"
    ):
        save_checkpoint(tmp_path / "out", enlarged(), CONFIG, "scratch")


def test_an_empty_folder_is_filled(tmp_path, monkeypatch):
    replace = os.replace

    # on Windows, a folder cannot be renamed to one that exists
    def as_on_windows(old, new):
        assert not os.path.isdir(new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", as_on_windows)
    save_checkpoint(tmp_path, enlarged(), CONFIG)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors"}
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="cannot write in"):
        save_checkpoint(tmp_path / "out", enlarged(), CONFIG)


def fill(folder):
    with new_folder(folder) as beside:
        (beside / "half").write_text("")
        assert not folder.exists()
        raise RuntimeError("in the middle")


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError, match="in the middle"):
        fill(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
