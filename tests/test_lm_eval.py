"""The model type: equal to lm-eval's own where nothing is lost, and losing only where a cache is read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.model import CachingLM
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.import_utils import is_hqq_available

from hf_kvquant import QuantizedKVCache, _compat
from hf_kvquant._compat import has_fp8_cache
from hf_kvquant.lm_eval import HFLM, KVQuantLM
from hf_kvquant.past import PastTensor
from hf_kvquant.reading import Reader, ReadingPlan
from hf_kvquant.schemes import EvalError, elements_held, find_scheme
from tests import evaluation, tiny
from tests.evaluation import request, text

CONTEXT = text(400)
PAIRS = [(CONTEXT, text(30, 1)), (CONTEXT, text(7, 2)), (text(33, 3), text(90, 4)), ("", text(5, 5))]
GREEDY = {"until": ["\n"], "max_gen_toks": 20, "do_sample": False}
WHOLE = {"prefill_tail": 10**6, "score_chunk": 10**6}  # nothing is ever read back
MODES = {
    "two-phase": {},
    "chunked": {"prefill": "chunked", "score_chunk": 16},
    "odd": {"prefill_tail": 5, "score_chunk": 7},
    "decoding": {"score_chunk": 1},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return evaluation.model()


@pytest.fixture
def make(model: Any) -> Any:
    def build(kv_cache: str = "none", **options: Any) -> KVQuantLM:
        return KVQuantLM(model, kv_cache, tokenizer=evaluation.tokenizer(), **options)

    return build


@pytest.fixture(scope="module")
def stock(model: Any) -> Any:
    return HFLM(model, tokenizer=evaluation.tokenizer(), max_length=600)


def likelihoods(lm: Any) -> list[tuple[float, bool]]:
    return lm.loglikelihood([request("loglikelihood", *pair) for pair in PAIRS], disable_tqdm=True)


def rolling(lm: Any) -> list[float]:
    """One text within the model's length, one that takes two windows."""
    requests = [request("loglikelihood_rolling", text(length, 6)) for length in (500, 900)]
    return lm.loglikelihood_rolling(requests, disable_tqdm=True)


def replies(lm: Any) -> list[str]:
    requests = [request("generate_until", context, GREEDY) for context in (CONTEXT, text(40, 7))]
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_cache", ["none", "lossless"])
def test_lossless_caches_equal_the_stock_model(make: Any, stock: Any, tmp_path: Path, kv_cache: str, mode: str) -> None:
    name = "none" if kv_cache == "none" else evaluation.save_config(tmp_path / "lossless.json")
    lm = make(name, max_length=600, **MODES[mode])
    for (got, got_greedy), (right, greedy) in zip(likelihoods(lm), likelihoods(stock), strict=True):
        assert got == pytest.approx(right, abs=1e-3)
        assert got_greedy == greedy
    assert rolling(lm) == pytest.approx(rolling(stock), abs=1e-3)
    assert replies(lm) == replies(stock)
    assert len(set(replies(stock))) == 2


def test_greedy_match_is_of_the_whole_continuation(make: Any, model: Any) -> None:
    context = [ord(each) for each in CONTEXT]
    said = tiny.generate(model, torch.tensor([context]), tiny.new_cache(model, None), 20)[0, len(context) :].tolist()
    for changed, right in ((None, True), (0, False), (9, False), (19, False)):
        continuation = [token if place != changed else (token + 1) % 256 for place, token in enumerate(said)]
        assert make().reader.score(context, continuation)[1] is right


def test_two_bits_show_only_where_the_cache_is_read(make: Any, stock: Any) -> None:
    """In one piece every key is still exact; in chunks it is not."""
    right = [each[0] for each in likelihoods(stock)]
    whole = [each[0] for each in likelihoods(make("k2v2", residual_length=0, **WHOLE))]
    assert whole == pytest.approx(right, abs=1e-3)
    chunks = [each[0] for each in likelihoods(make("k2v2", residual_length=0))]
    assert abs(chunks[0] - right[0]) > 0.1


