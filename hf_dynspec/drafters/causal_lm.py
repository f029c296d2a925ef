"""Any decoder-only causal language model of transformers as an independent drafter."""

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ..cache_names import is_recurrent
from ..devices import has_graphs
from ..errors import UnsupportedError
from ..memory.fixed import FixedMemory
from ..memory.recurrent import Places, record_past, require_states_in_cache
from ..modeling.head import DynamicLMHead
from ..modeling.masks import attention_windows, require_known_kinds, require_tree_masks
from ..modeling.parts import FORWARD_ERRORS, decoder_of, input_device, require_finite_weights
from .base import Drafter, UnrolledStep
from .causal_lm_fixed import FixedCausalLM
from .causal_lm_state import CausalLMState
from .traceable_decoder import can_be_recorded, require_steady_positions
from .traced_step import GrownLayers, TracedStep, trace_step
from .weights_watch import WeightsWatch

# The most that hidden states of a drafter may differ by rounding to 16 bits or by quantised numbers, relative to the
# largest; and the least and most by which later tokens change them by a common scale of activations, not by attention.
_ROUNDING, _SHARED_SCALES = 5e-2, (1e-3, 0.3)


class CausalLMDrafter(Drafter):
    """Runs the model's decoder without its output projection.

    Args:
        model: a decoder-only model with a language modelling head, in evaluation mode for reproducible drafts.

    Raises:
        UnsupportedError: the model is an encoder-decoder, keeps a state outside its cache, changes hidden
            states or logits in a way that its configuration does not show, or holds weights that are not finite.
    """

    def __init__(self, model: PreTrainedModel):
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(model).__name__} is an encoder-decoder model. Use a decoder-only model as the drafter, or "
                "transformers' own assisted generation."
            )
        self._has_states = is_recurrent(model)
        if self._has_states:
            require_states_in_cache(model)
        self.model = model
        self.most_positions = rows_of_position_table(model)
        self.windows = attention_windows(model.config.get_text_config())
        self._lock = threading.RLock()
        self._version = 0
        self._load_projection()
        self._watch = WeightsWatch(self.decoder)
        self.has_own_layers = _has_own_layers(model)
        self.step = self._recorded_step()
        self._could_be_recorded = self.step is not None
        self._reads_at_once = not self._has_states
        self._require_cache()
        if self._has_states:
            self._reads_at_once = self._goes_on_at_once()

    @property
    def module(self) -> PreTrainedModel:
        """The model, its output projection included."""
        return self.model

    @property
    def decoder(self) -> torch.nn.Module:
        """The model without its output projection."""
        return decoder_of(self.model)

    @property
    def weights_version(self) -> int:
        with self._lock:
            watch = self._projection_watch
            if watch is None or watch.module is not self.model.get_output_embeddings() or watch.has_changed():
                self._load_projection()
            if self.decoder is not self._watch.module:
                self._watch = WeightsWatch(self.decoder)
                self._load_decoder()
            elif self._watch.has_changed() or (self.step is not None and not self.step.still_holds()):
                self._load_decoder()
            return self._version

    def _load_projection(self) -> None:
        # Without a watch the next round tries again, in case there is an error here.
        self._projection_watch = None
        self.head = self._checked_head()
        self._projection_watch = WeightsWatch(self.model.get_output_embeddings(), samples=True)
        self._version += 1

    def _load_decoder(self) -> None:
        # Weights are inputs of a trace, but parts, settings and hooks of the decoder are not.
        self.step = self._recorded_step()
        self._version += 1

    def _recorded_step(self) -> TracedStep | None:
        """A traced draft step, which saves the host's work between operations (None: not possible)."""
        # On a GPU a trace makes the host wait, and rounds over fixed memory are graphs.
        if self.has_own_layers or has_graphs(input_device(self.model)):
            return None
        return trace_step(self.model, self._watch)

    def _record_again(self) -> None:
        """Record a step if that has become possible, as when a hook is gone."""
        with self._lock:
            if self.step is None and not self.has_own_layers:
                could, can = self._could_be_recorded, can_be_recorded(self.model, list(self.decoder.modules()))
                self._could_be_recorded = can
                if can and not could:
                    self.step = self._recorded_step()

    def _checked_head(self) -> DynamicLMHead:
        head = DynamicLMHead.matching(self.model)
        if head is not None:
            return head
        name = type(self.model).__name__
        if self.model.training:
            raise UnsupportedError(f"{name} is in training mode, in which its outputs are random: call eval().")
        require_finite_weights(self.model)
        raise UnsupportedError(
            f"{name} does something between its decoder and its logits that this package does not know, so shortlist "
            "logits would be wrong. Use another drafter."
        )

    def _require_cache(self) -> None:
        """Refuse a decoder that ignores its cache or cannot roll it back."""
        text = self._arbitrary_tokens(4)

        def trial() -> tuple[torch.Tensor, torch.Tensor]:
            together, one_by_one = self.start(), self.start()
            one_by_one.advance(text[:2])
            one_by_one.draft(text[3:])
            one_by_one.truncate(2)
            one_by_one.draft(text[2:3])
            return one_by_one.draft(text[3:])[-1], together.advance(text)[-1]

        self._require_agreement(
            trial,
            "token by token",
            "its cache cannot be rolled back: {}. Use a drafter with attention layers alone",
            "its decoder ignores its cache. Use another drafter",
        )

    @torch.no_grad()
    def _goes_on_at_once(self) -> bool:
        """Whether the decoder goes on from its recurrent state when it reads several tokens at once."""
        text = self._arbitrary_tokens(4)
        both, one_by_one = self.start(), self.start()
        both.reads_at_once = True
        for state in (both, one_by_one):
            state.advance(text[:2])
        return self._agree(both.advance(text)[-1], one_by_one.advance(text)[-1])

    def require_trees(self) -> None:
        if not self._has_states:
            require_tree_masks(self.model)
            require_known_kinds(self.model)
        if self.has_own_layers:
            kept = "a recurrent state" if self._has_states else "convolutions of earlier tokens"
            raise UnsupportedError(
                f"{type(self.model).__name__} caches more than keys and values, such as {kept}, which would mix the "
                "branches of a tree. Draft chains with tree=False."
            )
        text = self._arbitrary_tokens(16)

        def trial() -> tuple[torch.Tensor, torch.Tensor]:
            alone, tree = self.start(), self.start()
            alone.advance(text[:4])
            for token_id in text[-2:].split(1):
                expected = alone.draft(token_id)[-1]
            tree.advance(text[:4])
            first = text[4:15]
            tree.draft(first, torch.zeros_like(first))
            parents = torch.full((3,), first.shape[0] - 1, dtype=torch.int64, device=text.device)
            return tree.draft(text[-3:], parents)[-1], expected

        self._require_agreement(
            trial,
            "a tree of tokens",
            "it takes no tree mask: {}. Draft chains with tree=False",
            "the branches change each other's outputs, as its attention goes by places in the cache (a window, or "
            "biases by distance). Draft chains with tree=False",
        )

    def require_fixed_memory(self) -> None:
        require_steady_positions(self.model)
        if self.has_own_layers:
            raise UnsupportedError(
                f"{type(self.model).__name__} caches more than keys and values, for which fixed memory has no place."
            )

    def fixed(self, read: Cache, texts: int, capacity: int, nodes: int) -> FixedCausalLM:
        config = self.model.config.get_text_config()
        memory = FixedMemory.like(read, config, texts, capacity, nodes)
        return FixedCausalLM(self.model, self.head.weight, self.embed, memory, self.step)

    @torch.no_grad()
    def _require_agreement(
        self, trial: Callable[[], tuple[torch.Tensor, torch.Tensor]], what: str, failing: str, differing: str
    ) -> None:
        """Refuse the model unless a trial, of drafting `what`, returns two hidden states `[d]` that agree. `failing`
        is the problem if it raises an error, which fills the placeholder; `differing`, if the two differ."""
        name = type(self.model).__name__
        try:
            actual, expected = trial()
        except FORWARD_ERRORS as error:
            problem = failing.format(f"{error!s:.200}")
            raise UnsupportedError(f"{name} cannot draft {what}, as {problem}.") from error
        if not self._agree(actual, expected):
            require_finite_weights(self.model)
            raise UnsupportedError(f"{name} cannot draft {what}: {differing}.")

    def _agree(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether two hidden states `[d]` are the same but for rounding, or cannot be, as the drafter quantises
        activations: a draft is only proposed, so it need not be exact."""
        if _difference(actual, expected) <= _ROUNDING:
            return True
        text, (least, most) = self._arbitrary_tokens(16), _SHARED_SCALES
        first, second = (self.start().advance(one)[7] for one in (text, torch.cat([text[:8], text[:8]])))
        return least < _difference(first, second) < most

    def _arbitrary_tokens(self, count: int) -> torch.Tensor:
        return torch.arange(1, count + 1, device=input_device(self.model)) % self.head.weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        return self.decoder.get_input_embeddings().weight.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Without the constant factor that some families apply, such as Gemma.
        return torch.nn.functional.embedding(token_ids, self.decoder.get_input_embeddings().weight)

    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        # Hidden states do not depend on the beginning of a draft. A recorded step would give no gradients.
        embedded, hidden = self.embed(token_ids), self._state(GrownLayers()).advance(token_ids)
        for step in range(first, first + depth):
            yield UnrolledStep(embedded[1 + step :], hidden[step:-1], hidden[1 + step :])

    def token_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head.token_logits(hidden, token_ids, self.model.get_output_embeddings())

    def copy(self) -> "CausalLMDrafter":
        return CausalLMDrafter(copy.deepcopy(self.model))

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        # Other changes are taken up first. The replacement then changes numbers alone, so the trace, whose inputs they
        # are, and the head's kind still hold.
        _ = self.weights_version
        replace = super().prepare_weights(weights)
        projection, has_projection = self.model.get_output_embeddings(), not self.replaces_numbers(weights)

        def replace_and_accept() -> None:
            with self._lock:
                replace()
                self._watch.accept_weights()
                if has_projection:
                    self._projection_watch.accept_weights()
                    self.head = self.head.anew(projection.weight, projection.bias)
                else:
                    self.replacements += 1
                self._version += 1

        return replace_and_accept

    def replaces_numbers(self, names: Collection[str]) -> bool:
        parameters, projection = dict(self.module.named_parameters()), self.model.get_output_embeddings()
        return not any(parameters[name] is one for name in names for one in projection.parameters())

    def start(self) -> CausalLMState:
        if self.step is None:
            self._record_again()
        # Read once, as another thread may replace it.
        step = self.step
        return self._state(GrownLayers() if step is None else step.layers())

    def _state(self, layers: GrownLayers) -> CausalLMState:
        cache = places = None
        if self.has_own_layers:
            cache = DynamicCache(config=self.model.config.get_text_config())
            record_past(cache, self._has_states)
            places = Places(cache) if self._has_states else None
        parts = self.decoder, self.head.weight, self.windows, self.embed
        return CausalLMState(*parts, layers, cache, places, self._reads_at_once)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number. NaN if one holds NaN."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def rows_of_position_table(model: PreTrainedModel) -> int | None:
    """The size of a model's table of positions, learned (GPT-2, OPT) or not (CTRL, GPT-J); None if it has none."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    decoder, tokens = decoder_of(model), model.get_input_embeddings()
    tables = [one.weight for one in decoder.modules() if isinstance(one, torch.nn.Embedding) and one is not tokens]
    tables += [one for name, one in decoder.named_buffers() if "pos" in name.rsplit(".", 1)[-1] and one.dim() == 2]
    # OPT and BioGPT have two rows before the first position's.
    has_table = most is not None and any(one.shape[0] - most in (0, 2) for one in tables)
    return most if has_table else None


def _has_own_layers(model: PreTrainedModel) -> bool:
    """Whether the model's cache has more than keys and values."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return any(hasattr(one, state) for one in layers for state in ("indexer_keys", "conv_states"))
