"""save / load: what comes back, and every way a file can be wrong."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, Gemma4TextConfig, LlamaConfig, Qwen3NextConfig

from hf_kvquant import QuantizedKVCache, serialization
from hf_kvquant.serialization import FORMAT_VERSION
from tests.test_cache import LLAMA, UNATTACHED, filled, states


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


@pytest.mark.parametrize("preset", UNATTACHED)
def test_round_trip(preset, path) -> None:
    cache = filled(preset)
    cache.crop(-150)  # a block cut short
    cache.batch_select_indices(torch.tensor([1]))
    cache.save(path)
    again = QuantizedKVCache.load(path, LLAMA)
    assert (again.quantization, again.get_seq_length()) == (cache.quantization, 150)
    for one in (cache, again):
        one.update(states(1, tokens=70) + 1, states(1, tokens=70), 0)
    assert torch.equal(cache.layers[0].keys, again.layers[0].keys)
    assert torch.equal(cache.layers[1].values, again.layers[1].values)


def test_an_empty_cache_and_a_set_padding_survive(path) -> None:
    cache = QuantizedKVCache(LLAMA)
    cache.set_padding(torch.tensor([[0, 1], [1, 1]]))
    cache.save(path)
    again = QuantizedKVCache.load(path, LLAMA)
    assert again.get_seq_length() == 0
    assert not again.is_initialized
    assert [row.padding for row in again.layers[0].rows] == [1, 0]
    assert again.padding_source == "set_padding"


def test_native_layers_survive(path) -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=8
    )
    cache = QuantizedKVCache(config)
    for index in range(2):
        cache.update(torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16), index)
    cache.save(path)
    again = QuantizedKVCache.load(path, config)
    assert again.get_mask_sizes(1, 0) == cache.get_mask_sizes(1, 0)
    assert torch.equal(again.update(states(1), states(1), 0)[0], cache.update(states(1), states(1), 0)[0])


def test_a_configuration_whose_layers_differ_in_head_dim(path) -> None:
    """Reading head_dim from such a configuration raises an error of transformers' own (Gemma 4)."""
    config = Gemma4TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    cache = QuantizedKVCache(config)
    cache.update(states(), states(), 1)
    cache.save(path)
    assert QuantizedKVCache.load(path, config).layers[1].get_seq_length() == cache.layers[1].get_seq_length()


def test_recurrent_layers_survive(path) -> None:
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    cache = QuantizedKVCache(config)
    cache.update_conv_state(torch.randn(1, 6, 4), 0)
    cache.update_recurrent_state(torch.randn(1, 2, 4, 4), 0)
    cache.save(path)
    again = QuantizedKVCache.load(path, config)
    assert torch.equal(again.layers[0].conv_states[0], cache.layers[0].conv_states[0])
    assert torch.equal(again.layers[0].recurrent_states[0], cache.layers[0].recurrent_states[0])


def test_a_truncated_file(path) -> None:
    filled().save(path)
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is not a complete safetensors file"):
            QuantizedKVCache.load(path, LLAMA)


def test_a_foreign_file(path) -> None:
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="was not written by hf_kvquant"):
        QuantizedKVCache.load(path, LLAMA)
    for wrong in (path.with_name("missing"), path.parent):
        with pytest.raises(FileNotFoundError, match="is no file; pass one that"):
            QuantizedKVCache.load(wrong, LLAMA)


def rewrite(path, change) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["hf_kvquant"])
    tensors = load_file(path)
    change(header, tensors)
    save_file(tensors, path, {"hf_kvquant": json.dumps(header)})


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_header_that_is_no_mapping(path, text) -> None:
    save_file({"weight": torch.zeros(2)}, path, {"hf_kvquant": text})
    with pytest.raises(ValueError, match="is damaged"):
        QuantizedKVCache.load(path, LLAMA)


