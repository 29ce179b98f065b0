"""What ``summary()`` says of a layer: where it is quantized, in which format, and why not where it is not."""

from __future__ import annotations

from typing import Any

from hf_kvquant.config import KVQuantConfig
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.spec import TensorSpec


def layer_text(layer: Any) -> str:
    """What is applied to one layer of a cache, or why nothing is."""
    if isinstance(layer, QuantizedLayer):
        return f"quantized {_rotation_text(layer)}, {format_text(layer.config)}"
    return f"native {type(layer).__name__}: not plain full attention, kept as transformers holds it"


def format_text(config: KVQuantConfig) -> str:
    """Formats of keys and values, window, sinks and blocks."""
    return (
        f"keys {_tensor_text(config.key)}, values {_tensor_text(config.value)}; window {config.residual_length}, "
        f"sinks {config.sink_length}, blocks of {config.block_length} tokens"
    )


def _tensor_text(spec: TensorSpec) -> str:
    if spec.number_format.lossless:
        return "in full precision"
    unit = "channels" if spec.axis == "token" else "tokens"
    over = "the whole head" if spec.group_size is None else f"{spec.group_size} {unit}"
    kind = " (symmetric)" if spec.symmetric and not spec.number_format.midrise else ""
    widths = "+".join(f"{channels}x{bits}" for bits, channels in spec.widths or ())
    name = f"{widths} bits of 64 channels," if widths else spec.format
    steps = [f"{spec.center} centre"] if spec.center else []
    steps += ["channel deviations"] if spec.normalize else []
    steps += ["hadamard"] if spec.rotation else []
    prefix = f"{', '.join(steps)}, " if steps else ""
    return f"{prefix}{name} per {spec.axis} over {over}{kind}, {spec.scale_format} scales"


def _rotation_text(layer: QuantizedLayer) -> str:
    """Where the blocks stand to RoPE, what is known of it, and which statistics lack queries."""
    config = layer.config
    if not config.pre_rope and config.key.center != "rope":
        return "after RoPE"
    place = "before RoPE" if config.pre_rope else "after RoPE"
    if layer.rotary is not None:
        layout = layer.rotary.layout
        text = f"{place} ({layout.pairs} {layout.pairing} pairs at channel {layout.offset} of the {layout.slot}s)"
    elif not layer.length:
        text = f"{place} (layout not seen yet)"
    else:
        text = f"after RoPE ({layer.rotary_reason})"
    return text + (f", statistics without queries ({layer.energies.reason})" if layer.energies.reason else "")
