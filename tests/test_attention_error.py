"""The measures behind the notebooks, against the same written out plainly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attention_error import SHORTEST, capture, key_errors, passage, score_changes, store, value_errors
from benchmarks.replay import Queries
from hf_kvquant import PRESETS, KVQuantConfig, TensorSpec
from tests import evaluation, tiny

TOKENS, ASKED = 200, 30


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "gpt2"])
def captured(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model = tiny.load(request.param)
    return model, capture(model, tiny.prompt(1, TOKENS), ASKED)


def plain_attention(queries: Queries, keys: torch.Tensor) -> torch.Tensor:
    """Causal probabilities ``[H, q, T]``, one query at a time."""
    heads = queries.query.shape[1]
    out = torch.zeros(heads, ASKED, TOKENS)
    for head in range(heads):
        for index in range(ASKED):
            seen = TOKENS - ASKED + index + 1
            own = keys[0, head * keys.shape[1] // heads, :seen]
            out[head, index, :seen] = (own @ queries.query[0, head, index] * queries.scaling).softmax(0)
    return out


def test_capture_has_the_full_attention_layers_with_their_keys_before_rope(captured: Any) -> None:
    model, found = captured
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    assert [each.index for each in found.layers] == [i for i, kind in enumerate(types) if kind == "full_attention"]
    for each in found.layers:
        assert each.queries.query.shape[2] == ASKED
        assert torch.equal(each.keys, each.queries.keys)
        assert (each.raw_keys is None) == (model.config.model_type == "gpt2")
        if each.raw_keys is not None:
            assert torch.allclose(each.raw_keys[:, :, 0], each.keys[:, :, 0], atol=1e-5)  # position 0 is not turned
            assert torch.allclose(each.raw_keys.norm(dim=-1), each.keys.norm(dim=-1), rtol=1e-4)
            assert not torch.allclose(each.raw_keys[:, :, -1], each.keys[:, :, -1], atol=0.01)


def test_exact_states_err_by_nothing(captured: Any) -> None:
    model, found = captured
    queries = [each.queries for each in found.layers]
    stored = store(model.config, PRESETS["none"].config, found)
    assert key_errors(queries, stored.keys) == {"relative": 0, "score": 0, "kl": 0}
    assert value_errors(queries, [each.values for each in found.layers], stored.values) == {"relative": 0, "output": 0}


def test_errors_are_what_they_say(captured: Any) -> None:
    model, found = captured
    stored = store(model.config, PRESETS["k2v2"].config, found)
    layer = found.layers[0]
    keys, values = stored.keys[0], stored.values[0]
    exact, other = plain_attention(layer.queries, layer.keys), plain_attention(layer.queries, keys)
    measured = key_errors([layer.queries], [keys])
    assert measured["relative"] == pytest.approx(float((keys - layer.keys).norm() / layer.keys.norm()), rel=1e-4)
    terms = torch.where(exact > 0, exact * (exact.log() - other.log()), 0.0)
    assert measured["kl"] == pytest.approx(float(terms.sum(-1).mean()), rel=1e-3)
    changes = score_changes(layer.queries, keys - layer.keys)
    assert changes.numel() == layer.queries.query.shape[1] * sum(range(TOKENS - ASKED + 1, TOKENS + 1))
    assert measured["score"] == pytest.approx(float(changes.square().mean().sqrt()), rel=1e-5)
    groups = layer.queries.query.shape[1] // values.shape[1]
    spread = [tensor[0].repeat_interleave(groups, 0) for tensor in (layer.values, values)]
    outputs = [exact @ tensor for tensor in spread]
    of_values = value_errors([layer.queries], [layer.values], [values])
    assert of_values["output"] == pytest.approx(float((outputs[1] - outputs[0]).norm() / outputs[0].norm()), rel=1e-3)


def test_an_error_along_a_query_changes_its_score_by_that_much() -> None:
    queries = Queries(torch.tensor([[[[2.0, 0.0]]]]), torch.zeros(1, 1, 1, 2), 0.5)
    assert score_changes(queries, torch.tensor([[[[3.0, 7.0]]]])).tolist() == [3.0]


def test_bits_count_codes_scales_and_zero_points() -> None:
    model = tiny.load("llama")  # heads of 16 channels: a scale and a zero point for every 16 elements
    found = capture(model, tiny.prompt(1, 4 + 192), ASKED)
    config = KVQuantConfig(TensorSpec("int4", "channel", 64), TensorSpec("int2", "token", 16))
    stored = store(model.config, config, found)
    exponents = 2 * 8 / (64 * 16)  # of scales and zero points, one per block and head
    assert stored.key_bits == pytest.approx(4 + 32 / 64 + exponents, abs=0.02)
    assert stored.value_bits == pytest.approx(2 + 32 / 16 + exponents, abs=0.02)


def test_a_passage_is_cut_to_the_model_and_refused_below_a_block() -> None:
    model, tokenizer = evaluation.model(positions=250), evaluation.tokenizer()
    assert passage(model, tokenizer, 1000).shape == (1, 4 + 192)  # whole blocks
    assert passage(model, tokenizer, 210).shape == (1, 210)
    assert torch.equal(passage(model, tokenizer, 210)[:, :196], passage(model, tokenizer, 1000))
    short = SimpleNamespace(config=evaluation.model(positions=SHORTEST - 1).config, device="cpu")
    with pytest.raises(ValueError, match=f"tokens=1000: the model takes {SHORTEST - 1} of them, and at least"):
        passage(short, tokenizer, 1000)
