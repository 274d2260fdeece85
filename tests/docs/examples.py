# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run the documentation's examples on the demo core.

``vmcore`` is the demo core, or the dump of the scenario that a block names;
``vmcore-incomplete`` is most of the demo core. What follows the command in a pipe is
run by a shell. A line ``...`` of what is shown stands for any lines of the output.
"""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from msatools.program import open_target
from msatools.registry import load
from tests.docs.pages import Example, calls_in
from tests.support.calls import CORE, call, open_demo

CUT = "vmcore-incomplete"
MARK = re.compile(r"^\.\.\.$", re.M)
_CUT_HERE = re.compile(r" (?=\| )")


def output_of(line: str, dump: Path | None = None) -> str:
    """Return what a command line prints, errors too.

    :param dump: What ``vmcore`` is; by default the demo core.
    :raises ValueError: if it does not begin with a command of msatools
    """
    first, *rest = _CUT_HERE.split(line, maxsplit=1)
    (found,) = calls_in(first)
    is_demo = "vmcore" in found.words and dump is None and "--types" not in found.words
    opening = open_demo if is_demo else open_target
    with TemporaryDirectory() as directory:
        dumps = {"vmcore": dump or Path(CORE), CUT: Path(directory, CUT)}
        if CUT in found.words:
            core = Path(CORE).read_bytes()
            dumps[CUT].write_bytes(core[: len(core) * 99 // 100])
        words = [str(dumps.get(word, word)) for word in found.words]
        ran = call(load(found.name), *words, opening=opening)
    text = ran.out + ran.err
    for name, path in dumps.items():
        text = text.replace(str(path), name)
    if not rest:
        return text
    done = subprocess.run(
        ["sh", "-c", rest[0].removeprefix("| ")],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def matches(example: Example, output: str) -> bool:
    """Return whether an output is what an example shows."""
    parts = MARK.split(example.shown)
    pattern = ".*".join(re.escape(part.strip("\n")) for part in parts)
    return re.fullmatch(pattern, output.strip("\n"), re.S) is not None
