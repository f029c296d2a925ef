"""hf_dynspec: dynamic drafter vocabularies for speculative decoding with Hugging Face transformers.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ArtifactError": ".errors",
    "AutomaticShortlist": ".shortlists",
    "ConfigurationError": ".errors",
    "CoralShortlist": ".shortlists",
    "NativeShortlist": ".shortlists",
    "DynSpecAssistant": ".assistant",
    "DynSpecCandidateGenerator": ".generation.candidate_generator",
    "DynSpecConfig": ".artifacts.config",
    "DynSpecError": ".errors",
    "EagleDrafter": ".drafters",
    "FrequencyShortlist": ".shortlists",
    "FullShortlist": ".shortlists",
    "HybridShortlist": ".shortlists",
    "InContextShortlist": ".shortlists",
    "MtpDrafter": ".drafters",
    "Needs": ".protocol",
    "NotBoundError": ".errors",
    "OnlineAlignment": ".alignment.settings",
    "PolicyError": ".errors",
    "Prompt": ".protocol",
    "RetrievalShortlist": ".shortlists",
    "RouterShortlist": ".shortlists",
    "ScreenShortlist": ".shortlists",
    "Shortlist": ".protocol",
    "ShortlistPolicy": ".shortlists",
    "ShortlistState": ".shortlists",
    "TargetError": ".errors",
    "TreeConfig": ".tree_config",
    "UnionShortlist": ".shortlists",
    "UnsupportedError": ".errors",
    "Verdict": ".protocol",
    "VocabularyInfo": ".protocol",
    "register_policy": ".shortlists",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 (ruff does not see that the keys are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from .alignment.settings import OnlineAlignment as OnlineAlignment
    from .artifacts.config import DynSpecConfig as DynSpecConfig
    from .assistant import DynSpecAssistant as DynSpecAssistant
    from .drafters import EagleDrafter as EagleDrafter
    from .drafters import MtpDrafter as MtpDrafter
    from .errors import ArtifactError as ArtifactError
    from .errors import ConfigurationError as ConfigurationError
    from .errors import DynSpecError as DynSpecError
    from .errors import NotBoundError as NotBoundError
    from .errors import PolicyError as PolicyError
    from .errors import TargetError as TargetError
    from .errors import UnsupportedError as UnsupportedError
    from .generation.candidate_generator import DynSpecCandidateGenerator as DynSpecCandidateGenerator
    from .protocol import Needs as Needs
    from .protocol import Prompt as Prompt
    from .protocol import Shortlist as Shortlist
    from .protocol import Verdict as Verdict
    from .protocol import VocabularyInfo as VocabularyInfo
    from .shortlists import AutomaticShortlist as AutomaticShortlist
    from .shortlists import CoralShortlist as CoralShortlist
    from .shortlists import FrequencyShortlist as FrequencyShortlist
    from .shortlists import FullShortlist as FullShortlist
    from .shortlists import HybridShortlist as HybridShortlist
    from .shortlists import InContextShortlist as InContextShortlist
    from .shortlists import NativeShortlist as NativeShortlist
    from .shortlists import RetrievalShortlist as RetrievalShortlist
    from .shortlists import RouterShortlist as RouterShortlist
    from .shortlists import ScreenShortlist as ScreenShortlist
    from .shortlists import ShortlistPolicy as ShortlistPolicy
    from .shortlists import ShortlistState as ShortlistState
    from .shortlists import UnionShortlist as UnionShortlist
    from .shortlists import register_policy as register_policy
    from .tree_config import TreeConfig as TreeConfig
