"""A device that is not there: its tensors lie in memory, and every operation on them is noted.

To torch and to everything above it they lie on a device of their own kind, so that code takes the way that it takes on
a GPU, and a tensor that was left behind on the CPU is an error. What a GPU would launch, and what the host would wait
for there, is counted:

- an operation: whatever torch hands to the device, except views of what is there and memory that is only reserved;
- a wait: a number that is read back, a shape that depends on numbers, a copy from device to host, or one from the host
  to the device out of ordinary memory, for which torch waits until the device has taken it.

Needs a torch that knows devices written in Python (2.9 or later).
"""

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import UnsupportedError
from .counting import FusedOperations, is_operation

NAME = "pretended"
_aten = torch.ops.aten

# What reads numbers back, or has as many results as the numbers say.
_WAITING = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero"}
_WAITING |= {"aten::nonzero_numpy", "aten::argwhere", "aten::masked_select", "aten::_unique", "aten::_unique2"}
_WAITING |= {"aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount"}
_WAITING |= {"aten::multinomial", "aten::histc", "aten::allclose"}


class Event(NamedTuple):
    """A call of torch on the device."""

    name: str  # torch's name of the operation
    waits: bool  # the host waits for it
    is_operation: bool  # it launches a kernel
    where: str = ""  # the stack of a wait, the innermost line last


class PretendedTensor(torch.Tensor):
    """A tensor on the device; `memory` is where it really lies."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> "PretendedTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=torch.device(NAME, 0),
        )
        tensor.memory = memory
        return tensor

    def tolist(self) -> Any:
        # torch does not read tensors of a class of one's own as lists.
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def __repr__(self, **unused: Any) -> str:
        return f"{self.memory!r} on {NAME}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PretendedTensor":
        return memo.setdefault(id(self), to_device(self.memory))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {}, [])


class PretendedDevice(TorchDispatchMode):
    """Runs what is meant for the device while it is entered, and notes it in `events`, which may be cleared."""

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []

    def __enter__(self) -> "PretendedDevice":
        register_device()
        # Makes `torch.tensor(…, device=…)` a copy that is seen here.
        self._lifted_before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted_before)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {}, self.events)


@functools.cache
def register_device() -> None:
    """Make the device known to torch. Raises `UnsupportedError` if this torch knows no devices written in Python."""
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise UnsupportedError(
            f"rounds cannot be counted with torch {torch.__version__}: install 2.9 or later"
        ) from error
    _setup_privateuseone_for_python_backend(NAME)


def to_device(tensor: torch.Tensor) -> PretendedTensor:
    """A copy of a tensor on the device, which is not counted."""
    return PretendedTensor(tensor.detach().clone())


def move(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model to the device, where it is, without counting it. Shared weights stay shared."""
    register_device()
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = torch.nn.Parameter(to_device(parameter), requires_grad=False)
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = to_device(buffer)
    return model


def _run(func: Any, args: tuple, kwargs: dict[str, Any], events: list[Event]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = any(isinstance(one, PretendedTensor) for one in tensors)
    device = kwargs.get("device")
    to_there = there if device is None else torch.device(device).type == NAME
    if func is _aten.copy_.default:
        to_there = isinstance(args[0], PretendedTensor)
        there = isinstance(args[1], PretendedTensor)
    elif there:
        left_behind = [one for one in tensors if not isinstance(one, PretendedTensor) and one.dim()]
        if left_behind:
            raise RuntimeError(f"{func}: a tensor {list(left_behind[0].shape)} lies on the CPU, others on {NAME}")
    results = _on_the_cpu(func, args, kwargs)
    if there or to_there:
        made = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
        is_empty = bool(made) and not any(one.numel() for one in made)
        crosses = bool(tensors) and there != to_there and not is_empty
        events.append(_event(func, args, kwargs, results, crosses))
    if not to_there or not isinstance(results, torch.Tensor | tuple | list):
        return results
    if func is _aten.copy_.default:
        return args[0]
    results = tree_map_only(torch.Tensor, PretendedTensor, results)
    return return_and_correct_aliasing(func, args, kwargs, results) if there else results


def _on_the_cpu(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(PretendedTensor, lambda one: one.memory, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    return func(*args, **kwargs)


def _event(func: Any, args: tuple, kwargs: dict[str, Any], results: Any, crosses: bool) -> Event:
    name = func._schema.name
    # Whoever copies with `non_blocking` out of pinned memory does not wait, and nothing here is pinned.
    waits = crosses or name in _WAITING or _depends_on_numbers(name, args, kwargs) or _takes_a_number(name, args)
    where = "".join(traceback.format_stack(limit=24)[:-4]) if waits else ""
    return Event(name, waits, is_operation(func, results), where)


def _depends_on_numbers(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operation's shape depends on numbers, as that of an index with a mask does."""
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name == "aten::repeat_interleave":
        return isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
    if name == "aten::isin" and all(isinstance(one, torch.Tensor) for one in args[:2]):
        # Past this number torch sorts on a GPU, and makes unique.
        return args[1].numel() >= 10 * args[0].numel() ** 0.145
    return False


def _takes_a_number(name: str, args: tuple) -> bool:
    """Whether a number on the host becomes a tensor on the device by a copy, as in `x[indices] = 1`."""
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return args[2].dim() == 0
    return name == "aten::where" and any(not isinstance(one, PretendedTensor) for one in args)


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Enter the device, without gradients."""
    with PretendedDevice() as device, FusedOperations(), torch.no_grad():
        yield device
