"""The benchmark of decode attention: its arithmetic on made-up samples, and a tiny run; no times are checked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import attention, attention_memory, attention_op, attention_step, attention_summary
from benchmarks.attention_op import Shape
from hf_kvquant.attention import backends
from hf_kvquant.attention.decode import decode
from tests import tiny as tiny_models

IDENTITY = {"part": "step", "threads": 1, "dtype": "float32", "place": "T=8192"}


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_native", backends._by_torch)
    monkeypatch.setattr(backends, "_compiled", decode)


def samples_of(seconds: dict[str, list[float]], cpu: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"round": number, "offset": 0, "scheme": name, "closes": False, "seconds": each, "cpu_seconds": cpu * each}
        for name, times in seconds.items()
        for number, each in enumerate(times)
    ]


def op_group(seconds: dict[str, list[float]], cpu: float = 1.0) -> dict[str, Any]:
    facts: dict[str, Any] = {name: {"bytes": 8.0, "multiply_adds": 4.0} for name in attention_summary.FULL_FORMS}
    facts |= {"k4v4": {"bytes": 1.0, "multiply_adds": 4.0, "error": 1e-6}}
    facts |= {"copy": {"bytes": 2.0}, "matmul": {"multiply_adds": 8.0}}
    identity = IDENTITY | {"part": "op", "place": attention_summary.MAIN_SHAPE}
    return identity | {"samples": samples_of(seconds, cpu), "facts": facts}


OP_SECONDS = {
    "sdpa-grouped": [4.0, 40.0, 4.0],
    "products-grouped": [6.0, 6.0, 6.0],
    "sdpa-repeated": [9.0, 9.0, 9.0],
    "k4v4": [1.0, 10.0, 2.0],
    "copy": [2.0, 2.0, 2.0],
    "matmul": [4.0, 4.0, 4.0],
}


def test_an_op_is_compared_round_by_round_with_the_fastest_form() -> None:
    cells = {cell["scheme"]: cell for cell in attention_summary.summarize([op_group(OP_SECONDS)])}
    assert set(cells) == {*attention_summary.FULL_FORMS, "k4v4"}
    ours = cells["k4v4"]
    assert ours["fastest_full"] == "sdpa-grouped"
    assert ours["speed"] == 4.0
    # One byte takes a second, four multiply-adds take two: two seconds of work bound a median of two.
    assert (ours["bytes_seconds"], ours["work_seconds"], ours["fraction_of_limit"]) == (1.0, 2.0, 1.0)
    assert cells["sdpa-grouped"]["fraction_of_limit"] == 2.0


@pytest.mark.parametrize(("cpu", "verdicts"), [(1.0, ["PASS", "NOT REACHED"]), (0.5, ["DISTURBED", "DISTURBED"])])
def test_verdicts_of_an_op(cpu: float, verdicts: list[str]) -> None:
    cells = attention_summary.summarize([op_group(OP_SECONDS, cpu)])
    assert [each["verdict"] for each in attention_summary.check_targets(cells)] == verdicts


def test_two_threads_on_one_core_decide_nothing() -> None:
    group = op_group(OP_SECONDS) | {"threads": 2}
    cells = attention_summary.summarize([group])
    assert {cell["cores_had"] for cell in cells} == {0.5}
    assert {each["verdict"] for each in attention_summary.check_targets(cells)} == {"DISTURBED"}


def test_a_step_is_compared_with_every_incumbent_and_by_its_share_of_attention() -> None:
    seconds = {"base": [1.0, 1.0], "dynamic": [9.0, 9.0], "static": [4.0, 4.0], "attached-cr4": [2.0, 2.0]}
    seconds |= {"matmul": [1.0, 1.0]}
    group = IDENTITY | {"tokens": 8192, "samples": samples_of(seconds)}
    cell = attention_summary.summarize([group])[-1]
    assert cell["scheme"] == "attached-cr4"
    assert cell["speed"] == {"dynamic": 4.5, "static": 2.0, "transformers-quanto4": None, "transformers-hqq4": None}
    assert (cell["attention_seconds"], cell["attention_speed"]) == (1.0, 8.0)
    targets = attention_summary.check_targets([cell])
    assert [(each["limit"], each["verdict"]) for each in targets] == [
        (">= 1.9", "PASS"),
        (">= 1.2", "PASS"),
        (">= 3.5", "PASS"),
    ]


def test_a_step_that_closes_a_block_and_a_share_within_noise_do_not_count() -> None:
    samples = samples_of(
        {"base": [1.0, 1.0], "dynamic": [2.0, 2.0], "matmul": [1.0, 1.0], "attached-cr4": [1.01, 50.0]}
    )
    samples[-1]["closes"] = True
    cell = attention_summary.summarize([IDENTITY | {"tokens": 64, "samples": samples}])[-1]
    assert cell["samples"] == 1
    assert cell["speed"]["dynamic"] == pytest.approx(2.0 / 1.01)
    assert cell["attention_speed"] is None


def test_memory_is_judged_by_its_growth() -> None:
    rows = [
        {"tokens": tokens, "peak": 100 + 3 * tokens, "scores": tokens, "full": 24 * tokens} for tokens in (4096, 16384)
    ]
    group = IDENTITY | {"part": "memory", "place": "shape", "scheme": "k4v4", "rows": rows}
    (cell,) = attention_summary.summarize([group])
    assert (cell["growth_to_scores"], cell["growth_to_full"]) == (3.0, 0.125)
    assert [each["verdict"] for each in attention_summary.check_targets([cell])] == ["PASS", "PASS"]


def test_the_peak_is_what_is_held_at_once() -> None:
    def call() -> torch.Tensor:
        return torch.zeros(4_000_000)[:1] + torch.ones(4_000_000)[:1]

    call()
    assert attention_memory.peak_bytes(call) == pytest.approx(32e6, rel=0.05)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", attention_op.CONFIGS)
def test_every_format_of_the_op_is_right_and_counted(name: str) -> None:
    shape = Shape(2, 3, 64, 400)
    call, facts = attention_op.packed_call(name, shape, torch.float32)
    assert call().shape == (1, 1, shape.heads, shape.head_dim)
    full = attention_op.full_calls(shape, torch.float32)[1]["sdpa-grouped"]
    assert 0 < facts["bytes"] < full["bytes"]
    extra = shape.tokens * shape.head_dim * {"cr4": shape.heads, "k4v4-pre": 2 * shape.kv_heads}.get(name, 0)
    if not name.startswith("cm"):  # which drop channels
        assert facts["multiply_adds"] == full["multiply_adds"] + extra


def test_the_forms_over_full_tensors_agree() -> None:
    calls, _ = attention_op.full_calls(Shape(2, 3, 16, 40), torch.float32)
    grouped, products, repeated = (call() for call in calls.values())
    torch.testing.assert_close(grouped, products)
    torch.testing.assert_close(grouped.flatten(1, 2), repeated.flatten(1, 2))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_native", lambda *given: torch.full((1, 1, 6, 64), torch.nan))
    measured = attention_op.measure(Shape(2, 3, 64, 400), ["k4v4"], torch.float32, 1)
    assert measured["failed"] == {"k4v4": "failed: relative error nan to the oracle, not below 0.02; mend it first"}
    assert "k4v4" not in {sample["scheme"] for sample in measured["samples"]}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in place of SmolLM2, small copies and products in place of large ones."""
    config = tiny_models.benchmark_config()

    def load(name: Any, dtype: torch.dtype) -> tuple[Any, None]:
        model: Any = LlamaForCausalLM(config)
        return model.to(dtype).eval(), None

    monkeypatch.setattr(attention_step, "load_model", load)
    monkeypatch.setattr(attention_op, "COPIED_FLOATS", 1024)
    monkeypatch.setattr(attention_op, "SQUARE", 16)


