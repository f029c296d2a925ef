"""The tensors of an EAGLE checkpoint: their names in each layout, their shapes and their values."""

from collections.abc import Mapping

import torch

from ...errors import ArtifactError
from .checkpoint_files import CONFIG_FILE, FETCH_AGAIN, FLOATS, IDS, TensorHeader
from .settings import CheckpointFormat, EagleSettings


def layer_prefix(checkpoint_format: CheckpointFormat, generation: int) -> str:
    """The prefix of the layer's tensors in a file; `layer.` inside the package."""
    return "midlayer." if checkpoint_format == "official" and generation == 3 else "layers.0."


def renamed(name: str, old: str, new: str) -> str:
    """A tensor's name with the prefix `old` replaced by `new`."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def _expected_shapes(
    settings: EagleSettings, found: Mapping[str, TensorHeader]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The shapes of the required and of the optional tensors."""
    hidden, vocab, draft_vocab = settings.hidden_size, settings.vocab_size, settings.draft_vocab_size
    inner, inputs = settings.intermediate_size, hidden * (settings.generation - 1)
    sizes = {"q": settings.num_attention_heads, "k": settings.num_key_value_heads, "v": settings.num_key_value_heads}
    attention = "layer.self_attn."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, settings.fc_inputs)}
    if settings.fc_bias:
        shapes["fc.bias"] = (hidden,)
    for letter, heads in sizes.items():
        shapes[f"{attention}{letter}_proj.weight"] = (heads * settings.head_dim, inputs)
        if settings.attention_bias:
            shapes[f"{attention}{letter}_proj.bias"] = (heads * settings.head_dim,)
    shapes[f"{attention}o_proj.weight"] = (hidden, settings.num_attention_heads * settings.head_dim)
    if settings.output_bias:
        shapes[f"{attention}o_proj.bias"] = (hidden,)
    if settings.qk_norm:
        shapes |= {f"{attention}{letter}_norm.weight": (settings.head_dim,) for letter in "qk"}
    shapes |= {f"layer.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes["layer.mlp.down_proj.weight"] = (hidden, inner)
    shapes["layer.post_attention_layernorm.weight"] = (hidden,)
    optional = {} if settings.own_embedding else {"embed_tokens.weight": (vocab, hidden)}
    if settings.own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if settings.generation == 3:
        shapes |= {f"{name}.weight": (hidden,) for name in ("layer.hidden_norm", "layer.input_layernorm", "norm")}
        if settings.norm_before_fc:
            shapes["input_norm.weight"] = (settings.fc_inputs,)
        own = {"lm_head.weight": (draft_vocab, hidden)}
        trimmed = draft_vocab < vocab
        shapes |= own if trimmed or "d2t" in found else {}
        shapes |= {"d2t": (draft_vocab,)} if trimmed or "d2t" in found or "t2d" in found else {}
        # It follows from d2t.
        optional |= {**own, "t2d": (vocab,)}
    return shapes, optional


def check_headers(settings: EagleSettings, found: Mapping[str, TensorHeader], prefix: str, source: str) -> None:
    """Check names, shapes and dtypes of all tensors, and report all problems at once."""

    def shown(name: str) -> str:
        return renamed(name, "layer.", prefix)

    required, optional = _expected_shapes(settings, found)
    shapes = {**optional, **required}
    problems = []
    missing = [shown(name) for name in required if name not in found]
    unexpected = [shown(name) for name in found if name not in shapes]
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unexpected:
        problems.append(f"unexpected {', '.join(sorted(unexpected))}")
    for name, header in found.items():
        if name not in shapes:
            continue
        if header.shape != shapes[name]:
            problems.append(f"{shown(name)} has shape {list(header.shape)}, expected {list(shapes[name])}")
        dtypes = {"d2t": tuple(IDS.values()), "t2d": (torch.bool,)}.get(name, tuple(FLOATS.values()))
        if header.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            problems.append(f"{shown(name)} has dtype {str(header.dtype).removeprefix('torch.')}, expected {allowed}")
    if problems:
        problem = f"does not fit {CONFIG_FILE}: {'; '.join(problems)}"
        raise ArtifactError(source, problem, f"Give the {CONFIG_FILE} that belongs to these tensors.")


def check_contents(
    settings: EagleSettings, tensors: Mapping[str, torch.Tensor], source: str
) -> dict[str, torch.Tensor]:
    """Check that weights are finite, and that draft tokens are different tokens of the target. Returns the tensors,
    with `t2d` if there is `d2t`."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{source}: {name}", "holds NaN or infinity", FETCH_AGAIN)
    if "d2t" not in tensors:
        return dict(tensors)
    offsets = tensors["d2t"].to(torch.int64)
    ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
    outside = ids[(ids < 0) | (ids >= settings.vocab_size)]
    if outside.numel():
        problem = f"leads to the id {int(outside[0])}, and ids run from 0 to {settings.vocab_size - 1}"
        raise ArtifactError(f"{source}: d2t", problem, "It must hold offsets: row i stands for token i + d2t[i].")
    counts = torch.bincount(ids, minlength=settings.vocab_size)
    if int(counts.max()) > 1:
        problem = f"leads to the id {int(counts.argmax())} more than once"
        raise ArtifactError(f"{source}: d2t", problem, "It must hold offsets: row i stands for token i + d2t[i].")
    known = tensors.get("t2d", counts > 0)
    if not torch.equal(counts > 0, known):
        astray = int(((counts > 0) != known).nonzero()[0])
        problem = f"says the opposite of d2t of the id {astray}"
        raise ArtifactError(f"{source}: t2d", problem, "It must be true for exactly the ids that d2t leads to.")
    return {**tensors, "t2d": known}
