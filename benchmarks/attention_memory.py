"""Peak extra memory of one decode step of attention over packed codes.

Decision: torch's profiler, because it hears of every allocation and release of the CPU allocator, those of the
buffers of compiled code included (which no dispatch mode sees: they are not made by operators). The peak is the largest
running sum of these events during one call. The registers and stack arrays inside a kernel do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention_op import CONFIGS, Call, Shape, make_past
from hf_kvquant.attention import backends

FORMATS = ("k4v4", "cr4", "cm3")


def peak_bytes(call: Call) -> int:
    """The most that is allocated at once beyond what was there before, during one call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()  # alive until the recording ends, as its caller would keep it
    del kept
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue] (the stub lacks it)
        peak = max(peak, held)
    return peak


def measure(shape: Shape, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes at one length: the peak, and what it is compared with."""
    query, past = make_past(CONFIGS[name], shape, dtype)

    def call() -> torch.Tensor:
        return backends.compiled(query, past, shape.head_dim**-0.5)

    call()
    full = 2 * shape.kv_heads * shape.tokens * shape.head_dim * dtype.itemsize
    return {"peak": peak_bytes(call), "scores": shape.heads * shape.tokens * 4, "full": full}
