"""The Triton kernels fit the GPUs that nobody has at hand: compiled for each, by the functions that launch them.

A program may have so much shared memory at most, and registers that do not suffice are spilled to local memory, which
is as slow as the GPU's own. See `compiled_kernels`.
"""

import importlib.metadata
import json
from pathlib import Path

import pytest
from cases import representatives
from fast_kernels import needs_compiled_triton, run

# The bytes of shared memory that a program may have, by compute capability: A100; RTX 4090 and L4; H100 and H200; RTX
# 5090.
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 120: 101_376}
# Bytes of local memory of a thread: a few registers. Numbers of 32 bits need more of them.
LOCAL, LOCAL_FP32 = 256, 512

pytestmark = needs_compiled_triton


def compiled(folder: Path, function: str, **settings: object) -> list[dict]:
    # The oldest releases do not know the newest capability.
    is_old = importlib.metadata.version("triton").startswith(("3.2.", "3.3."))
    capabilities = ",".join(str(one) for one in SHARED if not (is_old and one == 120))
    script = Path(__file__).parents[1] / "compiled_kernels.py"
    words = [script, function, capabilities, *(f"{name}={one}" for name, one in settings.items())]
    return [json.loads(line) for line in run(words, TRITON_CACHE_DIR=str(folder)).splitlines()]


def check(kernels: list[dict]) -> None:
    assert kernels
    for one in kernels:
        local = LOCAL_FP32 if one.get("dtype", "fp32") == "fp32" else LOCAL
        assert one["shared"] <= SHARED[one["capability"]] and one["local"] <= local, one
        assert "tf32" not in one["uses"], one
        if one["name"] in ("_part_kernel", "_block_scores_kernel"):
            # 16-bit products go to the tensor cores, and rows are fetched while others are multiplied, if they begin
            # at multiples of 16 bytes.
            assert ("mma" in one["uses"] or "wgmma" in one["uses"]) == (one["dtype"] != "fp32"), one
            assert ("cp.async.cg" in one["uses"]) == (one["d"] % 8 == 0 or one["dtype"] == "fp32"), one


# Sizes of heads that are padded, the largest, and those between; few pairs, a chain's and a tree's.
HEADS = [(d, dtype) for dtype in ("bf16", "fp32", "fp16") for d in (256, 128, 512, 64, 80, 192)]


@pytest.mark.parametrize(("d", "dtype"), representatives("families", HEADS, keep=1))
def test_attention(d, dtype, tmp_path):
    check(compiled(tmp_path, "attention", d=d, dtype=dtype, pairs="6,24,244", window="0,7"))


@pytest.mark.parametrize(("d", "dtype"), representatives("families", HEADS, keep=1))
def test_rotations(d, dtype, tmp_path):
    check(compiled(tmp_path, "layers", d=d, dtype=dtype))


@pytest.mark.parametrize("d", representatives("families", (5376, 640, 128, 16384), keep=1))
def test_norms(d, tmp_path):
    check(compiled(tmp_path, "norms", d=d, dtype="bf16,fp32"))


@pytest.mark.parametrize("d", representatives("families", (4096, 640, 100), keep=1))
def test_blocks(d, tmp_path):
    check(compiled(tmp_path, "blocks", d=d, dtype="bf16,fp32", rows="32,64"))


def test_best_rows(tmp_path):
    check(compiled(tmp_path, "best_rows", rank="16,64,100"))


def test_a_round_is_few_kernels_whatever_its_numbers_are(tmp_path):
    """A compilation takes seconds: rows, windows and sizes of memory do not lead to another one."""
    kernels = compiled(tmp_path, "many_shapes", d=64, dtype="bf16")
    for capability in SHARED:
        found = [(one["name"], one["id"]) for one in kernels if one["capability"] == capability]
        assert not found or (len(found) == 2 * 27 and len(set(found)) == 2)
