"""Build of the wheel, which carries the public module a second time, as its stub.

Type checkers read no types of a single module in site-packages (PEP 561), but those of a stub package.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithStub(build_py):
    """Copy of ``imagepivot.py`` to ``imagepivot-stubs/__init__.pyi``."""

    def run(self) -> None:
        """Copy the packages, then the stub; an editable install has none."""
        super().run()
        if not self.editable_mode:
            stub = Path(self.build_lib, "imagepivot-stubs", "__init__.pyi")
            stub.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile("imagepivot.py", stub)


setup(cmdclass={"build_py": BuildWithStub})
