"""Declared visibilities are proved and tested, pair by pair."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_gpt import GPT
from visible_models import (
    BLOCK,
    IMAGE,
    PARENTS,
    VISIBLE,
    VOCAB,
    Seeing,
    by_images,
    forgetting,
    images_by_tokens,
    leaking,
    of,
    sound,
)

from gpt_duet import check_model, prove_causality, save_map
from gpt_duet.proof.chains import chains_of
from gpt_duet.tracing.pictures import LEAK, NEVER_USED, colours, text_map
from gpt_duet.visibility import (
    blocks,
    causal,
    chunked,
    declared_by,
    documents,
    prefix,
    relation_of,
    through,
    tree,
    window,
)


def checked(model, sees, *names):
    """Return the messages of the checks that a model fails, by check."""
    report = check_model(model, checks=list(names), sees=sees)
    return {r.name: r.message for r in report.results if r.status == "failed"}


# These are slow, because many positions see different sets of tokens, and each
# set needs a run.
MANY_RUNS = ("stride", "stride of two layers", "tree")


def slow_where(names):
    """Return all names in VISIBLE as parameters; mark `names` as slow."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow) if n in names else n for n in VISIBLE]


@pytest.mark.parametrize("name", slow_where(MANY_RUNS[:2]))
def test_a_sound_model_of_a_declaration_is_proved(name):
    sees = VISIBLE[name][0]
    proof = prove_causality(sound(name), sees=sees, lengths=[3, BLOCK])
    assert proof.proved, proof
    assert proof.to_dict()["sees"] in str(proof)


@pytest.mark.parametrize("name", VISIBLE)
def test_one_pair_too_many_is_not_proved(name):
    sees = VISIBLE[name][0]
    proof = prove_causality(leaking(name), sees=sees, lengths=[3, BLOCK])
    assert not proof.holds, proof


@pytest.mark.parametrize("name", VISIBLE)
def test_a_leak_fails_with_its_pair_and_the_declaration(name):
    sees, _, (position, token), _ = VISIBLE[name]
    failed = checked(leaking(name), sees, "causality", "causal_gradients")
    assert "check_causality" in failed
    assert " forbids: visible_models.py" in failed["check_causality"]
    if len(failed) > 1 and name[-6:] != "layers":
        gradient = failed["check_causal_gradients"]
        assert f"position {position} " in gradient
        assert f"token {token}, which" in gradient


@pytest.mark.parametrize("name", VISIBLE)
def test_a_token_that_is_never_used_fails_with_its_pair(name):
    model, (sees, _, _, pair) = forgetting(name), VISIBLE[name]
    if model is None or max(pair) >= BLOCK:
        model = sound(name)
        assert not checked(model, sees, "context_use")
        return
    failed = checked(model, sees, "context_use")["check_context_use"]
    assert f"position {pair[0]} never change with token {pair[1]}" in failed


@pytest.mark.parametrize("name", slow_where({*VISIBLE} - {"images"}))
def test_a_sound_model_of_a_declaration_passes_all_checks(name):
    report = check_model(sound(name), sees=VISIBLE[name][0])
    assert report.ok, str(report)


def test_a_declaration_may_depend_on_the_tokens():
    """A declaration that reads the tokens is tested, but not proved."""
    assert not checked(images_by_tokens(), by_images, "causality")
    assert checked(images_by_tokens(), causal, "causality")
    failed = checked(images_by_tokens(wrong=True), by_images, "causality")
    assert "which by_images forbids" in failed["check_causality"]


def forbidden_pairs():
    """Return forbidden pairs (query, key), each with its declaration."""
    each = {"window": [(5, 10), (10, 2), (7, 10)], "tree": [(7, 11), (6, 5)]}
    return [(name, pair) for name, some in each.items() for pair in some]


@pytest.mark.parametrize(("name", "pair"), forbidden_pairs())
def test_any_pair_that_leaks_fails(name, pair):
    sees = VISIBLE[name][0]
    failed = checked(of(sees, more=[pair]), sees, "causality")
    assert f"position {pair[0]} sees" in failed["check_causality"]


