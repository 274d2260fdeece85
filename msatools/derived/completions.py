# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completion for bash, zsh and fish: options, their values, and files as targets."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msatools.cli.subcommands import CommandGroup
from msatools.derived.options import Option, options_of, options_of_subcommand
from msatools.frontdoor import ASSISTANTS, DEFAULT, HELP, SESSIONS
from msatools.help.topics import topics
from msatools.registry import GROUPS, NAMES, load, load_group

_Commands = Mapping[str, tuple[Option, ...]]
"""Options by the name of the command, without ``msa-``."""

_LICENCE = "# SPDX-License-Identifier: LGPL-2.1-or-later"
_HELP_ON = "show a guide, or what a command prints"
_OF_MSA = (
    ("crash", "the crash commands of drgn"),
    ("drgn", "the prompt of drgn, or a script"),
    (ASSISTANTS, "all commands as tools, by the Model Context Protocol"),
)
"""Subcommands of ``msa`` without a script ``msa-NAME``, and their descriptions."""

_FRONT_OPTIONS = (("--help", "print this help"), ("--version", "print the version"))


def completions() -> dict[str, str]:
    """Map paths below ``share`` to the contents of the scripts."""
    commands = {name: options_of(load(name)) for name in NAMES}
    subcommands = {
        f"{name}-{each.name}": options_of_subcommand(group, each)
        for name, group in _groups().items()
        for each in group.subcommands
    }
    bash, fish = "bash-completion/completions", "fish/vendor_completions.d"
    return {
        f"{bash}/msa": _lines(_bash({**commands, **subcommands})),
        # bash loads the file that has the name of the command.
        **{f"{bash}/msa-{name}": _lines(_bash_of_one()) for name in _names()},
        # zsh reads the names of the completed commands from the first line.
        "zsh/site-functions/_msa": _lines(
            _zsh(commands, subcommands), f"#compdef {_scripts()}"
        ),
        f"{fish}/msa.fish": _lines(_fish_front(commands, subcommands)),
        **{
            f"{fish}/msa-{name}.fish": _lines(_fish(f"msa-{name}", "", options))
            for name, options in commands.items()
        },
        **{
            f"{fish}/msa-{name}.fish": _lines(
                _fish_group(f"msa-{name}", "", name, subcommands)
            )
            for name in GROUPS
        },
    }


def _groups() -> dict[str, CommandGroup]:
    return {name: load_group(name) for name in GROUPS}


def _names() -> tuple[str, ...]:
    """Return the names of all commands."""
    return (*NAMES, *GROUPS)


def _lines(lines: Iterator[str], first: str = _LICENCE) -> str:
    return "\n".join(chain((first,), lines, ("",)))


def _scripts() -> str:
    return " ".join(("msa", *(f"msa-{name}" for name in _names())))


def _flags(options: tuple[Option, ...]) -> str:
    return " ".join(flag for option in options for flag in option.flags)


def _quoted(text: str) -> str:
    """Return text as one word of any of the shells."""
    return "'" + text.replace("'", "'\\''") + "'"


# --- bash

_BASH = r"""
# Complete one name of a list with commas.
_msatools_list() {
    local done=${current%"${current##*,}"}
    mapfile -t COMPREPLY < <(compgen -P "$done" -W "$1" -- "${current##*,}")
}

_msatools_words() {
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$current")
}

_msatools_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
}

_msatools() {
    local current=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD-1]}
    local name=${COMP_WORDS[0]##*/}
    COMPREPLY=()
    # bash splits --by=x into three words.
    if [[ $current == '=' ]]; then
        current=
    elif [[ $option == '=' ]]; then
        option=${COMP_WORDS[COMP_CWORD-2]}
    fi
    local at=1
    name=${name#msa-}
    if [[ $name == msa ]]; then
        if ((COMP_CWORD == 1)); then
            _msatools_files
            mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(
                compgen -W '@NAMES@ @FRONT@' -- "$current")
            return
        fi
        name=${COMP_WORDS[1]}
        at=2
        case $name in
        help)
            _msatools_words '@TOPICS@'
            return ;;
        @COMMANDS@) ;;
        @SESSIONS@)
            _msatools_files
            return ;;
        @ASSISTANTS@) return ;;
        # msa TARGET
        *) name=report ;;
        esac
    fi
    case $name in
@GROUPS@
    esac
    case $name:$option in
@VALUES@
    esac
    if [[ $current != -* ]]; then
        _msatools_files
        return
    fi
    case $name in
@OPTIONS@
    esac
}

complete -F _msatools @SCRIPTS@"""


