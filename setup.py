# SPDX-License-Identifier: LGPL-2.1-or-later

"""The packages and the one part that is compiled; all else is in pyproject.toml."""

from setuptools import Extension, find_packages, setup

# commands/ lies beside msatools/ in the source, and within it when installed; in
# pyproject.toml such a move allows no search for the other packages.
COMMANDS = "msatools.commands"

# Found as a module is, but loaded by ctypes: one build does for all versions of
# Python, and its headers are not needed. Without a compiler the installation goes on,
# and numpy does the same work (msatools/memory/pages/compiled.py).
CLASSIFY = Extension(
    "msatools.memory._classify",
    sources=["msatools/memory/_classify.c"],
    extra_compile_args=["-std=c11", "-O2"],
    optional=True,
    py_limited_api=True,
)

setup(
    packages=[COMMANDS, *find_packages(include=["msatools", "msatools.*"])],
    package_dir={COMMANDS: "commands"},
    ext_modules=[CLASSIFY],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
