"""Time of one whole decode step: the model with each cache, attached to it or not.

Decisions:
- As in ``benchmarks.decode``, caches are filled with random states through ``update``; those that need the rotation of
  the keys get the model's own tables as its hooks would leave them. hqq takes 20 seconds to quantize 8,192 tokens of 30
  layers: one is, and copied.
- Two model objects of the same weights: attaching switches the attention of a whole model, and the incumbents are to
  run on the one that nobody touched.
- "base" is DynamicCache of 64 tokens, stepped in the same rounds: what a step costs without a past to speak of. What a
  scheme takes above it is the share of attention.
- A matrix product runs in every round as well: it keeps all threads busy, so its CPU time tells whether the process
  had that many cores to itself, which that of a step (partly serial) does not.
- Steps that close a block or flush a window are found by what the cache holds before and after, and left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache

from benchmarks.attention_op import PRODUCT, limit_calls, timed
from benchmarks.common import (
    DYNAMIC,
    QUANTO,
    SCHEMES,
    Scheme,
    choose_schemes,
    forward,
    random_states,
)
from benchmarks.decode import closed_size, timed_step
from hf_kvquant import QuantizedKVCache, attach
from hf_kvquant.models import load_model
from hf_kvquant.rotary import Pending, RotaryLayout

ATTACHED, BASE, BASE_TOKENS = "attached-", "base", 64
LENGTHS = (64, 256, 512, 2048, 8192, 16384)
STATIC, HQQ = "static", "transformers-hqq4"
INCUMBENTS = (DYNAMIC, STATIC, QUANTO, HQQ)
OURS = ("k4v4", f"{ATTACHED}k4v4", f"{ATTACHED}cr4", f"{ATTACHED}cm2")
WARM_UP = 2

Tables = tuple[torch.Tensor, torch.Tensor]


def rounds_of(length: int) -> int:
    """Timed steps: the more, the shorter, where the differences looked for are small."""
    return 21 if length <= 512 else 11 if length <= 2048 else 7


class Bench:
    """The models, the schemes that run here, and the caches of one length."""

    def __init__(self, model: Any, attached: Any, names: Iterable[str]):
        self.model, self.attached = model, attached
        plain = [name for name in names if not name.startswith(ATTACHED)]
        chosen, self.skipped = choose_schemes(plain, model.config)
        self.schemes = [Scheme(BASE, SCHEMES[DYNAMIC].build), *chosen]
        self.schemes += [_attached(name) for name in names if name.startswith(ATTACHED)]
        self.layout = _layout(attached)

    def measure(self, length: int, rounds: int) -> dict[str, Any]:
        """Samples of one length."""
        caches = self.filled(length, rounds + WARM_UP)
        product = limit_calls()[0][PRODUCT]
        names, samples = [*caches, PRODUCT], []
        for number in range(rounds + WARM_UP):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name == PRODUCT:
                    sample: dict[str, Any] = {"closes": False} | timed(product)
                else:
                    sample = self._step(name, caches[name], number)
                if number >= WARM_UP:
                    samples.append({"round": number, "offset": 0, "scheme": name} | sample)
        return {"samples": samples}

    def _step(self, name: str, cache: Cache, number: int) -> dict[str, Any]:
        model = self.attached if name.startswith(ATTACHED) else self.model
        before = closed_size(cache)
        spent = timed_step(model, torch.tensor([[number + 1]]), cache)
        return {"closes": closed_size(cache) != before} | spent

    def filled(self, length: int, steps: int) -> dict[str, Cache]:
        """By scheme, a cache of ``length`` tokens that will take ``steps`` more."""
        caches = {scheme.name: scheme.build(self.model.config, length + steps) for scheme in self.schemes}
        tables = self.model.base_model.rotary_emb(torch.zeros(1, dtype=self.model.dtype), torch.arange(length)[None])
        layers = len(caches[BASE].layers)
        for layer in tqdm(range(layers), desc=f"T={length}: filling caches", leave=False, disable=None):
            ((keys, values),) = random_states(self.model.config, length, self.model.dtype, layers=1, seed=layer)
            for name, cache in caches.items():
                if name.startswith(ATTACHED):
                    assert isinstance(cache, QuantizedKVCache)
                    cache.pending = Pending.of(self.layout, tables, self._queries)
                count = BASE_TOKENS if name == BASE else length
                if name == HQQ and layer:
                    cache.layers[layer] = copy.deepcopy(cache.layers[0])
                else:
                    cache.update(keys[:, :, :count], values[:, :, :count], layer)
        return caches

    def _queries(self, start: int, stop: int) -> torch.Tensor:
        text = self.model.config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return torch.randn(1, text.num_attention_heads, stop - start, head_dim).to(self.model.dtype)


def _attached(name: str) -> Scheme:
    return Scheme(name, lambda config, length: QuantizedKVCache(config, name.removeprefix(ATTACHED)))


def _layout(attached: Any) -> RotaryLayout:
    """How the model rotates its keys, as its hooks find it in one forward."""
    cache = QuantizedKVCache(attached.config, "cr4")
    forward(attached, torch.tensor([[1]]), cache)
    return cache.layers[0].rotary.layout


def load(name: str | None, dtype: torch.dtype, names: Iterable[str]) -> Bench:
    model, attached = (load_model(name, dtype)[0] for _ in range(2))
    attach(attached)
    return Bench(model, attached, names)