def _bash(commands: _Commands) -> Iterator[str]:
    values, options = [], []
    for name, those in commands.items():
        for option in those:
            patterns = "|".join(f"{name}:{flag}" for flag in option.flags)
            if (call := _bash_value(option)) is not None:
                values.append(f"    {patterns}) {call} ;;")
        options.append(f"    {name}) _msatools_words {_quoted(_flags(those))} ;;")
    text = _BASH.strip("\n")
    for mark, by in (
        ("@NAMES@", " ".join((*_names(), *dict(_OF_MSA), HELP))),
        ("@TOPICS@", " ".join(topics())),
        ("@COMMANDS@", "|".join(_names())),
        ("@SESSIONS@", "|".join(SESSIONS)),
        ("@ASSISTANTS@", ASSISTANTS),
        ("@GROUPS@", "\n".join(_bash_groups())),
        ("@FRONT@", " ".join(flag for flag, _ in _FRONT_OPTIONS)),
        ("@VALUES@", "\n".join(values)),
        ("@OPTIONS@", "\n".join(options)),
        ("@SCRIPTS@", _scripts()),
    ):
        text = text.replace(mark, by)
    yield text


def _bash_groups() -> Iterator[str]:
    """Yield cases that complete a subcommand, or set ``name`` for its options."""
    for name, group in _groups().items():
        words = [each.name for each in group.subcommands]
        words += (flag for flag, _ in _FRONT_OPTIONS)
        yield f"    {name})"
        yield "        if ((COMP_CWORD == at)); then"
        yield f"            _msatools_words {_quoted(' '.join(words))}"
        yield "            return"
        yield "        fi"
        yield f"        name={name}-${{COMP_WORDS[at]}} ;;"


def _bash_value(option: Option) -> str | None:
    """Return bash code that completes a value; ``None`` if the option needs none."""
    if option.value in ("none", "maybe file"):
        return None
    if option.value == "file":
        return "_msatools_files; return"
    if option.value == "other":
        return "return"
    kind = "list" if option.value == "names" else "words"
    return f"_msatools_{kind} {_quoted(' '.join(option.names))}; return"


def _bash_of_one() -> Iterator[str]:
    yield '. "${BASH_SOURCE[0]%/*}/msa"'


# --- zsh


def _zsh(commands: _Commands, subcommands: _Commands) -> Iterator[str]:
    yield _LICENCE
    yield ""
    for name, options in (*commands.items(), *subcommands.items()):
        yield f"_msatools_{name}() {{"
        yield "    _arguments -S \\"
        for option in options:
            for flag in option.flags:
                yield f"        {_quoted(_zsh_option(option, flag))} \\"
        yield "        '*:target:_files'"
        yield "}"
        yield ""
    for name, group in _groups().items():
        names = [(each.name, each.summary) for each in group.subcommands]
        yield from _zsh_first(name, f"_msatools_{name}-", names)
    yield f"_msatools_{HELP}() {{"
    yield f"    _arguments '1:topic:({' '.join(topics())})'"
    yield "}"
    yield ""
    for name in SESSIONS:
        yield f"_msatools_{name}() {{"
        yield "    _files"
        yield "}"
        yield ""
    yield f"_msatools_{ASSISTANTS}() {{ }}"
    yield ""
    names = [(name, _summary(name)) for name in _names()]
    names += (*_OF_MSA, (HELP, _HELP_ON))
    yield from _zsh_first("front", "_msatools_", names, DEFAULT)
    yield "local ret=1"
    yield "case $service in"
    yield "msa) _msatools_front ;;"
    yield '*) "_msatools_${service#msa-}" ;;'
    yield "esac"


def _summary(name: str) -> str:
    return (load_group(name) if name in GROUPS else load(name)).summary


def _zsh_first(
    name: str, prefix: str, names: Sequence[tuple[str, str]], of_files: str = ""
) -> Iterator[str]:
    """Yield the function that completes one of *names*, then the words after it.

    :param prefix: Prefix of the functions that complete the words after a name.
    :param of_files: The name to assume if the first word is a file; empty if it may not
        be a file.
    """
    yield f"_msatools_{name}() {{"
    yield "    if ((CURRENT > 2)); then"
    if of_files:
        yield f"        if ((! $+functions[{prefix}${{words[2]}}])); then"
        yield f"            {prefix}{of_files}"
        yield "            return"
        yield "        fi"
    yield "        shift words; ((CURRENT--))"
    yield f'        _call_function ret "{prefix}${{words[1]}}"'
    yield "        return"
    yield "    fi"
    yield "    local -a commands options"
    yield "    commands=("
    for word, what in names:
        yield f"        {_quoted(_zsh_name(word, what))}"
    yield "    )"
    yield "    options=("
    for flag, what in _FRONT_OPTIONS:
        yield f"        {_quoted(_zsh_name(flag, what))}"
    yield "    )"
    yield "    _describe command commands"
    yield "    _describe -o option options"
    if of_files:
        yield "    _files"
    yield "}"
    yield ""


