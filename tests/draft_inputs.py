"""Remembers the inputs of draft steps."""

import torch


class DraftInputs:
    """Remembers the draft inputs that it was given."""

    def __init__(self):
        self.embeddings, self.features = [], []

    def __call__(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        self.embeddings.append(embeddings)
        self.features.append(features)
