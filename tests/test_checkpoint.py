"""Checkpoints that others made, in both styles, and back again."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

from shared import GPTConfig
from shared.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from shared.checkpoint.config_json import our_config, read_config
from shared.comparison.styles import enlarged_random_weights
from shared.files import new_folder, write_atomically
from shared.protocol import load_style

STYLES = ("annotated", "mingpt_style")
CONFIG = GPTConfig(
    vocab_size=13, block_size=6, n_layer=2, n_head=2, n_embd=8, dropout=0.0
)


def shaken(config=CONFIG):
    return enlarged_random_weights(load_style("mingpt_style"), config, seed=0)


def scratch_state(config=CONFIG):
    """Weights as the post's module names them, drawn at random."""
    C, inner = config.n_embd, config.inner_size
    linears = {
        "attn.key": (C, C),
        "attn.value": (C, C),
        "attn.query": (C, C),
        "attn.proj": (C, C),
        "ff.0": (inner, C),
        "ff.2": (C, inner),
    }
    shapes = {
        "tok_embed.weight": (config.vocab_size, C),
        "pos_embed": (1, config.block_size, C),
        "ln.weight": (C,),
        "ln.bias": (C,),
        "fc.weight": (config.vocab_size, C),
        "fc.bias": (config.vocab_size,),
    }
    for i in range(config.n_layer):
        for name, (rows, columns) in linears.items():
            shapes[f"blocks.{i}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{i}.{name}.bias"] = (rows,)
        for name in ("ln1", "ln2"):
            shapes[f"blocks.{i}.{name}.weight"] = (C,)
            shapes[f"blocks.{i}.{name}.bias"] = (C,)
        shapes[f"blocks.{i}.attn.mask"] = (1, 1, 6, 6)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    copies = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(copies, folder / "model.safetensors")
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
    return folder


def run(checkpoint: Checkpoint, style, tokens):
    model = load_style(style).from_gpt2(checkpoint.state, checkpoint.config)
    with torch.no_grad():
        return model.eval().log_probs(tokens)


@pytest.fixture(scope="module")
def tokens():
    return torch.arange(12).view(2, 6)


# The public originals ------------------------------------------------------


def golden(sibling, folder, name):
    with safe_open(sibling / "golden" / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    weights = {
        key.removeprefix("weights."): tensor
        for key, tensor in tensors.items()
        if key.startswith("weights.")
    }
    return write(folder, weights), tensors


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("name", "options", "title"),
    [
        ("mingpt", {}, "minGPT"),
        ("nanogpt", {}, "nanoGPT"),
        ("gpt_from_scratch", {}, "GPT from Scratch"),
        ("hf_gpt2", {"activation": "gelu_tanh"}, "transformers"),
    ],
)
def test_golden_numbers(sibling, tmp_path, style, name, options, title):
    folder, answers = golden(sibling, tmp_path, name)
    checkpoint = load_checkpoint(folder, n_head=4, **options)
    assert title in checkpoint.told[0]
    assert "n_head 4 (--n-head)" in checkpoint.told[-1]
    want = answers["logits"].log_softmax(-1)
    got = run(checkpoint, style, answers["tokens"])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_the_activation_is_the_layouts_habit(sibling, tmp_path):
    for name, habit in (
        ("mingpt", "gelu_tanh"),
        ("nanogpt", "gelu"),
        ("gpt_from_scratch", "gelu"),
    ):
        folder, _ = golden(sibling, tmp_path / name, name)
        checkpoint = load_checkpoint(folder, n_head=4)
        assert checkpoint.config.activation == habit
        assert f"activation {habit} (its habit)" in checkpoint.told[-1]
        other = load_checkpoint(folder, n_head=4, activation="relu")
        assert other.config.activation == "relu"


# transformers --------------------------------------------------------------


