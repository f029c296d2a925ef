"""Draft steps of a causal language model as CUDA graphs, which the host launches at once.

Launching a small model's operations one by one takes many times as long as computing them on a GPU. A graph launches
all at once. It computes at fixed addresses: keys and values lie in memory for a fixed number of positions, which is
doubled when the text outgrows it, and a mask hides unused positions. A graph must agree with the decoder to be used.
"""

import threading
import weakref
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..cache_names import cache_inputs
from ..memory.fixed_decoder import with_fused_norms
from .traceable_decoder import COMPARED_LENGTHS, SteadyDecoder, are_close, cache_of, can_be_recorded, context_of
from .weights_watch import WeightsWatch

# Positions in the smallest memory.
_FEWEST_POSITIONS = 512
# Forwards before a capture, in which libraries set themselves up.
_WARM_UPS = 2
# The most tokens that graphs read one by one instead of the decoder: a fully accepted draft leaves two.
_MOST_APPENDED = 4
# Larger memory is not kept for the next text.
_MOST_KEPT_POSITIONS = 8192

# A capture waits for the device, and no other capture may run meanwhile.
_capturing = threading.Lock()


class CapturedSteps:
    """Draft steps of one model, valid while `still_holds` and the weights keep their addresses.

    Memory and graphs are lent to one text after another. One of each size up to 8,192 positions is kept for the next.

    Args:
        decoder: the captured decoder.
        windows: for each kind of layer the most positions that it looks back on (None: all).
        like: the decoder's keys and values of any context.
    """

    def __init__(self, decoder: SteadyDecoder, windows: Mapping[str, int | None], like: list[torch.Tensor]):
        self._decoder, self._windows = decoder, windows
        self._like = [one[..., :0, :] for one in like]
        self._module = with_fused_norms(decoder.watch.module)
        self._free: dict[int, _StepMemory] = {}
        # The garbage collector may return memory while the lock is held.
        self._lock = threading.RLock()

    def still_holds(self) -> bool:
        return self._decoder.still_holds()

    def anew(self) -> "CapturedSteps":
        """Steps of the same decoder with weights at other addresses."""
        return CapturedSteps(self._decoder, self._windows, self._like)

    def layers(self) -> "FixedLayers":
        """Empty keys and values, to which steps append."""
        return FixedLayers(self)

    def lend(self, positions: int) -> "_StepMemory":
        """Memory for at least this many positions."""
        capacity = max(_FEWEST_POSITIONS, 1 << (positions - 1).bit_length())
        with self._lock:
            memory = self._free.pop(capacity, None)
        if memory is not None:
            memory.begin()
            return memory
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._new_memory(capacity)
            except torch.OutOfMemoryError:
                # Leaving this block frees the failed attempt's memory.
                pass
            with self._lock:
                self._free.clear()
            return self._new_memory(capacity)

    def _new_memory(self, capacity: int) -> "_StepMemory":
        return _StepMemory(self._module, self._windows, capacity, self._like)

    def give_back(self, memory: "_StepMemory") -> None:
        """Keep memory for the next text unless it is very large."""
        if memory.capacity <= _MOST_KEPT_POSITIONS:
            with self._lock:
                self._free[memory.capacity] = memory

    def agree(self) -> bool:
        """Whether steps agree with the decoder after contexts of several lengths."""
        decoder = self._decoder.watch.module
        for length in COMPARED_LENGTHS:
            token_id, context = context_of(decoder, length)
            fixed = self.layers()
            fixed.replace(context)
            actual = fixed.append(token_id[0], length)
            cache = cache_of(context)
            position = torch.full_like(token_id, length)
            expected = decoder(input_ids=token_id, position_ids=position, **cache_inputs(cache))[0][0]
            kept = fixed.read()[-1][..., -1, :]
            if not are_close(actual, expected) or not are_close(kept, cache.layers[-1].values[..., -1, :]):
                return False
        return True


@torch.inference_mode(False)
@torch.no_grad()
def capture_steps(
    model: PreTrainedModel, watch: WeightsWatch, windows: Mapping[str, int | None]
) -> CapturedSteps | None:
    """Capture draft steps of a model's decoder on a GPU, which `watch` watches (None: they would not hold for every
    context, or the weights are offloaded). `windows` as for `CapturedSteps`."""
    if not can_be_recorded(model, list(watch.module.modules())):
        return None
    # A model may do anything in its forward. Without a capture its steps are only slower.
    try:
        steps = CapturedSteps(SteadyDecoder(watch), windows, context_of(watch.module, 1)[1])
        return steps if steps.agree() else None
    except Exception:
        return None


