"""Decorators for methods of a session."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_inference_mode(method: _Method) -> _Method:
    """Run a method without gradients and outside of `torch.inference_mode`, even if the caller is in it.

    A session keeps tensors from call to call and updates them in place. torch forbids that for tensors made in
    inference mode.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


def closes_on_error(method: _Method) -> _Method:
    """Close the session if the method raises, as its state is then undefined."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.close()
            raise

    return run


def while_weights_stand(method: _Method) -> _Method:
    """Hold the lock that keeps others from writing the drafter's weights in place."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._drafting_lock:
            return method(self, *args, **kwargs)

    return run
