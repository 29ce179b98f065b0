"""Perplexity of a novel's passages, read through the cache in pieces of ``score_chunk`` tokens."""

from __future__ import annotations

from typing import Any

from hf_kvquant.eval_register import register
from hf_kvquant.longctx_task import passages

register()  # plain lm-eval loads this file before it looks for the model type


def kvq_perplexity(**settings: Any) -> dict[str, Any]:
    return passages("kvq_perplexity", **settings)
