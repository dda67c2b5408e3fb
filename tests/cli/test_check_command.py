"""gpt-duet check runs in a project's folder, as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import gpt_duet
from gpt_duet import check_model
from gpt_duet.cli import checking
from gpt_duet.invariants.checks import CHECKS
from gpt_duet.targets import load_target

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import time

import torch
from torch import nn


class Tiny(nn.Module):
    vocab_size, block_size = 11, 8

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.places = nn.Embedding(8, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, idx):
        if idx.size(1) > 8:
            raise ValueError("too long")
        x = self.table(idx) + self.places.weight[: idx.size(1)]
        return self.head(self.mix(x).cumsum(1).tanh())


def build():
    return Tiny()


class Leaky(Tiny):
    def forward(self, idx):
        return super().forward(idx.flip(1))


class Fourier(Tiny):
    def forward(self, idx):
        x = self.table(idx)
        y = torch.fft.irfft(torch.fft.rfft(x, 16, 1), 16, 1)
        return self.head(y[:, : idx.size(1)])


class Slow(Tiny):
    def load_state_dict(self, *arguments, **settings):
        open("asleep", "w").close()
        time.sleep(60)


class Drowsy(Tiny):
    def forward(self, idx):
        time.sleep(0.1)
        return super().forward(idx)


class WrongLogProbs(Tiny):
    def log_probs(self, idx):
        raise RuntimeError("log_probs was called")


class Hinted(Tiny):
    def forward(self, idx, hint=None):
        scores = super().forward(idx)
        return scores if hint is None else scores + hint.unsqueeze(-1)


def packed(lengths):
    return {}


def later(tokens):
    return tokens.roll(-1, 1).float()


def broken():
    return missing_name


def needs(size, depth):
    return Tiny()


def asks(size):
    return Tiny()


def wordy():
    raise RuntimeError("\\n".join(f"line {i}" for i in range(40)))


number = 3
"""


