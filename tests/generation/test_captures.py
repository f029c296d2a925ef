"""A capture cannot hurt: whatever fails in it, stream, generator, allocator and other graphs are as before.

torch's CUDA is replaced by one that keeps the books of the real one: which stream is current, whose operations are
being captured, and what a capture that fails leaves behind.
"""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch

from hf_dynspec.rounds import capture

DEVICE = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.waits_for: set[FakeStream] = set()

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits_for.add(other)


class FakeCuda:
    """CUDA on one device."""

    def __init__(self):
        self.default = FakeStream()
        self.streams = [self.default]
        self.capture: FakeGraph | None = None
        # Pools that allocations go to.
        self.allocating: set[tuple[int, int]] = set()
        self.generator_waits = False
        self.launched: list[str] = []
        self.fails_at: int | None = None
        self.unjoined: set[FakeStream] = set()

    def current_stream(self, device=None) -> FakeStream:
        return self.streams[-1]

    @contextmanager
    def stream(self, one: FakeStream):
        self.streams.append(one)
        try:
            yield
        finally:
            self.streams.pop()

    def operation(self, name: str) -> None:
        if self.capture is None:
            self.launched.append(name)
            return
        if len(self.capture.operations) == self.fails_at:
            self.capture.is_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        self.capture.operations.append(name)

    def rand(self, *size, device) -> None:
        if self.generator_waits and self.capture is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.operation("rand")

    def end_allocations(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)


class FakeGraph:
    def __init__(self, cuda: FakeCuda):
        self._cuda, self.operations, self.is_broken = cuda, [], False

    def capture_begin(self, pool, capture_error_mode) -> None:
        cuda = self._cuda
        assert cuda.current_stream() is not cuda.default and capture_error_mode == "thread_local"
        assert not gc.isenabled()
        cuda.capture, cuda.generator_waits, self.pool = self, True, pool
        cuda.allocating.add(pool)

    def capture_end(self) -> None:
        cuda, unjoined = self._cuda, self._cuda.unjoined
        cuda.capture, cuda.unjoined = None, set()
        if self.is_broken or unjoined:
            # torch does none of the rest.
            raise RuntimeError(
                "capture was invalidated" if self.is_broken else "capture has streams that are not joined"
            )
        cuda.allocating.remove(self.pool)
        cuda.generator_waits = False

    def replay(self) -> None:
        self._cuda.launched += self.operations


class FakeGenerator:
    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda

    def clone_state(self) -> str:
        return "a copy"

    def graphsafe_set_state(self, state: str) -> None:
        assert state == "a copy"
        self._cuda.generator_waits = False


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()

    @contextmanager
    def on_device(device):
        yield

    handles = iter(range(1, 100))
    parts = {
        "device": on_device,
        "current_stream": fake.current_stream,
        "stream": fake.stream,
        "Stream": FakeStream,
        "CUDAGraph": lambda: FakeGraph(fake),
        "graph_pool_handle": lambda: (next(handles), 0),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "default_generators": [FakeGenerator(fake)],
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocations, raising=False)
    monkeypatch.setattr(torch, "rand", fake.rand)
    monkeypatch.setattr(capture, "_streams", capture.defaultdict(list))
    monkeypatch.setattr(capture, "replaced", capture.Counter())
    return fake


def run_three(cuda: FakeCuda) -> None:
    for name in ("draft", "rand", "verify"):
        cuda.rand(1, device=DEVICE) if name == "rand" else cuda.operation(name)


@pytest.mark.parametrize("fails_at", [0, 1, 2, "the end", None])
def test_a_capture_leaves_all_as_it_was(fails_at, cuda):
    other = capture.record(lambda: cuda.operation("other"), DEVICE)
    cuda.fails_at = fails_at if isinstance(fails_at, int) else None

    def run() -> None:
        run_three(cuda)
        if fails_at == "the end":
            cuda.unjoined.add(FakeStream())

    if fails_at is None:
        capture.record(run, DEVICE)()
        assert cuda.launched == ["draft", "rand", "verify"] and not capture.replaced[DEVICE]
    else:
        with pytest.raises(RuntimeError, match="not joined" if fails_at == "the end" else "not permitted"):
            capture.record(run, DEVICE)
        # Whoever draws now does so from another generator than graphs that were there.
        assert capture.replaced[DEVICE] == 1
    assert cuda.streams == [cuda.default] and cuda.capture is None and gc.isenabled()
    assert not cuda.allocating
    cuda.launched.clear()
    cuda.rand(1, device=DEVICE)
    other()
    assert cuda.launched == ["rand", "other"]
    # What is recorded next works.
    cuda.fails_at = None
    capture.record(lambda: run_three(cuda), DEVICE)()
    assert cuda.launched[2:] == ["draft", "rand", "verify"]


def test_graphs_that_live_have_streams_of_their_own(cuda, monkeypatch):
    used = []
    begin = FakeGraph.capture_begin
    monkeypatch.setattr(
        FakeGraph, "capture_begin", lambda self, **some: (used.append(cuda.current_stream()), begin(self, **some))
    )
    first, second = (capture.record(lambda: run_three(cuda), DEVICE) for _ in range(2))
    assert used[0] is not used[1]
    del first
    third = capture.record(lambda: run_three(cuda), DEVICE)
    assert used[2] is used[0] and second is not third


def test_waits_of_this_thread_are_noted(monkeypatch):
    mode = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    with pytest.warns(UserWarning, match="another") as others:
        with capture.noting_waits() as places:
            assert mode[-1] == "warn"
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
            warnings.warn("another", UserWarning, stacklevel=1)
    assert len(others) == 1 and len(places) == 2 and __file__ in places[0] and mode[-1] == "default"
