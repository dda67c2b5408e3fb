"""Compare with a file: a dump from another language, or our recording."""

import json
import re
from itertools import product

import numpy as np
import numpy_gpt2
import ported_llama
import pytest
import torch
from planted_faults import plant
from rows import slow_unless
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_diff_ports import FAULTS, original, port_of
from test_diff_ports import TOKENS as PORT_TOKENS

from gpt_duet import assert_same_values, diff_by_value, record_values
from gpt_duet.comparison.values.pair import run_beside
from gpt_duet.comparison.values.recording import Recording
from gpt_duet.comparison.values.side import Side

pytestmark = pytest.mark.unhooked

IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


@pytest.fixture(scope="module")
def model():
    return original("Written", "eager", torch.float32)


def dump(model, fault="", dtype=np.float32):
    state = {
        name.removeprefix("transformer."): tensor.numpy()
        for name, tensor in model.state_dict().items()
    }
    return numpy_gpt2.forward(state, IDS, 4, fault, dtype)


def by_layers(arrays):
    """Stack the arrays of all layers, as llm.c keeps them."""
    names = dict.fromkeys(n[4:].rpartition("_")[0] for n, _ in arrays[1:-2])
    layered = {
        name: np.stack(
            [a for i in range(2) for n, a in arrays if n[4:] == f"{name}_{i}"]
        )
        for name in names
    }
    return [arrays[0], *layered.items(), *arrays[-2:]]


ARRAYS = ["", "embed", "ln", "q", "scores", "att", "mid", "act", "logits"]
ARRAYS_NAMED = [*product(ARRAYS, ["eager", "sdpa"], [False, True])]


@pytest.mark.parametrize(
    ("fault", "kind", "layered"),
    slow_unless(
        # a fault is tried in one form for each kind; a sound port in all forms
        lambda fault, kind, layered: not fault or (kind == "sdpa") == layered,
        ARRAYS_NAMED,
    ),
)
def test_the_array_is_named(fault, kind, layered, model, tmp_path):
    left = original("Written", kind, torch.float32)
    path, arrays = tmp_path / "dump.npz", dump(model, fault)
    if layered:
        arrays = by_layers(arrays)
    np.savez(path, tokens=IDS, **dict(arrays))
    found = diff_by_value(left, path)
    assert found.same == (not fault), found.sentence
    if fault:
        name = "att" if fault == "scores" else fault
        named = found.parted.right.function
        assert name in named.split("_"), found.sentence
        if fault not in ("embed", "logits"):
            assert found.parted.layer == 1, found.sentence
        assert f"they first differ at {named}" in found.sentence
        assert "expected from " in found.sentence
        assert "no value on the left" not in found.sentence
        assert "transformers/" in found.parted.left.file
        assert found.parted.left.layer == found.parted.layer


def test_a_shared_line_names_its_module(model, tmp_path):
    """Many projections run the same line, so the module is named."""
    np.savez(tmp_path / "dump.npz", tokens=IDS, **dict(dump(model, "mid")))
    sentence = diff_by_value(model, tmp_path / "dump.npz").sentence
    named = r"pytorch_utils.py:\d+ `addmm` \(transformer.h.1.attn.c_proj\)"
    assert re.search(rf"expected from \S+{named}", sentence), sentence


def test_the_vocabulary_of_a_recording_is_that_of_its_scores(model, tmp_path):
    """If a recording declares the vocabulary, a plain function need not."""

    def scores(ids):
        return model.eval()(ids).logits

    arrays = dict(dump(model))
    np.savez(tmp_path / "dump.npz", tokens=IDS, **arrays)
    found = diff_by_value(scores, tmp_path / "dump.npz")
    assert found.same, found.sentence
    wide = list(arrays)[-1]
    arrays[wide] = np.pad(arrays[wide], [(0, 0), (0, 0), (0, 3)])
    np.savez(tmp_path / "wide.npz", tokens=IDS, **arrays)
    with pytest.raises(ValueError, match="--vocab-size"):
        diff_by_value(scores, tmp_path / "wide.npz")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_in_16_bits_hint_at_the_dtype(dtype, model, tmp_path):
    path = tmp_path / "engine.npz"
    other = original("Written", "sdpa", torch.float32)
    if dtype is torch.float32:
        other.transformer.h[1].mlp.act = torch.nn.Tanh()
    with torch.no_grad():
        logits = other.eval().to(dtype)(torch.as_tensor(IDS)).logits.float()
    np.savez(path, tokens=IDS, scores=logits.log_softmax(-1).numpy())
    found = diff_by_value(model, path)
    assert not found.same
    hint = "--dtype bfloat16" in " ".join(found.notes)
    assert hint == (dtype is torch.bfloat16), found
    assert diff_by_value(model, path, dtype=torch.bfloat16).same == hint


