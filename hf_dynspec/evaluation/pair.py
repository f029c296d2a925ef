"""What every measurement starts from: a target, its drafters, their tokenizer, and prompts as token ids."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..artifacts.config import ModelReference
from ..assistant.models import load_drafter
from ..devices import without_attention_plans
from ..drafters import CausalLMDrafter, Drafter, EagleDrafter, MtpDrafter, as_drafter
from ..drafters.eagle.checkpoint import EagleCheckpoint, holds_a_head, read_checkpoint
from ..drafters.gemma4_assistant import Gemma4AssistantDrafter
from ..errors import ConfigurationError, DynSpecError
from ..fields import SettingError
from ..loading import load_model, load_tokenizer, without_warnings_of_transformers
from .policy_text import shorten_paths
from .prompts import WorkloadPrompt, encode_workload, read_workload
from .settings import INDEPENDENT, MTP, PairSettings, head_labels
from .tables import parameter_count

# The note of a measurement that was stopped from the keyboard.
INTERRUPTION = "interrupted before all was measured"


@dataclass(frozen=True, eq=False)
class Pair:
    """A target and what drafts for it, and what they are measured on."""

    target: PreTrainedModel  # the model to speed up
    drafters: dict[str, Drafter]  # the drafters by label, at least one; `INDEPENDENT` is the small model
    tokenizer: Any
    prompts: list[WorkloadPrompt]
    encoded: list[list[int]]  # the token ids of each prompt

    @property
    def drafter_model(self) -> PreTrainedModel | None:
        """The small model, or None if there is none."""
        drafter = self.drafters.get(INDEPENDENT)
        return drafter.model if isinstance(drafter, CausalLMDrafter | Gemma4AssistantDrafter) else None

    def described_models(self) -> dict[str, Any]:
        """What is known of the target, the small model or MTP layers, and the EAGLE heads by label, as JSON values."""
        heads = {label: one for label, one in self.drafters.items() if isinstance(one, EagleDrafter)}
        described: dict[str, Any] = {"target": _describe(self.target)}
        if self.drafter_model is not None:
            described["drafter"] = _describe(self.drafter_model)
        elif MTP in self.drafters:
            described["drafter"] = described["target"] | _describe_layers(self.drafters[MTP])
        if heads:
            described["eagle"] = {label: _describe_head(head) for label, head in heads.items()}
        return described

    def described_prompts(self) -> list[dict[str, Any]]:
        """Identifier, domain and number of tokens of each prompt."""
        return [
            {"identifier": prompt.identifier, "domain": prompt.domain, "tokens": len(token_ids)}
            for prompt, token_ids in zip(self.prompts, self.encoded, strict=True)
        ]


@contextmanager
def open_pair(
    settings: PairSettings,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    *,
    eagle: Sequence[str] = (),
    allow_pickle: bool = False,
) -> Iterator[Pair]:
    """Read the prompts and load what is not passed. Torch's threads and random state are put back at the end.

    Args:
        settings: what to load. Settings, prompts and EAGLE heads are checked before any model is loaded.
        target, tokenizer, prompts: used instead of what the settings name.
        drafter: likewise: a loaded small model, EAGLE head or MTP layers.
        eagle: folders or Hub ids of EAGLE heads, which may take the small model's place.
        allow_pickle: as `EagleDrafter.from_pretrained`.

    Raises:
        ConfigurationError: a model or head cannot be loaded, or there are no prompts or no drafters.
        WorkloadError: the prompts cannot be read or are too long.
    """
    prompts = read_workload(settings.prompts, settings.limit) if prompts is None else list(prompts)
    if not prompts:
        raise ConfigurationError("there is no prompt to measure on")
    if drafter is not None and not isinstance(drafter, PreTrainedModel | Drafter):
        raise ConfigurationError(f"drafter must be a small model or an EAGLE head, got {type(drafter).__name__}")
    # Before anything is loaded.
    if target is None and not settings.target:
        raise ConfigurationError("name the target: a folder or a Hub id")
    if drafter is None and not settings.drafter and not eagle:
        raise ConfigurationError("name the drafter: a folder or a Hub id of a small model, or of an EAGLE head")
    heads = _read_heads(eagle, allow_pickle)
    with ExitStack() as stack:
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(settings.threads or threads)
        target = target or load_part(settings, "target")
        if drafter is None and settings.drafter:
            drafter = _load_drafter(settings, target)
        _warn_of_larger(drafter, target)
        tokenizer = tokenizer or load_tokenizer(settings.target or target.name_or_path)
        drafters: dict[str, Drafter] = (
            {} if drafter is None else {_label_of(drafter): as_drafter(drafter).for_target(target)}
        )
        for label, checkpoint in heads.items():
            with _naming_head(label):
                drafters[label] = EagleDrafter(checkpoint, target)
        encoded = encode_workload(
            prompts,
            tokenizer,
            room_for_prompt(settings, target, drafters.get(INDEPENDENT)),
            truncate_to=settings.max_prompt_tokens,
            use_chat_template=settings.chat_template,
        )
        stack.enter_context(without_warnings_of_transformers())
        # Plain generation could leave them out too.
        stack.enter_context(without_attention_plans(target.device))
        stack.enter_context(torch.random.fork_rng([target.device] if target.device.type == "cuda" else []))
        yield Pair(target, drafters, tokenizer, prompts, encoded)


def load_models(
    settings: PairSettings, eagle: str | None = None, allow_pickle: bool = False
) -> tuple[PreTrainedModel, Drafter, Any]:
    """Load a target, one drafter and their tokenizer: what the settings name, or an EAGLE head from a folder or the
    Hub, with `allow_pickle` as in `EagleDrafter.from_pretrained`.

    Raises:
        ConfigurationError: a model, the head or the tokenizer cannot be loaded, or there is not one drafter.
    """
    if (settings.drafter is None) == (eagle is None):
        raise ConfigurationError("name one drafter: a small model or an EAGLE head")
    heads = _read_heads([eagle] if eagle else [], allow_pickle)
    target = load_part(settings, "target")
    if not heads:
        drafter = _load_drafter(settings, target)
        _warn_of_larger(drafter, target)
        return target, as_drafter(drafter).for_target(target), load_tokenizer(str(settings.target))
    label, checkpoint = heads.popitem()
    with _naming_head(label):
        return target, EagleDrafter(checkpoint, target), load_tokenizer(str(settings.target))


def generation_config(
    target: PreTrainedModel, max_new_tokens: int, temperature: float, top_k: int = 0
) -> GenerationConfig:
    """What is generated with: nothing of the target's own taste but its end-of-sequence tokens. A temperature of 0
    decodes greedily, and a `top_k` of 0 draws from all tokens."""
    defaults = target.generation_config
    eos = defaults.eos_token_id
    first_eos = eos[0] if isinstance(eos, list | tuple) else eos
    sampling = {"temperature": temperature, "top_k": top_k} if temperature > 0 else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=eos,
        pad_token_id=defaults.pad_token_id if defaults.pad_token_id is not None else first_eos,
        **{"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, **sampling},
    )


def utc_now() -> str:
    """UTC time in ISO format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _warn_of_larger(drafter: PreTrainedModel | Drafter | None, target: PreTrainedModel) -> None:
    """Warn of a small model that is none, as where both were named in the wrong order."""
    if not isinstance(drafter, PreTrainedModel):
        return
    its, parameters = drafter.num_parameters(), target.num_parameters()
    if its > parameters:
        warnings.warn(
            f"the drafter has {parameter_count(its)} parameters and its target {parameter_count(parameters)}: see "
            "whether they are swapped",
            stacklevel=3,
        )