def start(*words, folder):
    """Start the command in a folder, as if it were installed."""
    run = (  # Ctrl-C must work, although a background job ignores it
        "import signal; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; sys.path[0:1] = []; "
        f"sys.path.append({str(ROOT)!r}); "
        "from gpt_duet.cli import main; sys.argv[0] = 'gpt-duet'; main()"
    )
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
        [sys.executable, "-c", run, "check", *map(str, words)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def project(tmp_path):
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def here(project, monkeypatch, duet):
    """Return a function that runs the command in the project's folder."""
    monkeypatch.chdir(project)
    # so that a slow machine prints no line about slowness
    monkeypatch.setattr("gpt_duet.cli.check.SILENCE", 600.0)

    def run(*words):
        status, out, err = duet("check", *words)
        # a check reports progress after 15 s, which a busy machine may take
        return status, out, re.sub(r"(?m)^gpt-duet: \w+: so far .*\n", "", err)

    return run


@pytest.mark.slow
def test_a_target_is_a_style_a_module_or_a_file(here, project):
    targets = ["annotated", "my_pkg.model:build", "my_pkg/model.py:Leaky"]
    checks = ["check_shape", "check_causality"]
    only = [word for check in checks for word in ("--only", check)]
    files = ["--json", "out.json", "--map", "map.html"]
    status, out, err = here(*targets, *only, *files, "--block-size", "4")
    assert (status, err) == (1, "")
    assert "position 0 sees token 1" in out
    content = json.loads((project / "out.json").read_text())["models"]
    assert [m["model"] for m in content] == targets
    assert [m["ok"] for m in content] == [True, True, False]
    assert [m["vocab_size"] for m in content] == [65, 11, 11]
    assert [r["name"] for r in content[0]["results"]] == checks
    proofs = [m["results"][1]["proof"] for m in content]
    assert [p["proved"] for p in proofs] == [True, True, False]
    assert proofs[0]["lengths"] == [*range(1, 5)]
    assert proofs[2]["open"][0]["operation"] == "flip"
    assert {path.name for path in project.glob("map*.html")} == {
        "map-annotated.html",
        "map-my-pkg-model-build.html",
        "map-my-pkg-model-py-Leaky.html",
    }


def test_a_proof_can_be_required(here):
    only = ("--only", "causality")
    status, out, _ = here("my_pkg.model:Fourier", *only)
    assert (status, "model.py:" in out.split("not proved: ")[1]) == (0, True)
    status, out, _ = here("my_pkg.model:Fourier", *only, "--require-proof")
    assert (status, "a proof is required: not proved" in out) == (1, True)
    status, out, _ = here("my_pkg.model:build", *only, "--require-proof")
    assert (status, "proved at lengths 1 to 8, in" in out) == (0, True)


def test_an_argument_that_is_never_given_comes_first(here, project):
    """The report says how to give the argument, or how to rule it out."""
    model, only = "my_pkg.model:Hinted", ("--only", "causality")
    only += ("--require-proof", "--json", "out.json")
    status, out, _ = here(model, *only)
    assert (
        status,
        "required: argument hint was never given: --documents hint, --input "
        "hint=my_pkg:make, or --input hint=never; " in " ".join(out.split()),
    ) == (1, True)
    found = json.loads((project / "out.json").read_text())["models"][0]
    assert found["never_given"] == ["hint"]
    assert found["results"][0]["proof"]["never_given"] == ["hint"]
    assert found["results"][0]["proof"]["proved"]
    place = found["results"][0]["places"][0]
    line = (
        (project / place["file"]).read_text().splitlines()[place["line"] - 1]
    )
    assert "def forward" in line
    assert "hint" in line
    status, out, _ = here(model, *only, "--input", "hint=never")
    assert (
        status,
        "said to be never given: hint; pr" in " ".join(out.split()),
    ) == (0, True)
    status, out, _ = here(model, *only, "--input", "hint=my_pkg.model:later")
    assert (status, ", with hint; token" in " ".join(out.split())) == (
        1,
        True,
    )
    for given, words in (
        ("hint", "--input takes an argument and a function"),
        ("other=never", "inputs name other, which the call does not take"),
    ):
        status, _, err = here(model, *only, "--input", given)
        assert (status, words in err) == (2, True), err


def test_documents_are_named_by_an_argument_an_id_or_a_function(here):
    model, only = "my_pkg.model:Hinted", ("--only", "documents")
    for given, status, words in (
        ("hint", 1, "of document"),
        ("0", 1, "with id 0 at the end of each"),
        ("my_pkg.model:packed", 1, "with packed()"),
        ("length", 2, "which the call does not take"),
        ("11", 2, "outside the vocabulary of 11"),
    ):
        found, out, err = here(model, *only, "--documents", given)
        text = " ".join((out + err).split())
        assert (found, words in text) == (status, True), text


def test_a_map_shows_the_model_as_checked(here, project, monkeypatch):
    how = []
    influence = checking.influence
    monkeypatch.setattr(
        checking,
        "influence",
        lambda *given, **named: (
            how.append(named) or influence(*given, **named)
        ),
    )
    words = (
        "--only=shape",
        "--outputs=logits",
        "--device=cpu",
        "--map=m.html",
    )
    status, out, err = here("my_pkg.model:WrongLogProbs", *words)
    assert status == 0, out + err
    assert (project / "m.html").exists()
    assert str(how[0]["device"]) == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing_here"], "no module 'nothing_here'"),
        (["my_pkg.model"], "name the factory, as my_pkg.model:build"),
        (["my_pkg/model.py"], "name its factory, as my_pkg/model.py:build"),
        (["no/such.py:build"], "there is no file no/such.py"),
        (["my_pkg.model:number"], "gives int"),
        (["my_pkg.model:broken"], "broken raised NameError"),
        (["annotated", "--only", "nope"], "unknown check check_nope"),
        (["annotated", "--only", "causalty"], "did you mean check_causality"),
        (["annotated", "--expect", "cache"], 'check_cache="why", got'),
        (["anotated"], "no module 'anotated': did you mean annotated?"),
        (["my_pkg.model:build", f"--json={300 * 'n'}"], "File name too long"),
        (["annotated", "--budget", "soon"], "takes 90s, 4m or seconds"),
        (["annotated", "--quick", "--thorough"], "choose one"),
        (["annotated", "--device", "nowhere"], "no device 'nowhere'"),
        (["annotated", "--map", "map.gif"], "map.gif"),
        (["annotated", "--json", "no/out.json"], "there is no folder no"),
        (["my_pkg.model:build", "--vocab-size", "12"], "vocab_size=11"),
        (["my_pkg.model:needs"], "needs(size, depth) requires size and"),
        (["my_pkg.model:asks"], "no arguments: asks(size) requires size"),
        (["annotated", "--block-size", "0"], "--block-size must be at least"),
        (["my_pkg.model:build", "--window", "0"], "--window must be at least"),
        (["my_pkg.modle:build"], "did you mean my_pkg.model?"),
        (["my_pkg.modle"], "did you mean my_pkg.model?"),
        (
            ["annotated", "--only", "shape", "causality"],
            "causality is a check, not a model: give each check with --only",
        ),
        (["annotated", "--bogus"], "No such option: --bogus"),
        (["annotated", "--seed", "x"], "gpt-duet check -h lists the opt"),
        (["my_pkg/model.py"], "; it has build, Tiny, Leaky, Fo"),
        (["my_pkg/__init__.py"], ":build; it has no function and no class"),
    ],
)
def test_a_mistake_ends_in_one_line_and_status_2(
    project, words, message, here
):
    status, out, err = here(*words)
    assert status == 2, out + err
    last = err.splitlines()[-1]
    assert last.startswith("gpt-duet: ")
    # click 8.5 quotes the option; the copy of click in newer typers does not
    assert message in last.replace(" '--bogus'", ": --bogus")
    assert out == ""
    assert "shared/" not in err


