"""What shortlists hold of the target's likeliest tokens, along a text that the target writes (EvoSpec, table 6)."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...shortlists import ShortlistPolicy
from ..coverage.measure import measure_coverage
from ..coverage.settings import CoverageSettings
from ..pair import Pair
from ..prompts import WorkloadPrompt
from .runs import RECALL
from .settings import SuiteSettings

# The settings that both ways of measuring have.
_SHARED = ("max_new_tokens", "num_assistant_tokens", "chat_template", "max_prompt_tokens", "threads", "seed")


def measure_recall(
    settings: SuiteSettings,
    pair: Pair,
    prompt: WorkloadPrompt,
    drafter: str,
    policies: Mapping[str, Mapping[str, ShortlistPolicy]],
    temperature: float,
    k: int,
) -> Iterator[dict[str, Any]]:
    """Lead policies along the text with which the target goes on from a prompt, see `measure_coverage`.

    Args:
        settings: of the evaluation.
        pair: the models.
        prompt: of whose turns the first is read.
        drafter: the label of the drafter that drafts along it.
        policies: by system and domain.
        temperature: of both models.
        k: of recall@k.

    Yields:
        A line for each system.
    """
    own = {name: getattr(settings, name) for name in _SHARED}
    wanted = CoverageSettings(**own, policies=policies, temperature=temperature, recall_k=k)
    models = {"target": pair.target, "drafter": pair.drafters[drafter], "tokenizer": pair.tokenizer}
    for one in measure_coverage(wanted, **models, prompts=[prompt]).measured:
        line = {"kind": RECALL, "prompt": prompt.identifier, "domain": prompt.domain, "system": one.policy}
        line |= {"temperature": temperature, "repeat": k, "positions": one.positions}
        yield line | {name: getattr(one, name) for name in ("size", "mass", "oracle_mass", "recall")}
