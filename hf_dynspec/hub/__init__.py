"""Artifacts on disk and on the Hugging Face Hub: reading, writing, checks and model cards."""

from .artifact import annotate_artifact, push_artifact, read_artifact, rebuild_policy, write_artifact
from .card import render_card
from .fingerprint import fingerprint_tokenizer, require_same_tokenizer

__all__ = [
    "annotate_artifact",
    "fingerprint_tokenizer",
    "push_artifact",
    "read_artifact",
    "rebuild_policy",
    "render_card",
    "require_same_tokenizer",
    "write_artifact",
]
