"""The static shortlist of an artifact, for engines with one fixed list."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...artifacts.config import DynSpecConfig
from ...artifacts.reading import read_artifact, rebuild_policy
from ...errors import ArtifactError, ConfigurationError, naming_source
from ...loading import find_eos_token_ids, load_tokenizer
from ...protocol import VocabularyInfo
from ...shortlists import FrequencyShortlist, ShortlistPolicy
from ...vocabulary import TokenizerFingerprint, fingerprint_tokenizer


@dataclass(frozen=True)
class StaticShortlist:
    """A fixed list of tokens: the policy that drafts them here, the tokenizer of the ids with the ids that end a text,
    and the artifact's configuration."""

    policy: FrequencyShortlist
    tokenizer: TokenizerFingerprint
    config: DynSpecConfig

    def token_ids(self, draftable: Sequence[int] | torch.Tensor | None = None) -> torch.Tensor:
        """int64 `[n]`, in the order of the ranking: the ids that end a text and the most frequent others. A head that
        can score only some ids has them in `draftable`.

        Raises:
            ConfigurationError: the ranking holds fewer ids than the size, or none that the head can score.
        """
        ids, eos = None, self.tokenizer.eos_token_ids
        if draftable is not None:
            ids = torch.as_tensor(draftable, dtype=torch.int64)
            ids = ids[ids < self.tokenizer.size]  # the others are padding
            eos = tuple(one for one in eos if bool((ids == one).any()))
        vocabulary = VocabularyInfo(self.tokenizer.size, eos, torch.device("cpu"), draftable=ids)
        chosen = self.policy.leading_ids(vocabulary)
        if chosen.numel() < self.policy.size:
            whose = "the ranking holds" if ids is None else "of the ranking the head can draft"
            raise ConfigurationError(
                f"size is {self.policy.size:,}, and {whose} {chosen.numel():,} ids; give a --size up to that"
            )
        if self.policy.ranking is None:
            return chosen.sort().values
        # End-of-sequence ids that the ranking lacks come first.
        place = torch.full((self.tokenizer.size,), -1, dtype=torch.int64)
        ranked = self.policy.ranking[self.policy.ranking < self.tokenizer.size]
        place[ranked] = torch.arange(ranked.numel())
        return chosen[place[chosen].argsort()]


def read_static_shortlist(
    artifact: str | os.PathLike,
    *,
    engine: str,
    size: int | None = None,
    take_core: bool = False,
    target: str | os.PathLike | None = None,
) -> StaticShortlist:
    """Read the static shortlist of an artifact, a folder or a repository on the Hub. A policy that is not static is
    refused with the nearest static thing.

    Args:
        engine: the engine's name, for errors.
        size: number of tokens (None: the artifact's).
        take_core: of a policy that follows the text, take its static core.
        target: folder or Hub id of the target. Its tokenizer is compared with the artifact's, and its end-of-sequence
            ids are the list's (None: the artifact's own).
    """
    fingerprint = None
    if target is not None:
        loaded = load_tokenizer(target)
        fingerprint = fingerprint_tokenizer(loaded, find_eos_token_ids(target, loaded))
    config, tensors = read_artifact(artifact, tokenizer_fingerprint=fingerprint)
    with naming_source(artifact):
        policy = _static_core(Path(artifact).name, rebuild_policy(config, tensors), engine, take_core)
    known = fingerprint or config.tokenizer
    if known is None:
        problem = "is not named, so that nothing says which ids there are"
        fix = "Give --target, the folder or Hub id of the target."
        raise ArtifactError("config.json: tokenizer", problem, fix, str(artifact))
    return StaticShortlist(FrequencyShortlist(policy.ranking, policy.size if size is None else size), known, config)


def _static_core(artifact: str, policy: ShortlistPolicy, engine: str, take_core: bool) -> FrequencyShortlist:
    core: Any = policy.static_core
    if core is policy or (core is not None and take_core):
        return core
    problem = f"is {policy.name!r}, which chooses tokens anew as a text goes on, and {engine} takes one list for good"
    if policy.name == "full":
        problem = f"is 'full', which needs no list: {engine} drafts from all tokens unless it is given one"
    fix = "To gain there what a static list gains, build a ranking with `hf-dynspec build frequency` and export that."
    if core is not None:
        fix = f"The nearest static thing is its core of {core.size:,} tokens: give --static to export that."
    raise ArtifactError(f"{artifact}: policy", problem, fix)
