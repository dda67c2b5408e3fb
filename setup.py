"""The one package an install brings, gpt_duet, out of the four folders.

All else is in pyproject.toml, which has no way to list what a folder holds
under another name.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "gpt_duet": "shared",
    "gpt_duet.annotated": "annotated",
    "gpt_duet.mingpt_style": "mingpt_style",
    "gpt_duet.benchmarks": "benchmarks",
}

setup(
    package_dir=FOLDERS,
    packages=[
        f"{name}.{inside}".rstrip(".")
        for name, folder in FOLDERS.items()
        for inside in ["", *find_packages(folder)]
    ],
)
