"""Tables of cos and sin: blocks that hold exactly what was appended, wherever they begin."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvquant import KVQuantConfig, LayerOverride, QuantizedKVCache, TensorSpec, attach
from hf_kvquant.rotary import RotaryTable
from tests import tiny
from tests.tolerances import TOLERANCES

PAIRS = 3


def appended(
    lengths: list[int], size: int, rows: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[RotaryTable, list[torch.Tensor]]:
    """A table of blocks of ``size`` tokens, and what it was given as ``[rows, T, h]``."""
    generator = torch.Generator().manual_seed(len(lengths))
    pieces = [torch.rand(2, rows, length, PAIRS, generator=generator).to(dtype) for length in lengths]
    table = RotaryTable.empty_like(pieces[0][0], 1, size)
    for cos, sin in pieces:
        table.append(cos, sin)
    return table, list(torch.cat(pieces, 2))


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    size=st.sampled_from([8, 12, 64]),
    starts=st.lists(st.integers(0, 90), max_size=3),
    rows=st.sampled_from([1, 2]),
    later=st.integers(1, 20),
    data=st.data(),
)
def test_everything_appended_is_read_back(lengths, size, starts, rows, later, data) -> None:
    table, held = appended(lengths, size, rows)
    for start in starts:
        table.align(start)
        assert table.is_aligned(start)
    new = torch.rand(2, rows, later, PAIRS)
    table.append(*new)
    held = [torch.cat([old, each], 1) for old, each in zip(held, new, strict=True)]
    length = held[0].shape[1]
    assert table.length == length
    first = data.draw(st.integers(0, length))
    last = data.draw(st.integers(first, length))
    places = torch.randint(length, (rows, 9))
    spans, gathered = table.tokens(first, last), table.gathered(places)
    for read, found, right in zip(spans, gathered, held, strict=True):
        assert torch.equal(read, right[:, first:last])
        assert torch.equal(found, right.gather(1, places[..., None].expand(-1, -1, PAIRS)))
    start = data.draw(st.integers(0, length))
    table.align(start)
    count = (length - start) // size
    for blocks, right in zip(table.blocks(start, count), held, strict=True):
        expected = right[:, start : start + count * size].unflatten(1, (count, size)).transpose(2, 3)
        assert torch.equal(blocks, expected)


def test_capacity_is_exact_at_first_and_grows_by_an_eighth() -> None:
    table, _ = appended([640], 64)
    assert table.cos.shape == (1, 10, PAIRS, 64)
    table.append(*torch.rand(2, 1, 1, PAIRS))
    assert table.cos.shape[1] == 11
    table, _ = appended([64 * 80, 1], 64)
    assert table.cos.shape[1] == 90


def test_layers_with_blocks_of_different_lengths(tmp_path) -> None:
    """They have tables of their own, read alike from codes and from full tensors, and survive a file."""
    model = tiny.load("llama")
    spec = TensorSpec("int4", "channel", 48)
    last = model.config.num_hidden_layers - 1
    config = KVQuantConfig(
        TensorSpec("int4", "channel", 32), residual_length=16, pre_rope=True, layers={last: LayerOverride(key=spec)}
    )
    ids = torch.randint(3, 60, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = {}
        for backend in ("compiled", "full"):
            with attach(model, backend=backend):
                cache = QuantizedKVCache(model.config, config)
                model(ids[:, :290], past_key_values=cache)
                logits[backend] = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(290, 300)]
                cache.save(tmp_path / "cache.safetensors")
                again = QuantizedKVCache.load(tmp_path / "cache.safetensors", model.config)
                one, other = (model(ids[:, :1], past_key_values=each).logits for each in (cache, again))
                assert torch.equal(one, other)
    assert {table.block_length for table in cache.rotary.tables} == {
        layer.block_length for layer in cache.layers if hasattr(layer, "block_length")
    }
    assert (
        tiny.relative_error(torch.stack(logits["compiled"]), torch.stack(logits["full"]))
        <= TOLERANCES["attention_fp32"]
    )
