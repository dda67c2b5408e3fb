"""gpt-duet compare runs as a user runs it, with a user's mistakes."""

import json
import re
from functools import partial

import pytest

from gpt_duet.comparison import styles
from gpt_duet.files import write_json

SMALL = ("--n-layer=1", "--n-head=2", "--n-embd=8")


@pytest.fixture
def compare(done, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return partial(done, "compare", *SMALL)


def test_compare_needs_no_arguments(done):
    out, err = done("compare")
    assert err == ""
    assert "one function: largest difference" in out


def test_compare_prints_everything(compare):
    out, err = compare(
        "--text=A long time ago", "--block-size=8", "--tokenizer=bytes"
    )
    assert err == ""
    for words in (
        "15 characters", "15 (bytes)", "the first 8 are used",
        "block.0.attention", "block.0.feed_forward", "final_norm",
        "log_probs", "embedding", "head", "total", "next token", "median",
        "one function: largest difference",
        "In this comparison annotated ran with nn.LayerNorm;",
        "LayerNorm (eps outside the root) the log-probabilities of",
    ):  # fmt: skip
        assert words in out, words
    assert re.search(r"after +[.]{3}g·t +[.]{3}g·t", out)


@pytest.mark.parametrize(("count", "said"), [(1, "1 thread"), (2, "2 th")])
def test_times_are_printed_in_milliseconds(compare, monkeypatch, count, said):
    quartiles = [(0.0011, 0.0123, 0.02), (0.5, 1.0, 2.0)]
    monkeypatch.setattr(styles, "forward_times", lambda *_: quartiles)
    words = "--text=A long time ago", "--tokenizer=bytes"
    out, _ = compare(*words, f"--threads={count}")
    assert f"time, {said}" in out
    assert re.search(r"forward pass, median +12.30 ms +1000.00 ms", out)
    assert re.search(r"quartiles +1.10 to 20.00 ms +500.00 to 2000.00", out)


def test_a_narrow_terminal_truncates_no_line(done, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for force in ("", "1"):  # output to a file, then to a terminal
        monkeypatch.setenv("FORCE_COLOR", force)
        out = re.sub(r"\x1b\[[0-9;]*m", "", done("compare", *SMALL)[0])
        lines = out.splitlines()
        assert "mingpt_style" in out
        assert "its quartiles" in out
        longest = [line for line in lines if len(line) > 60]
        if force:
            assert longest == []
            # the second line continues the fact
            assert lines[1].startswith("         ")
        else:  # a file gets whole lines
            assert {line.split()[0] for line in longest} >= {"text", "one"}


def test_pieces_that_cannot_be_printed_are_spelt_out(compare):
    out, _ = compare("--text", "\x1b[31m[bold]\n\té")
    assert "\x1b" not in out
    for piece in (r"\x1b", r"\n", r"\t", "c3", "a9"):
        assert piece in out.split()
    assert "are used" not in out  # all of the text is used
    out, _ = compare("--text=[/bold]", "--tokenizer=char")
    assert "[" in out


def test_json_has_it_all_and_a_link_stays_a_link(compare, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    compare(
        "--text=abcdef", "--block-size=3", "--json", link, "--dtype=float64",
        "--seed=3", "--tokenizer=bytes",
    )  # fmt: skip
    assert link.is_symlink()
    found = json.loads(target.read_text())
    assert found["one_function"] is True
    assert found["styles"] == ["annotated", "mingpt_style"]
    assert found["text"]["tokens"] == [97, 98, 99]  # the start of the text
    assert found["config"]["n_embd"] == 8
    assert found["dtype"] == "float64"
    assert found["differences"]["log_probs"] <= found["bound"] == 1e-12
    assert len(found["next_tokens"][0]) == 5
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"target.json", "link.json"}


def test_nan_is_null_in_json(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), 1.0], "b": (2,)})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"a": [None, 1.0], "b": [2]}


def test_tokens_of_gpt2(compare, r50k_base, sibling):
    file = sibling / "data" / "tinyshakespeare.txt"
    out, _ = compare("--tokenizer=davinci", "--block-size=16", "--file", file)
    assert "1,115,394 characters" in out
    assert "the first 16 are used" in out
    assert ["5962", "22307", "25"] in [
        line.split()[:3] for line in out.splitlines()
    ]


def test_a_tied_head_and_sizes_that_a_preset_lacks(compare, done):
    out, _ = compare("--preset=gpt2", "--text=abc")
    assert re.search(r"head +[\d,]+ +tied to embedding", out)
    nano = ("--preset=gpt-nano", "--text=abc", "--n-layer=1")
    out, _ = done("compare", *nano)
    assert "1 layers, 3 heads, 48 wide, block size 64, vocabulary 1,024" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "gpt5"], ["'gpt5'", "gpt2-medium"]),
        (["--tokenizer", "none"], ["'none'", "bytes", "r50k_base"]),
        (["--device", "toaster"], ["'toaster'", "cpu"]),
        (["--device", "meta"], ["'meta'", "cpu"]),
        (["--block-size", "9" * 20], ["block_size", "at most 2,147,483,647"]),
        (["--dtype", "float8"], ["'float8'", "float32 or float64"]),
        (["--file", "latin1.txt"], ["latin1.txt", "UTF-8", "0xe9"]),
        (["--text", ""], ["--text is empty"]),
        (["--text", "\udcff"], ["--text is not UTF-8"]),
        (["--text", "a", "--file", "ok.txt"], ["--text or --file"]),
        (["--n-layer", "0"], ["n_layer", "at least 1", "0"]),
        (["--n-embd", "10", "--n-head", "3"], ["n_embd=10 and n_head=3"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--json", "no/such/folder.json"], ["no folder", "no/such"]),
        (["--json", "."], ["is a folder"]),
        (["--html", "/dev/null"], ["/dev/null", "not an ordinary file"]),
        (["--html", "/proc/page.html"], ["cannot write /proc/page.html"]),
        (["--bench", "b.json"], ["--bench", "--html"]),
        (["--html", "x", "--json", "./x"], ["--json and --html", "one file"]),
        (["--file", "ok.txt", "--html", "ok.txt"], ["--file and --html"]),
        (["annotated", "mingpt_style", "shared"], ["two styles", "3"]),
        (["annotated", "nowhere"], ["no style 'nowhere'"]),
        (["annotated", "gpt_duet.config"], ["is not a style", "from_gpt2"]),
    ],
)
def test_a_mistake_ends_in_one_line(
    duet, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.txt").write_text("fine")
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    status, _, message = duet("compare", *SMALL, *arguments)
    assert (status, message.count("\n")) == (2, 1), message
    assert all(word in message for word in words), message
    assert {p.name for p in tmp_path.iterdir()} == {"ok.txt", "latin1.txt"}
    assert (tmp_path / "ok.txt").read_text() == "fine"


def test_a_tokenizer_too_large_for_a_preset_is_refused(refused, r50k_base):
    words = ("--preset=openai-gpt", "--tokenizer=davinci", "--text=abc")
    assert "50257 tokens, more than the 40478" in refused("compare", *words)
