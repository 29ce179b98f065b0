"""Cache schemes by name: our presets and configurations, transformers' caches, and what each of them holds.

Decision: an evaluation names its cache in one string, and every scheme is measured in the same way, the incumbent
included. A scheme's ``identity`` is everything that its results depend on, so that stored results of two schemes can
never be taken for one another.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, QuantizedCache
from transformers.cache_utils import QuantizedLayer as GroupwiseLayer
from transformers.utils.import_utils import is_hqq_available, is_optimum_quanto_available

from hf_kvquant import _compat
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.memory import storage_nbytes, tensors_in
from hf_kvquant.presets import PRESETS
from hf_kvquant.spec import first_line

FULL_PRECISION = "none"
TRANSFORMERS = "transformers:"
# Name after "transformers:" -> backend of its QuantizedCache and options. hqq's default axis 0 puts batch rows and
# heads into one group; axis 1 keeps them apart.
_INCUMBENTS: dict[str, tuple[str, dict[str, int]]] = {
    **{f"quanto{bits}": ("quanto", {"nbits": bits}) for bits in (2, 4)},
    **{f"hqq{bits}": ("hqq", {"nbits": bits, "axis_key": 1, "axis_value": 1}) for bits in (1, 2, 3, 4, 8)},
    "fp8": ("fp8", {}),
}
_PACKAGES: dict[str, tuple[str, Callable[[], bool]]] = {
    "quanto": ("optimum-quanto", is_optimum_quanto_available),
    "hqq": ("hqq", is_hqq_available),
}


class EvalError(ValueError):
    """An evaluation was asked for something it cannot do; the message is one line for the user."""


@dataclass(frozen=True)
class Scheme:
    """A cache to evaluate.

    Attributes:
        name: as it was asked for.
        build: model configuration -> an empty cache.
        identity: everything that results depend on, as plain data.
        config: ours, or None for transformers' caches.
    """

    name: str
    build: Callable[[Any], Cache]
    identity: dict[str, Any]
    config: KVQuantConfig | None = None

    @property
    def needs_attach(self) -> bool:
        """Whether the model must be attached."""
        return self.config is not None and self.config.needs_attach


def find_scheme(name: str, residual_length: int | None = None) -> Scheme:
    """A cache by its name.

    Args:
        name: a preset, the path of a JSON file of a ``KVQuantConfig``, "none" for DynamicCache, or "transformers:" with
            a backend of its QuantizedCache and bits ("transformers:quanto4", "transformers:fp8").
        residual_length: tokens of the exact window instead of the scheme's own; 0 quantizes everything but the sinks.

    Raises:
        EvalError: unknown name, unreadable file, window for a cache without one, or a missing package.
    """
    if residual_length is not None and (type(residual_length) is not int or residual_length < 0):
        raise EvalError(f"residual_length={residual_length}: it must be an integer of at least 0")
    if residual_length is not None and name in (FULL_PRECISION, f"{TRANSFORMERS}fp8"):
        raise EvalError(f"residual_length={residual_length}: kv_cache={name} has no window; leave it out")
    if name == FULL_PRECISION:
        return Scheme(name, lambda config: DynamicCache(config=config), {"cache": "DynamicCache"})
    if name.startswith(TRANSFORMERS):
        return _incumbent(name, residual_length)
    config = _configuration(name)
    if residual_length is not None:
        config = replace(config, residual_length=residual_length)
    return Scheme(name, lambda model: QuantizedKVCache(model, config), config.to_dict(), config)


def _configuration(name: str) -> KVQuantConfig:
    if name in PRESETS:
        return PRESETS[name].config
    if not name.endswith(".json"):
        known = f"{FULL_PRECISION}, {', '.join(key for key in PRESETS if key != FULL_PRECISION)}"
        raise EvalError(f"kv_cache={name}: unknown; choose from {known}, {TRANSFORMERS}quanto4 (or hqq4, fp8), a .json")
    try:
        return KVQuantConfig.from_json(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise EvalError(f"kv_cache={name}: {first_line(error)}") from error


def _incumbent(name: str, residual_length: int | None) -> Scheme:
    """transformers' QuantizedCache with its own defaults, but for the axis of hqq."""
    key = name.removeprefix(TRANSFORMERS)
    if key not in _INCUMBENTS:
        raise EvalError(f"kv_cache={name}: unknown; after {TRANSFORMERS} choose from {', '.join(_INCUMBENTS)}")
    backend, options = _INCUMBENTS[key]
    if backend == "fp8" and not _compat.has_fp8_cache():
        raise EvalError(
            f"kv_cache={name}: this transformers has no fp8 cache; choose another, or install 5.21 or newer"
        )
    package, is_installed = _PACKAGES.get(backend, ("transformers", lambda: True))
    if not is_installed():
        raise EvalError(f"kv_cache={name}: a package is missing: pip install {package}")
    given = options if residual_length is None else options | {"residual_length": residual_length}
    if backend == "quanto":
        find_ninja()
    versions = {each: importlib.metadata.version(each) for each in ("transformers", package)}
    identity = {"cache": "QuantizedCache", "backend": backend, **given, "versions": versions}
    return Scheme(name, lambda config: QuantizedCache(backend, config, **given), identity)


