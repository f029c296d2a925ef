"""CPU kernels: those of the head, compiled from head_scores.cpp where there is a C++ compiler, once on a machine and
for all sizes; and the selection of top tokens, which torch does more slowly there. What cpu_best_rows.py needs for its
own source file is here too."""

import ctypes
import errno
import functools
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import reference

# What head_scores.cpp has a function for.
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What the system says where nothing can be written to torch's cache of compiled code.
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of an error of torch's or a compiler's in a message.
_MOST_CHARACTERS = 200


# Of this file's two messages, each of which is shown by default, in one line, and at most once for each source file in
# a process.
_log = logging.getLogger(__name__)


def compiled_library(file_name: str, what: str | None, *headers: str) -> ctypes.CDLL | None:
    """Compile a source file of this folder for this machine; torch keeps the library on disk.

    Args:
        file_name: the source's.
        what: what is done by plain torch where it cannot be compiled, with a verb, for the one line that says so
            (None: it makes so little difference that nothing is said of it).
        headers: names of files to compile before it; torch compiles texts, which have no place to include from.

    Returns:
        The library, None where it cannot be compiled.
    """
    source = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in (*headers, file_name))
    try:
        # Takes over a second, which importing this file must not. Releases of torch may name it otherwise, as it is
        # not meant for others. Where there is no compiler that works, loading says so.
        from torch._inductor.codecache import CppCodeCache

        began, start = time.time(), time.perf_counter()
        # Where torch compiles, a product and a sum are two instructions, unless told otherwise.
        library = CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))
    except (ImportError, AttributeError, TypeError, RuntimeError, OSError) as error:
        if what is not None:
            _log.warning(
                "%s by plain torch, several times slower, as the CPU kernels cannot be compiled: %s. (%s)",
                what,
                _remedy(error),
                _in_one_line(error),
            )
        return None
    if what is not None and _is_younger(library, began):
        _log.warning("compiled the CPU kernels, once on this computer: %.0f s", time.perf_counter() - start)
    return library


@functools.cache
def _kernels() -> dict[torch.dtype, Callable[..., bool]]:
    """The functions of head_scores.cpp by the weight's dtype. Empty, which is said once, where they cannot be
    compiled."""
    library = compiled_library("head_scores.cpp", "LM heads are scored")
    if library is None:
        return {}
    kernels = {}
    for dtype in _KERNEL_DTYPES:
        kernel = library[f"head_scores_{str(dtype).removeprefix('torch.')}"]
        kernel.argtypes = [ctypes.c_char_p]
        kernel.restype = ctypes.c_bool
        kernels[dtype] = kernel
    return kernels


def _is_younger(library: ctypes.CDLL, seconds: float) -> bool:
    """Whether a library's file was written after that time, and so was not in torch's cache."""
    try:
        return os.stat(library._name).st_mtime >= seconds
    except OSError:
        return False


def _remedy(error: Exception) -> str:
    """What to do where a kernel could not be compiled."""
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return "let torch write to its cache, or name another folder by TORCHINDUCTOR_CACHE_DIR"
    return "install g++, or set CXX to a C++ compiler that works; if there is one, install another release of torch"


def _in_one_line(error: Exception) -> str:
    """The error's kind and the beginning of what it says; the output of a compiler may be pages."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def prepare_kernels() -> None:
    """Compile the kernels, which takes seconds and is said once, unless a process on this machine did so before."""
    _kernels()


def _has_kernel(weight: torch.Tensor) -> bool:
    """Whether there is a compiled kernel for the weight's dtype; compiles it, where that was not done."""
    return weight.dtype in _KERNEL_DTYPES and weight.dtype in _kernels()


# A matrix product packs its large operand anew in every call, which for a few rows takes longer than the arithmetic.
# A weight with fewer elements than this fits the cache, and then packing costs little.
FEWEST_COMPILED_ELEMENTS = 2**23


