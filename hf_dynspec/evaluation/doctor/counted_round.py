"""What a round gives a device to do, for two models of which there are configurations alone.

The models' layers and heads are built on torch's `meta` device, at their real sizes and without memory, and counted
there. The rest of a round, which does not depend on what the models are made of, is counted in real rounds of random
models that have the real vocabulary and next to no layers, on a device that is not there.
"""

import copy
import statistics
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...assistant import DynSpecAssistant
from ...cache_names import cache_inputs
from ...errors import UnsupportedError
from ...kernels import TILE_COLUMNS
from ...loading import empty_model, first_line
from ...modeling.head import DynamicLMHead, PackedRows
from ...modeling.parts import FORWARD_ERRORS, decoder_of, scale_and_cap
from ...protocol import Shortlist
from ...shortlists import ShortlistPolicy
from ...shortlists.screen.factor import usual_rank
from ...shortlists.screen.policy import ScreenShortlist
from ...shortlists.union import UnionShortlist
from ..operations.counting import Work, counting
from ..operations.pretended_device import move, pretended_device, to_device
from ..operations.rounds import PROMPT_TOKENS, Round, operations, random_model, recording

# Of the chains whose rounds are recorded, of the texts that they are recorded in, and the layers of the models there.
_CHAIN, _NEW_TOKENS, _LAYERS = 5, 11, 1
# Sections of a round whose bytes are counted at the real sizes.
_OF_MODELS = ("backbone", "head", "verification")


@dataclass(frozen=True)
class Overhead:
    """What a round with one policy has beside the models' layers and the target's head.

    Attributes:
        step: of each draft step: choosing a token, the policy, the drafter's cache; without the head.
        round: of the round: acceptance, the policy, the loop.
        before: what the head scored last before the round.
        shortlists: what it scored at each draft step of the round.
    """

    step: Work
    round: Work
    before: Shortlist
    shortlists: list[Shortlist]


def verification_work(target: PreTrainedModel, rows: list[int], cached: int) -> list[Work]:
    """Forwards of the target, with logits for all rows.

    Args:
        target: on `meta`.
        rows: how many tokens each forward reads.
        cached: how many tokens are in the cache before.

    Raises:
        UnsupportedError: the model cannot be counted without its weights.
    """
    return _forwards(target, target, DynamicCache(config=target.config.get_text_config()), rows, cached)


def layers_work(drafter: PreTrainedModel, cached: int) -> Work:
    """The drafter's layers in a draft step of a chain. Every layer keeps all positions, as `CausalLMState` has it."""
    return _forwards(drafter, decoder_of(drafter), DynamicCache(), [1], cached)[0]


def _forwards(
    model: PreTrainedModel, part: nn.Module, cache: DynamicCache, rows: list[int], cached: int
) -> list[Work]:
    def run(count: int, into: DynamicCache) -> Work:
        ids = torch.zeros(1, count, dtype=torch.int64, device="meta")
        with counting(model, rows=count) as counter:
            part(input_ids=ids, **cache_inputs(into))
        return counter.work

    try:
        if cached:
            run(cached, cache)
        return [run(count, copy.deepcopy(cache)) for count in rows]
    except (*FORWARD_ERRORS, NotImplementedError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be counted from its configuration: {first_line(error)}. Load it, and have "
            "it measured."
        ) from error


def head_work(drafter: PreTrainedModel, overhead: Overhead) -> tuple[Work, Work]:
    """The head of a draft step, and what it costs a round to bring its rows up to date.

    Args:
        drafter: on `meta`.
        overhead: has the shortlists that are scored.
    """
    projection = drafter.get_output_embeddings()
    head = DynamicLMHead(projection.weight, projection.bias, *scale_and_cap(drafter))
    hidden = torch.empty(1, projection.weight.shape[1], dtype=projection.weight.dtype, device="meta")
    rows, counted = PackedRows(), []
    with counting(projection) as counter:
        for shortlist in (overhead.before, *overhead.shortlists):
            done = counter.work
            head.scores(hidden, _on_meta(shortlist), rows)
            counted.append(counter.work - done)
    _, first, later, *_ = counted
    return later, first - later


def _on_meta(shortlist: Shortlist) -> Shortlist:
    names = ("slots", "occupied", "replaced")
    tensors = {name: value for name in names if (value := getattr(shortlist, name)) is not None}
    return replace(
        shortlist, **{name: torch.empty_like(value.memory, device="meta") for name, value in tensors.items()}
    )


