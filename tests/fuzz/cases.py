# SPDX-License-Identifier: LGPL-2.1-or-later

"""The choice of a case: a dump, a layer, what is changed, and the command."""

from dataclasses import dataclass
from random import Random

from fixtures.demo.questions import words_of_json
from tests.contract.table import ROWS
from tests.fuzz import container, image, memory, notes, tables
from tests.fuzz.change import Change
from tests.fuzz.dumps import IMAGES, Dump, dump, formats_of
from tests.support.calls import with_operands

CORES = ("6.1", "6.12")

LAYERS = {
    "container": container.change,
    "notes": notes.change,
    "tables": tables.change,
    "memory": memory.change,
    "image": image.change,
}


@dataclass(frozen=True)
class Case:
    """One run of a command on a changed dump."""

    seed: str
    """``SEED:NUMBER``."""

    layer: str
    dump: Dump
    command: str
    words: tuple[str, ...]
    changes: tuple[Change, ...]
    is_json: bool

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command's words, without the dump."""
        return (*self.words, "--strict", *(("--json",) if self.is_json else ()))


def make_case(
    seed: str,
    layers: tuple[str, ...] = tuple(LAYERS),
    cores: tuple[str, ...] = CORES,
) -> Case:
    """Return the case of a seed."""
    chance = Random(seed)
    layer = chance.choice(layers)
    if layer == "image":
        # The lab's dumps have notes.
        cores = tuple(core for core in cores if core in CORES) or CORES
    is_file = layer in ("container", "notes")
    core = chance.choice(cores)
    formats = [
        format
        for format in formats_of(core)
        # Its pages cannot be replaced.
        if is_file or format != "flattened"
    ]
    format = chance.choice(IMAGES if layer == "image" else formats)
    row = chance.choice(ROWS)
    words = chance.choice(("", *row.asked)).split()
    is_json = chance.random() < 0.8
    if is_json:
        words = words_of_json(row.command, words)
    if row.command.operands is not None and "--diff" not in words:
        words = [*memory.places(core, chance), *words]
    words = with_operands(row.command, *words)
    changed = dump(core, format)
    changes = tuple(LAYERS[layer](changed, chance))
    return Case(seed, layer, changed, row.name, tuple(words), changes, is_json)
