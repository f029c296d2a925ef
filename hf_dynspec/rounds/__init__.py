"""Rounds of fixed shape: draft, verify, accept, keep, observe, for one or more texts over fixed memory.

- `round`: the stages. Every tensor that outlives a round stays at its address, lengths lie on the device, and no stage
  looks at a number. So all rounds are the same operations on the same memory.
- `recorded`: a round as one CUDA graph.
- `capture`: how a graph is made, so that a failure leaves no trace.
"""

from .recorded import RecordedRound, recorded_forward_agrees
from .round import Accept, Answer, DraftShape, Note, Report, Round, RoundText, TextOutcome, Verification, Verify, Walk

__all__ = [
    "Accept",
    "Answer",
    "DraftShape",
    "Note",
    "RecordedRound",
    "Report",
    "Round",
    "RoundText",
    "TextOutcome",
    "Verification",
    "Verify",
    "Walk",
    "recorded_forward_agrees",
]
