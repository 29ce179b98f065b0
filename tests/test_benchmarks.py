"""The benchmarks run end to end on a tiny model and write what their README documents; no times are checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import agreement, attention_step, bytes_per_token, common, decode, decode_summary, footprint
from hf_kvquant import PRESETS, attach
from tests.tiny import benchmark_config

HEAD = {"benchmark", "date", "command", "machine", "versions", "settings", "skipped", "targets"}
CELL = {
    "threads",
    "tokens",
    "scheme",
    "step_seconds",
    "cpu_per_wall",
    "ratio_to_dynamic",
    "ratio_to_quanto",
    "closing_interval_tokens",
    "closing_seconds",
    "closing_percent",
    "ordinary_samples",
    "closing_samples",
}
AVERAGE = {"scheme", "variant", "prompts", "free_running", "teacher_forced", "kl_nats", "prompts_without_difference"}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = benchmark_config()
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def decoded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    path = tmp_path_factory.mktemp("decode") / "decode.json"
    decode.run(model, ["dynamic", "static", "transformers-fp8", "k4v4"], [256], 1, [1], path)
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


@pytest.fixture(scope="module")
def agreed(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    path = tmp_path_factory.mktemp("agreement") / "agreement.json"
    prompts = [torch.randint(64, (1, 300), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint, "SEARCH_END", 64)
        patch.setattr(footprint, "LENGTHS", (footprint.RATIO_TOKENS,))
        agreement.run(model, prompts, ["none", "k4v4"], path, steps=4, tail=8)
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_decode_writes_the_documented_fields(decoded: tuple[dict[str, Any], str]) -> None:
    report, markdown = decoded
    assert HEAD | {"cells", "samples"} == set(report)
    assert all(set(cell) == CELL for cell in report["cells"])
    assert [cell["scheme"] for cell in report["cells"]] == ["dynamic", "static", "transformers-fp8", "k4v4"]
    assert all(cell["scheme"] in markdown for cell in report["cells"])


def test_decode_times_both_closings_of_a_round_apart(decoded: tuple[dict[str, Any], str]) -> None:
    report, _ = decoded
    cells = {cell["scheme"]: cell for cell in report["cells"]}
    assert cells["k4v4"]["closing_interval_tokens"] == PRESETS["k4v4"].config.block_length
    assert cells["k4v4"]["closing_samples"] == 2
    assert cells["dynamic"]["closing_samples"] == 0
    positions = {name: [s["offset"] for s in report["samples"] if s["scheme"] == name] for name in cells}
    assert all(offsets == positions["dynamic"] for offsets in positions.values())


def test_decode_refuses_lengths_that_the_rounds_do_not_fit(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--lengths 64: too short for --rounds 1; at least 65"):
        decode.run(model, ["dynamic"], [64], 1, [1], tmp_path / "decode.json")


def test_agreement_writes_the_documented_fields(agreed: tuple[dict[str, Any], str]) -> None:
    report, markdown = agreed
    assert HEAD | {"rows", "averages", "memory"} == set(report)
    assert all(set(row) == AVERAGE for row in report["averages"])
    assert {(row["scheme"], row["variant"]) for row in report["averages"]} == {
        (scheme, variant) for scheme in ("none", "k4v4") for variant in ("one_shot", "tail")
    }
    assert {row["preset"] for row in report["memory"]["presets"]} == {"none", "k4v4"}
    assert "first_tokens_within_limit" in report["memory"]
    assert report["targets"]
    for each in report["targets"]:
        row = next(line for line in markdown.splitlines() if line.startswith(f"| {each['what']} |"))
        bound = float(each["limit"].split()[-1])
        reached = each["value"] >= bound if each["limit"].startswith(">=") else each["value"] <= bound
        assert row.endswith(f"| {'PASS' if reached else 'NOT REACHED'} |")


def test_a_lossless_cache_agrees_completely(agreed: tuple[dict[str, Any], str]) -> None:
    report, _ = agreed
    for row in report["averages"]:
        if row["scheme"] == "none":
            assert row["free_running"] == row["teacher_forced"] == 1.0
            assert row["kl_nats"] == pytest.approx(0.0, abs=1e-6)


def test_a_scheme_that_cannot_run_is_named_with_the_reason(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Any, length: int) -> Any:
        raise RuntimeError("Error building extension\nlog")

    absent = dataclasses.replace(common.SCHEMES[common.QUANTO], is_installed=lambda: False)
    monkeypatch.setitem(common.SCHEMES, common.QUANTO, absent)
    monkeypatch.setitem(common.SCHEMES, "static", dataclasses.replace(common.SCHEMES["static"], build=broken))
    chosen, skipped = common.choose_schemes(["dynamic", common.QUANTO, "static"], model.config)
    assert [scheme.name for scheme in chosen] == ["dynamic"]
    assert skipped == {
        common.QUANTO: "not installed (pip install optimum-quanto)",
        "static": "does not run here: Error building extension",
    }


def test_an_unknown_scheme_is_an_error(model: Any) -> None:
    with pytest.raises(ValueError, match="--schemes k9v9: unknown; choose from dynamic, "):
        common.choose_schemes(["k9v9"], model.config)


@pytest.mark.parametrize(("cpu_per_wall", "verdict"), [(1.0, "PASS"), (0.5, "DISTURBED")])
def test_a_disturbed_cell_claims_nothing(cpu_per_wall: float, verdict: str) -> None:
    cell = dict.fromkeys(CELL) | {"scheme": "k4v4", "ratio_to_quanto": 1.0, "cpu_per_wall": cpu_per_wall}
    assert [t["verdict"] for t in decode_summary.check_targets([cell])] == [verdict]


def test_bytes_per_token_count_what_full_caches_hold(model: Any, tmp_path: Path) -> None:
    attached = LlamaForCausalLM(benchmark_config()).eval()
    attach(attached)
    path = tmp_path / "bytes.json"
    names = ["dynamic", "none", "k4v4", "cr4"]
    bytes_per_token.run(attention_step.Bench(model, attached, ()), names, [256, 512], path)
    held = {(row["scheme"], row["tokens"]): row["bytes_per_token"] for row in json.loads(path.read_text())["rows"]}
    assert set(held) == {(name, tokens) for name in names for tokens in (256, 512)}
    assert held["dynamic", 256] == held["dynamic", 512] == held["none", 512] == 2 * 2 * 2 * 16 * 4
    for name in ("k4v4", "cr4"):
        assert held["dynamic", 512] > held[name, 256] > held[name, 512]
    assert "| `cr4` |" in path.with_suffix(".md").read_text()
