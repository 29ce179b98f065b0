"""Messages as a set: each says what happened, with which value, and what is allowed or what to do."""

import ast
import re

import pytest

from tests.messages import ROOT, SOURCES, Message, messages

MESSAGES = messages()
# What a user may do next, or what is allowed. Every word serves some message, or it goes.
NEXT = re.compile(
    r"\b(add|choose|pass|give|name|use|run|write|call|reset|save|create|install|leave|build|tokenize|load|mend|say|ask"
    r"|shorten|report|prefill|calibrate|layers may hold|close|known fields are|must|needs?|at least|at most|expected"
    r"|neither|has layers)\b"
)
# Fixed words -> why no value is put in.
WITHOUT_VALUE = {
    "torch.compile is switched off": "the reason inside a CompilationError",
    "--cache_requests": "a flag, which has none",
}
# Fixed words -> why nothing is to be done.
WITHOUT_NEXT = {
    "keys are stored after RoPE": "a notice: the cache works, and names the layers",
    "torch.compile is switched off": "the reason inside a CompilationError, which says what to do",
    "Until then decode steps read full tensors": "behind a CompilationError, which says what to do",
    "in the file, {} for this model": "the reason inside 'is damaged', which says what to do",
    "rows in the header": "the same",
    "with a rotary table of": "the same",
    "cannot be written: {}": "the words of the system, which name the cause",
    "kv_cache={}: {}": "the words of a configuration error, which say what is allowed",
    "config={} is not valid: {}": "one of two hints that begin with 'pass'",
    "has format_version={}": "one of two cures",
}


OWN = [message for message in MESSAGES if message.text != "{}"]
# The others are the command that installs a package, then what it is for.
PLAIN = [message for message in OWN if message.error != "MissingPackageError"]


def listed(message: Message, exceptions: dict[str, str]) -> bool:
    return any(words in message.text for words in exceptions)


WITHOUT = {
    "value": ([each for each in PLAIN if "{}" not in each.text and not re.search(r"\w=\S", each.text)], WITHOUT_VALUE),
    "what is next": ([each for each in OWN if not NEXT.search(each.text)], WITHOUT_NEXT),
}


@pytest.mark.parametrize("part", WITHOUT)
def test_messages_hold_the_value_and_what_is_next(part: str) -> None:
    """Those that do not are listed, each with a reason; nothing is listed in vain."""
    lacking, exceptions = WITHOUT[part]
    assert not [each for each in lacking if not listed(each, exceptions)]
    assert not [words for words in exceptions if not any(words in each.text for each in lacking)]


def test_every_word_of_what_is_next_serves() -> None:
    words = NEXT.pattern.removeprefix(r"\b(").removesuffix(r")\b").split("|")
    assert not [word for word in words if not any(re.search(rf"\b{word}\b", each.text) for each in OWN)]


def test_messages_are_one_line_without_decoration() -> None:
    assert not [each for each in PLAIN if re.search(r"[\n!]|\.$|\b[Pp]lease\b|\b[Ee]rror:", each.text)]


def raises() -> list[str]:
    """Every ``raise`` with an error, and where it stands."""
    found = []
    for path in SOURCES:
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        found += [f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.exc)}" for node in nodes if node.exc]
    return found


def test_every_raise_is_read() -> None:
    """None is of a form that these tests would pass over."""
    places = {message.place for message in MESSAGES}
    # Control flow, an error that was kept, and helpers that put a message together.
    known = (
        r" (_\w+Error\(|(step|library)$|invalid\(|self\._refusal\(|_damaged\(|DemoError\(message\)|"
        r"SystemExit\(main\(\)\))"
    )
    assert not [each for each in raises() if each.split(" ")[0] not in places and not re.search(known, each)]


# ---------------------------------------------------------------- docs/errors.md

PAGE = (ROOT / "docs" / "errors.md").read_text()
SHOWN = [line for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
COMMANDS = ("CensusError", "DemoError", "EvalError")  # the command line prints these as "hf-kvquant: ..."


@pytest.mark.parametrize("line", SHOWN)
def test_the_page_of_errors_shows_messages_of_the_package(line: str) -> None:
    error, text = line.split(": ", 1)
    kinds = COMMANDS if error == "hf-kvquant" else (error,)
    assert [each for each in MESSAGES if each.error in kinds and len(each.text) > 8 and each.matches(text)]


def test_the_page_tells_why_and_what_to_do() -> None:
    entries = PAGE.split("\n```text\n")[1:]
    assert len(entries) >= 20
    assert not [entry[:60] for entry in entries if "*Why:*" not in entry or "*Do:*" not in entry]
