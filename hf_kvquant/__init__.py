"""Quantized KV caches for Hugging Face Transformers. Importing the package changes nothing in torch or transformers."""

from hf_kvquant.attach import AttachHandle, attach
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.calibration import calibrated_fp8
from hf_kvquant.config import KVQuantConfig, LayerOverride
from hf_kvquant.memory import LayerMemory, MemoryReport
from hf_kvquant.presets import PRESETS, Preset
from hf_kvquant.spec import TensorSpec
from hf_kvquant.tune import tuned_widths

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "AttachHandle",
    "KVQuantConfig",
    "LayerMemory",
    "LayerOverride",
    "MemoryReport",
    "Preset",
    "QuantizedKVCache",
    "TensorSpec",
    "__version__",
    "attach",
    "calibrated_fp8",
    "tuned_widths",
]
