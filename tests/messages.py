"""Every message that the package raises, warns with or exits with, read from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [*ROOT.glob("hf_kvquant/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("eval/tasks/**/*.py")]
Parts = tuple[str | None, ...]  # fixed words, None where a value is put in
# They put a message together that their callers give them, who are read instead.
_HELPERS = {"invalid", "check_int", "check_choice", "check", "_refusal"}


@dataclass(frozen=True)
class Message:
    """One message: the error (or warning) it is of, its words, and where it stands."""

    error: str
    parts: Parts
    place: str

    @property
    def text(self) -> str:
        return "".join("{}" if part is None else part for part in self.parts)

    def matches(self, line: str) -> bool:
        pattern = "".join(".+" if part is None else re.escape(part) for part in self.parts)
        return re.fullmatch(pattern, line) is not None


def messages() -> list[Message]:
    return [message for path in SOURCES for message in _in_file(path)]


def _in_file(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    for node, function in _calls(tree, None):
        name = function.name if function else ""
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        for error, parts in _of_call(node, function) if name not in _HELPERS else ():
            yield Message(error, parts, place)
    if path.name == "delivered.py":  # what it returns is raised by the layer
        for node in ast.walk(tree):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant | ast.JoinedStr):
                parts = _words(node.value, None)
                if parts != ("",):
                    yield Message("ValueError", ("layer ", None, ": ", *parts), f"delivered.py:{node.lineno}")


Function = ast.FunctionDef | None


def _calls(node: ast.AST, function: Function) -> Iterator[tuple[ast.Call, Function]]:
    """Calls with the function that they stand in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        yield from _calls(child, child if isinstance(child, ast.FunctionDef) else function)


def _of_call(node: ast.Call, function: Function) -> Iterator[tuple[str, Parts]]:
    called = ast.unparse(node.func).split(".")[-1]
    words = [_words(argument, function) for argument in node.args]
    if called == "invalid":
        yield "ValueError", (*words[0], "=", None, " is not valid: ", *words[2])
    elif called == "check_int":
        yield "ValueError", (*words[0], "=", None, " is not valid: ", *words[3])
    elif called == "check_choice":
        yield "ValueError", (*words[0], "=", None, " is not valid: choose one of ", None)
    elif called == "_refusal" and words[0] != (None,):
        yield "ValueError", ("layer ", None, ": ", *words[0])
    elif ast.unparse(node.func) == "check" and len(words) == 2:
        yield "DemoError", words[1]
    elif called == "MissingPackageError":
        yield called, (*words[0], "\n", *words[1])
    elif called == "warn":
        yield "UserWarning", words[0]
    elif re.fullmatch(r"[A-Z]\w*Error", called) and words:
        yield called, words[0]


def _words(node: ast.AST, function: Function) -> Parts:
    """The fixed words of a string, or of the one that a name stands for in its function."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.JoinedStr):
        return tuple(str(part.value) if isinstance(part, ast.Constant) else None for part in node.values)
    if isinstance(node, ast.Name) and function is not None:
        given = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id
        ]
        if len(given) == 1 and isinstance(given[0], ast.Constant | ast.JoinedStr):
            return _words(given[0], None)
    return (None,)
