"""The images and other media of a batch, divided among its texts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation import utils

from ..errors import UnsupportedError
from .arguments import CallArguments

# Keeps some rows of encoded images. Releases before 5.23 do not encode them before they read the prompt.
_rows_of = getattr(utils, "_slice_mm_encoder_output", None)
_OF_TOKENS = ("position_ids", "token_type_ids", "mm_token_type_ids")


class Media(NamedTuple):
    """The media of one text.

    Args:
        kwargs: more arguments of the forward that reads the prompt.
        shift: the position of the next token less the number of tokens: an image may take fewer positions.
    """

    kwargs: dict[str, Any]
    shift: int


def takes_media(target: PreTrainedModel) -> bool:
    """Whether the media of a batch can be divided among texts: transformers encodes them before the target reads."""
    return _rows_of is not None and target._supports_mm_encoder_outputs()


def divide_media(
    target: PreTrainedModel,
    inner: Callable[..., Any],
    call: CallArguments,
    inputs: torch.Tensor,
    is_token: torch.Tensor,
) -> list[Media]:
    """Encode the media of a batch, and divide them.

    Args:
        target: the model that reads them.
        inner: transformers' `generate`.
        call: the arguments of the batch.
        inputs: int64 `[B, n]`: the prompts, padded.
        is_token: bool `[B, n]`: which entries are tokens.

    Raises:
        UnsupportedError: there are some that the target does not encode. Names them.
    """

    def collect(model: Any, input_ids: torch.Tensor, **prepared: Any) -> dict[str, Any]:
        return prepared

    one = call.copy()
    one.set("num_return_sequences", 1)
    one.set("cache_implementation", "dynamic")
    one.set("custom_generate", collect)
    for name in ("assistant_model", "streamer"):
        one.remove(name)
    prepared = inner(*one.args, **one.kwargs)
    encoded = {name: output for name, output in (prepared.get("mm_encoder_outputs") or {}).items() if output}
    left = [name for name in call.kwargs if isinstance(prepared.get(name), torch.Tensor) and "pixel" in name]
    if left:
        raise UnsupportedError(f"{' and '.join(left)} cannot be used in a batch: call generate once for each prompt.")
    places = {name: inputs == getattr(target.config, f"{name}_token_id") for name in encoded}
    rows = {name: is_place.flatten().cumsum(0).view_as(is_place) - 1 for name, is_place in places.items()}
    divided = []
    for row, columns in enumerate(is_token):
        own: dict[str, Any] = {
            name: prepared[name][..., row : row + 1, columns]
            for name in _OF_TOKENS
            if isinstance(prepared.get(name), torch.Tensor)
        }
        own["mm_encoder_outputs"] = {
            name: _rows_of(output, rows[name][row][places[name][row]])
            for name, output in encoded.items()
            if bool(places[name][row].any())
        }
        # With a row for each axis of an image, after one for the text.
        positions = own["position_ids"]
        positions = positions[1:] if positions.dim() == 3 and positions.shape[0] == 4 else positions
        divided.append(Media(own, int(positions.max()) + 1 - int(columns.sum())))
    return divided
