# SPDX-License-Identifier: LGPL-2.1-or-later

"""Write the scripts in /usr/bin, which find modules in the package's own folder."""

import sys
from importlib.metadata import PathDistribution
from pathlib import Path

SCRIPT = """\
#!/usr/bin/python3 -I
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib/msatools"))
from {module} import {name} as run

sys.exit(run())
"""


def main(modules: str, folder: str) -> None:
    """Write a script for each that pip would install."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (metadata,) = Path(modules).glob("msatools-*.dist-info")
    for script in PathDistribution(metadata).entry_points:
        if script.group == "console_scripts":
            module, _, name = script.value.partition(":")
            path = Path(folder, script.name)
            path.write_text(SCRIPT.format(module=module, name=name))
            path.chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
