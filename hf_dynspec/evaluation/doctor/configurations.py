"""Models of which there are configurations alone: built without memory."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import ConfigurationError, UnsupportedError
from ...fields import WholeNumber
from ...loading import empty_model

# Models of more layers are none, and would take long to build.
_LAYERS = WholeNumber(1, 1024)


def countable_model(config: PreTrainedConfig, dtype: torch.dtype | None, role: str) -> PreTrainedModel:
    """The model of a configuration on `meta`, if it can be drafted for and with.

    Args:
        config: the configuration.
        dtype: of its weights (None: what the configuration says, or float32 where it says nothing).
        role: what errors call the model.

    Raises:
        ConfigurationError: a size is out of range, or the weights are quantised and no dtype is given.
        UnsupportedError: it can neither draft nor be drafted for, or transformers cannot build it.
    """
    if config.is_encoder_decoder:
        raise UnsupportedError(f"the {role} is an encoder-decoder ({config.model_type}). Name a decoder-only model.")
    is_head = any("eagle" in str(one).lower() for one in config.architectures or ())
    # EAGLE-2 heads come with the architecture of their layer, and with a setting that no model of it has.
    has_own_bias = hasattr(config, "bias") and not hasattr(type(config)(), "bias")
    if is_head or has_own_bias or getattr(config, "draft_vocab_size", None) is not None:
        raise UnsupportedError(
            f"the {role}'s configuration is that of an EAGLE head, whose layers it does not tell. Have the head "
            "measured, with --eagle."
        )
    text = config.get_text_config()
    _LAYERS.require(f"the {role}'s num_hidden_layers", getattr(text, "num_hidden_layers", None))
    WholeNumber(2).require(f"the {role}'s vocab_size", getattr(text, "vocab_size", None))
    if dtype is None and getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            f"the {role}'s weights are quantised, and what its kernels read cannot be counted. Name a dtype, such as "
            "bfloat16, to count the model as it was before."
        )
    model = empty_model(config, dtype or config.dtype or text.dtype or torch.float32, role)
    if getattr(model, "_is_stateful", False):
        raise UnsupportedError(
            f"the {role} ({config.model_type}) keeps a recurrent state, which cannot be rolled back to the accepted "
            "tokens. Name a model that has attention alone."
        )
    return model
