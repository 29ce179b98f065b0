"""The shape of the package: who may import whom, where printing happens, and that importing it changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_kvquant"
# A module imports only those above it. CONTRIBUTING.md says what each is for.
ORDER = [
    "_compat",
    "exact",
    "packing",
    "formats",
    "padding",
    "scales",
    "spec",
    "config",
    "presets",
    "blocks",
    "ranges",
    "planes",
    "quantizer",
    "rotary",
    "transforms",
    "storage",
    "delivered",
    "past",
    "energies",
    "attention.plan",
    "attention.codes",
    "attention.keys",
    "attention.values",
    "attention.decode",
    "attention.reference",
    "attention.compiler",
    "attention.compiled",
    "attention.native",
    "attention.backends",
    "attention.interface",
    "layers",
    "memory",
    "serialization",
    "summary",
    "cache",
    "probing",
    "queries",
    "attach",
    "calibration",
    "tune",
    "tiny_configs",
    "architectures",
    "census_report",
    "prompt",
    "models",
    "demo",
    "schemes",
    "reading",
    "eval_register",
    "lm_eval",
    "longctx",
    "longctx_task",
    "eval_command",
    "eval_results",
    "eval_plots",
    "eval_report",
    "cli",
    "__main__",
]


def imported(name: str) -> set[str]:
    """Modules of the package that ``name`` imports at run time."""
    tree = ast.parse(path_of(name).read_text())
    typing_only = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(child) for node in typing_only for child in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if (
            id(node) in skipped
            or not isinstance(node, ast.ImportFrom)
            or not (node.module or "").startswith("hf_kvquant")
        ):
            continue
        inside = (node.module or "").removeprefix("hf_kvquant").lstrip(".")
        found |= {inside, *(f"{inside}.{alias.name}".lstrip(".") for alias in node.names)}
    return found & set(ORDER)


def path_of(name: str) -> Path:
    return PACKAGE / f"{name.replace('.', '/')}.py"


def test_every_module_has_its_place() -> None:
    found = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert found == {*ORDER, "__init__", "attention.__init__"}


@pytest.mark.parametrize("name", ORDER)
def test_modules_import_only_those_above(name) -> None:
    assert imported(name) <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", [name for name in ORDER if name != "cli"])
def test_only_the_command_line_prints(name) -> None:
    calls = [node for node in ast.walk(ast.parse(path_of(name).read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_importing_changes_nothing() -> None:
    """No global state of torch or transformers differs after the import: defaults, registries, hooks."""
    code = """
import torch, transformers, transformers.cache_utils as cu
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
def state():
    layers = dict(cu.DYNAMIC_LAYER_TYPE_MAPPING), dict(cu.STATIC_LAYER_TYPE_MAPPING)
    attention = sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())
    return layers, attention, dict(vars(transformers.Cache)), torch.get_default_dtype(), torch.get_num_threads()
before = state()
import hf_kvquant
assert state() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
