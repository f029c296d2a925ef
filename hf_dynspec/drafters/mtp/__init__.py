"""Multi-token-prediction layers of the target's own checkpoint as drafters.

- `drafter`: the layers beside their target.
- `state`: their cache of a text, and a draft step.
- `layers`: the layers, of transformers' own modules.
- `checkpoint`: reading them, with checks of names, shapes and dtypes.
"""

from .drafter import MtpDrafter

__all__ = ["MtpDrafter"]