class Long(Seeing):
    """A model with texts so long that the check tries only some positions."""

    block_size = 96

    def __init__(self, relation):
        super().__init__(relation)
        self.positions = torch.nn.Embedding(self.block_size, 16)


def test_the_pair_of_the_proof_is_tried_in_a_long_text():
    def relation(ids):
        found = relation_of(window(4), ids.size(1))
        if len(found) == Long.block_size:
            found[37, 12] = True
        return found

    failed = checked(partial(Long, relation), window(4), "causality")
    assert "position 37 sees" in failed["check_causality"]


def everything(q, kv):
    return q == q


def test_an_encoder_passes_if_all_pairs_are_allowed():
    names = ("causality", "causal_gradients", "context_use", "cache")
    names += ("prefix_consistency", "order_sensitivity")
    assert not checked(of(everything), everything, *names)
    failed = checked(of(causal), everything, "context_use")
    assert "position 0 never change" in failed["check_context_use"]


class Telling(Seeing):
    """A model that adds the first targets to the scores of their positions."""

    def __init__(self, sees, count):
        super().__init__(lambda ids: relation_of(sees, ids.size(1)))
        self.count = count

    def forward(self, ids, targets=None):
        scores = super().forward(ids)
        if targets is None:
            return scores
        told = self.tokens(targets)[:, : self.count, :1]
        left = scores.size(1) - told.size(1)
        scores = scores + torch.nn.functional.pad(told, (0, 0, 0, left))
        loss = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten()
        )
        return scores, loss


@pytest.mark.parametrize("sees", [everything, prefix(6)])
def test_targets_of_tokens_that_are_seen_early_are_secret(sees):
    for count in (0, 4):
        build = partial(Telling, sees, count)
        proof = prove_causality(build, sees=sees, lengths=[BLOCK])
        assert proof.proved == (count == 0), proof


def by_closure(image, *, more=()):
    """Return a function like by_images; its closure holds the image id."""

    def sees(tokens):
        is_image = (tokens == image).roll(0)
        number = (is_image & ~is_image.roll(1)).cumsum(0) * is_image
        return lambda q, kv: (
            (kv <= q) | ((number[q] == number[kv]) & is_image[q])
        )

    return sees


class ByImages:
    """A declaration that is a callable object."""

    def __init__(self):
        self.image = IMAGE

    def __call__(self, tokens):
        return by_closure(self.image)(tokens)


def with_image(image, tokens):
    return by_closure(image)(tokens)


@pytest.mark.parametrize(
    "sees", [by_closure(IMAGE), ByImages(), partial(with_image, IMAGE)]
)
def test_ids_in_a_declaration_are_found(sees):
    assert IMAGE in declared_by(sees, 12).ids(VOCAB)


def test_ids_in_a_declaration_occur_in_the_texts():
    sees = ByImages()
    assert not checked(images_by_tokens(), sees, "causality")
    assert checked(images_by_tokens(wrong=True), sees, "causality")


PAIRS = {(q, k) for q in range(64) for k in range(q + 1)} | {(0, 3)}
SINK = {40}


def test_a_predicate_with_a_set_is_read_by_numbers():
    found = relation_of(lambda q, kv: (q, kv) in PAIRS, 5)
    assert found[0].tolist() == [True, False, False, True, False]
    found = relation_of(lambda q, kv: kv in SINK or kv <= q, 64)
    assert found[:, 40].all()


def test_a_declaration_is_read_up_to_the_longest_text():
    late = blocks([(1500, 1600)])
    for sees in (late, window(1500)):
        assert declared_by(sees, 2048) is not None
    assert declared_by(late, 2048).looks_ahead
    assert declared_by(blocks([(40, 46)]), 48).looks_ahead
    assert not declared_by(window(4), 48).looks_ahead


DOCUMENT = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])


