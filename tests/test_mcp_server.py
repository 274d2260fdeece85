# SPDX-License-Identifier: LGPL-2.1-or-later

"""The server for assistants, by a client of the protocol's own library."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import mcp.types as protocol
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from msatools.cli.arguments import make_parser
from msatools.mcp_server import MAX_CHARACTERS, WRITTEN, shorten
from msatools.registry import NAMES, load
from tests.support.calls import CORE

SCRIPT = str(Path(sys.executable).with_name("msa"))
BTF = ["--types", "btf"]

Talk = Callable[[ClientSession], Awaitable[None]]


def talk(to: Talk, *options: str) -> None:
    """Start the server, and talk to it as a client does."""

    async def session() -> None:
        server = StdioServerParameters(
            command=SCRIPT, args=["mcp", *options], env=dict(os.environ)
        )
        async with (
            stdio_client(server) as (read, write),
            ClientSession(read, write) as client,
        ):
            await client.initialize()
            await to(client)

    asyncio.run(asyncio.wait_for(session(), 120))


async def answer(
    client: ClientSession, tool: str, *words: str, target: str = ""
) -> str:
    """Return the text of a call that succeeds."""
    result = await call(client, tool, *words, target=target)
    assert not result.is_error, text(result)
    return text(result)


async def call(
    client: ClientSession, tool: str, *words: str, target: str = ""
) -> protocol.CallToolResult:
    return await client.call_tool(tool, {"target": target, "arguments": [*words]})


def text(result: protocol.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, protocol.TextContent)
    return content.text


def printed(*words: str) -> str:
    ran = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=True)
    return ran.stdout


def test_tools_are_the_commands_and_print_what_these_print() -> None:
    async def to(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {*tools} == {*NAMES, "help"}
        for name in NAMES:
            assert tools[name].annotations is not None
            assert tools[name].annotations.read_only_hint
            assert "--why NAME" in (tools[name].description or "")
        for name in set(NAMES) - {"whatis"}:
            assert await answer(client, name, *BTF, target=CORE) == printed(
                name, *BTF, CORE
            )
        words = (*BTF, "jiffies")
        assert await answer(client, "whatis", *words, target=CORE) == printed(
            "whatis", CORE, *words
        )

    talk(to)


def test_help_is_the_guides() -> None:
    async def to(client: ClientSession) -> None:
        topics = await client.call_tool("help", {})
        assert text(topics) == printed("help")
        page = await client.call_tool("help", {"topic": "it-hangs"})
        assert text(page) == printed("help", "it-hangs")
        none = await client.call_tool("help", {"topic": "nothing"})
        assert none.is_error
        assert "nothing" in text(none)

    talk(to)


def test_errors_are_those_of_the_command() -> None:
    async def to(client: ClientSession) -> None:
        for words, target, why in (
            ((), "nowhere", "msa-prstat: nowhere: no such file; check the path"),
            # The server's input is the client's, and no log.
            ((), "-", "msa-prstat: -: no such file; check the path"),
            (("-p", "4194000"), CORE, "4194000"),
            (("--nothing",), CORE, "--nothing"),
        ):
            failed = await call(client, "prstat", *words, target=target)
            assert failed.is_error
            assert why in text(failed)
        # The server lives on.
        assert "No problem" in await answer(client, "report", *BTF, target=CORE)

    talk(to)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("prstat", "--record"),
        ("report", "--html"),
        ("memstat", "--textfile"),
        ("memstat", "--map"),
    ],
)
def test_no_file_is_written(command: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / "written.svg"

    async def to(client: ClientSession) -> None:
        for words in ((option, str(path)), (f"{option}={path}",)):
            refused = await call(client, command, *words, target=CORE)
            assert refused.is_error
            assert f"{option}: writes a file" in text(refused)

    talk(to)
    assert not [*tmp_path.iterdir()]


def test_all_options_that_write_a_file_are_known() -> None:
    """What a new one does is to be decided here."""
    files = {
        option.dest
        for name in NAMES
        for option in make_parser(load(name), in_drgn=False)._actions
        if "FILE" in str(option.metavar)
    }
    assert files == {*WRITTEN, "vmcoreinfo"}


def test_a_call_that_takes_too_long_ends() -> None:
    async def to(client: ClientSession) -> None:
        late = await call(client, "report", target=CORE)
        assert late.is_error
        assert "msa report: took longer than 0.01 s" in text(late)

    talk(to, "--timeout", "10ms")


def test_long_answers_end_with_a_whole_line_and_say_so() -> None:
    line = "x" * 99 + "\n"
    whole = line * (MAX_CHARACTERS // 100)
    assert shorten(whole) == whole
    cut = shorten(whole + line * 7)
    assert cut.startswith(f"{whole}... 7 more lines;")
    assert (
        len(shorten("x" * (MAX_CHARACTERS + 1)).splitlines()[0]) < MAX_CHARACTERS + 99
    )
    assert "--min-age" not in cut


def test_without_the_library_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['mcp'] = None; from msatools.frontdoor import main; "
        "raise SystemExit(main(['mcp']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "msa mcp: its library is missing: pip install 'msatools[mcp]'; "
        "see msa mcp --help\n"
    )


def test_wrong_usage() -> None:
    ran = subprocess.run([SCRIPT, "mcp", "--nothing"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == (
        "msa mcp: unrecognized arguments: --nothing; see msa mcp --help\n"
    )
    assert "--timeout TIME" in printed("mcp", "--help")
