"""Scores of a query against packed keys: see :mod:`hf_kvquant.attention.codes` for the algebra.

Decision: a code in several planes is the sum of its parts, so every plane is a loop of its own, and full vectors of
tokens are read from each. Only keys stored before RoPE are dequantized, in registers, because their rotation differs
from token to token.
"""

from __future__ import annotations

import torch

from hf_kvquant.attention.codes import Codes, Run, floats, joint_floats, offset_of, total, written
from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.planes import Plane
from hf_kvquant.rotary import RotaryLayout
from hf_kvquant.spec import TensorSpec

# Numbers in a vector register (AVX-512, fp32).
VECTOR = 16


def key_scores(query: torch.Tensor, blocks: QuantizedBlocks, spec: TensorSpec, length: int) -> torch.Tensor:
    """Scores of every cached token.

    Args:
        query: ``[B, K, R, D]``, fp32, folded: as it meets the channels in stored order.
        blocks: keys ``[B, K, n, C, G*w/8]`` and their metadata.
        spec: how they are stored.
        length: G.

    Returns:
        ``[B, K, R, n, G]``, fp32.
    """
    heads = query.unbind(2)
    if spec.number_format.lossless:
        keys = blocks.planes[0].float()
        return torch.stack([(keys * head[:, :, None, None]).sum(-1) for head in heads], 2)
    codes = Codes.of(blocks, spec, query.shape[-1], length).kept()
    per_channel = len(codes.channel_groups) == codes.head_dim and spec.tokens_per_group > 1
    scores = _folded_scores if per_channel else _scaled_scores
    return torch.stack([scores(head, codes) for head in heads], 2)


def _folded_scores(head: torch.Tensor, codes: Codes) -> torch.Tensor:
    """One scale per channel: it goes into the query ``[B, K, D]``."""
    group_size, spread = codes.spec.tokens_per_group, head[:, :, None, None]
    weights = written(spread * codes.scale)  # [B, K, n, G/g, D]
    scores = []
    for plane, stored in zip(codes.layout, codes.planes, strict=True):
        pieces = [
            (floats(plane, stored, run, -1) * weights[:, :, :, run.group, :, None]).sum(-2)
            for (run,) in codes.runs(plane.width, tokens_per_group=group_size)
        ]
        scores.append(torch.cat(pieces, -1) * (codes.fmt.step * 2 ** plane.parts[0].shift))
    constant = weights.sum(-1) * -codes.offset
    if codes.zero is not None:
        constant = constant + (spread * codes.zero).sum(-1)
    return total(scores) + _per_token(constant, group_size)


