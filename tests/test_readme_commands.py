"""What README and the other documents name exists: files, make targets, subcommands and options, modules, extras."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re

import pytest

from hf_kvquant import cli
from tests.readme_tables import ROOT

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += ["benchmarks/README.md", "eval/README.md", "notebooks/README.md"]
DOCUMENTS += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]


@functools.cache
def commands(document: str) -> list[str]:
    """Lines of shell blocks and pieces of inline code, comments and line continuations taken away."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def named(pattern: str) -> list[tuple[str, str]]:
    """Document and first group of every match of ``pattern`` in a command of it."""
    pairs = [
        (document, match)
        for document in DOCUMENTS
        for each in commands(document)
        for match in re.findall(pattern, each)
    ]
    assert pairs, pattern
    return list(dict.fromkeys(pairs))


@functools.cache
def help_of(command: str) -> str:
    """What ``hf-kvquant COMMAND --help`` prints; of eval, what lm-eval prints for a run."""
    arguments = ["eval", "run"] if command == "eval" else [command]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--help"])
    assert ended.value.code == 0, f"hf-kvquant {command} is no command"
    return printed.getvalue()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    paths = set(re.findall(r"`((?:benchmarks|tests|eval|hf_kvquant|docs|notebooks)/[\w./-]+)`", text))
    paths |= set(re.findall(r"\]\(([\w./-]+)\)", text))
    beside = (ROOT / document).parent
    assert not [path for path in paths if not (ROOT / path).exists() and not (beside / path).exists()]


@pytest.mark.parametrize("target", sorted({target for _, target in named(r"^make ([\w-]+)")}))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize(("document", "command"), named(r"(?:^|/)hf-kvquant ([a-z].*)"))
def test_subcommands_and_options_exist(document: str, command: str) -> None:
    text = help_of(command.split()[0])
    assert not [option for option in re.findall(r"--[\w-]+", command) if option not in text]


@pytest.mark.parametrize("module", sorted({module for _, module in named(r"python -m ([\w.]+)")}))
def test_modules_exist(module: str) -> None:
    assert importlib.util.find_spec(module)


@pytest.mark.parametrize(
    "extra", sorted({e for _, found in named(r"(?:\.|hf-kvquant)\[([\w,]+)\]") for e in found.split(",")})
)
def test_extras_exist(extra: str) -> None:
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M)


@pytest.mark.parametrize("script", sorted({script for _, script in named(r"^bash ([\w./-]+)")}))
def test_scripts_exist(script: str) -> None:
    assert (ROOT / script).is_file()