def test_the_users_exception_is_shown_as_theirs(project, here):
    (project / "bad.py").write_text("import json\n\njson.loads('{')\n")
    for target, words in (
        ("bad:build", ['bad.py", line 3', "JSONDecodeError"]),
        ("my_pkg.model:broken", ["in broken", "NameError"]),
    ):
        status, _, err = here(target)
        assert status == 2
        assert all(word in err for word in words), err
        assert str(ROOT / "shared") not in err


@pytest.mark.slow
def test_a_project_with_folders_named_like_ours_works(project):
    source = "from my_pkg.model import build\n"
    for own in ("tests", "benchmarks", "shared"):
        (project / own).mkdir()
        (project / own / "__init__.py").write_text("")
        (project / own / "helpers.py").write_text(f"OWN = {own!r}\n")
        source += f"from {own}.helpers import OWN\nassert OWN == {own!r}\n"
    (project / "mine.py").write_text(source)
    words = ("mine:build", "mine.py:build", "--only", "shape")
    process = start(*words, folder=project)
    texts = process.communicate(timeout=120)
    assert process.returncode == 0, texts
    # run Python with the current folder in sys.path
    run = "from gpt_duet.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", run, "bench", "--help"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpt-duet bench" in done.stdout


@pytest.mark.slow
def test_each_line_is_printed_at_once_and_survives_ctrl_c(project):
    words = ("--only=shape", "--only=state_dict", "--json=out.json")
    process = start("my_pkg.model:Slow", *words, folder=project)
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0] == "my_pkg.model:Slow: 11 tokens, sequences to 8\n"
    assert lines[2].startswith("check_shape ")
    while not (project / "asleep").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 passed, 1 skipped; interrupted" in out
    content = json.loads((project / "out.json").read_text())
    assert not content["ok"]
    assert content["models"][0]["interrupted"]
    statuses = [r["status"] for r in content["models"][0]["results"]]
    assert statuses == ["passed", "skipped"]


@pytest.mark.parametrize(
    ("words", "status", "printed", "said"),
    [
        (["--only", "shape", "--json=-"], 0, '"ok": true', "check_shape"),
        (["--only=cache", "--only=shape", "--skip=cache"], 0, "1 passed;", ""),
        (["--only", "normalised", "--outputs", "logits"], 0, "skipped", ""),
        (["--only", "normalised", "--outputs", "log_probs"], 1, "failed", ""),
        (
            [
                "--only",
                "normalised",
                "--outputs",
                "log_probs",
                "--expect",
                "normalised=it has logits",
            ],
            0,
            "it has logits: ",
            "",
        ),
    ],
)
def test_options_of_check_are_obeyed(here, words, status, printed, said):
    ended, out, err = here("my_pkg.model:build", *words)
    assert ended == status, out + err
    assert printed in out
    assert said in err
    if said:
        json.loads(out)


