"""``hf-kvquant eval`` end to end on a tiny model, and what it says to requests that cannot be met."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks._index import TaskIndex

from hf_kvquant import cli, eval_command, eval_results
from hf_kvquant.eval_register import MODEL_TYPE, register
from tests import evaluation

ROOT = Path(__file__).parent.parent
OURS = eval_command.tasks_path()
SMALL = ["--metadata", "max_seq_lengths=[800,1000]", "samples_per_cell=1", "depths=[0.5]"]
TASKS = ["kvq_niah_multikey", "kvq_copy", "kvq_perplexity"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluation.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def offline_with_our_tasks_alone() -> Iterator[None]:
    """Indexing lm-eval's own thousands of tasks takes five seconds a run, and none of them is used here."""
    whole = TaskIndex.build
    with pytest.MonkeyPatch.context() as patch:
        only_ours = staticmethod(lambda paths: whole([path for path in paths if path == OURS]))
        patch.setattr(TaskIndex, "build", only_ours)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        yield


def evaluate(folder: Path, output: Path, *arguments: str, tasks: list[str] = TASKS, kv_cache: str = "k2v2") -> Path:
    given = ["eval", "--tasks", *tasks, "--model_args", f"pretrained={folder}", f"kv_cache={kv_cache}", *SMALL]
    assert cli.main([*given, "--log_samples", "--output_path", str(output), *arguments]) == 0
    return output


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("results")
    return {name: evaluate(folder, base / name, kv_cache=name) for name in ("none", "k2v2")}


def read(output: Path) -> dict[str, Any]:
    (file,) = output.rglob("results_*.json")
    return json.loads(file.read_text())


def test_results_say_what_ran(results: dict[str, Path]) -> None:
    data = read(results["k2v2"])
    assert set(data["results"]) == set(TASKS)
    assert data["config"]["model"] == MODEL_TYPE
    assert data["config"]["kv_cache"] == "k2v2"
    assert data["config"]["kv_score_chunk"] == 64
    assert 950 <= data["config"]["kv_tokens"] < 1000 + 44  # the longest document, and what was generated after it
    assert data["n-samples"]["kvq_niah_multikey"] == {"original": 2, "effective": 2}
    scores = data["results"]["kvq_niah_multikey"]
    assert scores["answer_nll,none"] == pytest.approx(
        (scores["answer_nll_800_d50,none"] + scores["answer_nll_1000_d50,none"]) / 2
    )


def test_schemes_are_told_apart(results: dict[str, Path]) -> None:
    exact, coarse = (read(results[name])["results"]["kvq_copy"]["answer_nll,none"] for name in ("none", "k2v2"))
    assert abs(exact - coarse) > 0.01


