"""QuantizedBlocks: the stored tensors of closed blocks, whatever the format.

Decision: a flat record in which batch is dimension 0 and blocks are dimension 2 of every tensor, so storage, files and
accounting never need to know a format; they go through :meth:`QuantizedBlocks.named`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class QuantizedBlocks:
    """``n`` quantized blocks; planes as drawn in :mod:`hf_kvquant.quantizer`, the others in :mod:`hf_kvquant.scales`.
    A lossless format has one plane: the tensor itself."""

    planes: tuple[torch.Tensor, ...]
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    exponent: torch.Tensor | None = None
    zero_exponent: torch.Tensor | None = None
    zero_range: torch.Tensor | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor held, by name; batch is dimension 0 and blocks are dimension 2 of each."""
        return {f"planes.{index}": plane for index, plane in enumerate(self.planes)} | self.metadata()

    def metadata(self) -> dict[str, torch.Tensor]:
        """The tensors beside the planes."""
        others = {name: getattr(self, name) for name in _METADATA}
        return {name: tensor for name, tensor in others.items() if tensor is not None}

    @classmethod
    def from_named(cls, tensors: dict[str, torch.Tensor]) -> QuantizedBlocks:
        """Inverse of :meth:`named`."""
        planes = tuple(tensors[name] for name in sorted(tensors) if name.startswith("planes."))
        return cls(planes, *(tensors.get(name) for name in _METADATA))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedBlocks:
        """The same blocks with ``function`` applied to every tensor."""
        return self.from_named({name: function(tensor) for name, tensor in self.named().items()})


_METADATA = ("scale", "zero", "exponent", "zero_exponent", "zero_range")