def their_model(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "vocab_size": 13,
        "n_positions": 6,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 8,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = GPT2LMHeadModel(GPT2Config(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def their_logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation_function": "relu", "n_inner": 20},
        {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    ],
)
def test_what_transformers_saves_and_back(tmp_path, tokens, changes):
    from transformers import GPT2LMHeadModel

    theirs = their_model(**changes)
    theirs.save_pretrained(tmp_path / "theirs")
    want = their_logits(theirs, tokens)
    checkpoint = load_checkpoint(tmp_path / "theirs")
    for style in STYLES:
        got = run(checkpoint, style, tokens)
        torch.testing.assert_close(
            got, want.log_softmax(-1), rtol=0, atol=2e-5
        )
        # from the style to the disk, and into transformers again
        model = load_style(style).from_gpt2(
            checkpoint.state, checkpoint.config
        )
        out = tmp_path / style
        save_checkpoint(
            out, load_style(style).to_gpt2(model), checkpoint.config
        )
        again = GPT2LMHeadModel.from_pretrained(out).eval()
        torch.testing.assert_close(
            their_logits(again, tokens), want, rtol=0, atol=2e-5
        )
    assert checkpoint.config.tie_weights is changes.get(
        "tie_word_embeddings", True
    )


@pytest.mark.parametrize("tied", [True, False])
def test_through_nanogpts_layout_and_back_is_exact(tmp_path, tokens, tied):
    from transformers import GPT2LMHeadModel

    theirs = their_model(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    first = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(tmp_path / "nano", first.state, first.config, "nanogpt")
    second = load_checkpoint(tmp_path / "nano")
    assert second.config == first.config
    save_checkpoint(tmp_path / "gpt2", second.state, second.config, "gpt2")
    again, loading = GPT2LMHeadModel.from_pretrained(
        tmp_path / "gpt2", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert their_logits(again.eval(), tokens).equal(
        their_logits(theirs, tokens)
    )


def test_nanogpts_layout_is_mingpt_styles_own_state_dict(tmp_path):
    state = shaken()
    save_checkpoint(tmp_path / "nano", state, CONFIG, "nanogpt")
    model = load_style("mingpt_style").build_model(CONFIG)
    model.load_state_dict(load_file(tmp_path / "nano" / "model.safetensors"))
    back = load_style("mingpt_style").to_gpt2(model)
    assert all(back[name].equal(state[name]) for name in back)


def test_a_model_without_head_is_tied(tmp_path, tokens):
    theirs = their_model()
    theirs.transformer.save_pretrained(tmp_path / "body")
    got = run(load_checkpoint(tmp_path / "body"), "annotated", tokens)
    want = their_logits(theirs, tokens).log_softmax(-1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_dropouts_that_differ_are_told(tmp_path):
    their_model(attn_pdrop=0.2).save_pretrained(tmp_path)
    told = load_checkpoint(tmp_path).told
    assert any("attn_pdrop 0.2" in line for line in told)


# Others' habits ------------------------------------------------------------


def test_what_compiled_and_older_models_leave_in_a_file(tmp_path, tokens):
    state = load_style("mingpt_style").build_model(CONFIG).state_dict()
    plain = load_checkpoint(
        write(tmp_path / "plain", state, our_config(CONFIG))
    )
    odd = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    odd["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 6, 6)
    odd["_orig_mod.transformer.h.1.attn.bias"] = torch.ones(6, 6).bool()
    odd["_orig_mod.transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    found = load_checkpoint(write(tmp_path / "odd", odd, our_config(CONFIG)))
    assert run(found, "annotated", tokens).equal(
        run(plain, "annotated", tokens)
    )


def test_without_biases_they_are_zero(tmp_path, tokens):
    model = load_style("mingpt_style").build_model(CONFIG)
    weights = {k: v for k, v in model.state_dict().items() if "bias" not in k}
    found = load_checkpoint(write(tmp_path, weights), n_head=2)
    with torch.no_grad():
        want = model.eval().log_probs(tokens)
    got = run(found, "mingpt_style", tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    # one bias that is missing is no habit but damage
    damaged = dict(model.state_dict())
    del damaged["transformer.h.1.attn.c_proj.bias"]
    with pytest.raises(ValueError, match=r"missing h\.1\.attn\.c_proj\.bias"):
        load_checkpoint(write(tmp_path, damaged), n_head=2)


def test_a_tied_matrix_that_safetensors_kept_once(tmp_path, tokens):
    config = CONFIG.replace(tie_weights=True, activation="gelu")
    model = load_style("mingpt_style").build_model(config).eval()
    save_model(model, str(tmp_path / "model.safetensors"))
    kept = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in kept) != ("transformer.wte.weight" in kept)
    found = load_checkpoint(tmp_path, n_head=2)
    assert found.config.tie_weights
    with torch.no_grad():
        assert run(found, "mingpt_style", tokens).equal(
            model.log_probs(tokens)
        )


def test_nanogpts_model_args_are_a_config(tmp_path):
    args = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 8,
        "block_size": 6,
        "bias": True,
        "vocab_size": 13,
        "dropout": 0.0,
    }
    state = load_style("mingpt_style").build_model(CONFIG).state_dict()
    config = load_checkpoint(write(tmp_path, state, args)).config
    assert config.n_head == 4
    assert config.dropout == 0.0
    assert config.activation == "gelu_tanh"  # untied: minGPT's


def test_the_posts_layout_in_float64_in_both_styles(tmp_path, tokens):
    state = {k: v.double() for k, v in scratch_state().items()}
    found = load_checkpoint(write(tmp_path, state), n_head=2)
    assert found.config == CONFIG.replace(activation="gelu", dropout=0.1)
    ours, theirs = (run(found, style, tokens) for style in STYLES)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert found.state["lm_head.bias"].equal(state["fc.bias"])


def test_mixed_precision_is_read_at_the_widest(tmp_path):
    state = {k: v.half() for k, v in scratch_state().items()}
    assert {
        t.dtype
        for t in load_checkpoint(
            write(tmp_path, state), n_head=2
        ).state.values()
    } == {torch.float16}
    state["fc.bias"] = state["fc.bias"].bfloat16()
    dtypes = {
        t.dtype
        for t in load_checkpoint(
            write(tmp_path, state), n_head=2
        ).state.values()
    }
    assert dtypes == {torch.float32}


def test_the_file_may_have_another_name(tmp_path):
    write(tmp_path, scratch_state())
    file = tmp_path / "model.safetensors"
    file.rename(tmp_path / "ckpt.safetensors")
    assert load_checkpoint(tmp_path, n_head=2).config.n_layer == 2
    shutil.copy(tmp_path / "ckpt.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"has 2 \.safetensors files"):
        load_checkpoint(tmp_path, n_head=2)


# Padded vocabularies -------------------------------------------------------


def test_padding_of_the_vocabulary_is_left_out():
    config = CONFIG.replace(vocab_size=1024, tie_weights=True)
    state = shaken(config)
    state["lm_head.weight"] = state["wte.weight"]
    found = Checkpoint(state, config, ("x",))
    assert found.for_vocabulary(1024, "t") is found
    cut = found.for_vocabulary(1001, "t")
    assert cut.config.vocab_size == 1001
    assert "23 rows" in cut.told[-1]
    tokens = torch.tensor([[1, 1000]])
    # the same function over the tokens that are there
    want = run(found, "mingpt_style", tokens)[..., :1001].log_softmax(-1)
    got = run(cut, "mingpt_style", tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_vocab", [256, 960, 1025, 2000])
def test_another_vocabulary_is_refused(n_vocab):
    config = CONFIG.replace(vocab_size=1024)
    found = Checkpoint(shaken(config), config, ())
    with pytest.raises(ValueError, match=f"t has {n_vocab} tokens.* 1024"):
        found.for_vocabulary(n_vocab, "t")


# What is refused -----------------------------------------------------------


def test_an_unknown_layout_lists_its_keys(tmp_path):
    write(tmp_path, {f"layer.{i}.w": torch.ones(1) for i in range(9)})
    with pytest.raises(ValueError, match=r"layer\.0\.w, .* and 5 more"):
        load_checkpoint(tmp_path)
    write(tmp_path, {})
    with pytest.raises(ValueError, match="no tensors at all"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(8,), (8, 8), (24, 24)])
def test_attention_of_neither_orientation(tmp_path, shape):
    write(tmp_path, {"h.0.attn.c_attn.weight": torch.ones(shape)})
    with pytest.raises(ValueError, match="neither GPT-2's"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h.0.ln_1.bias": None}, r"missing h\.0\.ln_1\.bias"),
        ({"extra": torch.ones(1)}, "unknown extra"),
        ({"h.5.ln_1.bias": torch.ones(8)}, "n_layer is 2, the weights have 3"),
        ({"ln_f.bias": torch.ones(9)}, r"ln_f\.bias \(9,\) for \(8,\)"),
        ({"wte.weight": None}, r"missing wte\.weight"),
        ({"wpe.weight": torch.ones(6)}, r"wpe\.weight has shape \(6,\)"),
        ({"ln_f.bias": torch.ones(8).int()}, r"ln_f\.bias is int32"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    state = {k: v for k, v in shaken().items() if k not in change}
    state |= {k: v for k, v in change.items() if v is not None}
    write(tmp_path, state, our_config(CONFIG))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tok_embed.weight": None}, r"missing tok_embed\.weight"),
        ({"blocks.1.attn.key.bias": None}, r"missing blocks\.1\.attn\.key"),
        ({"pos_embed": torch.ones(6, 8)}, r"pos_embed has shape \(6, 8\)"),
        ({"pos_embed": torch.ones(2, 6, 8)}, r"\(2, 6, 8\) for \(1, 6, 8\)"),
        ({"extra": torch.ones(1)}, "unknown extra"),
    ],
)
def test_the_posts_tensors_that_do_not_fit(tmp_path, change, message):
    state = {k: v for k, v in scratch_state().items() if k not in change}
    state |= {k: v for k, v in change.items() if v is not None}
    write(tmp_path, state)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, n_head=2)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle ran",))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin", "ckpt.pt", "x.safetensors"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_and_never_run(tmp_path, name, zipped):
    torch.save(Bomb(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="is a pickle, a program that runs"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a pickle"):
        load_checkpoint(tmp_path / name)


def test_a_plain_pickle_is_refused_whatever_its_name(tmp_path):
    for protocol in (2, 3, 4, 5):
        (tmp_path / "model").write_bytes(pickle.dumps({}, protocol))
        with pytest.raises(ValueError, match="is a pickle"):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_a_header_whose_length_looks_like_a_pickle(tmp_path, length):
    file = write(tmp_path, scratch_state()) / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    # a header may be padded with spaces: any length from its own on
    length += 0x10000
    header = content[8:end].ljust(length, b" ")
    file.write_bytes(length.to_bytes(8, "little") + header + content[end:])
    assert load_checkpoint(tmp_path, n_head=2).config.n_layer == 2


def test_damaged_files(tmp_path):
    file = write(tmp_path, scratch_state()) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:4], b"", b"{}" * 50):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, or not"):
            load_checkpoint(tmp_path, n_head=2)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_checkpoint(tmp_path)
    file = write(tmp_path, scratch_state()) / "model.safetensors"
    with pytest.raises(ValueError, match="is a file: give its folder"):
        load_checkpoint(file)


def test_what_weights_do_not_show(tmp_path):
    write(tmp_path / "post", scratch_state())
    with pytest.raises(
        ValueError, match=r"show n_head, .* no config\.json: give --n-head"
    ):
        load_checkpoint(tmp_path / "post")
    write(tmp_path / "gpt2", shaken())
    with pytest.raises(ValueError, match="give --n-head and --activation"):
        load_checkpoint(tmp_path / "gpt2")
    config = json.loads(our_config(CONFIG))
    del config["activation"]
    write(tmp_path / "gpt2", shaken(), config)
    with pytest.raises(ValueError, match=r"show activation, .*nothing about"):
        load_checkpoint(tmp_path / "gpt2")
    found = load_checkpoint(tmp_path / "gpt2", activation="relu")
    assert found.config.activation == "relu"
    with pytest.raises(ValueError, match="n_head is 2, --n-head says 4"):
        load_checkpoint(tmp_path / "gpt2", n_head=4)
    with pytest.raises(ValueError, match="got n_embd=8 and n_head=3"):
        load_checkpoint(tmp_path / "post", n_head=3)


def test_ties_that_are_none(tmp_path):
    config = json.loads(our_config(CONFIG)) | {"tie_weights": True}
    write(tmp_path, shaken(), config)
    with pytest.raises(ValueError, match=r"wte\.weight by up to 0"):
        load_checkpoint(tmp_path)
    state = shaken()
    del state["lm_head.weight"]
    write(tmp_path, state, our_config(CONFIG))
    with pytest.raises(ValueError, match="which is not tied"):
        load_checkpoint(tmp_path)
    wrong = shaken() | {"lm_head.weight": torch.ones(12, 8)}
    write(tmp_path, wrong, config)
    with pytest.raises(ValueError, match=r"\(12, 8\) for \(13, 8\)"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "has"),
    [
        ("vocab_size", 14, 13),
        ("block_size", 7, 6),
        ("n_layer", 3, 2),
        ("n_layer", 10**9, 2),  # too many to look for
        ("n_embd", 10, 8),
        ("n_inner", 31, 32),
    ],
)
def test_sizes_that_are_not_the_weights(tmp_path, field, value, has):
    config = json.loads(our_config(CONFIG)) | {field: value}
    write(tmp_path, shaken(), config)
    message = rf"config\.json says {field} is {value}, the weights have {has}"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


# config.json ---------------------------------------------------------------


@pytest.fixture(scope="module")
def their_config():
    model = their_model()
    return json.loads(model.config.to_json_string())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": ...}, "has no n_head"),
        ({"activation_function": ...}, "has no activation_function"),
        ({"model_type": ...}, "has no model_type"),
        ({"vocab_size": ...}, "has no vocab_size"),
        ({"model_type": "llama"}, "'llama' model"),
        ({"activation_function": "silu"}, "'silu'; known: gelu_new"),
        ({"activation_function": 3}, "activation_function 3"),
        ({"scale_attn_weights": False}, "scale_attn_weights to False"),
        ({"add_cross_attention": True}, "add_cross_attention to True"),
    ],
)
def test_their_configs_that_are_refused(
    tmp_path, their_config, change, message
):
    changed = {k: v for k, v in (their_config | change).items() if v != ...}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "no JSON object"),
        ("{}", "has no vocab_size, block_size, n_layer, n_head, n_embd"),
        (
            our_config(CONFIG).replace("n_inner", "n_iner"),
            "unknown fields: n_iner",
        ),
    ],
)
def test_our_configs_that_are_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "config.json")


