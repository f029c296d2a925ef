"""The rotary embedding of EAGLE heads, as tables."""

from functools import partial

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import ArtifactError
from .checkpoint_files import CONFIG_FILE
from .settings import EagleSettings

_FIRST_LENGTH = 256


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding; the first half of `sin` is negated (`Rotary.tables`)."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


class Rotary:
    """The rotary embedding of a head, of any kind that transformers knows.

    Attributes:
        is_steady: whether the rotation of a position is the same in texts of every length.

    Raises:
        ArtifactError: transformers does not know the kind, or a parameter is missing or mistyped.
    """

    def __init__(self, settings: EagleSettings, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        try:
            self._config = LlamaConfig(
                hidden_size=settings.hidden_size,
                num_attention_heads=settings.num_attention_heads,
                head_dim=settings.head_dim,
                **settings.rope,
            )
            rope = self._config.rope_parameters
            self._kind = rope["rope_type"]
            default = LlamaRotaryEmbedding.compute_default_rope_parameters
            # Some releases of transformers accept no device for the default kind, and others warn of it.
            is_default = self._kind == "default"
            self._parameters = default if is_default else partial(ROPE_INIT_FUNCTIONS[self._kind], device=device)
            self._limit = rope.get("original_max_position_embeddings", self._config.max_position_embeddings)
            self.is_steady = self._kind not in ("dynamic", "longrope")
            self._cached = self._compute(_FIRST_LENGTH)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            problem = f"transformers cannot make a rotary embedding of {dict(settings.rope)}: {error}"
            fix = "Correct rope_parameters, or rope_theta and rope_scaling."
            raise ArtifactError(f"{CONFIG_FILE}: rope_parameters", problem[:400], fix) from error
        if self._cached[1].shape[-1] != settings.head_dim:
            problem = "rotates only a part of each attention head"
            raise ArtifactError(f"{CONFIG_FILE}: partial_rotary_factor", problem, "Use a head that rotates all of it.")

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines `[length or more, 1, head_dim]` for a text of `length` positions."""
        key, cos, sin = self._cached
        if key != self._key(length) or cos.shape[0] < length:
            # Steady tables are made larger than needed, so that they are seldom made.
            key, cos, sin = self._cached = self._compute(max(length, 2 * cos.shape[0]) if self.is_steady else length)
        return cos, sin

    def _key(self, length: int) -> int:
        """A key that lengths with the same frequencies share."""
        if self._kind == "dynamic":
            return max(length, self._config.max_position_embeddings)
        return int(self._kind == "longrope" and length > self._limit)

    def _compute(self, length: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        # transformers' own module reads the length from the positions, which waits for the device.
        frequencies, scale = self._parameters(self._config, seq_len=length)
        positions = torch.arange(length, device=self._device, dtype=torch.float32)
        angles = torch.outer(positions, frequencies.to(device=self._device, dtype=torch.float32))
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # The sign is changed here instead of in each step: rotate_half(x) · sin = roll(x) · (−sin, sin).
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return self._key(length), cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1)
