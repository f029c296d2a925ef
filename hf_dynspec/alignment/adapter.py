"""What is learnt under one name, such as a domain's or a user's."""

from dataclasses import dataclass, field

import torch

from .gate import Gate
from .replay import ReplayBuffer

FIRST_ADAPTER = "default"


@dataclass(eq=False)
class Adapter:
    """What was learnt under one name, from which requests, and what came of it.

    Args:
        buffer: the requests.
        gate: whether what was learnt has earned to be served.
        random: draws requests of the buffer.
        updates: of what was learnt.
        weights: `Learner.adapter_state` while another one is learnt; None where there were no updates.
    """

    buffer: ReplayBuffer
    gate: Gate
    random: torch.Generator = field(repr=False)
    updates: int = 0
    weights: dict[str, torch.Tensor] | None = None
