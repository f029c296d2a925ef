"""Made-up rounds: what a policy's states are told in a call, and the shortlists that they answer with."""

from collections.abc import Iterator

import torch

from ..protocol import Needs, Prompt, Shortlist, Verdict
from ..shortlists import ShortlistState
from .case import PADDING, PolicyCase

_ROUNDS = 12


def _events(case: PolicyCase, needs: Needs, seed: int) -> Iterator[Prompt | Verdict]:
    """What a state is told in one call: random tokens, with all that the needs ask for."""
    generator = torch.Generator().manual_seed(seed)
    size, padded = case.vocabulary_size, case.vocabulary_size + PADDING

    def ids(*shape: int, limit: int = padded) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    def shown(rows: int, top_k: int, states: bool) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        if top_k:
            order = torch.rand(rows, padded, generator=generator).topk(min(top_k, padded))
            values["top_ids"] = order.indices
            if needs.top_logits:
                values["top_logits"] = order.values
        if states:
            values["hidden_states"] = torch.randn(rows, case.hidden_size, generator=generator)
        return values

    yield Prompt(ids(30, limit=size), 0)
    if needs.of_prompt:
        positions = min(30, needs.prompt_positions or 30)
        yield Prompt(ids(0), 30, **shown(positions, needs.prompt_top_k, needs.prompt_hidden_states))
    start = 30
    for index in range(_ROUNDS):
        # Now and then nothing was drafted.
        drafted = ids(index % 5, limit=size)
        accepted = int(ids(1, limit=drafted.shape[0] + 1))
        verified = torch.cat([drafted[:accepted], ids(1)])
        values = shown(accepted + 1, needs.verify_top_k, needs.hidden_states)
        if needs.out_of_vocabulary:
            values["out_of_vocabulary"] = torch.tensor([False] * accepted + [index % 3 == 0])
        yield Verdict(drafted, verified, start, **values)
        start += accepted + 1


def shortlists(case: PolicyCase, state: ShortlistState, needs: Needs, seed: int) -> Iterator[tuple[str, Shortlist]]:
    """Where it is, and the shortlist, for every draft step of a call. Chains and trees take turns."""
    generator = torch.Generator().manual_seed(seed)
    for index, event in enumerate(_events(case, needs, seed)):
        (state.observe_prompt if isinstance(event, Prompt) else state.observe)(event)
        state.begin_round()
        for depth in range(3):
            nodes = 1 if depth == 0 or index % 2 else 3
            token_ids = torch.randint(0, case.vocabulary_size, (nodes,), generator=generator)
            embeddings, before, features = torch.randn(3, nodes, case.hidden_size, generator=generator)
            if needs.draft_inputs:
                state.observe_draft_inputs(embeddings, before)
            shortlist = state.select(depth, token_ids, features)
            yield f"after {index + 1} events, at draft step {depth}", shortlist
            again = state.select(depth, token_ids, features)
            if again.version != shortlist.version or not torch.equal(again.slots, shortlist.slots):
                case.fail(
                    f"asked twice for one draft step it selects other slots ({depth=})",
                    "Let `select` depend on what the state was told, and on nothing else.",
                )


def followed(case: PolicyCase, state: ShortlistState, seed: int) -> list[tuple[str, list[int]]]:
    """The ids of every shortlist of a call."""
    return [(place, shortlist.ids().tolist()) for place, shortlist in shortlists(case, state, case.needs, seed)]


def require_equal(case: PolicyCase, actual: list, expected: list, problem: str, fix: str) -> None:
    for (place, own), (_, other) in zip(actual, expected, strict=True):
        if set(own) != set(other):
            case.fail(f"{problem}: {place} it selects {len(own)} ids, others than the {len(other)} expected", fix)