@pytest.mark.parametrize("kv_cache", ["k4v4", "cr4"])
def test_decoding_from_codes_scores_as_full_tensors_do(
    make: Any, monkeypatch: pytest.MonkeyPatch, kv_cache: str
) -> None:
    """In pieces short enough for decode attention; the lengths are those where it is used."""
    ran: list[int] = []
    spied = QuantizedKVCache.update
    options: dict[str, Any] = {"score_chunk": 8, "prefill_tail": 8, "residual_length": 0}

    def update(self: Any, keys: torch.Tensor, *rest: Any, **named: Any) -> Any:
        handle = spied(self, keys, *rest, **named)
        ran.append(isinstance(handle[0], PastTensor))
        return handle

    monkeypatch.setattr(QuantizedKVCache, "update", update)
    codes = likelihoods(make(kv_cache, **options)), replies(make(kv_cache, **options))
    assert sum(ran) > 20
    ran.clear()
    monkeypatch.setattr(QuantizedKVCache, "_pays", lambda *_: False)
    full = likelihoods(make(kv_cache, **options)), replies(make(kv_cache, **options))
    assert not any(ran)
    assert [each[0] for each in codes[0]] == pytest.approx([each[0] for each in full[0]], abs=1e-3)
    assert codes[1] == full[1]


@pytest.mark.parametrize("chunk", [16, 64])
def test_score_is_that_of_a_cache_fed_by_hand(model: Any, chunk: int) -> None:
    """Haystack in one piece, the rest at multiples of the chunk, every logit from its own forward."""
    context, continuation = [[ord(each) for each in part] for part in PAIRS[0]]
    scheme = find_scheme("k2v2", 0)
    reader = Reader(model, lambda: scheme.build(model.config), ReadingPlan(tail=32, chunk=chunk), 0)
    got, _, _ = reader.score(context, continuation)
    cache = QuantizedKVCache(model.config, scheme.config)
    ids = [*context, *continuation][:-1]
    haystack = (len(context) - 32) // chunk * chunk
    cuts = [0, *range(haystack, len(ids), chunk), len(ids)]
    logits = [tiny.forward(model, torch.tensor([ids[a:b]]), cache)[0] for a, b in itertools.pairwise(cuts)]
    log_probs = torch.cat(logits)[len(context) - 1 :].log_softmax(-1)
    right = log_probs[range(len(continuation)), continuation].sum().item()
    assert got == pytest.approx(right, abs=1e-3)


def test_logits_are_computed_where_they_are_needed(make: Any, model: Any) -> None:
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    make("k4v4").loglikelihood([request("loglikelihood", CONTEXT, text(30, 1))], disable_tqdm=True)
    hook.remove()
    # 400 tokens of context: haystack of 320; pieces 320-384 with one unused logit, 384-429 with 30.
    assert rows == [1, 1, 30]


@pytest.mark.parametrize(
    "kv_cache",
    [
        "none",
        "k2v2",
        "cm3",
        pytest.param(
            "transformers:fp8", marks=pytest.mark.skipif(not has_fp8_cache(), reason="transformers before 5.21")
        ),
        pytest.param("transformers:hqq4", marks=pytest.mark.skipif(not is_hqq_available(), reason="needs hqq")),
    ],
)
def test_shared_prefill_changes_nothing(make: Any, kv_cache: str) -> None:
    """Equal contexts are read once, and every answer is the one of a cache of its own, in any order."""
    requests = [request("loglikelihood", CONTEXT, text(9, seed)) for seed in range(4)]
    shared, alone = make(kv_cache), make(kv_cache, prefix_cache_mib=0)
    built = []
    build = shared.reader.build
    shared.reader.build = lambda: built.append(1) or build()
    got = shared.loglikelihood(requests, disable_tqdm=True)
    assert len(built) == 1
    assert got == alone.loglikelihood(requests, disable_tqdm=True)
    assert got[::-1] == shared.loglikelihood(requests[::-1], disable_tqdm=True)


