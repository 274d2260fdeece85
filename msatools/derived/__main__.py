# SPDX-License-Identifier: LGPL-2.1-or-later

"""Write manual pages and completion scripts: ``python -m msatools.derived FOLDER``.

The folder is one such as /usr/share; setup.py calls this when it builds a package.
"""

import sys
from pathlib import Path

from msatools.derived.completions import completions
from msatools.derived.manuals import manuals


def main(folder: str) -> None:
    """Write all files below a folder."""
    pages = {f"man/man1/{name}": text for name, text in manuals().items()}
    for name, text in {**pages, **completions()}.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
