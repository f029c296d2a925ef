"""What is passed as `assistant_model`: a drafter, its dynamic head and a shortlist policy."""

from .assistant import DynSpecAssistant

__all__ = ["DynSpecAssistant"]
