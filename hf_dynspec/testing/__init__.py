"""Checks for policies of your own: see `check_policy`."""

from .policies import PolicyReport, check_policy

__all__ = ["PolicyReport", "check_policy"]
