"""Results joined, compared by pairs, shown as tables and pictures; README's evidence is what its data says."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_kvquant import cli, eval_report, eval_results
from hf_kvquant.eval_results import Estimate, Run, baseline, estimate, load, paired
from hf_kvquant.schemes import EvalError, find_scheme

ROOT = Path(__file__).parent.parent
EVIDENCE = ROOT / "eval" / "results" / "smollm2"
NLL = {"none": (0.1, 0.3, 0.2, 0.4), "k4v4": (0.2, 0.3, 0.4, 0.5), "k2v2": (1.1, 1.3, 0.9, 1.4)}
TEXT = {"none": (3.0, 3.2), "k4v4": (3.01, 3.23), "k2v2": (3.5, 3.6)}
BITS = {"none": 16.0, "k4v4": 4.5, "k2v2": 2.5}


def write(folder: Path, scheme: str, seed: str = "0", **changes: Any) -> Path:
    """What lm-eval writes of a run, as far as it is read: a needle task on a grid of two by two, and two passages."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "model_args": {"pretrained": "/home/me/models/tiny"},
        "model_dtype": "torch.float32",
        "kv_cache": scheme,
        "kv_scheme": {},
        "kv_attached": False,
        "kv_prefill": "two-phase",
        "kv_prefill_tail": 64,
        "kv_score_chunk": 64,
        "kv_tokens": 1000,
        "kv_cache_nbytes": 5000,
        "kv_bits_per_element": BITS[scheme] + 0.5,
        "kv_true_bits_per_element": BITS[scheme],
        "kv_block_bits_per_element": BITS[scheme],
    }
    data = {"config": config | changes, "configs": {"needle": {}, "text": {}}, "chat_template": None}
    (folder / "results_now.json").write_text(json.dumps(data))
    cells = [(length, depth) for length in (512, 1024) for depth in (0.25, 0.75)]
    samples = [
        {
            "doc": {"length": length, "depth": depth, "index": 0, "input": "long"},
            "doc_hash": f"{seed}{length}{depth}",
            "exact_match": 1.0,
            "recall": float(nll < 0.45),
            "token_accuracy": 0.5,
            "answer_nll": nll,
        }
        for (length, depth), nll in zip(cells, NLL[scheme], strict=True)
    ]
    (folder / "samples_needle_now.jsonl").write_text("\n".join(map(json.dumps, samples)))
    passages = [
        {"doc": {"length": 512, "index": index}, "doc_hash": f"{seed}{index}", "nll": nll, "bits_per_byte": nll / 2}
        for index, nll in enumerate(TEXT[scheme])
    ]
    (folder / "samples_text_now.jsonl").write_text("\n".join(map(json.dumps, passages)))
    return folder


def change(folder: Path, **changes: Any) -> None:
    path = folder / "results_now.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"config": data["config"] | changes}))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / scheme, scheme) for scheme in ("k2v2", "none", "k4v4")]


def test_estimate_is_mean_and_standard_error() -> None:
    found = Estimate.of([1.0, 2.0, 6.0])
    assert (found.mean, found.count) == (3.0, 3)
    assert found.error == pytest.approx(math.sqrt(7.0 / 3))
    assert Estimate.of([1.0]) == Estimate(1.0, None, 1)


def test_runs_are_joined_and_sorted(folders: list[Path]) -> None:
    runs = load(folders)
    assert [run.scheme for run in runs] == ["none", "k4v4", "k2v2"]
    assert runs[0].settings["model"] == "tiny"
    assert runs[1].tasks(retrieval=True) == ["needle"]
    assert runs[1].tasks(retrieval=False) == ["text"]
    assert estimate(runs[1], ["needle"], "answer_nll").mean == pytest.approx(0.35)


