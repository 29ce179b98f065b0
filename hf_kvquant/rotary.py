"""Rotary position embeddings (RoPE, Su et al. 2021, arXiv 2104.09864) as the cache sees them: layout, tables, rotation.

Decision: keys arrive rotated and are *un-rotated* in fp32 when their block closes; reading rotates them again. The
angles are never
recomputed: cos and sin are kept per token as the model applied them, because dynamic NTK and longrope leave
old keys on the frequencies that wrote them. One table serves all layers that were handed the same cos and sin object in
a forward (one per model as a rule, two where local and global layers differ). Tables hold half the width, one value
per pair of channels, and one row where all rows agree.

The inverse of a pair ``(a', b') = (a c - b s, b c + a s)`` is ``((a' c + b' s) / n, (b' c - a' s) / n)`` with
``n = c^2 + s^2``: dividing by n makes it exact for tables that carry an attention scaling (yarn, longrope) or were
rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

NO_ROPE = "no rotation"
PositionEmbeddings = tuple[torch.Tensor, torch.Tensor] | torch.Tensor


@dataclass(frozen=True)
class RotaryLayout:
    """How a module rotates the tensor it hands to the cache.

    Attributes:
        slot: "key" or "value": the argument of ``update`` that carries the rotation (MLA keeps it in the values).
        pairing: "half" pairs channel i with i + h, "interleaved" 2i with 2i + 1, within the rotated channels.
        pairs: h, the number of rotated pairs.
        offset: first rotated channel.
        sign: 1, or -1 where the model rotates the other way.
        expansion: how the model's tables hold one angle per pair: "halves" (twice, one after the other), "each"
            (each twice), "single" (once), "complex" (cos + i sin, once).
        swapped: the model hands (sin, cos) instead of (cos, sin).
    """

    slot: str
    pairing: str
    pairs: int
    offset: int
    sign: int
    expansion: str
    swapped: bool

    def tables(self, position_embeddings: PositionEmbeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model passed -> ``cos, sin [B or 1, q, h]`` in its dtype."""
        if isinstance(position_embeddings, torch.Tensor):
            return position_embeddings.real, position_embeddings.imag
        cos, sin = reversed(position_embeddings) if self.swapped else position_embeddings
        if self.expansion == "halves":
            return cos[..., : self.pairs], sin[..., : self.pairs]
        if self.expansion == "each":
            return cos[..., ::2], sin[..., ::2]
        return cos, sin

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and second channels of all pairs of ``x [..., D]``."""
        rotated = x[..., self.offset : self.offset + 2 * self.pairs]
        if self.pairing == "half":
            return rotated[..., : self.pairs], rotated[..., self.pairs :]
        return rotated[..., ::2], rotated[..., 1::2]

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        """The channels of ``x [..., D]`` that are not rotated."""
        stop = self.offset + 2 * self.pairs
        if not self.offset:
            return x[..., stop:]
        return torch.cat([x[..., : self.offset], x[..., stop:]], -1)

    def dot_terms(self, q: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the dot product of q with rotated x is made of: ``q . R x = along . cos + across . sin + rest``.

        Args:
            q, x: ``[..., D]``, broadcastable.

        Returns:
            ``along, across [..., h]`` and ``rest [..., 1]``.
        """
        (qa, qb), (xa, xb) = self.parts(q), self.parts(x)
        rest = (self.rest(q) * self.rest(x)).sum(-1, keepdim=True)
        return qa * xa + qb * xb, (qb * xa - qa * xb) * self.sign, rest

    def rotate_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate fp32 ``x [..., T, D]`` in place by fp32 ``cos, sin [..., T, h]``."""
        first, second = self.parts(x)
        sin = sin * self.sign
        turned = first * cos - second * sin
        second.mul_(cos).add_(first * sin)
        first.copy_(turned)

    def unrotate_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Inverse of :meth:`rotate_`; a pair whose cos and sin are both zero is left at zero."""
        norm = cos.square() + sin.square()
        inverse = torch.where(norm > 0, 1.0 / norm, torch.zeros_like(norm))
        self.rotate_(x, cos * inverse, -sin * inverse)


