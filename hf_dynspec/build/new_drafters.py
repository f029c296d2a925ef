"""Drafters before their training: an EAGLE head of a target, or a small model with the target's vocabulary."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..artifacts.config import LIBRARY_NAME
from ..drafters import CausalLMDrafter, EagleDrafter
from ..drafters.eagle.checkpoint import EagleCheckpoint
from ..errors import ConfigurationError, UnsupportedError
from ..modeling.head import DynamicLMHead
from ..modeling.parts import decoder_of

LAYOUTS = ("eagle3", "eagle2")
# The fewest layers of a target that give three different hidden states; and the fewest with EAGLE's own choice, which
# leaves out the last layers. They are a large part of a shallow target, and a head cannot make up for them.
FEWEST_LAYERS, _FEWEST_USUAL = 3, 16
# The part of random inputs and outputs beside those that are made from the target's hidden states.
_SMALL = 0.1
# How sharply a new attention head tells its own token from others.
_SHARP = 1.5
_RIDGE, _FLAT = 0.05, 1e-3
# Times the usual size of hidden states.
_UNUSUAL = 4.0
# The scale of a new model's last norm.
_FAINT = 0.3
# Attention heads have this width if the target's own shape cannot be taken over.
_HEAD_DIM = 64
# Rows of an output projection that decide the directions of a narrower one.
_MOST_ROWS = 32_768


def hidden_states_read(layers: int) -> tuple[int, ...]:
    """The hidden states that a new EAGLE-3 head reads of a target with so many layers: EAGLE's own choice, or three
    others if the target is too shallow for it.

    Raises:
        UnsupportedError: there are no three.
    """
    if layers < FEWEST_LAYERS:
        raise UnsupportedError(
            f"the target has {layers} layers, and an EAGLE-3 head reads the hidden states of three. Train an EAGLE-2 "
            "head (--layout eagle2), or a drafter of its own."
        )
    if layers >= _FEWEST_USUAL:
        return (2, layers // 2, layers - 3)
    return (min(2, (layers - 1) // 3), layers // 2, layers - 1)


def new_eagle_head(
    target: PreTrainedModel,
    sample: Callable[[], Iterable[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]],
    layout: str = "eagle3",
    intermediate_size: int | None = None,
    seed: int = 0,
) -> EagleDrafter:
    """An EAGLE head in the official layout, which shares the target's embedding and projection.

    Args:
        sample: gives texts, int64 `[n]`, with the target's hidden states along them, each `[n, d]`. The head begins as
            a linear map from what it reads to the target's last hidden states.
        layout: one of `LAYOUTS`.
        intermediate_size: of the layer's MLP (None: the target's).
        seed: of the weights.

    Raises:
        UnsupportedError: the target has too few layers, or embeds tokens in another width.
    """
    is_third, config = layout == "eagle3", target.config.get_text_config()
    width, layers = config.hidden_size, config.num_hidden_layers
    reads = hidden_states_read(layers) if is_third else (layers,)
    head = {
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"],
        "library_name": LIBRARY_NAME,
        "hidden_size": width,
        "intermediate_size": intermediate_size or _intermediate_size(config),
        **_attention_shape(config),
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "bias": False,
        "torch_dtype": "bfloat16",
    }
    if is_third:
        head |= {"draft_vocab_size": config.vocab_size, "tie_word_embeddings": False}
    if is_third and reads != (2, layers // 2, layers - 3):
        head["eagle_aux_hidden_state_layer_ids"] = list(reads)
        if min(reads):
            outputs = [layer - 1 for layer in reads]
            head["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    embedding = target.get_input_embeddings().weight.detach()
    if embedding.shape[-1] != width:
        raise UnsupportedError(
            f"{type(target).__name__} embeds tokens in {embedding.shape[-1]} numbers, and its hidden states have "
            f"{width}. Train a drafter of its own."
        )
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (size * columns**-0.5)

    inner, attended = head["intermediate_size"], head["num_attention_heads"] * head["head_dim"]
    kept = head["num_key_value_heads"] * head["head_dim"]
    prefix, read = ("midlayer", 2 * width) if is_third else ("layers.0", width)
    tensors = {
        f"{prefix}.self_attn.q_proj.weight": matrix(attended, read),
        f"{prefix}.self_attn.k_proj.weight": matrix(kept, read),
        f"{prefix}.self_attn.v_proj.weight": matrix(kept, read),
        f"{prefix}.self_attn.o_proj.weight": matrix(width, attended, _SMALL),
        f"{prefix}.mlp.gate_proj.weight": matrix(inner, width),
        f"{prefix}.mlp.up_proj.weight": matrix(inner, width),
        f"{prefix}.mlp.down_proj.weight": matrix(width, inner, _SMALL),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(width),
    }
    # The newest tokens, what is read before them, and the last hidden states at them, which the head is to give.
    found = [
        [embedding[text[1:].to(embedding.device)], states[-1][1:], *(states[layer][:-1] for layer in reads)]
        for text, states in sample()
    ]
    embedded, wanted, *inputs = (torch.cat(parts).float().cpu() for parts in zip(*found, strict=True))
    if not is_third:
        tensors["fc.weight"] = _regression(torch.cat([embedded, *inputs], -1), wanted)
        return EagleDrafter(EagleCheckpoint.from_parts(head, tensors), target, dtype=torch.float32)
    norm = _final_norm(target)
    # What the head feeds back is like the last hidden states. So is what it reads at first, of the highest layer.
    sizes = torch.stack([one.norm(dim=-1).median() for one in inputs]).clamp_min(1e-6)
    fc = torch.randn(width, len(reads) * width, generator=random) * (_SMALL * width**-0.5)
    fc[:, -width:] += torch.eye(width)
    tensors["fc.weight"] = fc * (width**0.5 / sizes).repeat_interleave(width)
    tensors |= {f"{prefix}.{name}.weight": torch.ones(width) for name in ("hidden_norm", "input_layernorm")}
    tensors["norm.weight"] = norm
    # The first attention head of each key looks for its own token, and adds what predicts the next one linearly.
    feature = torch.cat(inputs, -1) @ tensors["fc.weight"].T
    change = wanted / torch.where(norm.abs() < _FLAT, torch.inf, norm) - feature
    # A few tokens, such as the first of a text, have hidden states of another size, which would outweigh all others.
    is_usual = feature.norm(dim=-1) < _UNUSUAL * width**0.5
    linear = _regression(torch.cat([_normed(embedded), _normed(feature)], -1)[is_usual], change[is_usual])
    left, strengths, right = torch.linalg.svd(linear, full_matrices=False)
    rank, dim = min(kept, width), head["head_dim"]
    tensors[f"{prefix}.self_attn.v_proj.weight"][:rank] = strengths[:rank, None].sqrt() * right[:rank]
    own = torch.zeros(width, kept)
    own[:, :rank] = left[:, :rank] * strengths[:rank].sqrt()
    group = head["num_attention_heads"] // head["num_key_value_heads"]
    for key in range(head["num_key_value_heads"]):
        keys, queries = (slice(first * dim, (first + 1) * dim) for first in (key, key * group))
        tensors[f"{prefix}.self_attn.k_proj.weight"][keys] = torch.cat(
            [matrix(dim, width, _SHARP), torch.zeros(dim, width)], -1
        )
        tensors[f"{prefix}.self_attn.q_proj.weight"][queries] = tensors[f"{prefix}.self_attn.k_proj.weight"][keys]
        tensors[f"{prefix}.self_attn.o_proj.weight"][:, queries] = own[:, keys]
    return EagleDrafter(EagleCheckpoint.from_parts(head, tensors), target, dtype=torch.float32)


def _normed(states: torch.Tensor) -> torch.Tensor:
    return states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _regression(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """`[out, in]`: the matrix that gives outputs from inputs with the least squared error, by ridge regression."""
    gram = (inputs.T @ inputs).double()
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, (inputs.T @ outputs).double()).T.float()


def new_small_drafter(
    target: PreTrainedModel, layers: int = 2, width: int | None = None, seed: int = 0
) -> CausalLMDrafter:
    """A Llama model with the target's vocabulary, whose embedding and projection are one: the directions of the
    target's projection in which its rows differ most. Other weights are random.

    Args:
        layers: of the model.
        width: of its hidden states, at most the target's (None: half of that).
        seed: of the weights.
    """
    config, projection = target.config.get_text_config(), DynamicLMHead.from_model(target)
    rows = projection.weight.float() * _final_norm(target).to(projection.device)
    half = rows.shape[1] // 2
    width = width or half // _HEAD_DIM * _HEAD_DIM or half
    head_dim = min(_HEAD_DIM, width)
    if width > rows.shape[1] or width % head_dim or head_dim % 2:
        raise ConfigurationError(
            f"a width of {width} does not fit: give a multiple of {_HEAD_DIM}, and at most the target's, "
            f"{rows.shape[1]}"
        )
    small = LlamaConfig(
        vocab_size=rows.shape[0],
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // head_dim,
        num_key_value_heads=width // head_dim,
        head_dim=head_dim,
        max_position_embeddings=_positions(config),
        tie_word_embeddings=True,
        **{name: getattr(target.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    small.library_name = LIBRARY_NAME
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(small).eval()
    sample = rows[:: -(-rows.shape[0] // _MOST_ROWS)]
    directions = torch.linalg.eigh((sample.T @ sample).cpu()).eigenvectors[:, -width:]
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(rows.cpu() @ directions)
        # The rows fit the target's hidden states. Random ones would give extreme logits.
        model.model.norm.weight.fill_(_FAINT)
    return CausalLMDrafter(model.to(target.device))


def _intermediate_size(config: Any) -> int:
    size = getattr(config, "intermediate_size", None)
    return size if isinstance(size, int) else 4 * config.hidden_size


def _positions(config: Any) -> int:
    most = getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) else 4096


def _attention_shape(config: Any) -> dict[str, Any]:
    """The settings of attention, as the target has them if a Llama layer can."""
    heads = config.num_attention_heads
    kept, head_dim = getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    if heads % kept or head_dim % 2:
        heads = kept = max(1, config.hidden_size // _HEAD_DIM)
        head_dim = _HEAD_DIM
    rope = getattr(config, "rope_parameters", None) or {}
    theta, activation = rope.get("rope_theta"), getattr(config, "hidden_act", None)
    return {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kept,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": theta or 10_000.0,
        "max_position_embeddings": _positions(config),
        "hidden_act": activation if activation in ("silu", "gelu_pytorch_tanh") else "silu",
    }


def _final_norm(target: PreTrainedModel) -> torch.Tensor:
    """`[d]`, fp32 on the CPU: the scale of the target's last norm; ones if it has none that this can read."""
    width = target.config.get_text_config().hidden_size
    signs = torch.ones(width)
    signs[1::2] = -1
    norms = [one for one in decoder_of(target).children() if type(one).__name__.lower().endswith("norm")]
    for norm in norms[-1:]:
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.shape == (width,):
            # Families differ in how they store the scale. Numbers of size one tell what it does.
            with torch.no_grad():
                return norm(signs.to(weight)).float().cpu() * signs
    return signs.abs()