def test_differences_are_of_equal_documents(folders: list[Path], tmp_path: Path) -> None:
    exact, coarse, _ = load(folders)
    difference = paired(coarse, exact, ["needle"], "answer_nll")
    assert difference is not None
    assert difference.count == 4
    assert difference.mean == pytest.approx(0.1)  # 0.1, 0, 0.2, 0.1
    assert difference.error == pytest.approx(math.sqrt(0.02 / 3 / 4))
    (other,) = load([write(tmp_path / "seed1", "k4v4", seed="1")])
    assert paired(other, exact, ["needle"], "answer_nll") is None


def test_parts_of_a_run_are_joined(tmp_path: Path) -> None:
    parts = [write(tmp_path / seed, "k4v4", seed=seed, kv_tokens=int(seed)) for seed in ("7", "8")]
    (run,) = load(parts)
    assert run.held["tokens"] == 8
    assert len(run.samples["needle"]) == 8
    assert load([*parts, parts[0]])[0].samples == run.samples


def test_runs_of_one_scheme_are_told_apart(tmp_path: Path) -> None:
    runs = load([write(tmp_path / str(chunk), "k4v4", kv_score_chunk=chunk) for chunk in (1, 64)])
    assert [run.label for run in runs] == ["k4v4 (score_chunk 1)", "k4v4 (score_chunk 64)"]
    eval_report.make([tmp_path], tmp_path / "report", "command")
    once = (tmp_path / "report" / "report.md").read_text()
    eval_report.make([tmp_path], tmp_path / "report", "command")  # reads its own report as well
    assert (tmp_path / "report" / "report.md").read_text() == once


def test_every_model_has_its_own_baseline(tmp_path: Path) -> None:
    """Documents may be the same, the models are not."""
    for name in ("first", "second"):
        model = {"pretrained": f"/models/{name}"}
        for scheme in ("none", "k4v4") if name == "first" else ("k2v2",):
            write(tmp_path / name / scheme, scheme, model_args=model)
    runs = load([tmp_path])
    pairs = {run.scheme: baseline(run, runs) for run in runs}
    assert pairs["none"] is pairs["k4v4"] is next(run for run in runs if run.scheme == "none")
    assert pairs["k2v2"] is None
    eval_report.make([tmp_path], tmp_path / "out", "command")
    assert "| 1.175 | - | - |" in (tmp_path / "out" / "report.md").read_text()


def test_tasks_of_others_are_named_and_left_out(folders: list[Path], tmp_path: Path) -> None:
    for folder in folders[:1]:
        path = folder / "results_now.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"configs": data["configs"] | {"arc": {}}}))
        sample = {"doc": {"question": "?"}, "doc_hash": "1", "acc": 1.0}
        (folder / "samples_arc_now.jsonl").write_text(json.dumps(sample))
    eval_report.make(folders, tmp_path / "out", "command")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Not compared, metrics of other kinds: arc" in text
    eval_report.make([tmp_path / "out"], tmp_path / "again", "command")
    assert (tmp_path / "again" / "report.md").read_text() == text
    for name in ("needle", "text"):
        (folders[0] / f"samples_{name}_now.jsonl").write_text("")
    with pytest.raises(EvalError, match="no results of kvq_longctx or kvq_perplexity"):
        load(folders[:1])


