"""What is checked of a policy's states, which are led through made-up rounds. No model drafts for it."""

import json

import torch

from ..errors import DynSpecError
from ..shortlists import ShortlistState
from ..shortlists.base import start_state
from .case import PolicyCase
from .rounds import followed, require_equal, shortlists


def check_needs(case: PolicyCase) -> None:
    """What it asks to be shown it looks at."""
    needs = case.needs
    counts = (needs.verify_top_k, needs.prompt_top_k, needs.prompt_positions or 0)
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in counts):
        case.fail(f"{needs} has counts that are none", "Ask for 0 tokens or more.")
    if needs.top_logits and not (needs.verify_top_k or needs.prompt_top_k):
        case.fail("it asks for logits of top tokens, and for no top tokens", "Set verify_top_k or prompt_top_k too.")
    state = case.checked.start(case.vocabulary()).state
    asked = {
        "observe": needs.verify_top_k or needs.hidden_states or needs.out_of_vocabulary,
        "observe_prompt": needs.of_prompt,
        "observe_draft_inputs": needs.draft_inputs,
    }
    for method, is_asked in asked.items():
        if is_asked and getattr(type(state), method) is getattr(ShortlistState, method):
            state.close()
            case.fail(
                f"its needs ask for what `{method}` is given, and its state does not override that",
                "Override it, or leave out of `needs` what is not used: it takes time in every round.",
            )
    state.close()


def check_shortlists(case: PolicyCase) -> None:
    """Its shortlists are well-formed in every round, with any end-of-sequence ids, and where a head leaves ids out."""
    size = case.vocabulary_size
    leaves_out = torch.arange(0, size, 3)
    vocabularies = [case.vocabulary(eos) for eos in ((), (2,), (2, 77), (size - 1,))]
    vocabularies.append(case.vocabulary((0,), leaves_out))
    everything = torch.arange(size)
    for vocabulary in vocabularies:
        state = case.checked.start(vocabulary)
        for seed in (1, 2):
            for place, shortlist in shortlists(case, state, case.needs, seed):
                ids = shortlist.ids()
                is_on = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
                columns = torch.arange(shortlist.width)
                if (
                    not torch.equal(shortlist.contains(everything), is_on)
                    or int(shortlist.count) != ids.shape[0]
                    or not torch.equal(shortlist.ids_at(columns), shortlist.scored_slots)
                ):
                    case.fail(
                        f"{place}, `contains`, `count` or `ids_at` disagrees with the slots of the shortlist",
                        "Return a Shortlist as it is, or override all of them alike.",
                    )
            state.restart()
        state.close()


def check_states_are_apart(case: PolicyCase) -> None:
    """Its states share nothing that changes, and the policy itself does not change."""
    settings = repr(case.policy.settings())
    first, second, alone = case.state(), case.state(), case.state()
    expected = followed(case, alone, 8)
    followed(case, first, 7)
    require_equal(
        case,
        followed(case, second, 8),
        expected,
        "what one state was told changes what another selects",
        "Keep in the state, and not in the policy or its class, what changes.",
    )
    if repr(case.policy.settings()) != settings:
        case.fail("its settings changed while it drafted", "Keep in the state what changes.")
    for state in (first, second, alone):
        state.close()


def check_restart(case: PolicyCase) -> None:
    """After restart() it knows no more than a new state."""
    used, fresh = case.state(), case.state()
    followed(case, used, 5)
    used.restart()
    require_equal(
        case,
        followed(case, used, 6),
        followed(case, fresh, 6),
        "after restart() it remembers an earlier text",
        "Forget in `restart` whatever came from the context.",
    )
    used.close()
    fresh.close()


def check_memory(case: PolicyCase) -> None:
    """What it keeps from call to call is in its memory, and nowhere else, whatever the end-of-sequence ids."""
    memory, other = case.checked.new_memory(), case.checked.new_memory()
    if memory is None:
        return
    used, apart, without = (start_state(case.checked, case.vocabulary(), known) for known in (memory, other, None))
    for state in (used, apart, without):
        state.restart()
    followed(case, used, 5)
    used.end_call()
    require_equal(
        case,
        followed(case, apart, 6),
        followed(case, without, 6),
        "what one memory was told changes what a session with another memory selects",
        "Keep it in the object that `new_memory` returns, a new one each time, and not in the policy or its class.",
    )
    late = start_state(case.checked, case.vocabulary(), memory)
    used.restart()
    late.restart()
    require_equal(
        case,
        followed(case, used, 7),
        followed(case, late, 7),
        "after restart() it remembers an earlier text beside its memory",
        "Forget in `restart` whatever came from the context, and put into the memory in `end_call` what is to last.",
    )
    size = case.vocabulary_size
    others = [case.vocabulary(()), case.vocabulary((size - 1,)), case.vocabulary((0,), torch.arange(0, size, 3))]
    elsewhere = [start_state(case.checked, vocabulary, memory) for vocabulary in others]
    for state in elsewhere:
        state.restart()
        followed(case, state, 8)
        state.end_call()
    for state in (used, apart, without, late, *elsewhere):
        state.close()


def check_settings(case: PolicyCase) -> None:
    """settings() and tensors() rebuild it."""
    policy = case.policy
    if not isinstance(getattr(policy, "name", None), str):
        case.fail("it has no `name`", "Set the class attribute `name`, by which it is found.")
    try:
        settings = json.loads(json.dumps(policy.settings()))
    except (TypeError, ValueError) as error:
        case.fail(f"settings() is not JSON ({error})", "Put tensors into tensors(), and plain values here.")
    tensors = policy.tensors()
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            case.fail(f"the tensor {name!r} is not contiguous, or not on the CPU", "Return it .cpu().contiguous().")
    try:
        rebuilt = type(policy).from_settings(settings, {name: tensor.clone() for name, tensor in tensors.items()})
    except (DynSpecError, TypeError) as error:
        case.fail(
            f"it cannot be rebuilt from settings() and tensors(): {error}",
            "Name there the arguments of __init__, and declare the settings in `setting_rules`; or override "
            "from_settings. check_policy(…, is_stored=False) leaves this out.",
        )
    again = rebuilt.tensors()
    if (
        rebuilt.settings() != policy.settings()
        or rebuilt.needs != policy.needs
        or again.keys() != tensors.keys()
        or not all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    ):
        case.fail("rebuilt from settings() and tensors(), it has others", "Return all that __init__ was given.")
    states = case.state(), case.state(rebuilt)
    require_equal(
        case,
        followed(case, states[1], 4),
        followed(case, states[0], 4),
        "rebuilt from settings() and tensors(), it selects other ids",
        "Return all that __init__ was given.",
    )
    for state in states:
        state.close()
