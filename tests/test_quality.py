"""The quality benchmark on a tiny model: samples, replay, metrics, and a run that is interrupted and goes on."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks import quality, quality_plot, quality_schemes, quality_summary, replay, samples
from benchmarks.quality_schemes import CLOSED, WINDOW
from benchmarks.samples import Probe, Sample
from hf_kvquant import PRESETS, QuantizedKVCache, attach
from tests import tiny

SETTINGS = {"model": None, "dtype": "float32", "seed": 0, "samples": samples.VERSION}
CONTEXT = 4 + 192


class Letters:
    """A tokenizer of characters: every digit is one token, as in SmolLM2's."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(character) for character in text])

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.load("llama")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return tiny.prompt(1, CONTEXT + 40)


@pytest.fixture
def drawn(ids: torch.Tensor) -> list[Sample]:
    """A needle sample with two probes and a text sample."""
    tokens = tuple(ids[0].tolist())
    context, rest = tokens[:CONTEXT], tokens[CONTEXT:]
    probes = Probe(rest[:12], 5), Probe(rest[12:30], 5)
    return [Sample("needle-0", "needle", context, probes), Sample("text-0", "text", context[::-1], probes[:1])]


def run(model: Any, drawn: list[Sample], path: Path, schemes: tuple[str, ...] = ("none", "k2v2")) -> dict[str, Any]:
    return quality.run(model, drawn, list(schemes), path, SETTINGS)


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_depend_on_the_seed_alone_and_leave_no_open_block(seed: int) -> None:
    drawn = samples.build_samples(Letters(), seed)
    assert drawn == samples.build_samples(Letters(), seed)
    assert drawn != samples.build_samples(Letters(), seed + 1)
    assert len({each.name for each in drawn}) == len(drawn) == 8 + 4 + 8
    assert {(len(each.context) - samples.SINKS) % 64 for each in drawn} == {0}


def test_needles_stand_once_in_their_context_and_are_what_is_scored() -> None:
    tokenizer = Letters()
    for each in samples.build_samples(tokenizer, 0):
        if each.kind == "needle":
            answers = [tokenizer.decode(probe.ids[-probe.scored :]) for probe in each.probes]
            assert len(set(answers)) == 4
            assert all(tokenizer.decode(each.context).count(answer) == 1 for answer in answers)


def test_copied_digits_are_the_first_of_the_context() -> None:
    tokenizer = Letters()
    for each in samples.build_samples(tokenizer, 0):
        if each.kind == "copy":
            (probe,) = each.probes
            assert tokenizer.decode(probe.ids[-probe.scored :]) in tokenizer.decode(each.context)[:100]


def test_text_goes_on_where_the_context_ends() -> None:
    tokenizer = Letters()
    sample = next(each for each in samples.build_samples(tokenizer, 0) if each.kind == "text")
    words = (tokenizer.decode(sample.context) + tokenizer.decode(sample.probes[0].ids)).split()
    novel = samples.gzip.decompress(samples.data_path("persuasion.txt.gz").read_bytes()).decode().split()
    assert " ".join(words[:-1]) in " ".join(novel[len(novel) // 2 :])
    assert len(sample.probes[0].ids) == sample.probes[0].scored + 1


# ---------------------------------------------------------------- replay


def state(cache: QuantizedKVCache) -> dict[str, torch.Tensor]:
    found = {}
    for index, layer in enumerate(cache.layers):
        parts = tiny.layer_tensors(layer)
        for name, each in (("key", layer.key_state), ("value", layer.value_state)):
            parts |= {f"{name}.window": each.window, f"{name}.sinks": each.sinks}
        found |= {f"{index}.{name}": tensor for name, tensor in parts.items() if tensor is not None}
    return found


@pytest.mark.parametrize("preset", ["k4v4", "k4v4-pre"])
@torch.no_grad()
def test_a_replayed_cache_is_the_prefilled_one(model: Any, ids: torch.Tensor, preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset].config, residual_length=16)
    prefilled = QuantizedKVCache(model.config, config)
    with attach(model):
        tiny.forward(model, ids, prefilled)
    replayed = QuantizedKVCache(model.config, config)
    replay.replay(replayed, replay.record(model, ids))
    assert len(tiny.layer_tensors(prefilled.layers[0])) > 2
    tiny.assert_same_tensors(state(replayed), state(prefilled))
    assert replayed.memory_report() == prefilled.memory_report()
    assert replayed.summary() == prefilled.summary()


@pytest.mark.parametrize("preset", ["k2v2", "k2v2-pre"])
@torch.no_grad()
def test_probes_read_what_the_cache_itself_would_hand_out(model: Any, ids: torch.Tensor, preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset].config, residual_length=0)
    updates = replay.record(model, ids[:, :CONTEXT])
    real = replay.replay(QuantizedKVCache(model.config, config), updates)
    cache = replay.holding(model.config, replay.read_back(real, updates))
    probe = Probe(tuple(ids[0, CONTEXT:].tolist()), 20)
    first = quality.feed(model, cache, probe)
    assert torch.equal(first, quality.feed(model, cache, probe))
    with attach(model):
        through = tiny.forward(model, ids[:, CONTEXT:-1], real)[0, -20:]
    torch.testing.assert_close(first, through.log_softmax(-1), rtol=0, atol=0)