def test_an_older_transformers_has_no_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "has_fp8_cache", lambda: False)
    with pytest.raises(EvalError, match="kv_cache=transformers:fp8: this transformers has no fp8 cache"):
        find_scheme("transformers:fp8")


def test_kept_caches_stay_within_their_bytes(make: Any) -> None:
    lm = make("none", prefix_cache_mib=1)
    # 256 or 320 tokens x 2 layers x 2 heads x 16 channels x keys and values x 4 bytes = 128 to 160 KiB: seven fit.
    for seed in range(12):
        lm.loglikelihood([request("loglikelihood", text(400, seed), "abc")], disable_tqdm=True)
    sizes = [size for _, size in lm.reader.kept.values()]
    assert sizes == [320 * 2 * 2 * 16 * 2 * 4] * 6


def test_what_ran_is_in_the_model_info(make: Any) -> None:
    lm = make("k4v4", residual_length=0, score_chunk=32)
    likelihoods(lm)
    info = lm.get_model_info()
    assert info["kv_decode_attention"] == lm.identity()["decode_attention"] == "native"
    assert info["kv_cache"] == "k4v4"
    assert info["kv_scheme"]["residual_length"] == 0
    assert (info["kv_prefill"], info["kv_prefill_tail"], info["kv_score_chunk"]) == ("two-phase", 64, 32)
    assert info["kv_tokens"] == 429  # 400 + 30 - 1: the last token of an answer is not fed
    # Keys 4 + 32 / 64 bits, values 4 + 32 / 16 with groups of 16 channels, and the exponents of the scales.
    assert info["kv_block_bits_per_element"] == pytest.approx(5.25, abs=0.01)
    exact = make("none")
    likelihoods(exact)
    assert exact.get_model_info()["kv_cache_nbytes"] == 429 * 2 * 2 * 2 * 16 * 4
    assert exact.get_model_info()["kv_bits_per_element"] == 32.0