@dataclass
class RotaryTable:
    """cos and sin of every cached token, ``[B or 1, n, h, G]``: in blocks as keys are, grown in place by an eighth.

    Token t is at place ``t + shift`` of the blocks, shift chosen so that the closed blocks of a row are blocks of the
    table (:meth:`blocks`). Rejected: one row of tokens per pair, ``[h, T]``. A loop over tokens then reads 2 h streams
    that lie far apart, which cost 17 to 35 of 140 ms in a decode step of SmolLM2 at 16,384 tokens (throw-away
    measurement).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    length: int = 0
    source: int = (
        0  # id of the object last appended: layers of one forward that are handed the same one share the table
    )
    shift: int = 0

    @classmethod
    def empty_like(cls, cos: torch.Tensor, source: int, block_length: int) -> RotaryTable:
        """For tables like ``cos [..., h]``, of blocks of ``block_length`` tokens."""
        empty = cos.new_empty(1, 0, cos.shape[-1], block_length)
        return cls(empty, empty, source=source)

    @property
    def block_length(self) -> int:
        return self.cos.shape[3]

    def append(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Add the tables ``[B or 1, q, h]`` of the next q tokens; rows that agree are kept once."""
        if cos.shape[0] > 1 and self.cos.shape[0] == 1:
            if all(torch.equal(table, table[:1].expand_as(table)) for table in (cos, sin)):
                cos, sin = cos[:1], sin[:1]
            else:
                rows = cos.shape[0]
                self.apply(lambda table: table.expand(rows, -1, -1, -1).clone())
        end = self.length + cos.shape[1]
        needed, held = -(-(end + self.shift) // self.block_length), self.cos.shape[1]
        if needed > held:
            capacity = needed if not self.length else max(needed, held + held // 8)
            self.apply(lambda table: _resized(table, capacity))
        blocks, slots = self._places(torch.arange(self.length, end, device=self.cos.device))
        for table, new in ((self.cos, cos), (self.sin, sin)):
            table[:, blocks, :, slots] = new.transpose(0, 1).to(table.dtype)
        self.length = end

    def blocks(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``cos, sin [B or 1, count, h, G]`` of the tokens from ``start`` on; see :meth:`align`."""
        first = (start + self.shift) // self.block_length
        return self.cos[:, first : first + count], self.sin[:, first : first + count]

    def is_aligned(self, start: int) -> bool:
        """Whether a block of the table begins at token ``start``."""
        return (start + self.shift) % self.block_length == 0

    def align(self, start: int) -> None:
        """Move all tokens to where a block begins at token ``start``."""
        cos, sin = self.tokens(0, self.length)
        self.cos, self.sin = (each[:, :0] for each in (self.cos, self.sin))
        self.shift, self.length = -start % self.block_length, 0
        self.append(cos, sin)

    def tokens(self, start: int, end: int, rows: slice | list[int] = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos, sin [rows or 1, end - start, h]`` of the tokens ``start .. end``."""
        size = self.block_length
        first, offset = (start + self.shift) // size, (start + self.shift) % size
        last = -(-(end + self.shift) // size)
        chosen = slice(None) if self.cos.shape[0] == 1 else rows  # before the copy: rows are read group by group
        spans = (table[chosen, first:last].transpose(2, 3).flatten(1, 2) for table in (self.cos, self.sin))
        cos, sin = (span[:, offset : offset + end - start] for span in spans)
        return cos, sin

    def gathered(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos, sin [B, T, h]`` of tokens ``[B, T]``."""
        blocks, slots = self._places(positions)
        rows = torch.arange(self.cos.shape[0], device=positions.device)[:, None]
        return self.cos[rows, blocks, :, slots], self.sin[rows, blocks, :, slots]

    def _places(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = positions + self.shift
        return places.div(self.block_length, rounding_mode="floor"), places % self.block_length

    def select(self, choose: Callable[[int], torch.Tensor]) -> None:
        """Keep the rows ``choose(batch size)``; one common row stays common."""
        if self.cos.shape[0] > 1:
            rows = choose(self.cos.shape[0])
            self.apply(lambda table: table.index_select(0, rows.to(table.device)))

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.cos, self.sin = function(self.cos), function(self.sin)


@dataclass
class LayerRotary:
    """The rotation of one layer: its layout and the table that it shares with its group."""

    layout: RotaryLayout
    table: RotaryTable

    def rotate_(self, x: torch.Tensor, rows: slice | list[int], start: int) -> None:
        """Rotate fp32 ``x [rows, K, tokens, D]``, the cached tokens from ``start`` on, in place."""
        self.layout.rotate_(x, *self._tables(rows, start, x.shape[2]))

    def unrotate_(self, x: torch.Tensor, rows: slice | list[int], start: int) -> None:
        self.layout.unrotate_(x, *self._tables(rows, start, x.shape[2]))

    def _tables(self, rows: slice | list[int], start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 ``cos, sin [rows or 1, 1, count, h]`` of the tokens from ``start`` on."""
        cos, sin = (each[:, None].to(torch.float32) for each in self.table.tokens(start, start + count, rows))
        return cos, sin


@dataclass
class Pending:
    """What a hook saw of the attention call in progress; one is made per layer and step, so it works out nothing.

    Attributes:
        layout: how the module rotates; None: not at all, or not to be seen, for the reason given.
        reason: why there is no layout.
        queries: gives the queries ``[B, H, stop - start, D]`` of the new tokens ``start .. stop``, or why they are not
            seen.
        embeddings: what the module rotates by; None where there is no layout.
        source: identifies them: layers of one forward that share it are one group.
        attends: the module, if it attends through our attention interface, which takes handles for keys and values and
            shows the queries.
    """

    layout: RotaryLayout | None
    reason: str
    queries: Callable[[int, int], torch.Tensor | str]
    embeddings: PositionEmbeddings | None = None
    source: int = 0
    attends: torch.nn.Module | None = None

    @classmethod
    def of(
        cls,
        layout: RotaryLayout,
        position_embeddings: PositionEmbeddings,
        queries: Callable[[int, int], torch.Tensor | str],
        attends: torch.nn.Module | None = None,
    ) -> Pending:
        first = position_embeddings[0] if isinstance(position_embeddings, tuple) else position_embeddings
        return cls(layout, "", queries, position_embeddings, id(first), attends)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos, sin [B or 1, q, h]`` of the new tokens; only where there is a layout."""
        assert self.layout is not None
        assert self.embeddings is not None
        return self.layout.tables(self.embeddings)


@dataclass
class RotaryTables:
    """The tables of a cache, one per group of layers."""

    tables: list[RotaryTable] = field(default_factory=list)

    def join(self, pending: Pending, new_tokens: int, block_length: int) -> LayerRotary:
        """Rotation of a layer that is about to get its first tokens: with the table of its group, or a new one."""
        assert pending.layout is not None
        for table in self.tables:
            same = table.source == pending.source and table.block_length == block_length
            if same and table.length == new_tokens:
                return LayerRotary(pending.layout, table)
        self.tables.append(RotaryTable.empty_like(pending.tables[0], pending.source, block_length))
        return LayerRotary(pending.layout, self.tables[-1])

    def crop(self, removed: int) -> None:
        """Forget the newest ``removed`` tokens; a table without tokens is dropped."""
        for table in self.tables:
            table.length = max(0, table.length - removed)
        self.tables = [table for table in self.tables if table.length]

    def select(self, choose: Callable[[int], torch.Tensor]) -> None:
        """Keep the batch rows ``choose(batch size)``."""
        for table in self.tables:
            table.select(choose)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for table in self.tables:
            table.apply(function)


def _resized(table: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = table.new_zeros(table.shape[0], capacity, *table.shape[2:])
    larger[:, : table.shape[1]] = table
    return larger
