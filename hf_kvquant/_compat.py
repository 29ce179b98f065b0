"""The only file that asks for versions or private names of transformers.

Which layer kind serves which model layer is read from a ``DynamicCache`` built for the same config: the public way to
the rules that transformers keeps in private helpers, and the same from 5.17 (our floor) on.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


def native_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers transformers itself would use for ``config``, one per model layer, not initialized."""
    return list(DynamicCache(config=config).layers)


def is_full_attention(layer: Any) -> bool:
    """Whether a native layer is plain full attention (its exact class: subclasses hold other state as well)."""
    return type(layer) is DynamicLayer


def has_fp8_cache() -> bool:
    """Whether transformers' QuantizedCache knows the backend fp8 (from 5.21 on)."""
    return hasattr(cache_utils, "Fp8QuantizedLayer")


def cache_argument(function: Callable[..., Any]) -> str:
    """Name under which ``function`` (a forward or generate) takes the cache: "cache" from 5.24, else
    "past_key_values"."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def with_attention(config: Any, name: str) -> Any:
    """A shallow copy of ``config`` that names another attention function; the public setter would also rename it in
    the sub-configurations, which the copy shares."""
    config = copy.copy(config)
    config._attn_implementation_internal = name
    return config


def attention_of(module: torch.nn.Module) -> str | None:
    """The attention implementation that the configuration of ``module`` names; None where there is none."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def set_attention(module: Any, name: str) -> None:
    """Name another attention function in the configuration of ``module`` alone: the public setter would also rename it
    in the sub-configurations, such as a vision tower's."""
    module.config._attn_implementation_internal = name


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """Field ``name`` of ``config``; None where it has none, or where its layers differ in it (Gemma 4's head_dim): such
    a field raises a RuntimeError of transformers' own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``function`` applied to the tensors in nested lists, tuples and dicts; everything else unchanged."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def forget_states(layer: Any) -> None:
    """After ``reset``: before 5.20 or so, transformers' growing layers keep their tensors, zeroed, at the old
    length."""
    if isinstance(layer, DynamicLayer) and layer.keys is not None:
        layer.keys = layer.values = None
        layer.is_initialized = False


def move_layer(layer: Any, device: torch.device | str) -> None:
    """Move a cache layer: by its own ``to`` where it has one, else every tensor it holds (transformers' layers have
    none)."""
    if hasattr(layer, "to"):
        layer.to(device)
        return
    for name, value in vars(layer).items():
        setattr(layer, name, map_tensors(value, lambda tensor: tensor.to(device)))
    if hasattr(layer, "device"):
        layer.device = torch.empty(0, device=device).device


__all__ = [
    "CacheLayerMixin",
    "attention_of",
    "cache_argument",
    "config_value",
    "forget_states",
    "has_fp8_cache",
    "is_full_attention",
    "map_tensors",
    "move_layer",
    "native_layers",
    "set_attention",
    "with_attention",
]