def test_transformers_own_caches_are_read_back_too(model: Any, ids: torch.Tensor) -> None:
    class Rounding(DynamicCache):
        """Hands the first update back and keeps whole numbers, as their QuantizedCache does with codes."""

        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            held = super().update(key_states.round(), value_states.round(), layer_idx)
            return (key_states, value_states) if key_states.shape[2] else held

    updates = replay.record(model, ids)
    states = replay.read_back(replay.replay(Rounding(config=model.config), updates), updates)
    assert all(torch.equal(keys, each.keys.round()) for (keys, _), each in zip(states, updates, strict=True))


def test_a_cache_that_changes_its_first_update_is_refused(model: Any, ids: torch.Tensor) -> None:
    class Lossy(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.half().float(), value_states, layer_idx)

    with pytest.raises(ValueError, match="Lossy changes what the first update returns"):
        replay.replay(Lossy(config=model.config), replay.record(model, ids))


@torch.no_grad()
def test_captured_queries_give_the_models_own_attention(ids: torch.Tensor) -> None:
    model = copy.deepcopy(tiny.load("llama"))
    cache = DynamicCache(config=model.config)
    tiny.forward(model, ids[:, :CONTEXT], cache)
    before = model.config._attn_implementation
    with replay.capture_queries(model) as queries:
        captured = tiny.forward(model, ids[:, CONTEXT:], cache)
    assert model.config._attn_implementation == before
    cache.crop(CONTEXT - ids.shape[1])
    assert torch.equal(captured, tiny.forward(model, ids[:, CONTEXT:], cache))
    model.set_attn_implementation("eager")
    cache.crop(CONTEXT - ids.shape[1])
    eager = model(ids[:, CONTEXT:], past_key_values=cache, output_attentions=True).attentions
    model.set_attn_implementation(before)
    for each, right in zip(queries, eager, strict=True):
        torch.testing.assert_close(each.log_attention().exp().flatten(1, 2), right)


# ---------------------------------------------------------------- metrics


def test_kl_by_hand() -> None:
    full, other = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert quality.kl(full, other).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert quality.kl(full, full).item() == 0.0


def test_scores_by_hand() -> None:
    full, other = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(), torch.tensor([[0.5, 0.5], [0.6, 0.4]]).log()
    result = quality.compare(full, other, Probe((7, 7, 0, 1), 2))
    assert result["nll"] == pytest.approx(-(math.log(0.5) + math.log(0.4)) / 2, rel=1e-5)
    assert result["nll_full"] == pytest.approx(-(math.log(0.9) + math.log(0.8)) / 2, rel=1e-5)
    assert (result["accuracy"], result["accuracy_full"]) == (0.5, 1.0)


def test_differences_are_paired_before_they_are_averaged() -> None:
    probes = [
        {"kl": 0.1, "nll": full + difference, "nll_full": full, "accuracy": accuracy, "accuracy_full": 1.0}
        for full, difference, accuracy in ((1.0, 0.1, 1.0), (5.0, 0.3, 0.5), (9.0, 0.2, 1.0))
    ]
    result = quality_summary.average_set([{"probes": probes, "attention_kl": []}])
    assert result["nll_difference"] == pytest.approx(0.2)
    assert result["nll_difference_se"] == pytest.approx(0.1 / math.sqrt(3))
    assert result["perplexity_change"] == pytest.approx(math.exp(0.2) - 1)
    assert (result["exact"], result["exact_full"], result["kl"]) == (pytest.approx(2 / 3), 1.0, pytest.approx(0.1))
    assert quality_summary.mean_and_error([0.5]) == (0.5, None)


