"""EAGLE-2 and EAGLE-3 heads as drafters.

- `drafter`: the head beside its target; loading, saving, training.
- `state`: its cache of a text, and a draft step.
- `module`: its weights for training, adapters and files; `weights`: the same weights fused for drafting.
- `rotary`: the rotary embedding.
- `checkpoint`: reading and writing checkpoints of three layouts; `checkpoint_files`, `settings` and
  `checkpoint_tensors`: their files, configuration and tensors, all of them checked.
- `conversion`: from one layout to another.
"""

from .drafter import EagleDrafter

__all__ = ["EagleDrafter"]
