"""The header of each script says what the script is: its arguments, its commands, what else Python takes from it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from aiodigest.backends.redis.scripts import CONSTANTS, LUA, NEEDS, assemble, commands_of, load_script, load_scripts

SCRIPTS = sorted(path.stem for path in LUA.glob("*.lua"))
HELPERS = sorted(path.stem for path in (LUA / "shared").glob("*.lua"))
FUNCTION = re.compile(r"^( *)local function (\w+)\((.*?)^\1end$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\b(?:call|try)\('([A-Z]+)'")
GIVEN = re.compile(r"^-- (KEYS|ARGV)\[(\d+)\] +(\w+) \(([^)]+)\)", re.MULTILINE)
BINDING = re.compile(r"^local ([\w, ]+) = ([^\n]*\b(?:KEYS|ARGV)\[\d+\][^\n]*)$", re.MULTILINE)
KINDS = {  # of keys and arguments, and how each is read
    "key": "{}", "text": "{}", "int": "tonumber({})", "int or ''": "tonumber({})", "flag": "{} == '1'",
    "limits": "parse_limits({})",
}  # fmt: skip


def text_of(part: str) -> str:
    return (LUA / f"{part}.lua").read_text(encoding="utf-8")


def without_comments(text: str) -> str:
    return re.sub(r" *--[^\n]*", "", text)


def given(text: str) -> Iterator[tuple[str, str, str]]:
    """The keys and arguments that a header declares: what they are read from, their names, and their kinds."""
    for source, number, name, kind in GIVEN.findall(text):
        yield f"{source}[{number}]", name, kind.partition(", ")[0]


def bound(text: str) -> dict[str, str]:
    """The names of locals that hold keys and arguments, and what they are read with."""
    return {
        name: value
        for names, values in BINDING.findall(without_comments(text))
        for name, value in zip(names.split(", "), values.split(", "), strict=True)
        if re.search(r"(KEYS|ARGV)\[", value)
    }


@pytest.mark.parametrize("part", [*SCRIPTS, *(f"shared/{helper}" for helper in HELPERS)])
def test_each_key_and_argument_that_a_header_declares_is_a_local_of_that_name(part: str) -> None:
    text = text_of(part)
    own = dict[str, str]()
    for source, name, kind in given(text):
        if kind in KINDS:
            own[name] = KINDS[kind].format(source)
        elif kind == "unused":
            assert source not in without_comments(text)
        else:  # a helper reads it
            assert kind in assembled_of(part)
            assert (source, name) in {(source, name) for source, name, _ in given(text_of(f"shared/{kind}"))}
    found = bound(text)
    assert {name: value.removesuffix(" or now") for name, value in found.items()} == own
    assert set(re.findall(r"(?:KEYS|ARGV)\[\d+\]", without_comments(text))) == {
        re.sub(r".*?((?:KEYS|ARGV)\[\d+\]).*", r"\1", value) for value in found.values()
    }


def assembled_of(part: str) -> set[str]:
    """The helpers that a file is given, and those that they need."""
    helpers = set[str]()

    def read(name: str) -> str:
        helpers.add(name.removeprefix("shared/"))
        return text_of(name)

    assemble(part, read)
    return helpers


def reached(text: str) -> tuple[set[str], set[str]]:
    """The commands that a text may run, and the functions in it that nothing calls."""
    functions = dict[str, str]()

    def cut(function: re.Match[str]) -> str:
        functions[function[2]] = functions.get(function[2], "") + FUNCTION.sub(cut, function[3])
        return ""

    left, met, commands = [FUNCTION.sub(cut, text)], set[str](), set[str]()
    while left:
        each = left.pop()
        commands |= set(COMMAND.findall(each))
        called = {name for name in functions.keys() - met if re.search(rf"\b{name}\b", each)}
        met |= called
        left += [functions[name] for name in called]
    return commands, functions.keys() - met


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {"permits"}))
def test_a_script_runs_the_commands_that_its_header_declares_and_no_others(name: str) -> None:
    body = without_comments(assemble(name, text_of)).replace("redis.call(", "call(").replace("redis.pcall(", "try(")
    commands, unused = reached(body)
    assert commands == load_script(name).commands
    own = {function for _, function, _ in FUNCTION.findall(without_comments(text_of(name)))}
    assert not own & unused


def test_every_helper_is_needed_and_every_need_is_a_helper() -> None:
    needed = {
        helper
        for part in [*SCRIPTS, *(f"shared/{helper}" for helper in HELPERS)]
        for needs in NEEDS.findall(text_of(part))
        for helper in needs.split()
    }
    assert sorted(needed) == HELPERS


def test_constants_of_python_are_defined_nowhere_in_lua_and_all_are_used() -> None:
    texts = "\n".join(without_comments(path.read_text(encoding="utf-8")) for path in LUA.rglob("*.lua"))
    for name in (*CONSTANTS, "CREATES"):
        assert re.search(rf"\b{name}\b", texts), name
        assert not re.search(rf"\blocal {name}\b", texts), name


def test_headers_name_flags_that_there_are() -> None:
    flags = {flag for name in SCRIPTS for line in re.findall(r"^-- Flags +(.+)$", text_of(name), re.MULTILINE)
             for flag in line.split(", ")}  # fmt: skip
    assert flags == {"begins-namespace", "repeatable", "replicated"}


def test_what_is_tried_before_is_what_scripts_run() -> None:
    [tries] = re.findall(r"local TRIES = \{(.+?)\n\}", text_of("permits"), re.DOTALL)
    assert {*re.findall(r"\b([A-Z]+) = ", tries), "TIME"} == commands_of(*load_scripts())


def test_each_script_says_first_that_it_makes_up_keys_which_dragonfly_asks_for() -> None:
    assert {script.source.partition("\n")[0] for script in load_scripts().values()} == {
        "--!df flags=allow-undeclared-keys"
    }
