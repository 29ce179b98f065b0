"""Whether new keys and values fit each other and what a layer holds; one sentence where they do not."""

from __future__ import annotations

import torch

from hf_kvquant.storage import TensorState


def problem(
    states: tuple[TensorState, TensorState], rows: int, device: torch.device, keys: torch.Tensor, values: torch.Tensor
) -> str:
    """What is wrong with delivered tensors, and what to do; empty if nothing is.

    Args:
        states: keys and values as held.
        rows: batch size held, 0 if none is.
        device: where they are held.
        keys, values: ``[B, K, q, D]`` as delivered.
    """
    for name, tensor in (("key_states", keys), ("value_states", values)):
        if tensor.dim() != 4 or not tensor.is_floating_point():
            return (
                f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype} is not valid: it must be a floating "
                "point tensor [batch, kv_heads, tokens, head_dim]"
            )
    if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
        return (
            f"key_states {tuple(keys.shape)} and value_states {tuple(values.shape)} differ in batch size or tokens; "
            "both must hold the same new tokens"
        )
    if rows and rows != keys.shape[0]:
        return (
            f"batch size {keys.shape[0]} does not match the {rows} rows held; reset() the cache, or change its batch "
            "with batch_select_indices or batch_repeat_interleave"
        )
    return _against("key_states", states[0], device, keys) or _against("value_states", states[1], device, values)


def _against(name: str, state: TensorState, device: torch.device, tensor: torch.Tensor) -> str:
    scales, held = len(state.spec.static_scales), state.window
    if scales > 1 and scales != tensor.shape[1]:
        return f"{name} has kv_heads={tensor.shape[1]}, the format has {scales} static scales; calibrate it anew"
    if held is None:
        return _without_channels(name, state, tensor.shape[3])
    found = tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device
    right = held.shape[1], held.shape[3], held.dtype, device
    if found == right:
        return ""
    facts = zip(("kv_heads", "head_dim", "dtype", "device"), found, right, strict=True)
    fact, got, expected = next(each for each in facts if each[1] != each[2])
    return (
        f"{name} has {fact}={got}, the cache holds {fact}={expected}; use one cache per model, dtype and "
        "device (cache.to(device) moves it), or reset() it first"
    )


def _without_channels(name: str, state: TensorState, head_dim: int) -> str:
    if state.spec.segments(head_dim):
        return ""
    return (
        f"{name} has head_dim={head_dim}, of which widths={state.spec.widths} keep no channel; give a width above 0 to "
        "more of the 64"
    )
