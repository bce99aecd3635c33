"""Whether a model still computes what it computed before, found out without reading its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from kvboost_rag.model.adapters import in_use
from kvboost_rag.model.architecture import check_precision, is_autocast, refuse
from kvboost_rag.model.locking import model_lock
from kvboost_rag.model.tensors import plain_parts, storage_bytes

__all__ = ["WeightsState", "WeightsWatch"]

# Bytes of each weight, from places all over it: a change that PyTorch does not count shows in some of them.
_PLACES, _BYTES = 8, 32

_TRAINING = "it is in training mode, where dropout makes its keys and values other ones every time"


@dataclass(frozen=True)
class WeightsState:
    """What a model's KV depends on, as of one moment.

    Parameters
    ----------
    settings
        Attention implementation, and of each wrapped layer the adapters in use and their scale.
    places
        Of each weight that takes part: identity, address and how often it was changed in place.
    samples
        Some bytes of every weight.
    weights
        The weights themselves: while they are held, no other one gets their identity.
    """

    settings: tuple[object, ...]
    places: tuple[tuple[int, int, int], ...]
    samples: bytes
    weights: tuple[Tensor, ...] = field(compare=False, repr=False)

    def is_gone(self, now: WeightsState) -> bool:
        """Whether a weight was changed in place since, so that this state does not come back."""
        before = {identity: (address, version) for identity, address, version in self.places}
        return any(before.get(i, (address, version)) != (address, version) for i, address, version in now.places)


class WeightsWatch:
    """Looks at a model's weights and adapters.

    A look takes about a microsecond for each module, whatever the weights' size. It sees adapters that are loaded,
    switched, scaled, disabled, merged or deleted; weights that are replaced; and weights that are changed in place,
    exactly where PyTorch counts it (optimisers, ``load_state_dict``, anything under ``no_grad``) and by a sample of
    each weight where it does not (through ``.data``).

    Parameters
    ----------
    model
        Not wrapped, see :func:`kvboost_rag.model.unwrapped`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._places: tuple[tuple[int, int, int], ...] = ()
        self._views: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._layers: list[nn.Module] = []
        self._settings: tuple[object, ...] = ()

    def state(self) -> WeightsState:
        """Look at the model now.

        Raises
        ------
        UnsupportedModelError
            If it is in training mode, or under autocast.
        """
        check_precision(self._model)
        # Another engine's forward changes the attention setting for its length.
        with model_lock(self._model):
            attention = self._model.config._attn_implementation
        self._layers, weights, drops = _walk(self._model)
        if self._model.training or drops:
            raise refuse(self._model, _TRAINING, "Call model.eval() first.")
        places = tuple((id(w), w.data_ptr(), -1 if w.is_inference() else w._version) for w in weights)
        self._settings = _settings(self._layers)
        return WeightsState((attention, *self._settings), places, self._samples(places, weights), tuple(weights))

    def is_switched(self) -> bool:
        """Whether an adapter was switched, scaled, disabled or merged since the last look, or autocast switched on.

        Far cheaper than a look.
        """
        return _settings(self._layers) != self._settings or is_autocast(self._model)

    def _samples(self, places: tuple[tuple[int, int, int], ...], weights: list[Tensor]) -> bytes:
        if places != self._places:
            self._places, self._views = places, {}
            for weight in weights:
                view = _sample(weight.detach())
                self._views.setdefault((weight.device, view.shape[1]), []).append(view)
        return b"".join(torch.cat(views).cpu().numpy().tobytes() for views in self._views.values())


def _walk(model: nn.Module) -> tuple[list[nn.Module], list[Tensor], bool]:
    """Collect wrapped layers, and plain tensors that take part in a forward, each once; tell whether dropout acts."""
    drops = False
    layers: list[nn.Module] = []
    found: list[Tensor | None] = []
    waiting: list[nn.Module | None] = [model]
    # Neither Module.modules() nor Module.parameters(), which take several times as long.
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        own = vars(module)
        drops = drops or (isinstance(module, _DropoutNd) and module.training and module.p > 0)
        found.extend(own["_parameters"].values())
        if own["_buffers"]:
            # The others are derived, and dynamic rotary tables change from prompt to prompt.
            found.extend(b for n, b in own["_buffers"].items() if n not in own["_non_persistent_buffers_set"])
        if "_disable_adapters" in own:
            layers.append(module)
            waiting.extend(_children_in_use(module))
        else:
            waiting.extend(own["_modules"].values())
    distinct = {id(weight): weight for weight in found if weight is not None}
    return layers, list(_plain(distinct.values())), drops


def _plain(weights: Iterable[Tensor]) -> Iterator[Tensor]:
    for weight in weights:
        if type(weight) in (nn.Parameter, Tensor):
            yield weight
        else:
            yield from (part for _, part in plain_parts(weight))


def _children_in_use(layer: nn.Module) -> Iterator[nn.Module | None]:
    """Children of a wrapped layer, with those of its adapters alone that are in use."""
    containers: tuple[str, ...] = getattr(layer, "adapter_layer_names", ())
    used = in_use(layer)
    for name, child in layer._modules.items():
        if name not in containers:
            yield child
        elif child is not None and used:
            yield from _adapters_in(child, used)


def _adapters_in(container: nn.Module, used: Sequence[str]) -> Iterator[nn.Module]:
    held: Any = container
    if isinstance(container, nn.ModuleDict):
        yield from (held[adapter] for adapter in used if adapter in held)
    else:
        # Parameters by adapter: one too many looked at does no harm.
        yield container


def _settings(layers: Sequence[nn.Module]) -> tuple[object, ...]:
    return tuple(_setting(layer) for layer in layers)


def _setting(layer: nn.Module) -> tuple[object, ...]:
    own, used = vars(layer), in_use(layer)
    scaling = own.get("scaling")
    scales = tuple(scaling.get(adapter) for adapter in used) if isinstance(scaling, dict) else ()
    return used, tuple(own.get("merged_adapters", ())), scales


def _sample(part: Tensor) -> Tensor:
    """View ``[places, bytes]`` of a weight's storage."""
    first = int(part.storage_offset()) * part.itemsize
    size = min(part.numel() * part.itemsize, int(part.untyped_storage().nbytes()) - first)
    if size < _PLACES * _BYTES:
        return storage_bytes(part, first, (1, size))
    return storage_bytes(part, first, (_PLACES, _BYTES), (size - _BYTES) // (_PLACES - 1))
