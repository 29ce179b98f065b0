"""Our attention under transformers' interface: what runs when a module of an attached model attends.

Decision: the name in a model's configuration says everything, ``hf_kvquant_BACKEND_PREVIOUS``: which backend decodes,
and which implementation the model had, which keeps doing all the rest. Prefill, long chunks, gradients, dropout, masks
that differ between heads: all are handed on, with full tensors and with the mask that implementation expects, so an
attached model differs from an unattached one in nothing but decode steps. The mask function is registered under the
same name; without it transformers makes no masks at all.

Names stay registered for the life of the process: a copy of an attached model, or a pickled one, needs them.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvquant import energies
from hf_kvquant._compat import attention_of, set_attention
from hf_kvquant.attention.backends import BACKENDS, automatic
from hf_kvquant.attention.plan import refusal
from hf_kvquant.past import Past, PastTensor, past_of

PREVIOUS = ("sdpa", "eager")
_PREFIX = "hf_kvquant"
# A comparison of the name with a constant: such a model takes another path under any other name.
_COMPARES = re.compile(r"_attn_implementation(_internal)?\s*(==|!=|in\b|not in\b)")
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def name_of(backend: str, previous: str) -> str:
    return f"{_PREFIX}_{backend}_{previous}"


def parse(name: str | None) -> tuple[str, str] | None:
    """Backend and previous implementation of a name of ours; None for any other."""
    return _NAMES.get(name or "")


_NAMES = {name_of(*parts): parts for parts in itertools.product(BACKENDS, PREVIOUS)}


def register() -> None:
    """Make our names known to transformers."""
    for name, (backend, previous) in _NAMES.items():
        if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[previous])
            ALL_ATTENTION_FUNCTIONS.register(name, _attention(backend, previous))


def obstacle(module: torch.nn.Module) -> str:
    """Why ``module`` cannot attend through us; empty if it can."""
    current = attention_of(module)
    if current is None:
        return "its configuration names no attention implementation"
    if parse(current) is None and current not in PREVIOUS:
        return f"its attention implementation is {current!r}, not one of {', '.join(PREVIOUS)}"
    home = sys.modules[type(module).__module__]
    if not hasattr(home, "ALL_ATTENTION_FUNCTIONS") or not hasattr(home, "eager_attention_forward"):
        return "its attention does not go through transformers' interface"
    if _asks_by_name(home.__file__):
        return "its code asks for the attention implementation by name"
    return ""


@functools.cache
def _asks_by_name(path: str | None) -> bool:
    """Whether the code in a file compares the attention implementation with names; not to be seen without a file."""
    return path is not None and Path(path).is_file() and bool(_COMPARES.search(Path(path).read_text("utf-8")))


def switch(module: torch.nn.Module, backend: str) -> None:
    """Let ``module`` (and all that share its configuration) attend through us."""
    current = attention_of(module)
    parts = parse(current)
    register()
    set_attention(module, name_of(backend, parts[1] if parts else str(current)))


def restore(module: torch.nn.Module) -> None:
    """Undo :func:`switch`, unless the implementation has been changed since."""
    parts = parse(attention_of(module))
    if parts is not None:
        set_attention(module, parts[1])


def _attention(backend: str, previous: str) -> Attention:
    decode = BACKENDS[backend]

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not torch.compiler.is_compiling():
            energies.show(module, query)
        past = past_of(key, value)
        if past is not None and not _declines(module, query, past, attention_mask, kwargs):
            scaling = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            softcap = float(kwargs.get("softcap") or 0.0)
            with torch.no_grad():
                return decode(query, past, scale, softcap, attention_mask, kwargs.get("s_aux")), None
        key, value = (each.read() if isinstance(each, PastTensor) else each for each in (key, value))
        return _previous(module, previous)(module, query, key, value, attention_mask, **kwargs)

    return attend


def attend_unattached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """``torch.nn.functional.scaled_dot_product_attention`` on handles: what a model that is not attached calls.

    Returns:
        ``[B, H, q, Dv]``, or None if the codes cannot serve: the caller then goes on with full tensors.
    """
    past = past_of(key, value)
    if past is None or query.dim() != 4 or dropout_p or is_causal or _needs_grad(query) or refusal(past):
        return None
    batch, heads, count, dim = query.shape
    if attn_mask is not None and (not _is_common(attn_mask, past) or attn_mask.requires_grad):
        return None
    scaling = dim**-0.5 if scale is None else float(scale)
    with torch.no_grad():
        if (heads == key.shape[1] or count == 1) and (attn_mask is None or attn_mask.shape[2] == 1):
            # Rows that all see the same: the query heads of a KV head, as transformers packs them, or tokens.
            rows = query.reshape(batch, heads * count, 1, dim)
            return automatic(rows, past, scaling, 0.0, attn_mask).unflatten(2, (heads, count)).squeeze(1)
        if heads % key.shape[1] or (heads != key.shape[1] and not enable_gqa):
            return None
        if attn_mask is None or attn_mask.shape[2] != count:
            return None
        return automatic(query, past, scaling, 0.0, attn_mask).transpose(1, 2)


def _previous(module: torch.nn.Module, name: str) -> Attention:
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # pyright: ignore
    return ALL_ATTENTION_FUNCTIONS[name]


def _is_common(mask: torch.Tensor, past: Past) -> bool:
    """Whether a mask is ``[B or 1, 1, ., T]``: one for all heads, an entry for every token."""
    return mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == past.length


def _needs_grad(query: torch.Tensor) -> bool:
    return query.requires_grad and torch.is_grad_enabled()


def _declines(
    module: torch.nn.Module, query: torch.Tensor, past: Past, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether this call is for the previous implementation."""
    if _needs_grad(query):
        return True
    if (kwargs.get("dropout") and module.training) or kwargs.get("output_attentions"):
        return True
    if kwargs.get("position_bias") is not None or kwargs.get("sliding_window") is not None:
        return True
    if (query.shape[2] > 1) if mask is None else not (_is_common(mask, past) and mask.shape[2] == query.shape[2]):
        return True
    return query.shape[1] % past.recent[0][-1].shape[1] != 0 or bool(refusal(past))