def test_targets_compare_without_window_and_only_what_was_run() -> None:
    def average(scheme: str, window: str, bits: float, kl: float) -> dict[str, Any]:
        return {"scheme": scheme, "window": window, "bits": {"true": bits}} | {
            kind: {"kl": kl} for kind in samples.SETS
        }

    found = [average("cm2", CLOSED, 2.2, 0.5), average("cm2", WINDOW, 2.2, 0.01), average("k3v3", CLOSED, 3.5, 0.4)]
    verdicts = {each["what"]: each["verdict"] for each in quality_summary.check_targets(found)}
    assert verdicts == {
        "cm2: true bits": "PASS",
        "cm2, no window: KL on needle": "NOT REACHED",
        "cm2, no window: KL on copy": "NOT REACHED",
        "cm2, its own window: KL on text": "PASS",
    }
    assert quality_summary.check_targets(found[2:]) == []


# ---------------------------------------------------------------- runs


def test_a_run_reports_every_scheme_and_window(model: Any, drawn: list[Sample], tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    report = run(model, drawn, path)
    stored = json.loads(path.read_text())
    assert stored["averages"] == report["averages"]
    assert len(stored["rows"]) == 2 * 2 * 2
    by_name = {(each["scheme"], each["window"]): each for each in report["averages"]}
    assert by_name.keys() == {(scheme, window) for scheme in ("none", "k2v2") for window in (CLOSED, WINDOW)}
    for window in (CLOSED, WINDOW):
        lossless = by_name["none", window]
        assert lossless["needle"]["kl"] == lossless["text"]["kl"] == lossless["needle"]["nll_difference"] == 0.0
        assert set(lossless["text"]["attention_kl"]) == {0.0}
        assert by_name["k2v2", window]["needle"]["kl"] > 0
    coded = by_name["k2v2", CLOSED]
    assert min(coded["text"]["attention_kl"]) > 0
    assert coded["bits"]["blocks"] < coded["bits"]["all"] < 4
    assert (coded["needle"]["probes"], coded["text"]["probes"]) == (2, 1)
    assert "copy" not in coded
    assert all(part in path.with_suffix(".md").read_text() for part in ("| k2v2 |", "| none | 16.00 | 16.00 | 16.00 |"))
    for picture in ("quality.png", "quality_layers.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_was_interrupted(
    model: Any, drawn: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured, original = tmp_path / "quality.json", [], quality.measure

    def counting(model: Any, each: Any, sample: Sample, *rest: Any) -> dict[str, Any]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((each.scheme, each.window, sample.name))
        return original(model, each, sample, *rest)

    monkeypatch.setattr(quality, "measure", counting)
    with pytest.raises(KeyboardInterrupt):
        run(model, drawn, path)
    assert len(json.loads(path.read_text())["rows"]) == 3
    first, measured[:] = list(measured), ["none of the count"] * 4
    run(model, drawn, path)
    assert len(measured) - 4 == 2 * 4 - 3
    assert not set(first) & set(measured)
    measured[4:] = []
    report = run(model, drawn, path, ("none",))
    assert len(measured) == 4
    assert len(report["averages"]) == 4, "what another run stored is reported as well"
    monkeypatch.setitem(quality_schemes.CONFIGS, "k2v2", PRESETS["k4v4"].config)
    run(model, drawn, path)
    assert {each[0] for each in measured[4:]} == {"k2v2"}, "a changed format is measured again, nothing else"
    assert len(json.loads(path.read_text())["rows"]) == 8


def test_a_broken_scheme_is_named_and_costs_no_other(
    model: Any, drawn: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, original: Any = quality_schemes.known) -> list[quality_schemes.Candidate]:
        def fail(config: Any) -> Any:
            raise RuntimeError("no such plane\nlog")

        found = original(name)
        return [dataclasses.replace(each, build=fail) for each in found] if name == "k2v2" else found

    monkeypatch.setattr(quality_schemes, "known", broken)
    report = run(model, drawn, tmp_path / "quality.json")
    assert report["skipped"] == {"k2v2": "failed on needle-0, closed: RuntimeError: no such plane"}
    assert {each["scheme"] for each in report["averages"]} == {"none"}
    assert "**k2v2: failed on needle-0" in (tmp_path / "quality.md").read_text()


def test_an_unknown_scheme_is_an_error(model: Any) -> None:
    with pytest.raises(ValueError, match="--schemes k9v9: unknown; choose from none, "):
        quality_schemes.runnable(["k9v9"], model.config)


def test_every_scheme_has_a_colour_of_its_family() -> None:
    families = {name: quality_plot.family(name) for name in quality_schemes.NAMES}
    assert families["k3v3"] == "per channel"
    assert families["k4v4-pre"] == "per channel, before RoPE"
    assert families["tok4"] == "per token"
    assert families["cr4"] == families["had4"] == "rotated"
    assert families["cm3"] == "centred, static widths"
    assert families["cm3-tuned"] == "centred, widths tuned by layer"
    assert set(families.values()) <= set(quality_plot.FAMILIES)
