"""Exact accounting: every byte of every storage the cache holds, by what it is for.

Decision: counted from the storages themselves, not from shapes, so that capacity, views into larger buffers and
native layers cannot hide anything; ``total`` equals the sum of the storages to the byte (a test walks the object
graph to check it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.storage import TensorState


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer; ``a + b`` adds two layers up.

    Attributes:
        codes: codes of closed blocks in use.
        scales: their scales, block exponents included.
        zeros: their zero points.
        tables: statistics per row, head and channel, and what is kept for them until they are frozen.
        window: newest tokens, in full precision.
        sinks: first tokens, in full precision.
        unused: capacity not filled, and slots of closed blocks dropped by ``crop``.
        other: native layers (sliding, linear, ...), as transformers holds them.
        elements: number of key and value elements of all tokens that the layer counts, padding included, as
            DynamicCache would hold them.
        packed_elements: number of those in closed blocks.
        full_precision: bytes of ``elements`` in the delivered dtype (for native layers: their own bytes).
    """

    codes: int = 0
    scales: int = 0
    zeros: int = 0
    tables: int = 0
    window: int = 0
    sinks: int = 0
    unused: int = 0
    other: int = 0
    elements: int = 0
    packed_elements: int = 0
    full_precision: int = 0

    @property
    def total(self) -> int:
        """Bytes of every storage of the layer."""
        parts = (self.codes, self.scales, self.zeros, self.tables, self.window, self.sinks, self.unused, self.other)
        return sum(parts)

    def __add__(self, other: LayerMemory) -> LayerMemory:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return LayerMemory(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class MemoryReport:
    """Bytes per layer and in total; ``print`` shows a small table.

    Attributes:
        layers: one record per model layer.
        rotary: bytes of the tables of cos and sin, shared by layers.
    """

    layers: tuple[LayerMemory, ...]
    rotary: int = 0

    @property
    def sum(self) -> LayerMemory:
        """All layers added up, without ``rotary``."""
        return sum(self.layers, LayerMemory())

    @property
    def total(self) -> int:
        """Bytes of every storage held."""
        return self.sum.total + self.rotary

    @property
    def full_precision_nbytes(self) -> int:
        """Bytes that DynamicCache would hold for the same tokens in the delivered dtype."""
        return self.sum.full_precision

    @property
    def ratio(self) -> float:
        """``total / full_precision_nbytes``; 0.0 for an empty cache."""
        return self.total / self.full_precision_nbytes if self.full_precision_nbytes else 0.0

    @property
    def bits_per_element(self) -> float:
        """Bits of everything the quantized layers hold, per key or value element; 0.0 for an empty cache."""
        whole = self.sum
        return 8 * (self.total - whole.other) / whole.elements if whole.elements else 0.0

    @property
    def packed_bits_per_element(self) -> float:
        """Bits of codes, scales and zero points per element in closed blocks: without window, sinks and the tables
        of a row, which do not grow with its tokens; 0.0 where none is closed."""
        whole = self.sum
        return 8 * (whole.codes + whole.scales + whole.zeros) / whole.packed_elements if whole.packed_elements else 0.0

    def __str__(self) -> str:
        whole = self.sum
        names = ("codes", "scales", "zeros", "tables", "window", "sinks", "unused", "other")
        parts = {name: getattr(whole, name) for name in names} | {"rotary": self.rotary}
        lines = [f"{name:<8} {nbytes:>14,} bytes" for name, nbytes in parts.items()]
        full = f"{self.ratio:.3f} of full precision ({whole.full_precision:,} bytes)"
        lines.append(f"{'total':<8} {self.total:>14,} bytes = {full}")
        lines.append(
            f"{self.bits_per_element:.2f} bits per element, {self.packed_bits_per_element:.2f} in closed blocks"
        )
        return "\n".join(lines)


def layer_memory(layer: Any) -> LayerMemory:
    """Account for one cache layer, quantized or native."""
    if not isinstance(layer, QuantizedLayer):
        nbytes = storage_nbytes(tensors_in(vars(layer)))
        return LayerMemory(other=nbytes, full_precision=nbytes)
    states = sum((_tensor_memory(layer, state) for state in (layer.key_state, layer.value_state)), LayerMemory())
    return states + LayerMemory(tables=storage_nbytes(tensors_in(layer.energies.held)))


def _tensor_memory(layer: QuantizedLayer, state: TensorState) -> LayerMemory:
    if state.window is None:
        return LayerMemory()
    tokens = sum(sum(row.blocks) for row in layer.rows)
    slots = len(layer.rows) * state.packed.capacity * layer.config.block_length
    named = {} if state.packed.held is None else state.packed.held.named()
    used = {name: tensor.nbytes * tokens // slots for name, tensor in named.items()}
    codes = sum(nbytes for name, nbytes in used.items() if name.startswith("planes."))
    window = state.window[:, :, : layer.length - layer.window_start].nbytes
    sinks = 0 if state.sinks is None else state.sinks.nbytes
    total = storage_nbytes(tensors_in([state.packed, state.sinks, state.window]))
    scales = used.get("scale", 0) + used.get("exponent", 0)
    zeros = sum(used.get(name, 0) for name in ("zero", "zero_exponent", "zero_range"))
    heads, head_dim = state.window.shape[1], state.window.shape[3]
    elements = len(layer.rows) * heads * layer.length * head_dim
    return LayerMemory(
        codes=codes,
        scales=scales,
        zeros=zeros,
        tables=storage_nbytes(tensors_in(state.tables)),
        window=window,
        sinks=sinks,
        unused=total - codes - scales - zeros - window - sinks,
        elements=elements,
        packed_elements=tokens * heads * head_dim,
        full_precision=elements * state.window.element_size(),
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor reachable through containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def storage_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages: dict[int, int] = {}
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.nbytes():  # an empty storage may carry the address of another
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