@pytest.mark.unhooked
@pytest.mark.parametrize("value", [None, 3, [], {}, "silu"])
def test_values_that_are_no_activation(tmp_path, value):
    config = json.loads(our_config(CONFIG)) | {"activation": value}
    write(tmp_path, shaken(), config)
    with pytest.raises(ValueError, match="activation"):
        load_checkpoint(tmp_path)


@pytest.mark.unhooked
@pytest.mark.parametrize("value", [None, "2", 2.0, 0, True])
def test_values_that_are_no_sizes(tmp_path, value):
    config = json.loads(our_config(CONFIG)) | {"n_layer": value}
    write(tmp_path, shaken(), config)
    with pytest.raises(ValueError, match="n_layer must be"):
        load_checkpoint(tmp_path)


# Writing -------------------------------------------------------------------


def test_a_head_with_a_bias_has_no_place(tmp_path):
    found = load_checkpoint(
        write(tmp_path / "post", scratch_state()), n_head=2
    )
    for layout in ("gpt2", "nanogpt"):
        with pytest.raises(ValueError, match=f"{layout} has no lm_head.bias"):
            save_checkpoint(
                tmp_path / "out", found.state, found.config, layout
            )
    assert not (tmp_path / "out").exists()
    zero = found.state | {"lm_head.bias": torch.zeros(13)}
    save_checkpoint(tmp_path / "out", zero, found.config)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.bias" not in written


def test_only_known_layouts_are_written(tmp_path):
    with pytest.raises(ValueError, match="'scratch'; known: gpt2, nanogpt"):
        save_checkpoint(tmp_path / "out", shaken(), CONFIG, "scratch")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep").write_text("me")
    with pytest.raises(ValueError, match="is not empty"):
        save_checkpoint(tmp_path / "full", shaken(), CONFIG)
    with pytest.raises(ValueError, match="is no folder"):
        save_checkpoint(tmp_path / "full" / "keep", shaken(), CONFIG)
    with pytest.raises(ValueError, match="there is no folder"):
        save_checkpoint(tmp_path / "no" / "where", shaken(), CONFIG)
    assert (tmp_path / "full" / "keep").read_text() == "me"
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", shaken(), CONFIG)
    assert sorted(p.name for p in (tmp_path / "empty").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def fail():
        with new_folder(tmp_path / "out") as beside:
            (beside / "half").write_text("")
            assert not (tmp_path / "out").exists()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_in(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="cannot write in"):
        save_checkpoint(tmp_path / "out", shaken(), CONFIG)