def as_in_c(arrays, heads=4):
    """Yield arrays as llm.c has them: no scores above the diagonal."""
    q = array = arrays[0][1]
    for name, array in arrays:
        yield name, array
        parts = (q, array) if "_k_" in name else ()
        q = array
        if parts:
            queries, keys = (
                a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2)
                for a in parts
            )
            scores = queries @ keys.swapaxes(2, 3)
            scores /= np.float32(queries.shape[-1] ** 0.5)
            scores[..., *np.triu_indices(scores.shape[-1], 1)] = 0.125
            yield name.replace("_k_", "_preatt_"), scores
    e = np.exp(array - array.max(-1, keepdims=True))
    yield "999_probs", e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("without", ["nothing", "logits"])
@pytest.mark.parametrize("fault", ["", "q", "att", "act"])
def test_arrays_that_are_unset_above_the_diagonal(
    fault, without, model, tmp_path
):
    path, arrays = tmp_path / "dump.npz", as_in_c(dump(model, fault))
    kept = {n: a for n, a in arrays if without not in n}
    np.savez(path, tokens=IDS, **kept)
    found = diff_by_value(model, path)
    assert found.same == (not fault), found.sentence
    assert not fault or f"_{fault}_1" in found.parted.right.function


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("fault", ["", "q", "att", "scores", "act"])
def test_arrays_in_the_order_of_a_struct(fault, layered, model, tmp_path):
    """In llm.c's struct, the output of attention comes before its scores."""
    left = original("Written", "eager", torch.float32)
    path, arrays = tmp_path / "dump.npz", dump(model, fault)
    arrays = by_layers(arrays) if layered else arrays
    for i, (name, _) in enumerate(arrays):
        if "_y_" in name or name == "y":
            arrays[i - 1], arrays[i] = arrays[i], arrays[i - 1]
    np.savez(path, tokens=IDS, **dict(arrays))
    found = diff_by_value(left, path)
    assert found.same == (not fault), found.sentence
    if fault:
        name = "att" if fault == "scores" else fault
        assert name in found.parted.right.function.split("_"), found.sentence
    said = r"\S*att\S* is computed before \S*y\S* and comes after it in "
    assert re.search(said, " ".join(found.notes)), found.notes


def test_padded_scores_of_as_many_rows_as_layers(model, tmp_path):
    ids = IDS.reshape(2, 6)
    state = {
        name.removeprefix("transformer."): tensor.numpy()
        for name, tensor in model.state_dict().items()
    }
    arrays = by_layers(numpy_gpt2.forward(state, ids, 4))
    name, logits = arrays[-1]
    # 64 is twice the width of a layer
    arrays[-1] = name, np.pad(logits, [(0, 0), (0, 0), (0, 64 - 29)])
    np.savez(tmp_path / "dump.npz", tokens=ids, **dict(arrays))
    assert_same_values(model, tmp_path / "dump.npz")


def test_numpy_counts_as_float64_only_with_such_weights(model):
    """A constant may turn float32 weights into float64, as in picoGPT."""
    state = {
        name.removeprefix("transformer."): tensor.numpy()
        for name, tensor in model.state_dict().items()
    }

    def scores(ids):
        return numpy_gpt2.forward(state, ids, 4)[-1][1].astype(np.float64)

    found = diff_by_value(model, scores, IDS, vocab_size=29)
    assert found.same, found.sentence
    state["ln_f.bias"] = state["ln_f.bias"] + np.float32(1e-3)
    assert not diff_by_value(model, scores, IDS, vocab_size=29).same


def test_names_of_arrays_print_no_escape_codes(model, tmp_path):
    path = tmp_path / "dump.npz"
    arrays = {f"\x1b[31m{name}": array for name, array in dump(model, "q")}
    np.savez(path, tokens=IDS, **arrays)
    shown = str(diff_by_value(model, path, names=("\x1b[2J", "theirs")))
    assert "they first differ at \\x1b[31m" in shown
    assert "\x1b" not in shown


