"""QuantizedKVCache as an object: bad input, summaries, accounting, padding sources, encoder-decoder models, device
moves."""

import pickle
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.memory import tensors_in
from hf_kvquant.presets import UNATTACHED_PRESETS

UNATTACHED = sorted(UNATTACHED_PRESETS)
LLAMA = LlamaConfig(
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=64,
    intermediate_size=64,
    vocab_size=60,
)
T5 = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
T5.update({"decoder_start_token_id": 0})


def filled(
    preset: str = "k4v4", tokens: int = 300, batch: int = 2, dtype: torch.dtype = torch.float32
) -> QuantizedKVCache:
    cache = QuantizedKVCache(LLAMA, preset)
    generator = torch.Generator().manual_seed(0)
    for index in range(2):
        keys, values = torch.randn(2, batch, 2, tokens, 16, generator=generator).to(dtype)
        cache.update(keys, values, index)
    return cache


def states(
    batch: int = 2, heads: int = 2, tokens: int = 1, dim: int = 16, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.zeros(batch, heads, tokens, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (states(heads=3), "layer 1: key_states has kv_heads=3, the cache holds kv_heads=2"),
        (states(dim=8), "layer 1: key_states has head_dim=8, the cache holds head_dim=16"),
        (
            states(dtype=torch.bfloat16),
            r"layer 1: key_states has dtype=torch.bfloat16, the cache holds dtype=torch.float32",
        ),
        (states(batch=3), "layer 1: batch size 3 does not match the 2 rows held; reset"),
        (
            states(tokens=2),
            r"layer 1: key_states \(2, 2, 2, 16\) and value_states \(2, 2, 1, 16\) differ in batch size or tokens",
        ),
        (states()[0], r"layer 1: key_states of shape \(2, 1, 16\) .* is not valid"),
        (states().long(), "dtype torch.int64 is not valid: it must be a floating point tensor"),
        (states().to("meta"), "layer 1: key_states has device=meta, the cache holds device=cpu"),
    ],
)
def test_update_refuses_what_does_not_fit_and_changes_nothing(keys, message) -> None:
    cache = filled()
    before = cache.layers[1].keys
    values = states(batch=keys.shape[0]).to(keys.device) if keys.shape[0] == 3 or keys.is_meta else states()
    with pytest.raises(ValueError, match=message):
        cache.update(keys, values, 1)
    assert cache.get_seq_length(1) == 300
    assert torch.equal(cache.layers[1].keys, before)


def test_bad_construction_and_layer_index() -> None:
    with pytest.raises(ValueError, match="preset='k5' is not valid: choose one of none, fp8, int8, k4v4"):
        QuantizedKVCache(LLAMA, "k5")
    with pytest.raises(ValueError, match="preset=4 is not valid"):
        QuantizedKVCache(LLAMA, 4)  # pyright: ignore[reportArgumentType]
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="offloading=True is not valid: it needs an accelerator"):
            QuantizedKVCache(LLAMA, offloading=True)
    with pytest.raises(TypeError, match=r"config=LlamaForCausalLM is not valid: pass model\.config"):
        QuantizedKVCache(LlamaForCausalLM(LLAMA))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="config=str is not valid"):
        QuantizedKVCache("llama")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="layer_idx=2 is not valid: this cache was built for the 2 layers of a 'llama' model"
    ):
        filled().update(states(), states(), 2)


def test_set_padding_again_replaces_the_rows() -> None:
    cache = QuantizedKVCache(LLAMA)
    cache.set_padding(torch.tensor([[0, 1], [1, 1], [1, 1]]))
    cache.set_padding(torch.tensor([[1, 1], [0, 1]]))
    assert "left padding: set_padding, tokens per row [0, 1]" in cache.summary()
    cache.update(states(), states(), 0)


