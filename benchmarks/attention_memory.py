"""Peak extra memory of one decode step of attention over packed codes.

Decision: the high-water mark that Linux keeps of a process's resident memory, because it sees every allocation: those
of torch, of Python, and of the C++ code, which torch's profiler does not hear of. What the allocator holds back is
given back before, and the median of several calls counts; the kernel's count is exact to some hundred kilobytes.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_op import CONFIGS, Call, Shape, make_past
from hf_kvquant.attention import backends

FORMATS = ("k4v4", "cr4", "cm3")
CALLS = 7


def peak_bytes(call: Call) -> int:
    """The most that is held at once beyond what was there before, during one call: the median of several."""
    return int(statistics.median(_peak(call) for _ in range(CALLS)))


def _peak(call: Call) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is held now
    before = _status("VmHWM")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(shape: Shape, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes at one length: the peak, and what it is compared with."""
    query, past = make_past(CONFIGS[name], shape, dtype)

    def call() -> torch.Tensor:
        return backends.native(query, past, shape.head_dim**-0.5)

    call()
    full = 2 * shape.kv_heads * shape.tokens * shape.head_dim * dtype.itemsize
    return {"peak": peak_bytes(call), "scores": shape.heads * shape.tokens * 4, "full": full}
