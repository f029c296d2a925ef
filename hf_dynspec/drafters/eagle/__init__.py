"""EAGLE-2 and EAGLE-3 heads as drafters.

- `drafter`: the head beside its target; loading, saving, training.
- `state`: what it remembers of a text, and a draft step.
- `module`: its weights, as they are trained, adapted and written; `weights`: the same as drafting uses them.
- `rotary`: the rotary embedding.
- `checkpoint`: reading and writing checkpoints of three layouts; `checkpoint_files`, `settings` and
  `checkpoint_tensors`: their files, configuration and tensors, of which nothing is believed.
- `conversion`: from one layout to another.
"""

from .drafter import EagleDrafter

__all__ = ["EagleDrafter"]
