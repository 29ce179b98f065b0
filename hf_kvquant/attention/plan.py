"""What one decode step of attention is compiled for, and the tensors it takes.

Decision: everything that changes the code is a field of :class:`Plan`, hashable; everything that changes from step to
step (blocks, recent tokens, batch) is a size of a tensor. One plan is one compiled function, whatever the length.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_kvquant.formats import NumberFormat
from hf_kvquant.past import Past
from hf_kvquant.rotary import RotaryLayout, RotaryTable
from hf_kvquant.spec import TensorSpec
from hf_kvquant.storage import TensorState, storing

# More groups of channels per token than this would unroll into as many loops.
MAX_CHANNEL_GROUPS = 8
_align = storing(RotaryTable.align)
_PLANS: dict[Plan, Plan] = {}


@dataclass(frozen=True)
class Plan:
    """One kind of decode step.

    Attributes:
        key, value: how the closed blocks are stored.
        head_dims: of keys and values.
        heads: K.
        repeats: R, the query heads of a KV head.
        block_length: G.
        layout: the rotation of the keys; None where they have none, or it is not known.
        stores_raw: keys are stored before that rotation.
        sinks: the cache holds sinks.
        masked: an additive mask is given.
        auxiliary: learned attention sinks (``s_aux``) are given.
        scaling, softcap: of the scores; softcap 0 for none.
        formats: what the names in ``key`` and ``value`` stand for; one may be added anew with other levels.
    """

    key: TensorSpec
    value: TensorSpec
    head_dims: tuple[int, int]
    heads: int
    repeats: int
    block_length: int
    layout: RotaryLayout | None
    stores_raw: bool
    sinks: bool
    masked: bool
    auxiliary: bool
    scaling: float
    softcap: float
    formats: tuple[NumberFormat, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def turns_centre(self) -> bool:
        """Whether the centre of the keys is rotated to each token."""
        return self.key.center == "rope" and self.layout is not None and not self.stores_raw


def refusal(past: Past) -> str:
    """Why the codes of ``past`` cannot be attended to directly; empty if they can."""
    if not past.block_count:
        return "no block is closed yet"
    plans = past.states[0].plans
    if "refusal" not in plans:
        plans["refusal"] = _refusal(past)
    return plans["refusal"]


def _refusal(past: Past) -> str:
    """Of what does not change while a layer holds tokens."""
    key, value = past.states
    if value.rotary is not None:
        return "the model rotates its values"
    if key.unrotated is not None:
        if key.spec.number_format.lossless:
            return "lossless keys before RoPE"
        if key.spec.normalize or key.spec.rotation:
            return "keys before RoPE with channel scales or a Hadamard rotation"
    for state in (key, value):
        if state.spec.number_format.levels:
            return "a format with levels of its own"
        channels = past.recent[0 if state is key else 1][-1].shape[3]
        if state.spec.axis == "token" and channels // state.spec.channels_per_group(channels) > MAX_CHANNEL_GROUPS:
            return f"more than {MAX_CHANNEL_GROUPS} groups of channels per token"
    return ""


def plan_of(past: Past, query_heads: int, scaling: float, softcap: float, masked: bool, auxiliary: bool) -> Plan:
    """The plan of one step with ``past``; equal plans are one object, made once per layer and kind of step."""
    key = past.states[0]
    kind = (
        query_heads,
        scaling,
        softcap,
        masked or not past.is_regular,
        auxiliary,
        key.rotary is None,
        key.sinks is None,
    )
    if kind not in key.plans:
        plan = _new_plan(past, *kind[:5])
        key.plans[kind] = _PLANS.setdefault(plan, plan)
    return key.plans[kind]


def _new_plan(past: Past, query_heads: int, scaling: float, softcap: float, masked: bool, auxiliary: bool) -> Plan:
    key, value = past.states
    keys, values = past.recent[0][-1], past.recent[1][-1]
    return Plan(
        key=key.spec,
        value=value.spec,
        head_dims=(keys.shape[3], values.shape[3]),
        heads=keys.shape[1],
        repeats=query_heads // keys.shape[1],
        block_length=past.block_length,
        layout=None if key.rotary is None else key.rotary.layout,
        stores_raw=key.unrotated is not None,
        sinks=key.sinks is not None,
        masked=masked,
        auxiliary=auxiliary,
        scaling=scaling,
        softcap=softcap,
        formats=tuple(
            fmt for spec, each in ((key.spec, keys), (value.spec, values)) for fmt, *_ in spec.segments(each.shape[3])
        ),
    )


class Held:
    """The tensors of a layer that decode steps read, but those that each step brings: the same object until a block
    closes or storage changes, so that what is derived from it need not be derived in each step.

    Attributes:
        tensors: by name.
        call: of :mod:`hf_kvquant.attention.native`, prepared for them.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], parts: list[Any]):
        self.tensors, self._parts = tensors, parts
        self.call: Any = None

    def is_of(self, parts: list[Any]) -> bool:
        """Whether it was made of the very same ``parts``."""
        return len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))


