"""QuantizedKVCache: which layer type serves which model layer, and everything that concerns all layers at once.

Decision: full-attention layers are ours; every other kind (sliding, chunked, linear, hybrid, shared, dummy) keeps the
layer that transformers would use itself, because those hold a bounded window or a recurrent state, where quantization
saves little and their update rules are the model's own. ``summary()`` says which is which.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig

from hf_kvquant import _compat, padding, serialization
from hf_kvquant.attention.backends import choose
from hf_kvquant.attention.interface import attend_unattached
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.memory import MemoryReport, layer_memory, storage_nbytes, tensors_in
from hf_kvquant.presets import ATTACHED_DEFAULT, DEFAULT_PRESET, resolve
from hf_kvquant.rotary import NO_ROPE, Pending, RotaryTables
from hf_kvquant.spec import check_choice, invalid
from hf_kvquant.storage import storing
from hf_kvquant.summary import format_text, layer_text

# Decode steps read codes from this length on: a shorter past is not worth a compilation. Up to this many new tokens:
# each is a pass over the codes.
MIN_LENGTH = 256
MAX_NEW_TOKENS = 16


class QuantizedKVCache(Cache):
    """A drop-in KV cache that stores the past in few bits.

    Use it wherever transformers takes a cache: ``model.generate(**inputs,
    past_key_values=QuantizedKVCache(model.config))``; from transformers 5.24 on the argument is also called
    ``cache``. One cache holds one batch of sequences; ``reset()`` empties it.

    Args:
        config: the model's configuration (``model.config``).
        quantization: a preset name (``PRESETS``), a ``KVQuantConfig``, or None for the default: preset "cr4" on an
            attached model, "k4v4" on any other, decided by the first forward.
        offloading: keep layers on the CPU between their turns (needs an accelerator, as in transformers).
        offload_only_non_sliding: with ``offloading``, keep sliding layers on the device.
        backend: how decode steps of a model that is not attached attend. "auto": where it calls torch's
            ``scaled_dot_product_attention`` on a CPU with a C++ compiler, straight from the codes; "full": always over
            full tensors. (An attached model: see ``attach``.)

    Attributes:
        quantization: the ``KVQuantConfig`` in force; the default one may still change with the first forward.
        layers: one per model layer: ours where it is full attention, transformers' own elsewhere.
        backend: as given.
        padding_source: where the left padding is known from.

    Raises:
        ValueError: unknown preset or backend, an override for a layer that the model lacks or that is not quantized,
            or offloading without an accelerator.
        TypeError: ``config`` is not a model configuration.

    Source: keys per channel, values per token and the residual window from KIVI (Liu et al. 2024, arXiv 2402.02750,
    section 3); exact first tokens from attention sinks (Xiao et al. 2023, arXiv 2309.17453).
    """

    layers: list[Any]  # ours and transformers' own kinds, which share no base class

    def __init__(
        self,
        config: PreTrainedConfig,
        quantization: str | KVQuantConfig | None = None,
        *,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        backend: str = "auto",
    ):
        check_choice("backend", backend, ("auto", "full"))
        if not isinstance(config, PreTrainedConfig):
            hint = "pass model.config" if hasattr(config, "config") else "pass the model's PreTrainedConfig"
            raise TypeError(f"config={type(config).__name__} is not valid: {hint}")
        if offloading and not torch.accelerator.is_available():
            raise ValueError(
                "offloading=True is not valid: it needs an accelerator to offload from, and none is here; leave it out"
            )
        self.quantization = resolve(quantization)
        self.is_default = quantization is None
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.model_facts = serialization.model_facts(config)
        natives = _compat.native_layers(config)
        for index in self.quantization.layers:
            if index >= len(natives):
                raise invalid("layers", index, f"the model has layers 0 to {len(natives) - 1}")
            if not _compat.is_full_attention(natives[index]):
                kept = type(natives[index]).__name__
                raise invalid("layers", index, f"that layer is kept as transformers' {kept}; leave it out")
        layers: list[Any] = [
            QuantizedLayer(self.quantization.for_layer(index), index) if _compat.is_full_attention(native) else native
            for index, native in enumerate(natives)
        ]
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        self.padding_source = "none reported"
        self.backend = backend
        self.pending: Pending | None = None
        self.rotary = RotaryTables()
        self.has_warned = False

    def __repr__(self) -> str:
        size = f"{len(self.layers)} layers, {self.get_seq_length()} tokens"
        return f"{type(self).__name__}({size}, {format_text(self.quantization)})"

    # ---------------------------------------------------------------- update and padding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the new tokens of one layer, and return all of its tokens for attention.

        Args:
            key_states: ``[B, K, q, D]`` as attention would use them (rotated where the model rotates).
            value_states: ``[B, K, q, Dv]``.
            layer_idx: index of the model layer.
            *args: handed on to transformers' own layers.
            **kwargs: likewise; position ids among them tell the left padding of new rows.

        Returns:
            Keys ``[B, K, T + q, D]`` and values ``[B, K, T + q, Dv]`` in the delivered dtype. Closed blocks are
            dequantized, everything else is exact, padding that has left the window reads as zeros. For a decode step
            that reads codes, handles of these shapes, which turn into full tensors where anything but attention uses
            them.

        Raises:
            ValueError: ``layer_idx`` is none of the model's layers; the tensors do not fit each other or those already
                held; the format needs an attached model; or one forward updates a layer twice (cross-attention).
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx} is not valid: this cache was built for the {len(self.layers)} layers of a "
                f"{self.model_facts['model_type']!r} model; build it from the config of the model that uses it"
            )
        layer, pending, self.pending = self.layers[layer_idx], self.pending, None
        if self.is_encoder_decoder:
            self._refuse_cross_attention(layer_idx)
        if isinstance(layer, QuantizedLayer):
            self._prepare(layer, pending, key_states, value_states, kwargs)
            if self._pays(layer, key_states, value_states):
                if pending is None and self._attends_unattached(key_states.device):
                    return layer.update_for_attention(key_states, value_states, attend_unattached)
                if pending is not None and pending.attends is not None:
                    return layer.update_for_attention(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _prepare(
        self,
        layer: QuantizedLayer,
        pending: Pending | None,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        """What ``layer`` has to know before it takes in new tokens: padding, format, rotation, queries."""
        if layer.rows and not layer.is_initialized:
            layer.expand_rows(key_states.shape[0])
        if layer.awaits_padding:
            self._learn_padding(layer, key_states, kwargs)
        if self.is_default and not layer.length:
            self._choose_default(pending is not None)
        if self.quantization.needs_attach and not (pending is not None and self._has_captured(layer)):
            layer.check(key_states, value_states)
            self._capture_rotation(layer, pending, key_states)

    def _has_captured(self, layer: QuantizedLayer) -> bool:
        """Whether an earlier layer of this forward has kept the tables of the new tokens, and nothing else is needed:
        so it is in most decode steps."""
        known = layer.rotary is None or layer.rotary.table.length != layer.length
        return known and layer.length > 0 and not layer.awaits_queries

    def _pays(self, layer: QuantizedLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether attention is to read the codes of ``layer`` for these new tokens."""
        if layer.length < MIN_LENGTH or key_states.shape[2] > MAX_NEW_TOKENS or not layer.has_blocks:
            return False
        if self.offloading or torch.compiler.is_compiling():
            return False
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return False
        return not layer.is_lossless  # "none" promises the very bits of DynamicCache

    def _attends_unattached(self, device: torch.device) -> bool:
        return self.backend == "auto" and choose("auto", device).name != "full"

    def _refuse_cross_attention(self, layer_idx: int) -> None:
        """In one forward of a decoder every later layer is still as long as this one; not so when cross-attention
        updates it as well."""
        lengths = [layer.get_seq_length() for layer in self.layers[layer_idx:]]
        if min(lengths) < lengths[0]:
            raise ValueError(
                f"layer {layer_idx}: updated twice in one forward, by self- and cross-attention; an encoder-decoder "
                "model needs EncoderDecoderCache(QuantizedKVCache(config), DynamicCache(config=config)) instead"
            )

    def _learn_padding(self, layer: QuantizedLayer, key_states: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Padding of the rows from the position ids; later layers of a forward take it from the first, which is one
        layer's work."""
        position_ids = padding.position_ids_in(kwargs)
        if (
            position_ids is None
            or position_ids.shape[1] != key_states.shape[2]
            or key_states.shape[0] % position_ids.shape[0]
        ):
            return
        total = layer.length + key_states.shape[2]
        first = next(each for each in self.layers if isinstance(each, QuantizedLayer))
        if first is not layer and first.length == total and len(first.rows) == key_states.shape[0]:
            layer.set_padding([row.padding for row in first.rows])
            return
        counts = padding.from_position_ids(position_ids, key_states.shape[0], layer.length)
        if counts is not None:
            layer.set_padding(counts)
            self.padding_source = "position_ids"

    @property
    def wants_rotation(self) -> bool:
        """Whether the hooks of an attached model have to show this cache how keys are rotated."""
        return self.is_default or self.quantization.needs_attach

    def _choose_default(self, attached: bool) -> None:
        """At the first tokens of a sequence: the default preset of an attached model, or of any other."""
        if any(isinstance(layer, QuantizedLayer) and layer.length for layer in self.layers):
            return
        chosen = resolve(ATTACHED_DEFAULT if attached else None)
        if chosen != self.quantization:
            self.quantization = chosen
            for index, layer in enumerate(self.layers):
                if isinstance(layer, QuantizedLayer):
                    layer.reconfigure(chosen.for_layer(index))

    @storing
    def _capture_rotation(self, layer: QuantizedLayer, pending: Pending | None, key_states: torch.Tensor) -> None:
        """Keep the tables that rotated the new tokens, by the first layer of a group in a forward for all of them, and
        what the layer needs of the queries."""
        if pending is None:
            raise ValueError(
                f"layer {layer.layer_idx}: the configuration needs the rotation of the keys (pre_rope=True or "
                "center='rope'), but the model is not attached; write `with attach(model): model.generate(...)`, or "
                "choose pre_rope=False and center='plain'"
            )
        if not layer.length:
            self._warn_once(layer, pending)
            joined = (
                None if pending.layout is None else self.rotary.join(pending, key_states.shape[2], layer.block_length)
            )
            layer.set_rotary(joined, pending.reason)
        layer.note_queries(pending.queries, key_states, None if torch.compiler.is_compiling() else pending.attends)
        if layer.rotary is not None and layer.rotary.table.length == layer.length:
            layer.rotary.table.append(*pending.tables)

    def _warn_once(self, layer: QuantizedLayer, pending: Pending) -> None:
        if pending.layout is None and pending.reason != NO_ROPE and not self.has_warned:
            self.has_warned = True
            message = (
                f"layer {layer.layer_idx}: keys are stored after RoPE: {pending.reason}; summary() lists the layers"
            )
            warnings.warn(message, stacklevel=5)  # the module that calls update

    def set_padding(self, attention_mask: torch.Tensor) -> None:
        """Say which tokens on the left of each row are padding, before the first forward.

        Needed only where the model does not hand ``position_ids`` to the cache (transformers before 5.24, a few
        architectures) or numbers them in its own way; ``summary()`` says what was found. Stays in force until
        ``reset()``.

        Args:
            attention_mask: ``[B, T]``, 1 for real tokens, as the tokenizer returns it with ``padding_side="left"``.

        Raises:
            ValueError: no such tensor, zeros that are not on the left, or a cache that already holds tokens.
        """
        if self.get_seq_length():
            raise ValueError(
                f"set_padding: the cache already holds {self.get_seq_length()} tokens; call it on an empty cache, "
                "before the first forward"
            )
        counts = padding.from_attention_mask(attention_mask)
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                layer.set_padding(counts, fixed=True)
        self.padding_source = "set_padding"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pending": None}  # what an interrupted call left would take its module along

    @storing
    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedKVCache:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def reset(self) -> None:
        """Empty every layer, keeping the objects."""
        super().reset()
        for layer in self.layers:
            _compat.forget_states(layer)
        self.padding_source = "none reported"
        self.pending = None
        self.rotary = RotaryTables()

    # ---------------------------------------------------------------- what generate asks

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of every row.

        Args:
            tokens_to_remove: -n removes the newest n tokens (all of them where there are fewer); n > 0 keeps the first
                n, which is the older meaning. Exact values that were quantized do not come back: the window is shorter
                after a crop into closed blocks.
        """
        length, tokens_to_remove = self.get_seq_length(), int(tokens_to_remove)
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove)
        removed = min(removed, length)
        super().crop(-removed)
        self.rotary.crop(removed)

    @storing
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of every layer, in that order; codes are moved, never computed again.

        Args:
            indices: ``[rows]`` of integers, or ``[B]`` of bools.

        Raises:
            ValueError: no row would be left.
        """
        super().batch_select_indices(indices)
        self.rotary.select(lambda rows: torch.arange(rows)[indices])

    @storing
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, as neighbours."""
        super().batch_repeat_interleave(repeats)
        self.rotary.select(lambda rows: torch.arange(rows).repeat_interleave(repeats))

    @storing
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes row ``beam_idx[i]`` of every layer (beam search); ``beam_idx`` is ``[B]``."""
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        self.rotary.select(lambda rows: beam_idx)

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first update."""
        rows = [len(layer.rows) for layer in self.layers if isinstance(layer, QuantizedLayer) and layer.is_initialized]
        return rows[0] if rows else super().batch_size

    @property
    def max_batch_size(self) -> int:
        """Name of ``batch_size`` up to transformers 5.19."""
        return self.batch_size

    # ---------------------------------------------------------------- resources

    @storing
    def to(self, device: torch.device | str) -> QuantizedKVCache:
        """Move everything held to ``device`` and return the same cache; later updates must arrive there."""
        for layer in self.layers:
            _compat.move_layer(layer, device)
        self.rotary.apply(lambda each: each.to(device))
        return self

    def memory_report(self) -> MemoryReport:
        """Exact bytes of every storage that the cache holds, per layer and in total."""
        tables = storage_nbytes(tensors_in(self.rotary))
        return MemoryReport(tuple(layer_memory(layer) for layer in self.layers), tables)

    def summary(self) -> str:
        """What is applied to which layer, and why not where not; one line per run of equal layers."""
        size = f"{len(self.layers)} layers, {self.get_seq_length()} tokens"
        lines = [f"{type(self).__name__}: {size}; {self._choice_text()}left padding: {self._padding_text()}"]
        start = 0
        texts = [layer_text(layer) for layer in self.layers]
        for index, text in enumerate(texts):
            if index + 1 == len(texts) or texts[index + 1] != text:
                lines.append(f"layers {start}-{index}: {text}" if index > start else f"layer {index}: {text}")
                start = index + 1
        return "\n".join(lines)

    def _choice_text(self) -> str:
        """Which default was chosen and why; nothing where the format was asked for."""
        if not self.is_default or not any(isinstance(layer, QuantizedLayer) for layer in self.layers):
            return ""
        if not self.get_seq_length():
            return f"default preset, chosen at the first forward: {DEFAULT_PRESET}, or {ATTACHED_DEFAULT} if attached; "
        attached = self.quantization == resolve(ATTACHED_DEFAULT)
        name, state = (ATTACHED_DEFAULT, "attached") if attached else (DEFAULT_PRESET, "not attached")
        return f"default preset {name} (the model is {state}); "

    def _padding_text(self) -> str:
        """Where the padding is known from and how much there is: what is taken as padding is not kept."""
        rows = next((layer.rows for layer in self.layers if isinstance(layer, QuantizedLayer)), [])
        counts = [row.padding for row in rows]
        return self.padding_source + (f", tokens per row {counts}" if any(counts) else "")

    # ---------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file, as a whole or not at all.

        Args:
            path: of the file; one that exists is replaced.

        Raises:
            ValueError: an interrupted forward left layers that do not agree, or a layer of transformers' own holds
                something that has no plain form.
            OSError: the folder does not exist (``FileNotFoundError``) or cannot be written.
        """
        serialization.save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: PreTrainedConfig, device: torch.device | str = "cpu"
    ) -> QuantizedKVCache:
        """A new cache with what ``save`` wrote, for a model of the same configuration.

        Args:
            path: of the file.
            config: the model's configuration (``model.config``).
            device: where the tensors go.

        Raises:
            ValueError: a file that is truncated, damaged, foreign, of another format version, of another model, or of a
                number format that is not in ``FORMATS``.
            FileNotFoundError: ``path`` is no file.
        """
        return serialization.load(cls, path, config, device)
