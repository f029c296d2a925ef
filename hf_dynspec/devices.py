"""What the host may do on a device without waiting for it."""

import torch

# Kinds of device whose numbers lie in the host's own memory. On every other kind, to look at a number is to wait until
# all that was asked of the device is done. The one switch of all shortcuts that look at numbers: with nothing in it,
# everything on a CPU goes as it goes elsewhere.
FREE_TO_LOOK = frozenset({"cpu"})


def is_free_to_look(device: torch.device) -> bool:
    """Whether numbers on a device can be looked at without waiting for it."""
    return device.type in FREE_TO_LOOK


# Kinds of device to which many operations can be given at once, as a graph that was captured.
GRAPHS = frozenset({"cuda"})


def has_graphs(device: torch.device) -> bool:
    """Whether operations on a device can be captured, and asked for at once."""
    return device.type in GRAPHS
