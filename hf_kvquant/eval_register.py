"""Makes ``hf-kvquant`` known to lm-eval: a name and where its class is, nothing is imported until it is asked for."""

from __future__ import annotations

MODEL_TYPE = "hf-kvquant"
TARGET = "hf_kvquant.lm_eval:KVQuantLM"


def register() -> None:
    """Register the model type; once or many times."""
    import lm_eval.models  # noqa: F401  lm-eval's own models first, or its lookup would skip them
    from lm_eval.api.registry import model_registry

    if MODEL_TYPE not in model_registry:
        model_registry.register(MODEL_TYPE, target=TARGET)
