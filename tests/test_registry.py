# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every command in the registry is installed, recorded in the demo, and tested."""

from importlib.metadata import distribution

import pytest

from fixtures.demo.questions import QUESTIONS
from msatools import registry
from tests.contract.table import ROWS
from tests.truth.test_facts import TABLES


def test_scripts_are_the_commands() -> None:
    installed = distribution("msatools").entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in installed} == {
        "msa": "msatools.frontdoor:script"
    } | {
        f"msa-{name}": f"msatools.console:{name}"
        for name in (*registry.NAMES, *registry.GROUPS)
    }


def test_all_are_recorded_and_tested() -> None:
    assert {question.split()[0] for question in QUESTIONS} == {*registry.NAMES}
    assert [row.name for row in ROWS] == [*registry.NAMES]
    assert {name.split()[0] for name in TABLES} == {*registry.NAMES}


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_command_has_the_name_of_its_module(name: str) -> None:
    assert registry.load(name).name == name


@pytest.mark.parametrize("name", registry.GROUPS)
def test_so_has_one_with_subcommands(name: str) -> None:
    assert registry.load_group(name).name == name
    assert name not in registry.NAMES