def test_a_newer_file(path) -> None:
    filled().save(path)
    rewrite(path, lambda header, _: header.update(format_version=FORMAT_VERSION + 1))
    with pytest.raises(
        ValueError, match=f"has format_version={FORMAT_VERSION + 1}, this hf_kvquant reads {FORMAT_VERSION}; upgrade"
    ):
        QuantizedKVCache.load(path, LLAMA)


def test_an_older_file(path) -> None:
    filled().save(path)
    rewrite(path, lambda header, _: header.update(format_version=1))
    with pytest.raises(
        ValueError, match=f"has format_version=1, this hf_kvquant reads {FORMAT_VERSION}; save the cache again"
    ):
        QuantizedKVCache.load(path, LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, tensors: tensors.pop("layers.0.keys.window"),
        lambda header, tensors: tensors.pop("layers.1.values.scale"),
        lambda header, tensors: header["layers"].pop(),
        lambda header, tensors: header["layers"][0].pop("rows"),
        lambda header, tensors: header["layers"][0].update(type="DynamicLayer"),
        lambda header, tensors: header.pop("model"),
        lambda header, tensors: header["quantization"].update(bits=3),
        lambda header, tensors: header.update(format_version="2"),
        lambda header, tensors: header.update(model=[1]),
        lambda header, tensors: header["layers"].__setitem__(0, []),
    ],
)
def test_a_damaged_file(path, change) -> None:
    filled().save(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match="is damaged"):
        QuantizedKVCache.load(path, LLAMA)


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 3), ("num_key_value_heads", 4), ("head_dim", 32)])
def test_another_model(path, field, value) -> None:
    filled().save(path)
    other = LlamaConfig(**(LLAMA.to_dict() | {field: value}))
    with pytest.raises(
        ValueError, match=f"was saved from a model with {field}=.*, the given config has {field}={value}"
    ):
        QuantizedKVCache.load(path, other)


def test_a_folder_that_does_not_exist_or_cannot_be_written(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist; create it first"):
        filled().save(tmp_path / "missing" / "cache")
    with pytest.raises(OSError, match="cannot be written"):
        filled().save("/proc/cache")


@pytest.mark.parametrize("layers", [[0], [0, 1]])
def test_an_interrupted_forward_is_not_saved(path, layers, monkeypatch) -> None:
    """Between layers, and in the middle of one: save refuses, writes nothing, and reset() repairs."""
    cache = filled(tokens=190)
    cache.update(states(tokens=60), states(tokens=60), layers[0])
    if len(layers) > 1:
        monkeypatch.setattr(type(cache.layers[1]), "_close_blocks", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.update(states(tokens=60), states(tokens=60), 1)
        monkeypatch.undo()
    with pytest.raises(ValueError, match=r"as an interrupted forward leaves them; nothing was written: reset\(\)"):
        cache.save(path)
    assert not path.exists()
    cache.reset()
    for index in range(2):
        cache.update(states(tokens=60), states(tokens=60), index)
    cache.save(path)
    assert QuantizedKVCache.load(path, LLAMA).get_seq_length() == 60


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_writing_is_atomic(path, monkeypatch) -> None:
    """An interrupted save leaves the old file as it was and nothing beside it."""
    filled("int8").save(path)
    before = path.read_bytes()

    def interrupted(tensors, target, metadata):
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(serialization, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled("k4v4").save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_layer_that_cannot_be_saved_writes_nothing(path) -> None:
    cache = filled()

    class Foreign:
        def __init__(self) -> None:
            self.secret = object()

    cache.layers[0] = Foreign()
    with pytest.raises(ValueError, match=r"layers.0.secret=object cannot be saved"):
        cache.save(path)
    assert os.listdir(path.parent) == []


def test_only_what_is_in_use_is_written(path) -> None:
    cache = filled()
    for _ in range(100):
        for index in range(2):
            cache.update(states(), states(), index)
    assert cache.memory_report().sum.unused
    cache.save(path)
    report = QuantizedKVCache.load(path, LLAMA).memory_report()
    assert report.sum.unused == 0
    assert report.total == cache.memory_report().total - cache.memory_report().sum.unused
