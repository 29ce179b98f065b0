"""Past: what a layer holds during one attention call, and the handle that stands for it.

Decision: for a decode step ``update`` returns two :class:`PastTensor` instead of full tensors. They have shape, dtype
and device of what they stand for and hold nothing but a :class:`Past`: views of codes, sinks and recent tokens.
Attention of ours, or torch's where the model is not attached, reads the codes through it; any other operation on a
handle (a model that touches its keys between cache and attention, a debugger) makes it turn itself into the full
tensor first, so nothing that works with full tensors fails with handles. Rejected: returning codes under the name of
keys, which only our attention would understand.

A ``Past`` stays valid while later blocks close: closed blocks are never rewritten, a window that moves on gets a new
buffer, and tokens are appended behind what is looked at. It ends with the call: a crop or a change of the batch
moves what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hf_kvquant.storage import Layout, RowState, TensorState


@dataclass
class Past:
    """Keys and values of one layer with the new tokens of a call.

    Attributes:
        states: keys and values as held (``window`` is not looked at).
        recent: per tensor the pieces ``[B, K, ., D]`` of the tokens ``window_start .. length``, oldest first.
        layout: where the tokens of each row are.
        window_start: position of the first recent token.
        length: tokens, the new ones included.
    """

    states: tuple[TensorState, TensorState]
    recent: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    layout: Layout
    window_start: int
    length: int

    @property
    def rows(self) -> list[RowState]:
        return self.layout.rows

    @property
    def sink_length(self) -> int:
        return self.layout.sink_length

    @property
    def block_length(self) -> int:
        return self.layout.block_length

    @property
    def block_count(self) -> int:
        """Blocks of the row that has most."""
        return self.layout.block_count

    @property
    def is_regular(self) -> bool:
        """Whether all rows are laid out alike, in whole blocks that the window follows: every token held is then there
        once and to be seen. (A crop shortens a block; a row that left the batch may have held the window back.)"""
        return self.layout.is_whole and min(self.length, self.layout.opens_at) == self.window_start

    def read(self, slot: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All keys (``slot`` 0) or values (1) ``[B, K, length, D]`` in a new tensor, of the delivered dtype unless told
        otherwise; padding that has left the window reads as zeros."""
        state, pieces = self.states[slot], self.recent[slot]
        like = pieces[-1]
        out = like.new_empty(*like.shape[:2], self.length, like.shape[3], dtype=dtype)
        start = self.window_start
        for piece in pieces:
            out[:, :, start : start + piece.shape[2]] = piece
            start += piece.shape[2]
        for rows, row in row_groups(self.rows):
            if not row.blocks:
                out[rows, :, : min(row.padding, self.window_start)] = 0
                continue
            out[rows, :, : row.padding] = 0
            start = row.padding + self.sink_length
            if state.sinks is not None:
                out[rows, :, row.padding : start] = state.sinks[rows]
            end = start + sum(row.blocks)
            state.read_blocks(out[rows, :, start:end], rows, row.blocks, self.block_length, start)
        return out


def row_groups(rows: list[RowState]) -> Iterator[tuple[slice, RowState]]:
    """Slices of rows that are laid out alike: all of them unless padding differs, then one by one."""
    if all(row == rows[0] for row in rows[1:]):
        yield slice(None), rows[0]
    else:
        for index, row in enumerate(rows):
            yield slice(index, index + 1), row


class PastTensor(torch.Tensor):
    """Stands for the keys or values ``[B, K, T, D]`` of a :class:`Past`. Torch's ``scaled_dot_product_attention`` reads
    the codes, if somebody has said how (``attend``); any other operation reads the full tensor, once."""

    past: Past
    slot: int
    attend: Callable[..., torch.Tensor | None] | None
    touched: bool
    _full: torch.Tensor | None

    @staticmethod
    def __new__(cls, past: Past, slot: int, attend: Callable[..., torch.Tensor | None] | None = None) -> PastTensor:
        like = past.recent[slot][-1]
        shape = (*like.shape[:2], past.length, like.shape[3])
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # pyright: ignore
        handle.past, handle.slot, handle.attend = past, slot, attend
        handle.touched, handle._full = False, None
        return handle

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, slot={self.slot})"

    def read(self) -> torch.Tensor:
        """The full tensor."""
        if self._full is None:
            self._full = self.past.read(self.slot)
        return self._full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            key = args[1] if len(args) > 1 else kwargs.get("key")
            attend = key.attend if isinstance(key, PastTensor) else None
            output = None if attend is None else attend(*args, **kwargs)
            if output is not None:
                return output
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def full(value: Any) -> Any:
            if not isinstance(value, PastTensor):
                return value
            value.touched = True  # it may be written to: from now on the full tensor is what counts
            return value.read()

        return func(*tree_map(full, args), **tree_map(full, kwargs or {}))


def past_of(key: torch.Tensor, value: torch.Tensor) -> Past | None:
    """The past that both handles stand for; None where they are not (or no longer) such a pair."""
    if not (isinstance(key, PastTensor) and isinstance(value, PastTensor)) or key.past is not value.past:
        return None
    untouched = not (key.touched or value.touched)
    return key.past if untouched and (key.slot, value.slot) == (0, 1) else None
