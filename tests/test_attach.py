"""attach(model): keys stored before RoPE, with everything else about the model left as it was."""

import copy
import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RoFormerConfig,
)

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec, attach
from hf_kvquant.attach import attention_modules
from tests.test_layers import held_nbytes
from tests.tiny import BEFORE_5_24
from tests.tolerances import TOLERANCES

CONFIG = LlamaConfig(
    vocab_size=90,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
SIZES: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
# Blocks of 8 tokens, so that 40 tokens close several; lossless codes behind a real un-rotation.
LOSSLESS = KVQuantConfig(TensorSpec("none", group_size=8), TensorSpec("none", group_size=8), 4, 2, pre_rope=True)
INT4 = KVQuantConfig(TensorSpec(group_size=8), TensorSpec(axis="token"), 4, 2, pre_rope=True)


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture
def model() -> Any:
    return make_model()


def tokens(batch: int = 1, length: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, cache: Any, ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Prefill of 20 tokens and one step for each of the rest."""
    ids = tokens() if ids is None else ids
    with torch.no_grad():
        steps = [model(ids[:, :20], past_key_values=cache, **kwargs).logits[:, -1]]
        steps += [
            model(ids[:, t : t + 1], past_key_values=cache, **kwargs).logits[:, -1] for t in range(20, ids.shape[1])
        ]
    return torch.stack(steps)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) <= TOLERANCES["rotation_round_trip"]


def hook_counts(model: Any) -> list[int]:
    return [len(module._forward_pre_hooks) for module in model.modules()]


# -------------------------------------------------------------------- what is stored


def test_lossless_equals_dynamic_cache_and_blocks_hold_raw_keys(model) -> None:
    expected = logits(model, DynamicCache(config=CONFIG))
    cache = QuantizedKVCache(CONFIG, LOSSLESS)
    with attach(model):
        assert close(logits(model, cache), expected)
    assert "layers 0-1: quantized before RoPE (8 half pairs at channel 0 of the keys)" in cache.summary()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens()))
        raw = attention.k_proj(hidden).view(1, 40, 2, 16).transpose(1, 2)
    stored = cache.layers[0].key_state.packed.held.planes[0].flatten(2, 3)
    assert close(stored[:, :, :32], raw[:, :, 2:34])
    assert not close(stored[:, :, :32], cache.layers[0].keys[:, :, 2:34])


def test_codes_are_those_of_the_raw_keys_whatever_the_position(model) -> None:
    """In a repeated text each token has the same raw key in layer 0 at every position, so its codes repeat."""
    ids = tokens(length=8).repeat(1, 5)
    config = KVQuantConfig(TensorSpec(group_size=8), TensorSpec(axis="token"), 0, 0, pre_rope=True)
    cache = QuantizedKVCache(CONFIG, config)
    with attach(model), torch.no_grad():
        model(ids, past_key_values=cache)
    blocks = cache.layers[0].keys.unflatten(2, (5, 8))
    raw = torch.empty(1, 2, 40, 16)
    state = cache.layers[0].key_state
    rotary, state.rotary = state.rotary, None
    state.read_blocks(raw, slice(None), [8] * 5, 8, 0)
    state.rotary = rotary
    repeated = raw.unflatten(2, (5, 8))
    assert float((repeated - repeated[:, :, :1]).abs().max()) < 1e-3
    assert float((blocks - blocks[:, :, :1]).abs().max()) > 0.1


def test_left_padded_rows_equal_rows_alone(model) -> None:
    ids, mask = tokens(2), torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, alone = QuantizedKVCache(CONFIG, INT4), QuantizedKVCache(CONFIG, INT4)
    if BEFORE_5_24:  # models do not hand position ids to the cache
        cache.set_padding(mask)
    with attach(model), torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        model(ids[1:, 7:], past_key_values=alone)
    assert cache.rotary.tables[0].cos.shape[0] == 2
    assert alone.rotary.tables[0].cos.shape[0] == 1
    assert float((cache.layers[0].keys[1, :, 7:] - alone.layers[0].keys[0]).abs().max()) < 1e-3


def test_operations_keep_tables_and_tokens_together(model) -> None:
    """Crop, beams, selection, repetition, deepcopy, files: logits as with DynamicCache, every byte accounted for."""
    ids, mask = tokens(2), torch.ones(2, 60, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    outputs = []
    for cache in (DynamicCache(config=CONFIG), QuantizedKVCache(CONFIG, LOSSLESS)):
        with attach(model), torch.no_grad():
            model(ids, attention_mask=mask[:, :40], position_ids=positions[:, :40], past_key_values=cache)
            cache.crop(-25)
            cache.reorder_cache(torch.LongTensor([1, 0]))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3]))
            cache = _through_a_file(copy.deepcopy(cache))
            flipped = mask.flip(0)[:, :40], positions.flip(0)[:, 15:40]
            step = model(ids[:, 15:], attention_mask=flipped[0], position_ids=flipped[1], past_key_values=cache)
            outputs.append(step.logits[:, -1])
        if isinstance(cache, QuantizedKVCache):
            assert cache.memory_report().total == held_nbytes(cache)
            assert cache.memory_report().rotary > 0
    assert close(*outputs)


def _through_a_file(cache: Any) -> Any:
    if not isinstance(cache, QuantizedKVCache):
        return cache
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cache.save(f"{folder}/cache")
        return QuantizedKVCache.load(f"{folder}/cache", CONFIG)


@pytest.mark.parametrize(
    "arguments", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 7}, {}]
)
def test_generate_is_token_equal(model, arguments) -> None:
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0} | arguments
    expected = model.generate(tokens(), past_key_values=DynamicCache(config=CONFIG), **settings)
    with attach(model):
        got = model.generate(tokens(), past_key_values=QuantizedKVCache(CONFIG, LOSSLESS), **settings)
    assert torch.equal(got, expected)
    assert len(set(expected[0, 40:].tolist())) > 5


# -------------------------------------------------------------------- what is left as it was


def test_nothing_is_left_behind(model) -> None:
    before, forwards = hook_counts(model), [module.forward for module in model.modules()]
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    with attach(model) as outer:
        assert sum(hook_counts(model)) == sum(before) + 2
        with attach(model):
            assert sum(hook_counts(model)) == sum(before) + 2
        assert sum(hook_counts(model)) == sum(before) + 2
        assert [module.forward for module in model.modules()] == forwards
        outer.detach()
        outer.detach()
        assert hook_counts(model) == before
    assert hook_counts(model) == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    assert not any(module._forward_pre_hooks_with_kwargs for module in model.modules())


def test_other_caches_are_bit_identical(model) -> None:
    expected = logits(model, DynamicCache(config=CONFIG))
    post = KVQuantConfig(TensorSpec(group_size=8), TensorSpec(axis="token"), 4, 2)
    quantized = logits(model, QuantizedKVCache(CONFIG, post))
    with attach(model), torch.no_grad():
        assert torch.equal(logits(model, DynamicCache(config=CONFIG)), expected)
        assert torch.equal(model(tokens(), use_cache=False).logits[:, -1], model(tokens()).logits[:, -1])
        assert torch.equal(logits(model, QuantizedKVCache(CONFIG, post)), quantized)


def test_not_attached_is_an_error_that_shows_the_line(model) -> None:
    cache = QuantizedKVCache(CONFIG, "k4v4-pre")
    with pytest.raises(ValueError, match=r"model is not attached; write `with attach\(model\): model\.generate"):
        model(tokens(), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_bad_models() -> None:
    with pytest.raises(TypeError, match="model=str is not valid: pass the model itself"):
        attach("llama")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="model=Linear is not valid: no module in it has a layer_idx and takes a cache"
    ):
        attach(torch.nn.Linear(2, 2))


class OddAttention(torch.nn.Module):
    """An attention module that is handed its position embeddings as a dictionary (deepseek_v4)."""

    layer_idx = 0

    def forward(self, hidden_states: Any, position_embeddings: Any, past_key_values: Any = None) -> Any:
        return past_key_values.update(hidden_states[:, None], hidden_states[:, None], self.layer_idx)


def test_position_embeddings_of_an_unknown_form_are_a_reason_not_an_error() -> None:
    module, cache = OddAttention(), QuantizedKVCache(CONFIG, LOSSLESS)
    with attach(module), pytest.warns(UserWarning, match="after RoPE"):
        module(torch.randn(1, 20, 16), position_embeddings={"main": None}, past_key_values=cache)
    assert "after RoPE (its position embeddings are a dict" in cache.summary()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (RoFormerConfig(vocab_size=90, embedding_size=64, is_decoder=True, **SIZES), "rotates inside"),
        (GPTNeoConfig(vocab_size=90, hidden_size=64, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]), ""),
        *([(GPTJConfig(vocab_size=90, n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "rotates inside")] * BEFORE_5_24),
    ],
)
def test_modules_without_tables(config, text) -> None:
    """RoFormer rotates in a method of its attention, GPT-J did so too; GPT-Neo, which does not rotate, names its layers
    by layer_id."""
    torch.manual_seed(0)
    model, cache = AutoModelForCausalLM.from_config(config).eval(), QuantizedKVCache(config, LOSSLESS)
    with attach(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits(model, cache)
    assert f"after RoPE ({text or 'no rotation'}" in cache.summary()


def test_two_models_of_one_class_with_one_attached() -> None:
    one, other = make_model(0), make_model(1)
    with attach(one):
        logits(one, QuantizedKVCache(CONFIG, LOSSLESS))
        with pytest.raises(ValueError, match="not attached"):
            other(tokens(), past_key_values=QuantizedKVCache(CONFIG, LOSSLESS))


def test_wrapped_models(model) -> None:
    """A wrapper (multimodal, adapters) gets the attention of the decoder inside it attached, and nothing else."""
    wrapper = torch.nn.ModuleDict({"vision": torch.nn.Linear(2, 2), "language": model})
    assert attention_modules(wrapper) == attention_modules(model) == [layer.self_attn for layer in model.model.layers]


def test_copies_pickles_and_saved_models(model, tmp_path) -> None:
    expected = logits(model, DynamicCache(config=CONFIG))
    buffer = io.BytesIO()
    with attach(make_model()) as handle:
        fresh = make_model()
        inner = attach(fresh)
        pickle.dump(fresh, buffer)
        again = pickle.loads(buffer.getvalue())
        twin = copy.deepcopy(fresh)
        for one in (again, twin):
            assert close(logits(one, QuantizedKVCache(CONFIG, LOSSLESS)), expected)
        fresh.save_pretrained(tmp_path)
        inner.detach()
        handle.detach()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert not any(hook_counts(loaded))
    assert torch.equal(logits(loaded, DynamicCache(config=CONFIG)), expected)


def test_output_attentions_and_gradient_checkpointing(model) -> None:
    with attach(model):
        cache = QuantizedKVCache(CONFIG, LOSSLESS)
        model.set_attn_implementation("eager")
        logits(model, cache)
        with torch.no_grad():
            attentions = model(tokens()[:, :1], past_key_values=cache, output_attentions=True).attentions
        assert attentions[0].shape == (1, 4, 1, 41)
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable()
            loss = model(tokens(), labels=tokens()).loss
        loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.isfinite().all()


def test_threads(model) -> None:
    """Six threads, one model, one cache each: what a thread sees never reaches another's cache."""
    prompts = [tokens(seed=seed) for seed in range(6)]
    expected = [logits(model, DynamicCache(config=CONFIG), ids) for ids in prompts]
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        results[index] = logits(model, QuantizedKVCache(CONFIG, LOSSLESS), prompts[index])

    with attach(model):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(close(results[index], expected[index]) for index in range(6))


def test_accelerate_cpu_offload() -> None:
    from accelerate import cpu_offload

    model = make_model()
    expected = logits(model, DynamicCache(config=CONFIG))
    cpu_offload(model, execution_device=torch.device("cpu"))
    with attach(model):
        assert close(logits(model, QuantizedKVCache(CONFIG, LOSSLESS)), expected)


def test_peft_lora(model) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=4, init_lora_weights=False, lora_dropout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        adapted = peft.get_peft_model(model, settings).eval()
    expected = logits(adapted, DynamicCache(config=CONFIG))
    with attach(adapted):
        assert close(logits(adapted, QuantizedKVCache(CONFIG, LOSSLESS)), expected)
        probed = QuantizedKVCache(CONFIG, LOSSLESS)
        adapted.train()
        logits(adapted, probed)
    assert "before RoPE" in probed.summary()


def test_compiled_decode_step(model) -> None:
    """fullgraph: hook, capture, closing and read trace without a break, once an eager prefill has probed the layout.
    Each closing of a block compiles anew, since the number of blocks is a Python fact."""
    torch._dynamo.reset()
    ids = tokens(length=32)
    expected = logits(model, DynamicCache(config=CONFIG), ids)
    limit = torch._dynamo.config.patch(recompile_limit=64)
    with attach(model), torch.no_grad(), limit:
        cache = QuantizedKVCache(CONFIG, LOSSLESS)
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        steps = [model(ids[:, :20], past_key_values=cache).logits[:, -1]]
        steps += [compiled(ids[:, t : t + 1], past_key_values=cache).logits[:, -1] for t in range(20, 32)]
    torch._dynamo.reset()
    assert close(torch.stack(steps), expected)


def test_phi3_dropping_the_cache_is_reported() -> None:
    config = Phi3Config(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    )
    torch.manual_seed(0)
    model: Any = Phi3ForCausalLM(config).eval()
    cache = QuantizedKVCache(config, LOSSLESS)
    with attach(model), pytest.warns(UserWarning, match="dropped the QuantizedKVCache at its longrope boundary of 32"):
        model.generate(tokens(length=24), past_key_values=cache, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert cache.get_seq_length() == 32
