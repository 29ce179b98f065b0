"""Attention over codes against the fp32 oracle on the same codes: every format, key mode, shape and mask; compiled and
not."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.attention import backends, compiled, native, reference
from hf_kvquant.attention.codes import runs_of
from hf_kvquant.attention.compiled import CompiledDecode
from hf_kvquant.attention.decode import decode
from hf_kvquant.attention.plan import refusal
from hf_kvquant.formats import FORMATS, NumberFormat
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.past import Past
from hf_kvquant.rotary import LayerRotary, RotaryLayout, RotaryTable
from tests import tiny
from tests.tiny import relative_error
from tests.tolerances import TOLERANCES


def both(spec: TensorSpec, pre_rope: bool = False) -> KVQuantConfig:
    return KVQuantConfig(spec, spec, residual_length=16, pre_rope=pre_rope)


LOSSY = [name for name, fmt in FORMATS.items() if not fmt.lossless]
AXES = (("channel", 32), ("token", 32), ("token", None), ("head", 32), ("tensor", 32))
CONFIGS: dict[str, KVQuantConfig] = {name: preset.config for name, preset in PRESETS.items()}
CONFIGS |= {f"{fmt}-{axis}-{size}": both(TensorSpec(fmt, axis, size)) for fmt in LOSSY for axis, size in AXES}
CONFIGS |= {
    f"{fmt}-{axis}-{size}-pre": both(TensorSpec(fmt, axis, size), pre_rope=True)
    for fmt, (axis, size) in itertools.product(("int3", "int4", "fp8_e4m3", "midrise6"), AXES)
}
_CM3 = PRESETS["cm3"].config.key
CONFIGS |= {
    "plain centres": KVQuantConfig(
        TensorSpec("int4", "token", None, center="plain", rotation="hadamard"),
        TensorSpec("midrise4", "token", None, center="plain", rotation="hadamard"),
    ),
    "groups that cut through bytes": KVQuantConfig(
        TensorSpec("int4", "channel", 24), TensorSpec("int3", "channel", 40), residual_length=0, sink_length=0
    ),
    "the same before RoPE": KVQuantConfig(
        TensorSpec("int3", "channel", 24), TensorSpec("int3", "head", 40), 0, 0, pre_rope=True
    ),
    "static scales": KVQuantConfig(
        TensorSpec("fp8_e4m3", "head", scale_format="static", scale=1.5),
        TensorSpec("fp8_e5m2", "tensor", scale_format="static", scale=2.0),
        residual_length=0,
    ),
    "values of mixed widths": KVQuantConfig(_CM3, replace(_CM3, center="plain"), residual_length=0),
    "widths far apart": KVQuantConfig(
        replace(_CM3, format="midrise8", widths=((8, 32), (1, 32))), PRESETS["cm3"].config.value
    ),
    "centre before RoPE": KVQuantConfig(
        TensorSpec("int4", center="plain"),
        TensorSpec("int8", "token", 16, zero_format="int8", scale_format="log2_16"),
        residual_length=0,
        pre_rope=True,
    ),
}
# B, K, R, D, T
SHAPES = ((1, 1, 1, 64, 700), (2, 2, 3, 80, 401), (3, 1, 7, 16, 333), (1, 2, 5, 36, 300))


def past_with(
    config: KVQuantConfig,
    shape: tuple[int, ...],
    new: int = 1,
    dtype: torch.dtype = torch.float32,
    crop: int = 0,
    change: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    layout: RotaryLayout | None = None,
) -> tuple[torch.Tensor, Past]:
    """Queries ``[B, H, new, D]`` and the past of a layer that got all but the last tokens in one prefill; ``change``
    makes other keys, values and queries of all tokens."""
    batch, heads, repeats, dim, tokens = shape
    generator = torch.Generator().manual_seed(tokens)
    keys, values = torch.randn(2, batch, heads, tokens, dim, generator=generator).to(dtype)
    queries = torch.randn(batch, heads * repeats, tokens, dim, generator=generator).to(dtype)
    if change is not None:
        keys, values, queries = change(keys, values, queries)
    layer = QuantizedLayer(config)
    if config.needs_attach:
        layout = layout or RotaryLayout("key", "half", dim // 2, 0, 1, "single", False)
        angles = torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(layout.pairs) / layout.pairs)
        cos, sin = angles.cos()[None].to(dtype), angles.sin()[None].to(dtype)
        table = RotaryTable.empty_like(cos, 1, config.block_length)
        table.append(cos, sin)
        layer.set_rotary(LayerRotary(layout, table))
        layer.note_queries(lambda start, stop: queries[:, :, start:stop], keys[:, :, :-new])
    layer.update(keys[:, :, :-new], values[:, :, :-new])
    if crop:
        layer.crop(-crop)
    handle, _ = layer.update_for_attention(keys[:, :, -new:], values[:, :, -new:])
    return queries[:, :, -new:], handle.past  # pyright: ignore[reportAttributeAccessIssue]


def options_of(shape: tuple[int, ...], length: int, new: int = 1) -> list[tuple[Any, ...]]:
    """Scaling, softcap, mask and learned sinks: plain, and all at once."""
    batch, heads, repeats, dim, _ = shape
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(batch, 1, new, length, generator=generator) > 0.3
    mask[..., -new:] = torch.ones(new, new, dtype=torch.bool).tril()
    return [
        (dim**-0.5, 0.0, None, None),
        (0.3, 5.0, mask, torch.randn(heads * repeats, generator=generator)),
        (0.3, 0.0, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min), None),
    ]


@pytest.fixture(params=["algebra", "native", "native, floats"])
def attend(request, monkeypatch) -> Callable[..., torch.Tensor]:
    """The step that torch.compile is given, without it, and the one in C++, as this machine runs it and as one without
    integer products of bytes does."""
    if request.param == "native":
        return backends.native
    if request.param == "native, floats":
        library = native._library("-DWITHOUT_INTEGERS")
        monkeypatch.setattr(native, "_library", lambda: library)
        monkeypatch.setattr(backends, "_native", native.NativeDecode())
        return backends.native
    monkeypatch.setattr(backends, "_compiled", decode)
    return backends.compiled


@pytest.mark.parametrize("name", CONFIGS)
def test_every_format_gives_what_its_codes_stand_for(attend, name) -> None:
    for shape in SHAPES:
        query, past = past_with(CONFIGS[name], shape)
        assert not refusal(past)
        for options in options_of(shape, past.length):
            right = reference.decode(query, past, *options)
            assert relative_error(attend(query, past, *options), right) <= TOLERANCES["attention_fp32"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (KVQuantConfig(TensorSpec("none"), TensorSpec("int4"), pre_rope=True), "lossless keys before RoPE"),
        (replace(PRESETS["cr4"].config, pre_rope=True), "keys before RoPE with channel scales or a Hadamard rotation"),
        (both(TensorSpec("int4", "token", 4)), "more than 8 groups of channels per token"),
        (KVQuantConfig(residual_length=1000), "no block is closed yet"),
    ],
)
def test_what_codes_cannot_serve_is_refused_with_the_reason(config, reason) -> None:
    assert refusal(past_with(config, SHAPES[0])[1]) == reason


def test_wide_heads_and_long_blocks(attend) -> None:
    long = KVQuantConfig(TensorSpec("int4", "channel", 4096), TensorSpec("int4", "token", 16), residual_length=0)
    narrow, wide = past_with(long, (1, 1, 2, 16, 4200)), (1, 1, 2, 2048, 300)
    for scaling, (query, past) in (
        (16**-0.5, narrow),
        (2048**-0.5, past_with(CONFIGS["cm3"], wide)),
        (2048**-0.5, past_with(both(TensorSpec("int3")), wide)),
    ):
        assert not refusal(past)
        right = reference.decode(query, past, scaling)
        assert relative_error(attend(query, past, scaling), right) <= TOLERANCES["attention_fp32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["k4v4", "cr4", "cm3", "int3-token-32", "int8-channel-32", "widths far apart"])
def test_with_16_bits_the_rounding_of_the_output_is_nearly_all_of_the_error(attend, name, dtype) -> None:
    """One channel of the queries is 30 times the others: integers of all are relative to it."""

    def change(keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries[..., 5] *= 30
        return keys, values, queries

    query, past = past_with(CONFIGS[name], SHAPES[0], dtype=dtype, change=change)
    right = reference.decode(query.float(), past, 0.05)
    rounding = relative_error(right.to(dtype), right)
    assert relative_error(attend(query, past, 0.05), right) <= TOLERANCES["attention_over_rounding"] * rounding


@pytest.mark.parametrize("name", ["cr4", "cm3"])
def test_with_16_bits_so_it_is_where_keys_are_mostly_their_centre(attend, name) -> None:
    def change(keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return keys + 40 * rotated_like(keys), values, queries

    query, past = past_with(CONFIGS[name], (1, 1, 4, 128, 700), dtype=torch.float16, change=change)
    right = reference.decode(query.float(), past, 128**-0.5)
    rounding = relative_error(right.half(), right)
    assert relative_error(attend(query, past, 128**-0.5), right) <= TOLERANCES["attention_over_rounding"] * rounding


def rotated_like(keys: torch.Tensor) -> torch.Tensor:
    """One vector of length 1, rotated to the position of each of ``keys``."""
    tokens, dim = keys.shape[2:]
    angles = torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    one, other = torch.randn(2, dim // 2, generator=torch.Generator().manual_seed(0)) / dim**0.5
    return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1).to(
        keys.dtype
    )


def test_formats_with_levels_of_their_own_are_refused(monkeypatch) -> None:
    monkeypatch.setitem(FORMATS, "own", NumberFormat("own", 1, "table", levels=(-0.5, 1.0)))
    assert refusal(past_with(both(TensorSpec("own", "token", 32)), SHAPES[0])[1]) == "a format with levels of its own"


@pytest.mark.parametrize("name", ["k4v4", "cr4", "cm3", "k4v4-pre"])
def test_several_new_tokens_see_each_other_causally(attend, name) -> None:
    shape = SHAPES[1]
    query, past = past_with(CONFIGS[name], shape, new=5)
    for options in options_of(shape, past.length, 5):
        right = reference.decode(query, past, *options)
        assert relative_error(attend(query, past, *options), right) <= TOLERANCES["attention_fp32"]


def test_layers_share_masks_and_a_mask_written_to_is_read_again(attend, monkeypatch) -> None:
    made: list[int] = []
    build = backends.additive_masks
    monkeypatch.setattr(backends, "additive_masks", lambda *given: made.append(1) or build(*given))
    shape = SHAPES[1]
    mask = torch.rand(2, 1, 3, shape[4], generator=torch.Generator().manual_seed(0)) > 0.3  # new tokens see newer ones
    for expected in (3, 3, 6):
        if expected == 6:
            mask[0, 0, :, 50:90] ^= True
        query, past = past_with(CONFIGS["k4v4"], shape, new=3)
        right = reference.decode(query, past, 0.2, 0.0, mask)
        assert relative_error(attend(query, past, 0.2, 0.0, mask), right) <= TOLERANCES["attention_fp32"]
        assert len(made) == expected


@pytest.mark.parametrize(
    "name", ["cr4", "k4v4-pre", "k3v3-pre", "k2v2-pre", "fp8_e4m3-head-32-pre", "int4-token-32-pre"]
)
@pytest.mark.parametrize("arrangement", ["half", "interleaved"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_of_some_channels_in_either_direction(attend, name, arrangement, sign, dtype) -> None:
    layout = RotaryLayout("key", arrangement, 24, 8, sign, "single", False)
    query, past = past_with(CONFIGS[name], (2, 1, 5, 64, 333), dtype=dtype, layout=layout)
    right = reference.decode(query.float(), past, 0.2)
    tolerance = TOLERANCES["attention_fp32" if dtype == torch.float32 else "attention_bf16"]
    assert relative_error(attend(query, past, 0.2), right) <= tolerance


@pytest.mark.parametrize("name", ["k4v4", "cr4", "cm3", "k4v4-pre"])
@pytest.mark.parametrize("crop", [1, 150, 170])
def test_after_a_crop_into_a_block(attend, name, crop) -> None:
    query, past = past_with(CONFIGS[name], SHAPES[1], crop=crop)
    right = reference.decode(query, past, 0.2)
    assert relative_error(attend(query, past, 0.2), right) <= TOLERANCES["attention_fp32"]


@pytest.mark.parametrize("name", ["k4v4", "int8", "fp8", "cr4", "cm2"])
def test_bf16(attend, name) -> None:
    query, past = past_with(CONFIGS[name], SHAPES[0], dtype=torch.bfloat16)
    right = reference.decode(query.float(), past, 0.125)
    assert relative_error(attend(query, past, 0.125), right) <= TOLERANCES["attention_bf16"]


@pytest.mark.parametrize("name", ["k4v4", "cr4", "lossless"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), (torch.float16, torch.float32), (torch.bfloat16, torch.float64)],
)
def test_keys_and_values_of_different_dtypes(attend, name, dtypes) -> None:
    def change(keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return keys.to(dtypes[0]), values.to(dtypes[1]), queries

    config = both(TensorSpec("none")) if name == "lossless" else CONFIGS[name]
    query, past = past_with(config, SHAPES[0], change=change)
    right = reference.decode(query, past, 0.125)
    assert relative_error(attend(query, past, 0.125), right) <= TOLERANCES["attention_fp32"]


# NaN with other bits than torch's own: as memory of 0xff bytes holds it, and one that signals.
_FILLED, _SIGNALS = torch.tensor([-1, 0x7F800001], dtype=torch.int32).view(torch.float32)
NON_FINITE = {"inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan, "0xff": _FILLED, "signals": _SIGNALS}


@pytest.mark.parametrize("name", ["k4v4", "cm3", "lossless", "int4-channel-32-pre"])
@pytest.mark.parametrize("bad", NON_FINITE)
def test_what_is_not_finite_comes_out_as_in_the_oracle(attend, name, bad) -> None:
    """In a sink, a closed block, the window or the new token; one key, value or query of one head of two."""
    config = both(TensorSpec("none")) if name == "lossless" else CONFIGS[name]
    for which, token in [(0, 0), (0, 300), (0, 395), (0, 400), (1, 0), (1, 300), (1, 395), (2, 400)]:

        def change(*tensors: torch.Tensor, which: int = which, token: int = token) -> tuple[torch.Tensor, ...]:
            tensors[which][:, 0, token, 3] = NON_FINITE[bad]
            return tensors

        query, past = past_with(config, SHAPES[1], change=change)
        for learned in (None, torch.full((6,), 0.5), torch.full((6,), float(NON_FINITE[bad]))):
            options = (0.125, 0.0, None, learned)
            assert_same(attend(query, past, *options), reference.decode(query, past, *options))


def test_the_first_tokens_may_all_have_scores_of_minus_infinity(attend) -> None:
    def change(keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys[:, :, 4:600, 0], queries[..., 0] = -torch.inf, 1.0
        return keys, values, queries

    config = KVQuantConfig(TensorSpec("none"), TensorSpec("int4"), residual_length=16)
    query, past = past_with(config, (1, 2, 3, 32, 700), change=change)
    assert_same(attend(query, past, 0.2), reference.decode(query, past, 0.2))


def assert_same(got: torch.Tensor, right: torch.Tensor) -> None:
    """NaN and infinities at the same places, and the rest within tolerance."""
    finite = right.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), right[~finite].nan_to_num())
    assert torch.equal(got.isnan(), right.isnan())
    if finite.any():
        assert relative_error(got[finite], right[finite]) <= TOLERANCES["attention_fp32"]


# One of each kind of inner loop: folded and scaled keys, one plane and two, a table, mixed widths, before RoPE, several
# groups of channels, scales of several tokens for values, masks and learned sinks.
COMPILED = (
    "k4v4",
    "cr4",
    "cm3",
    "fp8",
    "k3v3-pre",
    "int3-token-32",
    "int8-channel-32",
    "int2-head-32",
    "plain centres",
)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_uncompiled_and_compiles_once(name) -> None:
    run = CompiledDecode()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shape = (1, 2, 3, 64, 0)
    for tokens in (340, 341, 404, 700, 1030, 2400):
        query, past = past_with(CONFIGS[name], (*shape[:4], tokens))
        options = (0.125, 0.0, None, None)
        right = reference.decode(query, past, *options)
        assert relative_error(with_run(run, query, past, options), right) <= TOLERANCES["attention_fp32"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", COMPILED)
def test_native_merges_what_threads_attended_to(monkeypatch, name) -> None:
    """Runs of blocks apart, in two threads, though there are so few that one would take them all."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(native, "_CODES_PER_THREAD", 1)
    monkeypatch.setattr(backends, "_native", native.NativeDecode())
    torch.set_num_threads(2)
    try:
        for shape in SHAPES:
            query, past = past_with(CONFIGS[name], shape)
            for options in options_of(shape, past.length):
                right = reference.decode(query, past, *options)
                assert relative_error(backends.native(query, past, *options), right) <= TOLERANCES["attention_fp32"]
    finally:
        torch.set_num_threads(threads)


