"""The recipe in NumPy, float64, one batch row and head at a time: what the cache must read back.

Written from the description (CONTRIBUTING, "The recipe"), with no code of the package: rotations are complex numbers,
the Hadamard matrix comes from scipy, levels are searched in a list.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy import linalg

SINKS, CALIBRATION = 4, 128
STEPS = {1: 1.5956, 2: 0.9954, 3: 0.5862, 4: 0.3351, 5: 0.1881, 6: 0.1040, 8: 0.0310}
GAINS_MIXED = (0.7, 0.8, 0.9, 1.0, 1.12, 1.25, 1.4, 1.6, 2.0)
GAINS_UNIFORM = (0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
Pairs = list[tuple[int, int]]


def nearest(z: np.ndarray, bits: int) -> np.ndarray:
    """Nearest of the 2^bits levels at odd multiples of half a step; 0 without bits."""
    if not bits:
        return np.zeros_like(z)
    levels = (np.arange(2**bits) - (2**bits - 1) / 2) * STEPS[bits]
    return levels[np.abs(z[..., None] - levels).argmin(-1)]


def turn(x: np.ndarray, angles: np.ndarray, pairs: Pairs, inverse: bool = False) -> np.ndarray:
    """Rotate ``x [T, D]`` by ``angles [T, h]``; channels in no pair stay."""
    out = x.copy()
    for index, (first, second) in enumerate(pairs):
        turned = (x[:, first] + 1j * x[:, second]) * np.exp((-1j if inverse else 1j) * angles[:, index])
        out[:, first], out[:, second] = turned.real, turned.imag
    return out


def tied(statistic: np.ndarray, pairs: Pairs) -> np.ndarray:
    out = statistic.copy()
    for first, second in pairs:
        out[[first, second]] = (statistic[first] + statistic[second]) / 2
    return out + 0.01 * out.mean()


def coded(units: np.ndarray, widths: np.ndarray, gains: tuple[float, ...], importance: np.ndarray) -> np.ndarray:
    """Read-back units ``[T, D]`` under the best gain per token; gains are powers of 2^(1/8)."""
    rms = np.sqrt((units**2).mean(-1, keepdims=True))
    best = np.full(len(units), np.inf)
    out = np.zeros_like(units)
    for factor in gains:
        gain = 2 ** (np.round(np.log2(np.maximum(rms * factor, 1e-30)) * 8) / 8)
        found = np.zeros_like(units)
        for bits in set(widths.tolist()):
            chosen = widths == bits
            found[:, chosen] = nearest(units[:, chosen] / gain, bits) * gain
        error = ((found - units) ** 2 * importance).sum(-1)
        better = error < best
        out[better], best = found[better], np.minimum(error, best)
    return out


def statistics(
    keys: np.ndarray, queries: np.ndarray | None, angles: np.ndarray, pairs: Pairs
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Residual and centre ``[T, D]``, variance and query energy ``[D]`` of the calibration tokens."""
    span = slice(SINKS, SINKS + CALIBRATION)
    mean = turn(keys, angles, pairs, inverse=True)[span].mean(0)
    centre = turn(np.broadcast_to(mean, keys.shape), angles, pairs)
    residual = keys - centre
    variance = tied((residual[span] ** 2).mean(0), pairs)
    energy = np.ones(keys.shape[1]) if queries is None else tied((queries[:, span] ** 2).mean((0, 1)), pairs)
    return residual, centre, variance, energy


def mixed_keys(
    keys: np.ndarray,
    queries: np.ndarray | None,
    angles: np.ndarray,
    pairs: Pairs,
    widths: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """Centred keys ``[T, D]`` of static widths; ``queries [R, T, D]`` of the head's group, None: not known."""
    dim = keys.shape[1]
    residual, centre, variance, energy = statistics(keys, queries, angles, pairs)
    seen = np.sqrt(energy * variance)
    edges = np.round(np.cumsum([0, *(count for _, count in widths)]) * dim / 64 + 1e-9).astype(int)
    per_place = np.concatenate(
        [np.full(b - a, bits) for (bits, _), a, b in zip(widths, edges, edges[1:], strict=False)]
    )
    per_channel = np.empty(dim, dtype=int)
    per_channel[np.argsort(-seen.astype(np.float32), kind="stable")] = per_place
    deviation = np.sqrt(variance)
    return keep_sinks(coded(residual / deviation, per_channel, GAINS_MIXED, seen) * deviation + centre, keys)


def rotated(x: np.ndarray, bits: int, mean: np.ndarray | float = 0.0, balance: np.ndarray | float = 1.0) -> np.ndarray:
    """Values, or keys around ``mean [T, D]`` divided by ``balance [D]``: signs by the Rudin-Shapiro sequence, Hadamard
    over the largest power of two that divides D, one gain."""
    dim = x.shape[1]
    size = dim & -dim
    matrix = np.asarray(linalg.block_diag(*[linalg.hadamard(size) / np.sqrt(size)] * (dim // size)))
    signs = np.array([(-1.0) ** sum(a == b == "1" for a, b in pairwise(f"{index:b}")) for index in range(dim)])
    units = (x - mean) / balance * signs @ matrix
    read = coded(units, np.full(dim, bits), GAINS_UNIFORM, np.ones(dim)) @ matrix.T * signs
    return keep_sinks(read * balance + mean, x)


def rotated_keys(keys: np.ndarray, queries: np.ndarray, angles: np.ndarray, pairs: Pairs, bits: int) -> np.ndarray:
    """Centred, balanced and rotated keys ``[T, D]``."""
    _, centre, variance, energy = statistics(keys, queries, angles, pairs)
    return rotated(keys, bits, centre, (variance / energy) ** 0.25)


def keep_sinks(read: np.ndarray, exact: np.ndarray) -> np.ndarray:
    read[:SINKS] = exact[:SINKS]
    return read
