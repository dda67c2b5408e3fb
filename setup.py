"""Install the four folders as one package, gpt_duet.

All other settings are in pyproject.toml. Only this file can list the packages
of a folder under another name, and include AGENTS.md from the root.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {
    "gpt_duet": "shared",
    "gpt_duet.annotated": "annotated",
    "gpt_duet.mingpt_style": "mingpt_style",
    "gpt_duet.benchmarks": "benchmarks",
}
AGENTS = "AGENTS.md"  # the file that `gpt-duet agents` prints


class BuildWithAgents(build_py):
    """Build the packages, and add the file for agents to gpt_duet."""

    def run(self) -> None:
        """Copy the packages, then AGENTS.md."""
        super().run()
        if not self.editable_mode:
            self.copy_file(AGENTS, str(Path(self.build_lib, "gpt_duet")))

    def get_source_files(self) -> list[str]:
        """Return the files of a source distribution."""
        return [*super().get_source_files(), AGENTS]


setup(
    cmdclass={"build_py": BuildWithAgents},
    package_dir=FOLDERS,
    packages=[
        f"{name}.{inside}".rstrip(".")
        for name, folder in FOLDERS.items()
        for inside in ["", *find_packages(folder)]
    ],
)
