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

from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.quantizer import CHUNK_ELEMENTS, copy_saturating, dequantize, quantize
from hf_kvquant.rotary import LayerRotary
from hf_kvquant.spec import TensorSpec
from hf_kvquant.transforms import Rows, Step, Tables, calibrate, steps_of


def storing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method that allocates or writes storage outside autograd and outside inference mode: a cache filled under
    ``torch.inference_mode`` can then go on under ``no_grad``, where inference tensors may not be written in place.
    ``no_grad`` itself, as in ``generate``, needs no switching."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped


@dataclass
class PackedBlocks:
    """Closed blocks with capacity. ``held`` is None until the first block closes."""

    held: QuantizedBlocks | None = None
    _views: tuple[QuantizedBlocks | None, int, dict[str, torch.Tensor]] = (None, 0, {})

    @property
    def capacity(self) -> int:
        return 0 if self.held is None else self.held.planes[0].shape[2]

    def __getstate__(self) -> dict[str, Any]:
        return {"held": self.held}  # views of a copy would be copies

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

    def make_room(self, count: int) -> None:
        """Grow, as for another block, where exactly ``count`` fit."""
        if self.held is not None and count == self.capacity:
            self._resize(max(count + 1, count + count // 8))

    def read(self, rows: slice, count: int) -> QuantizedBlocks:
        """Views of the first ``count`` blocks of ``rows``."""
        assert self.held is not None
        return self.held.map(lambda tensor: tensor[rows, :, :count])

    def views(self, count: int) -> dict[str, torch.Tensor]:
        """Views of the first ``count`` blocks of all rows by name, made anew only when blocks or storage change: the
        decode steps between two blocks all ask for the same."""
        assert self.held is not None
        held, known, views = self._views
        if held is not self.held or known != count:
            views = {name: tensor[:, :, :count] for name, tensor in self.held.named().items()}
            self._views = self.held, count, views
        return views

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by ``function`` of it (batch selection, device moves)."""
        if self.held is not None:
            self.held = self.held.map(function)
            self._views = (None, 0, {})

    def _resize(self, capacity: int) -> None:
        def grown(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros(*tensor.shape[:2], capacity, *tensor.shape[3:])
            larger[:, :, : tensor.shape[2]] = tensor
            return larger

        self.apply(grown)


@dataclass(frozen=True)
class RowState:
    """Padding of a batch row, the valid tokens of each of its closed blocks, and whether its statistics are frozen.
    Replaced, never changed: an attention call in progress may look at it."""

    padding: int = 0
    blocks: list[int] = field(default_factory=list)
    calibrated: bool = False

    def first_open(self, sink_length: int) -> int:
        """Position of the first token that is neither padding, sink nor in a closed block."""
        return self.padding + sink_length + sum(self.blocks)

    def window_start(self, sink_length: int, length: int) -> int:
        """Position of the first token that only the window holds."""
        return min(length, self.first_open(sink_length) if self.blocks else self.padding)


class Layout:
    """The rows of a layer, and what every decode step asks of them, worked out once: they change when a block closes.

    Attributes:
        rows: one per batch row.
        sink_length, block_length: of the format.
        block_count: blocks of the row that has most.
        padding: of the row that has most.
        is_calibrated: whether there are rows, and all have their statistics.
        is_whole: whether all rows are laid out alike, in whole blocks.
        opens_at: position of the first token that only the window holds in some row.
        closes_at: length of the layer at which the next block closes in some row.
    """

    def __init__(self, rows: list[RowState], config: KVQuantConfig, block_length: int):
        self.rows, self.sink_length, self.block_length = rows, config.sink_length, block_length
        self.block_count = max([0, *[len(row.blocks) for row in rows]])
        self.padding = max([0, *[row.padding for row in rows]])
        self.is_calibrated = bool(rows) and all(row.calibrated for row in rows)
        self.is_whole = all(row == rows[0] for row in rows) and set(rows[0].blocks if rows else ()) <= {block_length}
        opened = [row.first_open(config.sink_length) for row in rows]
        starts = [first if row.blocks else row.padding for row, first in zip(rows, opened, strict=True)]
        needed = config.residual_length + block_length
        closing = [
            first + (needed if row.blocks else max(needed, config.needed_tokens))
            for row, first in zip(rows, opened, strict=True)
        ]
        self.opens_at, self.closes_at = min(starts or [0]), min(closing or [0])


@dataclass
class TensorState:
    """Keys or values of a layer: ``sinks [B, K, S, D]``, closed blocks, ``window [B, K, capacity, D]``.

    Sinks and window are always as delivered. With ``rotary`` the layer is known to rotate this tensor; with
    ``stores_raw`` its blocks hold it before RoPE. ``tables`` are the frozen statistics, from the first closed block on.
    """

    spec: TensorSpec
    tokens_last: bool
    stores_raw: bool = False
    rotary: LayerRotary | None = None
    packed: PackedBlocks = field(default_factory=PackedBlocks)
    tables: Tables | None = None
    sinks: torch.Tensor | None = None
    window: torch.Tensor | None = None
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # of decode attention

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"plans": {}}

    @property
    def unrotated(self) -> LayerRotary | None:
        """The rotation undone in closed blocks."""
        return self.rotary if self.stores_raw else None

    def steps(self, rows: Rows) -> list[Step]:
        """The exact steps between the tensor, before RoPE if it is stored so, and what is quantized."""
        return steps_of(self.spec, self.tables, None if self.stores_raw else self.rotary, rows)

    def calibrate(self, tokens: torch.Tensor, rows: Rows, position: int, energy: torch.Tensor | None) -> None:
        """Freeze the statistics of ``rows`` from their first tokens ``[rows, K, n, D]``, the first at ``position``."""
        if not self.spec.calibrates:
            return
        raw = tokens.float().clone()
        rotary, unrotate = self.rotary, None
        if self.unrotated is not None:
            self.unrotated.unrotate_(raw, rows, position)
        elif rotary is not None and self.spec.center == "rope":
            unrotate = functools.partial(rotary.unrotate_, rows=rows, start=position)
        found = calibrate(raw, self.spec, None if rotary is None else rotary.layout, unrotate, energy)
        if self.tables is None:
            assert self.window is not None
            batch = self.window.shape[0]
            self.tables = found.map(lambda tensor: tensor.new_zeros(batch, *tensor.shape[1:]))
        self.tables.write(found, rows)

    def close(self, tokens: torch.Tensor, rows: Rows, position: int, first_index: int, length: int, batch: int) -> None:
        """Quantize the blocks of ``length`` tokens in ``tokens [rows, K, n * length, D]`` as blocks ``first_index`` and
        following of ``rows``; ``position`` is that of the first token, ``batch`` the rows of the whole layer."""
        self.plans.pop("held", None)  # made of what was held before, it would also keep storage that is outgrown
        count = tokens.shape[2] // length
        step = max(1, CHUNK_ELEMENTS * count // tokens.numel())
        importance = None if self.tables is None else self.tables.importance
        importance = None if importance is None else importance[rows]
        for index in range(0, count, step):
            piece = tokens[:, :, index * length : (index + step) * length]
            piece = self._transformed(piece, rows, position + index * length)
            blocks = quantize(piece.unflatten(2, (-1, length)), self.spec, self.tokens_last, importance)
            self.packed.write(blocks, rows, first_index + index, batch, reserve=first_index + count)

    def _transformed(self, tokens: torch.Tensor, rows: Rows, position: int) -> torch.Tensor:
        """fp32 copy as it is quantized; a lossless format keeps the delivered dtype."""
        if self.unrotated is not None:
            raw = tokens.float().clone()
            self.unrotated.unrotate_(raw, rows, position)
            tokens = raw.to(tokens.dtype) if self.spec.number_format.lossless else raw
        for step in self.steps(rows):
            tokens = step.apply(tokens.float(), position)
        return tokens

    def keep_sinks(self, source: torch.Tensor, rows: Rows, start: int, count: int) -> None:
        if self.sinks is None:
            self.sinks = source.new_zeros(source.shape[0], source.shape[1], count, source.shape[3])
        self.sinks[rows] = source[rows, :, start : start + count]

    def read_blocks(self, out: torch.Tensor, rows: slice, valid: list[int], length: int, position: int) -> None:
        """Read the valid tokens of a row's blocks, the first of them at ``position``, into ``out [B, K, sum(valid),
        D]``."""
        blocks, steps = self.packed.read(rows, len(valid)), self.steps(rows)
        if not steps and self.unrotated is None and min(valid) == length:
            dequantize(blocks, self.spec, self.tokens_last, out.unflatten(2, (len(valid), length)))
            return
        pieces = max(1, CHUNK_ELEMENTS * len(valid) // max(1, out.numel()))
        start = 0
        for first in range(0, len(valid), pieces):
            piece = slice(first, first + pieces)
            target = out[:, :, start : start + sum(valid[piece])]
            some = blocks.map(lambda tensor, piece=piece: tensor[:, :, piece])
            tokens = self._restored(some, steps, rows, valid[piece], length, position + start, target)
            if tokens is not target:
                copy_saturating(target, tokens)
            start += target.shape[2]

    def _restored(
        self,
        blocks: QuantizedBlocks,
        steps: list[Step],
        rows: slice,
        valid: list[int],
        length: int,
        position: int,
        target: torch.Tensor,
    ) -> torch.Tensor:
        """The valid tokens of a few blocks ``[B, K, sum(valid), D]`` as they were delivered, fp32; in ``target`` itself
        where that has their dtype and the steps work in place."""
        whole, lossless = min(valid) == length, self.spec.number_format.lossless
        dtype = target.dtype if lossless and self.unrotated is None else torch.float32
        tokens = target
        if not whole or target.dtype != dtype:
            tokens = target.new_empty(*target.shape[:2], len(valid) * length, target.shape[3], dtype=dtype)
        dequantize(blocks, self.spec, self.tokens_last, tokens.unflatten(2, (len(valid), length)))
        if not whole:
            kept = [index * length + token for index, count in enumerate(valid) for token in range(count)]
            tokens = tokens.index_select(2, torch.tensor(kept, device=tokens.device))
        for step in reversed(steps):
            tokens = step.invert(tokens, position)
        if self.unrotated is not None:
            self.unrotated.rotate_(tokens, rows, position)
        return tokens

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.plans.pop("held", None)
        self.packed.apply(function)
        self.tables = None if self.tables is None else self.tables.map(function)
        self.sinks = None if self.sinks is None else function(self.sinks)
        self.window = None if self.window is None else function(self.window)
