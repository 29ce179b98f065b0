"""What is done to a cache under ``torch.inference_mode`` leaves one that goes on without it."""

import copy
from pathlib import Path

import pytest
import torch

from hf_kvquant import QuantizedKVCache, attach
from tests import tiny


def _loaded(cache: QuantizedKVCache, folder: Path) -> QuantizedKVCache:
    cache.save(folder / "cache.safetensors")
    return QuantizedKVCache.load(folder / "cache.safetensors", tiny.load("llama").config)


def _selected(cache: QuantizedKVCache, _: Path) -> QuantizedKVCache:
    cache.batch_select_indices(torch.tensor([1, 0]))
    return cache


def _reordered(cache: QuantizedKVCache, _: Path) -> QuantizedKVCache:
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


def _repeated(cache: QuantizedKVCache, _: Path) -> QuantizedKVCache:
    cache.batch_repeat_interleave(2)
    return cache


OPERATIONS = [
    lambda cache, _: copy.deepcopy(cache),
    lambda cache, _: cache.to("cpu"),
    _loaded,
    _selected,
    _reordered,
    _repeated,
]


@pytest.mark.parametrize("quantization", ["k4v4-pre", "cr4"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_under_inference_mode_leave_a_cache_for_any_mode(operation, quantization, tmp_path) -> None:
    """Rows of unequal padding, whose tables of cos and sin differ; then steps that close a block under no_grad."""
    model = tiny.load("llama")
    ids, mask = tiny.left_padded(tiny.prompt(2, 200), [0, 37])
    with attach(model, backend="full"):
        cache = QuantizedKVCache(model.config, quantization)
        with torch.inference_mode():
            model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=cache)
            cache = operation(cache, tmp_path)
        rows = cache.batch_size
        with torch.no_grad():
            for _ in range(66):
                model(tiny.prompt(rows, 1), past_key_values=cache)
    assert cache.get_seq_length() == 266
