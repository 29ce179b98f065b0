"""The oracle: attention over what the codes stand for, read in full and computed in fp32 with plain operations."""

from __future__ import annotations

import torch

from hf_kvquant.past import Past


def decode(
    query: torch.Tensor,
    past: Past,
    scaling: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    auxiliary: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few new tokens: what every backend is held to.

    Args:
        query: ``[B, H, q, D]``, the newest q tokens of ``past``.
        past: keys and values of the layer, those of the new tokens included.
        scaling: what the scores are multiplied by.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.
        mask: ``[B or 1, 1, q, T]``, bool (True: attend) or additive; None: everything up to the own token.
        auxiliary: ``[H]`` learned sinks, scores of a token without value.

    Returns:
        ``[B, q, H, Dv]`` in the dtype of the query.
    """
    keys, values = past.read(0, torch.float32), past.read(1, torch.float32)
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = query.float() @ keys.transpose(-1, -2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = torch.ones(query.shape[2], past.length, dtype=torch.bool, device=query.device)
    allowed = allowed.tril(past.length - query.shape[2])
    for row in range(query.shape[0]):
        scores[row, :, :, : past.rows[row].padding] = -torch.inf
    if mask is None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask.float()
    if auxiliary is not None:
        column = auxiliary.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : past.length]
    return (weights @ values).transpose(1, 2).to(query.dtype)
