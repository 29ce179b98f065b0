"""The census of architectures: one type of every verdict, its own checks, the command, and the table in docs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvquant import architectures, census_report, cli
from hf_kvquant.architectures import TOLERANCE, VERDICTS, CensusError, Record, check, choose_types
from hf_kvquant.rotary import RotaryLayout
from hf_kvquant.tiny_configs import tiny_config

DOCUMENT = Path(__file__).parent.parent / "docs" / "architectures.md"
KNOWN = choose_types()
# type -> verdict, part of the layers, part of the reason
EXAMPLES = {
    "llama": ("pre-RoPE", "2 of 2 before RoPE, 8 half pairs of the keys", ""),
    "deepseek_v3": ("pre-RoPE", "4 half pairs of the values", ""),
    "gemma4_text": ("pre-RoPE", "1 of 2 native DynamicSlidingWindowLayer; 1 of 2 before RoPE", ""),
    "hunyuan_v1_dense": ("post-RoPE", "2 of 2 after RoPE", "the rotation fits no known layout"),
    "bart": ("no RoPE", "2 of 2 without rotation", ""),
    "cohere2": ("no RoPE", "1 of 2 native", "only layers that stay native rotate"),
    "ministral": ("native", "2 of 2 native DynamicSlidingWindowLayer", ""),
    "xlnet": ("not supported", "", "its forward takes no transformers Cache"),
    "minimax": ("not supported", "", "fails with DynamicCache as well: ValueError: MiniMax uses cache of its own"),
}


@pytest.fixture
def only_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other type raises when it is built."""
    real = architectures.build

    def build(model_type: str) -> Any:
        if model_type != "llama":
            raise KeyError(f"no {model_type}\n|here|")
        return real(model_type)

    monkeypatch.setattr(architectures, "build", build)


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_a_type_of_each_verdict(model_type) -> None:
    verdict, layers, reason = EXAMPLES[model_type]
    record = check(model_type)
    assert record.verdict == verdict
    assert layers in record.layers
    assert record.reason.startswith(reason)
    assert (record.difference is None) == (verdict == "not supported")
    assert record.passes == (record.difference is not None and record.difference <= TOLERANCE)


def test_an_exception_in_building_is_a_record(only_llama) -> None:
    records = [check(name) for name in ("gpt2", "llama")]
    assert [record.verdict for record in records] == ["not built", "pre-RoPE"]
    assert records[0].reason == "KeyError: 'no gpt2\\n|here|'"


def test_an_exception_with_our_cache_is_a_record(monkeypatch) -> None:
    monkeypatch.setattr(RotaryLayout, "unrotate_", lambda *_: 1 / 0)
    record = check("llama")
    assert (record.verdict, record.reason) == ("not supported", "ZeroDivisionError: division by zero")


def test_a_wrong_rotation_is_not_supported(monkeypatch) -> None:
    monkeypatch.setattr(RotaryLayout, "unrotate_", RotaryLayout.rotate_)
    record = check("llama")
    assert record.verdict == "not supported"
    assert record.difference is not None
    assert record.difference > 100 * TOLERANCE
    assert record.reason == f"the logits differ from DynamicCache's by {record.difference:.2g}"


def test_a_comparison_that_cannot_fail_is_not_compared(monkeypatch) -> None:
    monkeypatch.setattr(architectures, "_spoil", lambda cache: None)
    record = check("llama")
    assert record.verdict == "not supported"
    assert record.reason.startswith("not compared: a spoilt cache moves the logits by only ")


def test_a_layer_that_closes_too_few_blocks_is_not_compared(monkeypatch) -> None:
    window = dataclasses.replace(architectures.LOSSLESS, residual_length=24)
    monkeypatch.setattr(architectures, "LOSSLESS", window)
    record = check("llama")
    assert record.verdict == "not supported"
    assert record.reason.startswith("not compared: a quantized layer closed only ")


def test_check_leaves_the_callers_state_alone() -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    verbosity = transformers.logging.get_verbosity()
    check("gpt2")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert transformers.logging.get_verbosity() == verbosity


def test_a_type_is_the_same_whenever_it_is_checked() -> None:
    first = check("qwen3_next")
    torch.manual_seed(5)
    assert check("qwen3_next") == first


def test_no_weight_is_left_constant() -> None:
    """Norms of ones would hide hunyuan's norm after RoPE."""
    parameters = architectures.build("hunyuan_v1_dense").parameters()
    assert min(float(parameter.detach().std()) for parameter in parameters) > 0.05