def test_other_order_same_numbers(results: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Also through plain paths of YAML files, without the prefilled haystacks being kept, and with another seed of
    lm-eval's."""
    paths = [str(next(eval_command.tasks_path().rglob(f"{name}.yaml"))) for name in reversed(TASKS)]
    arguments = ["--seed", "7", "--model_args", "prefix_cache_mib=0"]
    again = read(evaluate(folder, tmp_path, *arguments, tasks=paths))
    assert again["results"] == read(results["k2v2"])["results"]


def test_two_processes_give_the_same_numbers(results: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "hf_kvquant"]
    given = ["eval", "--tasks", *TASKS, "--model_args", f"pretrained={folder}", "kv_cache=k2v2", *SMALL]
    given += ["--log_samples", "--output_path", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run([*launch, *given], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (one,), (two,) = eval_results.load([results["k2v2"]]), eval_results.load([tmp_path])
    assert two.samples == one.samples


def test_chat_template_is_told_to_the_tasks(folder: Path, tmp_path: Path) -> None:
    output = evaluate(folder, tmp_path, "--apply_chat_template", tasks=["kvq_passkey"])
    (file,) = output.rglob("samples_*.jsonl")
    first = json.loads(file.read_text().splitlines()[0])
    sent = "".join(first["arguments"]["gen_args_1"].values())
    assert sent.startswith("<user>")
    assert len(evaluation.tokenizer()(sent).input_ids) == first["doc"]["tokens"] <= 800


def test_settings_of_a_config_file_count(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    data = {
        "tasks": ["kvq_passkey"],
        "model_args": f"pretrained={folder},kv_cache=k4v4",
        "metadata": {"max_seq_lengths": [700], "samples_per_cell": 1, "depths": 0.5},
        "apply_chat_template": True,
        "log_samples": True,
        "output_path": str(tmp_path / "out"),
    }
    file.write_text(json.dumps(data))
    assert cli.main(["eval", "--config", str(file)]) == 0
    assert read(tmp_path)["config"]["kv_cache"] == "k4v4"
    (samples,) = tmp_path.rglob("samples_*.jsonl")
    (sample,) = map(json.loads, samples.read_text().splitlines())
    sent = "".join(sample["arguments"]["gen_args_1"].values())
    assert sent.startswith("<user>")
    assert len(evaluation.tokenizer()(sent).input_ids) == sample["doc"]["tokens"] <= 700


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_args", "kv_cache=k9v9"], "kv_cache=k9v9: unknown; choose from none, "),
        (["--metadata", "max_seq_lengths=50"], "max_seq_lengths=50: too short for kvq_copy, which takes at least "),
        (["--metadata", "max_seq_lengths=5000"], "max_seq_lengths=5000: the model ends at 3000 positions"),
        (["--metadata", "max_seq_lengths=2990"], "max_seq_lengths=2990: the model ends at 3000 positions, of which 44"),
        (
            ["--metadata", "max_seq_lengths=5000", "--model_args", "max_length=9000"],
            "max_seq_lengths=5000: the model ends at 3000",
        ),
        (["--model_args", "score_chnk=1"], "model_args: "),
        (["--metadata", "tokenizer=./no/such"], "tokenizer=./no/such: no tokenizer there"),
        (["--model_args", "pretrained=./no/such"], "pretrained=./no/such: neither a model folder nor a hub id"),
        (["--batch_size", "4"], "batch_size=4: requests are read one by one"),
        (["--gen_kwargs", "max_gen_toks=2500"], "max_seq_lengths=800: the model ends at 3000 positions, of which 2500"),
        (["--model_args", "device=cpu"], "model_args: device is an option of its own; give --device cpu"),
        (["--include_path", "./no/such"], "--include_path ./no/such: no such folder"),
        (
            ["--metadata", "max_seq_length=600"],
            "--metadata max_seq_length=600: no task reads that; write max_seq_lengths",
        ),
        (["--limit", "0"], "--limit 0: give one above 0"),
        (["--config", "./no/such.yaml"], "--config ./no/such.yaml: Config file not found"),
        (["--model", "nothing"], "Attempted to load model 'nothing', but no model for this name found"),
        (["--cache_requests"], "--cache_requests: its cache does not know --metadata"),
        (["--tasks", "kvq_nothing"], "Tasks not found: kvq_nothing"),
        (["--log_samples"], "Specify --output_path if providing --log_samples"),
    ],
)
def test_bad_request_is_one_line_and_exit_code_2(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "--tasks", "kvq_copy", *SMALL, "--model_args", f"pretrained={folder}", *arguments]
    assert cli.main(given) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-kvquant: ")]
    assert len(error) == 1
    assert error[0].startswith(f"hf-kvquant: {message}")


def test_response_cache_of_another_scheme_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "--tasks", "kvq_passkey", *SMALL, "--use_cache", str(tmp_path / "responses")]
    model = f"pretrained={folder}"
    assert cli.main([*given, "--model_args", model, "kv_cache=k4v4"]) == 0
    assert cli.main([*given, "--model_args", model, "kv_cache=k2v2"]) == 2
    assert "holds responses of another scheme, model or chunking" in capsys.readouterr().err


def test_missing_lm_eval_prints_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        eval_command.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    assert cli.main(["eval", "--tasks", "kvq_copy"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "pip install 'lm_eval[hf]>=0.4.13' datasets matplotlib"


def test_lm_eval_explains_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["eval", "run", "--help"])
    assert "--apply_chat_template" in capsys.readouterr().out


def test_registering_twice_is_fine() -> None:
    register()
    register()


def test_tasks_of_an_installed_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_tasks").mkdir()
    monkeypatch.setattr(eval_command, "__file__", str(tmp_path / "eval_command.py"))
    assert eval_command.tasks_path() == tmp_path / "_tasks"