def test_a_declaration_is_equal_for_rows_and_heads():
    def by_row(b, h, q, kv):
        return (DOCUMENT[b, q] == DOCUMENT[b, kv]) & (kv <= q)

    def by_head(b, h, q, kv):
        return (kv <= q) & ((h == 0) | (q - kv < 2))

    for sees, words in ((by_row, "row b"), (by_head, "head h")):
        with pytest.raises(ValueError, match=f"depends on the {words}"):
            declared_by(sees, 5)
    assert declared_by(
        lambda b, h, q, kv: (DOCUMENT[:1][b, q] == 0) & (kv <= q), 5
    )


class Heads(GPT):
    """A model with two outputs; the first one leaks."""

    def forward(self, ids, attention_mask=None):
        scores = super().forward(ids)
        ahead = self.wte(ids)[:, 1:, :1]
        leak = torch.cat([ahead, ahead[:, :1]], 1)
        return {"heads": [scores + leak, scores * 2]}


@pytest.mark.usefixtures("one_layer")
def test_one_of_several_outputs_is_judged():
    for output, ok in (
        ("heads.0", False),
        ("heads.1", True),
        (lambda answer: answer["heads"][1], True),
    ):
        report = check_model(
            Heads, output=output, checks=["causality"], block_size=4
        )
        assert report.ok == ok, str(report)
    with pytest.raises(ValueError, match=r"no heads\.2: it is a dict"):
        check_model(Heads, output="heads.2")


def test_the_command_takes_a_declaration(tmp_path, monkeypatch, duet):
    file = tmp_path / "mine.py"
    file.write_text(
        "from visible_models import leaking, sound, strided\n"
        "good, bad = sound('prefix'), leaking('prefix')\n"
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "zoo"))
    for model, sees, status in (
        ("good", "prefix(5)", 0),
        ("bad", "prefix(5)", 1),
        ("good", "gpt_duet.visibility:causal", 1),
        ("good", f"{file}:strided", 1),
    ):
        words = ["check", f"{file}:{model}", "--sees", sees]
        found, out, err = duet(*words, "--only", "causality")
        assert found == status, out + err
        if sees[-6:] != "causal" and status:
            assert "forbids" in " ".join(out.split())


def test_causal_is_the_usual_declaration():
    for sees in (None, causal, lambda q, kv: kv <= q):
        assert declared_by(sees, 64) is None
    assert declared_by(window(4), 64) is not None
    assert declared_by(window(100), 64) is None


@pytest.mark.parametrize(
    "sees",
    [
        causal,
        prefix(3),
        window(4),
        window(4, layers=2),
        chunked(4),
        blocks([(1, 4), (6, 9)]),
        documents([3, 4, 2]),
    ],
    ids=lambda sees: sees.name,
)
def test_a_formula_is_a_mask_mod_of_flex_attention(sees):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_mask(sees.mask_mod, 1, 1, 12, 12, device="cpu")
    assert mask[0, 0].equal(sees.relation_of(12))
    blocked = flex.create_block_mask(sees.mask_mod, 1, 1, 9, 9, device="cpu")
    assert relation_of(blocked.mask_mod, 9).equal(sees.relation_of(9))


@pytest.mark.parametrize("sees", [tree([-1, 0]), through(causal, 2)])
def test_a_table_says_how_it_becomes_a_mask_mod(sees):
    with pytest.raises(ValueError, match=r"is a table: use table = "):
        _ = sees.mask_mod


def raising(q, kv):
    raise KeyError("q")


