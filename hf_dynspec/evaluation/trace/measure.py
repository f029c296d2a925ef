"""One prompt, generated with notes of what the policy does."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler import _ExperimentalConfig as ProfilerConfig
from transformers import PreTrainedModel

from ...drafters import Drafter
from ...errors import ConfigurationError
from ...files import replacing
from ...kernels import prepare_kernels
from ..bench.systems import CONSTANT_DRAFT_LENGTH
from ..pair import generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt, read_workload
from ..provenance import describe_policies
from .analysis import Analysis, decoded, text_pieces
from .recording import RecordedAssistant, Recording, recorded
from .result import PROMPT_END, Trace
from .settings import TraceSettings


def trace_prompt(
    settings: TraceSettings,
    *,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    timeline: Path | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
) -> Trace:
    """Generate once, as a user's call does, and trace the policy. Settings, prompts and EAGLE heads are checked before
    any model is loaded. The tokens are those of a call without a trace.

    Args:
        settings: what to trace.
        target, drafter, tokenizer, prompts: used instead of what the settings name, see `open_pair`.
        timeline: write a profile of the call here, for Perfetto or chrome://tracing: the sections of each round and
            the retrievals. It slows the call down.
        report: called with the activity, how much is done and how much there is.

    Raises:
        ConfigurationError: a setting is out of range, there is no such prompt, or a model cannot be loaded.
        WorkloadError: the prompts cannot be read, or the one is too long.
        UnsupportedError: the models cannot be used together.
        ArtifactError: the policy's ranking was made for another tokenizer.
        OSError: the timeline cannot be written.
    """
    label, policy = settings.resolved_policy()
    prompt = settings.chosen(read_workload(settings.prompts, settings.limit) if prompts is None else list(prompts))
    given = {"eagle": [settings.eagle] if settings.eagle and drafter is None else []}
    given["allow_pickle"] = settings.allow_pickle
    with open_pair(settings, target, drafter, tokenizer, [prompt], **given) as pair:
        report("preparing the policy", 0, 2)
        started, recording = utc_now(), Recording()
        (drafter,) = pair.drafters.values()
        if "cpu" in (pair.target.device.type, drafter.head.device.type):
            prepare_kernels()
        assistant = RecordedAssistant(
            drafter,
            recorded(policy, recording),
            target=pair.target,
            tokenizer=pair.tokenizer,
            num_assistant_tokens=settings.num_assistant_tokens,
            tree=settings.resolved_tree() or False,
        )
        assistant.generation_config.update(**CONSTANT_DRAFT_LENGTH)
        config = generation_config(pair.target, settings.max_new_tokens, settings.temperature, settings.top_k)
        input_ids = torch.tensor(pair.encoded, device=pair.target.device)
        try:
            report("generating", 1, 2)
            torch.manual_seed(settings.seed)
            call = {"generation_config": config, "assistant_model": assistant}
            with _profiled(timeline):
                output = pair.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **call)
            report("done", 2, 2)
        finally:
            assistant.unbind()
        pieces = text_pieces(pair.tokenizer, output[0].tolist())
        analysis = Analysis(recording, pieces)
        if not analysis.tokens:
            raise ConfigurationError("the target ends this text at once; name another prompt")
        prompt_end = pieces[: input_ids.shape[1]][-PROMPT_END:]
        named = {one.token_id for one in (*analysis.tokens, *analysis.entries, *analysis.events)} - {None}
        named |= {token_id for one in analysis.events for ids in one.found.values() for token_id in ids}
        return Trace(
            settings=settings,
            policy=label,
            prompt=pair.described_prompts()[0],
            prompt_end="".join(prompt_end),
            models=pair.described_models(),
            described_policy=describe_policies({label: policy})[label],
            threads=torch.get_num_threads(),
            started=started,
            finished=utc_now(),
            tokens=analysis.tokens,
            events=analysis.events,
            entries=analysis.entries,
            texts={token_id: decoded(pair.tokenizer, [token_id]) for token_id in sorted(named)},
            summary=analysis.summary(assistant.stats),
        )


@contextmanager
def _profiled(timeline: Path | None) -> Iterator[None]:
    """Profile the enclosed call, retrieval in its own thread too."""
    if timeline is None:
        yield
        return
    # Or the profiler reports its own begin and end on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, experimental_config=ProfilerConfig(profile_all_threads=True)) as profiled:
        yield
    with replacing(timeline) as scratch:
        profiled.export_chrome_trace(str(scratch))