def test_a_recording_of_ours_is_one_function(model, tmp_path):
    path = tmp_path / "reference.safetensors"
    count = record_values(model, IDS[0].tolist(), path)
    with safe_open(path, "np") as file:
        names, metadata = [*file.keys()], file.metadata()
        tokens = file.get_tensor("tokens")
    assert (tokens == IDS).all()
    assert len(names) == count + 1 > 40
    name = next(n for n in names if "layer 1" in n and n.endswith(" ln_2"))
    assert "layer 1 modeling_gpt2.py:" in name
    found = json.loads(metadata[name])
    assert found["layer"] == 1
    assert found["module"] == "transformer.h.1.ln_2"
    assert found["shape"] == [1, 12, 32]
    for kind in ("eager", "sdpa"):
        left = original("Written", kind, torch.float32)
        for sides in ((left, path), (path, left)):
            assert_same_values(*sides)
    left.transformer.h[1].mlp.act = torch.nn.ReLU()
    said = r"they first differ at .* layer 1 .*act"
    with pytest.raises(AssertionError, match=said):
        assert_same_values(left, path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_recording_in_16_bits_is_judged_with_its_rounding(
    dtype, model, tmp_path
):
    path = tmp_path / "half.safetensors"
    record_values(model, IDS[0].tolist(), path, dtype=dtype)
    left = original("Written", "sdpa", torch.float32)
    found = diff_by_value(left, path)
    assert found.same, found.sentence
    assert "cannot distinguish exact GELU from tanh's" in found.sentence
    left.transformer.h[1].mlp.act = torch.nn.Tanh()
    found = diff_by_value(left, path)
    assert found.parted.layer == 1, found.sentence
    if dtype is torch.float16:
        assert "act" in found.parted.right.function


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((1, 2, 4))}, "no array 'tokens'"),
        ({"tokens": np.ones(3), "x": np.ones((3, 29))}, "must be ids"),
        ({"tokens": np.arange(3)}, "no arrays of floating numbers"),
        (
            {"tokens": np.arange(3), "x": np.ones(3)},
            "no scores: .* 1 x 3 x 29",
        ),
        ({"tokens": np.array([99]), "x": np.ones((1, 29))}, "99 is not in"),
    ],
    ids=str,
)
def test_a_bad_file_is_one_line(arrays, words, model, tmp_path):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=words) as raised:
        diff_by_value(model, tmp_path / "bad.npz")
    assert "\n" not in str(raised.value)
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match="cannot be read"):
        diff_by_value(model, tmp_path / "bad.safetensors")


@pytest.mark.parametrize("fault", ["", "q", "att", "act", "logits"])
def test_two_recordings_are_compared(fault, model, tmp_path):
    """Compare a NumPy dump with torch's recording, then with a sound dump."""
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.npz"
    record_values(model, IDS[0].tolist(), ours)
    np.savez(theirs, tokens=IDS, **dict(dump(model, fault)))
    np.savez(tmp_path / "sound.npz", tokens=IDS, **dict(dump(model)))
    for left in (ours, tmp_path / "sound.npz"):
        found = diff_by_value(left, theirs)
        assert found.same == (not fault), found.sentence
        if fault:
            named = found.parted.right.function
            assert fault in named.split("_"), found.sentence
            assert f"they first differ at {named}" in found.sentence
        assert "not measured" in " ".join(found.notes)
        matched = r"values with a counterpart: \d+ of \d+ on the left, \d+ of"
        assert re.search(matched, found.sentence), found.sentence
    np.savez(tmp_path / "other.npz", tokens=IDS + 1, **dict(dump(model)))
    with pytest.raises(ValueError, match="was recorded from other tokens"):
        diff_by_value(theirs, tmp_path / "other.npz")


def test_two_recordings_with_another_gelu_are_two_functions(model, tmp_path):
    """Float32 shows the GELU, even if a file's weights are not enlarged."""
    other = original("Written", "sdpa", torch.float32)
    for block in other.transformer.h:
        block.mlp.act = torch.nn.GELU()
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, one in zip(paths, (model, other), strict=True):
        record_values(one, IDS[0].tolist(), path)
    found = diff_by_value(*paths)
    assert not found.same, found.sentence
    assert "mlp" in found.parted.right.function or "act" in found.sentence