@pytest.mark.slow
def test_json_has_the_leak_of_the_report_as_fields(here, project):
    only = ("--only=shape", "--only=causality")
    good, bad = "my_pkg.model:build", "my_pkg.model:missing"
    leaks = "my_pkg.model:Leaky"
    status, _, err = here(leaks, bad, good, *only, "--json=out.json")
    assert status == 2
    assert "has no 'missing'" in err
    content = json.loads((project / "out.json").read_text())
    assert content["schema"] == 1
    assert content["version"] == gpt_duet.__version__
    first, second, third = content["models"]
    assert [m["ok"] for m in content["models"]] == [False, False, True]
    assert "has no 'missing'" in second["error"]
    assert third["results"][1]["leak"] is None
    leak = first["results"][1]["leak"]
    where = {"file": "my_pkg/model.py", "position": 0, "token": 1, "length": 2}
    assert where.items() <= leak.items()
    assert leak["size"] > 0.01
    line = MODEL.splitlines()[leak["line"] - 1]
    assert "flip" in line or "cumsum" in line
    report = check_model(
        lambda: load_target(leaks)(), checks=["shape", "causality"]
    )
    own = json.loads(report.to_json())
    assert own.keys() == first.keys()
    assert own["results"][1]["leak"].keys() == leak.keys()


@pytest.mark.parametrize(
    "words", [["my_pkg.model:missing"], ["--budget=soon"], ["no.py:build"]]
)
def test_a_mistake_is_written_to_json(here, project, words):
    words = words if ":" in words[0] else ["my_pkg.model:build", *words]
    status, _, err = here(*words, "--json=out.json")
    assert status == 2
    content = json.loads((project / "out.json").read_text())
    assert (content["ok"], content["schema"]) == (False, 1)
    assert err == f"gpt-duet: {content['error']}\n"
    assert content["models"][0]["model"] == words[0]


@pytest.mark.slow
def test_rows_are_short_in_a_terminal_and_q_prints_only_failures(
    here, monkeypatch
):
    sound, leaks = "my_pkg.model:build", "my_pkg.model:Leaky"
    words = ("--only=causality", "--only=shape")
    whole = here(sound, *words)[1]
    assert "in bfloat16" in " ".join(whole.split())
    # -q shows only failures, and starts each part of a message on a new line
    assert here(sound, *words, "-q") == (0, "", "")
    status, out, _ = here(sound, leaks, *words, "-q")
    assert (status, sound in out, "passed  " in out) == (1, False, False)
    rows = [row.strip() for row in out.splitlines()]
    assert any(row.startswith("first seen at my_pkg/") for row in rows)
    assert any(row.startswith("way: my_pkg/") for row in rows)
    assert out.rstrip().endswith("(check --list shows them)")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    short = here(sound, *words)[1]
    assert short.rstrip().count("\n") == 4  # 4 lines: each row fits on one
    assert "eval and train mode ..." in short
    again = here(sound, *words, "-v")[1]
    assert "in bfloat16" in " ".join(again.split())


@pytest.mark.parametrize(
    "reserve",
    [
        {"not_tried": "larger weights"},
        {"proof": {"proved": False}},
        {"proof": {"proved": True, "assumptions": ["scores are small"]}},
        {"proof": {"proved": True, "never_given": ["shift"]}},
    ],
)
def test_a_caveat_is_shown_completely(reserve):
    from gpt_duet.invariants.report import CheckResult, Report

    report = Report("m", 2, 2, names=["check_causality"])
    plain = CheckResult("check_causality", "passed", 9 * "a part; ", 0.0)
    assert report.row(plain, 60, brief=True).count("\n") == 0
    open_one = replace(plain, **reserve)
    assert report.row(open_one, 60, brief=True) == report.row(plain, 60)


