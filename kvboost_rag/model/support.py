"""The check at load: moving this model's KV must give what the model itself would compute."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost_rag.model.architecture import refuse
from kvboost_rag.model.cache import KVCache
from kvboost_rag.model.rotation import Rotation
from kvboost_rag.model.runner import ModelRunner
from kvboost_rag.model.spare import SpareMemory
from kvboost_rag.model.tensors import quantises_activations

__all__ = ["check_build", "check_support", "is_close", "sample_ids"]

_TOKENS = 24
# What takes block masks or lengths where a mask is expected; on a CPU, flex_attention ends the process.
_MASKLESS = ("flash", "flex", "paged")
_OFFSET = 37


def check_support(model: PreTrainedModel, spare: SpareMemory | None = None) -> ModelRunner:
    """Refuse a model whose KV can not be moved, and return the runner of one whose KV can.

    A short text is encoded at two offsets. Position-free keys and values of every layer must agree, and so must the
    logits of a forward that finds the first half of its tokens in a cache, against the model run by itself.

    Parameters
    ----------
    model
        A causal language model of transformers.
    spare
        Of the runner.

    Returns
    -------
    ModelRunner
        Ready to use.

    Raises
    ------
    UnsupportedModelError
        With the model's name, the cause and the remedy.
    """
    check_build(model)
    runner = ModelRunner(model, spare)
    ids = sample_ids(model)
    near, far = _encode_at(runner, ids, 0), _encode_at(runner, ids, _OFFSET)
    runner.architecture = replace(runner.architecture, rotation=_fitting_rotation(runner, near, far))
    _compare_values(runner, near, far)
    _compare_logits(runner, ids, far)
    return runner


def check_build(model: PreTrainedModel) -> None:
    """Refuse what is known from a model's build alone.

    Raises
    ------
    UnsupportedModelError
        With the model's name, the cause and the remedy.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(model, "it is an encoder-decoder")
    if getattr(config, "kv_lora_rank", None):
        raise refuse(model, "its keys and values are compressed together (multi-head latent attention)")
    if getattr(config, "alibi", False):
        raise refuse(model, "it encodes positions by ALiBi")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refuse(model, "its forward takes no position_ids (ALiBi, or a recurrent model)")
    attention = str(config._attn_implementation)
    if any(kind in attention for kind in _MASKLESS):
        remedy = "Load it with attn_implementation='sdpa' or 'eager', or run it with reuse='off'."
        raise refuse(model, f"{attention!r} attends by no mask of single tokens", remedy)
    _check_devices(model)


def _check_devices(model: PreTrainedModel) -> None:
    whole = "Load it to one device, as with device_map={'': 'cpu'}, or run it with reuse='off'."
    offloaded = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if offloaded is not None:
        raise refuse(model, f"its weights are offloaded ({offloaded} among them), so that they can not be told", whole)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise refuse(model, f"its weights lie on several devices ({', '.join(devices)})", whole)


def sample_ids(model: PreTrainedModel) -> Tensor:
    """Ids of a text for checks: ``[24]`` int64."""
    tokens = torch.arange(_TOKENS, device=model.device)
    return (tokens * 7919 + 13) % int(model.config.vocab_size)


def _encode_at(runner: ModelRunner, ids: Tensor, offset: int) -> KVCache:
    slots = torch.arange(_TOKENS, device=runner.device)
    cache = runner.new_cache(_TOKENS)
    try:
        runner.encode(ids[None], slots + offset, slots, cache, _TOKENS)
    except (TypeError, RuntimeError, IndexError, KeyError, AttributeError, ValueError) as error:
        raise refuse(runner.model, f"its layers do not run over a prepared cache ({error})") from error
    return cache


def _compare_values(runner: ModelRunner, near: KVCache, far: KVCache) -> None:
    tolerance = _tolerance(runner)
    for layer in range(runner.architecture.layers):
        if not _close(near.values[layer], far.values[layer], tolerance):
            raise refuse(runner.model, f"the values of layer {layer} depend on the position")


def _fitting_rotation(runner: ModelRunner, near: KVCache, far: KVCache) -> Rotation:
    """Find out how dimensions are paired and which layers do not rotate: no configuration says it reliably."""
    declared = runner.architecture.rotation
    tries = [replace(declared, interleaved=interleaved) for interleaved in (False, True)]
    best = 0
    for rotation in tries:
        kind_of = _fitting_kinds(rotation, near, far, _tolerance(runner))
        if len(kind_of) == runner.architecture.layers:
            return replace(rotation, kind_of=tuple(kind_of))
        best = max(best, len(kind_of))
    raise refuse(runner.model, f"the keys of layer {best} depend on the position beyond a rotation")


def _fitting_kinds(rotation: Rotation, near: KVCache, far: KVCache, tolerance: float) -> list[int | None]:
    """Kinds of the layers, from the first one on, as far as they can be told."""
    free_near = rotation.unrotate(near.keys[:, 0], rotation.tables(0, _TOKENS))
    free_far = rotation.unrotate(far.keys[:, 0], rotation.tables(_OFFSET, _OFFSET + _TOKENS))
    kinds: list[int | None] = []
    for layer, kind in enumerate(rotation.kind_of):
        if _close(free_near[layer], free_far[layer], tolerance):
            kinds.append(kind)
        elif _close(near.keys[layer], far.keys[layer], tolerance):
            kinds.append(None)
        else:
            break
    return kinds


def _compare_logits(runner: ModelRunner, ids: Tensor, far: KVCache) -> None:
    """Place the far encoding of the first half at the front, as a request does, and compute the second half."""
    a, half = runner.architecture, _TOKENS // 2
    expected = runner.plain_logits(ids)
    if not torch.isfinite(expected).all():
        remedy = "Load it with dtype=torch.float32 or torch.bfloat16."
        raise refuse(runner.model, f"its logits are no numbers in {str(a.dtype).removeprefix('torch.')}", remedy)
    cache = runner.new_cache(_TOKENS)
    free = a.rotation.unrotate(far.keys[:, 0, :, :half], a.rotation.tables(_OFFSET, _OFFSET + half))
    cache.keys.fill_(1.0)
    cache.values.fill_(1.0)
    a.rotation.rotate_into(cache.keys[:, 0, :, :half], free, a.rotation.tables(0, half))
    cache.values[:, :, :, :half] = far.values[:, :, :, :half]
    positions = torch.arange(half, _TOKENS, device=runner.device)
    got = runner.forward(ids[half:], positions, cache, _TOKENS)
    if not is_close(runner, got, expected):
        raise refuse(runner.model, "a forward over moved KV does not give the logits of the model run by itself")


def _tolerance(runner: ModelRunner) -> float:
    """How far rounding alone takes the model from itself, relative to the largest number."""
    rounds_activations = any(quantises_activations(weight) for weight in runner.model.parameters())
    return 1e-3 if runner.architecture.dtype == torch.float32 and not rounds_activations else 5e-2


def is_close(runner: ModelRunner, one: Tensor, other: Tensor) -> bool:
    """Whether two results of a model differ by no more than its rounding."""
    return _close(one, other, _tolerance(runner))


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.float(), other.float()
    scale = float(one.abs().max()) + 1e-6
    return bool((one - other).abs().max() <= tolerance * scale)
