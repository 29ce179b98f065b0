"""The API pages show every public name, and what their docstrings say of parameters and errors is complete."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import hf_kvquant
from hf_kvquant import PRESETS
from hf_kvquant.attention.backends import BACKENDS
from hf_kvquant.formats import FORMATS
from hf_kvquant.scales import SCALE_FORMATS, ZERO_FORMATS

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
DIRECTIVES = [name for page in PAGES.values() for name in re.findall(r"^::: (\S+)$", page, re.M)]
# Functions and classes of documented modules that are no one's business but the package's.
INTERNAL = {
    "hf_kvquant.attach": {"attention_modules"},
    "hf_kvquant.attention.compiler": {"compiler", "failure_of", "notice"},
    "hf_kvquant.memory": {"layer_memory", "tensors_in", "storage_nbytes"},
    "hf_kvquant.scales": {"largest_finite", "round_down"},
    "hf_kvquant.schemes": {"as_json", "find_ninja"},
    "hf_kvquant.spec": {"check_choice", "check_int", "fields_from", "first_line", "invalid"},
}
CONSTRUCTORS = ("__init__", "__post_init__")
MADE_BY_OTHERS = {"AttachHandle"}  # its constructor is for attach() alone
# Helpers that raise or make an error.
ALWAYS = {"invalid": "ValueError", "check_int": "ValueError", "check_choice": "ValueError", "check": "DemoError"}
ALWAYS |= {"_refusal": "ValueError", "_damaged": "ValueError"}


@cache
def tree_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def home_of(name: str) -> tuple[str, str]:
    """Module that defines a documented name, which another may only pass on, and the name there."""
    module, _, last = name.rpartition(".")
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom) and last in {alias.name for alias in node.names}:
            return str(node.module), last
    return module, last


DOCUMENTED = {home_of(name) for name in DIRECTIVES}
MODULES = sorted({module for module, _ in DOCUMENTED})
Definition = ast.FunctionDef | ast.ClassDef


def definitions(module: str) -> dict[str, Definition]:
    return {node.name: node for node in tree_of(module).body if isinstance(node, Definition)}


def constants(module: str) -> set[str]:
    """Constants with a docstring, which makes them public."""
    body = tree_of(module).body
    return {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        for node, after in pairwise(body)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def test_every_exported_name_has_its_place() -> None:
    exported = {home_of(f"hf_kvquant.{name}") for name in hf_kvquant.__all__ if name != "__version__"}
    assert exported <= DOCUMENTED
    assert not [name for name in hf_kvquant.__all__ if f"`{name}`" not in PAGES["index.md"].replace(", ", "`, `")]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_documented_module_is_shown(module: str) -> None:
    public = {name for name in definitions(module) if not name.startswith("_")} | constants(module)
    shown = {name for home, name in DOCUMENTED if home == module}
    assert public - shown == INTERNAL.get(module, set())
    assert shown <= public


def test_presets_are_shown_as_they_are() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", PAGES["presets.md"], re.M)
    assert rows == [(name, preset.description) for name, preset in PRESETS.items()]


@pytest.mark.parametrize(
    ("page", "field", "registry"),
    [
        ("configuration.md", "TensorSpec.format", FORMATS),
        ("configuration.md", "TensorSpec.scale_format", SCALE_FORMATS),
        ("configuration.md", "TensorSpec.zero_format", ZERO_FORMATS),
        ("attention.md", "backend", {"full", *BACKENDS}),
    ],
)
def test_names_are_those_of_the_registry(page: str, field: str, registry: Any) -> None:
    listed = re.search(rf"`{field}` is one of ((?:`\w+`(?:, )?)+)", PAGES[page])
    assert listed
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(registry)


# ---------------------------------------------------------------- docstrings


def documented() -> Iterator[tuple[str, str, Definition, ast.ClassDef | None]]:
    """(module, name, definition, class it belongs to) of everything that the pages show."""
    for module, name in sorted(DOCUMENTED):
        node = definitions(module).get(name)
        if node is not None:
            yield module, name, node, None
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield from ((module, f"{name}.{each.name}", each, node) for each in methods if each.name[0] != "_")


SHOWN = list(documented())
each_shown = pytest.mark.parametrize(("module", "name", "node", "owner"), SHOWN, ids=[each[1] for each in SHOWN])


def parameters(node: Definition) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        return [each.arg for each in given if each is not None and each.arg not in ("self", "cls")]
    if node.name in MADE_BY_OTHERS:
        return []
    own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if own:
        return parameters(own[0])
    return [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]


def names_parameter(text: str, name: str) -> bool:
    """As an entry of a section, or in code."""
    return re.search(rf"^\s+\*{{0,2}}{name}:|``[^`]*(?<!\w){name}(?!\w)[^`]*``", text, re.M) is not None


@each_shown
def test_docstrings_name_every_parameter(module: str, name: str, node: Definition, owner: Any) -> None:
    text = ast.get_docstring(node) or ""
    assert text
    assert not [each for each in parameters(node) if not names_parameter(text, each)]
    assert not re.search(r":\w+:`|::$", text, re.M), "roles and literal blocks are not Markdown"
    assert not re.search(r"^Returns:\n    [^\n]*:", text, re.M), "what stands before a colon would be shown as a type"


def raised_by(node: Definition, around: dict[str, Definition], seen: frozenset[str] = frozenset()) -> set[str]:
    """Errors that a call of a function or class raises itself, or through what is private to its module or class."""
    if isinstance(node, ast.ClassDef):
        bodies = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in CONSTRUCTORS]
        return set().union(*(raised_by(each, around, seen) for each in bodies))
    found: set[str] = set()
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        called = ast.unparse(call.func).removeprefix("self.").removeprefix("cls.")
        if called in ALWAYS:
            found.add(ALWAYS[called])
        elif called.startswith("_") and called in around and called not in seen:
            found |= raised_by(around[called], around, seen | {called})
    raised = [each.exc for each in ast.walk(node) if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)]
    return found | {ast.unparse(each.func) for each in raised if not ast.unparse(each.func).endswith(tuple(ALWAYS))}


def surroundings(module: str, owner: ast.ClassDef | None) -> dict[str, Definition]:
    """What a call in a module, or in a class of it, may mean."""
    methods = owner.body if owner else []
    return definitions(module) | {each.name: each for each in methods if isinstance(each, ast.FunctionDef)}


@each_shown
def test_docstrings_list_every_error(module: str, name: str, node: Definition, owner: ast.ClassDef | None) -> None:
    errors = raised_by(node, surroundings(module, node if isinstance(node, ast.ClassDef) else owner))
    section = re.search(r"^Raises:\n((?:    .*\n?|\n(?=    ))+)", ast.get_docstring(node) or "", re.M)
    listed = re.findall(r"^    (\w+):", section[1], re.M) if section else []
    assert not [error for error in errors if not any(is_kind_of(error, each) for each in listed)]
    assert len(set(listed)) == len(listed)


def is_kind_of(error: str, listed: str) -> bool:
    own, other = (getattr(builtins, each, None) for each in (error, listed))
    return error == listed or (isinstance(own, type) and isinstance(other, type) and issubclass(own, other))


def test_errors_are_found_through_private_functions() -> None:
    """The rule above sees what it is meant to see."""
    schemes, spec = definitions("hf_kvquant.schemes"), definitions("hf_kvquant.spec")["TensorSpec"]
    assert raised_by(schemes["find_scheme"], schemes) == {"EvalError"}
    assert isinstance(spec, ast.ClassDef)
    methods = surroundings("hf_kvquant.spec", spec)
    assert raised_by(spec, methods) == {"ValueError"}
    assert not raised_by(methods["segments"], methods)