def test_github_gets_annotations_and_a_summary(here, project, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project / "summary.md"))
    leaks, bad = "my_pkg.model:Leaky", "my_pkg.model:missing"
    words = ("--only=causality", "--only=shape", "--format=github")
    status, out, _ = here(leaks, bad, "my_pkg.model:build", *words)
    assert status == 2
    leak, wrong = [x for x in out.splitlines() if x.startswith("::error")]
    place, _, message = leak.removeprefix("::error ").partition("::")
    # in this format, a colon or a comma ends a property, and the end of the
    # line ends the command
    file, line, title = place.split(",")
    assert (file, title) == (
        "file=my_pkg/model.py",
        "title=check_causality%3A my_pkg.model%3ALeaky",
    )
    source = (project / "my_pkg/model.py").read_text().splitlines()
    assert "flip" in source[int(line.removeprefix("line=")) - 1]
    assert message.startswith("position 0 sees token")
    assert "file=my_pkg/model.py,line=1,title=target%3A" in wrong
    text = (project / "summary.md").read_text()
    assert "| my\\_pkg.model:build | 2 | 0 | 0 |" in text
    assert "| my\\_pkg.model:missing | not checked | - | - |" in text
    table = [row for row in text.splitlines() if row.startswith("|")]
    assert {row.count(" | ") for row in table} == {3}
    # below the table, each fault is listed with its place
    faults = [row for row in text.splitlines() if row.startswith("- ")]
    assert len(faults) == 2
    at = line.removeprefix("line=")
    where = f"my\\_pkg.model:Leaky, my\\_pkg/model.py:{at}"
    start = f"- **check_causality**, {where}: position 0 sees token"
    assert faults[0].startswith(start)
    assert faults[1].startswith("- **target**, my\\_pkg.model:missing")
    # paths start at the repository's root and may have a folder src
    (project / "src").mkdir()
    # a new name, because another test may have imported my_pkg
    (project / "my_pkg").rename(project / "src/leaking_pkg")
    monkeypatch.syspath_prepend(project / "src")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.parent))
    _, out, _ = here(leaks.replace("my_pkg", "leaking_pkg"), *words)
    assert f"file={project.name}/src/leaking_pkg/model.py,line=" in out
    (project / "src/leaking_pkg").rename(project / "my_pkg")
    monkeypatch.delenv("GITHUB_WORKSPACE")
    # JSON is written even if the only target, or the settings' file, is wrong
    _, out, _ = here(bad, *words)
    assert out.startswith("::error file=my_pkg/model.py,line=1,title=target")
    (project / "pyproject.toml").write_text("[tool.gpt-duet]\na, b\n")
    _, out, _ = here(*words)
    place = "file=pyproject.toml,line=1,title=target%3A pyproject.toml"
    assert out.startswith(f"::error {place}::")


def test_special_characters_of_commands_are_escaped(tmp_path, monkeypatch):
    from gpt_duet.cli.formats import annotations, write_summary

    model = {"model": "a,b*a|b*", "error": "50% of\nall"}
    (line,) = annotations([model])
    assert line == "::error title=target%3A a%2Cb*a|b*::50%25 of%0Aall"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    write_summary([model])
    text = (tmp_path / "summary.md").read_text()
    assert r"| a,b\*a\|b\* | not checked |" in text


def test_sarif_has_the_required_fields(here, project):
    """The log has the fields that sections 3.13 to 3.49 of SARIF 2.1.0
    require.

    `sarif-multitool validate` 5.7.0, which has the schema, found no error.
    """
    (project / "leaking.py").write_text(MODEL)
    words = ("leaking.py:Leaky", "--only=causality", "--format=sarif")
    _, out, err = here(*words)
    assert "check_causality" in err
    log = json.loads(out)
    assert log["version"] == "2.1.0"
    assert "sarif-2.1.0" in log["$schema"]
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "gpt-duet"
    (result,) = run["results"]
    (rule,) = driver["rules"]
    assert rule["id"] == result["ruleId"] == "check_causality"
    assert rule["shortDescription"]["text"].endswith(".")
    assert result["level"] in ("none", "note", "warning", "error")
    assert "position 0 sees token" in result["message"]["text"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "leaking.py"}
    assert place["region"]["startLine"] > 1


def test_json_on_stdout_is_without_other_text(project):
    (project / "loud.py").write_text(
        f"import os\nprint('a')\nos.system('echo b')\n{MODEL}"
    )
    words = ("loud:build", "--only=shape", "--json=-")
    out, err = start(*words, folder=project).communicate(timeout=60)
    assert json.loads(out)["ok"]
    assert {"a", "b"} < {*err.split()}


def test_a_map_in_ascii_and_names_without_escape_codes(here, monkeypatch):
    target = "my_pkg.model:(lambda name: Leaky())('\x1b[31m')"
    words = (target, "--only=causality")
    _, out, _ = here(*words)
    assert "\u2588" in out
    assert "\x1b" not in out
    assert r"('\x1b[31m')" in out
    monkeypatch.setattr("locale.getencoding", lambda: "US-ASCII")
    _, out, _ = here(*words)
    assert out.isascii()
    assert "\n6 . # #" in out
    assert "\x1b" not in here("\x1b[2J")[2]


