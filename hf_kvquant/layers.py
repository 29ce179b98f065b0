"""One model layer of the cache: sinks, closed blocks, and a full-precision window.

The tokens of a batch row, and where each lives::

    | padding | sinks (exact) | block | block | ... | block | window (exact, at least residual_length tokens) |
              ^ padding[row]                                ^ first_open(row)

Decisions:
- The state is a function of the tokens alone: a block closes as soon as a row holds ``residual_length + G`` open
  tokens beyond its sinks, so one prefill, chunks and single steps give the same codes. Blocks are counted from the
  row's own first token, so left-padded rows get the codes that they would get alone; rows of a batch then close at
  different steps. Formats with statistics wait for ``calibration_length`` tokens before the first block; their
  statistics are frozen with it and stay as long as any of it is held. A crop that takes all of it takes all tokens
  that they were made of, and the next first block brings its own.
- A closed block is never rewritten. Cropping into one keeps its codes and marks the tail as dropped:
  ``RowState.blocks`` holds the valid tokens of each block. Rejected: dequantizing the rest back into the window,
  which would quantize it a second time later.
- Until a row has closed a block its sinks are simply the start of the window.
- ``update`` returns what attention needs *before* anything of this call is closed: the new tokens are always exact.
- ``rows`` are replaced, not changed, when a block closes or tokens are removed: a ``Past`` made before looks at the old
  ones. What a decode step asks of them is worked out with the change (``Layout``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hf_kvquant import delivered
from hf_kvquant._compat import CacheLayerMixin
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.energies import QueryEnergies, Read, Wanted
from hf_kvquant.past import Past, PastTensor, row_groups
from hf_kvquant.rotary import LayerRotary
from hf_kvquant.storage import Layout, RowState, TensorState, storing


class QuantizedLayer(CacheLayerMixin):
    """Quantized cache of one full-attention layer.

    Args:
        config: the cache format.
        layer_idx: index of the model layer, for messages.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, config: KVQuantConfig, layer_idx: int = 0):
        self.layer_idx = layer_idx
        self._set_format(config)
        self.reset()

    def reset(self) -> None:
        """Back to the state before the first token."""
        self.is_initialized = False
        self.length = 0
        self.window_start = 0
        self.rows = []
        self.padding_is_set = False
        self.key_state = TensorState(self.config.key, tokens_last=True, stores_raw=self.config.pre_rope)
        self.value_state = TensorState(self.config.value, tokens_last=False, stores_raw=self.config.pre_rope)
        self.rotary_reason = ""
        self.energies = QueryEnergies(self.config.calibration_length)

    @property
    def rows(self) -> list[RowState]:
        """Where the tokens of each batch row are; none before the first."""
        return self.layout.rows

    @rows.setter
    def rows(self, rows: list[RowState]) -> None:
        self.layout, self._accepted = Layout(rows, self.config, self.block_length), None

    def reconfigure(self, config: KVQuantConfig) -> None:
        """Before the first token: another format; what is known of the padding stays."""
        rows, fixed = self.rows, self.padding_is_set
        self._set_format(config)
        self.reset()
        self.rows, self.padding_is_set = rows, fixed

    def _set_format(self, config: KVQuantConfig) -> None:
        self.config = config
        self.block_length = config.block_length  # once: its computation does not trace under torch.compile
        self.is_lossless = all(spec.number_format.lossless for spec in (config.key, config.value))

    @storing
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fix batch size, heads, head dimensions, dtype and device from the first delivered tensors ``[B, K, q,
        D]``."""
        self.device = key_states.device
        self.rows = self.rows or [RowState() for _ in range(key_states.shape[0])]
        for state, tensor in ((self.key_state, key_states), (self.value_state, value_states)):
            state.window = tensor.new_empty(*tensor.shape[:2], 0, tensor.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens and return all of them in full precision.

        Args:
            key_states: ``[B, K, q, D]`` as attention would use them (rotated where the model rotates).
            value_states: ``[B, K, q, Dv]``.

        Returns:
            Keys and values ``[B, K, T + q, D]``: closed blocks dequantized, everything else exact; padding reads as
            zeros once it has left the window. Not to be written to: while the window holds everything they may be
            views of it, as with transformers' own caches.

        Raises:
            ValueError: shape, dtype or device differ from what the layer holds.
        """
        self._prepare(key_states, value_states)
        if not self.length:
            self._append(key_states, value_states)
            return key_states, value_states
        if not (self.window_start or self.has_blocks or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            keys, values = self._append(key_states, value_states)
            return keys, values
        past = self._past(key_states, value_states)
        full = past.read(0), past.read(1)
        self._append(key_states, value_states)
        return full

    def update_for_attention(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attend: Callable[..., torch.Tensor | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`update`, but return handles to what is held instead of full tensors (:class:`PastTensor`);
        ``attend`` serves torch's attention."""
        self._prepare(key_states, value_states)
        layout, start, length = self.layout, self.window_start, self.length + key_states.shape[2]
        keys, values = self._append(key_states, value_states, with_room=True)
        past = Past((self.key_state, self.value_state), ((keys,), (values,)), layout, start, length)
        return PastTensor(past, 0, attend), PastTensor(past, 1)

    def _make_room(self, new_tokens: int) -> None:
        """Let storage be larger than what it holds, as it is most of the time: attention is compiled for views with
        room behind them, and would be compiled again for a tensor that ends where its storage does."""
        needed, blocks = self.length - self.window_start + new_tokens, self.layout.block_count
        for state in (self.key_state, self.value_state):
            state.packed.make_room(blocks)
            assert state.window is not None
            if state.window.shape[2] <= needed:
                window = state.window
                state.window = window.new_empty(*window.shape[:2], needed + needed // 8 + 8, window.shape[3])
                state.window[:, :, : window.shape[2]] = window

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.prefetch()

    # ---------------------------------------------------------------- lengths

    @property
    def has_blocks(self) -> bool:
        """Whether some row has closed a block."""
        return self.layout.block_count > 0

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset that the next ``update`` of ``query_length`` tokens will return."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # ---------------------------------------------------------------- reading

    @property
    def keys(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All cached keys ``[B, K, T, D]`` dequantized into a new tensor; None before the first update."""
        return self.materialize()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All cached values ``[B, K, T, Dv]`` dequantized into a new tensor; None before the first update."""
        return self.materialize()[1] if self.is_initialized else None

    def materialize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All cached keys and values as new tensors."""
        assert self.key_state.window is not None
        assert self.value_state.window is not None
        past = self._past(self.key_state.window[:, :, :0], self.value_state.window[:, :, :0])
        return past.read(0), past.read(1)

    def _past(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Past:
        """What is held now, with new tokens behind it."""
        states, used = (self.key_state, self.value_state), self.length - self.window_start
        windows = [state.window for state in states if state.window is not None]
        return Past(
            states=states,
            recent=((windows[0][:, :, :used], key_states), (windows[1][:, :, :used], value_states)),
            layout=self.layout,
            window_start=self.window_start,
            length=self.length + key_states.shape[2],
        )

    # ---------------------------------------------------------------- writing

    @storing
    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, with_room: bool = False
    ) -> list[torch.Tensor]:
        """Take in new tokens, close what can be closed; window and new tokens ``[B, K, ., D]`` as they were before,
        with room behind them if asked for."""
        if with_room:
            self._make_room(key_states.shape[2])
        used, states = self.length - self.window_start, (self.key_state, self.value_state)
        sources = [
            self._extended(state, new, used) for state, new in zip(states, (key_states, value_states), strict=True)
        ]
        first = self.length == 0
        self.length += key_states.shape[2]
        if self.length >= self.layout.closes_at:
            self._close_blocks(sources)
        start = min(self.length, self.layout.opens_at)
        for state, source in zip(states, sources, strict=True):
            self._keep_window(state, source, start - self.window_start, exact=first)
        self.window_start = start
        return sources

    @staticmethod
    def _extended(state: TensorState, new: torch.Tensor, used: int) -> torch.Tensor:
        """Window and new tokens in one tensor: in place where they fit, without a copy where the window is empty."""
        assert state.window is not None
        end = used + new.shape[2]
        if end <= state.window.shape[2]:
            held = state.window[:, :, :end]
            held[:, :, used:] = new
            return held
        return torch.cat([state.window[:, :, :used], new], 2) if used else new

    def _close_blocks(self, sources: list[torch.Tensor]) -> None:
        config, states = self.config, (self.key_state, self.value_state)
        grown = list(self.rows)
        for rows, row in row_groups(self.rows):
            count = self._closable(row)
            if count <= 0:
                continue
            start = row.first_open(config.sink_length) - self.window_start
            if config.needed_tokens and not row.calibrated:
                self._calibrate(sources, rows, start)
            for state, source in zip(states, sources, strict=True):
                if not row.blocks and config.sink_length:
                    state.keep_sinks(source, rows, start - config.sink_length, config.sink_length)
                tokens = source[rows, :, start : start + count * self.block_length]
                position = self.window_start + start
                state.close(tokens, rows, position, len(row.blocks), self.block_length, source.shape[0])
            blocks = row.blocks + [self.block_length] * count
            grown[rows] = [RowState(row.padding, blocks, bool(config.needed_tokens))] * len(grown[rows])
        self.rows = grown
        self.energies.forget_if(self.layout.is_calibrated)

    def _calibrate(self, sources: list[torch.Tensor], rows: slice, start: int) -> None:
        """Freeze the statistics of ``rows``, whose first open token stands at ``start`` of the sources."""
        span = slice(start, start + self.config.calibration_length)
        position, energy = self.window_start + start, self.energies.mean(rows)
        self.key_state.calibrate(sources[0][rows, :, span], rows, position, energy)
        self.value_state.calibrate(sources[1][rows, :, span], rows, position, None)

    def _closable(self, row: RowState, new_tokens: int = 0) -> int:
        """Blocks that close in ``row``, or will with ``new_tokens`` more."""
        open_tokens = self.length + new_tokens - row.first_open(self.config.sink_length)
        if not row.blocks and open_tokens < self.config.needed_tokens:
            return 0
        return (open_tokens - self.config.residual_length) // self.block_length

    def _keep_window(self, state: TensorState, source: torch.Tensor, dropped: int, exact: bool) -> None:
        """Make ``source`` without its first ``dropped`` tokens the window; capacity exact at prefill, growing by an
        eighth later."""
        assert state.window is not None
        if source._base is state.window and not dropped:
            return
        needed, capacity = source.shape[2] - dropped, state.window.shape[2]
        if needed > capacity:
            limit = self.config.sink_length + self.config.residual_length + self.block_length
            capacity = needed if exact else max(needed, min(limit, needed + needed // 8 + 8))
        # A buffer of its own: attention may still read the old one.
        state.window = source.new_empty(*source.shape[:2], capacity, source.shape[3])
        state.window[:, :, :needed] = source[:, :, dropped:]

    @property
    def awaits_queries(self) -> bool:
        """Whether the statistics of some row are still to be made, from keys and queries."""
        return not self.layout.is_calibrated and self.config.uses_queries

    def note_queries(self, read: Read, key_states: torch.Tensor, module: torch.nn.Module | None = None) -> None:
        """Before the update with ``key_states``: keep what the statistics need of the queries.

        Args:
            read: gives the queries ``[B, H, stop - start, D]`` of the new tokens ``start .. stop``, or why there are
                none.
            key_states: the new keys ``[B, K, q, D]``.
            module: the attention module that is called, if its attention will show the queries after the update.
        """
        if not self.awaits_queries:
            return
        rows = self.rows or [RowState() for _ in range(key_states.shape[0])]
        waiting: dict[int, list[int]] = {}
        new, freezes = key_states.shape[2], False
        for index, row in enumerate(rows):
            first = row.padding + self.config.sink_length - self.length
            if not row.calibrated and -self.config.calibration_length < first < new:
                waiting.setdefault(first, []).append(index)
                freezes = freezes or self._closable(row, new) > 0
        if not waiting or self.energies.reason is not None:
            return
        wanted = Wanted(key_states, waiting, read, module)
        if freezes or module is None:
            self.energies.note(wanted, read)
        else:
            self.energies.expect(wanted)

    # ---------------------------------------------------------------- rotation

    @property
    def rotary(self) -> LayerRotary | None:
        """The rotation this layer is known to apply: to the keys, or to the values where the model keeps it there
        (MLA)."""
        return self.key_state.rotary or self.value_state.rotary

    def set_rotary(self, rotary: LayerRotary | None, reason: str = "") -> None:
        """Before the first token: how this layer rotates, or why its blocks are stored as delivered."""
        self.rotary_reason = reason
        if rotary is not None:
            state = self.key_state if rotary.layout.slot == "key" else self.value_state
            state.rotary = rotary

    # ---------------------------------------------------------------- padding

    @property
    def awaits_padding(self) -> bool:
        """Whether every token so far may be padding, so that the padding of some row is still to be learned."""
        return not self.padding_is_set and (not self.rows or self.layout.padding >= self.length - 1)

    def set_padding(self, padding: list[int], fixed: bool = False) -> None:
        """Padded tokens per row; ``fixed`` means given by the user, not to be inferred again."""
        rows = self.rows if self.length else [RowState() for _ in padding]
        self.rows = [
            replace(row, padding=count) if row.padding >= self.length - 1 else row
            for row, count in zip(rows, padding, strict=True)
        ]
        self.padding_is_set = self.padding_is_set or fixed

    def expand_rows(self, batch_size: int) -> None:
        """Before the first token: beams and num_return_sequences repeat the rows that ``set_padding`` was given."""
        if batch_size % len(self.rows) == 0:
            self.rows = [row for row in self.rows for _ in range(batch_size // len(self.rows))]

    # ---------------------------------------------------------------- batch, crop, devices

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-n`` tokens (``n <= 0``), or keep the first ``n`` (``n > 0``, the older meaning).
        Removing more than there are empties the layer. Closed blocks keep their codes."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 counts in tensors
        removed = -tokens_to_remove if tokens_to_remove <= 0 else self.length - tokens_to_remove
        if removed <= 0 or not self.length:
            return
        if removed >= self.length:
            self.reset()
            return
        old_start, self.length = self.window_start, self.length - removed
        self.rows = [self._shortened(row) for row in self.rows]
        # Never forward: a selection may have dropped the row that held the window back; the tensor still begins there.
        self.window_start = min(old_start, self.length, self.layout.opens_at)
        if self.window_start < old_start:
            for state in (self.key_state, self.value_state):
                self._reopen_sinks(state, old_start)

    def _shortened(self, row: RowState) -> RowState:
        """After a crop: ``row`` without the tokens of closed blocks beyond the length."""
        excess, blocks = row.first_open(self.config.sink_length) - self.length, list(row.blocks)
        while excess > 0 and blocks:
            taken = min(excess, blocks[-1])
            excess -= taken
            blocks[-1] -= taken
            if not blocks[-1]:
                blocks.pop()
        return RowState(row.padding, blocks, row.calibrated and bool(blocks))

    @storing
    def _reopen_sinks(self, state: TensorState, old_start: int) -> None:
        """After a crop back into the sinks of a row: its sinks are the start of the window again."""
        assert state.window is not None
        old, start = state.window, self.window_start
        state.window = old.new_zeros(*old.shape[:2], self.length - start, old.shape[3])
        kept = max(0, self.length - old_start)
        state.window[:, :, self.length - start - kept :] = old[:, :, :kept]
        for rows, row in row_groups(self.rows):
            if not row.blocks and row.padding < old_start and state.sinks is not None:
                count = max(0, min(self.config.sink_length, self.length - row.padding))
                state.window[rows, :, row.padding - start : row.padding - start + count] = state.sinks[rows, :, :count]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (long, list or bool), in that order; codes are moved, never recomputed."""
        if not self.rows:
            return
        chosen = torch.arange(len(self.rows))[indices.cpu() if isinstance(indices, torch.Tensor) else indices]
        if not len(chosen):
            raise self._refusal("indices=[] is not valid: keep at least one row, or reset() the cache")
        self.rows = [self.rows[index] for index in chosen.tolist()]
        self.energies.forget_if(self.layout.is_calibrated)
        self._apply(lambda tensor: tensor.index_select(0, chosen.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, as neighbours."""
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes row ``beam_idx[i]`` (beam search)."""
        self.batch_select_indices(beam_idx)

    def offload(self) -> None:
        """Move everything to the CPU; the next ``prefetch`` or ``update`` brings it back."""
        self._apply(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized and self.key_state.window is not None and self.key_state.window.device != self.device:
            self._apply(lambda tensor: tensor.to(self.device, non_blocking=True))

    def to(self, device: torch.device | str) -> None:
        """Move the layer; later updates must arrive on ``device``."""
        self._apply(lambda tensor: tensor.to(device))
        if self.is_initialized and self.key_state.window is not None:
            self.device = self.key_state.window.device

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """ValueError unless the tensors fit each other and what the layer holds. Most steps bring what the last one
        brought, and are not looked at any closer."""
        if torch.compiler.is_compiling():
            facts = None
        else:
            facts = key_states.shape, value_states.shape, key_states.dtype, value_states.dtype
            facts += (key_states.device, value_states.device)
            if facts == self._accepted:
                return
        device = self.device if self.is_initialized else key_states.device
        problem = delivered.problem(
            (self.key_state, self.value_state), len(self.rows), device, key_states, value_states
        )
        if problem:
            raise self._refusal(problem)
        self._accepted = facts

    def _refusal(self, text: str) -> ValueError:
        return ValueError(f"layer {self.layer_idx}: {text}")

    @storing
    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.key_state.apply(function)
        self.value_state.apply(function)
        self.energies.apply(function)
        self._accepted = None