def test_two_schemes_never_share_a_response_cache(make: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    first = CachingLM(make("k4v4"), path)
    answer = first.loglikelihood([request("loglikelihood", *PAIRS[0])])
    again = CachingLM(make("k4v4"), path)
    assert again.loglikelihood([request("loglikelihood", *PAIRS[0])]) == answer
    held = again.get_model_info()  # nothing was read this time; what the answers took is known all the same
    assert held["kv_tokens"] == 429
    assert held["kv_cache_nbytes"] == first.get_model_info()["kv_cache_nbytes"]
    others = (
        make("k2v2"),
        make("k4v4", score_chunk=16),
        make("k4v4", residual_length=0),
        make("k4v4", prefix_token_id=7),
    )
    for other in others:
        with pytest.raises(EvalError, match=r"responses\.db holds responses of another scheme, model or chunking"):
            CachingLM(other, path)
    foreign = CachingLM(HFLM(evaluation.model(), tokenizer=evaluation.tokenizer()), str(tmp_path / "stock.db"))
    foreign.loglikelihood([request("loglikelihood", *PAIRS[0])])
    with pytest.raises(EvalError, match=r"stock\.db holds responses of an unknown model"):
        CachingLM(make("k4v4"), str(tmp_path / "stock.db"))
    for each in (first, again, foreign):
        each.dbdict.close()


@pytest.mark.parametrize(
    ("kv_cache", "options", "message"),
    [
        ("k9v9", {}, "kv_cache=k9v9: unknown; choose from none, fp8, int8"),
        ("transformers:quanto9", {}, "after transformers: choose from quanto2, quanto4, hqq1"),
        ("missing.json", {}, "kv_cache=missing.json: .*No such file"),
        ("none", {"residual_length": 8}, "residual_length=8: kv_cache=none has no window"),
        ("k4v4", {"residual_length": -1}, "residual_length=-1: it must be an integer of at least 0"),
        ("cm3", {"attach": False}, "attach=False: kv_cache=cm3 needs an attached model"),
        ("cm3", {"attach": "perhaps"}, "attach=perhaps: choose True, False or auto"),
        ("k4v4", {"batch_size": 8}, "batch_size=8: requests are read one by one"),
        ("k4v4", {"batch_size": "auto"}, "batch_size=auto: requests are read one by one"),
        ("k4v4", {"score_chunk": 0}, "score_chunk=0: it must be an integer of at least 1"),
        ("k4v4", {"prefill_tail": 0}, "prefill_tail=0: it must be an integer of at least 1"),
        ("k4v4", {"prefill": "none"}, "prefill=none: choose two-phase or chunked"),
        ("k4v4", {"max_length": "abc"}, "max_length=abc: it must be an integer of at least 1"),
        ("k4v4", {"dtype": "float5"}, "dtype=float5: torch has no such dtype"),
        ("k4v4", {"softmax_dtype": "nn"}, "softmax_dtype=nn: torch has no such dtype"),
        ("k4v4", {"prefix_cache_mib": -1}, "prefix_cache_mib=-1: it must be an integer of at least 0"),
    ],
)
def test_bad_arguments_are_named(make: Any, kv_cache: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        make(kv_cache, **options)


def test_bad_json_is_named(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"key": {"format": "int5"}}')
    with pytest.raises(EvalError, match=r"kv_cache=.*bad\.json: .*int5"):
        make(str(path))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(EvalError, match=r"pretrained=\./no/such: neither a model folder nor a hub id that loads"):
        KVQuantLM("./no/such", "k4v4")


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "falcon", "gemma3_text"])
def test_bits_of_full_precision_are_those_of_the_dtype(model_type: str) -> None:
    """Whatever the configuration calls its heads, and with layers that hold a window only."""
    lm = KVQuantLM(other_model(model_type), "none", tokenizer=evaluation.tokenizer(), max_length=600)
    likelihoods(lm)
    info = lm.get_model_info()
    assert info["kv_tokens"] == 429
    assert info["kv_true_bits_per_element"] == 32.0
    if model_type != "gemma3_text":  # whose sliding layers hold parts of larger storages
        assert info["kv_bits_per_element"] == 32.0


@pytest.mark.skipif(not has_fp8_cache(), reason="transformers before 5.21 has no fp8 cache")
def test_elements_of_a_quantized_cache_are_counted() -> None:
    """falcon: one head of keys for four of queries, under a name of its own."""
    model = other_model("falcon")
    cache = find_scheme("transformers:fp8").build(model.config)
    tiny.forward(model, torch.zeros(1, 20, dtype=torch.long), cache)
    assert elements_held(cache, model) == 20 * 2 * 2 * 16


@pytest.mark.skipif(not has_fp8_cache(), reason="transformers before 5.21 has no fp8 cache")
def test_a_cache_that_the_model_cannot_have_is_named() -> None:
    with pytest.raises(EvalError, match=r"kv_cache=transformers:fp8: not for pretrained=.*only full attention layers"):
        KVQuantLM(other_model("gemma3_text"), "transformers:fp8", tokenizer=evaluation.tokenizer())


def other_model(model_type: str) -> Any:
    heads = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 128}
    sliding = {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma3_text" else {}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=600,
        bos_token_id=256,
        eos_token_id=256,
        **(heads | sliding if sliding else {}),
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_another_cache_is_refused(make: Any) -> None:
    lm, options = make(), GREEDY | {"cache_implementation": "quantized"}
    with pytest.raises(EvalError, match="cache_implementation: the cache is the one that kv_cache names"):
        lm.generate_until([request("generate_until", CONTEXT, options)], disable_tqdm=True)


def test_beams_are_refused(make: Any) -> None:
    with pytest.raises(EvalError, match="num_beams"):
        make().generate_until([request("generate_until", CONTEXT, GREEDY | {"num_beams": 2})], disable_tqdm=True)