def test_arrays_are_ignored_by_name(model, tmp_path):
    path, arrays = tmp_path / "dump.npz", dict(dump(model, "q"))
    np.savez(path, tokens=IDS, **arrays)
    whole = next(name for name in arrays if "_q_1" in name)
    for words, named in (([], whole), (["q"], "att_1"), ([whole], "att_1")):
        found = diff_by_value(model, path, ignore=words)
        assert named in found.parted.right.function, found.sentence
    with pytest.raises(ValueError, match="no recording has an array 'preatt'"):
        diff_by_value(model, path, ignore=["preatt"])
    with pytest.raises(ValueError, match="no recording has an array"):
        diff_by_value(model, model, ignore=["q"])


@pytest.mark.parametrize("fault", ["", "q", "act"])
def test_a_recording_without_scores_is_judged_by_values(
    fault, model, tmp_path
):
    """The other side is a model or a complete recording."""
    path, whole = tmp_path / "part.npz", tmp_path / "whole.npz"
    arrays = [(n, a) for n, a in dump(model, fault) if "logits" not in n]
    np.savez(path, tokens=IDS, **dict(arrays))
    np.savez(whole, tokens=IDS, **dict(dump(model)))
    for sides in ((model, path), (whole, path), (path, whole)):
        found = diff_by_value(*sides)
        assert found.same == (not fault), found.sentence
        start = r"\d+ of \d+ values of \S*part.npz have a counterpart, and no "
        assert re.match(start, found.sentence), found.sentence
        assert "log-probabilities" not in found.sentence
        if fault:
            assert fault in found.parted.right.function.split("_")
            assert "scores 0" not in found.sentence


@pytest.mark.parametrize("inner", ["act_1", "last"])
def test_a_wide_array_is_not_taken_for_padded_scores(inner, model, tmp_path):
    """One file has no scores, but ends in an array that is as wide."""
    arrays = dump(model)
    names = [name for name, _ in arrays]
    end = next(i for i, name in enumerate(names) if name.endswith(inner))
    np.savez(tmp_path / "part.npz", tokens=IDS, **dict(arrays[: end + 1]))
    for without in ("act", "act logits"):
        left = {n: a for n, a in arrays if n.split("_")[1] not in without}
        np.savez(tmp_path / "left.npz", tokens=IDS, **left)
        found = diff_by_value(tmp_path / "left.npz", tmp_path / "part.npz")
        assert "no scores were compared" in found.sentence, found.sentence
        assert found.same == (inner == "last"), found.sentence
        assert found.same or "scores " not in found.sentence.split("; ")[-1]


def test_equal_scores_of_other_arrays_are_two_functions(model, tmp_path):
    arrays, noise = dict(dump(model)), np.random.default_rng(0)
    for name in [*arrays][:12]:
        other = noise.standard_normal(arrays[name].shape)
        arrays[name] = other.astype(np.float32)
    np.savez(tmp_path / "dump.npz", tokens=IDS, **arrays)
    found = diff_by_value(model, tmp_path / "dump.npz")
    assert not found.same
    assert "though rounding explains the scores" in found.sentence


def test_the_array_of_the_scores_is_named(model, tmp_path):
    """The caller names the array of the scores; a wrong name raises."""
    path, arrays = tmp_path / "dump.npz", dict(dump(model))
    *_, (last, logits) = arrays.items()
    arrays |= {last: logits * 1.5, "raw": logits}
    np.savez(path, tokens=IDS, **arrays)
    assert diff_by_value(model, path).same
    assert diff_by_value(model, path, scores="raw").same
    found = diff_by_value(model, path, scores=last)
    assert last in found.parted.right.function, found.sentence
    for name, words in (
        ("no", "has an array 'no'"),
        ("005_att_0", "no scores"),
    ):
        with pytest.raises(ValueError, match=words):
            diff_by_value(model, path, scores=name)


