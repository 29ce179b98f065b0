"""Saving and loading a cache: one safetensors file with a JSON header.

Decision: tensors go into safetensors (no code is run on loading), everything else into one JSON string in its
metadata, with a format version. Only what is in use is written, so a loaded cache has no unused capacity. Writing is
atomic: a temporary file beside the target, flushed, then renamed over it. Reading checks the header against package
and model before any layer is built, and returns a new
cache or raises: nothing is half-loaded.

Native layers (sliding windows, recurrent states) are saved attribute by attribute, as long as they hold tensors and
plain values.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from hf_kvquant._compat import config_value
from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.formats import FORMATS
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.quantizer import quantize
from hf_kvquant.rotary import LayerRotary, RotaryLayout, RotaryTable
from hf_kvquant.storage import RowState, TensorState, storing
from hf_kvquant.transforms import Tables, calibrate

if TYPE_CHECKING:
    from hf_kvquant.cache import QuantizedKVCache

FORMAT_VERSION = 3
_HEADER = "hf_kvquant"
_MODEL_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
)

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def model_facts(config: PreTrainedConfig) -> Json:
    """What must agree between the model that wrote a cache and the one that reads it."""
    decoder = config.get_text_config(decoder=True)
    facts = {name: config_value(decoder, name) for name in _MODEL_FIELDS}
    return {name: value if isinstance(value, int | str) else None for name, value in facts.items()}


def save(cache: QuantizedKVCache, path: str | os.PathLike[str]) -> None:
    """Write ``cache`` to ``path``, replacing it as a whole or not at all.

    Raises:
        ValueError: a native layer holds something that has no plain form, or an interrupted forward left layers that
            do not agree.
        OSError: the folder does not exist or cannot be written.
    """
    _check_complete(cache)
    tensors: Tensors = {}
    header = {
        "format_version": FORMAT_VERSION,
        "model": cache.model_facts,
        "quantization": cache.quantization.to_dict(),
        "is_default": cache.is_default,
        "padding_source": cache.padding_source,
        "rotary_tables": _tables_to_tensors(cache.rotary.tables, tensors),
        "layers": [
            _layer_to_json(layer, f"layers.{index}", tensors) | _rotary_to_json(layer, cache.rotary.tables)
            for index, layer in enumerate(cache.layers)
        ],
    }
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: the folder {target.parent} does not exist; create it first")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {_HEADER: json.dumps(header)}
        )
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_complete(cache: QuantizedKVCache) -> None:
    """Refuse what an interrupted forward leaves: layers of different lengths, or one whose window was not yet
    written."""
    layers = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer) and layer.is_initialized]
    lengths = sorted({layer.length for layer in layers})
    windows = [(layer, state.window) for layer in layers for _, state in _states(layer)]
    torn = any(window is None or window.shape[2] < each.length - each.window_start for each, window in windows)
    if torn or len(lengths) > 1:
        raise ValueError(
            f"the cache holds layers of {lengths} tokens, as an interrupted forward leaves them; nothing was written: "
            "reset() the cache and prefill it again"
        )


@storing
def load(
    cls: type[QuantizedKVCache], path: str | os.PathLike[str], config: PreTrainedConfig, device: torch.device | str
) -> QuantizedKVCache:
    """Read what :func:`save` wrote; errors as listed at :meth:`QuantizedKVCache.load`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file; pass one that cache.save() wrote")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = _checked_header((file.metadata() or {}).get(_HEADER), path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); save the cache again") from error
    _check_model(header["model"], model_facts(config), path)
    _check_formats(header["quantization"], path)
    try:
        cache = cls(config, KVQuantConfig.from_dict(header["quantization"]))
        cache.padding_source, cache.is_default = header["padding_source"], bool(header["is_default"])
        lengths = _block_lengths(cache, header["layers"])
        cache.rotary.tables = [_table(tensors, index, lengths[index]) for index in range(header["rotary_tables"])]
        for layer, data in zip(cache.layers, header["layers"], strict=True):
            _layer_from_json(layer, data, tensors, torch.device(device))
            if data.get("rotary") is not None:
                _rotary_from_json(layer, data["rotary"], cache.rotary.tables)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, error) from error
    return cache


def _check_formats(quantization: Any, path: str | os.PathLike[str]) -> None:
    """Formats may be added at run time; one that was is missing in a process that has not added it yet."""
    for name in _formats_in(quantization):
        if name not in FORMATS:
            raise ValueError(
                f"{path} holds codes of the format {name!r}, which is not in FORMATS here; add it to "
                "hf_kvquant.formats.FORMATS before loading, as it was when the cache was saved"
            )


