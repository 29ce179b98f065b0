"""Left padding: how many tokens at the start of each batch row are none of the row's own.

Padding must not enter a quantization group, and a row must get the codes it would get alone, so a layer needs the
count per row before the first block closes. Three sources, in this order:

1. ``cache.set_padding(attention_mask)``: explicit, works for every model, costs one line;
2. ``position_ids`` that transformers >= 5.24 models hand to ``update`` inside their keyword arguments: nothing to do,
   costs one comparison of ``[B, q]`` integers (and one device synchronization) in the first forward of a sequence,
   none later;
3. neither: rows are taken as unpadded.

Rejected: recognising padding by content, which cannot be right for every model; and reading the mask out of the
caller's frame.
"""

from __future__ import annotations

from typing import Any

import torch


def position_ids_in(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The ``[B, q]`` position ids among the keyword arguments of ``Cache.update``, if the model passes them."""
    inner = kwargs.get("kwargs")
    found = inner.get("position_ids") if isinstance(inner, dict) else kwargs.get("position_ids")
    return found if isinstance(found, torch.Tensor) and found.dim() == 2 else None


def from_position_ids(position_ids: torch.Tensor, batch_size: int, past_length: int) -> list[int] | None:
    """Padded tokens per row, as ``generate`` numbers them: a constant 0 or 1 over the padding, then 0, 1, 2, ...

    Args:
        position_ids: ``[B, q]`` or ``[1, q]`` for the ``q`` tokens that follow ``past_length`` cached ones, all
            padding so far.

    Returns:
        Counts per row over past and new tokens; None where the numbering is another one (packed or custom positions).
        A chunk that holds nothing but padding ends in one token that the next chunk decides: it is not counted yet.
    """
    ids = position_ids.cpu().expand(batch_size, -1)
    total = past_length + ids.shape[1]
    constant = (ids == ids[:, :1]).all(1) & (ids[:, 0] <= 1) & (ids.shape[1] > 1)
    padding = torch.where(constant, total - 1, total - 1 - ids[:, -1])
    expected = torch.arange(past_length, total) - padding[:, None]
    regular = torch.where(expected >= 0, ids == expected, (ids == ids[:, :1]) & (ids <= 1)).all(1) | constant
    if not bool((regular & (padding >= 0)).all()):
        return None
    return padding.tolist()


def from_attention_mask(attention_mask: torch.Tensor) -> list[int]:
    """Padded tokens per row of a ``[B, T]`` mask (1 = real token); ValueError unless all zeros stand on the left."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise ValueError(
            f"attention_mask={shape} is not valid: it must be a tensor [batch, tokens], as the tokenizer returns it"
        )
    real = attention_mask.cpu() != 0
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        row = int((real[:, :-1] & ~real[:, 1:]).any(1).nonzero()[0])
        raise ValueError(
            f"attention_mask row {row} has zeros after ones: only left padding can be kept out of the groups; "
            "tokenize with padding_side='left'"
        )
    return (~real).sum(1).tolist()