def _scaled_scores(head: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Scales of tokens: applied to the sum over the channels that share them."""
    spec, scores = codes.spec, []
    for group, channels in enumerate(codes.channel_groups):
        dots = [
            _plane_dots(_plane_query(head, plane, channels), stored if spec.widths else stored[..., channels, :], plane)
            for plane, stored in zip(codes.layout, codes.planes, strict=True)
        ]
        scale = codes.scale[..., min(group, codes.scale.shape[-1] - 1)]
        score = (total(dots) - _offset_term(head, codes, channels)) * _per_token(scale, spec.tokens_per_group)
        if codes.zero is not None:
            mass = head[..., channels].sum(-1)[:, :, None, None]
            score = score + mass * _per_token(codes.zero[..., group], spec.tokens_per_group)
        scores.append(score)
    return total(scores)


def _per_token(metadata: torch.Tensor, tokens_per_group: int) -> torch.Tensor:
    """``[..., G/g]`` -> ``[..., G]``, or 1 where a block is one group."""
    several = tokens_per_group > 1 and metadata.shape[-1] > 1
    return metadata.repeat_interleave(tokens_per_group, -1) if several else metadata


def _plane_dots(weights: torch.Tensor, stored: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Weights ``[B, K, C]`` times the codes of a plane ``[B, K, n, C, G*w/8]``: ``[B, K, n, G]``."""
    rows = stored.shape[-1]
    # A plane of one bit has runs of 8 tokens, half a vector: two channels at a time fill it.
    lanes = VECTOR // rows if rows < VECTOR and stored.shape[-2] % (VECTOR // rows) == 0 else 1
    spread = weights[:, :, None, :, None]
    if lanes > 1:
        stored = stored.flatten(-2).unflatten(-1, (-1, lanes * rows))
        spread = written(weights[..., None].expand(-1, -1, -1, rows)).flatten(-2).unflatten(-1, (-1, lanes * rows))
        spread = spread[:, :, None]
    pieces = []
    for index in range(8 // plane.width):
        run = Run(index * rows, lanes * rows, 0, index * plane.width, 0)
        dots = (floats(plane, stored, run, -1) * spread).sum(-2)
        pieces.append(dots.unflatten(-1, (lanes, rows)).sum(-2) if lanes > 1 else dots)
    return torch.cat(pieces, -1)


def _plane_query(head: torch.Tensor, plane: Plane, channels: slice) -> torch.Tensor:
    """The query ``[B, K, C]`` as it meets those codes of a plane that belong to ``channels``."""
    parts = [
        head[..., max(part.start, channels.start) : min(part.stop, channels.stop)] * (part.fmt.step * 2**part.shift)
        for part in plane.parts
    ]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _offset_term(head: torch.Tensor, codes: Codes, channels: slice) -> torch.Tensor:
    """``[B, K, 1, 1]``: the part of the dot product that the offsets of the codes make."""
    terms = [
        head[..., max(start, channels.start) : min(stop, channels.stop)].sum(-1) * offset_of(fmt, codes.spec)
        for fmt, start, stop in codes.spec.segments(codes.head_dim)
    ]
    return total(terms)[:, :, None, None]


def rotated_scores(
    query: torch.Tensor,
    blocks: QuantizedBlocks,
    spec: TensorSpec,
    length: int,
    layout: RotaryLayout,
    tables: tuple[torch.Tensor, torch.Tensor],
    mean: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of keys stored before RoPE: each is dequantized and rotated once for all its query heads.

    Args:
        query, blocks, spec, length: as for :func:`key_scores`; the query is the delivered one.
        layout: of the rotation.
        tables: cos and sin ``[B or 1, n, h, G]`` of the cached tokens.
        mean: ``[B, K, D]`` that was subtracted from the keys, or None.

    Returns:
        ``[B, K, R, n, G]``, fp32.
    """
    codes = Codes.of(blocks, spec, query.shape[-1], length)
    cos, sin = (table.float()[:, None] for table in tables)  # [B or 1, 1, n, h, G]
    (first_queries, second_queries), rest_queries = layout.parts(query), layout.rest(query)
    pieces: list[torch.Tensor] = []
    widths = [plane.width for plane in codes.layout]
    for runs in codes.runs(*widths, tokens_per_group=spec.tokens_per_group):
        keys = _dequantized(joint_floats(codes.layout, codes.planes, runs, -1), codes, runs[0])
        if mean is not None:
            keys = keys + mean[:, :, None, :, None]
        turned = _turned(keys, layout, cos[..., runs[0].tokens], sin[..., runs[0].tokens])
        rest = layout.rest(keys.transpose(-1, -2)).transpose(-1, -2)
        heads = []
        for index in range(query.shape[2]):
            one, other = (each[:, :, index, None, :, None] for each in (first_queries, second_queries))
            score = (turned[0] * one + turned[1] * other).sum(-2)
            if rest.shape[-2]:
                score = score + (rest * rest_queries[:, :, index, None, :, None]).sum(-2)
            heads.append(score)
        pieces.append(torch.stack(heads, 2))
    return torch.cat(pieces, -1)


def _dequantized(floats: torch.Tensor, codes: Codes, run: Run) -> torch.Tensor:
    """Codes ``[B, K, n, D, tokens]`` of a run -> keys."""
    spec = codes.spec
    chosen = run.tokens if spec.tokens_per_group == 1 else slice(run.group, run.group + 1)

    def spread(metadata: torch.Tensor) -> torch.Tensor:
        own = metadata if metadata.shape[-2] == 1 else metadata[..., chosen, :]
        several = 1 < metadata.shape[-1] < codes.head_dim
        each = own.repeat_interleave(spec.channels_per_group(codes.head_dim), -1) if several else own
        return each.transpose(-1, -2)

    keys = (floats * codes.fmt.step - codes.offset) * spread(codes.scale)
    return keys if codes.zero is None else keys + spread(codes.zero)


def _turned(
    keys: torch.Tensor, layout: RotaryLayout, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and second channels of all pairs of keys ``[..., D, tokens]``, rotated."""
    first, second = (part.transpose(-1, -2) for part in layout.parts(keys.transpose(-1, -2)))
    sin = sin * layout.sign
    return first * cos - second * sin, second * cos + first * sin