def test_report_has_the_numbers(folders: list[Path], tmp_path: Path) -> None:
    assert cli.main(["eval-report", *map(str, folders), "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    row = "| `k4v4` | 4.50 | 5.00 | 4 | 1.000 | 0.750 | 0.500 | 0.350 | +0.100 +- 0.041 | -0.250 +- 0.250 |"
    assert row in text
    assert "| `none` | 16.00 | 16.50 | 4 | 1.000 | 1.000 | 0.500 | 0.250 | - | - |" in text
    assert "| `k2v2` | 0.00 | 0.00 | 0.00 | 0.00 |" in text
    assert f"| `k4v4` | 4.50 | 5.00 | 2 | {math.exp(3.12):.2f} | 1.5600 | +0.0200 +- 0.0100 | +2.02% |" in text
    for picture in ("depth_length", "bits", "perplexity"):
        assert (tmp_path / "out" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "/home/me" not in (tmp_path / "out" / "report.json").read_text()


def test_a_report_can_be_made_from_its_data(folders: list[Path], tmp_path: Path) -> None:
    eval_report.make(folders, tmp_path / "one", "command")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    eval_report.make([tmp_path / "copy"], tmp_path / "two", "command")
    for name in ("report.json", "report.md"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()


def test_one_scheme_alone_is_shown_without_differences(tmp_path: Path) -> None:
    eval_report.make([write(tmp_path / "k4v4", "k4v4")], tmp_path / "out", "command")
    assert "| 0.350 | - | - |" in (tmp_path / "out" / "report.md").read_text()
    assert not (tmp_path / "out" / "perplexity.png").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "results_now.json").unlink(), "no results_*.json and no report.json there"),
        (lambda folder: (folder / "results_now.json").write_text("{"), "results_now.json: not readable as JSON"),
        (lambda folder: (folder / "results_now.json").write_text("{}"), "not a result of the model type hf-kvquant"),
        (lambda folder: (folder / "results_now.json").write_text("[]"), "not a result of the model type hf-kvquant"),
        (lambda folder: (folder / "report.json").write_text('{"runs": [1]}'), "report.json: not a result of the model"),
        (lambda folder: (folder.parent / "out").write_text(""), "out: not a folder that can be written (File exists)"),
        (lambda folder: change(folder, kv_tokens=0), "its answers came from --use_cache; name the first run"),
        (lambda folder: (folder / "samples_text_now.jsonl").unlink(), "no samples of text beside it; run with"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, break_it: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", "k4v4")
    break_it(folder)
    assert cli.main(["eval-report", str(folder), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_two_results_for_one_document_are_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", "k4v4"), write(tmp_path / "second", "k4v4")
    path = second / "samples_needle_now.jsonl"
    path.write_text(path.read_text().replace('"answer_nll": 0.2', '"answer_nll": 0.25'))
    with pytest.raises(EvalError, match=r"k4v4: two different results for needle at \(512, 0.25, 0"):
        load([first, second])


# ---------------------------------------------------------------- the evidence


@pytest.fixture(scope="module")
def evidence() -> dict[str, Run]:
    return {run.scheme: run for run in eval_results.load([EVIDENCE])}


def test_evidence_is_what_its_data_says(tmp_path: Path) -> None:
    command = json.loads((EVIDENCE / "report.json").read_text())["command"]
    eval_report.make([EVIDENCE], tmp_path, command)
    assert (tmp_path / "report.md").read_text() == (EVIDENCE / "report.md").read_text()


def test_evidence_is_of_the_schemes_in_the_script(evidence: dict[str, Run]) -> None:
    script = (ROOT / "eval" / "smollm2.sh").read_text()
    assert set(re.findall(r"^evaluate (\w+) kv_cache", script, re.M)) == {name.split(":")[-1] for name in evidence}


@pytest.mark.parametrize("path", sorted((ROOT / "eval" / "schemes").glob("*.json")), ids=lambda path: path.stem)
def test_schemes_beside_the_evidence_are_valid(path: Path) -> None:
    scheme = find_scheme(str(path))
    assert scheme.config is not None
    assert scheme.config.key.format == scheme.config.value.format == f"int{path.stem[-1]}"


def needle_512(run: Run, metric: str = "answer_nll") -> float:
    return estimate(run, ["kvq_niah_multikey"], metric, lambda row: row["length"] == 512).mean


def test_evidence_orders_bits_and_recipes(evidence: dict[str, Run]) -> None:
    nll = {name: needle_512(run) for name, run in evidence.items()}
    assert nll["none"] < nll["k4v4"] < nll["k3v3"] < nll["k2v2"]
    assert nll["cm3"] < nll["k3v3"] < nll["tok3"]
