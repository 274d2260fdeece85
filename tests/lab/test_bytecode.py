# SPDX-License-Identifier: LGPL-2.1-or-later

"""What guests find compiled is what they would have compiled."""

from pathlib import Path

from fixtures.lab import bytecode
from fixtures.lab.cache import content_key, default_cache

UNCHECKED = 0b01


def test_bytecode_is_found_by_the_path_in_the_guest(tmp_path: Path) -> None:
    module = tmp_path / "some.py"
    module.write_text("answer = 42\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    files = {"/lab/it.py": module, "/lab/site": tmp_path / "package"}
    made = bytecode.compiled("test", files, content_key(["42"]), default_cache())
    found = {str(path.relative_to(made)) for path in made.rglob("*.pyc")}
    assert found == {"lab/it.cpython-311.pyc", "lab/site/__init__.cpython-311.pyc"}
    data = (made / "lab/it.cpython-311.pyc").read_bytes()
    # The file's time does not count (PEP 552): that of an image is another.
    assert int.from_bytes(data[4:8], "little") == UNCHECKED
    assert b"/lab/it.py" in data
