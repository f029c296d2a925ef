"""Shortlist policies: which tokens the drafter scores at each draft step.

To add a policy, write one file beside this one and one line below; the contract tests then cover it. Its class
declares its settings and tensors, their bounds and its text for model cards (`Storable`).
"""

from ..fields import OneOf, SettingRule, Share, Switch, WholeNumber
from ..storable import (
    ID_DTYPES,
    POLICIES,
    POLICY_DATA,
    TOKENIZER_SIZE,
    WEIGHT_DTYPES,
    Storable,
    TensorRule,
    stored_class,
    token_ids,
    token_ranking,
)
from .automatic import AutomaticShortlist
from .base import ShortlistPolicy, ShortlistState
from .composite import CompositePolicy
from .coral import CoralShortlist
from .frequency import FrequencyShortlist
from .full import FullShortlist
from .hybrid import HybridShortlist
from .in_context import InContextShortlist
from .native import NativeShortlist
from .registry import as_policy, policy_class, register_policy
from .retrieval import CooccurrenceGraph, RetrievalShortlist
from .router import Router, RouterShortlist
from .screen import ScreenFactor, ScreenShortlist
from .union import UnionShortlist

register_policy(FullShortlist)
register_policy(FrequencyShortlist)
register_policy(InContextShortlist)
register_policy(RouterShortlist)
register_policy(UnionShortlist)
register_policy(HybridShortlist)
register_policy(RetrievalShortlist)
register_policy(ScreenShortlist)
register_policy(CoralShortlist)
register_policy(NativeShortlist)
register_policy(AutomaticShortlist)
POLICY_DATA[CooccurrenceGraph.name] = CooccurrenceGraph

__all__ = [
    "ID_DTYPES",
    "POLICIES",
    "POLICY_DATA",
    "TOKENIZER_SIZE",
    "WEIGHT_DTYPES",
    "AutomaticShortlist",
    "CompositePolicy",
    "CooccurrenceGraph",
    "CoralShortlist",
    "FrequencyShortlist",
    "FullShortlist",
    "HybridShortlist",
    "InContextShortlist",
    "NativeShortlist",
    "OneOf",
    "RetrievalShortlist",
    "Router",
    "RouterShortlist",
    "ScreenFactor",
    "ScreenShortlist",
    "SettingRule",
    "Share",
    "ShortlistPolicy",
    "ShortlistState",
    "Storable",
    "Switch",
    "TensorRule",
    "UnionShortlist",
    "WholeNumber",
    "as_policy",
    "policy_class",
    "register_policy",
    "stored_class",
    "token_ids",
    "token_ranking",
]