def held_of(past: Past, plan: Plan) -> Held:
    """What the layer holds for a step of this plan."""
    states, count = past.states, past.block_count
    parts: list[Any] = [plan]
    for state in states:
        parts += state.packed.views(count), state.tables, state.sinks
    angles = _shared_angles(past) if past.is_regular and (plan.stores_raw or plan.turns_centre) else None
    if angles is not None:
        parts += angles.cos, angles.sin
    known = states[0].plans.get("held")
    if known is None or not known.is_of(parts):
        tensors = _held_tensors(states, count)
        if angles is not None:
            tensors["cos"], tensors["sin"] = angles.blocks(past.rows[0].padding + past.sink_length, count)
        known = states[0].plans["held"] = Held(tensors, parts)
    return known


def _held_tensors(states: tuple[TensorState, TensorState], count: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for state, name in zip(states, ("key", "value"), strict=True):
        found |= {f"{name}.{part}": tensor for part, tensor in state.packed.views(count).items()}
        if state.tables is not None:
            used = {part: each for part, each in state.tables.named().items() if part != "importance"}
            found |= {f"{name}.{part}": tensor for part, tensor in used.items()}
        if state.sinks is not None:
            found[f"{name}.sinks"] = state.sinks
    return found


def tensors_of(past: Past, plan: Plan, recent: int) -> dict[str, torch.Tensor]:
    """What a step reads beside what the layer holds, by name; ``recent`` tokens of the window are looked at."""
    found: dict[str, torch.Tensor] = {}
    for slot, name in enumerate(("key", "value")):
        tokens = past.recent[slot][-1]
        found[f"{name}.recent"] = tokens if tokens.shape[2] == recent else tokens[:, :, :recent]
    if (plan.stores_raw or plan.turns_centre) and not past.is_regular:
        found["cos"], found["sin"] = _own_angles(past)
    return found


def _shared_angles(past: Past) -> RotaryTable:
    """The table of cos and sin, of whose blocks one begins with the first closed block of the rows, which are laid out
    alike."""
    rotary, start = past.states[0].rotary, past.rows[0].padding + past.sink_length
    assert rotary is not None
    if not rotary.table.is_aligned(start):
        _align(rotary.table, start)
    return rotary.table


def _own_angles(past: Past) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[B, n, h, G]`` of the tokens in the closed blocks of each row."""
    rotary, length, count = past.states[0].rotary, past.block_length, past.block_count
    assert rotary is not None
    table = rotary.table
    # A block more than needed, so that the result is a view with room behind it, as what is held is.
    positions = block_positions(past, count, table.cos.device).clamp_max(table.length - 1)
    gathered = table.gathered(torch.cat([positions, positions[:, -length:]], 1))
    cos, sin = (each.unflatten(1, (-1, length)).transpose(2, 3).contiguous()[:, :count] for each in gathered)
    return cos, sin


def block_positions(past: Past, count: int, device: torch.device) -> torch.Tensor:
    """Positions ``[B, count * G]`` of the tokens in the first ``count`` blocks of each row. A crop may have shortened a
    block that others follow; what it holds beyond its tokens, and blocks a row does not have, get any position."""
    starts = []
    for row in past.rows:
        held = itertools.accumulate(row.blocks[: count - 1], initial=row.padding + past.sink_length)
        own = list(held)
        starts.append(own + own[-1:] * (count - len(own)))
    return (torch.tensor(starts, device=device)[..., None] + torch.arange(past.block_length, device=device)).flatten(1)


def additive_masks(past: Past, mask: torch.Tensor | None, recent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the scores, 0 or a large negative number.

    Args:
        past: of this call.
        mask: ``[B or 1, T]`` of one query token, bool (True: attend) or additive; None: attend to everything.
        recent: tokens of the window that the query may see.

    Returns:
        ``[B, n * G]`` of the tokens in closed blocks and ``[B, S + recent]`` of sinks and window, fp32.
    """
    device = past.recent[0][-1].device
    lowest = torch.finfo(torch.float32).min
    count, rows = past.block_count, past.rows
    total = past.window_start + recent
    if mask is None:
        given = torch.zeros(1, total, device=device)
    elif mask.dtype == torch.bool:
        given = torch.where(mask, 0.0, lowest)
    else:
        given = mask.float().clamp_min(lowest)
    given = given.expand(len(rows), -1)
    places = block_positions(past, count, device)
    valid = torch.tensor([[*row.blocks, *[0] * (count - len(row.blocks))] for row in rows], device=device)
    inside = torch.arange(past.block_length, device=device) < valid[..., None]
    blocks = torch.where(inside.flatten(1), given.gather(1, places.clamp_max(given.shape[1] - 1)), lowest)
    sinks = torch.tensor([row.padding if row.blocks else total for row in rows], device=device)[:, None]
    sink_places = sinks + torch.arange(past.sink_length if past.states[0].sinks is not None else 0, device=device)
    exact = torch.where(sink_places < total, given.gather(1, sink_places.clamp_max(total - 1)), lowest)
    opened = torch.tensor([row.window_start(past.sink_length, past.length) for row in rows], device=device)[:, None]
    window_places = torch.arange(past.window_start, total, device=device)
    window = torch.where(window_places >= opened, given[:, past.window_start : total], lowest)
    return blocks, torch.cat([exact, window], 1)
