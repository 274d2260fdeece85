# SPDX-License-Identifier: LGPL-2.1-or-later
import dataclasses

import pytest

from fixtures.lab.kernels import KERNELS


@pytest.mark.parametrize(
    "package",
    [
        "linux-image-6.12.117+deb12-cloud-amd64",
        "linux-image-6.1.0-56-amd64",
        "linux-image-6.1.0-56-cloud-amd64-dbg",
        "linux-image-6.1.0-56-cloud-amd64-unsigned",
        "linux-image-cloud-amd64",
    ],
)
def test_other_kernels_packages_are_not_taken(package: str) -> None:
    assert KERNELS["6.1"].release_of(package) is None


def test_rows_are_keyed_by_their_name() -> None:
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        kind = "linux-source-" if kernel.configs else "linux-image-"
        assert dataclasses.asdict(kernel)["meta"].startswith(kind)
        assert kernel.arch in kernel.flavour.split("-")
        # What stands for it in a run's name, behind the last dash.
        assert "-" not in name
