"""gpt-duet compare --serve: the answers of the live page, and its limits."""

import http.client
import json
import math
import re
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from browser import HOSTILE

from gpt_duet import GPTConfig, annotated, check_model, mingpt_style
from gpt_duet.agreement import enlarged_random_weights
from gpt_duet.cli import compare
from gpt_duet.cli.compare import (
    JUDGED_TOKENS,
    judge_causality,
)
from gpt_duet.comparison.page import Live, PageServer, cache_steps, server
from gpt_duet.comparison.page.breaking import (
    PARTS,
    Edit,
    breaks_of,
    broken_copy,
    changes_of,
)
from gpt_duet.comparison.page.glossaries import text_of
from gpt_duet.comparison.page.live import (
    EXAMPLES,
    MOST_TOKENS,
)
from gpt_duet.comparison.page.render import fill
from gpt_duet.comparison.styles import make_pair
from gpt_duet.tokenization.tokenizers import load_tokenizer

# with --check-shapes, the page would record the frames of the hook
pytestmark = pytest.mark.unhooked

STYLES = (annotated, mingpt_style)
CONFIG = GPTConfig(256, 80, n_layer=2, n_head=2, n_embd=16)
TEXT = "a text that I type."


def random_weights():
    state = enlarged_random_weights(mingpt_style, CONFIG, 1)
    return {name: tensor.double() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def live():
    """Return both styles with random weights; each byte is a token."""
    tokens = torch.tensor([[*b"the text of the command"]])
    pair = make_pair(STYLES, CONFIG, random_weights(), tokens)
    bytes_as_ids = load_tokenizer("bytes")
    return Live(pair, bytes_as_ids, tokens[0].tolist(), judge_causality)


@contextmanager
def serving(page, questions):
    """Yield a server that runs on a free port in another thread."""
    served = PageServer(0)
    served.open(page, questions)
    thread = threading.Thread(target=served.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield served
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


@pytest.fixture(scope="module")
def port(live):
    with serving("<p>the page", live.questions) as served:
        yield served.port


def send(port, method, path, body=b"", **headers):
    """Send a request, and return the status and the content of the answer."""
    given = {
        "Content-Type": "application/json",
        "Origin": f"http://127.0.0.1:{port}",
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ask(port, path, **question):
    """Send a question as the page does, and return the answer."""
    status, content = send(port, "POST", path, json.dumps(question))
    assert status == 200, content
    return json.loads(content)


def until(holds):
    """Wait until a condition holds, for at most ten seconds."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


def log_probs(model, ids):
    with torch.no_grad():
        return model.log_probs(torch.tensor([ids]))[0]


# --- A text ------------------------------------------------------------------


def test_bars_are_the_probabilities_of_both_styles(port, live):
    answer = ask(port, "/read", text=TEXT)
    assert answer["ids"] == [*TEXT.encode()]
    assert answer["text"] == TEXT
    models = [s.from_gpt2(random_weights(), CONFIG).eval() for s in STYLES]
    both = [log_probs(model, answer["ids"]).exp() for model in models]
    assert len(answer["bars"]) == len(TEXT)
    for rows, *probs in zip(answer["bars"], *both, strict=True):
        best = probs[0].topk(8).indices.tolist()
        assert [row[0] for row in rows] == [*map(live.piece_of, best)]
        for row, token in zip(rows, best, strict=True):
            assert row[1:3] == pytest.approx([float(p[token]) for p in probs])


def test_the_walk_has_the_numbers_of_every_cell(port):
    import base64

    import numpy as np

    walk = ask(port, "/read", text=TEXT)["walk"]
    assert len(walk["tokens"]) == len(TEXT)
    step = next(s for s in walk["steps"] if s["kind"] == "log_probs")
    number = step["maps"][0][0]
    drawn, read, heads, total = walk["columns"][number]
    assert (read, heads, total) == (256, 1, 256)
    data = base64.b64decode(walk["maps"][number])[len(TEXT) * drawn :]
    shown = np.frombuffer(data, "<f4").reshape(len(TEXT), read)
    model = annotated.from_gpt2(random_weights(), CONFIG).eval()
    own = log_probs(model, [*TEXT.encode()])
    np.testing.assert_allclose(shown, own, rtol=1e-5)
    assert all(size < 1e-10 for s in walk["steps"] for size in s["apart"]
               if size is not None)  # fmt: skip
    scores = next(s for s in walk["steps"] if s["kind"] == "scores")
    assert scores["factors"][1][0][2] == pytest.approx(8**-0.5)


@pytest.mark.parametrize("text", ["a", "ab", "a" * MOST_TOKENS])
def test_a_text_of_any_length_has_every_step(port, text):
    answer = ask(port, "/read", text=text)
    assert len(answer["walk"]["tokens"]) == len(text)
    # in a text of one token, nothing is masked and nothing is mixed
    assert all(answer["walk"]["shapes"]) == (len(text) > 1)
    last = answer["walk"]["following"]["rows"][-1]
    assert [math.exp(p) for _, p in last[:8]] == pytest.approx(
        [row[1] for row in answer["bars"][-1]], abs=1e-4
    )


def test_a_longer_text_is_cut_and_its_length_said(port):
    answer = ask(port, "/read", text="b" * 100)
    assert answer["count"] == 100
    assert len(answer["ids"]) == MOST_TOKENS


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"text": ""}, "the text is empty"),
        ({"text": "x" * 10_001}, "at most 10,000 characters, got 10,001"),
        ({"text": "\ud800"}, "surrogates not allowed"),
        ({"ids": [1, 256]}, "outside the vocabulary of 256"),
        ({"ids": [1, True]}, "a text or a list of ids"),
        ({"ids": "12"}, "a text or a list of ids"),
        ({"ids": [1] * 65}, "at most 64 ids are run, got 65"),
        ({}, "a text or a list of ids"),
        ({"text": "a", "part": "head"}, "the parts are mask"),
        ({"text": "a", "part": ["mask"]}, "the parts are mask"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_sentence(
    port, question, words
):
    status, content = send(port, "POST", "/read", json.dumps(question))
    assert status == 400
    assert words in json.loads(content)["error"]


def test_bars_are_those_of_the_sampler(port, live):
    model = annotated.from_gpt2(random_weights(), CONFIG).eval()
    scores = log_probs(model, [*TEXT.encode()])[-1]
    kept, tokens = (2 * scores).topk(3)  # at a temperature of 0.5
    question = {"text": TEXT, "temperature": 0.5, "top_k": 3}
    rows = ask(port, "/read", **question)["bars"][-1]
    assert [row[0] for row in rows] == [*map(live.piece_of, tokens.tolist())]
    for row, share in zip(rows, kept.softmax(0).tolist(), strict=True):
        assert row[1:5] == pytest.approx(4 * [share])
    status, content = send(
        port, "POST", "/read", json.dumps({"text": TEXT, "temperature": 2.5})
    )
    assert (status, b"from 0 to 2, got 2.5" in content) == (400, True)


def test_tokens_that_are_raw_bytes_are_named(port):
    answer = ask(port, "/read", text="na\u00efve")
    assert answer["tokens"][2:4] == ["c3", "af"]
    assert answer["raw"] == [2, 3]
    raw = [row[5] for rows in answer["bars"] for row in rows]
    assert True in raw
    assert all(
        row[5] == bool(re.fullmatch("[89a-f][0-9a-f]", row[0]))
        for rows in answer["bars"]
        for row in rows
    )


def test_examples_are_texts_that_the_tokenizer_has(live):
    assert live.describe()["examples"] == EXAMPLES
    tokens = torch.tensor([[0, 1]])
    config = GPTConfig(12, 16, n_layer=1, n_head=1, n_embd=4)
    state = enlarged_random_weights(mingpt_style, config, 1)
    pair = make_pair(STYLES, config, state, tokens)
    few = load_tokenizer("char", text="Once upon a time")
    own = Live(pair, few, [0, 1], judge_causality)
    assert [*own.describe()["examples"].values()] == ["Once upon a time"]


def test_writing_goes_on_token_by_token(port, live):
    ids = [*TEXT.encode()]
    model = annotated.from_gpt2(random_weights(), CONFIG).eval()
    for length in range(len(ids), len(ids) + 3):
        answer = ask(port, "/write", ids=ids, top_k=1)
        likeliest = int(log_probs(model, ids)[-1].argmax())
        assert answer["ids"] == [*ids, likeliest]
        assert answer["agree"]
        ids = answer["ids"]
        assert len(ids) == length + 1
    after = log_probs(model, ids)[-1].exp()
    bars = ask(port, "/write", ids=ids[:-1], temperature=0)["bars"]
    ((text, *probs, _),) = bars[0]  # no other token is ever drawn
    assert (text, probs) == (live.piece_of(int(after.argmax())), 4 * [1])
    drawn = [ask(port, "/write", ids=ids, temperature=2, seed=s)["ids"][-1]
             for s in range(8)]  # fmt: skip
    assert len({*drawn}) > 1
    again = ask(port, "/write", ids=ids, temperature=2, seed=3)
    assert again["ids"][-1] == drawn[3]
    only = ask(port, "/write", ids=ids, temperature=2, top_k=1, seed=3)
    assert only["ids"][-1] == int(log_probs(model, ids)[-1].argmax())
    full = json.dumps({"ids": [1] * MOST_TOKENS})
    status, content = send(port, "POST", "/write", full)
    assert (status, b"all 64 tokens" in content) == (400, True)


def test_a_large_model_has_bars_and_a_cache_only(monkeypatch):
    monkeypatch.setattr("gpt_duet.comparison.page.live.WALK_PARAMETERS", 99)
    pair = make_pair(STYLES, CONFIG, random_weights(), torch.tensor([[1, 2]]))
    large = Live(pair, load_tokenizer("bytes"), [1, 2], judge_causality)
    assert large.walk() is None
    answer = large.read({"text": TEXT, "part": "mask"})
    assert answer["walk"] is None
    assert answer["bars"][0][0][1] != answer["bars"][0][0][3]
    assert large.write({"text": TEXT})["agree"]
    assert large.cache({"text": TEXT})["sides"][0]["kept"]
    for question in (large.influence, large.causality):
        with pytest.raises(ValueError, match="support at most 99"):
            question({"text": TEXT})


def test_a_third_style_has_no_lines_to_take_out_and_no_cache():
    third_style = pytest.importorskip("third_style")
    tokens = torch.tensor([[*b"a text"]])
    styles = annotated, third_style
    pair = make_pair(styles, CONFIG, random_weights(), tokens)
    own = Live(pair, load_tokenizer("bytes"), [*b"a text"], judge_causality)
    assert own.describe()["parts"] == {}
    answer = own.read({"text": TEXT})
    assert len(answer["walk"]["tokens"]) == len(TEXT)
    first, second = own.cache({"text": TEXT})["sides"]
    assert first["kept"]
    assert second == {}
    assert cache_steps.cache_sources(styles)[1] is None


# --- A line taken out --------------------------------------------------------


def broken(style, part):
    model = style.from_gpt2(random_weights(), CONFIG).eval()
    return model, broken_copy(model, style, breaks_of(style)[part])


def without_mask(model, ids):
    everything = torch.ones(1, len(ids), len(ids), dtype=torch.bool)
    with torch.no_grad():
        hidden = model.decode(torch.tensor([ids]), everything)
        return model.generator(hidden)[0]


def without_scale(model, ids):
    for layer in model.decoder.layers:
        query = layer.self_attn.linears[0]
        for tensor in query.parameters():
            tensor.data *= math.sqrt(layer.self_attn.d_k)
    return log_probs(model, ids)


def without_positions(model, ids):
    model.embed[1].pe.zero_()
    return log_probs(model, ids)


def without_residual(model, ids):
    layers = model.decoder.layers
    for layer in layers:
        layer.forward = lambda x, mask, layer=layer: layer.feed_forward(
            layer.sublayer[1].norm(
                (lambda x: layer.self_attn(x, x, x, mask))(
                    layer.sublayer[0].norm(x)
                )
            )
        )
    return log_probs(model, ids)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_taken_out_is_that_part_and_no_other(part):
    ids = [*TEXT.encode()]
    model, copy = broken(annotated, part)
    own = log_probs(model, ids)
    _, other = broken(mingpt_style, part)
    found = log_probs(copy, ids)
    assert (found - own).abs().max() > 1e-3
    torch.testing.assert_close(log_probs(other, ids), found)
    assert log_probs(model, ids).equal(own)  # the original has not changed
    expected = globals()[f"without_{part}"](model, ids)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("style", STYLES)
def test_an_edit_names_its_line(style):
    for part, edits in breaks_of(style).items():
        for change in changes_of(style, edits):
            with open(change.path, encoding="utf-8") as file:
                line = file.read().split("\n")[change.line - 1]
            assert line == change.old != change.new, part


def test_an_edit_whose_line_is_gone_is_refused():
    with pytest.raises(ValueError, match="'gone' 0 times"):
        changes_of(annotated, [Edit("attention", "gone", "")])


def test_mended_models_give_the_first_numbers_again(port):
    first = ask(port, "/read", text=TEXT)
    for part in PARTS:
        answer = ask(port, "/read", text=TEXT, part=part)
        assert answer["bars"] != first["bars"]
        before = [[row[3] for row in rows[:3]] for rows in answer["bars"]]
        assert before
        changed = {place for _, place, *_ in answer["changes"]}
        assert len(changed) >= 2
        assert all(answer["walk"]["marks"])
    again = ask(port, "/read", text=TEXT)
    assert again | {"seconds": 0} == first | {"seconds": 0}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("mask", ["mask", "mask"]),
        ("scale", ["scores", "scores"]),
        ("positions", ["position", "position"]),
        ("residual", 2 * ["residual_attention"] + ["residual_feed_forward"]),
    ],
)
def test_a_changed_line_names_its_step(port, part, steps):
    answer = ask(port, "/read", text=TEXT, part=part)
    kinds = {step["name"]: step["kind"] for step in answer["walk"]["steps"]}
    assert [kinds[change[4]] for change in answer["changes"]] == steps


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("mask", {"mask": ("nothing is masked", "`is_causal` is False")}),
        ("scale", {"scores": ("divides by nothing", "`scale=1.0`")}),
        (
            "positions",
            {
                "position": ("No line reads `pe`", "No line reads `wpe`"),
                "embedding": 2 * ("x is the token's vector",),
            },
        ),
        (
            "residual",
            {
                "norm": ("not add x", "calls `ln_1`"),
                "second_norm": ("not add x", "calls `ln_2`"),
                "residual_attention": 2 * ("attention's output and adds",),
                "residual_feed_forward": 2 * ("and adds",),
            },
        ),
    ],
)
def test_a_step_without_its_line_says_what_the_models_do(port, part, words):
    walk = ask(port, "/read", text=TEXT, part=part)["walk"]
    assert walk["without"].keys() == words.keys()
    for kind, both in words.items():
        for text, expected in zip(walk["without"][kind], both, strict=True):
            assert expected in text
    # a step gets a sentence if it is not computed, or if its line has changed
    changed = {
        step["kind"]
        for step, shape in zip(walk["steps"], walk["shapes"], strict=True)
        if not shape or marked(step, walk["marks"])
    }
    assert changed - {""} == words.keys()
    assert ask(port, "/read", text=TEXT)["walk"]["without"] == {}


def marked(step, marks):
    """Return whether a step has a changed line, in both styles."""
    return all(
        place
        and any(
            source == place[0] and place[1] <= line <= place[2]
            for source, line, _ in own
        )
        for place, own in zip(step["places"], marks, strict=True)
    )


def test_every_part_says_what_each_style_does_without_it():
    for style in STYLES:
        assert text_of(style, "WITHOUT").keys() == breaks_of(style).keys()


def test_both_styles_without_a_part_are_compared(port, live, monkeypatch):
    for part in ("", *PARTS):
        found = ask(port, "/read", text=TEXT, part=part)["agreement"]
        assert 0 < found["apart"] <= found["bound"] == 1e-12
        assert found["dtype"] == "float64"
    # only one of the two styles lacks its mask
    edits = live.edits | {"mask": [live.edits["mask"][0], []]}
    monkeypatch.setattr(live, "edits", edits)
    monkeypatch.setattr(live, "broken", ("", live.whole))
    found = live.read({"text": TEXT, "part": "mask"})["agreement"]
    assert found["apart"] > 1e-3


def test_the_map_shows_the_future_where_the_mask_is_gone(port):
    for part in ("", *PARTS):
        answer = ask(port, "/influence", text=TEXT, part=part)
        assert answer["time"] == len(TEXT)
        leaks = [early > 1e-6 for early in answer["early"]]
        assert leaks == 2 * [part == "mask"]


@pytest.fixture
def no_hurry(monkeypatch):
    """Give the check of the page as much time as it needs."""
    monkeypatch.setattr(compare, "JUDGED_SECONDS", (60.0,))


@pytest.mark.parametrize("side", [0, 1])
def test_the_sentence_is_the_checks_own(port, side, no_hurry):
    answer = ask(port, "/causality", part="mask", side=side)
    _, copy = broken(STYLES[side], "mask")
    (own,) = check_model(
        copy,
        vocab_size=256,
        block_size=JUDGED_TOKENS,
        checks=["check_causality"],
        budget=60.0,
    ).results
    assert (own.status, own.message) == (answer["status"], answer["sentence"])
    assert own.status == "failed"
    assert answer["headline"] == (
        f"position {own.leak['position']} sees token {own.leak['token']}, by "
        f"{own.leak['size']:.2g}"
    )
    assert f"{STYLES[side].__name__.split('.')[1]}/attention.py" in own.message


@pytest.mark.parametrize("side", [0, 1])
def test_the_headline_of_a_sound_model_says_proved(port, side, no_hurry):
    answer = ask(port, "/causality", part="", side=side)
    assert answer["status"] == "passed"
    # which lengths are proved depends on the speed of the machine
    assert re.fullmatch(
        r"proved at lengths [\d, -]*8: no position sees a later token",
        answer["headline"],
    )


def test_a_check_that_found_no_time_runs_again_with_more(monkeypatch):
    _, copy = broken(STYLES[1], "mask")
    monkeypatch.setattr(compare, "JUDGED_SECONDS", (1e-6,))
    assert judge_causality(copy).status != "failed"
    monkeypatch.setattr(compare, "JUDGED_SECONDS", (1e-6, 60.0))
    assert judge_causality(copy).status == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", *PARTS])
def test_only_a_missing_mask_fails_the_check(port, part):
    for side in range(2):
        answer = ask(port, "/causality", part=part, side=side)
        assert answer["status"] == ("failed" if part == "mask" else "passed")
        if part != "mask":
            sentence = answer["sentence"]
            assert re.match(r"proved at lengths [\w, ]*8, in eval", sentence)


# --- The cache ---------------------------------------------------------------


def tables_of(side, layer, count):
    import base64

    import numpy as np

    return [
        np.frombuffer(base64.b64decode(data), "<f4").reshape(count, -1)
        for data in side["tables"][layer]
    ]


def test_the_tables_are_the_keys_and_values_of_the_whole_text(port):
    import numpy as np

    answer = ask(port, "/cache", text=TEXT)
    assert answer["pieces"] == [9, 9, 1]
    model = annotated.from_gpt2(random_weights(), CONFIG).eval()
    seen = {}
    for i, layer in enumerate(model.decoder.layers):
        for j, what in ((1, "key"), (2, "value")):
            layer.self_attn.linears[j].register_forward_hook(
                lambda _, inputs, out, at=(i, what): seen.update({at: out[0]})
            )
    log_probs(model, [*TEXT.encode()])
    for side in answer["sides"]:
        for layer in range(CONFIG.n_layer):
            two = tables_of(side, layer, len(TEXT))
            for table, what in zip(two, ("key", "value"), strict=True):
                own = seen[layer, what].numpy()
                np.testing.assert_allclose(table, own, rtol=1e-4, atol=1e-5)
        assert side["kept"]
        assert side["apart"] < 1e-10
        assert side["dtype"] == "float64"
        assert all(time > 0 for time in side["milliseconds"])
        assert side["runs"] == cache_steps.MOST_TIMED


def test_times_are_medians_of_runs_that_take_turns(live, monkeypatch):
    order = []

    def timed(run):
        order.append(run.func.__qualname__)
        return float(len(order))

    monkeypatch.setattr(cache_steps, "_timed", timed)
    sides = live.cache({"text": TEXT})["sides"]
    turn = order[:4]
    assert len({*turn}) == 4
    assert order == cache_steps.MOST_TIMED * turn
    middle = 4 * (cache_steps.MOST_TIMED // 2)
    for i, side in enumerate(sides):
        expected = [1e3 * (middle + 2 * i + j) for j in (1, 2)]
        assert side["milliseconds"] == pytest.approx(expected)


def test_times_of_a_slow_model_have_fewer_runs(live, monkeypatch):
    monkeypatch.setattr(cache_steps, "TIMED_SECONDS", 0)
    sides = live.cache({"text": TEXT})["sides"]
    assert [side["runs"] for side in sides] == [3, 3]


def test_rows_that_are_computed_again_are_told(live, monkeypatch):
    text_of = cache_steps.text_of

    def perturbed(style, kind):
        found = text_of(style, kind)
        if kind != "cached":
            return found
        return lambda cache, i: [t + t.size(2) for t in found(cache, i)]

    monkeypatch.setattr(cache_steps, "text_of", perturbed)
    sides = live.cache({"text": TEXT})["sides"]
    assert [side["kept"] for side in sides] == [False, False]


def test_a_text_of_two_tokens_has_no_pieces(live):
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        live.cache({"text": "ab"})


# --- Who may ask, and how much -----------------------------------------------


def test_the_page_is_served_to_this_machines_name_only(port):
    status, content = send(port, "GET", "/")
    assert (status, content) == (200, b"<p>the page")
    for host in (f"localhost:{port}", f"127.0.0.1:{port}"):
        assert send(port, "GET", "/", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
        for method, path in (("GET", "/"), ("POST", "/read")):
            status, content = send(port, method, path, b"{}", Host=host)
            assert status == 403, host
            assert b"the page is at http://127.0.0.1" in content


@pytest.mark.parametrize("path", ["/etc/passwd", "/../page", "/read", "/?"])
def test_no_path_names_a_file(port, path):
    assert send(port, "GET", path)[0] == 404
    status = send(port, "POST", path, b"{}")[0]
    assert status == (400 if path == "/read" else 404)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "1e3"}, 411),
    ],
)
def test_another_page_may_not_ask(port, headers, status):
    assert send(port, "POST", "/read", b"{}", **headers)[0] == status


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"\xff", b"[" * 60_000, b'{"ids":' + b"9" * 9999],
)
def test_a_body_that_is_no_question_is_refused(port, body):
    assert send(port, "POST", "/read", body)[0] == 400


def test_a_request_of_10_mb_is_refused(port):
    status, content = send(port, "POST", "/read", b" " * 10_000_000)
    assert status == 413
    assert b"at most 65,536 bytes, got 10,000,000" in content
    assert ask(port, "/read", text="a")["ids"] == [97]


def test_a_sender_that_never_ends_is_not_waited_for(live, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    with (
        serving("", live.questions) as served,
        socket.create_connection(("127.0.0.1", served.port)) as slow,
    ):
        slow.sendall(b"POST /read HTTP/1.0\r\nContent-Le")
        slow.settimeout(10)
        started = time.monotonic()
        while slow.recv(4096):
            pass
        assert time.monotonic() - started < 5


def test_more_connections_than_there_is_room_for_are_closed(live, monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    with serving("page", live.questions) as served:
        held = [
            socket.create_connection(("127.0.0.1", served.port))
            for _ in range(2)
        ]
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            send(served.port, "GET", "/")
        for connection in held:
            connection.close()
        for _ in range(100):
            try:
                assert send(served.port, "GET", "/")[0] == 200
                break
            except (ConnectionError, http.client.HTTPException):
                time.sleep(0.05)
        else:
            pytest.fail("no room again")


def test_two_pages_at_once_get_their_own_answers(port):
    texts = [f"page {n}" for n in range(4)]
    found = {}

    def read(text, part):
        found[text] = ask(port, "/read", text=text, part=part)

    parts = ["", "mask", "scale", ""]
    threads = [
        threading.Thread(target=read, args=each)
        for each in zip(texts, parts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, part in zip(texts, parts, strict=True):
        alone = ask(port, "/read", text=text, part=part)
        assert found[text] | {"seconds": 0} == alone | {"seconds": 0}


def test_a_fault_of_an_answer_is_an_answer(live):
    def fails(asked):
        raise KeyError("x")

    def endless(asked):
        return {"number": math.inf}

    with serving("", {"/fails": fails, "/endless": endless}) as served:
        assert send(served.port, "POST", "/fails", b"{}")[0] == 500
        assert send(served.port, "POST", "/endless", b"{}")[0] == 400


def test_ctrl_c_ends_the_server_and_frees_its_port(monkeypatch):
    served = PageServer(0)

    def interrupted(poll_interval):
        raise KeyboardInterrupt

    monkeypatch.setattr(served, "serve_forever", interrupted)
    served.run()
    PageServer(served.port).server_close()


def test_closing_waits_for_the_answer_that_is_computed_only():
    told = []

    def slow(asked):
        told.append(asked)
        until(lambda: served.closed)
        return {}

    with serving("", {"/slow": slow}) as served:
        idle = socket.create_connection(("127.0.0.1", served.port))
        statuses = []

        def question():
            statuses.append(send(served.port, "POST", "/slow", b"{}")[0])

        askers = [threading.Thread(target=question) for _ in range(3)]
        for asker in askers:
            asker.start()
        until(lambda: told and len(served.requests) == 4)
        time.sleep(0.1)  # time for the server to read the accepted requests
        started = time.monotonic()
    assert time.monotonic() - started < 5
    idle.close()
    for asker in askers:
        asker.join()
    assert len(told) == 1
    assert sorted(statuses) == [200, 503, 503]


def test_a_port_in_use_is_one_sentence(refused):
    with serving("", {}) as served:
        line = refused("compare", "--serve", "--port", served.port)
    assert f"port {served.port} is in use: give another one" in line
    assert "give --serve as well" in refused("compare", "--port", "80")


@pytest.mark.slow
def test_200_requests_take_no_more_memory(port):
    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    def ask_all(count):
        for n in range(count):
            part = [*PARTS, ""][n % 5] if n % 10 == 0 else ""
            ask(port, "/read", text=f"{n} {TEXT}", part=part)
            if n % 4 == 0:
                ask(port, "/write", text=TEXT, seed=n)
                ask(port, "/cache", text=TEXT)

    ask_all(40)
    before = resident()
    ask_all(200)
    assert resident() - before < 40e6


# --- The template ------------------------------------------------------------


def served_page(live):
    """Return the page that the command would make for a hostile text."""
    more = {"text": HOSTILE, "weights": HOSTILE}
    facts = SimpleNamespace(**live.describe() | more)
    walk = live.walk()
    return fill(
        "live.html", [], live=facts, walk=walk, names=live.pair.names, data={}
    )


def test_a_hostile_text_in_the_field_is_text(live):
    page = served_page(live)
    assert "<img" not in page
    assert "&lt;/script&gt;&lt;img src=x" in page
    answer = live.read({"text": "</script><img src=x>"})
    # JSON is not escaped, because the script shows it as text
    assert answer["text"] == "</script><img src=x>"


def test_only_the_live_page_may_ask_and_both_say_how_to_get_it():
    still, live = (
        fill("base.html", [], data={}, live=live) for live in (None, {"a": 1})
    )
    assert "connect-src" not in still
    assert "connect-src 'self'" in live
    assert "<code>gpt-duet compare --serve</code>" in fill("own.html", [])