def test_structures_in_python_and_in_cpp_have_the_same_members() -> None:
    text = re.sub(r"//.*", "", (native.SOURCES / "handed.h").read_text("utf-8"))
    sizes = {name: int(value) for name, value in re.findall(r"(MAX_\w+) = (\d+)", text)}
    assert sizes == {"MAX_PLANES": native._MAX_PLANES, "MAX_SEGMENTS": native._MAX_SEGMENTS}

    def members(name: str) -> list[tuple[str, str]]:
        """Names and types."""
        found = re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)
        assert found is not None
        lines = re.findall(r"(?:const )?(\w+)[ *]+([^;]*);", found[1])
        return [(member, kind) for kind, names in lines for member in re.findall(r"(\w+)(?:\[[^]]*\])?(?:,|$)", names)]

    for name in ("Segment", "Spec", "Form"):
        here: type[ctypes.Structure] = getattr(native, f"_{name}")
        doubles = [(field[0], field[1] is native.Double) for field in here._fields_]
        assert [(field, kind == "double") for field, kind in members(name)] == doubles
    side = [name for name, _ in members("Side")]
    assert side == ["planes", *native._SIDE]
    assert [name for name, _ in members("Call")] == [*native._HEADER, "key", "value", "cos", "sin"]
    assert [name for name, _ in members("Tensor")] == ["data", "batch", "head", "block"]


