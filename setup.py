"""Has a wheel hold the examples, as ``persia_torchrec/examples``."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copies the examples into a wheel; a checkout that is installed has its own."""

    def run(self) -> None:
        """Build, and copy."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "persia_torchrec", "examples")
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree("examples", folder, ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy})
