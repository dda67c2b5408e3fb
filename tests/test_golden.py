"""What the public originals answered, once, with their own code.

More of them in test_checkpoint.py, read as the files that they save.
"""

import pytest

import annotated
import mingpt_style
from shared.masks import subsequent_mask


def assert_golden(found, expected):
    assert (found - expected).abs().max().item() < 1e-5


def annotated_original(weights, pe, sizes, **parts):
    names = ("vocab_size", "N", "d_model", "d_ff", "h")
    model = annotated.make_model(*(sizes[name] for name in names), **parts)
    assert_golden(model.embed[1].pe[:, :24], pe)
    model.load_state_dict(weights | {"embed.1.pe": model.embed[1].pe})
    return model.eval()


@pytest.mark.parametrize("keep_attn", [False, True])
def test_annotated_transformer(golden, keep_attn):
    weights, expected, sizes = golden("annotated")
    model = annotated_original(weights, expected["pe"], sizes)
    tokens = expected["tokens"]
    attention = model.decoder.layers[0].self_attn
    attention.keep_attn = keep_attn

    hidden = model.decode(tokens, subsequent_mask(tokens.size(1)))
    assert_golden(hidden, expected["decode"])
    assert_golden(model.log_probs(tokens), expected["log_probs"])
    if keep_attn:
        assert_golden(attention.attn, expected["attention.0"])

    log_probs = model.log_probs(tokens[:, :-1])
    loss = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
    loss.backward()
    names = [k for k in expected if k.startswith("grad.")]
    assert len(names) == 2
    for name in names:
        parameter = model.get_parameter(name.removeprefix("grad."))
        assert_golden(parameter.grad, expected[name])


def test_annotated_transformer_in_the_other_style(golden):
    weights, expected, sizes = golden("annotated")
    model = annotated_original(weights, expected["pe"], sizes, max_len=24)
    state = annotated.to_gpt2(model)
    other = mingpt_style.from_gpt2(state, model.config).eval()
    found = other.log_probs(expected["tokens"])
    # the eps of the norms differs: not absorbed, and about this large
    assert (found - expected["log_probs"]).abs().max() < 1e-3
    same = annotated.from_gpt2(state, model.config, norm=annotated.LayerNorm)
    found = same.eval().log_probs(expected["tokens"])
    assert_golden(found, expected["log_probs"])