def _zsh_name(name: str, what: str) -> str:
    return f"{name}:{what}"


def _zsh_option(option: Option, flag: str) -> str:
    """Return the specification of one form of an option (zshcompsys(1))."""
    others = " ".join(option.flags)
    start = "*" if option.is_repeatable else f"({others})"
    # With a plus the value of a short option may follow in the same word.
    join = "" if not option.metavars else ("=" if flag.startswith("--") else "+")
    text = f"{start}{flag}{join}[{_zsh_text(option.help)}]"
    for metavar in option.metavars:
        optional = ":" if option.value == "maybe file" else ""
        text += f":{optional}{_zsh_text(metavar)}:{_zsh_value(option)}"
    return text


def _zsh_value(option: Option) -> str:
    if option.value in ("file", "maybe file"):
        return "_files"
    names = " ".join(option.names)
    if option.value == "choice":
        return f"({names})"
    if option.value == "names":
        return f"_sequence compadd - {names}"
    return " "


def _zsh_text(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


# --- fish


def _fish(script: str, condition: str, options: tuple[Option, ...]) -> Iterator[str]:
    for option in options:
        words = [f"complete -c {script}"]
        if condition:
            words.append(f"-n {_quoted(condition)}")
        words += map(_fish_flag, option.flags)
        words += _fish_value(option)
        words.append(f"-d {_fish_quoted(option.help)}")
        yield " ".join(words)


def _fish_flag(flag: str) -> str:
    return f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"


def _fish_value(option: Option) -> list[str]:
    names = " ".join(option.names)
    if option.value == "file":
        return ["-r", "-F"]
    if option.value == "choice":
        return ["-x", "-a", _quoted(names)]
    if option.value == "names":
        return ["-x", "-a", _quoted(f"(__fish_append , {names})")]
    return ["-x"] if option.value == "other" else []


def _fish_quoted(text: str) -> str:
    """Return text as one word of fish, in which ``\\`` escapes within quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_group(
    script: str, condition: str, name: str, subcommands: _Commands
) -> Iterator[str]:
    """Yield the completion of a command with subcommands.

    :param condition: Tests that the command is *name*; empty if the script is.
    """
    names = [each.name for each in load_group(name).subcommands]
    before = f"{condition}; and " if condition else ""
    first = _quoted(f"{before}not __fish_seen_subcommand_from {' '.join(names)}")
    for each in load_group(name).subcommands:
        summary = _fish_quoted(each.summary)
        yield f"complete -c {script} -n {first} -f -a {each.name} -d {summary}"
    for each in load_group(name).subcommands:
        seen = f"{before}__fish_seen_subcommand_from {each.name}"
        yield from _fish(script, seen, subcommands[f"{name}-{each.name}"])


def _fish_front(commands: _Commands, subcommands: _Commands) -> Iterator[str]:
    first = "-n __fish_use_subcommand"
    # No -f: a file may be the first word as well.
    for name in _names():
        summary = _fish_quoted(_summary(name))
        yield f"complete -c msa {first} -a {name} -d {summary}"
    for name, what in _OF_MSA:
        yield f"complete -c msa {first} -a {name} -d {_fish_quoted(what)}"
    yield f"complete -c msa -n '__fish_seen_subcommand_from {ASSISTANTS}' -f"
    yield f"complete -c msa {first} -a {HELP} -d {_fish_quoted(_HELP_ON)}"
    for flag, what in _FRONT_OPTIONS:
        yield f"complete -c msa {first} -l {flag[2:]} -d {_fish_quoted(what)}"
    on_help = f"__fish_seen_subcommand_from {HELP}"
    yield f"complete -c msa -n {_quoted(on_help)} -f -a {_quoted(' '.join(topics()))}"
    for name, options in commands.items():
        yield from _fish("msa", f"__fish_seen_subcommand_from {name}", options)
    words = " ".join((*_names(), *dict(_OF_MSA), HELP))
    of_target = "test (count (commandline -opc)) -gt 1"
    of_target += f"; and not __fish_seen_subcommand_from {words}"
    yield from _fish("msa", of_target, commands[DEFAULT])
    for name in GROUPS:
        condition = f"__fish_seen_subcommand_from {name}"
        yield from _fish_group("msa", condition, name, subcommands)
