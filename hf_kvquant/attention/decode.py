"""Attention of one new token per row over packed past, sinks and window: the function that is compiled.

Decision: the packed past and the exact tokens are attended to apart and merged by their log-sum-exp (as in split
decoding, Dao et al. 2023, "Flash-Decoding"), so that the steps folded out of the values (rotation, plain centre) act on
the packed part alone. Softmax is in fp32.
"""

from __future__ import annotations

import torch

from hf_kvquant.attention.codes import written
from hf_kvquant.attention.keys import key_scores, rotated_scores
from hf_kvquant.attention.plan import Plan
from hf_kvquant.attention.values import weighted_values
from hf_kvquant.blocks import QuantizedBlocks
from hf_kvquant.spec import TensorSpec
from hf_kvquant.transforms import Step, Tables, steps_of

Tensors = dict[str, torch.Tensor]


def decode(plan: Plan, tensors: Tensors) -> torch.Tensor:
    """One step.

    Args:
        plan: what kind of step.
        tensors: ``query [B, H, 1, D]``; the parts of keys and values by the names of
            :func:`hf_kvquant.attention.plan.tensors_of`; where the plan says so ``mask.blocks [B, n * G]``,
            ``mask.exact [B, S + E]`` and ``auxiliary [H]``.

    Returns:
        ``[B, 1, H, Dv]`` in the dtype of the query.
    """
    given = tensors["query"]
    query = written(given.float().unflatten(1, (plan.heads, plan.repeats)).squeeze(3) * plan.scaling)  # [B, K, R, D]
    packed = _capped(_packed_scores(plan, tensors, query), plan)
    exact = _capped(query @ _exact(tensors, "key").transpose(-1, -2), plan)
    if plan.masked:
        packed = packed + tensors["mask.blocks"].unflatten(1, (-1, plan.block_length))[:, None, None]
        exact = exact + tensors["mask.exact"][:, None, None]
    top = torch.maximum(packed.amax((-2, -1)), exact.amax(-1))
    learned = tensors["auxiliary"].float().view(1, -1, plan.repeats) if plan.auxiliary else None
    if learned is not None:
        top = torch.maximum(top, learned)
    packed, exact = (packed - top[..., None, None]).exp(), (exact - top[..., None]).exp()
    mass = packed.sum((-2, -1))[..., None]
    total = mass + exact.sum(-1, keepdim=True)
    if learned is not None:
        total = total + (learned - top).exp()[..., None]
    output = (_packed_values(plan, tensors, packed, mass) + exact @ _exact(tensors, "value")) / total
    return output.flatten(1, 2)[:, None].to(given.dtype)


def _exact(tensors: Tensors, name: str) -> torch.Tensor:
    """Sinks and window ``[B, K, S + E, D]``, fp32."""
    parts = [tensors[f"{name}.{part}"].float() for part in ("sinks", "recent") if f"{name}.{part}" in tensors]
    return torch.cat(parts, 2)


def _capped(scores: torch.Tensor, plan: Plan) -> torch.Tensor:
    return (scores / plan.softcap).tanh() * plan.softcap if plan.softcap else scores


def _blocks(tensors: Tensors, name: str) -> QuantizedBlocks:
    parts = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    return QuantizedBlocks.from_named(parts)


def _steps(spec: TensorSpec, tensors: Tensors, name: str) -> list[Step]:
    """Steps after the centre that fold into the query or out of the output."""
    tables = Tables(deviation=tensors.get(f"{name}.deviation"), order=tensors.get(f"{name}.order"))
    return steps_of(spec, tables, None, slice(None))


def _packed_scores(plan: Plan, tensors: Tensors, query: torch.Tensor) -> torch.Tensor:
    """``[B, K, R, n, G]``."""
    blocks, mean = _blocks(tensors, "key"), tensors.get("key.mean")
    if plan.stores_raw:
        assert plan.layout is not None
        tables = tensors["cos"], tensors["sin"]
        return rotated_scores(query, blocks, plan.key, plan.block_length, plan.layout, tables, mean)
    folded = query
    for step in _steps(plan.key, tensors, "key"):
        folded = step.fold_query(folded)
    scores = key_scores(written(folded), blocks, plan.key, plan.block_length)
    if mean is None:
        return scores
    if not plan.turns_centre:
        return scores + (query @ mean[..., None])[..., None]
    return scores + _centre_scores(plan, tensors, query, mean)


def _centre_scores(plan: Plan, tensors: Tensors, query: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Scores of the rotated centre at every packed token, ``[B, K, R, n, G]``."""
    assert plan.layout is not None
    terms = plan.layout.dot_terms(query, mean[:, :, None])
    along, across, rest = (written(term.flatten(1, 2)).unbind(1) for term in terms)  # per query head [B, h], [B, 1]
    cos, sin = tensors["cos"].float(), tensors["sin"].float()  # [B or 1, n, h, G]
    # All query heads unrolled, since all read the same tables: as fast as a matrix product up to 64 heads, and it needs
    # no copy of 16-bit tables.
    scores = [
        (cos * one[:, None, :, None] + sin * other[:, None, :, None]).sum(2) + constant[..., None]
        for one, other, constant in zip(along, across, rest, strict=True)
    ]
    return torch.stack(scores, 1).unflatten(1, (plan.heads, plan.repeats))


def _packed_values(plan: Plan, tensors: Tensors, weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """``[B, K, R, Dv]``: the weighted sum of the packed values; ``mass [B, K, R, 1]`` is the sum of the weights."""
    output = weighted_values(weights, _blocks(tensors, "value"), plan.value, plan.head_dims[1], plan.block_length)
    for step in reversed(_steps(plan.value, tensors, "value")):
        output = step.fold_output(output)
    mean = tensors.get("value.mean")
    return output if mean is None else output + mean[:, :, None] * mass
