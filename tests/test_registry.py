# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every command in the registry is installed, answered by the demo, and tested."""

import re
from importlib.metadata import distribution

import pytest

from fixtures.demo import DEMOS
from msatools import registry
from msatools.derived.schemas import schemas
from msatools.program import open_target
from tests.support.calls import call
from tests.truth.tables import TABLES


def test_scripts_are_the_commands() -> None:
    installed = distribution("msatools").entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in installed} == {
        "msa": "msatools.frontdoor:script"
    } | {
        f"msa-{name}": f"msatools.console:{name}"
        for name in (*registry.NAMES, *registry.GROUPS)
    }


@pytest.mark.parametrize("kernel", DEMOS)
@pytest.mark.parametrize("name", registry.NAMES)
def test_demo_has_all_that_a_command_reads(name: str, kernel: str) -> None:
    """Otherwise fixtures/demo/questions.py asks too little: record the cores again."""
    words = "--json", "--strict", str(DEMOS[kernel].core)
    ran = call(registry.load(name), *words, opening=open_target)
    assert (ran.status, ran.err) == (0, "")


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_command_has_facts(name: str) -> None:
    """Figures that guests of the lab record: tests/truth/tables.py."""
    assert name in {command.split()[0] for command in TABLES}


@pytest.mark.parametrize("name", registry.NAMES)
def test_diff_compares_what_is_there(name: str) -> None:
    """Fields that no row has would be equal in all reports."""
    schema = schemas()[f"msatools.{name}/1"]
    for table in registry.load(name).compared:
        (kind,) = re.findall(r"'#/\$defs/(\w+)'", str(schema["properties"][table.name]))
        lived = () if table.lived is None else (table.lived,)
        compared = {*table.by, *table.counts, *table.facts, *lived}
        assert compared <= {*schema["$defs"][kind]["properties"]}


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_command_has_the_name_of_its_module(name: str) -> None:
    assert registry.load(name).name == name


@pytest.mark.parametrize("name", registry.GROUPS)
def test_so_has_one_with_subcommands(name: str) -> None:
    assert registry.load_group(name).name == name
    assert name not in registry.NAMES
