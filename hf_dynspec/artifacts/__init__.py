"""Artifacts on disk and on the Hugging Face Hub: reading, writing, checks and model cards."""

from .card import render_card
from .publishing import push_artifact
from .reading import read_artifact, read_graph, rebuild, rebuild_policy
from .writing import annotate_artifact, write_artifact

__all__ = [
    "annotate_artifact",
    "push_artifact",
    "read_artifact",
    "read_graph",
    "rebuild",
    "rebuild_policy",
    "render_card",
    "write_artifact",
]
