# SPDX-License-Identifier: LGPL-2.1-or-later

"""The one part that is compiled; all else about the package is in pyproject.toml."""

from setuptools import Extension, setup

# Found as a module is, but loaded by ctypes: one build does for all versions of
# Python, and its headers are not needed. Without a compiler the installation goes on,
# and numpy does the same work (msatools/memory/compiled.py).
CLASSIFY = Extension(
    "msatools.memory._classify",
    sources=["msatools/memory/_classify.c"],
    extra_compile_args=["-std=c11", "-O2"],
    optional=True,
    py_limited_api=True,
)

setup(
    ext_modules=[CLASSIFY],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