def _read_heads(sources: Sequence[str], allow_pickle: bool) -> dict[str, EagleCheckpoint]:
    """The checkpoints of EAGLE heads by label, on the CPU and not yet compared with a target."""
    heads = {}
    for label, source in zip(head_labels(sources), sources, strict=True):
        with _naming_head(label):
            heads[label] = read_checkpoint(source, allow_pickle=allow_pickle)
    return heads


def _label_of(drafter: PreTrainedModel | Drafter) -> str:
    """What a loaded drafter is shown as."""
    if isinstance(drafter, MtpDrafter):
        return MTP
    if not isinstance(drafter, EagleDrafter):
        return INDEPENDENT
    folder = drafter.checkpoint.folder
    return head_labels([folder])[0] if folder else "eagle"


@contextmanager
def _naming_head(label: str) -> Iterator[None]:
    """Say which of several EAGLE heads cannot be used."""
    try:
        yield
    except DynSpecError as error:
        raise ConfigurationError(f"the EAGLE head {label}: {error}") from error


def load_part(settings: PairSettings, role: str) -> PreTrainedModel:
    """Load the target, or a small model that drafts. Raises `ConfigurationError` if it cannot be loaded."""
    dtype = settings.dtype or "auto"
    return load_model(getattr(settings, role), device=settings.resolved_device(), dtype=dtype, role=role)


def _load_drafter(settings: PairSettings, target: PreTrainedModel) -> PreTrainedModel | Drafter:
    name = str(settings.drafter)
    is_of_target = name == MTP or (os.path.isdir(name) and holds_a_head(name))
    return load_drafter(name, target) if is_of_target else load_part(settings, "drafter")


def room_for_prompt(settings: PairSettings, target: PreTrainedModel, drafter: Drafter | None) -> int | None:
    """Most tokens of a prompt for which both models have positions, None if neither tells. The positions of EAGLE
    heads go on past what their configuration says. Raises `SettingError` if the new tokens alone take all
    positions."""
    models = [target, *([drafter.model] if isinstance(drafter, CausalLMDrafter) else [])]
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    known = [limit for limit in limits if limit]
    if not known:
        return None
    if settings.max_new_tokens >= min(known):
        raise SettingError(
            "max_new_tokens",
            f"is {settings.max_new_tokens:,}, and the models have room for {min(known):,} tokens, prompt included: "
            "generate fewer",
        )
    return min(known) - settings.max_new_tokens


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": shorten_paths(str(model.name_or_path)),
        "commit": getattr(model.config, "_commit_hash", None),
        "class": type(model).__name__,
        "parameters": model.num_parameters(),
        "head_rows": model.get_output_embeddings().weight.shape[0],
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.config._attn_implementation,
    }


def _describe_layers(layers: MtpDrafter) -> dict[str, Any]:
    """What differs from the target's description."""
    parameters = sum(one.numel() for one in layers.module.parameters())
    return {"class": type(layers).__name__, "parameters": parameters, "head_rows": layers.head.weight.shape[0]}


def _describe_head(head: EagleDrafter) -> dict[str, Any]:
    checkpoint = head.checkpoint
    source = ModelReference(checkpoint.folder) if checkpoint.folder else None
    return {
        "name": source and source.name_or_path,
        "commit": source and source.commit,
        "class": f"EAGLE-{checkpoint.settings.generation}",
        "format": checkpoint.format,
        "parameters": sum(one.numel() for one in checkpoint.tensors.values() if one.is_floating_point()),
        "head_rows": head.head.weight.shape[0],
        "reads": list(head.reads),
        "dtype": str(head.weights.qkv.dtype).removeprefix("torch."),
        "device": str(head.weights.qkv.device),
    }
