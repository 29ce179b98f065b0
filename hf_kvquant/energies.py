"""What the statistics of keys need of the queries: mean squares of those of each row's calibration tokens.

Decision: kept token by token until the row's statistics are frozen, and summed only then, so that they do not depend on
how the tokens arrived; each row's own calibration tokens and no others, whatever its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hf_kvquant.exact import tree_mean, tree_sum


@dataclass
class QueryEnergies:
    """Energies ``held [B, K, calibration_length, D]``, fp32, of rows that wait for their statistics.

    Attributes:
        calibration_length: tokens per row.
        held: None before the first, and after all rows have their statistics.
        reason: why the queries are not seen; None while they are.
    """

    calibration_length: int
    held: torch.Tensor | None = None
    reason: str | None = None

    def note(
        self,
        read: Callable[[int, int], torch.Tensor | str],
        key_states: torch.Tensor,
        waiting: dict[int, list[int]],
    ) -> None:
        """Keep what the next update, of ``key_states [B, K, q, D]``, brings for the rows that wait.

        Args:
            read: gives the queries ``[B, H, stop - start, D]`` of the new tokens ``start .. stop``, or why there are
                none.
            key_states: the new keys.
            waiting: first calibration token, counted from the first new one, -> row indices.
        """
        for first, rows in waiting.items():
            start, stop = max(first, 0), min(first + self.calibration_length, key_states.shape[2])
            if start < stop and self.reason is None:
                self._keep(read(start, stop), key_states, rows, start - first)

    def _keep(self, queries: torch.Tensor | str, key_states: torch.Tensor, rows: list[int], place: int) -> None:
        """Mean squares over the query heads of each key head, from calibration token ``place`` on."""
        batch, heads, _, head_dim = key_states.shape
        if not isinstance(queries, str) and (queries.shape[1] % heads or queries.shape[3] != head_dim):
            queries = f"queries {tuple(queries.shape)} do not match keys {tuple(key_states.shape)}"
        if isinstance(queries, str):
            self.reason, self.held = queries, None
            return
        if self.held is None:
            self.held = torch.zeros(batch, heads, self.calibration_length, head_dim, device=key_states.device)
        energy = tree_mean(queries[rows].float().unflatten(1, (heads, -1)).square(), 2).squeeze(2)
        self.held[rows, :, place : place + energy.shape[2]] = energy

    def mean(self, rows: slice) -> torch.Tensor | None:
        """``[rows, K, D]`` over the calibration tokens, those with NaN or Inf left out; None where nothing was seen."""
        if self.held is None:
            return None
        seen = self.held[rows]
        finite = seen.isfinite().all(-1, keepdim=True)
        return tree_sum(torch.where(finite, seen, 0.0), 2).squeeze(2) / finite.sum(2).clamp_min(1)

    def forget_if(self, calibrated: Iterable[bool]) -> None:
        """Let go once every row has its statistics."""
        if all(calibrated):
            self.held = None

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.held = None if self.held is None else function(self.held)
