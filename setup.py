# SPDX-License-Identifier: LGPL-2.1-or-later

"""The packages, what is compiled of them, and the files made from the commands.

All else is in pyproject.toml.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

# setuptools has it under this name only.
from distutils.command.install_data import install_data  # isort: skip

# commands/ lies beside msatools/ in the source, and within it when installed; in
# pyproject.toml such a move allows no search for the other packages.
COMMANDS = "msatools.commands"

# So does the documentation, which `msa help` shows and manual pages quote.
DOCS = "msatools.docs"


def _library(path: str) -> Extension:
    """Return a part in C.

    It is found as a module is, but loaded by ctypes: one build does for all versions of
    Python, and its headers are not needed. Without a compiler the installation goes on,
    and Python and numpy do the same work (msatools/native.py).
    """
    return Extension(
        path.replace("/", "."),
        sources=[f"{path}.c"],
        extra_compile_args=["-std=c11", "-O2"],
        optional=True,
        py_limited_api=True,
    )


class InstallData(install_data):
    """Install manual pages and completion scripts, which are derived from the commands.

    They are written by the modules that have just been built.
    """

    distribution: Distribution

    def run(self) -> None:
        """Write the files, and install them below ``share``."""
        build = self.get_finalized_command("build")
        modules = self.get_finalized_command("build_py")
        assert isinstance(modules, build_py)
        self.data_files = []
        if not modules.editable_mode:
            share = Path(build.build_base, "share").resolve()
            shutil.rmtree(share, ignore_errors=True)
            # Python looks for modules here first.
            subprocess.run(
                [sys.executable, "-m", "msatools.derived.manuals", share],
                cwd=build.build_lib,
                check=True,
            )
            self.data_files = [
                (str("share" / file.parent.relative_to(share)), [str(file)])
                for file in sorted(share.rglob("*"))
                if file.is_file()
            ]
        super().run()


setup(
    packages=[COMMANDS, DOCS, *find_packages(include=["msatools", "msatools.*"])],
    package_dir={COMMANDS: "commands", DOCS: "docs"},
    cmdclass={"install_data": InstallData},
    package_data={DOCS: ["guides/*.md", "commands/*.md"]},
    # MANIFEST.in, which names what belongs to the source, would add them.
    exclude_package_data={DOCS: ["schema/*"]},
    # Otherwise the command is not run; it finds the files itself.
    data_files=[("share/man/man1", [])],
    ext_modules=[
        _library("msatools/memory/_classify"),
        _library("msatools/program/_kdump"),
        _library("msatools/selfdesc/_tables"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
