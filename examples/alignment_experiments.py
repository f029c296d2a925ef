"""The experiments on online alignment: which systems answer which requests, and what is noted of each request."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, FrequencyShortlist, OnlineAlignment, RetrievalShortlist
from hf_dynspec.drafters import as_drafter
from hf_dynspec.shortlists import ShortlistPolicy

NEW = "new texts"
NUM_ASSISTANT_TOKENS = 5
DECAYS = (0.0, 0.1, 0.3, 0.5, 0.7)


@dataclass
class Setting:
    """What all systems are measured with.

    Args:
        target: what its drafter is for.
        tuned: the same after fine-tuning.
        load_drafter: makes a drafter of a target that nothing was done to.
        requests: by the kind of text, token ids int64 `[1, n]` of each request; `NEW` is what was tuned on.
        conversations: the turns of each.
        core: the ranking and the size of the static core.
        new_tokens: to generate for each request.
        temperature: 0 for greedy decoding.
        seed: of what is drawn.
    """

    target: PreTrainedModel
    tuned: PreTrainedModel
    load_drafter: Callable[[PreTrainedModel], Any]
    requests: dict[str, list[torch.Tensor]]
    conversations: list[list[torch.Tensor]]
    core: tuple[str | None, int]
    new_tokens: int
    temperature: float
    seed: int

    @property
    def new(self) -> list[tuple[str, torch.Tensor]]:
        """The requests of the new kind."""
        return [(NEW, one) for one in self.requests[NEW]]

    @property
    def known(self) -> list[tuple[str, torch.Tensor]]:
        """Those of the known kinds, which take turns."""
        kinds = [[(kind, one) for one in ones] for kind, ones in self.requests.items() if kind != NEW]
        return [one for one in chain.from_iterable(zip_longest(*kinds)) if one is not None]

    def static(self) -> ShortlistPolicy:
        """The static core alone, as FR-Spec has it."""
        return FrequencyShortlist(self.core[0], size=self.core[1])

    def retrieval(self) -> ShortlistPolicy:
        """The core and the cache of retrieved tokens."""
        return RetrievalShortlist(self.core[0], size=self.core[1], synchronous=True)


@dataclass(frozen=True)
class System:
    """A policy, and how its drafter is aligned."""

    name: str
    policy: ShortlistPolicy | None = None
    alignment: OnlineAlignment | None = None


@dataclass(frozen=True)
class Experiment:
    """Systems, and the requests that each of them answers.

    Args:
        systems: the first is what the others are compared with.
        requests: the kind of each, and its token ids int64 `[1, n]`.
        on_tuned: the fine-tuned target answers, and not the original one.
        starts_anew: every kind meets a drafter that has learnt nothing.
        in_conversations: the requests of a kind are the turns of one conversation.
        is_disturbed: noise is added to the drafter's query and value projections first.
    """

    systems: list[System]
    requests: list[tuple[str, torch.Tensor]]
    on_tuned: bool = True
    starts_anew: bool = False
    in_conversations: bool = False
    is_disturbed: bool = False


def serve(setting: Setting, system: System, experiment: Experiment, advance: Callable[[], None]) -> dict[str, Any]:
    """Lead one system through all requests, in real `generate` calls.

    Returns:
        For each request its kind, acceptance length and seconds, and what the alignment says of itself at the end, as
        JSON values.
    """
    assistant = _assistant(setting, system, experiment)
    rows: list[dict[str, Any]] = []
    speaker, text = assistant, None
    for number, (kind, request) in enumerate(experiment.requests):
        if not rows or kind != rows[-1]["kind"]:
            speaker, text = assistant.conversation() if experiment.in_conversations else assistant, None
            if assistant.alignment is not None and experiment.starts_anew:
                assistant.alignment.reset()
        prompt = request if text is None else torch.cat([text, request], dim=1)
        torch.manual_seed(setting.seed + number)  # every system draws with the same seed
        start = time.perf_counter()
        output = generate(setting, assistant.target, speaker, prompt)
        seconds = time.perf_counter() - start
        text = output if experiment.in_conversations else None
        rows.append({"kind": kind, "acceptance_length": assistant.stats.acceptance_length, "seconds": seconds})
        advance()
    said = None if assistant.alignment is None else assistant.alignment.stats.to_dict()
    assistant.unbind()
    return {"requests": rows, "alignment": said}


def _assistant(setting: Setting, system: System, experiment: Experiment) -> DynSpecAssistant:
    target = setting.tuned if experiment.on_tuned else setting.target
    drafter = as_drafter(setting.load_drafter(target))
    if experiment.is_disturbed:
        disturb(drafter.module, setting.seed)
    # As many tokens of a drafter that learns as of one that does not.
    return DynSpecAssistant(
        drafter, system.policy, target=target, alignment=system.alignment, num_assistant_tokens=NUM_ASSISTANT_TOKENS
    )


def disturb(module: nn.Module, seed: int) -> None:
    """Add noise of one standard deviation of each weight to the query and value projections."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std())


