"""Checks of a target at binding: whether its cache can be rolled back, whether it takes trees, and up to which length
its rotary embedding is stable."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache_names import cache_inputs, cached_tokens, is_recurrent, returned_cache
from ..errors import UnsupportedError
from ..kernels import QueryRows
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from ..memory.recurrent import positions_from
from ..modeling.parts import (
    FORWARD_ERRORS,
    agree,
    computes_in_fp32,
    input_device,
    output_rows,
    placeholder_ids,
    require_finite_weights,
)
from ..protocol import Candidates

_CHANGING_ROPE = ("dynamic", "longrope")
# The most memory for the caches of a check.
_MOST_CACHE_BYTES = 2**29
# The tokens that are read for them, and for the check that rows do not change each other.
_READ, _READ_AT_ONCE = 32, 16

# Takes a text, int64 `[1, n]`, whose tokens except the last are cached, and a tree; returns the logits `[k + 1, V]`
# after the last token and after each node.
Verify = Callable[[torch.Tensor, Candidates, DynamicCache], torch.Tensor]


@torch.no_grad()
def require_cache(model: PreTrainedModel) -> DynamicCache:
    """Check that a target has a cache that can be rolled back. Returns one of two tokens.

    Raises:
        UnsupportedError: it does not.
    """
    name = type(model).__name__
    if getattr(model.config.get_text_config(), "cross_attention_layers", None):
        raise UnsupportedError(
            f"{name} caches keys and values of images in layers of their own, which would be rolled back with the "
            "text. Generate without an assistant."
        )
    if not model._supports_default_dynamic_cache():
        raise UnsupportedError(
            f"{name} keeps what it has read in a cache of its own, which cannot be rolled back to the accepted "
            "tokens. Generate without an assistant."
        )
    cache = returned_cache(read_two_tokens(model))
    # A cache without attention does not know its length.
    if cache is None or (cached_tokens(cache) != 2 and not is_recurrent(model)):
        raise UnsupportedError(
            f"{name} keeps no cache of what it has read, without which verification would read the whole text in "
            "every round. Generate without an assistant."
        )
    return cache


@torch.no_grad()
def require_rows_apart(model: PreTrainedModel, cache: DynamicCache) -> None:
    """Check that a target in fp32 says the same of a token however many are read with it, after those of a cache
    (`UnsupportedError`). In 16 bits, where rounding depends on that number, nothing is checked."""
    if not computes_in_fp32(model):
        return
    config, device, before = model.config.get_text_config(), input_device(model), cached_tokens(cache)
    limits = _READ_AT_ONCE, rope_limit(config)[0], getattr(config, "max_position_embeddings", None)
    count = min(one for one in limits if one) - before
    tokens = _arbitrary_text(model, count)

    def read(*ends: int) -> torch.Tensor:
        ours, logits = copy.deepcopy(cache), []
        for first, end in zip((0, *ends), ends, strict=False):
            inputs = cache_inputs(ours) | positions_from(model, before + first, end - first, device)
            logits.append(model(input_ids=tokens[:, first:end], **inputs).logits[0].float())
        return torch.cat(logits)

    at_once, apart = read(count), read(count - 1, count)
    if not agree(model, at_once, apart):
        require_finite_weights(model, torch.cat([at_once, apart]))
        name = type(model).__name__
        if model.training:
            raise UnsupportedError(f"{name} is in training mode, in which its outputs are random: call eval().")
        raise UnsupportedError(
            f"{name} says something else of a token if it reads other tokens with it, as models do that quantise "
            "activations while they run, so no draft can be verified in one forward. Quantise its weights alone, or "
            "generate without an assistant."
        )


def require_no_state(model: PreTrainedModel) -> None:
    """Check that nothing but keys and values changes when a target reads a tree (`UnsupportedError`)."""
    if is_recurrent(model):
        raise UnsupportedError(
            f"{type(model).__name__} cannot verify a tree of tokens: it keeps a recurrent state, which each token "
            "changes for all others after it, whatever branch they are on. Draft chains with tree=False."
        )


def read_two_tokens(model: PreTrainedModel, **inputs: Any) -> CausalLMOutputWithPast:
    """The target's output for a text of two tokens, with these inputs too."""
    tokens = torch.ones(1, 2, dtype=torch.int64, device=input_device(model))
    cache = DynamicCache(config=model.config.get_text_config())
    return model(input_ids=tokens, **cache_inputs(cache), **inputs)


