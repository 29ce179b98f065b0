"""What a layer holds: closed blocks with capacity, sinks and window of keys or values, and the layout of each row.

Decision: every tensor of :class:`QuantizedBlocks` has batch as dimension 0 and blocks as dimension 2, so storage
never needs to know a format. Capacity is exact when it is first filled (prefill) and grows by an eighth when it
overflows: a growing cache copies each byte about nine times over its life instead of once per step, and at most 12.5
% of it is unused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvquant.config import TensorSpec
from hf_kvquant.quantizer import CHUNK_ELEMENTS, QuantizedBlocks, dequantize, quantize
from hf_kvquant.rotary import LayerRotary

Rows = slice | list[int]


def storing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method that allocates or writes storage outside autograd and outside inference mode: a cache filled under
    ``torch.inference_mode`` can then go on under ``no_grad``, where inference tensors may not be written in place."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped


@dataclass
class PackedBlocks:
    """Closed blocks with capacity. ``held`` is None until the first block closes."""

    held: QuantizedBlocks | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.held is None else self.held.planes[0].shape[2]

    def write(self, blocks: QuantizedBlocks, rows: Rows, start: int, batch_size: int, reserve: int = 0) -> None:
        """Write ``n`` blocks of ``rows`` at block index ``start``, growing where needed.

        Args:
            blocks: tensors ``[len(rows), K, n, ...]``.
            rows: ``slice(None)`` or row indices.
            start: index of the first block written.
            batch_size: rows of the whole storage.
            reserve: blocks that will be needed at once, where a long prefill is written in pieces.
        """
        end = start + blocks.planes[0].shape[2]
        needed = max(end, reserve)
        if self.held is None:
            self.held = blocks.map(lambda t: t.new_zeros(batch_size, t.shape[1], needed, *t.shape[3:]))
        elif needed > self.capacity:
            self._resize(max(needed, self.capacity + self.capacity // 8))
        assert self.held is not None
        for target, source in zip(self.held.named().values(), blocks.named().values(), strict=True):
            target[rows, :, start:end] = source

    def read(self, rows: slice, count: int) -> QuantizedBlocks:
        """Views of the first ``count`` blocks of ``rows``."""
        assert self.held is not None
        return self.held.map(lambda tensor: tensor[rows, :, :count])

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by ``function`` of it (batch selection, device moves)."""
        if self.held is not None:
            self.held = self.held.map(function)

    def _resize(self, capacity: int) -> None:
        def grown(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros(*tensor.shape[:2], capacity, *tensor.shape[3:])
            larger[:, :, : tensor.shape[2]] = tensor
            return larger

        self.apply(grown)


@dataclass
class RowState:
    """Padding of a batch row and the valid tokens of each of its closed blocks."""

    padding: int = 0
    blocks: list[int] = field(default_factory=list)

    def first_open(self, sink_length: int) -> int:
        """Position of the first token that is neither padding, sink nor in a closed block."""
        return self.padding + sink_length + sum(self.blocks)

    def window_start(self, sink_length: int, length: int) -> int:
        """Position of the first token that only the window holds."""
        return min(length, self.first_open(sink_length) if self.blocks else self.padding)

    def copy(self) -> RowState:
        return RowState(self.padding, list(self.blocks))


@dataclass
class TensorState:
    """Keys or values of a layer: ``sinks [B, K, S, D]``, closed blocks, ``window [B, K, capacity, D]``. With
    ``rotary``, blocks hold the tensor before RoPE; sinks and window are always as delivered."""

    spec: TensorSpec
    tokens_last: bool
    rotary: LayerRotary | None = None
    packed: PackedBlocks = field(default_factory=PackedBlocks)
    sinks: torch.Tensor | None = None
    window: torch.Tensor | None = None

    def close(self, tokens: torch.Tensor, rows: Rows, position: int, first_index: int, length: int, batch: int) -> None:
        """Quantize the blocks of ``length`` tokens in ``tokens [rows, K, n * length, D]`` as blocks ``first_index`` and
        following of ``rows``; ``position`` is that of the first token, ``batch`` the rows of the whole layer."""
        count = tokens.shape[2] // length
        step = max(1, CHUNK_ELEMENTS * count // tokens.numel())
        for index in range(0, count, step):
            piece = tokens[:, :, index * length : (index + step) * length]
            if self.rotary is not None:
                piece = self._unrotated(piece, rows, position + index * length)
            blocks = quantize(piece.unflatten(2, (-1, length)), self.spec, self.tokens_last)
            self.packed.write(blocks, rows, first_index + index, batch, reserve=first_index + count)

    def _unrotated(self, tokens: torch.Tensor, rows: Rows, position: int) -> torch.Tensor:
        """fp32 copy before RoPE; a lossless format keeps the delivered dtype."""
        assert self.rotary is not None
        raw = tokens.float().clone()
        self.rotary.unrotate_(raw, rows, position)
        return raw.to(tokens.dtype) if self.spec.number_format.lossless else raw

    def keep_sinks(self, source: torch.Tensor, rows: Rows, start: int, count: int) -> None:
        if self.sinks is None:
            self.sinks = source.new_zeros(source.shape[0], source.shape[1], count, source.shape[3])
        self.sinks[rows] = source[rows, :, start : start + count]

    def read_blocks(self, out: torch.Tensor, rows: slice, valid: list[int], length: int, position: int) -> None:
        """Dequantize the valid tokens of a row's blocks, the first of them at ``position``, into
        ``out [B, K, sum(valid), D]``."""
        blocks = self.packed.read(rows, len(valid))
        direct = min(valid) == length and (self.rotary is None or out.dtype == torch.float32)
        dtype = out.dtype if self.rotary is None else torch.float32
        full = out if direct else out.new_empty(*out.shape[:2], len(valid) * length, out.shape[3], dtype=dtype)
        dequantize(blocks, self.spec, self.tokens_last, full.unflatten(2, (len(valid), length)))
        if min(valid) < length:
            kept = torch.tensor([i * length + j for i, n in enumerate(valid) for j in range(n)], device=out.device)
            full = full.index_select(2, kept)
        if self.rotary is not None:
            self.rotary.rotate_(full, rows, position)
        if not direct:
            out.copy_(full)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.packed.apply(function)
        self.sinks = None if self.sinks is None else function(self.sinks)
        self.window = None if self.window is None else function(self.window)
