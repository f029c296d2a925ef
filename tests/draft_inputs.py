"""Remembers what draft steps start from."""

import torch


class Shown:
    """Remembers what it was shown."""

    def __init__(self):
        self.embeddings, self.features = [], []

    def __call__(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        self.embeddings.append(embeddings)
        self.features.append(features)
