"""With $PAGEBINDER_PREBUILT set, packages carry compiled kernels (pagebinder/custom_ops/cpu/prebuilt.py) and fit one
platform; without, there is nothing to compile, and kernels are built on first use. Everything else: pyproject.toml.

    PAGEBINDER_PREBUILT=1                       of every instruction-set level        `make wheel`
    PAGEBINDER_PREBUILT="avx512-bf16 amx"       of these
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILT = os.environ.get("PAGEBINDER_PREBUILT", "")
FOLDER = Path("pagebinder/custom_ops/cpu/prebuilt")
MODULE = "pagebinder.custom_ops.cpu.make_prebuilt"


class BuildPackage(build_py):
    """Compiles the kernels first, into the sources' folder, where they are kept; copies the levels asked for."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / FOLDER
        shutil.rmtree(target, ignore_errors=True)  # of a build before this one
        if not PREBUILT:
            return
        levels = [] if PREBUILT == "1" else PREBUILT.split()
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", MODULE, *levels]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
        for level in levels or sorted(entry.name for entry in FOLDER.iterdir()):
            shutil.copytree(FOLDER / level, target / level)


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(PREBUILT)


class PlatformWheel(bdist_wheel):
    """Kernels know torch's stable ABI and the platform, not Python's version."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildPackage, "bdist_wheel": PlatformWheel})