@pytest.mark.usefixtures("uncompiled", "tiny")
def test_a_run_writes_its_files_and_keeps_what_it_did_not_measure(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    settings = attention.Settings(("op", "memory"), 1, "float32", (400,), True, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_memory, "FORMATS", ())
        attention.run(settings, path)
    attention.run(attention.Settings(("step",), 1, "float32", (640,), True, None), path)
    report, markdown = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert [group["part"] for group in report["groups"]] == ["op", "step"]
    assert {cell["scheme"] for cell in report["cells"]} == {
        *attention_summary.FULL_FORMS,
        "k4v4",
        "base",
        "dynamic",
        "attached-cr4",
    }
    assert "## op" in markdown
    assert "## step" in markdown


@pytest.mark.usefixtures("tiny")
def test_what_fails_is_listed_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler\ndetails")

    monkeypatch.setattr(backends, "_native", fail)
    path = tmp_path / "attention.json"
    report = attention.run(attention.Settings(("op", "memory"), 1, "float32", (400,), True, None), path)
    assert report["skipped"] == {
        "op 1 float32 H=32 K=8 D=128 T=400 k4v4": "failed: no compiler",
        "memory 1 float32 H=32 K=8 D=128 k4v4": "failed: no compiler",
    }
    assert [group["part"] for group in report["groups"]] == ["op"]
    assert "failed: no compiler" in path.with_suffix(".md").read_text()


@pytest.mark.usefixtures("uncompiled", "tiny")
def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    settings = attention.Settings(("op",), 1, "float32", (400,), True, None)
    first = attention.run(settings, path)["groups"][0]["samples"]
    assert attention.run(settings, path, resume=True)["groups"][0]["samples"] == first
    assert attention.run(settings, path)["groups"][0]["samples"] != first


@pytest.mark.usefixtures("uncompiled", "tiny")
def test_the_caches_of_an_attached_model_are_read_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the step would time full tensors under the name of codes."""
    lengths = []
    monkeypatch.setattr(
        backends, "_compiled", lambda plan, tensors: lengths.append(tensors["key.recent"]) or decode(plan, tensors)
    )
    bench = attention_step.load(None, torch.float32, ["dynamic", "attached-cr4", "attached-k4v4"])
    with torch.no_grad():
        samples = bench.measure(640, 2)["samples"]
    layers, caches, steps = 2, 2, 2 + attention_step.WARM_UP
    assert len(lengths) == layers * caches * steps
    assert len(samples) == 2 * (len(bench.schemes) + 1)


def test_a_process_is_asked_for_one_thread_count_and_dtype(tmp_path: Path) -> None:
    options = attention.parse(["--part", "op", "--lengths", "64", "128", "--quick", "--json", str(tmp_path / "a.json")])
    inner = attention.parse(attention.command_of(options, 2, "bfloat16")[3:])
    assert inner == argparse.Namespace(**vars(options) | {"threads": [2], "dtype": ["bfloat16"]})
