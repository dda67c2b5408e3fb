"""The faults in released packages that the README tells of."""

import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
SECTION = README.read_text("utf-8").partition("### What it found")[2]
ROW = re.compile(r"^\| (\S+) ([\d.]+) \| `(.+?)` \| (.+?) \|$", re.M)
ROWS = ROW.findall(SECTION.partition("\n## ")[0])


def test_the_readme_names_faults():
    assert len(ROWS) == 7


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("package", "version", "words", "sentence"), ROWS, ids=[r[2] for r in ROWS]
)
def test_what_the_readme_says_is_found(
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
    for piece in sentence.split(" ... "):  # what follows a colon explains
        assert re.sub(r"(?<=\)|p): it.*", "", piece) in out