def has_dense_kernel(weight: torch.Tensor) -> bool:
    """Whether `dense_scores` has a compiled kernel for this weight: in fp32, on the CPU, and large.

    Compiles it, which takes seconds, unless a process on this machine did so before.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= FEWEST_COMPILED_ELEMENTS
        and _has_kernel(weight)
    )


# Of a smaller head any rows are scored within microseconds, and compiling takes seconds.
FEWEST_HEAD_ELEMENTS = 2**20
# For more hidden states than these a matrix product takes less time; where processors multiply in 16 bits, sooner.
_MOST_QUERIES = {torch.float32: 16, torch.bfloat16: 6, torch.float16: 6}
# What is looked at at a time where numbers are compared: it fits the cache.
_COMPARED_ELEMENTS = 2**18


def has_packed_kernel(weight: torch.Tensor) -> bool:
    """Whether `packed_scores` has a compiled kernel for rows of this head, `[V, d]`: contiguous on the CPU, not small.

    Compiles it, which takes seconds, unless a process on this machine did so before.
    """
    is_large = weight.device.type == "cpu" and weight.is_contiguous() and weight.numel() >= FEWEST_HEAD_ELEMENTS
    return is_large and _has_kernel(weight)


def packed_scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`reference.packed_scores` for heads of which `has_packed_kernel` holds: compiled where that is faster, and then
    summed and returned in fp32. The weight may be of 16 bits where the hidden states are of 32.

    Args:
        hidden: `[m, d]`.
        weight: contiguous `[n, d]`.
        bias: contiguous `[n]` of the weight's dtype, or None.
    """
    needs_gradients = hidden.requires_grad and torch.is_grad_enabled()
    is_narrow = weight.dtype != hidden.dtype
    if not needs_gradients and (is_narrow or hidden.shape[0] <= _MOST_QUERIES[weight.dtype]):
        return _run(hidden, weight.unsqueeze(1), None, None if bias is None else bias.unsqueeze(1))
    return reference.packed_scores(hidden, weight.to(hidden), None if bias is None else bias.to(hidden))


def lossless_dtype(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """The dtype of 16 bits in which fp32 tensors are exactly what they are, as those are that were loaded from a
    checkpoint of that dtype; their own where there is none. Stops at the first number that says so."""
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(one is None or _is_exact(one, dtype) for one in (weight, bias)):
                return dtype
    return weight.dtype


def _is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    rows = max(1, _COMPARED_ELEMENTS // max(1, tensor[:1].numel()))
    return all(torch.equal(some.to(dtype).to(some.dtype), some) for some in tensor.split(rows))


def dense_scores(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`reference.packed_scores` without bias, compiled where `has_dense_kernel`. Gradients do not flow through it.

    Args:
        hidden: `[m, d]`.
        weight: `[V, d]`.
        out: contiguous fp32 `[m, V]` on the CPU: may be used for the result, which saves the system's handing out of
            memory anew.

    Returns:
        `[m, V]`.

    Raises:
        ValueError: shapes or dtypes do not fit together, or something is not on the CPU.
    """
    if not has_dense_kernel(weight):
        return reference.packed_scores(hidden, weight, None)
    return _run(hidden, weight.unsqueeze(1), None, None, out)


def scattered_scores(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.scattered_scores`, compiled where a compiler is at hand, summed and returned in fp32.

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
    """`reference.block_scores`, compiled where a compiler is at hand; in the first call, unless prepared.

    Gradients do not flow through it.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not on the CPU, or the weight or bias is not
            contiguous.
        IndexError: a block is not below `B`.
    """
    if not _has_kernel(weight):
        return reference.block_scores(hidden, weight, blocks, bias)
    return _run(hidden, weight, blocks, bias)


# `Call` of head_scores.cpp: ctypes takes longer to turn argument after argument into C's.
_CALL = struct.Struct("5P6q")

# A product of fewer numbers than this takes one thread less time than others need to wake.
_FEWEST_SHARED_PRODUCTS = 2**16


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    blocks: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 `[m, n · T]`: the scores of the blocks, or of all in order where `blocks` is None; `out` where it is given.

    A call costs microseconds, unlike one of a function that torch compiled, whose checks alone take longer than to
    score a thousand rows.
    """
    (m, d), (count, block_rows, columns) = hidden.shape, weight.shape
    n = count if blocks is None else blocks.shape[0]
    # The kernel reads memory by these numbers, unchecked.
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
    """How many threads to share so many products out to. All or one: the pool that torch shares dismisses those that a
    call leaves out."""
    return torch.get_num_threads() if products >= _FEWEST_SHARED_PRODUCTS else 1


def described(tensor: torch.Tensor) -> str:
    """`float32 [3, 4] on cpu`, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