@pytest.mark.unhooked  # --check-shapes would refuse the wrong values
def test_a_mistake_in_a_predicate_is_one_line():
    for sees, words in (
        (raising, r"raising\(0, 0\) raises KeyError"),
        (lambda q, kv: torch.ones(3, 3) > 0, "must return a boolean"),
        (lambda q, kv: None, "returns None"),
        (lambda q, kv: 1 if q >= kv else 0, "returns [01]: a predicate must"),
        (torch.ge, "the arguments of ge are not known"),
        (lambda tokens: torch.ones(2, 2), r"predicate \(q, kv\), got Tensor"),
        (lambda q, kv, more: True, "takes 3 arguments"),
        (lambda q, kv: q - kv, "returns torch.int64"),
        ("window", "sees must be a predicate"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            check_model(GPT, sees=sees)
        assert "\n" not in str(error.value)
    for make, words in (
        (lambda: window(0), "at least 1, got 0"),
        (lambda: blocks([(3, 3)]), r"got \(3, 3\)"),
        (lambda: tree([0, 2]), "got 2"),
        (lambda: documents([3, 0]), "got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def reached(sees, layers, time):
    """Return which positions each position can see after some layers."""
    one = relation_of(sees, time).tolist()
    found = torch.zeros(time, time, dtype=torch.bool)
    for start in range(time):
        seen = {start}
        for _ in range(layers):
            seen = {k for q in seen for k in range(time) if one[q][k]}
        found[start, [*seen]] = True
    return found


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_a_stack_sees_the_ends_of_its_paths(time, layers, size):
    for sees in (window(size), prefix(size), tree([0, 0, 1, 1, 2, 3, 3])):
        found = relation_of(through(sees, layers), time)
        assert found.equal(reached(sees, layers, time))
    stack = relation_of(through(window(size), layers), time)
    assert stack.equal(relation_of(window(size, layers), time))


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(
            st.lists(st.booleans(), min_size=n, max_size=n),
            min_size=n,
            max_size=n,
        )
    )
)
def test_chains_forbid_exactly_what_a_relation_forbids(rows):
    forbidden = torch.tensor(rows)
    found = torch.zeros_like(forbidden)
    for codes, bounds in chains_of(forbidden):
        found |= codes[None, :] > bounds[:, None]
    assert found.equal(forbidden)


def test_a_map_marks_forbidden_and_unused_cells():
    matrix = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    assert text_map(matrix).splitlines()[1:] == [
        "0 \u2588 X",
        "1 \u00b7 \u2588",
    ]
    sees = torch.tensor([[True, True], [True, True]])
    assert text_map(matrix, sees).splitlines()[2] == "1 o \u2588"


@pytest.mark.parametrize("time", [1, 9, 10, 11, 12])
def test_the_cells_of_a_map_stand_below_each_other(time):
    """Each row is indented by the width of the longest number."""
    rows = text_map(torch.eye(time)).splitlines()[1:]
    assert {len(row) for row in rows} == {len(str(time - 1)) + 2 * time}


def test_a_saved_map_colours_forbidden_and_unused_cells(tmp_path):
    sees = tree([-1, 0, 0])
    matrix = torch.eye(3) + torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1.0, 0]])
    image = colours(matrix, sees.relation_of(3))
    assert image[1, 0].tolist() == image[2, 0].tolist()
    assert image[1, 0].tolist() == pytest.approx(NEVER_USED)
    assert image[2, 1].tolist() == pytest.approx(LEAK)
    save_map(matrix, tmp_path / "map.html", sees=sees)
    page = (tmp_path / "map.html").read_text()
    assert "tokens that are seen: 1 (the largest is 1)" in page
    assert "may be seen and are not: 2." in page
    assert "leak: a forbidden token is seen" in page
    with pytest.raises(ValueError, match="depends on the tokens"):
        save_map(matrix, tmp_path / "map.html", sees=by_images)


def test_the_command_draws_the_map_of_a_declaration(
    tmp_path, monkeypatch, duet
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "zoo"))
    Path("mine.py").write_text(
        "from visible_models import leaking\nbad = leaking('tree')\n"
    )
    words = "--only", "normalised", "--map", "map.html", "--sees"
    status, out, err = duet("check", "mine.py:bad", *words, f"tree({PARENTS})")
    assert status == 0, out + err
    assert "forbidden tokens that are seen: 1" in Path("map.html").read_text()
