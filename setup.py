"""Has a wheel hold the components, and the examples, as folders of the package.

``components/`` is ``persia_torchrec.components``, in a checkout too. ``examples/`` is
``persia_torchrec/examples`` of a wheel.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
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


setup(
    cmdclass={"build_py": BuildPy},
    packages=[
        *find_packages(include=["persia_torchrec*"]),
        "persia_torchrec.components",
    ],
    package_dir={"persia_torchrec.components": "components"},
)
