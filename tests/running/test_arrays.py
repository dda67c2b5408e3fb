"""Functions of NumPy and JAX arrays are checked, proved and compared."""

from functools import partial

import numpy as np
import numpy_gpt2
import pytest
import torch

from gpt_duet import (
    GPTConfig,
    check_model,
    diff_by_value,
    mingpt_style,
    record_values,
)
from gpt_duet.invariants import prove_causality
from gpt_duet.running.model.calling import as_tensor, is_array

pytestmark = pytest.mark.unhooked  # --check-shapes would change line numbers

SIZES = {"vocab_size": 29, "block_size": 16}
WORDS = "written in arrays: gradients cannot pass"
SKIPPED = {"causal_gradients", "gradient_flow", "gradients", "entropy_bound"}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mingpt_style.build_model(
        GPTConfig(**SIZES, n_layer=2, n_head=2, n_embd=16)
    )


def port(model, fault="", refuses=False):
    """Return the model in NumPy; if `refuses`, it refuses tensors."""
    state = {
        name: tensor.detach().numpy()
        for name, tensor in mingpt_style.to_gpt2(model).items()
    }

    def scores(ids):
        ids = ids.astype(np.int64) if refuses else np.asarray(ids)
        if ids.min() < 0 or ids.shape[1] > SIZES["block_size"]:
            raise ValueError(f"bad ids of shape {ids.shape}")
        return numpy_gpt2.forward(state, ids, 2, fault)[-1][1]

    return scores


def line(function, offset):
    return f"test_arrays.py:{function.__code__.co_firstlineno + offset} "


@pytest.mark.parametrize("refuses", [False, True])
def test_all_checks_without_gradients_run(model, refuses):
    scores = port(model, refuses=refuses)
    names = None if refuses else ["causality", "entropy_bound"]
    report = check_model(scores, **SIZES, checks=names)
    assert report.ok, str(report)
    assert WORDS in report.notes
    told = {r.name[6:] for r in report.results if r.message == WORDS}
    assert told == SKIPPED & {r.name[6:] for r in report.results}
    passed = {r.name[6:] for r in report.results if r.status == "passed"}
    assert "causality" in passed
    if refuses:
        rest = {"prefix_consistency", "batch_independence", "vocabulary"}
        assert passed > rest | {"shape", "finite", "determinism", "purity"}


@pytest.mark.parametrize("refuses", [False, True])
def test_a_leak_is_found_without_a_proof(model, refuses):
    leaking = port(model, "att", refuses)
    report = check_model(leaking, **SIZES, checks=["causality"])
    message = report.results[0].message
    assert message.startswith("position 0 sees token 1: at length 2, by")
    where = "def scores(ids):" if refuses else "np.asarray(ids)"
    for scores in (leaking, port(model, refuses=refuses)):
        proof = prove_causality(scores, **SIZES)
        assert not proof.proved
        place = f"{line(scores, not refuses)}`{where}`"
        assert [o.sentence for o in proof.open] == [
            f"numbers leave torch at {place}"
        ]


def test_a_mistake_in_arrays_is_reported_unchanged(model):
    def broken(ids):
        return missing[ids.astype(int)]

    with pytest.raises(ValueError, match="NameError: name 'missing'"):
        check_model(broken, **SIZES)
    with pytest.raises(ValueError, match="no attribute 'sizes'"):
        check_model(lambda ids: ids.sizes(), **SIZES)