def test_the_list_has_a_line_for_each_check(here):
    status, out, _ = here("--list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [*CHECKS]
    assert all(line.endswith(".") for line in out.splitlines())
    assert "Slow: --only entropy_bound." in out


# Several targets: each is checked as if it were the only one -----------------

SPOILS = """
import os, sys, warnings
import torch
from my_pkg.model import Tiny

print("an import prints")
os.write(1, b"below Python\\n")
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.set_default_device("meta")
warnings.simplefilter("error")
torch.equal = torch.allclose = lambda *a, **k: True
torch.Tensor.__ne__ = lambda a, b: torch.zeros_like(a, dtype=torch.bool)
sys.path.insert(0, "/")
os.chdir("/")


class Fine(Tiny):
    pass
"""
ENDS = """
import os, sys
from my_pkg.model import Tiny


def factory():
    sys.exit(0)


class Forward(Tiny):
    def forward(self, idx):
        exit()


def process():
    os._exit(0)
"""


@pytest.mark.slow
def test_a_target_does_not_affect_the_next_one(here, project):
    (project / "spoils.py").write_text(SPOILS)
    (project / "model.v2.py").write_text("from my_pkg.model import Leaky\n")
    sound, leaks = "my_pkg.model:build", "model.v2.py:Leaky"
    only = ("--only=causality", "--only=purity", "--only=dtype")
    files = ("--json=out.json", "--map=m.html")
    here("spoils:Fine", sound, leaks, *only, *files)
    models = json.loads((project / "out.json").read_text())["models"]
    assert [m["model"] for m in models] == ["spoils:Fine", sound, leaks]
    assert [m["failed"] for m in models[1:]] == [[], ["check_causality"]]
    maps = {path.name for path in project.glob("*.html")}
    assert {"m-my-pkg-model-build.html", "m-model-v2-py-Leaky.html"} <= maps


def test_a_model_that_ends_the_program_is_a_failure(here, project, duet):
    (project / "ends.py").write_text(ENDS)
    (project / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    targets = ["leaves:build", "ends:factory", "ends:Forward"]
    for target in targets:
        status, out, _ = here(target, "--only=shape", "--json=-")
        (model,) = json.loads(out)["models"]
        assert (status, model["ok"]) == (2, False)
        assert "SystemExit" in model["error"]
    status, _, err = duet("diff", "ends:Forward", "my_pkg.model:build")
    assert (status, "ends the program: SystemExit" in err) == (2, True), err
    targets += ["ends:process", "my_pkg.model:build"]
    status, out, _ = here(*targets, "--only=shape")
    assert status == 2
    assert "my_pkg.model:build: 11 tokens" in out


def test_a_slow_check_is_announced(here, monkeypatch):
    monkeypatch.setattr(CHECKS["check_shape"], "slow", True)
    words = ("my_pkg.model:build", "--only=shape", "--only=purity")
    _, out, err = here(*words)
    assert err.startswith("gpt-duet: check_shape trains the model")
    assert "2 passed" in out


@pytest.mark.slow
def test_lines_of_a_slow_model_are_printed_at_once(project):
    target = "my_pkg.model:Drowsy"
    process = start(target, "--budget", "12s", folder=project)
    lines, began = {}, time.monotonic()
    for line in process.stdout:
        lines[f"{line} ".split(" ")[0]] = time.monotonic() - began
    assert process.wait() == 0, process.stderr.read()
    names = target + ":", "at", "check", "check_shape", "check_causality"
    assert tuple(lines)[:5] == names
    assert lines["check_shape"] + 1 < lines["check_causality"]


def test_a_model_that_is_slow_to_build_is_announced(here, monkeypatch):
    target = ("my_pkg.model:build", "--only", "normalised")
    assert "slow to build" not in here(*target)[2]
    monkeypatch.setattr("gpt_duet.cli.check.SILENCE", 0.0)
    assert "my_pkg.model:build is slow to build or call\n" in here(*target)[2]


def test_a_long_traceback_is_cut_and_debug_shows_all_of_it(
    here, monkeypatch, capsys
):
    # the command sets this; monkeypatch restores it at the end
    monkeypatch.setattr("gpt_duet.console.debug", False)
    status, _, err = here("my_pkg.model:wordy")
    assert status == 2
    *shown, last = err.splitlines()
    assert len(shown) == 20
    assert shown[1] == "  ..."
    assert shown[-1] == "line 39"
    assert last.startswith("gpt-duet: ")
    with pytest.raises(ValueError, match="wordy raised RuntimeError"):
        here("my_pkg.model:wordy", "--debug")
    err = capsys.readouterr().err
    assert "line 3\n" in err
    assert str(ROOT / "shared" / "running") in err