@torch.no_grad()
def require_batches(model: PreTrainedModel, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Check that a target reads fixed memory as it reads a cache of its own.

    Args:
        model: the target.
        logits_of: the logits `[…, V]` of the decoder's output `[…, d]`.

    Raises:
        UnsupportedError: it does not.
    """
    name = type(model).__name__
    try:
        caches, length = caches_of_a_long_text(model)
        nodes = torch.arange(2, 5, device=input_device(model)).unsqueeze(0) % output_rows(model)
        config = model.config.get_text_config()
        memory = FixedMemory.like(caches[0], config, 1, length + nodes.shape[1], nodes.shape[1])
        memory.begin(0, caches[0], length)
        rows = QueryRows.chain(memory.lengths, nodes.shape[1])
        actual = logits_of(FixedDecoder(model)(nodes, memory, rows).last_hidden_state)[0].float()
        expected = model(input_ids=nodes, **cache_inputs(caches[1])).logits[0].float()
    except (*FORWARD_ERRORS, UnsupportedError) as error:
        raise UnsupportedError(
            f"{name} cannot read the texts of a batch in memory of fixed size: {error!s:.200}. Call generate once for "
            "each prompt, with cache_implementation unset."
        ) from error
    if not agree(model, actual, expected):
        require_finite_weights(model, torch.cat([actual.flatten(), expected.flatten()]))
        raise UnsupportedError(
            f"{name} says something else when its texts lie in memory of fixed size, as it does more than attend to "
            "keys and values. Call generate once for each prompt, with cache_implementation unset."
        )


@torch.no_grad()
def require_trees(model: PreTrainedModel, verify: Verify) -> None:
    """Check that a target can verify trees.

    Args:
        model: the target.
        verify: runs it on a tree.

    Raises:
        UnsupportedError: it cannot.
    """
    if not _tree_agrees_with_its_path(model, verify):
        raise UnsupportedError(
            f"{type(model).__name__} cannot verify a tree of tokens: what it says of one changes with the "
            "others beside it, as its attention goes by places in the cache (a window, or biases by distance), or as "
            "it quantises activations. Draft chains with tree=False."
        )


def _tree_agrees_with_its_path(model: PreTrainedModel, verify: Verify) -> bool:
    """Whether the target's logits for a path in a small tree equal those for the path alone, after a text longer than
    any window of its attention."""
    device = input_device(model)
    # The path is the last of many at each level, so that a node's place in the cache matters.
    tree = Candidates(
        token_ids=torch.arange(2, 18, device=device) % output_rows(model),
        shortlists=(None, None, None),
        parents=torch.tensor([-1] * 12 + [11] * 3 + [14], device=device),
        depths=torch.tensor([0] * 12 + [1] * 3 + [2], device=device),
    )
    path = tree.token_ids[[11, 14, 15]].unsqueeze(0)
    try:
        caches, length = caches_of_a_long_text(model)
        text = torch.ones(1, length + 1, dtype=torch.int64, device=device)
        verified = verify(text, tree, caches[0])[-1].float()
        path = torch.cat([text[:, -1:], path], dim=1)
        # Models that read images may add to positions of their own what the last image took. Verifications name them.
        reads_images = model.config.get_text_config() is not model.config
        positions = positions_from(model, length, path.shape[1], device) if reads_images else {}
        alone = model(input_ids=path, **cache_inputs(caches[1]), **positions)
        alone = alone.logits[0, -1].float()
    except FORWARD_ERRORS as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot verify a tree of tokens, as it takes no tree mask: {error}. "
            "Draft chains with tree=False."
        ) from error
    agrees = agree(model, verified, alone)
    if not agrees:
        require_finite_weights(model, torch.cat([verified, alone]))
    return agrees


def caches_of_a_long_text(model: PreTrainedModel) -> tuple[tuple[DynamicCache, DynamicCache], int]:
    """Two equal caches of a text that is longer than every window, and its length. The keys and values of some tokens
    are repeated: of random ones a real model makes so much that rounding to 16 bits would change its output."""
    config = model.config.get_text_config()
    few = DynamicCache(config=config)
    model(input_ids=_arbitrary_text(model, _READ), **cache_inputs(few))
    parts = [(layer.keys, layer.values) for layer in few.layers]
    held = [one for both in parts for one in both if one is not None]
    bytes_per_token = sum(one.numel() * one.element_size() for one in held) // _READ
    length = max(3, min(_length_past_windows(config), _MOST_CACHE_BYTES // max(1, bytes_per_token)))
    caches = DynamicCache(config=config), DynamicCache(config=config)
    for index, both in enumerate(parts):
        if both[0] is None:  # a layer that shares the keys and values of another
            continue
        for cache in caches:
            cache.activate_past_recording()
            cache.update(*(_repeated(one, length) for one in both), index)
    return caches, length


def _arbitrary_text(model: PreTrainedModel, count: int) -> torch.Tensor:
    """int64 `[1, count]`, on the model's device: the same tokens each time, none of which stands for an image."""
    rows, generator = min(output_rows(model), model.config.get_text_config().vocab_size), torch.Generator()
    tokens = torch.randint(rows, (1, count), generator=generator.manual_seed(0), device="cpu")
    tokens[torch.isin(tokens, torch.tensor(placeholder_ids(model.config), device="cpu"))] = 1
    return tokens.to(input_device(model))


def _repeated(states: torch.Tensor, length: int) -> torch.Tensor:
    """`[…, length, d]`: the rows of `[…, n, d]`, repeated."""
    return states.repeat(1, 1, -(-length // states.shape[2]), 1)[:, :, :length]


def _length_past_windows(config: Any) -> int:
    """A length of text past every window that a configuration mentions under any name, as far as positions reach."""
    windows = [
        value
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name) and isinstance(value, int) and not isinstance(value, bool)
    ]
    positions = getattr(config, "max_position_embeddings", None) or 2**30
    return min(max(windows, default=0) + 8, positions - 8)


def rope_limit(config: Any) -> tuple[int | None, bool]:
    """The length of text at which a rotary embedding changes for all positions (None: never), and whether it is stable
    after that."""
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
    kinds = {one.get("rope_type") for one in ropes}
    named = [one.get("original_max_position_embeddings") for one in ropes if one.get("rope_type") in _CHANGING_ROPE]
    # Phi-3 reads everything anew at this length, with any rotary embedding.
    named.append(getattr(config, "original_max_position_embeddings", None))
    if "dynamic" in kinds:
        # Frequencies that longer texts changed are reset by texts shorter than this.
        named = [one - 1 for one in (*named, config.max_position_embeddings) if one]
    limits = [one for one in named if one]
    return min(limits, default=None), "dynamic" not in kinds