def _formats_in(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if isinstance(data.get("format"), str):
            yield data["format"]
        for each in data.values():
            yield from _formats_in(each)


def _damaged(path: str | os.PathLike[str], reason: object) -> ValueError:
    return ValueError(f"{path} is damaged: header and tensors do not fit together ({reason!r}); save the cache again")


def _checked_header(text: str | None, path: str | os.PathLike[str]) -> Json:
    if text is None:
        raise ValueError(
            f"{path} was not written by hf_kvquant: its header has no {_HEADER!r} entry; pass a file that cache.save() "
            "wrote"
        )
    try:
        header = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, error) from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header is no mapping")
    missing = {"format_version", "model", "quantization", "padding_source", "rotary_tables", "layers"} - set(header)
    if missing:
        raise _damaged(path, f"the header lacks {sorted(missing)[0]}")
    if not isinstance(header["format_version"], int) or not isinstance(header["model"], dict):
        raise _damaged(path, "format_version must be a number and model a mapping")
    if header["format_version"] != FORMAT_VERSION:
        newer = header["format_version"] > FORMAT_VERSION
        cure = "upgrade hf-kvquant" if newer else "save the cache again with this version"
        raise ValueError(
            f"{path} has format_version={header['format_version']}, this hf_kvquant reads {FORMAT_VERSION}; {cure}"
        )
    return header


def _check_model(saved: Json, given: Json, path: str | os.PathLike[str]) -> None:
    for name in _MODEL_FIELDS:
        if saved.get(name) != given[name]:
            raise ValueError(
                f"{path} was saved from a model with {name}={saved.get(name)!r}, the given config has "
                f"{name}={given[name]!r}; load it with the config of the model that wrote it"
            )


# -------------------------------------------------------------------- layers


def _layer_to_json(layer: Any, prefix: str, tensors: Tensors) -> Json:
    if not isinstance(layer, QuantizedLayer):
        state = {name: _to_json(value, f"{prefix}.{name}", tensors) for name, value in vars(layer).items()}
        return {"type": type(layer).__name__, "state": state}
    for name, state in _states(layer):
        tensors.update({f"{prefix}.{name}.{key}": value for key, value in _state_tensors(layer, state).items()})
    if layer.energies.held is not None:
        tensors[f"{prefix}.energies"] = layer.energies.held
    return {
        "type": type(layer).__name__,
        "is_initialized": layer.is_initialized,
        "length": layer.length,
        "window_start": layer.window_start,
        "padding_is_set": layer.padding_is_set,
        "queries_reason": layer.energies.reason,
        "rows": [[row.padding, row.blocks, row.calibrated] for row in layer.rows],
        "prefix": prefix,
    }


def _layer_from_json(layer: Any, data: Json, tensors: Tensors, device: torch.device) -> None:
    if type(layer).__name__ != data["type"]:
        raise ValueError(f"layer type {data['type']} in the file, {type(layer).__name__} for this model")
    if not isinstance(layer, QuantizedLayer):
        for name, value in data["state"].items():
            setattr(layer, name, _from_json(value, tensors, device))
        return
    for name in ("is_initialized", "length", "window_start", "padding_is_set"):
        setattr(layer, name, data[name])
    layer.rotary_reason = data["rotary_reason"]
    layer.rows = [RowState(padding, blocks, calibrated) for padding, blocks, calibrated in data["rows"]]
    if not layer.is_initialized:
        return
    layer.device = device
    layer.energies.held = tensors.get(f"{data['prefix']}.energies")
    layer.energies.reason = data["queries_reason"]
    for name, state in _states(layer):
        start = f"{data['prefix']}.{name}."
        own = {key[len(start) :]: tensor for key, tensor in tensors.items() if key.startswith(start)}
        state.window, state.sinks = own.pop("window"), own.pop("sinks", None)
        tables = {key.removeprefix("tables."): own.pop(key) for key in list(own) if key.startswith("tables.")}
        state.tables = Tables(**tables) if tables else None
        state.packed.held = QuantizedBlocks.from_named(own) if own else None
        _check_state(layer, name, state)


