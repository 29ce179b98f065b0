"""Arithmetic whose rounding does not depend on the shape it is done in.

Decision: a row must get the same codes alone and in a batch, in one prefill and token by token, so everything that
decides a code is built from single additions, multiplications, divisions and square roots, element by element. torch's
own sums and matrix products add in an order that depends on shape and threads, and its exponentials round differently
in the vectorized body and the tail of a tensor (both seen in tests, in the last bit; one such bit moves a code at a
tie).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along ``dim``, which is kept at size 1: the second half is added onto the first until one element is left."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        summed = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([summed, x.narrow(dim, size - 1, 1)], dim) if size % 2 else summed
    return x


def tree_mean(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Mean along ``dim``, which is kept at size 1."""
    return tree_sum(x, dim) / x.shape[dim]


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2**exponent`` in fp32, of integers from -126 to 127: written as bits."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def walsh_hadamard(x: torch.Tensor) -> torch.Tensor:
    """``x @ H`` for the normalized Sylvester matrix H, block-diagonal over the largest power of two that divides the
    last dimension."""
    shape, size = x.shape, x.shape[-1] & -x.shape[-1]
    half = 1
    while half < size:
        pairs = x.unflatten(-1, (-1, 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2).view(shape)
        half *= 2
    return x / size**0.5


_CONSTANTS: dict[tuple[Hashable, torch.device], torch.Tensor] = {}


def constant(key: Hashable, device: torch.device, build: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``build()`` on ``device``, made once per process: not within inference mode, whose tensors other modes refuse."""
    if (key, device) not in _CONSTANTS:
        with torch.inference_mode(False):
            _CONSTANTS[key, device] = build().to(device)
    return _CONSTANTS[key, device]


def flat_signs(size: int, device: torch.device) -> torch.Tensor:
    """The Rudin-Shapiro sequence ``[size]`` of 1 and -1: minus for an odd number of neighbouring ones in the binary
    index. It is as unlike every row of a Hadamard matrix as a sequence of signs can be (a quadratic form), so a vector
    along one of those rows, or with an offset common to all channels, is spread evenly as well."""

    def build() -> torch.Tensor:
        return torch.tensor([1.0 - 2 * ((index & index >> 1).bit_count() % 2) for index in range(size)])

    return constant(("signs", size), device, build)


def hadamard_matrix(size: int, device: torch.device) -> torch.Tensor:
    """The normalized Sylvester matrix ``[size, size]``; size a power of two."""
    return constant(("hadamard", size), device, lambda: walsh_hadamard(torch.eye(size)))
