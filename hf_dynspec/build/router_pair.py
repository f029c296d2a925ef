"""The pair of models that a router is trained for, and what follows from it."""

from pathlib import Path
from typing import Any

import torch

from ..assistant import DynSpecAssistant
from ..drafters import CausalLMDrafter, Drafter
from ..errors import ConfigurationError
from ..loading import shared_vocabulary_size
from ..shortlists.router.clusters import ClusterShortlist
from ..vocabulary import fingerprint_tokenizer, require_same_tokenizer
from .inputs import describe_model
from .ranking import rank
from .windows import Windows


class RouterPair:
    """The models, and what follows from them.

    Args:
        target: the target.
        drafter: the drafter.
        tokenizer: that of both.

    Attributes:
        vocabulary_size: how many token ids all three know.
    """

    def __init__(self, target: Any, drafter: Drafter, tokenizer: Any):
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.vocabulary_size = shared_vocabulary_size(target, drafter, tokenizer)

    def described(self) -> list[str | None]:
        """Tells whether the models are still the same."""
        drafter = self.drafter
        if isinstance(drafter, CausalLMDrafter):
            return [describe_model(self.target), describe_model(drafter.model)]
        return [describe_model(self.target), str(drafter.checkpoint.folder)]

    def clusters(self, stored: torch.Tensor) -> torch.Tensor:
        """int64 `[V]`: stored clusters, of the tokens that both models score."""
        clusters = stored.long()[: self.vocabulary_size]
        if clusters.shape[0] < self.vocabulary_size:
            problem = f"has {clusters.shape[0]:,} tokens in its clusters, and the pair {self.vocabulary_size:,}"
            raise ConfigurationError(f"--clusters {problem}. Build clusters with the tokenizer of these models.")
        # A cluster of tokens that only one of the models scores is left out.
        return clusters.unique(return_inverse=True)[1]

    def require_trained_for(self, name: str, policy: ClusterShortlist) -> None:
        """Refuse a router that cannot be judged at this pair's draft steps."""
        router, width = policy.router, self.drafter.head.weight.shape[1]
        if router.centroids is not None:
            raise ConfigurationError(f"--compare {name}: holds clusters and no trained router.")
        for made_with in policy.tokenizer_fingerprints:
            require_same_tokenizer(made_with, fingerprint_tokenizer(self.tokenizer), f"--compare {name}: tokenizer")
        for what, theirs, ours in (
            ("reads hidden states of {:,} numbers, and the drafter's have {:,}", router.reads, width),
            ("has clusters of {:,} tokens, and the pair {:,}", router.clusters.shape[0], self.vocabulary_size),
        ):
            if theirs != ours:
                problem = what.format(theirs, ours)
                raise ConfigurationError(f"--compare {name}: {problem}. Name a router that was trained for this pair.")

    def rank(self, windows: Windows) -> torch.Tensor:
        """int64 `[n]`: the tokens, those most frequent in the data first."""
        ranking = torch.from_numpy(rank(windows.counts, self.tokenizer))
        return ranking[ranking < self.vocabulary_size]

    def save(self, policy: ClusterShortlist, out: Path, provenance: dict[str, Any]) -> None:
        """Write the artifact."""
        assistant = DynSpecAssistant(self.drafter, policy, target=self.target, tokenizer=self.tokenizer)
        assistant.save_pretrained(out, provenance=provenance)
