"""What the public originals answered, once, with their own code."""

import json

import pytest
from safetensors import safe_open

import annotated
import mingpt_style
from shared.config import GPTConfig
from shared.masks import subsequent_mask

TOLERANCE = 1e-5


@pytest.fixture
def golden(sibling):
    def read(name):
        path = sibling / "golden" / f"{name}.safetensors"
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            sizes = {k: json.loads(v) for k, v in file.metadata().items()}
        weights = {
            key.removeprefix("weights."): tensors.pop(key)
            for key in list(tensors)
            if key.startswith("weights.")
        }
        return weights, tensors, sizes

    return read


def assert_golden(found, expected):
    assert (found - expected).abs().max().item() < TOLERANCE


def gpt_config(sizes, **others):
    return GPTConfig(
        sizes["vocab_size"],
        sizes.get("block_size", sizes.get("n_positions")),
        sizes["n_layer"],
        sizes["n_head"],
        sizes["n_embd"],
        **others,
    )


@pytest.mark.parametrize("keep_attn", [False, True])
def test_annotated_transformer(golden, keep_attn):
    weights, expected, sizes = golden("annotated")
    model = annotated.make_model(
        sizes["vocab_size"],
        sizes["N"],
        sizes["d_model"],
        sizes["d_ff"],
        sizes["h"],
    ).eval()
    assert_golden(model.embed[1].pe[:, :24], expected["pe"])
    model.load_state_dict(weights | {"embed.1.pe": model.embed[1].pe})
    tokens = expected["tokens"]
    model.decoder.layers[0].self_attn.keep_attn = keep_attn

    hidden = model.decode(tokens, subsequent_mask(tokens.size(1)))
    assert_golden(hidden, expected["decode"])
    assert_golden(model.log_probs(tokens), expected["log_probs"])
    if keep_attn:
        found = model.decoder.layers[0].self_attn.attn
        assert_golden(found, expected["attention.0"])

    log_probs = model.log_probs(tokens[:, :-1])
    loss = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    names = [k for k in expected if k.startswith("grad.")]
    assert len(names) == 2
    for name in names:
        assert_golden(gradients[name.removeprefix("grad.")], expected[name])


def test_annotated_transformer_in_the_other_style(golden):
    weights, expected, sizes = golden("annotated")
    model = annotated.make_model(
        sizes["vocab_size"],
        sizes["N"],
        sizes["d_model"],
        sizes["d_ff"],
        sizes["h"],
        max_len=24,
    )
    pe = expected["pe"]
    model.load_state_dict(weights | {"embed.1.pe": pe})
    state = annotated.to_gpt2(model)
    other = mingpt_style.from_gpt2(state, model.config).eval()
    found = other.log_probs(expected["tokens"])
    # the eps of the norms differs: not absorbed, and about this large
    assert (found - expected["log_probs"]).abs().max() < 1e-3
    same = annotated.from_gpt2(state, model.config, norm=annotated.LayerNorm)
    found = same.eval().log_probs(expected["tokens"])
    assert_golden(found, expected["log_probs"])


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("mingpt", {}),
        ("nanogpt", {"activation": "gelu", "tie_weights": True}),
    ],
)
def test_mingpt_and_nanogpt(golden, name, others):
    weights, expected, sizes = golden(name)
    config = gpt_config(sizes, **others)
    model = mingpt_style.from_nanogpt(weights, config).eval()
    tokens = expected["tokens"]
    logits, _ = model(tokens)
    assert_golden(logits, expected["logits"])
    if "loss" in expected:
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        assert_golden(loss, expected["loss"])
    other = annotated.from_gpt2(mingpt_style.to_gpt2(model), config).eval()
    assert_golden(other.log_probs(tokens), expected["logits"].log_softmax(-1))


def test_the_names_of_the_originals_are_ours(golden):
    weights, _, sizes = golden("mingpt")
    model = mingpt_style.GPT(gpt_config(sizes))
    model.load_state_dict(weights, strict=True)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_transformers(golden, tie_weights):
    weights, expected, sizes = golden("hf_gpt2")
    config = gpt_config(sizes, tie_weights=tie_weights)
    expected_log_probs = expected["logits"].log_softmax(-1)
    for style in (annotated, mingpt_style):
        model = style.from_gpt2(weights, config).eval()
        found = model.log_probs(expected["tokens"])
        assert_golden(found, expected_log_probs)
