"""What holds while a method of a session runs."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_inference_mode(method: _Method) -> _Method:
    """Run a method without gradients and outside of `torch.inference_mode`, whatever its caller does.

    What a session keeps from call to call is updated in place, which torch forbids for tensors that were made in
    inference mode as soon as somebody calls outside of it.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


def closes_on_error(method: _Method) -> _Method:
    """A session that an error interrupted is given up, as nobody knows what was done and what was not."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.close()
            raise

    return run


def while_weights_stand(method: _Method) -> _Method:
    """Whoever writes weights of the drafter in place does so between drafts."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._drafting_lock:
            return method(self, *args, **kwargs)

    return run
