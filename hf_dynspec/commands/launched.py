"""The processes that a launcher such as `accelerate launch` started."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

# What tells a process that launchers started that it is one of several, as accelerate reads it.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# How long processes wait for one another: machines may be of different speed.
_PATIENCE = timedelta(days=7)


class Launched:
    """The processes that a launcher started, of which this is one; this one alone if there is no launcher."""

    def __init__(self) -> None:
        self.index, self.count, self._state = 0, 1, None
        if any(int(os.environ.get(name) or 1) > 1 for name in _WORLD_SIZES):
            from accelerate import PartialState

            before_connecting()
            self._state = PartialState(cpu=True, timeout=_PATIENCE)
            self.index, self.count = self._state.process_index, self._state.num_processes

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def own_device(self, name: str) -> str:
        """The device that this process runs models on, if all of them were told `name`: "auto" and "cuda" give each
        process a GPU of its own, if there are any."""
        import torch

        if self.count == 1 or name not in ("auto", "cuda") or not torch.cuda.is_available():
            return name
        return f"cuda:{int(os.environ.get('LOCAL_RANK') or 0) % torch.cuda.device_count()}"

    def wait(self) -> None:
        """Wait for all of them."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def main_first(self, function: Callable[[], Any]) -> Any:
        """Call a function, in the main process before the others, and go on when all have."""
        with nullcontext() if self._state is None else self._state.main_process_first():
            result = function()
        self.wait()
        return result

    @property
    def local_count(self) -> int:
        """How many of them share this machine."""
        return 1 if self._state is None else int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def before_connecting() -> None:
    """To be called before this process is connected with others. The functions of `torch.distributed.nn` hold on to
    the group of processes that is there when they are first imported, and a group that is held does not end its
    threads when it is destroyed."""
    from torch import distributed

    if distributed.is_available():
        import torch.distributed.nn  # noqa: F401


def part_from_launched() -> None:
    """Disconnect this process from the others. An interpreter that ends while connected aborts now and then, as its
    threads still run, and the launcher then ends the other processes too."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