def test_a_compilation_is_told_in_one_line_and_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(compiled, "_compiled", lambda plan, tensors: lambda given: torch.zeros(1, 1, 2, 64))
    run = CompiledDecode()
    query, past = past_with(CONFIGS["k4v4"], (1, 1, 2, 64, 300))
    for _ in range(2):
        with_run(run, query, past, (0.125, 0.0, None, None))
    told = capsys.readouterr().err.splitlines()
    assert told == ["hf-kvquant: compiling decode attention (int4 keys, int4 values), kept on disk"]


def test_compiled_short_and_run_long() -> None:
    """Compiled for a few blocks, the same function serves more than 64 and more than 4,096 of them, in one thread and
    two."""
    run, threads = CompiledDecode(), torch.get_num_threads()
    config = both(TensorSpec("int4", "channel", 8))
    for count, tokens in ((1, 300), (1, 1000), (1, 40_000), (2, 1000)):
        torch.set_num_threads(count)
        query, past = past_with(config, (1, 1, 2, 16, tokens))
        right = reference.decode(query, past, 0.25)
        got = with_run(run, query, past, (0.25, 0.0, None, None))
        torch.set_num_threads(threads)
        assert relative_error(got, right) <= TOLERANCES["attention_fp32"]


def test_compiled_with_rotary_tables_of_one_row_and_of_each() -> None:
    """Equal padding and unequal padding under one plan: the tables of cos and sin have one row or as many as the
    batch."""
    run, config = CompiledDecode(), both(TensorSpec("int4", "channel", 32), pre_rope=True)
    for rows in (2, 1, 2):
        query, past = past_with(config, (2, 1, 2, 16, 300))
        rotary = past.states[0].rotary
        assert rotary is not None
        rotary.table.apply(lambda table, rows=rows: table.expand(rows, -1, -1, -1).clone())
        mask = torch.ones(2, 1, 1, 300, dtype=torch.bool)
        mask[..., 40] = False
        options = (0.25, 0.0, mask, None)
        right = reference.decode(query, past, *options)
        assert relative_error(with_run(run, query, past, options), right) <= TOLERANCES["attention_fp32"]


