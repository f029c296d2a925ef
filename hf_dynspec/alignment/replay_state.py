"""Remembered requests as plain tensors, for who asks that users' text be kept, and back."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from ..errors import ConfigurationError
from .replay import LARGEST_SHORTLIST, Trajectory

_NUMBERS = ("first", "temperature")
_MAY_MISS = ("features", "is_chosen")
_IDS = ("token_ids", "top_ids", "shortlist_ids")
_FLAGS = ("is_wrong", "is_chosen")


def requests_state(trajectories: Iterable[Trajectory]) -> list[dict[str, torch.Tensor]]:
    """Of each request its tensors by the names of `Trajectory`, its numbers as tensors without dimensions. Copies."""
    state = []
    for trajectory in trajectories:
        values = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
        numbers = {name: torch.tensor(values[name], device="cpu") for name in _NUMBERS}
        tensors = {name: one.clone() for name, one in values.items() if isinstance(one, torch.Tensor)}
        state.append(tensors | numbers)
    return state


def requests_from(
    state: Sequence[Mapping[str, torch.Tensor]], num_embeddings: int, reads_features: bool, device: torch.device
) -> list[Trajectory]:
    """What `requests_state` gave, of which nothing is believed.

    Args:
        state: of each request.
        num_embeddings: how many ids the drafter reads.
        reads_features: whether it reads hidden states of the target.
        device: where the requests are going to lie.

    Raises:
        ConfigurationError: it is no such state, or of another kind of drafter. Says what is wrong.
    """
    trajectories = []
    for number, one in enumerate(state):
        if problem := _problem(one, num_embeddings, reads_features):
            raise ConfigurationError(f"request {number} of the replay buffer: {problem}. Save the buffer again.")
        values: dict[str, Any] = {name: value.to(device) for name, value in one.items() if name not in _NUMBERS}
        values |= {"first": int(one["first"]), "temperature": float(one["temperature"])}
        trajectories.append(Trajectory(**values))
    return trajectories


def _problem(one: Mapping[str, torch.Tensor], num_embeddings: int, reads_features: bool) -> str | None:
    """What is wrong with the state of a request; None where nothing is."""
    names = {field.name for field in fields(Trajectory)}
    if wrong := sorted((names - one.keys() - {*_MAY_MISS}) | (one.keys() - names)):
        return f"it lacks or has too much of {', '.join(map(str, wrong))}"
    if wrong := [name for name, value in one.items() if not isinstance(value, torch.Tensor)]:
        return f"{wrong[0]} is no tensor"
    if ("features" in one) != reads_features:
        return "it was left by a drafter that reads other things of the target"
    return _problem_of_tensors(one) or _problem_of_values(one, num_embeddings)


def _problem_of_tensors(one: Mapping[str, torch.Tensor]) -> str | None:
    """What is wrong with dtypes and shapes."""
    for name, value in one.items():
        if not _is_of_its_kind(name, value.dtype):
            return f"{name} is {value.dtype}"
    if any(one[name].dim() for name in _NUMBERS) or one["token_ids"].dim() != 1 or one["top_ids"].dim() != 2:
        return "its shapes are wrong"
    n, verified, kept = one["token_ids"].shape[0], one["is_wrong"].numel(), one["top_ids"].shape[1]
    if not 1 <= int(one["first"]) == n - verified < n:
        return f"{verified} of its {n} tokens are verified, and they begin at {int(one['first'])}"
    shapes = {"top_ids": (verified, kept), "top_logits": (verified, kept)}
    shapes |= dict.fromkeys(("log_probabilities", "log_normalisers", *_FLAGS), (verified,))
    for name, shape in shapes.items():
        if name in one and tuple(one[name].shape) != shape:
            return f"{name} has the shape {list(one[name].shape)}, and not {list(shape)}"
    if one["shortlist_ids"].dim() != 1 or one["shortlist_ids"].shape[0] > LARGEST_SHORTLIST or not kept:
        return "its shapes are wrong"
    if "features" in one and (one["features"].dim() != 2 or one["features"].shape[0] != n):
        return f"features has the shape {list(one['features'].shape)}"
    return None


def _is_of_its_kind(name: str, dtype: torch.dtype) -> bool:
    if name in _FLAGS:
        return dtype == torch.bool
    return dtype == torch.int64 if name in (*_IDS, "first") else dtype.is_floating_point


def _problem_of_values(one: Mapping[str, torch.Tensor], num_embeddings: int) -> str | None:
    """What is wrong with the numbers."""
    if any(bool((one[name] < 0).any()) for name in _IDS) or bool((one["token_ids"] >= num_embeddings).any()):
        return f"an id is no token; there are {num_embeddings}"
    for name in ("log_probabilities", "log_normalisers", "features"):
        if name in one and not bool(one[name].isfinite().all()):
            return f"{name} holds NaN or infinity"
    # −inf stands for ids that there were not.
    if bool((one["top_logits"].isnan() | (one["top_logits"] == torch.inf)).any()):
        return "top_logits holds NaN or infinity"
    temperature = float(one["temperature"])
    return None if math.isfinite(temperature) and temperature >= 0 else f"its temperature is {temperature}"