class Answer:
    """An array that supports only DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **how):
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_array_may_support_only_dlpack(dtype, model):
    tensor = torch.randn(2, 3).to(dtype)
    copy = as_tensor(Answer(tensor))
    assert copy.equal(tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    for kind in (">f8", np.longdouble):
        assert as_tensor(np.ones(2, kind)).equal(torch.ones(2).double())
    for words in (np.array(["a"]), np.array([model]), np.str_("a")):
        assert as_tensor(words) is None
    assert not any(map(is_array, (tensor, np.ndarray, 3.0, "x", [1])))
    report = check_model(
        lambda ids: {"logits": Answer(model(ids)[0].detach())},
        **SIZES,
        checks=["shape", "prefix_consistency"],
    )
    assert report.ok, str(report)


def test_models_of_arrays_are_compared_by_scores(model):
    ported, shifted = port(model), port(model, "att", refuses=True)
    for sides in ((model, ported), (ported, model), (ported, ported)):
        found = diff_by_value(*sides, **{"vocab_size": 29})
        assert found.same
        assert found.sentence.startswith("one function: scores ")
        assert f"{found.names[1]} is {WORDS}: only its scores" in str(found)
        assert "numpy.savez('arrays.npz', **arrays)" in str(found)
        assert not found.shares_nothing
    for sides in ((model, shifted), (shifted, model), (ported, shifted)):
        found = diff_by_value(*sides, **{"vocab_size": 29})
        assert not found.same
        assert found.sentence.startswith("two functions: scores 0.")
        assert "after the first difference" not in str(found)
    with pytest.raises(ValueError, match="could be recorded"):
        record_values(ported, None, "x.safetensors", vocab_size=29)


def test_the_command_checks_a_model_of_arrays(duet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "port.py").write_text(
        "import numpy as np\n"
        "TABLE = np.random.default_rng(0).normal(size=(29, 29))\n"
        "def scores(ids):\n"
        "    return TABLE[ids.astype(int)].cumsum(1)\n"
    )
    target, size = "port.py:scores", "--vocab-size=29"
    block = "--block-size=16"
    out = duet("check", target, size, block, "--only=causality")[1]
    assert "numbers leave torch at" in out
    status, out, err = duet("check", target, size, block, "--require-proof")
    assert status == 1
    assert "a proof is required" in out
    status, out, err = duet("diff", target, target, size, "--html=x.html")
    assert (status, err) == (0, "")
    assert "one function: scores 0 apart" in out
    assert "scores of scores" in (tmp_path / "x.html").read_text()


@pytest.mark.slow
def test_a_style_written_in_jax_passes_the_checks(model):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    state = {
        name: jnp.asarray(tensor.detach().numpy())
        for name, tensor in mingpt_style.to_gpt2(model).items()
    }

    @partial(jax.jit, static_argnames="ahead")
    def run(ids, ahead=0):
        x = state["wte.weight"][ids] + state["wpe.weight"][: ids.shape[1]]
        seen = jnp.tril(jnp.ones((ids.shape[1],) * 2), ahead)
        x = x + (seen / seen.sum(1, keepdims=True)) @ x
        return x @ state["lm_head.weight"].T

    class Mean(torch.nn.Module):
        vocab_size, block_size = SIZES.values()

        def __init__(self):
            super().__init__()
            self.wte, self.wpe = model.transformer.wte, model.transformer.wpe

        def forward(self, ids):
            x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
            seen = torch.ones(ids.size(1), ids.size(1)).tril()
            x = x + (seen / seen.sum(1, keepdim=True)).to(x) @ x
            return x @ model.lm_head.weight.to(x).T

    names = ["shape", "causality", "prefix_consistency", "gradients"]
    report = check_model(run, **SIZES, checks=names, budget=60)
    assert report.ok, str(report)
    assert report.results[-1].message == WORDS
    leaking = partial(run, ahead=1)
    report = check_model(leaking, **SIZES, checks=["causality"], budget=60)
    assert "position 0 sees token 1" in report.results[0].message
    found = diff_by_value(Mean, run)
    assert found.same, found.sentence
    assert not diff_by_value(Mean, leaking).same
    for function in (run, lambda ids: run(jnp.asarray(ids))):
        proof = prove_causality(function, **SIZES, lengths=[2, 5])
        assert not proof.proved
        assert "numbers leave torch at test_arrays.py:" in str(proof)
