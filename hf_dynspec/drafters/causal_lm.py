"""Any decoder-only causal language model of transformers as an independent drafter."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..errors import UnsupportedError
from ..modeling.head import DynamicLMHead
from ..modeling.masks import attention_mask, attention_windows, require_known_kinds
from ..modeling.parts import FORWARD_ERRORS, decoder_of, input_device
from .base import Drafter, DrafterState, ObserveDraftInputs, UnrolledStep
from .traced_step import TracedStep, cache_of, can_be_traced, layers_of, trace_step
from .weights_watch import WeightsWatch


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
        self.windows = attention_windows(model.config.get_text_config())
        self._lock = threading.RLock()
        self._version = 0
        self._take_up_projection()
        self._watch = WeightsWatch(self.decoder)
        self.has_own_layers = _has_own_layers(model)
        self.step = None if self.has_own_layers else trace_step(model, self._watch)
        self._could_be_traced = self.step is not None
        self._require_cache()

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
                self._take_up_projection()
            if self.decoder is not self._watch.module:
                self._watch = WeightsWatch(self.decoder)
                self._take_up_decoder()
            elif self._watch.has_changed() or (self.step is not None and not self.step.still_holds()):
                self._take_up_decoder()
            return self._version

    def _take_up_projection(self) -> None:
        # Not watched until there is a head of what is there, so that a failure is not forgotten.
        self._projection_watch = None
        self.head = self._checked_head()
        self._projection_watch = WeightsWatch(self.model.get_output_embeddings(), samples=True)
        self._version += 1

    def _take_up_decoder(self) -> None:
        # Weights are the trace's input; the decoder's parts, settings and hooks are what it must have been made with.
        self.step = None if self.has_own_layers else trace_step(self.model, self._watch)
        self._version += 1

    def _trace_again(self) -> None:
        """Trace a step where that could not be done before and can now, as when a hook is gone."""
        with self._lock:
            if self.step is None and not self.has_own_layers:
                could, self._could_be_traced = (
                    self._could_be_traced,
                    can_be_traced(self.model, list(self.decoder.modules())),
                )
                if self._could_be_traced and not could:
                    self.step = trace_step(self.model, self._watch)

    def _checked_head(self) -> DynamicLMHead:
        head = DynamicLMHead.matching(self.model)
        if head is not None:
            return head
        name = type(self.model).__name__
        if self.model.training:
            raise UnsupportedError(
                f"{name} is in training mode, in which it says something else each time: call eval()."
            )
        raise UnsupportedError(
            f"{name} does something between its decoder and its logits that this package does not know, so shortlist "
            "logits would be wrong. Use another drafter."
        )

    def _require_cache(self) -> None:
        """Make sure that a draft step sees the tokens before it.

        Raises:
            UnsupportedError: the model's decoder ignores its cache, or keeps one that cannot be rolled back.
        """
        text = self._some_tokens(4)

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
            "its decoder does not heed the cache that it is given. Use another drafter",
        )

    def require_trees(self) -> None:
        require_known_kinds(self.model)
        if self.has_own_layers:
            raise UnsupportedError(
                f"{type(self.model).__name__} keeps more than keys and values of what it has read, such as positions "
                "or convolutions of the tokens before, which changes with the others of a tree. Draft chains with "
                "tree=False."
            )
        text = self._some_tokens(16)

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
            "what it says of one changes with the others beside it, as its attention goes by places in the cache (a "
            "window, or biases by distance). Draft chains with tree=False",
        )

    @torch.no_grad()
    def _require_agreement(
        self, trial: Callable[[], tuple[torch.Tensor, torch.Tensor]], what: str, failing: str, differing: str
    ) -> None:
        """Draft in two ways that must say the same.

        Args:
            trial: returns two hidden states, `[d]`.
            what: is being drafted.
            failing: what is wrong where the model raises an error, which goes into it.
            differing: what is wrong where the two differ.

        Raises:
            UnsupportedError: the trial fails, or they differ.
        """
        name = type(self.model).__name__
        try:
            actual, expected = trial()
        except FORWARD_ERRORS as error:
            problem = failing.format(f"{error!s:.200}")
            raise UnsupportedError(f"{name} cannot draft {what}, as {problem}.") from error
        tolerance = (1e-3 if expected.dtype == torch.float32 else 5e-2) * expected.float().abs().max()
        if not bool(((actual.float() - expected.float()).abs() <= tolerance).all()):
            raise UnsupportedError(f"{name} cannot draft {what}: {differing}.")

    def _some_tokens(self, count: int) -> torch.Tensor:
        """int64 `[count]`."""
        return torch.arange(1, count + 1, device=input_device(self.model)) % self.head.weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        return self.decoder.get_input_embeddings().weight.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Rows of the matrix as they are: a factor that a family has, such as Gemma's, says nothing about the token.
        return torch.nn.functional.embedding(token_ids, self.decoder.get_input_embeddings().weight)

    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        # Its hidden states depend on the text alone, and not on where a draft began.
        embedded, hidden = self.embed(token_ids), self.start().advance(token_ids)
        for step in range(first, first + depth):
            yield UnrolledStep(embedded[1 + step :], hidden[step:-1], hidden[1 + step :])

    def token_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head.token_logits(hidden, token_ids, self.model.get_output_embeddings())

    def copy(self) -> "CausalLMDrafter":
        return CausalLMDrafter(copy.deepcopy(self.model))

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        # What others have changed is taken up first: after this, no more than numbers is known to have changed, and
        # neither a trace, whose inputs they are, nor what the logits are made by has to be found out again.
        _ = self.weights_version
        replace = super().prepare_weights(weights)
        parameters = dict(self.module.named_parameters())
        projection = self.model.get_output_embeddings()
        has_projection = any(parameters[name] is one for name in weights for one in projection.parameters())

        def replace_and_accept() -> None:
            with self._lock:
                replace()
                self._watch.accept_weights()
                if has_projection:
                    self._projection_watch.accept_weights()
                    self.head = self.head.anew(projection.weight, projection.bias)
                self._version += 1

        return replace_and_accept

    def start(self) -> "CausalLMState":
        if self.step is None:
            self._trace_again()
        return CausalLMState(self)


def _has_own_layers(model: PreTrainedModel) -> bool:
    """Whether the model's cache has more than keys and values, such as an indexer's or a convolution's states."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return any(hasattr(one, state) for one in layers for state in ("indexer_keys", "conv_states"))


