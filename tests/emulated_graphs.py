"""CUDA graphs on a device that is not there (`pretended_device`).

The graph that takes CUDA's place holds what a real one holds: operations, with the addresses that each reads and
writes. To launch it is to run them again on that memory, and nothing of the Python around them. It keeps nothing alive
but what its own operations have made, as a real one: to launch it when other memory was freed fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hf_dynspec import devices
from hf_dynspec.evaluation.operations import pretended_device as pretended
from hf_dynspec.evaluation.operations.counting import is_operation
from hf_dynspec.rounds import recorded


class Outside(NamedTuple):
    """A tensor in memory that the operations of a graph have not made."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> "Outside":
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, *place, name)

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"{self.name} of a graph reads memory that was freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Graph:
    """The operations of a function.

    Attributes:
        launched: each operation with its arguments, its keyword arguments and its results.
        outside: the operations by name, views and reserved memory too, with the addresses that they read and write in
            memory that none of them made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.launched: list[tuple[Callable, tuple, dict, list]] = []
        self.outside: list[tuple[str, list[int]]] = []

    def record(self, run: Callable[[], None], fails_at: int | None = None) -> None:
        """Record a function.

        Args:
            run: the function.
            fails_at: fail at this operation, or at the end if there are fewer. As nothing of a real capture is run,
                all memory is then as it was before.
        """
        run_on_the_cpu = pretended._on_the_cpu

        def noted(func, args, kwargs):
            args, kwargs = tree_map_only(pretended.PretendedTensor, lambda one: one.memory, (args, kwargs))
            if fails_at is not None:
                if len(self.launched) == fails_at:
                    raise RuntimeError("operation not permitted")
                for one in tensors_of((args, kwargs)):
                    if memory_of(one) not in self._made | self._before.keys():
                        whole = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                        self._before[memory_of(one)] = whole, whole.clone()
            results = run_on_the_cpu(func, args, kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            inputs, made = tensors_of((args, kwargs)), tensors_of(results)
            self.outside.append((func.name(), [one.data_ptr() for one in inputs if memory_of(one) not in self._made]))
            self._made |= {memory_of(one) for one in made} - {memory_of(one) for one in inputs}
            if is_operation(func, results):
                self.launched.append((func, *self._held((args, kwargs, made), func.name())))
            return results

        try:
            with self._monkeypatch.context() as patched, noting_waits() as waits:
                patched.setattr(pretended, "_on_the_cpu", noted)
                run()
            if fails_at is not None:
                raise RuntimeError("operation not permitted")
        finally:
            for whole, before in self._before.values():
                whole.copy_(before)
        # A real device refuses to record what the host would wait for.
        assert not waits, waits[0]

    def _held(self, values: Any, name: str) -> Any:
        def held(one: torch.Tensor) -> Any:
            return one if memory_of(one) in self._made else Outside.of(one, name)

        return tree_map_only(torch.Tensor, held, values)

    def replay(self) -> None:
        with _disable_current_modes():
            for func, *held in self.launched:
                args, kwargs, results = tree_map(_now, held, is_leaf=lambda one: isinstance(one, Outside))
                for kept, one in zip(results, tensors_of(func(*args, **kwargs)), strict=True):
                    if kept.data_ptr() != one.data_ptr():
                        kept.copy_(one)


def _now(value: Any) -> Any:
    return value.tensor() if isinstance(value, Outside) else value


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def noting_waits() -> Iterator[list[str]]:
    """`recorded.noting_waits` for the device that is not there."""
    places, make_event = [], pretended._event

    def noting(*arguments):
        event = make_event(*arguments)
        if event.waits:
            places.append(event.where)
        return event

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pretended, "_event", noting)
        yield places


def emulate(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Give the device graphs. Returns a list to which each one is added that is recorded."""
    made: list[Graph] = []

    def record(run, device):
        graph = Graph(monkeypatch)
        # The device has to run what it records: so the first launch is done already.
        graph.record(run)
        launches = iter([None])
        made.append(graph)
        return lambda: next(launches, graph) and graph.replay()

    monkeypatch.setattr(devices, "GRAPHS", frozenset({pretended.NAME}))
    monkeypatch.setattr(recorded, "record", record)
    monkeypatch.setattr(recorded, "noting_waits", noting_waits)
    return made