def generate(setting: Setting, target: PreTrainedModel, assistant: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Answer one request. Returns prompt and answer, int64 `[1, n]`."""
    sampling: dict[str, Any] = {"do_sample": False}
    if setting.temperature > 0:
        sampling = {"do_sample": True, "temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
    length = {"max_new_tokens": setting.new_tokens, "min_new_tokens": setting.new_tokens}
    return target.generate(prompt, assistant_model=assistant, **sampling, **length)


# The experiments -----------------------------------------------------------------------------------------------------


def switch(setting: Setting) -> Experiment:
    """Figure 2: known texts, and from the middle on new ones."""
    systems = [
        System("frozen"),
        System("default", alignment=OnlineAlignment(synchronous=True)),
        System("paper()", alignment=OnlineAlignment.paper(synchronous=True)),
        System("osd()", alignment=OnlineAlignment.osd(synchronous=True)),
    ]
    return Experiment(systems, [*setting.known[: len(setting.new)], *setting.new])


def ablation(setting: Setting) -> Experiment:
    """Figure 3: retrieval and alignment alone and together, on each kind of text."""
    static, retrieval = setting.static(), setting.retrieval()
    aligned = OnlineAlignment(synchronous=True)
    systems = [
        System("static", static),
        System("static + OSD", static, OnlineAlignment.osd(synchronous=True)),
        System("static + alignment", static, aligned),
        System("retrieval", retrieval),
        System("retrieval + alignment", retrieval, aligned),
    ]
    requests = [(kind, one) for kind, ones in setting.requests.items() for one in ones]
    return Experiment(systems, requests, starts_anew=True)


def decay(setting: Setting) -> Experiment:
    """Figure 5: the sensitivity β of the horizon's weights, on new texts."""
    systems = [System(f"β = {value}", alignment=OnlineAlignment(decay=value, synchronous=True)) for value in DECAYS]
    return Experiment([System("frozen"), *systems], setting.new)


def noise(setting: Setting) -> Experiment:
    """A drafter that is bad in a way that low-rank updates can mend."""
    systems = [System("disturbed"), System("default", alignment=OnlineAlignment(synchronous=True))]
    return Experiment(systems, setting.new, is_disturbed=True)


def harm(setting: Setting) -> Experiment:
    """The original target and texts that it knows: its drafter is aligned with it already."""
    too_high = 100 * OnlineAlignment().learning_rate
    systems = [
        System("frozen"),
        System("default", alignment=OnlineAlignment(synchronous=True)),
        System("100 times the rate", alignment=OnlineAlignment(learning_rate=too_high, synchronous=True)),
        System("no gate", alignment=OnlineAlignment(gate=False, synchronous=True)),
    ]
    return Experiment(systems, setting.known, on_tuned=False)


def clock(setting: Setting) -> Experiment:
    """New texts, where alignment may take a share of the time (the default), or whatever it takes."""
    systems = [
        System("frozen"),
        System("default, by the clock", alignment=OnlineAlignment()),
        System("synchronous", alignment=OnlineAlignment(synchronous=True)),
    ]
    return Experiment(systems, setting.new)


def memory(setting: Setting) -> Experiment:
    """Table 4: what training holds, after a few requests."""
    presets = {"osd()": OnlineAlignment.osd, "paper()": OnlineAlignment.paper, "default": OnlineAlignment}
    # The paper's is updated by a full buffer, and so few requests fill no larger one.
    systems = [System(name, alignment=preset(synchronous=True, buffer=2)) for name, preset in presets.items()]
    return Experiment(systems, setting.new[:2])


def conversations(setting: Setting) -> Experiment:
    """Table 7: conversations of many turns."""
    systems = [
        System("static", setting.static()),
        System("retrieval + alignment", setting.retrieval(), OnlineAlignment(synchronous=True)),
    ]
    turns = [(f"conversation {i}", turn) for i, one in enumerate(setting.conversations) for turn in one]
    return Experiment(systems, turns, in_conversations=True)


EXPERIMENTS = {one.__name__: one for one in (switch, ablation, decay, noise, harm, clock, memory, conversations)}
