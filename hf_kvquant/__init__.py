"""Quantized KV caches for Hugging Face Transformers. Importing the package changes nothing in torch or transformers."""

from hf_kvquant.attach import AttachHandle, attach
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.config import PRESETS, KVQuantConfig, Preset, TensorSpec
from hf_kvquant.memory import LayerMemory, MemoryReport

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "AttachHandle",
    "KVQuantConfig",
    "LayerMemory",
    "MemoryReport",
    "Preset",
    "QuantizedKVCache",
    "TensorSpec",
    "__version__",
    "attach",
]