def test_set_padding_refuses_what_it_cannot_honour() -> None:
    cache = QuantizedKVCache(LLAMA)
    with pytest.raises(ValueError, match="attention_mask row 1 has zeros after ones: only left padding"):
        cache.set_padding(torch.tensor([[0, 1, 1], [1, 0, 1]]))
    with pytest.raises(ValueError, match=r"attention_mask=\(3,\) is not valid"):
        cache.set_padding(torch.ones(3))
    with pytest.raises(ValueError, match="attention_mask=list is not valid"):
        cache.set_padding([[1]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the cache already holds 300 tokens"):
        filled().set_padding(torch.ones(2, 300))
    cache.set_padding(torch.tensor([[0, 1], [1, 1], [1, 1]]))
    with pytest.raises(ValueError, match="batch size 2 does not match the 3 rows held"):
        cache.update(states(), states(), 0)


def test_an_empty_selection_is_refused_and_changes_nothing() -> None:
    cache = filled()
    with pytest.raises(ValueError, match=r"layer 0: indices=\[\] is not valid: keep at least one row"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.batch_size == 2


@pytest.mark.parametrize("preset", UNATTACHED)
@pytest.mark.parametrize("padding", [50, 100])
@pytest.mark.parametrize("kept", [0, 1])
def test_crop_and_files_after_selecting_a_row_of_a_padded_batch(preset, padding, kept, tmp_path) -> None:
    """The row that held the window back is gone: what is left must not move, and must survive a file."""
    cache = QuantizedKVCache(LLAMA, preset)
    mask = torch.ones(2, 250, dtype=torch.long)
    mask[0, :padding] = 0
    cache.set_padding(mask)
    keys = torch.randn(2, 2, 250, 16, generator=torch.Generator().manual_seed(0))
    for index in range(2):
        cache.update(keys, keys, index)
    cache.batch_select_indices(torch.tensor([kept]))
    before = cache.layers[0].keys
    cache.save(tmp_path / "cache")
    for one in (cache, QuantizedKVCache.load(tmp_path / "cache", LLAMA)):
        assert one.memory_report().total > 0
        one.crop(-1)
        assert torch.equal(one.layers[0].keys, before[:, :, :249])
        one.update(states(1), states(1), 0)
        first = 0 if kept else padding  # padding reads as zeros once it has left the window
        assert torch.equal(one.layers[0].keys[:, :, first:249], before[:, :, first:249])


def test_set_padding_is_repeated_for_beams() -> None:
    """generate repeats the rows of the batch as neighbours before the first forward; the padding follows."""
    cache = QuantizedKVCache(LLAMA)
    cache.set_padding(torch.tensor([[0, 0, 1], [1, 1, 1]]))
    for index in range(2):
        cache.update(states(6, tokens=3), states(6, tokens=3), index)
    assert [[row.padding for row in layer.rows] for layer in cache.layers] == [[2, 2, 2, 0, 0, 0]] * 2


def test_summary_says_what_is_applied_and_why_not() -> None:
    text = QuantizedKVCache(LLAMA).summary()
    assert "layers 0-1: quantized after RoPE, keys int4 per channel over 64 tokens, fp16 scales" in text
    assert "values int4 per token over 64 channels" in text
    assert "left padding: none reported" in text
    hybrid = Qwen3NextConfig(num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"])
    text = QuantizedKVCache(hybrid, "fp8").summary()
    assert "layers 0-2: native LinearAttentionLayer: not plain full attention" in text
    assert "layer 3: quantized after RoPE, keys fp8_e4m3 per head over 64 tokens (symmetric)" in text
    sliding = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    text = QuantizedKVCache(sliding, "none").summary()
    assert "layer 0: native DynamicSlidingWindowLayer" in text
    assert "layer 1: quantized after RoPE, keys in full precision" in text
    assert "300 tokens, keys int4 per channel" in repr(filled())


def test_summary_counts_what_is_taken_as_padding() -> None:
    cache = QuantizedKVCache(LLAMA)
    cache.update(states(1, tokens=4), states(1, tokens=4), 0, kwargs={"position_ids": torch.tensor([[0, 0, 0, 1]])})
    assert "left padding: position_ids, tokens per row [2]" in cache.summary()


def test_memory_report_by_hand() -> None:
    """k4v4, 300 tokens of 2 rows x 2 heads x 16 channels in bf16: 2 blocks closed, 4 sinks, window of 168; every byte
    counted by hand."""
    report = filled(dtype=torch.bfloat16).memory_report()
    layer = report.layers[0]
    per_row_and_head = {
        "codes": 2 * (2 * 64 * 16 // 2),
        "scales": 2 * (2 * (16 * 2 + 1)) // 2
        + 2 * (64 * 2 + 1),  # keys: 16 channels a block; values: 64 tokens a block
        "zeros": 2 * 16 * 2 + 2 * 64 * 2,
        "window": 2 * 168 * 16 * 2,
        "sinks": 2 * 4 * 16 * 2,
    }
    assert {name: getattr(layer, name) for name in per_row_and_head} == {n: 4 * v for n, v in per_row_and_head.items()}
    assert (layer.unused, layer.other) == (0, 0)
    assert report.full_precision_nbytes == 2 * 2 * (2 * 2 * 300 * 16) * 2
    assert report.total == 2 * 4 * sum(per_row_and_head.values())
    assert report.ratio == report.total / report.full_precision_nbytes
    assert report.bits_per_element == pytest.approx(16 * report.ratio)
    packed = per_row_and_head["codes"] + per_row_and_head["scales"] + per_row_and_head["zeros"]
    assert report.packed_bits_per_element == pytest.approx(8 * packed / (2 * 128 * 16))
    assert f"{report.total:,} bytes" in str(report)


def test_memory_report_of_an_empty_cache() -> None:
    report = QuantizedKVCache(LLAMA).memory_report()
    assert (report.total, report.ratio, report.bits_per_element, report.packed_bits_per_element) == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("preset", UNATTACHED)
def test_pickle_continues_like_the_original(preset) -> None:
    cache = filled(preset)
    again = pickle.loads(pickle.dumps(cache))
    for one in (cache, again):
        one.update(states() + 1, states() - 1, 0)
    assert torch.equal(cache.layers[0].keys, again.layers[0].keys)
    assert again.memory_report() == cache.memory_report()


def test_move_to_another_device() -> None:
    cache = filled()
    assert cache.to("cpu") is cache
    cache.to("meta")
    assert cache.memory_report().total
    cache.update(states().to("meta"), states().to("meta"), 0)
    assert cache.layers[0].keys.device.type == "meta"
    with pytest.raises(ValueError, match="device=cpu, the cache holds device=meta"):
        cache.update(states(), states(), 0)


def test_prefetch_moves_everything_to_the_device_of_the_layer() -> None:
    """Offloaded tensors on the CPU, a layer that belongs elsewhere (the meta device stands in for an accelerator)."""
    cache = filled()
    layer = cache.layers[0]
    layer.offload()
    layer.device = torch.device("meta")
    full, _ = layer.update(states().to("meta"), states().to("meta"))
    assert full.is_meta
    assert all(tensor.is_meta for tensor in tensors_in([layer.key_state, layer.value_state]))
    other = cache.layers[1]
    other.device = torch.device("meta")
    other.prefetch()
    assert all(tensor.is_meta for tensor in tensors_in([other.key_state, other.value_state]))


def test_offloaded_layer_is_brought_back_by_update() -> None:
    cache = filled()
    expected = cache.layers[0].keys
    cache.offload(0)
    keys, _ = cache.update(states(), states(), 0)
    assert torch.equal(keys[:, :, :300], expected)


def test_encoder_decoder_halves() -> None:
    """The self-attention half of an EncoderDecoderCache: lossless equals the default cache; alone it is refused, with
    the line to write."""
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(T5).eval()
    ids = torch.randint(3, 60, (2, 30))
    arguments = {"max_new_tokens": 30, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = torch.stack(model.generate(ids, **arguments).logits)
    lossless = KVQuantConfig(TensorSpec("none"), TensorSpec("none"), residual_length=3, sink_length=1)
    for quantization, exact in ((lossless, True), ("k4v4", False)):
        cache = EncoderDecoderCache(QuantizedKVCache(T5, quantization), DynamicCache(config=T5))
        got = torch.stack(model.generate(ids, past_key_values=cache, **arguments).logits)
        assert cache.self_attention_cache.get_seq_length() == 30
        assert isinstance(cache.self_attention_cache.layers[0], QuantizedLayer)
        assert not exact or torch.equal(got, expected)
        beams = EncoderDecoderCache(QuantizedKVCache(T5, quantization), DynamicCache(config=T5))
        model.generate(ids, past_key_values=beams, max_new_tokens=5, num_beams=3)
    with pytest.raises(ValueError, match=r"needs EncoderDecoderCache\(QuantizedKVCache\(config\), DynamicCache"):
        model.generate(ids, past_key_values=QuantizedKVCache(T5), **arguments)


def test_padding_learned_only_from_the_start() -> None:
    """Odd position ids later in a sequence are the caller's business: they must not turn cached tokens into padding."""
    cache = filled(tokens=50, batch=1)
    cache.update(states(1), states(1), 0, kwargs={"position_ids": torch.tensor([[3]])})
    assert cache.layers[0].rows[0].padding == 0


@pytest.mark.parametrize(
    ("ids", "past", "expected"),
    [
        ([[0, 1, 2, 3], [0, 0, 0, 1]], 0, [0, 2]),
        ([[1, 1, 0, 1], [0, 1, 2, 3]], 0, [2, 0]),  # padding numbered 1, as some code does
        ([[0, 0, 0, 0]], 0, [3]),  # nothing but padding so far; the last token is decided later
        ([[0]], 0, [0]),
        ([[0, 1]], 6, [6]),
        ([[5, 6, 7, 8]], 0, None),  # positions of their own: no padding inferred
        ([[0, 1, 0, 1]], 0, None),  # packed sequences
    ],
)
def test_reading_padding_from_position_ids(ids, past, expected) -> None:
    from hf_kvquant.padding import from_position_ids

    assert from_position_ids(torch.tensor(ids), len(ids), past) == expected