@pytest.mark.parametrize("layered", [False, True])
def test_a_table_says_which_array_is_which(layered, model, tmp_path):
    """If a table pairs an array with an unequal value, a fault is found."""
    ours, path = tmp_path / "ours.safetensors", tmp_path / "dump.npz"
    record_values(model, IDS[0].tolist(), ours)
    with safe_open(ours, "np") as file:
        names = [*file.keys()]
        other = next(n for n in names if re.search(r"r 1 .*ln_2$", n))
        other = file.get_tensor(other)
    name = "ln" if layered else "ln_{i}"
    table = {"transformer.h.{i}.ln_1": name, "transformer.ln_f": "last"}
    for fault in (False, True):
        arrays = dict(dump(model))
        if fault:
            arrays["010_ln_1"] = other
        arrays = dict(by_layers([*arrays.items()]) if layered else arrays)
        np.savez(path, tokens=IDS, **arrays)
        assert diff_by_value(model, path).same
        turned = {b: a for a, b in table.items()}
        found = diff_by_value(path, model, table=turned)
        assert found.same == (not fault), found.sentence
        found = diff_by_value(model, path, table=table)
        assert found.same == (not fault), found.sentence
        if fault:
            assert "ln" in found.parted.right.function, found.sentence
            assert found.parted.left.module == "transformer.h.1.ln_1"
            assert found.parted.layer == 1 or not layered
    for wrong in ({"transformer.no": "last"}, {"transformer.ln_f": "no"}):
        with pytest.raises(ValueError, match=r"is named 'transformer.no|'no'"):
            diff_by_value(model, path, table=wrong)


@pytest.mark.parametrize("time", [12, 11])
@pytest.mark.parametrize("fault", ["", "act", "logits"])
def test_log_probabilities_of_the_top_k(fault, time, model, tmp_path):
    """The file may lack scores of the last id, as inference engines do."""
    path = tmp_path / "engine.npz"
    logits = torch.from_numpy(dump(model, fault)[-1][1])
    top, ids = logits.log_softmax(-1)[:, :time].topk(5)
    np.savez(path, tokens=IDS, ids=ids.numpy(), logprobs=top.numpy())
    found = diff_by_value(model, path)
    assert found.same == (not fault), found.sentence
    assert found.only_scores
    said = "one function as far as the 5 likeliest tokens tell: scores "
    assert found.sentence.startswith(said) == (not fault), found.sentence
    np.savez(path, tokens=IDS, ids=ids.numpy()[..., :4], logprobs=top.numpy())
    with pytest.raises(ValueError, match="require exactly one other array"):
        diff_by_value(model, path)


# --- Only statistics --------------------------------------------------------

QUICK = ("eps left out", "mask one off")
OF_LLAMA = (
    *QUICK,
    *("norm without its weight", "another base of the rotation", "no scale"),
    *("gelu for silu", "gate and up swapped", "last norm without its weight"),
)


def record_statistics(model, path, dtype=None):
    record_values(model, PORT_TOKENS, path, dtype=dtype, statistics=True)
    arrays = load_file(path)
    del arrays["tokens"]
    assert {tuple(array.shape) for array in arrays.values()} == {(5,)}
    return arrays


def test_statistics_of_sound_ports_are_one_function(tmp_path):
    """The verdict says that statistics do not show a reordered array."""
    left = original("Meta", "eager")
    port = port_of(ported_llama, "Meta", left)
    ours, theirs, whole = (tmp_path / f"{n}.safetensors" for n in "abc")
    record_statistics(left, ours, torch.float32)
    count = len(record_statistics(port, theirs, torch.float32))
    record_values(port, PORT_TOKENS, whole, dtype=torch.float32)
    for sides in ((left, theirs), (ours, port), (ours, theirs), (whole, ours)):
        found = diff_by_value(*sides)
        assert found.same, found.sentence
        words = r"no difference in mean, deviation, .* norm of \d\d+ of \d"
        assert re.match(words, found.sentence), found.sentence
        assert "reordered numbers in an array" in found.sentence
    assert count > 60
    # rounding depends on the dtype of the run, here bfloat16
    record_statistics(left, ours, torch.bfloat16)
    assert "as far as bfloat16 tells" in diff_by_value(left, ours).sentence
    with pytest.raises(ValueError, match="have no gradients"):
        record_values(left, None, ours, statistics=True, gradients=True)
    with pytest.raises(ValueError, match="on one process"):
        run_beside(None, Recording(ours), None, type("Rank", (Side,), {}))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32]
)
def test_statistics_of_16_bits_hint_at_the_dtype(dtype, model, tmp_path):
    """If the least and the largest values fit in 16 bits, a note says so.

    In float32 the difference is another GELU, and there is no note.
    """
    path = tmp_path / "five.safetensors"
    other = original("Written", "eager", torch.float32)
    if dtype is torch.float32:
        other.transformer.h[1].mlp.act = torch.nn.GELU()
    five = record_statistics(other, path, dtype)
    wide = {name: array.float() for name, array in five.items()}
    save_file(wide | {"tokens": torch.tensor([PORT_TOKENS])}, path)
    found = diff_by_value(model, path)
    assert not found.same
    name = str(dtype).removeprefix("torch.")
    hint = f"give --dtype {name}" in " ".join(found.notes)
    assert hint == (dtype is not torch.float32), found.notes


