"""CPU kernels of the head, compiled from head_scores.cpp if there is a C++ compiler, once on a machine and for all
sizes; and the compilation of the other C++ files."""

import ctypes
import errno
import functools
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..devices import multiplies_fast
from ..errors import shown_text
from . import reference

# The dtypes of the functions in head_scores.cpp.
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Errors of writing to torch's cache of compiled code.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The length of a compiler's error in a message.
_MOST_CHARACTERS = 200

_log = logging.getLogger(__name__)


def compiled_library(file_name: str, what: str | None, *headers: str) -> ctypes.CDLL | None:
    """Compile a source file of this folder for this machine (None: that is not possible); torch keeps the library on
    disk. The text that torch compiles can include no files, so `headers` are put before it.

    `what` names the work that plain torch does otherwise, with a verb, for a warning (None: no warning).
    """
    source = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in (*headers, file_name))
    try:
        # Imported here, as it takes over a second. It is private to torch, so releases may rename it.
        from torch._inductor.codecache import CppCodeCache

        began, start = time.time(), time.perf_counter()
        # torch's own flags make a product and a sum two instructions.
        library = CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))
    except (ImportError, AttributeError, TypeError, RuntimeError, OSError) as error:
        if what is not None:
            _log.warning(
                "%s by plain torch, several times slower, as the CPU kernels cannot be compiled: %s. (%s)",
                what,
                _remedy(error),
                # Shortened and in one line, as a compiler may print pages.
                shown_text(" ".join(f"{type(error).__name__}: {error}".split()), _MOST_CHARACTERS),
            )
        return None
    if what is not None and _is_younger(library, began):
        _log.warning("compiled the CPU kernels, once on this computer: %.0f s", time.perf_counter() - start)
    return library