class FixedLayers:
    """Keys and values as `GrownLayers`, but at fixed addresses. `steps` lend the memory."""

    def __init__(self, steps: CapturedSteps):
        self._steps = steps
        self._memory: _StepMemory | None = None
        self._count = 0

    @property
    def most_appended(self) -> int:
        return _MOST_APPENDED if self._count else 0

    def start_round(self) -> None:
        """Go on in the current stream. Graphs read the present contents of the weights' memory."""
        if self._memory is not None:
            self._memory.follow_stream()

    def append(self, token_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Append tokens, int64 `[m]`, to a text of that length. Returns their hidden states, `[m, d]`."""
        self._reserve(length + token_ids.shape[0])
        hidden = [self._memory.append(one, length + index) for index, one in enumerate(token_ids.split(1))]
        self._count = length + len(hidden)
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def read(self) -> list[torch.Tensor]:
        return self._memory.layers(self._count) if self._count else []

    def replace(self, tensors: list[torch.Tensor]) -> None:
        count = tensors[0].shape[-2]
        self._reserve(count)
        self._memory.write(tensors, self._count)
        self._count = count

    def truncate(self, length: int) -> None:
        if length < self._count:
            self._memory.clear(length, self._count)
        self._count = length

    def _reserve(self, positions: int) -> None:
        """Get memory for this many positions, and copy the present ones."""
        before = self._memory
        if before is not None and before.capacity >= positions:
            return
        self._memory = self._steps.lend(positions)
        if before is not None:
            self._memory.write(before.layers(self._count), 0)
            self._return()
        # Nobody announces the end of a text.
        self._return = weakref.finalize(self, self._steps.give_back, self._memory)
        self._return.atexit = False


class _FixedLayer(DynamicLayer):
    """Keys and values, written at a place that is a tensor on the device."""

    place: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(-2, self.place, key_states)
        self.values.index_copy_(-2, self.place, value_states)
        return self.keys, self.values


class _StepMemory:
    """Keys and values for `capacity` positions, and the graph of the step that appends a token to them.

    Args:
        decoder: the model without its output projection.
        windows: as for `CapturedSteps`.
        capacity: the number of positions.
        like: for each tensor one with its dtype, its device and its shape except for the positions.
    """

    def __init__(self, decoder: nn.Module, windows: Mapping[str, int | None], capacity: int, like: list[torch.Tensor]):
        self.capacity = capacity
        self._decoder, self._windows = decoder, windows
        # Zeros, since hidden values are multiplied by 0, and NaN times 0 is NaN. Tensors of one shape share a block,
        # which is cleared at once.
        self._blocks = self._tensors = [one.new_zeros(*one.shape[:-2], capacity, one.shape[-1]) for one in like]
        if len({one.shape for one in like}) == 1:
            self._blocks = [torch.stack(self._tensors)]
            self._tensors = list(self._blocks[0].unbind())
        device = like[0].device
        self._token_id = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._places = torch.arange(capacity, device=device)
        self._hidden: torch.Tensor | None = None
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._graph = self._captured()

    def begin(self) -> None:
        """Begin another text."""
        self.follow_stream()
        self.clear(0, self.capacity)

    def clear(self, start: int, stop: int) -> None:
        for block in self._blocks:
            block[..., start:stop, :].zero_()

    def follow_stream(self) -> None:
        """Make the current stream wait for the stream used before."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._stream:
                current.wait_stream(self._stream)
                self._stream = current

    def layers(self, length: int) -> list[torch.Tensor]:
        """Views of the first `length` positions."""
        return [tensor[..., :length, :] for tensor in self._tensors]

    def write(self, tensors: list[torch.Tensor], start: int) -> None:
        """Copy the positions from `start` on."""
        for mine, theirs in zip(self._tensors, tensors, strict=True):
            mine[..., start : theirs.shape[-2], :] = theirs[..., start:, :].detach()

    def append(self, token_id: torch.Tensor, length: int) -> torch.Tensor:
        """Append a token, int64 `[1]`, after `length` positions. Returns its hidden state, `[1, d]`."""
        self._token_id.copy_(token_id.unsqueeze(0))
        self._position.fill_(length)
        if self._graph is None:
            self._run()
        else:
            with torch.cuda.device(self._device):
                self._graph.replay()
        # The next step overwrites it.
        return self._hidden[0].clone()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """The graph of a step (None: no CUDA device)."""
        if self._stream is None:
            return None
        with _capturing, torch.cuda.device(self._device):
            aside = torch.cuda.Stream()
            aside.wait_stream(self._stream)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):
                    self._run()
            self._stream.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads may be computing.
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                self._run()
        return graph

    @torch.no_grad()
    def _run(self) -> None:
        cache = cache_of(self._tensors, _FixedLayer)
        for layer in cache.layers:
            layer.place = self._position[0]
        masks = {kind: self._mask(window) for kind, window in self._windows.items()}
        # In the decoder's own dtype, also if the call that needed the memory uses autocast.
        with torch.autocast(self._device.type, enabled=False):
            self._hidden = self._decoder(
                input_ids=self._token_id,
                position_ids=self._position,
                # A decoder with one kind of layer takes its mask as it is.
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                **cache_inputs(cache),
            )[0]

    def _mask(self, window: int | None) -> torch.Tensor:
        """`[1, 1, 1, capacity]`: 0 for visible positions, the lowest number for others."""
        distances = self._position[0] - self._places
        hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
        dtype = self._tensors[0].dtype
        return torch.zeros_like(distances, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[None, None, None]