def screen_work(policy: ShortlistPolicy, width: int, vocabulary: int) -> Work:
    """What a screen reads at each draft step, its own or a part's of a union: its factor in 8 bits and a projection
    in 32 (`ScreenShortlist`), once, as its kernel for GPUs does. Nothing for other policies.

    Args:
        policy: the policy.
        width: of the drafter's hidden states.
        vocabulary: tokens that can be drafted.
    """
    if isinstance(policy, UnionShortlist):
        return sum((screen_work(one, width, vocabulary) for one in policy.policies), Work())
    if not isinstance(policy, ScreenShortlist):
        return Work()
    rank = policy.rank or usual_rank(width)
    columns = -(-(rank + 1) // TILE_COLUMNS) * TILE_COLUMNS
    size = vocabulary * columns + 4 * rank * width
    return Work(0, size, 0, 2 * vocabulary * (rank + 1) + 2 * rank * width)


def record_overhead(policy: ShortlistPolicy, vocabulary: int, dtype: torch.dtype, temperature: float) -> Overhead:
    """Count what a round has beside the models, in rounds with random ones.

    Args:
        policy: the policy; needs nothing that was trained for the drafter.
        vocabulary: tokens of both models.
        dtype: of both models.
        temperature: 0 decodes greedily.
    """
    target, drafter = (random_model(_LAYERS, vocabulary, seed).to(dtype) for seed in (0, 1))
    empty_target, empty_drafter = (empty_model(one.config, dtype, "model") for one in (target, drafter))
    of_target = verification_work(empty_target, [_CHAIN + 1], PROMPT_TOKENS)[0]
    of_layers = layers_work(empty_drafter, PROMPT_TOKENS)
    with pretended_device() as device, torch.random.fork_rng([]):
        target, drafter = move(target), move(drafter)
        with warnings.catch_warnings():
            # Nobody has a tokenizer here.
            warnings.filterwarnings("ignore", message="the tokenizers of target and drafter")
            assistant = DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=_CHAIN)
        with recording(device) as recorded:
            _generate(target, temperature, assistant_model=assistant)
    # The first round reads the prompt, and the last ones draft less, as the text ends.
    before, steady = recorded.rounds(device.events)[1:3]
    spans = [slice(*span) for span in pairwise(steady.heads)]
    step = Work(
        statistics.median_high(_operations(steady, span) for span in spans) - of_layers.operations,
        0,
        statistics.median_high(_bytes(steady, span) for span in spans),
    )
    whole = slice(0, len(steady.events))
    rest = Work(
        _operations(steady, whole) - of_target.operations - _CHAIN * (step.operations + of_layers.operations),
        0,
        max(0, _bytes(steady, whole) - _CHAIN * step.other_bytes),
    )
    return Overhead(step, rest, before.shortlists[-1], steady.shortlists)


def plain_overhead(vocabulary: int, dtype: torch.dtype, temperature: float) -> Work:
    """Count what transformers' loop has for each token beside the target's forward. See `record_overhead`."""
    model = random_model(_LAYERS, vocabulary, 0).to(dtype)
    of_forward = verification_work(empty_model(model.config, dtype, "model"), [1], PROMPT_TOKENS)[0]
    begins: list[int] = []
    with pretended_device() as device, torch.random.fork_rng([]):
        model = move(model)
        model.register_forward_pre_hook(lambda *_: begins.append(len(device.events)))
        _generate(model, temperature)
    events = device.events[begins[3] : begins[4]]
    moved = sum(one.bytes for one in events) - of_forward.bytes
    return Work(operations(events) - of_forward.operations, 0, max(0, moved))


def _generate(model: PreTrainedModel, temperature: float, **arguments: object) -> None:
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    prompt = to_device(torch.arange(3, 3 + PROMPT_TOKENS).unsqueeze(0))
    model.generate(
        prompt,
        attention_mask=to_device(torch.ones(1, PROMPT_TOKENS, dtype=torch.int64)),
        max_new_tokens=_NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        **sampling,
        **arguments,
    )


def _operations(one: Round, span: slice) -> int:
    """Operations but for the head's, which is counted at its real size."""
    sections = zip(one.events[span], one.sections[span], strict=True)
    return operations([event for event, section in sections if section != "head"])


def _bytes(one: Round, span: slice) -> int:
    sections = zip(one.events[span], one.sections[span], strict=True)
    return sum(event.bytes for event, section in sections if section not in _OF_MODELS)
