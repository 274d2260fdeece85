# SPDX-License-Identifier: LGPL-2.1-or-later
from pathlib import Path

import pytest

from fixtures.lab import suites
from fixtures.lab.cache import Cache
from fixtures.lab.errors import LabError
from fixtures.lab.suites import Index, PrivateApt, Source

MAIN = "http://archive.invalid/debian/"
SECURITY = "http://archive.invalid/debian-security/"


def row(uri: str, codename: str, **other: str) -> str:
    """A line of apt's answer to the question."""
    fields = {
        "REPO_URI": uri,
        "RELEASE": codename,
        "CODENAME": codename,
        "ARCHITECTURE": "amd64",
        "ORIGIN": "Debian",
        "COMPONENT": "main",
    }
    values = fields | other
    return "|".join([*(values[f] for f in suites.FIELDS), "/no/such.sources:1"])


ANSWER = "\n".join(
    [
        row(MAIN, "bookworm", RELEASE="stable"),
        row(MAIN, "bookworm", COMPONENT="contrib"),
        row(MAIN, "bookworm-updates"),
        row(MAIN, "bookworm-backports"),
        row(SECURITY, "bookworm-security"),
        row("http://vendor.invalid/", "nodistro", ORIGIN="Vendor"),
    ]
)


@pytest.fixture
def indexes() -> list[Index]:
    return suites.parse_indexes(ANSWER + "\nsomething else\n")


def test_indexes_are_parsed(indexes: list[Index]) -> None:
    assert len(indexes) == 6
    assert indexes[0] == Index(
        MAIN, "stable", "bookworm", "amd64", "Debian", "main", "/no/such.sources:1"
    )


@pytest.mark.parametrize(
    ("suite", "arch", "known"),
    [
        ("bookworm", "amd64", True),
        ("stable", "amd64", True),
        ("bookworm", "arm64", False),
        ("bullseye", "amd64", False),
        ("book", "amd64", False),
    ],
)
def test_suite_is_known_by_either_name(
    indexes: list[Index], suite: str, arch: str, known: bool
) -> None:
    assert suites.knows(indexes, suite, arch) is known


def test_suite_is_looked_for_where_the_host_has_its_own(indexes: list[Index]) -> None:
    found = suites.sources_of("bullseye", "arm64", indexes)
    assert [(source.uri, source.suite, source.arch) for source in found] == [
        (MAIN, "bullseye", "arm64"),
        (MAIN, "bullseye-updates", "arm64"),
        (SECURITY, "bullseye-security", "arm64"),
    ]


def test_keys_are_the_entrys_and_debians(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "KEYRINGS", tmp_path)
    keys = [
        "debian-archive-bookworm-stable.gpg",
        "debian-archive-bullseye-stable.gpg",
        "debian-archive-bullseye-automatic.pgp",
        "debian-archive-keyring.gpg",
        "debian-archive-removed-keys.gpg",
        "mirror.gpg",
    ]
    for name in keys:
        (tmp_path / name).touch()
    entry = tmp_path / "debian.sources"
    entry.write_text(f"Types: deb\nSigned-By: {tmp_path}/mirror.gpg {tmp_path}/none\n")
    index = Index(MAIN, "sid", "sid", "amd64", "Debian", "main", f"{entry}:1")
    (source,) = suites.sources_of("bullseye", "amd64", [index, index])
    assert [Path(key).name for key in source.keys] == [
        "mirror.gpg",
        "debian-archive-bullseye-automatic.pgp",
        "debian-archive-bullseye-stable.gpg",
        "debian-archive-keyring.gpg",
    ]


STANZAS = """\
# Debian

Types: deb
# Signed-By: /comment
URIs: http://archive.invalid/debian
signed-by: /one
 /two

Types: deb
URIs: http://vendor.invalid/

Types: deb
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
"""
LINES = """\
# Signed-By: /comment
deb [arch=amd64 signed-by=/one,/two] http://archive.invalid/debian sid main
deb http://vendor.invalid/signed-by=/path sid main
"""


