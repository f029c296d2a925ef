"""One prompt, generated with everything noted."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...drafters import Drafter
from ...errors import ConfigurationError
from ...kernels import prepare_kernels
from ...shortlists import ShortlistPolicy
from ..bench.systems import CONSTANT_DRAFT_LENGTH
from ..pair import Pair, generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt, read_workload
from ..provenance import describe_policies
from .analysis import Analysis, text_of, text_pieces
from .recording import RecordedAssistant, Recording, recorded
from .result import PROMPT_END, Trace
from .settings import TraceSettings
from .timeline import median_round


def trace_prompt(
    settings: TraceSettings,
    *,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
) -> Trace:
    """Generate once, as a user's call does, and say what the policy did. Settings, prompts and EAGLE heads are checked
    before any model is loaded. The tokens are those of a call that nobody traces.

    Args:
        settings: what to trace.
        target: the loaded model, in place of the one that the settings name; likewise the next three.
        drafter: the loaded small model or EAGLE head.
        tokenizer: the tokenizer of both.
        prompts: prompts that are not read from files.
        report: called with what is being done, how much is done and how much there is.

    Raises:
        ConfigurationError: a setting is out of range, there is no such prompt, or a model cannot be loaded.
        WorkloadError: the prompts cannot be read, or the one is too long.
        UnsupportedError: the models cannot be used together.
        ArtifactError: the policy's ranking was made for another tokenizer.
    """
    label, policy = settings.resolved_policy()
    prompt = settings.chosen(read_workload(settings.prompts, settings.limit) if prompts is None else list(prompts))
    eagle = [settings.eagle] if settings.eagle and drafter is None else []
    with open_pair(
        settings, target, drafter, tokenizer, [prompt], eagle=eagle, allow_pickle=settings.allow_pickle
    ) as pair:
        report("making what the policy needs", 0, 2)
        started = utc_now()
        devices = (pair.target.device, *(one.head.device for one in pair.drafters.values()))
        recording = Recording(devices)
        assistant = _assistant(settings, pair, recorded(policy, recording), recording)
        try:
            report("generating", 1, 2)
            output = _generate(settings, pair, assistant)
            report("done", 2, 2)
            return _trace(settings, pair, label, policy, recording, assistant, output, started)
        finally:
            assistant.unbind()


def _assistant(
    settings: TraceSettings, pair: Pair, policy: ShortlistPolicy, recording: Recording
) -> RecordedAssistant:
    if "cpu" in (pair.target.device.type, *(one.head.device.type for one in pair.drafters.values())):
        # Not in the call that is timed.
        prepare_kernels()
    (drafter,) = pair.drafters.values()
    assistant = RecordedAssistant(
        drafter,
        policy,
        target=pair.target,
        tokenizer=pair.tokenizer,
        num_assistant_tokens=settings.num_assistant_tokens,
        tree=settings.resolved_tree() or False,
    )
    assistant.recording = recording
    for name, value in CONSTANT_DRAFT_LENGTH.items():
        setattr(assistant.generation_config, name, value)
    return assistant


def _generate(settings: TraceSettings, pair: Pair, assistant: RecordedAssistant) -> list[int]:
    """All token ids of the text, the prompt's too."""
    config = generation_config(pair.target, settings.max_new_tokens, settings.temperature, settings.top_k)
    input_ids = torch.tensor(pair.encoded, device=pair.target.device)
    torch.manual_seed(settings.seed)
    mask = torch.ones_like(input_ids)
    output = pair.target.generate(input_ids, attention_mask=mask, generation_config=config, assistant_model=assistant)
    return output[0].tolist()


def _trace(
    settings: TraceSettings,
    pair: Pair,
    label: str,
    policy: ShortlistPolicy,
    recording: Recording,
    assistant: RecordedAssistant,
    token_ids: list[int],
    started: str,
) -> Trace:
    pieces = text_pieces(pair.tokenizer, token_ids)
    analysis = Analysis(recording, pieces)
    if not analysis.tokens:
        raise ConfigurationError("the target ends this text at once; name another prompt")
    prompt_length = len(pair.encoded[0])
    named = {one.token_id for one in analysis.tokens} | {one.token_id for one in analysis.entries}
    named |= {one.token_id for one in analysis.events if one.token_id is not None}
    named |= {token_id for one in analysis.events for ids in one.found.values() for token_id in ids}
    return Trace(
        settings=settings,
        policy=label,
        prompt=pair.described_prompts()[0],
        prompt_end="".join(pieces[max(0, prompt_length - PROMPT_END) : prompt_length]),
        models=pair.described_models(),
        described_policy=describe_policies({label: policy})[label],
        threads=torch.get_num_threads(),
        started=started,
        finished=utc_now(),
        tokens=analysis.tokens,
        events=analysis.events,
        entries=analysis.entries,
        texts={token_id: text_of(pair.tokenizer, token_id) for token_id in sorted(named)},
        summary=analysis.summary(assistant.stats),
        timeline=median_round(recording),
    )