def test_tiny_configurations_are_cut_to_one_layer_of_each_kind() -> None:
    qwen = tiny_config("qwen3_next")
    assert qwen.layer_types == ["linear_attention", "full_attention"]
    assert (qwen.hidden_size, qwen.num_hidden_layers, qwen.head_dim, qwen.num_experts) == (64, 2, 16, 4)
    assert tiny_config("gemma3").get_text_config().hidden_size == 64
    assert tiny_config("mistral").sliding_window is None
    assert tiny_config("gemma2").sliding_window == 8
    assert tiny_config("deepseek_v3").head_dim == tiny_config("deepseek_v3").qk_rope_head_dim == 8


def test_the_class_is_the_one_that_auto_model_chooses() -> None:
    model = architectures.build("llama")
    assert type(model) is LlamaForCausalLM
    assert isinstance(model.config, LlamaConfig)


# ---- the report


def test_report_forms_agree() -> None:
    records = [
        Record("llama", "LlamaForCausalLM", "pre-RoPE", layers="2 of 2", difference=1e-6, sensitivity=1.0),
        Record("odd", "Odd", "not built", "KeyError: a|b"),
    ]
    report = census_report.make_report(records, "command")
    assert report["counts"] == dict.fromkeys(VERDICTS, 0) | {"pre-RoPE": 1, "not built": 1}
    line = census_report.counts_line(report)
    assert line.startswith("2 types, 1 within 2e-05 of DynamicCache: 1 pre-RoPE, ")
    text = census_report.markdown(report)
    assert line in text
    assert "| odd | Odd | not built |  |  | KeyError: a\\|b |" in text
    assert "| llama | LlamaForCausalLM | pre-RoPE | 2 of 2 | 1.0e-06 |  |" in text
    assert census_report.text_table(report).splitlines()[0].split("|")[-1].strip() == "1.0e-06"


def rows(text: str) -> list[list[str]]:
    cells = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in text.splitlines() if line.startswith("| ")]
    return cells[2:]


def test_the_table_in_docs() -> None:
    """Every type of the transformers that it names, once; counts that are those of its rows; 105 types or more pass."""
    text = DOCUMENT.read_text()
    table = rows(text)
    names = [row[0] for row in table]
    assert len(set(names)) == len(names)
    if f"transformers {transformers.__version__}," in text:
        assert names == list(KNOWN)
    found = Counter(row[2] for row in table)
    counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)
    passing = sum(found[verdict] for verdict in architectures.PASSING)
    assert f"{len(table)} types, {passing} within 2e-05 of DynamicCache: {counts}." in text
    assert found["pre-RoPE"] >= 105


def test_every_row_in_docs_says_enough() -> None:
    for _, _, verdict, layers, difference, reason in rows(DOCUMENT.read_text()):
        if verdict in architectures.PASSING:
            assert float(difference) <= TOLERANCE
            assert layers
        if verdict in ("post-RoPE", "not supported", "not built"):
            assert reason


# ---- the command


def test_command_prints_and_writes(tmp_path, only_llama, capsys, monkeypatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(cli, "tqdm", lambda types, **_: shown.extend(types) or types)
    paths = tmp_path / "table.md", tmp_path / "table.json"
    arguments = ["architectures", "--types", "llama", "gpt2", "--output", str(paths[0]), "--json", str(paths[1])]
    assert cli.main(arguments) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1].startswith("2 types, 1 within 2e-05 of DynamicCache: 1 pre-RoPE, ")
    assert (shown, output.err) == (["llama", "gpt2"], "")
    report = json.loads(paths[1].read_text())
    assert report["command"] == " ".join(["hf-kvquant", *arguments])
    assert [row["verdict"] for row in report["records"]] == ["pre-RoPE", "not built"]
    assert [row[0] for row in rows(paths[0].read_text())] == ["llama", "gpt2"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--types", "lama"], "--types lama: not a causal-LM type of this transformers; close: llama, "),
        (
            ["--types", "llama", "?"],
            f"--types ?: not a causal-LM type of this transformers; close: any of {len(KNOWN)}",
        ),
        (["--output", "no/such/table.md"], "no/such/table.md cannot be written: the folder no/such does not exist"),
    ],
)
def test_bad_requests_run_nothing(arguments, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "check", lambda name: pytest.fail("a type was run"))
    assert cli.main(["architectures", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"hf-kvquant: {message}")
    assert "\n" not in error


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch) -> None:
    path = tmp_path / "table.md"
    census_report.write("old", path)
    monkeypatch.setattr(census_report.os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    with pytest.raises(CensusError, match=r"table\.md cannot be written: denied"):
        census_report.write("new", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