@pytest.mark.parametrize("name", ["k4v4", "cr4", "cm3"])
def test_long_contexts_lose_nothing_to_rounding(attend, name) -> None:
    query, past = past_with(PRESETS[name].config, (1, 1, 2, 64, 20_000))
    right = reference.decode(query, past, 0.125)
    assert relative_error(attend(query, past, 0.125), right) <= TOLERANCES["attention_fp32"]


@pytest.mark.parametrize("name", ["k4v4", "cm3"])
def test_compiled_with_masks_and_learned_sinks(name) -> None:
    run = CompiledDecode()
    for shape in ((2, 1, 2, 80, 400), (3, 1, 2, 80, 600)):
        query, past = past_with(CONFIGS[name], shape)
        options = options_of(shape, past.length)[1]
        right = reference.decode(query, past, *options)
        assert relative_error(with_run(run, query, past, options), right) <= TOLERANCES["attention_fp32"]


def with_run(run: CompiledDecode, query: torch.Tensor, past: Past, options: tuple[Any, ...]) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(backends, "_compiled", run)
        return backends.compiled(query, past, *options)


@pytest.mark.parametrize(
    ("length", "group"),
    [(length, group) for length in (8, 16, 24, 64, 120) for group in (1, 8, 24, 40, 64) if length % group == 0],
)
@pytest.mark.parametrize("widths", [(8,), (4,), (2,), (1,), (2, 1), (4, 2), (4, 1)])
def test_runs_cover_every_token_once(length, group, widths) -> None:
    covered = []
    for runs in runs_of(widths, length, group):
        for width, run in zip(widths, runs, strict=True):
            tokens = range(run.token, run.token + run.size)
            rows = length * width // 8
            assert [(run.shift // width) * rows + run.start + i for i in range(run.size)] == list(tokens)
            assert run.start + run.size <= rows
            assert group == 1 or {token // group for token in tokens} == {run.group}
        covered += range(runs[0].token, runs[0].token + runs[0].size)
    assert covered == list(range(length))


@pytest.mark.parametrize("name", ["int4-channel-32", "cr4", "cm3", "int4-channel-32-pre"])
@pytest.mark.parametrize("rows", [[0, 1], [1, 1], [0]])
@pytest.mark.parametrize("length", [378, 387, 400])
def test_blocks_shortened_in_the_middle_and_rows_selected(attend, name, rows, length) -> None:
    """A crop into a block, later blocks behind it, rows of unequal padding of which some leave: positions are counted
    token by token, and no token is seen twice."""
    config = replace(CONFIGS[name], residual_length=8)
    cache = QuantizedKVCache(tiny.load("llama").config, config, backend="full")
    cache.set_padding(torch.tensor([[0] * 17 + [1] * 3, [1] * 20]))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, 440, 16, generator=generator) for heads in (2, 2, 4)]
    padding = [17, 0]
    tiny.feed(cache, [each[:, :, :300] for each in tensors], (), padding)
    cache.crop(-30)
    tensors = [torch.cat([each[:, :, :270], each[:, :, 300 : 30 + length]], 2) for each in tensors]
    tiny.feed(cache, tensors, range(280, length, 9), padding, start=270)
    cache.batch_select_indices(torch.tensor(rows))
    layer, new = cache.layers[0], [each[rows, :, -1:] for each in tensors]
    table = None if layer.rotary is None else layer.rotary.table
    if table is not None:
        table.append(*table.tokens(table.length - 1, table.length))
    handle, _ = layer.update_for_attention(new[0], new[1])
    mask = torch.rand(len(rows), 1, 1, handle.past.length, generator=generator) > 0.3
    for given in (None, mask):
        options = (0.25, 0.0, given, None)
        right = reference.decode(new[2], handle.past, *options)
        assert relative_error(attend(new[2], handle.past, *options), right) <= TOLERANCES["attention_fp32"]
