"""Finding out how an attention module rotates its keys, by running the module instead of a table of architectures.

Decision: the module's own forward is run on one or two tokens with a cache that stops it at ``update``: once with
identity tables, which gives the raw tensors, and once with tables of known random angles. The layout is the one
candidate (slot, pairing, offset, sign, expansion of the tables) that turns the first into the second. Random angles
tell candidates apart that real tables at the first positions, nearly the identity, would not. Equal outputs mean a
layer without rotation. What no candidate explains stays stored after RoPE, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvquant.rotary import NO_ROPE, PositionEmbeddings, RotaryLayout

# Relative error of the right candidate: rounding of the model's dtype. Wrong ones miss by the size of the keys.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_PROBED_TOKENS = 2


class _CapturedError(Exception):
    """Carries the tensors out of the forward."""

    def __init__(self, key_states: torch.Tensor, value_states: torch.Tensor):
        self.states = {"key": key_states.detach(), "value": value_states.detach()}


class _TapCache(DynamicCache):
    """A cache that ends the forward at its first update."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _CapturedError(key_states, value_states)


def probe(module: torch.nn.Module, arguments: dict[str, Any], cache_name: str) -> tuple[RotaryLayout | None, str]:
    """Layout of ``module``, or None with the reason.

    Args:
        module: an attention module.
        arguments: those of the call about to be made, by name; ``position_embeddings`` among them.
        cache_name: name of the argument that takes the cache.
    """
    embeddings: PositionEmbeddings = arguments["position_embeddings"]
    small = {name: _last_tokens(value, arguments["hidden_states"].shape[1]) for name, value in arguments.items()}
    small |= {cache_name: _TapCache(), "attention_mask": None}
    angles = _random_angles(_first(embeddings))
    swapped = _is_swapped(embeddings)
    raw = _run(
        module, small | {"position_embeddings": _tables(embeddings, torch.zeros_like(angles), "single", swapped)}
    )
    if isinstance(raw, str):
        return None, raw
    for expansion in _expansions(embeddings):
        used = angles if expansion in ("single", "complex") else angles[..., : angles.shape[-1] // 2]
        real = _run(module, small | {"position_embeddings": _tables(embeddings, used, expansion, swapped)})
        if isinstance(real, str):
            return None, real
        if all(torch.equal(raw[slot], real[slot]) for slot in raw):
            return None, NO_ROPE
        for layout in _candidates(raw, used.shape[-1], expansion, swapped):
            if _explains(layout, raw, real, used):
                return layout, ""
    return None, "the rotation fits no known layout"


def _explains(
    layout: RotaryLayout, raw: dict[str, torch.Tensor], real: dict[str, torch.Tensor], angles: torch.Tensor
) -> bool:
    other = "value" if layout.slot == "key" else "key"
    if not torch.equal(raw[other], real[other]):
        return False
    rotated = raw[layout.slot].float().clone()
    layout.rotate_(rotated, angles.cos()[:, None], angles.sin()[:, None])
    expected = real[layout.slot].float()
    return bool((rotated - expected).norm() <= _TOLERANCE[raw[layout.slot].dtype] * expected.norm())


def _candidates(raw: dict[str, torch.Tensor], pairs: int, expansion: str, swapped: bool) -> Iterator[RotaryLayout]:
    for slot, pairing, sign in itertools.product(("key", "value"), ("half", "interleaved"), (1, -1)):
        rest = raw[slot].shape[-1] - 2 * pairs
        for offset in sorted({0, rest}) if rest >= 0 else ():
            yield RotaryLayout(slot, pairing, pairs, offset, sign, expansion, swapped)


def _run(module: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, torch.Tensor] | str:
    """The tensors of the module's first update, or why there was none. Seeded: dropout in adapters must not differ."""
    devices = [module_device] if (module_device := arguments["hidden_states"].device).type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            module.forward(**arguments)
    except _CapturedError as captured:
        return captured.states
    except Exception as error:  # any failure of foreign code means: cannot be probed
        return f"probing failed: {type(error).__name__}: {str(error)[:100]}"
    return "the module does not update the cache"


def _first(embeddings: PositionEmbeddings) -> torch.Tensor:
    return embeddings if isinstance(embeddings, torch.Tensor) else embeddings[0]


def _last_tokens(value: Any, length: int) -> Any:
    """The first row and last tokens of an argument that holds one entry per token; everything else as it is. The first
    tokens may be padding, whose embedding and keys are zero in many models."""
    if isinstance(value, tuple):
        return tuple(_last_tokens(item, length) for item in value)
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length:
        return value[:1, -_PROBED_TOKENS:]
    return value


def _random_angles(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (1, min(_PROBED_TOKENS, like.shape[1]), like.shape[-1])
    return (torch.rand(shape, generator=generator) * 6).to(like.device)


def _expansions(embeddings: PositionEmbeddings) -> tuple[str, ...]:
    """Expansions that the real table can have: a table that does not repeat holds one angle per column."""
    if isinstance(embeddings, torch.Tensor):
        return ("complex",)
    cos, half = embeddings[0], embeddings[0].shape[-1] // 2
    fits = {
        "halves": cos.shape[-1] % 2 == 0 and torch.equal(cos[..., :half], cos[..., half:]),
        "each": cos.shape[-1] % 2 == 0 and torch.equal(cos[..., ::2], cos[..., 1::2]),
    }
    return (*(name for name, fit in fits.items() if fit), "single")


def _is_swapped(embeddings: PositionEmbeddings) -> bool:
    """Whether (sin, cos) is handed over: the lowest frequency has hardly turned, so its cos is near 1 and its sin
    near 0."""
    if isinstance(embeddings, torch.Tensor):
        return False
    first, second = (table[..., -1].abs().float().mean() for table in embeddings)
    return bool(second > first)


def _tables(like: PositionEmbeddings, angles: torch.Tensor, expansion: str, swapped: bool) -> PositionEmbeddings:
    """Tables of the given angles, expanded and typed as the model passes them."""
    if isinstance(like, torch.Tensor):
        return torch.polar(torch.ones_like(angles), angles).to(like.dtype)
    if expansion == "halves":
        angles = torch.cat([angles, angles], -1)
    elif expansion == "each":
        angles = angles.repeat_interleave(2, -1)
    cos, sin = angles.cos().to(like[0].dtype), angles.sin().to(like[0].dtype)
    return (sin, cos) if swapped else (cos, sin)
