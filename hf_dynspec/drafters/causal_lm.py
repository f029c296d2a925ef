"""Any decoder-only causal language model of transformers as an independent drafter."""

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..head import DynamicLMHead
from .base import Drafter, DrafterState
from .traced_step import cache_of, layers_of, trace_step


class CausalLMDrafter(Drafter):
    """Runs the model's decoder without its output projection.

    Args:
        model: a decoder-only model with a language modelling head, in evaluation mode for reproducible drafts.

    Raises:
        UnsupportedError: the model is an encoder-decoder, keeps a state that cannot be rolled back, or does
            something to its hidden states or logits that its configuration does not tell.
    """

    def __init__(self, model: PreTrainedModel):
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(model).__name__} is an encoder-decoder model. Use a decoder-only model as the drafter, or "
                "transformers' own assisted generation."
            )
        if getattr(model, "_is_stateful", False):
            raise UnsupportedError(
                f"{type(model).__name__} keeps a recurrent state, which cannot be rolled back to the accepted tokens. "
                "Use an attention-only model as the drafter."
            )
        self.model = model
        self.decoder = model.get_decoder()
        self.head = DynamicLMHead.from_model(model)
        self._require_agreement()
        self.step = trace_step(model)

    def start(self) -> "CausalLMState":
        return CausalLMState(self)

    @torch.no_grad()
    def _require_agreement(self) -> None:
        """Compare one token's logits with the model's own, since families differ in what follows the decoder."""
        token_ids = torch.tensor([[1]], device=self.model.get_input_embeddings().weight.device)
        expected = self.model(input_ids=token_ids, use_cache=False).logits[0, -1].float()
        hidden = self.decoder(input_ids=token_ids, use_cache=False)[0][0, -1:].to(self.head.device)
        bias = self.head.bias
        actual = self.head._finish(torch.nn.functional.linear(hidden, self.head.weight, bias).float())[0]
        # What rounding may do to the logits; a missing scale, cap or transform is off by more.
        tolerance = (1e-3 if self.head.weight.dtype == torch.float32 else 5e-2) * expected.abs().max()
        if not bool(((actual - expected).abs() <= tolerance).all()):
            raise UnsupportedError(
                f"{type(self.model).__name__} does something between its decoder and its logits that this package "
                "does not know, so shortlist logits would be wrong. Use another drafter."
            )


class CausalLMState(DrafterState):
    """A growing key-value cache that is rolled back to the verified prefix after each round.

    Every layer keeps all positions, those with a sliding window too (their masks still hide what lies outside it): a
    window that forgets could not be rolled back past what a rejected draft pushed out of it.
    """

    def __init__(self, drafter: CausalLMDrafter):
        self._decoder = drafter.decoder
        self._step = drafter.step
        self._head_weight = drafter.head.weight
        self._layers: list[torch.Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def extend(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._step is not None and self._layers and token_ids.shape[0] == 1:
            position = torch.full((1, 1), self._length, dtype=torch.int64, device=token_ids.device)
            hidden, *self._layers = self._step(token_ids.unsqueeze(0), position, *self._layers)
        else:
            cache = cache_of(self._layers)
            hidden = self._decoder(input_ids=token_ids.unsqueeze(0), past_key_values=cache, use_cache=True)[0]
            self._layers = layers_of(cache)
        self._length += token_ids.shape[0]
        return hidden[0].to(self._head_weight)

    def truncate(self, length: int) -> None:
        if length < self._length:
            self._layers = [tensor[..., :length, :] for tensor in self._layers] if length else []
        self._length = length