def _check_state(layer: QuantizedLayer, name: str, state: TensorState) -> None:
    """Shapes and dtypes against what the configuration would have stored: a block of zeros, quantized, is the
    template."""
    window, config = state.window, layer.config
    assert window is not None
    batch, heads, _, head_dim = window.shape
    blocks = max(len(row.blocks) for row in layer.rows)
    expected = {"window": (batch, heads, layer.length - layer.window_start, head_dim)}
    found = {"window": tuple(window.shape)}
    if len(layer.rows) != batch:
        raise ValueError(f"{len(layer.rows)} rows in the header, {batch} in the tensors")
    if blocks:
        block = window.new_zeros(1, heads, 1, config.block_length, head_dim)
        template = quantize(block, state.spec, state.tokens_last).named()
        if state.spec.calibrates:
            tables = calibrate(block[:, :, 0], state.spec, None, None, None).named()
            expected |= {f"tables.{key}": (batch, *t.shape[1:], t.dtype) for key, t in tables.items()}
            held = {} if state.tables is None else state.tables.named()
            found |= {f"tables.{key}": (*t.shape, t.dtype) for key, t in held.items()}
        expected |= {key: (batch, t.shape[1], blocks, *t.shape[3:], t.dtype) for key, t in template.items()}
        held = {} if state.packed.held is None else state.packed.held.named()
        found |= {key: (*t.shape, t.dtype) for key, t in held.items()}
        if config.sink_length:
            expected["sinks"] = (batch, heads, config.sink_length, head_dim)
            found["sinks"] = () if state.sinks is None else tuple(state.sinks.shape)
    if expected != found:
        wrong = next(key for key in expected | found if expected.get(key) != found.get(key))
        raise ValueError(f"{name}.{wrong} is {found.get(wrong)}, expected {expected.get(wrong)}")


def _states(layer: QuantizedLayer) -> tuple[tuple[str, TensorState], ...]:
    return ("keys", layer.key_state), ("values", layer.value_state)


def _state_tensors(layer: QuantizedLayer, state: TensorState) -> Tensors:
    """The parts in use, by name."""
    if state.window is None:
        return {}
    named = {"window": state.window[:, :, : layer.length - layer.window_start]}
    if state.sinks is not None:
        named["sinks"] = state.sinks
    if state.tables is not None:
        named |= {f"tables.{name}": tensor for name, tensor in state.tables.named().items()}
    blocks = max(len(row.blocks) for row in layer.rows)
    if blocks:
        named |= state.packed.read(slice(None), blocks).named()
    return named


# -------------------------------------------------------------------- rotation


def _tables_to_tensors(tables: list[RotaryTable], tensors: Tensors) -> int:
    for index, table in enumerate(tables):
        for name, held in zip(("cos", "sin"), table.tokens(0, table.length), strict=True):
            tensors[f"rotary.{index}.{name}"] = held.transpose(1, 2)
    return len(tables)


def _block_lengths(cache: QuantizedKVCache, layers: list[Json]) -> dict[int, int]:
    """By number of the table; the layers that share one have blocks of one length."""
    return {
        data["rotary"]["table"]: layer.block_length
        for layer, data in zip(cache.layers, layers, strict=True)
        if isinstance(layer, QuantizedLayer) and data.get("rotary") is not None
    }


def _table(tensors: Tensors, index: int, block_length: int) -> RotaryTable:
    cos, sin = (tensors[f"rotary.{index}.{name}"].transpose(1, 2) for name in ("cos", "sin"))
    table = RotaryTable.empty_like(cos, 0, block_length)
    table.append(cos, sin)
    return table


def _rotary_to_json(layer: Any, tables: list[RotaryTable]) -> Json:
    if not isinstance(layer, QuantizedLayer):
        return {}
    if layer.rotary is None:
        return {"rotary": None, "rotary_reason": layer.rotary_reason}
    index = next(i for i, table in enumerate(tables) if table is layer.rotary.table)
    return {"rotary": {"table": index, "layout": dataclasses.asdict(layer.rotary.layout)}, "rotary_reason": ""}


def _rotary_from_json(layer: Any, data: Json, tables: list[RotaryTable]) -> None:
    table = tables[data["table"]]
    if table.length != layer.length:
        raise ValueError(f"layer of {layer.length} tokens with a rotary table of {table.length}")
    layer.set_rotary(LayerRotary(RotaryLayout(**data["layout"]), table))


# -------------------------------------------------------------------- plain values of native layers

_PLAIN = (int, float, str, bool, type(None))


def _to_json(value: Any, name: str, tensors: Tensors) -> Json:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, _PLAIN):
        return {"value": value}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[key, _to_json(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list):
        return {"list": [_to_json(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    raise ValueError(
        f"{name}={type(value).__name__} cannot be saved: layers may hold tensors, numbers, strings, lists and dicts"
    )


def _from_json(data: Json, tensors: Tensors, device: torch.device) -> Any:
    (kind, value), *_ = data.items()
    readers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda name: tensors[name],
        "value": lambda plain: plain,
        "device": lambda _: device,
        "dtype": lambda name: getattr(torch, name),
        "dict": lambda pairs: {key: _from_json(item, tensors, device) for key, item in pairs},
        "list": lambda items: [_from_json(item, tensors, device) for item in items],
    }
    return readers[kind](value)
