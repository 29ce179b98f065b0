"""What the statistics of keys need of the queries: mean squares of those of each row's calibration tokens.

Decision: kept token by token until the row's statistics are frozen, and summed only then, so that they do not depend on
how the tokens arrived; each row's own calibration tokens and no others, whatever its padding.

They are seen in one of two ways. Attention of ours is handed the queries just after the update, so they are taken from
there (:func:`show`) at no cost. Where the update itself freezes statistics, or attention is not ours, they are read
before it, by a projection of those tokens (``queries.py``). What is awaited stays with the layer; a thread knows only
whose it is, from the update to the end of the module's forward, and a module that attends in another way after all has
them read then (:func:`finish`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvquant.exact import tree_mean, tree_sum
from hf_kvquant.storage import storing

Read = Callable[[int, int], "torch.Tensor | str"]

# Decode steps whose queries are squared at once: the work is all overhead for a single token.
STEPS = 16


@dataclass(frozen=True)
class Wanted:
    """Queries of an update that the statistics wait for.

    Attributes:
        key_states: the new keys ``[B, K, q, D]``.
        waiting: first calibration token, counted from the first new one, -> indices of the rows that wait, and that get
            calibration tokens.
        read: gives the queries ``[B, H, stop - start, D]`` of the new tokens ``start .. stop``, or why there are none.
        module: the attention module that is called, if its attention shows them.
    """

    key_states: torch.Tensor
    waiting: dict[int, list[int]]
    read: Read
    module: torch.nn.Module | None = None


@dataclass
class QueryEnergies:
    """Energies of rows that wait for their statistics.

    Attributes:
        calibration_length: tokens per row.
        reason: why the queries are not seen; None while they are.
        wanted: what the attention call in progress is to show.
    """

    calibration_length: int
    reason: str | None = None
    wanted: Wanted | None = None
    _held: torch.Tensor | None = None
    _steps: dict[tuple[int, ...], tuple[int, list[torch.Tensor]]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"wanted": None}  # a call in progress is no part of a copy

    @property
    def held(self) -> torch.Tensor | None:
        """``[B, K, calibration_length, D]``, fp32, NaN where none were seen; None before the first, and after all rows
        have their statistics."""
        self._square()
        return self._held

    @held.setter
    def held(self, energies: torch.Tensor | None) -> None:
        self._held, self._steps = energies, {}

    def expect(self, wanted: Wanted) -> None:
        """Leave it to the attention of ``wanted.module``, on this thread, to show the queries."""
        self.wanted = wanted
        _thread.expecting = weakref.ref(self)

    def note(self, wanted: Wanted, read: Read) -> None:
        """Keep what the update brings for the rows that wait, as given by ``read``."""
        self.wanted = None
        for first, rows in wanted.waiting.items():
            start, stop = max(first, 0), min(first + self.calibration_length, wanted.key_states.shape[2])
            if self.reason is None:
                self._keep(read(start, stop), wanted.key_states, tuple(rows), start - first)

    @storing
    def _keep(self, queries: torch.Tensor | str, key_states: torch.Tensor, rows: tuple[int, ...], place: int) -> None:
        """Queries of calibration tokens from ``place`` on."""
        batch, heads, new, head_dim = key_states.shape
        if not isinstance(queries, str) and (queries.shape[1] % heads or queries.shape[3] != head_dim):
            queries = f"queries {tuple(queries.shape)} do not match keys {tuple(key_states.shape)}"
        if isinstance(queries, str):
            self.reason, self.held = queries, None
            return
        if self._held is None:
            shape = batch, heads, self.calibration_length, head_dim
            self._held = torch.full(shape, torch.nan, device=key_states.device)
        first, steps = self._steps.get(rows, (place, []))
        if first + len(steps) != place:
            self._square()
            first, steps = place, []
        self._steps[rows] = first, [*steps, queries.detach()]
        if new > 1 or len(steps) + 1 == STEPS:  # what is no decode step may be a view of far more
            self._square()

    @storing
    def _square(self) -> None:
        """Mean squares over the query heads of each key head, of what was kept as queries."""
        steps, self._steps = self._steps, {}
        for rows, (place, queries) in steps.items():
            assert self._held is not None
            own = torch.cat(queries, 2)[list(rows)].float().unflatten(1, (self._held.shape[1], -1))
            energy = tree_mean(own.square(), 2).squeeze(2)
            self._held[list(rows), :, place : place + energy.shape[2]] = energy

    def mean(self, rows: slice) -> torch.Tensor | None:
        """``[rows, K, D]`` over the calibration tokens, those with NaN or Inf left out; None where nothing was seen."""
        if self.held is None:
            return None
        seen = self.held[rows]
        finite = seen.isfinite().all(-1, keepdim=True)
        return tree_sum(torch.where(finite, seen, 0.0), 2).squeeze(2) / finite.sum(2).clamp_min(1)

    def forget_if(self, is_calibrated: bool) -> None:
        """Let go once every row has its statistics."""
        if is_calibrated:
            self.held = None

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.held = None if self.held is None else function(self.held)


class _Thread(threading.local):
    expecting: weakref.ref[QueryEnergies] | None = None


_thread = _Thread()


def begin() -> None:
    """Before a module's forward: what an earlier one, ended by an exception, was to show is not awaited any more."""
    _thread.expecting = None


def show(module: torch.nn.Module, query: torch.Tensor) -> None:
    """Attention of ``module`` is handed ``query [B, H, q, D]``: note it where it is awaited."""
    energies, wanted = _expected(module)
    if energies is None or wanted is None:
        return
    batch, _, new, _ = wanted.key_states.shape
    if query.dim() == 4 and (query.shape[0], query.shape[2]) == (batch, new):
        energies.note(wanted, lambda start, stop: query[:, :, start:stop])


def finish(module: torch.nn.Module) -> None:
    """After a module's forward: read what attention did not show."""
    energies, wanted = _expected(module)
    if energies is not None and wanted is not None:
        energies.note(wanted, wanted.read)
    _thread.expecting = None


def _expected(module: torch.nn.Module) -> tuple[QueryEnergies | None, Wanted | None]:
    """Who waits for the queries of ``module`` on this thread, and for which; None once they are noted."""
    energies = None if _thread.expecting is None else _thread.expecting()
    wanted = None if energies is None else energies.wanted
    return (energies, wanted) if wanted is not None and wanted.module is module else (None, None)