class CausalLMState(DrafterState):
    """A growing key-value cache that is rolled back to the verified prefix after each round.

    Every layer keeps all positions, those with a sliding window too (their masks still hide what lies outside it): a
    window that forgets could not be rolled back past what a rejected draft pushed out of it. Only models whose layers
    keep more than keys and values have a cache of transformers' own making.
    """

    def __init__(self, drafter: CausalLMDrafter):
        self._drafter = drafter
        self._decoder = drafter.decoder
        self._step: TracedStep | None = drafter.step
        self._weights: list[torch.Tensor] = []
        self._windows = drafter.windows
        self._head_weight = drafter.head.weight
        # A target with more rows than the drafter may say a token that the drafter has no embedding for.
        self._largest_id = drafter.head.weight.shape[0] - 1
        self._layers: list[torch.Tensor] = []
        self._cache: DynamicCache | None = None
        if drafter.has_own_layers:
            self._cache = DynamicCache(config=drafter.model.config.get_text_config())
            self._cache.activate_past_recording()
        self._length = 0
        self._tree: _Tree | None = None
        # The hidden states of the last tokens in the cache, `[r, d]`, from the newest that was verified on; and those
        # of the last level of a tree.
        self._hidden = drafter.head.weight.new_zeros(0, drafter.head.weight.shape[1])
        self._level = self._hidden

    @property
    def length(self) -> int:
        return self._length if self._tree is None else self._length + self._tree.levels

    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        self.truncate(self._length)
        if self._step is not None:
            self._weights = self._step.weights()
        unread = prefix[self._length :].clamp_max(self._largest_id)
        before = self._hidden[-1:]
        if observe_draft_inputs is not None and unread.shape[0] == 1:
            self._pass_draft_inputs(observe_draft_inputs, unread, before)
        hidden = self._extend(unread)
        if observe_draft_inputs is not None and unread.shape[0] > 1:
            self._pass_draft_inputs(observe_draft_inputs, unread[-1:], hidden[-2:-1])
        self._hidden = hidden[-1:]
        return hidden

    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        if parents is None:
            if observe_draft_inputs is not None:
                self._pass_draft_inputs(observe_draft_inputs, token_ids, self._hidden[-1:])
            hidden = self._extend(token_ids)
            self._hidden = torch.cat([self._hidden, hidden])
            return hidden
        is_first = self._tree is None
        if observe_draft_inputs is not None:
            rows = self._hidden[-1:].expand(token_ids.shape[0], -1) if is_first else self._level[parents]
            self._pass_draft_inputs(observe_draft_inputs, token_ids, rows)
        if is_first:
            self._tree = _Tree(token_ids.device)
        self._tree.add_level(parents)
        self._level = self._run(token_ids, **self._tree_inputs(token_ids.shape[0]))
        return self._level

    def _pass_draft_inputs(self, observe: ObserveDraftInputs, token_ids: torch.Tensor, before: torch.Tensor) -> None:
        embedded = self._drafter.embed(token_ids)
        # Before the first token of a text there is nothing.
        observe(embedded, before if before.shape[0] else before.new_zeros(1, before.shape[1]))

    def truncate(self, length: int) -> None:
        # The nodes of a tree lie one after another in the cache, so none of them can stay.
        length = min(length, self._length)
        if self._cache is not None and self._length:
            nodes = 0 if self._tree is None else self._tree.level_of.shape[0]
            self._cache.crop(length - self._length - nodes)
        elif length < self._length or self._tree is not None:
            self._layers = [tensor[..., :length, :] for tensor in self._layers] if length else []
        kept = self._hidden.shape[0] - (self._length - length)
        self._hidden = self._hidden[: max(0, kept)]
        self._length = length
        self._tree = None

    def _extend(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append tokens one after another and return their hidden states, `[m, d]`."""
        if self._step is not None and self._layers and token_ids.shape[0] == 1:
            hidden, self._layers = self._step.run(self._weights, token_ids, self._length, self._layers)
            hidden = hidden.to(self._head_weight)
        else:
            hidden = self._run(token_ids)
        self._length += token_ids.shape[0]
        return hidden

    def _run(self, token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the decoder on tokens, `[m]`, and keep their keys and values."""
        cache = cache_of(self._layers) if self._cache is None else self._cache
        hidden = self._decoder(input_ids=token_ids.unsqueeze(0), past_key_values=cache, use_cache=True, **inputs)[0]
        if self._cache is None:
            self._layers = layers_of(cache)
        return hidden[0].to(self._head_weight)

    def _tree_inputs(self, width: int) -> dict[str, Any]:
        """Mask and positions of the last `width` nodes."""
        tree = self._tree
        device = tree.paths.device
        level = torch.full((width,), tree.levels - 1, dtype=torch.int64, device=device)
        prefix = torch.ones(self._length, dtype=torch.bool, device=device)
        masks = {
            kind: attention_mask(prefix, tree.paths, level, tree.level_of, self._head_weight.dtype, window)
            for kind, window in self._windows.items()
        }
        # A decoder with one kind of layer takes its mask as it is.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return {"attention_mask": mask, "position_ids": (level + self._length).unsqueeze(0)}


class _Tree:
    """Which of the drafted nodes lie on the path to each node of the last level."""

    def __init__(self, device: torch.device):
        self.levels = 0
        # bool [w, t]: for each of the w nodes of the last level, which of all t nodes are on its path.
        self.paths = torch.zeros(1, 0, dtype=torch.bool, device=device)
        # int64 [t]
        self.level_of = torch.zeros(0, dtype=torch.int64, device=device)

    def add_level(self, parents: torch.Tensor) -> None:
        """Take in a level of nodes, given the row of each one's parent in the level before, `[w]`."""
        w = parents.shape[0]
        rows = torch.zeros_like(parents) if self.levels == 0 else parents
        itself = torch.eye(w, dtype=torch.bool, device=parents.device)
        self.paths = torch.cat([self.paths[rows], itself], dim=1)
        self.level_of = torch.cat([self.level_of, torch.full_like(parents, self.levels)])
        self.levels += 1
