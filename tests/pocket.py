"""The embedded pair's folders and sizes, read from its own files."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

from hf_dynspec.kernels import has_dense_kernel

POCKET = Path(__file__).parents[1] / "examples" / "pocket"
_TARGET, _DRAFTER = (
    json.loads((POCKET / name / "config.json").read_text(encoding="utf-8")) for name in ("target", "drafter")
)
VOCABULARY_SIZE: int = _TARGET["vocab_size"]
# The shape that EAGLE heads must fit.
TARGET_SHAPE = {name: _TARGET[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
LAYERS: int = _TARGET["num_hidden_layers"]
# The hidden states that an EAGLE-3 head reads by default, as in EAGLE's own code.
EAGLE3_LAYER_IDS = [2, LAYERS // 2, LAYERS - 3]
DRAFTER_WIDTH: int = _DRAFTER["hidden_size"]


@cache
def has_head_product() -> bool:
    """Whether this package computes the target's logits itself, for which it needs a C++ compiler. Plain generation is
    measured with that product too then."""
    return has_dense_kernel(target_embedding().float())


def target_embedding() -> torch.Tensor:
    """`[VOCABULARY_SIZE, hidden_size]`: the target's embedding, which is its projection too, in the file's dtype."""
    for path in sorted((POCKET / "target").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if "model.embed_tokens.weight" in file.keys():
                return file.get_tensor("model.embed_tokens.weight")
    raise LookupError("the pocket target has no embedding")
