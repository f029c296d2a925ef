"""Detects changes of weights at a negligible cost for a round.

Drafters may be adapted between rounds: adapters are added, switched, merged and removed, weights are loaded, cast and
trained. Holders of copies or traces check at the start of a round, and renew them after a change.
"""

import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..modeling.parts import is_memory

# Attributes of peft's layers that may change without any tensor.
_ADAPTER_SETTINGS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
# Compared numbers of a tensor, spread over it.
_SAMPLED = 16


class WeightsWatch:
    """Remembers the parts, weights and adapters of a module.

    torch counts changes in place. Changes through `.data` escape that count, and show in a sample of the numbers, on
    the CPU only, as a GPU would have to be waited for. Buffers that are not saved with a model do not count: some
    rotary embeddings write theirs in every forward. Weights that accelerate offloads come and go with every forward,
    and cannot be watched.

    Args:
        module: the module to watch.
        samples: compare numbers too, for weights with copies.
    """

    def __init__(self, module: nn.Module, samples: bool = False):
        self.module = module
        self._samples = samples
        self._remember()

    def has_changed(self) -> bool:
        """Whether anything changed since the last call, or since the watch began."""
        if self._is_offloaded or self._is_unchanged():
            return False
        self._remember()
        return True

    def accept_weights(self) -> None:
        """Treat the present numbers of the parameters as unchanged."""
        if not self._is_offloaded:
            self._stamp_then = stamp(self._weights_now(), self._samples)

    def parameters(self) -> list[torch.Tensor]:
        """All present parameters and buffers, in an order that depends on the modules' classes alone."""
        return [one for one in chain.from_iterable(map(dict.values, self._tensor_dicts)) if one is not None]

    def _is_unchanged(self) -> bool:
        parts = self._parts_now()
        return (
            len(parts) == len(self._parts_then)
            and all(map(operator.is_, parts, self._parts_then))
            and stamp(self._weights_now(), self._samples) == self._stamp_then
            and self._adapters_now() == self._adapters_then
        )

    def _remember(self) -> None:
        modules = list(self.module.modules())
        self._module_dicts = [one._modules for one in modules]
        self._parameter_dicts = [one._parameters for one in modules]
        self._tensor_dicts = [tensors for one in modules for tensors in (one._parameters, one._buffers)]
        self._saved_buffers = [
            (one._buffers, name)
            for one in modules
            for name in one._buffers
            if name not in one._non_persistent_buffers_set
        ]
        self._adapted = [one for one in modules if hasattr(one, _ADAPTER_SETTINGS[0])]
        self._parts_then = self._parts_now()
        weights = self._weights_now()
        self._is_offloaded = any(one.device.type == "meta" for one in weights)
        self._stamp_then = stamp(weights, self._samples)
        self._adapters_then = self._adapters_now()

    def _held_in(self, dicts: Iterable[dict[str, Any]]) -> list[Any]:
        held = list(chain.from_iterable(map(dict.values, dicts)))
        return held + [buffers.get(name) for buffers, name in self._saved_buffers]

    def _parts_now(self) -> list[Any]:
        return self._held_in(chain(self._module_dicts, self._parameter_dicts))

    def _weights_now(self) -> list[torch.Tensor]:
        return [one for one in self._held_in(self._parameter_dicts) if one is not None]

    def _adapters_now(self) -> list[Any]:
        # Copies, as peft changes its lists and dictionaries in place.
        return [_copied(getattr(one, name, None)) for one in self._adapted for name in _ADAPTER_SETTINGS]


def stamp(tensors: Iterable[torch.Tensor], samples: bool = False) -> list[Any]:
    """Marks that change with tensors: addresses, dtypes, counts of changes in place, and with `samples`, on the CPU,
    some of their numbers."""
    tensors = list(tensors)
    marks = list(chain.from_iterable(map(_marks_of, tensors)))
    on_cpu = [one for one in tensors if samples and one.device.type == "cpu" and one.numel() and is_memory(one)]
    if on_cpu:
        # Bits, since NaN differs from itself; and all at once, as each comparison would take as long.
        marks.append(torch.cat([_sample(one) for one in on_cpu]).view(torch.uint8).numpy().tobytes())
    return marks


def _marks_of(tensor: torch.Tensor) -> Iterator[Any]:
    try:
        yield tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # quantised and other composite tensors
        yield id(tensor)
    yield tensor.dtype
    yield 0 if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """`[n]`: numbers of a tensor, spread over it."""
    if not tensor.is_contiguous():
        # Flattening all of it would copy it.
        tensor = tensor[:1].flatten()
    step = max(1, tensor.numel() // _SAMPLED)
    return tensor.detach().as_strided((-(-tensor.numel() // step),), (step,))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list) else value
