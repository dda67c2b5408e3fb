"""The faults in released packages that docs/found.md names are still found."""

import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest

FOUND = Path(__file__).resolve().parents[2] / "docs" / "found.md"
ROW = re.compile(
    r"^## (\S+) ([\d.]+)\n\n.+\n\n```sh\n"
    r"gpt-duet check (.+?)\n```\n\n> (.+?)$",
    re.M,
)
ROWS = ROW.findall(FOUND.read_text("utf-8"))


def test_the_guide_names_seven_faults():
    assert len(ROWS) == 7


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("package", "version", "words", "sentence"), ROWS, ids=[r[2] for r in ROWS]
)
def test_faults_in_the_guide_are_found(
    duet, monkeypatch, package, version, words, sentence
):
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "none"
    if found != version:
        pytest.skip(f"needs {package} {version}, there is {found}")
    monkeypatch.setenv("COLUMNS", "300")
    status, out, _ = duet("check", *shlex.split(words))
    assert status == (not sentence.startswith("no promise")), out
    out = " ".join(out.split())
    for piece in sentence.split(" ... "):  # omit explanations
        assert re.sub(r"(?<=\)|p): it.*", "", piece) in out
