"""Which bits of which channels each stored plane of a block holds.

Decision: one plane per width, whatever the format. Channels of different bit widths are split into planes of 8, 4, 2
and 1 bits (:mod:`hf_kvquant.packing`), and all parts of one width lie side by side in one plane, so attention over the
codes in torch's operations runs one loop per width (at most four) instead of one per segment; in C++ the two parts of
a code are put together in registers. A plane, with its parts::

    channels of the plane   | bits s .. s+w of channels a..b | bits s' .. s'+w of channels a'..b' | ...

A code is the sum over its planes of ``part << shift``, so a dot product with codes is the sum of the dot products with
its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvquant.formats import NumberFormat
from hf_kvquant.packing import PLANE_WIDTHS
from hf_kvquant.spec import TensorSpec


@dataclass(frozen=True)
class Part:
    """Bits ``shift .. shift + width`` of the channels ``start .. stop`` (stored order), at channel ``place`` of a
    plane."""

    fmt: NumberFormat
    start: int
    stop: int
    shift: int
    place: int

    @property
    def span(self) -> slice:
        """Channels of the plane."""
        return slice(self.place, self.place + self.stop - self.start)


@dataclass(frozen=True)
class Plane:
    """Codes of ``width`` bits of the channels of ``parts``, side by side."""

    width: int
    parts: tuple[Part, ...]

    @property
    def channels(self) -> int:
        return self.parts[-1].span.stop


def planes_of(spec: TensorSpec, head_dim: int) -> tuple[Plane, ...]:
    """The planes of a lossy ``spec``, widest first."""
    parts: dict[int, list[Part]] = {}
    for fmt, start, stop in spec.segments(head_dim):
        shift = 0
        for width in PLANE_WIDTHS[fmt.bits]:
            held = parts.setdefault(width, [])
            held.append(Part(fmt, start, stop, shift, held[-1].span.stop if held else 0))
            shift += width
    return tuple(Plane(width, tuple(parts[width])) for width in sorted(parts, reverse=True))
