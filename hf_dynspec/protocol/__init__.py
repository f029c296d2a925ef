"""What one stage of a round hands the next: shortlists, candidates and verdicts. Shapes are documented here, once.

Letters: `V` rows of the output projection, `C` slots of a shortlist, `k` drafted tokens of a round, `a` accepted ones.
Positions count the tokens of the text from 0, padding not among them.
"""

from .candidates import Candidates, Draws, SparseDistribution
from .feedback import BackgroundWork, Needs, Prompt, Verdict
from .shortlists import BlockLayout, BlockShortlist, JoinedShortlist, Shortlist
from .vocabulary import HeadRows, OwnClusters, VocabularyInfo

__all__ = [
    "BackgroundWork",
    "BlockLayout",
    "BlockShortlist",
    "Candidates",
    "Draws",
    "HeadRows",
    "JoinedShortlist",
    "Needs",
    "OwnClusters",
    "Prompt",
    "Shortlist",
    "SparseDistribution",
    "Verdict",
    "VocabularyInfo",
]
