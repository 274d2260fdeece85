# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels of our own build, as far as that goes without building one."""

from pathlib import Path

import pytest

from fixtures.lab import image, ownkernels
from fixtures.lab.cache import Cache
from fixtures.lab.kernels import KERNELS

OWN = {name: row for name, row in KERNELS.items() if row.configs}
CONFIGURED = """\
# CONFIG_NUMA is not set
CONFIG_SWAP=y
CONFIG_LOCALVERSION="-lab"
"""


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        ("CONFIG_SWAP=y\n# A comment\n\n", []),
        ("CONFIG_SWAP=m\n", ["CONFIG_SWAP=m"]),
        ("CONFIG_KASAN=y\n", ["CONFIG_KASAN=y"]),
        ("# CONFIG_NUMA is not set\n", []),
        # Nothing that it depends on is on.
        ("# CONFIG_MEMCG is not set\n", []),
        ("# CONFIG_SWAP is not set\n", ["# CONFIG_SWAP is not set"]),
        ('CONFIG_LOCALVERSION="-lab"\n', []),
    ],
)
def test_options_that_the_kernel_refuses(wanted: str, lacking: list[str]) -> None:
    assert ownkernels.refused(wanted, CONFIGURED) == lacking


def test_guests_without_memcg_do_without_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 30)
    made = image.Image(files=image.guest_files("memory"))
    assert ownkernels.image(made, OWN["6.12debug"], cache) == made
    less = ownkernels.image(made, OWN["6.12small"], cache)
    assert less.files.keys() == made.files.keys()
    texts = {name: path.read_text() for name, path in less.files.items()}
    assert not [name for name, text in texts.items() if "+memory" in text]
    changed = {name for name in texts if less.files[name] != made.files[name]}
    assert {Path(name).name for name in changed} == {"lab.py", "memory.py"}
    for name in changed:
        compile(texts[name], name, "exec")