def test_a_permutation_does_not_show_in_statistics(model, tmp_path):
    """Statistics show a fault, but not a permutation."""
    path = tmp_path / "statistics.npz"
    for fault in ("", "att", "norm"):
        arrays = dict(dump(model, fault))
        name = next(name for name in arrays if "_q_1" in name)
        arrays[name] = arrays[name][..., ::-1]
        for key, array in arrays.items():
            x = array[np.isfinite(array)].astype(float)
            numbers = x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x)
            arrays[key] = np.array(numbers, np.float32)
        # the recorded norm is that of an array twice as large
        if fault == "norm":
            arrays[key][-1] *= 2
        np.savez(path, tokens=IDS, **arrays)
        found = diff_by_value(model, path)
        assert found.same == (not fault), found.sentence
        words = " ".join(found.notes)
        assert "norm, which ignore the order of numbers" in words
        if fault:
            named = found.parted.right.function
            assert {"att": "att_", "norm": "logits"}[fault] in named, named


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow)
        for n in OF_LLAMA
    ],
)
def test_statistics_name_the_first_array_that_differs(name, tmp_path):
    left = original("Meta", "eager")
    fault = next(f for f in FAULTS if (f.within, f.name) == ("Meta", name))
    module, _ = plant(fault, tmp_path)
    sound = record_statistics(
        port_of(ported_llama, "Meta", left), tmp_path / "sound.safetensors"
    )
    path = tmp_path / "faulty.safetensors"
    faulty = record_statistics(port_of(module, "Meta", left), path)
    found = diff_by_value(left, path)
    assert not found.same, found.sentence
    differing = [
        key
        for key, array in sorted(faulty.items())
        if not any(array.allclose(other, 1e-9) for other in sound.values())
        # other arrays are too plain to be recognised
        if len(array.unique()) > 3
    ]
    assert found.parted.right.function == differing[0], found.sentence


@pytest.mark.parametrize("fault", ["", "att"])
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_hidden_states_of_an_engine_are_read_as_they_are(
    fault, kind, model, tmp_path
):
    arrays = dict(dump(model, fault))
    outs = [a[0] for name, a in arrays.items() if "_out_" in name]
    assert len(outs) == 2
    written = {"token_ids": IDS[0], "hidden_states": np.stack(outs, 1)}
    path = tmp_path / f"states.{kind}"
    if kind == "npz":
        np.savez(path, **written)
    else:
        tensors = {n: torch.from_numpy(a) for n, a in written.items()}
        save_file(tensors, path)
    found = diff_by_value(model, path)
    assert found.same == (not fault), found.sentence
    if fault:
        assert found.parted.right.function == "hidden_states 1"
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, token_ids=IDS[0], hidden_states=outs[0])
    with pytest.raises(ValueError, match="tokens, layers, width"):
        diff_by_value(model, wrong)


@pytest.mark.parametrize("fault", [False, True])
def test_a_table_also_holds_if_one_side_computes_each_head(
    fault, model, tmp_path
):
    """One side has an array per head, so the model is recorded again."""
    path = tmp_path / "dump.npz"
    arrays = dict(dump(model))
    normed = next(a for n, a in arrays.items() if n.endswith("_ln_0"))
    attention = model.transformer.h[0].attn.c_attn
    head = attention(torch.from_numpy(normed)).detach().numpy()[..., :8]
    if fault:
        arrays["010_ln_1"] = arrays["010_ln_1"] * 1.5
    np.savez(path, tokens=IDS, **{"004_head": head}, **arrays)
    table = {"transformer.h.{i}.ln_1": "ln_{i}", "transformer.ln_f": "last"}
    found = diff_by_value(model, path, table=table)
    assert found.sides[0].by_heads
    assert found.same == (not fault), found.sentence
