"""Turn a GGUF checkpoint into a plain transformers model and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from struct import error as StructError
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

__all__ = ["CONVERSION_FORMAT", "convert_gguf", "is_gguf", "quiet_transformers"]

# Raise it whenever a conversion gives another model or tokenizer than before: kept copies are then made anew.
CONVERSION_FORMAT = 1

_BAR_MODULE = "transformers.modeling_gguf_pytorch_utils"
_MAGIC = b"GGUF"
# What the gguf and transformers readers raise on damaged files: they check little, and trip over the consequences.
_READ_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, StructError, TypeError, ValueError)


def is_gguf(path: Path) -> bool:
    """Whether the file begins like a GGUF file."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def convert_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file and dequantise its weights; takes tens of seconds for 100 MB.

    Parameters
    ----------
    path
        The file; its weights may have any quantisation that transformers can undo.
    dtype
        Of the model's weights.

    Returns
    -------
    tuple[PreTrainedModel, PreTrainedTokenizerBase]
        The model on the CPU, and its tokenizer with the chat template of the file.

    Raises
    ------
    ImportError
        ``gguf`` or ``accelerate`` is not installed.
    ValueError
        The file is damaged, lacks weights, or is of an architecture that transformers can not convert.

    Notes
    -----
    Of the pre-tokenisers named in GGUF files, ``smollm`` is put right here; all others are as transformers converts
    them.
    """
    _check_extras()
    try:
        tokenizer = _tokenizer(path)
        auto: Any = AutoModelForCausalLM
        model, info = auto.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True, output_loading_info=True,
            **_dequantize(),
        )  # fmt: skip
    except _READ_ERRORS as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{path} can not be converted ({reason}); if the file is damaged, fetch it again, else pass another model"
        ) from error
    # transformers fills weights that a file lacks with random numbers, and only logs it.
    if absent := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} can not be converted (it lacks {len(absent)} weights of its model, {absent[0]} among them); "
            "if the file is damaged, fetch it again, else pass another model"
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


@contextmanager
def quiet_transformers(show_progress: bool = False) -> Iterator[None]:
    """Switch transformers' progress bars off inside the block, unless they are wanted."""
    bars: Any = transformers_logging
    if show_progress or not bars.is_progress_bar_enabled():
        yield
        return
    # This module takes tqdm directly, so that its bar ignores transformers' own switch.
    reader: Any = import_module(_BAR_MODULE) if find_spec(_BAR_MODULE) else None
    own_bar = getattr(reader, "tqdm", None)
    bars.disable_progress_bar()
    if own_bar is not None:
        reader.tqdm = bars.tqdm
    try:
        yield
    finally:
        bars.enable_progress_bar()
        if own_bar is not None:
            reader.tqdm = own_bar


def _check_extras() -> None:
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ImportError(f"reading GGUF files needs {' and '.join(missing)}: pip install gguf accelerate")


def _dequantize() -> dict[str, Any]:
    # Before GgufConfig existed, transformers dequantised every GGUF file.
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _tokenizer(path: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if _pre_tokenizer_name(path) == "smollm":
        _split_digits(tokenizer.backend_tokenizer)
    return tokenizer


def _pre_tokenizer_name(path: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _split_digits(backend: Any) -> None:
    """Cut at every digit before anything else.

    transformers drops this step, which shows where white space precedes a number: the model was trained on one token
    for two line ends before a year, not on two tokens. With it, token ids equal those of llama.cpp.
    """
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