def typed(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of a library with the ctypes of its result and its arguments."""
    function.restype, function.argtypes = result, arguments
    return function


@functools.cache
def _kernels() -> dict[torch.dtype, Callable[..., bool]]:
    """The functions of head_scores.cpp by the weight's dtype; none, logged once, if they cannot be compiled."""
    library = compiled_library("head_scores.cpp", "LM heads and layers of 16 bits are computed")
    names = {dtype: f"head_scores_{str(dtype).removeprefix('torch.')}" for dtype in _KERNEL_DTYPES if library}
    return {dtype: typed(library[name], ctypes.c_bool, ctypes.c_char_p) for dtype, name in names.items()}


def _is_younger(library: ctypes.CDLL, seconds: float) -> bool:
    """Whether a library's file was written after that time, so that it was not in torch's cache."""
    try:
        return os.stat(library._name).st_mtime >= seconds
    except OSError:
        return False


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return "let torch write to its cache, or name another folder by TORCHINDUCTOR_CACHE_DIR"
    return "install g++, or set CXX to a C++ compiler that works; if there is one, install another release of torch"


def prepare_kernels() -> None:
    """Compile the kernels, which takes seconds and is logged, unless a process on this machine did so before."""
    _kernels()


def _has_kernel(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for the weight's dtype. The first call compiles it."""
    return weight.dtype in _KERNEL_DTYPES and weight.dtype in _kernels()


# A matrix product packs its large operand in every call, which for a few rows takes longer than the arithmetic. For
# weights with fewer elements, which fit the cache, packing costs little.
FEWEST_COMPILED_ELEMENTS = 2**23


def has_dense_kernel(weight: torch.Tensor) -> bool:
    """Whether `dense_scores` has a kernel for this weight: fp32, on the CPU, and large. The first call compiles it,
    which takes seconds, unless a process on this machine did so before."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= FEWEST_COMPILED_ELEMENTS
        and _has_kernel(weight)
    )


# Rows of smaller heads are scored within microseconds, and compiling takes seconds.
FEWEST_HEAD_ELEMENTS = 2**20
# For more hidden states a matrix product is faster: sooner if the CPU has units for 16 bits, late if it has none.
_MOST_QUERIES, _MOST_QUERIES_WITH_UNITS, _MOST_QUERIES_WITHOUT = 16, 6, 64
# Numbers that are compared at a time: they fit the cache.
_COMPARED_ELEMENTS = 2**18


def has_packed_kernel(weight: torch.Tensor) -> bool:
    """Whether `packed_scores` has a kernel for rows of this head, `[V, d]`: contiguous on the CPU, not small. The
    first call compiles it, which takes seconds, unless a process on this machine did so before."""
    is_large = weight.device.type == "cpu" and weight.is_contiguous() and weight.numel() >= FEWEST_HEAD_ELEMENTS
    return is_large and _has_kernel(weight)


@functools.cache
def most_queries(dtype: torch.dtype) -> int:
    """For how many hidden states at most the kernel is faster than torch's product, for weights of a dtype; 0 if there
    is no kernel. The first call may compile it, and measures how fast the CPU multiplies."""
    if dtype not in _KERNEL_DTYPES or dtype not in _kernels():
        return 0
    if dtype.itemsize == 4:
        return _MOST_QUERIES
    return _MOST_QUERIES_WITH_UNITS if multiplies_fast(dtype) else _MOST_QUERIES_WITHOUT


def packed_scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`reference.packed_scores` for heads with `has_packed_kernel`: compiled if that is faster, and then summed and
    returned in fp32. Weight and bias are contiguous, and may have 16 bits for hidden states of 32."""
    needs_gradients = hidden.requires_grad and torch.is_grad_enabled()
    is_narrow = weight.dtype != hidden.dtype
    if not needs_gradients and (is_narrow or hidden.shape[0] <= most_queries(weight.dtype)):
        return _run(hidden, weight.unsqueeze(1), None, None if bias is None else bias.unsqueeze(1))
    return reference.packed_scores(hidden, weight.to(hidden), None if bias is None else bias.to(hidden))


def lossless_dtype(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """The 16-bit dtype that holds fp32 tensors exactly, as after loading a checkpoint of that dtype; their own dtype
    if there is none. Stops at the first number that does not fit."""
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(one is None or _is_exact(one, dtype) for one in (weight, bias)):
                return dtype
    return weight.dtype


def _is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    rows = max(1, _COMPARED_ELEMENTS // max(1, tensor[:1].numel()))
    return all(torch.equal(some.to(dtype).to(some.dtype), some) for some in tensor.split(rows))


def dense_scores(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`reference.packed_scores` without bias: `[m, V]`, compiled if `has_dense_kernel`. Gradients do not flow through
    it. It may return `out`, contiguous fp32 `[m, V]` on the CPU, which saves an allocation.

    Raises:
        ValueError: shapes or dtypes do not fit together, or something is not on the CPU.
    """
    if not has_dense_kernel(weight):
        return reference.packed_scores(hidden, weight, None)
    return _run(hidden, weight.unsqueeze(1), None, None, out)


def scattered_scores(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.scattered_scores`, compiled if there is a compiler, summed and returned in fp32.

    Gradients do not flow through it, and a negative id scores −inf.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not on the CPU, or the bias is not contiguous.
        IndexError: an id is not below `V`.
    """
    if not weight.is_contiguous() or not _has_kernel(weight):
        return reference.scattered_scores(hidden, weight, ids, bias).float()
    return _run(hidden, weight.unsqueeze(1), ids, None if bias is None else bias.unsqueeze(1))


def block_scores(
    hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.block_scores`, compiled by the first call, unless prepared, if there is a compiler. Gradients do not
    flow through it.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not on the CPU, or the weight or bias is not
            contiguous.
        IndexError: a block is not below `B`.
    """
    if not _has_kernel(weight):
        return reference.block_scores(hidden, weight, blocks, bias)
    return _run(hidden, weight, blocks, bias)


# `Call` of head_scores.cpp: ctypes takes longer to convert single arguments.
_CALL = struct.Struct("5P6q")

# Smaller products take one thread less time than waking others.
_FEWEST_SHARED_PRODUCTS = 2**16


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    blocks: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 `[m, n · T]`: the scores of the blocks (None: all in order), in `out` if given.

    A call costs microseconds. The checks of a function compiled by torch alone take longer than scoring a thousand
    rows.
    """
    (m, d), (count, block_rows, columns) = hidden.shape, weight.shape
    n = count if blocks is None else blocks.shape[0]
    # The kernel does not check its arguments.
    are_blocks = blocks is None or (blocks.dtype == torch.int64 and blocks.is_cpu)
    if d != columns or not are_blocks or not (hidden.is_cpu and weight.is_cpu and weight.is_contiguous()):
        chosen = "" if blocks is None else f" and blocks {described(blocks)}"
        raise ValueError(
            f"hidden states {described(hidden)}{chosen} do not fit a weight {described(weight)}: the last dimensions "
            "must be equal, the blocks int64, the weight contiguous and everything on the CPU."
        )
    if bias is not None:
        is_alike = bias.shape == weight.shape[:2] and bias.dtype == weight.dtype
        if not (is_alike and bias.is_contiguous() and bias.is_cpu):
            raise ValueError(f"the bias {described(bias)} must be contiguous and as {described(weight[..., 0])}.")
    if hidden.dtype is not torch.float32:
        hidden = hidden.float()
    if out is None:
        # Quicker than `torch.empty` with a dtype and a device.
        out = hidden.new_empty(m, n * block_rows)
    elif out.dtype != torch.float32 or out.shape != (m, n * block_rows) or not (out.is_cpu and out.is_contiguous()):
        raise ValueError(f"out {described(out)} must be contiguous and float32 {[m, n * block_rows]} on cpu.")
    hidden = hidden.contiguous()
    blocks = None if blocks is None else blocks.contiguous()
    threads = thread_count(m * n * block_rows * d)
    call = _CALL.pack(
        hidden.data_ptr(),
        weight.data_ptr(),
        0 if blocks is None else blocks.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        d,
        n,
        count,
        block_rows,
        threads,
    )
    is_in_range = _kernels()[weight.dtype](call)
    if not is_in_range:
        raise IndexError(f"block {int(blocks.max())} is out of range: the weight has {count} blocks.")
    return out


def thread_count(products: int) -> int:
    """The number of threads for so many products: all or one, since torch's pool ends threads that a call leaves
    out."""
    return torch.get_num_threads() if products >= _FEWEST_SHARED_PRODUCTS else 1


def described(tensor: torch.Tensor) -> str:
    """`float32 [3, 4] on cpu`, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
