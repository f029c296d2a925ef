"""CORAL's LM head router: the vocabulary in equal groups, and one layer that chooses the groups of a draft step.

Paper: CORAL (Weng et al., ACL 2025, arXiv 2502.16880), "LM head router". The rest of the paper is about training
drafters, which are used here like any others.
"""

import os
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from ..fields import Switch, WholeNumber
from ..storable import WEIGHT_DTYPES, TensorRule
from .router.clusters import ClusterShortlist
from .router.network import MOST_CLUSTERS, MOST_FEATURES, ROUTER_TENSOR_RULES, Router


class CoralShortlist(ClusterShortlist):
    """The groups of tokens that one layer on the drafter's hidden state finds most likely, and EOS.

    Unlike DynaSpec's router (`RouterShortlist`) it reads the head's own input, so it knows more but has to wait for
    the drafter's layers. Its groups have equal sizes, every draft step scores the same number of them, and only EOS is
    on every shortlist.

    Args:
        router: a `Router` of one layer, or the artifact (folder or Hub repository) of `hf-dynspec train router
            --method coral`, whose stored settings are then the defaults of those below.
        top_groups: groups that are scored at each draft step (default 64).
        packed: hold a copy of the head's rows in blocks, one after another by group, so that no single row is gathered
            (default True). The copy takes the memory of the head and up to a tenth more.

    Raises:
        ConfigurationError: a setting is mistyped or out of range, or the router has more than one layer.
        ArtifactError: the router's artifact is damaged, or of another policy.
    """

    name = "coral"
    setting_rules: ClassVar = {"top_groups": WholeNumber(1), "packed": Switch()}
    tensor_rules: ClassVar = {
        "clusters": ROUTER_TENSOR_RULES["clusters"],
        "output_weight": TensorRule(WEIGHT_DTYPES, (MOST_CLUSTERS, MOST_FEATURES)),
        "output_bias": ROUTER_TENSOR_RULES["output_bias"],
    }
    card_summary = (
        "The vocabulary is split into groups of equal size, and at each draft step a trained layer on the drafter's "
        "hidden state chooses the groups that are scored (CORAL's LM head router)."
    )
    card_tags = ("lm-head-router",)

    def __init__(self, router: Router | str | os.PathLike, top_groups: int | None = None, packed: bool | None = None):
        router, stored = self._loaded(router)
        if router.looks_ahead or router.centroids is not None:
            raise ConfigurationError(
                "CORAL's router is one layer on the hidden state: output_weight and output_bias alone. Give a network "
                "or centroids to RouterShortlist"
            )
        given = {"top_groups": top_groups, "packed": packed}
        settings = self._settings({"top_groups": 64, "packed": True}, stored, given)
        super().__init__(router, settings["packed"], None if stored is None else stored.tokenizer)
        self.top_groups: int = settings["top_groups"]

    def budget(self, depth: int, first: int | None = None) -> int:
        """The number of groups, the same at every draft step."""
        return min(self.top_groups if first is None else first, self.router.num_clusters)

    def with_budget(self, first: int) -> "CoralShortlist":
        """The same policy with another `top_groups`."""
        return CoralShortlist(self.router, first, self.packed)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.router.tensors()