@pytest.mark.parametrize(
    ("text", "number", "words"),
    [
        (STANZAS, 1, ["/one", "/two"]),
        (STANZAS, 2, []),
        (LINES, 2, ["/one", "/two"]),
        (LINES, 3, []),
    ],
)
def test_signed_by_of_an_entry(text: str, number: int, words: list[str]) -> None:
    assert suites.parse_signed_by(text, number, text is STANZAS) == words


@pytest.mark.parametrize("number", ["3", "4", "x", ""])
def test_entry_without_files_of_keys_names_none(tmp_path: Path, number: str) -> None:
    path = tmp_path / "debian.sources"
    path.write_text(STANZAS)
    assert suites.signed_by(f"{path}:{number}") == []
    assert suites.signed_by(f"{path}.gone:1") == []


def test_stanza_names_the_keys_if_there_are_any() -> None:
    assert Source(MAIN, "bullseye", "amd64", ("/one", "/two")).stanza() == (
        f"Types: deb\nURIs: {MAIN}\nSuites: bullseye\nComponents: main\n"
        "Architectures: amd64\nSigned-By: /one /two\n"
    )
    assert "Signed-By" not in Source(MAIN, "bullseye", "amd64", ()).stanza()


def test_proxies_are_taken_over_and_hooks_are_not() -> None:
    dump = """\
APT::Update::Post-Invoke:: "rm";
Acquire "";
Acquire::http::Proxy "http://proxy.invalid";
Acquire::IndexTargets::deb::DEP-11::MetaKey "x";
Dir::Cache "var/cache/apt";
"""
    proxy = 'Acquire::http::Proxy "http://proxy.invalid";\n'
    assert suites.acquire_settings(dump) == proxy


class FakeApt(PrivateApt):
    """An apt to which only some suites exist."""

    def run(self, command: object, timeout: float, cwd: Path | None = None) -> str:
        there = (self.root / "there").read_text().split()
        if command == ["apt-get", "update"]:
            if len(there) < len(self.sources):
                raise LabError("no Release file")
            return ""
        return "\n".join(row(MAIN, suite) for suite in there)


def update(root: Path, there: str) -> None:
    (root / "there").write_text(there)
    names = ("bullseye", "bullseye-updates")
    FakeApt(root, tuple(Source(MAIN, name, "amd64", ()) for name in names)).update()


def test_suite_without_index_is_skipped_with_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    update(tmp_path, "bullseye bullseye-updates")
    assert capfd.readouterr().err == ""
    update(tmp_path, "bullseye")
    said = capfd.readouterr().err
    assert "going on without bullseye-updates" in said
    assert "no Release file" in said


def test_no_index_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no Release file"):
        update(tmp_path, "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    def run(command: object, **_: object) -> str:
        return 'Acquire::Retries "3";\n'

    monkeypatch.setattr(suites.host, "run", run)
    monkeypatch.setattr(PrivateApt, "update", lambda apt: None)
    return Cache(tmp_path, 1 << 30)


def test_private_apt_has_its_own_sources_and_settings(
    cache: Cache, indexes: list[Index]
) -> None:
    apt = suites.private_apt("bullseye", "amd64", indexes, cache)
    assert apt.root.parent == cache.root / "suite"
    assert apt.lists.is_relative_to(apt.root)
    assert (apt.lists / "partial").is_dir()
    sources = (apt.root / suites.SOURCES_PATH).read_text()
    assert sources.split("\n\n")[0].startswith(f"Types: deb\nURIs: {MAIN}\n")
    assert sources.count("Types: deb\n") == 3
    settings = (apt.root / suites.CONFIGURATION_PATH).read_text()
    assert settings.startswith('Acquire::Retries "3";\n')
    assert 'Dir::Etc::parts "/dev/null";\n' in settings
    assert 'APT::Architecture "amd64";\n' in settings
    assert suites.private_apt("bullseye", "amd64", indexes, cache) == apt
    assert suites.private_apt("bullseye", "arm64", indexes, cache) != apt


def test_machine_without_a_debian_archive_is_told_what_to_do(cache: Cache) -> None:
    with pytest.raises(LabError, match=r"no Debian archive.*apt-get update"):
        suites.private_apt("bullseye", "amd64", [], cache)