def find_ninja() -> None:
    """quanto compiles an extension at its first read; an environment that is not activated has its ninja off PATH."""
    if not shutil.which("ninja"):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def fork(cache: Cache) -> Cache:
    """A cache that goes on from the same tokens and leaves ``cache`` as it is.

    transformers' quantized layers cannot be copied deeply (quanto), but only ever replace their tensors, so sharing
    those is enough.
    """
    if not isinstance(cache, QuantizedCache):
        return copy.deepcopy(cache)
    forked = copy.copy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    return forked


def cache_nbytes(cache: Cache) -> int:
    """Bytes of every storage that ``cache`` holds, ours or transformers'."""
    if isinstance(cache, QuantizedKVCache):
        return cache.memory_report().total
    return storage_nbytes(_inner_tensors([vars(layer) for layer in cache.layers]))


def elements_per_token(config: Any) -> int:
    """Key and value elements that one token has in all layers of a model with this ``config``."""
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim


@torch.no_grad()
def elements_held(cache: Cache, model: Any) -> int:
    """Key and value elements that a filled cache of ``model`` stands for, counted and not derived from names in a
    configuration, which differ by model; of sliding layers those in their windows."""
    if isinstance(cache, QuantizedKVCache):
        return cache.memory_report().sum.elements
    if not isinstance(cache, QuantizedCache):
        return sum(tensor.numel() for layer in cache.layers for tensor in _states(layer))
    one = DynamicCache(config=model.config)  # one token: those in a quantized cache are hidden in its backend's tensors
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **{_compat.cache_argument(model.forward): one})
    return cache.get_seq_length() * elements_held(one, model)


def _states(layer: Any) -> Iterator[torch.Tensor]:
    return tensors_in([getattr(layer, "keys", None), getattr(layer, "values", None)])


def bits_held(cache: Cache, elements: int) -> dict[str, Any]:
    """Bits per element of a filled ``cache`` that stands for ``elements`` key and value elements.

    ``blocks``: codes, scales and zero points of closed blocks, over the elements in closed blocks; ``true``: the same
    with all tables that a format keeps per row, still without cos and sin; ``with_rotary``: with the tables of cos and
    sin; ``all``: every byte held, over all elements. Where nothing is in closed blocks all four are this, and for
    transformers' caches the first three count what is quantized, their window left out. ``memory``: the bytes by
    purpose (ours only).
    """
    names = ("blocks", "true", "with_rotary", "all")
    if not isinstance(cache, QuantizedKVCache):
        window = sum(_window_nbytes(layer) for layer in cache.layers)
        tokens = max(cache.get_seq_length(), 1)
        quantized = elements * (tokens - _window_tokens(cache)) // tokens
        held = cache_nbytes(cache)
        inside = 8 * (held - window) / quantized if quantized else 8 * held / elements
        if not isinstance(cache, QuantizedCache):  # a sliding layer may hold more storage than its window
            inside = 8 * sum(tensor.nbytes for layer in cache.layers for tensor in _states(layer)) / elements
        return dict.fromkeys(names[:3], inside) | {"all": 8 * held / elements}
    report = cache.memory_report()
    whole = report.sum
    found: dict[str, Any] = dict.fromkeys(names, report.bits_per_element)
    if whole.packed_elements:
        closed = whole.total - whole.window - whole.sinks - whole.unused - whole.other
        found["blocks"] = report.packed_bits_per_element
        found["true"] = 8 * closed / whole.packed_elements
        found["with_rotary"] = 8 * (closed + report.rotary) / whole.packed_elements
    return found | {"memory": dataclasses.asdict(whole) | {"rotary": report.rotary}}


def _window_nbytes(layer: Any) -> int:
    """Bytes of what a layer of transformers' QuantizedCache has not quantized yet."""
    return storage_nbytes(_states(layer)) if isinstance(layer, GroupwiseLayer) else 0


def _window_tokens(cache: Cache) -> int:
    first = cache.layers[0]
    keys = first.keys if isinstance(first, GroupwiseLayer) else None
    return keys.shape[-2] if keys is not None and keys.dim() == 4 else 0


def _inner_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor in a value; those inside a tensor subclass instead of the subclass itself."""
    for tensor in tensors_in(value):
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            yield from _inner_tensors([getattr(tensor, name) for name in names])
        else:
            yield tensor


def as_json(identity: Any) -> str:
    """One text for one ``identity``, whatever the order of its fields."""
    return json.dumps(identity, sort_keys=True)
