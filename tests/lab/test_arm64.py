# SPDX-License-Identifier: LGPL-2.1-or-later


from fixtures.lab import arm64, image


def test_numbers_of_system_calls_are_those_of_arm64() -> None:
    text = (image.GUEST / "calls.py").read_text()
    made = arm64.translated(text)
    changed = dict(
        line.split(" = ") for line in set(made.splitlines()) - set(text.splitlines())
    )
    assert changed == {
        name: str(number)
        for name, number in arm64.NUMBERS.items()
        if f"\n{name} = " in text
    }
    assert changed["FUTEX"] == "98"
    assert "IO_URING_SETUP = 425" in made
    assert arm64.translated('match("sys_pause")') == 'match("sigsuspend")'
    assert arm64.translated("FUTEX = 202 + 1\n") == "FUTEX = 202 + 1\n"
