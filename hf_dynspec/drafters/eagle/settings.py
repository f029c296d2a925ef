"""The settings of an EAGLE head, read from the configuration of any layout."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ArtifactError, shown_value
from .checkpoint_files import CONFIG_FILE, FETCH_AGAIN

CheckpointFormat = Literal["official", "speculators"]

# Several times the numbers of the largest models.
_MOST_COUNTS = {
    "vocab_size": 2**22,
    "draft_vocab_size": 2**22,
    "intermediate_size": 2**20,
    "hidden_size": 2**17,
    "target_hidden_size": 2**17,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
}
_MOST_LAYERS = 2**12
_MOST_LAYER_IDS = 64
_LONGEST_FACTORS = 2**12
_LARGEST_ROPE_NUMBER = 1e12
_CANNOT_HONOUR = "Use a checkpoint without it; drafting as if it were not there would only lower acceptance."

# Switches of computations that are not implemented here, with the values that mean "off".
_UNKNOWN_SWITCHES: dict[str, tuple[Any, ...]] = {
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "parallel_drafting": (None, False),
}
_UNKNOWN_EAGLE_SWITCHES: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
}
# Switches of speculators and transformers without an influence on the computation.
_NEUTRAL_SWITCHES = {"embed_requires_grad", "enable_sp_ulysses", "return_dict", "use_cache", "has_no_defaults_at_init"}


@dataclass(frozen=True)
class EagleSettings:
    """The settings of a head, with the same names for all formats.

    Args:
        generation: 2 or 3.
        hidden_size: `H`, the width of the head's own hidden states.
        target_hidden_size: the width of the target's.
        target_layer_ids: the target's hidden states that are read; 0 is the embedding (None: the usual ones).
        vocab_size: `V`, the target's.
        draft_vocab_size: rows of the head's own output projection.
        fc_bias: whether `fc` has a bias.
        attention_bias: whether the projections to queries, keys and values have one.
        output_bias: whether the projection out of the attention has one.
        qk_norm: queries and keys are normalised per attention head, as in Qwen3.
        norm_before_residual: the residual around the attention is the normalised hidden state.
        norm_before_fc: the features are normalised before `fc`.
        own_embedding: the checkpoint must have its own embedding.
        rope: the settings of the rotary embedding, unchanged.
    """

    generation: int
    hidden_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...] | None
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    fc_bias: bool
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    own_embedding: bool
    rope: Mapping[str, Any]

    @property
    def fc_inputs(self) -> int:
        """Columns of `fc`: embedding and feature in EAGLE-2, all features of a token in EAGLE-3."""
        if self.generation == 2:
            return 2 * self.hidden_size
        return self.target_hidden_size * (3 if self.target_layer_ids is None else len(self.target_layer_ids))


class _Section:
    """Typed access to a JSON object of the configuration, with errors that name the key."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self._where = where

    def fail(self, key: str, problem: str, fix: str = FETCH_AGAIN) -> ArtifactError:
        return ArtifactError(f"{self._where}{key}", problem, fix)

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default for an absent or null one."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        most = _MOST_COUNTS.get(key, 2**31 - 1)
        if type(value) is not int or not 1 <= value <= most:
            raise self.fail(key, f"must be a whole number from 1 to {most}, got {shown_value(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {shown_value(value)}")
        return value

    def section(self, key: str) -> "_Section":
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "must be a JSON object")
        return _Section(value, f"{self._where}{key}.")

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not 1 <= len(value) <= _MOST_LAYER_IDS:
            raise self.fail(key, f"must be a list of 1 to {_MOST_LAYER_IDS} layers, got {shown_value(value)}")
        if not all(type(item) is int and 0 <= item <= _MOST_LAYERS for item in value):
            raise self.fail(key, f"must be a list of layers from 0 to {_MOST_LAYERS}, got {value!r:.60}")
        return tuple(value)

    def refuse(self, switches: Mapping[str, tuple[Any, ...]]) -> None:
        for key, off in switches.items():
            if not any(self.values.get(key) is value for value in off):
                raise self.fail(
                    key, f"is {shown_value(self.values[key])}, which this package does not do", _CANNOT_HONOUR
                )


def read_settings(
    config: Mapping[str, Any], checkpoint_format: CheckpointFormat, generation: int, found: Collection[str]
) -> EagleSettings:
    """Read the settings of a head of generation 2 or 3 from the contents of `config.json` and the package's names of
    its tensors.

    Raises:
        ArtifactError: a setting is missing, mistyped, out of range or not supported.
    """
    from transformers.activations import ACT2FN

    top = _Section(config, f"{CONFIG_FILE}: ")
    layer = top.section("transformer_layer_config") if checkpoint_format == "speculators" else top
    _refuse_unknown_switches(top, layer, checkpoint_format)
    hidden, heads, kv_heads = _attention_shape(layer)
    eps = layer.values.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise layer.fail("rms_norm_eps", f"must be a small number, got {shown_value(eps)}")
    vocab = layer.count("vocab_size")
    draft_vocab = top.count("draft_vocab_size", vocab) if generation == 3 else vocab
    if draft_vocab > vocab:
        raise top.fail("draft_vocab_size", f"is {draft_vocab}, more than the vocab_size {vocab}")
    tied = generation == 3 and layer.flag("tie_word_embeddings")
    if tied and "embed_tokens.weight" in found and "lm_head.weight" not in found:
        problem = "is true, so that the head's own embedding is its output projection"
        raise layer.fail("tie_word_embeddings", problem, "Store that projection as lm_head.weight.")
    attention_bias, output_bias = _biases(layer, checkpoint_format, generation, found)
    activation = layer.values.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise layer.fail("hidden_act", f"is {shown_value(activation)}, which transformers does not know")
    return EagleSettings(
        generation=generation,
        hidden_size=hidden,
        target_hidden_size=top.count("target_hidden_size", hidden) if generation == 3 else hidden,
        target_layer_ids=_target_layer_ids(top) if generation == 3 else None,
        intermediate_size=layer.count("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=layer.count("head_dim", hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=float(eps),
        hidden_act=activation,
        # In EAGLE-2's code the default is true; EAGLE-3's `fc` never has a bias.
        fc_bias=generation == 2 and top.flag("bias", True),
        attention_bias=attention_bias,
        output_bias=output_bias,
        qk_norm=checkpoint_format == "speculators" and layer.values.get("model_type") == "qwen3",
        norm_before_residual=generation == 3 and top.flag("norm_before_residual"),
        norm_before_fc=generation == 3 and top.flag("norm_before_fc"),
        own_embedding=top.flag("has_own_embed_tokens"),
        rope=_rope_settings(layer),
    )


def _attention_shape(layer: _Section) -> tuple[int, int, int]:
    """The width of hidden states, and the numbers of heads and of key-value heads, which must fit together."""
    hidden, heads = layer.count("hidden_size"), layer.count("num_attention_heads")
    kv_heads = layer.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise layer.fail("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} attention heads")
    if layer.values.get("head_dim") is None and hidden % heads:
        raise layer.fail("num_attention_heads", f"is {heads}, which does not divide hidden_size {hidden}")
    return hidden, heads, kv_heads


def _refuse_unknown_switches(top: _Section, layer: _Section, checkpoint_format: CheckpointFormat) -> None:
    """Refuse settings of computations that are not implemented here."""
    layers = layer.count("num_hidden_layers", 1)
    if layers != 1:
        raise layer.fail("num_hidden_layers", f"is {layers}", "Only heads of one layer can be used.")
    top.refuse(_UNKNOWN_SWITCHES)
    layer.refuse(_UNKNOWN_SWITCHES)
    top.section("eagle_config").refuse(_UNKNOWN_EAGLE_SWITCHES)
    kinds = layer.values.get("layer_types")
    if isinstance(kinds, list) and set(map(str, kinds)) - {"full_attention"}:
        raise layer.fail("layer_types", f"is {kinds!r:.60}, and only full attention is known", _CANNOT_HONOUR)
    if checkpoint_format != "speculators":
        return
    model_type = layer.values.get("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise layer.fail("model_type", f"is {shown_value(model_type)}, not llama or qwen3", _CANNOT_HONOUR)
    known = {"norm_before_residual", "norm_before_fc", "has_own_embed_tokens", "tie_word_embeddings"}
    for key, value in top.values.items():
        if value is True and key not in known | _NEUTRAL_SWITCHES:
            raise top.fail(key, "is a switch that this package does not know", _CANNOT_HONOUR)


def _target_layer_ids(top: _Section) -> tuple[int, ...] | None:
    """The target's hidden states to read, counted as in transformers: 0 is the embedding.

    At the top level an id `k` is the input of layer `k` (vLLM, speculators), which is hidden state `k`. Inside
    `eagle_config` it is the output of layer `k` (SGLang), which is hidden state `k + 1`.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    inputs, outputs = top.layer_ids(key), top.section("eagle_config").layer_ids(key)
    if outputs is not None:
        outputs = tuple(layer_id + 1 for layer_id in outputs)
        if inputs not in (None, outputs):
            problem = (
                f"counts inputs of layers and gives {list(inputs or ())}, where eagle_config gives {list(outputs)}"
            )
            raise top.fail(key, problem, "Make them agree; eagle_config counts outputs, which is one less.")
    return inputs if outputs is None else outputs


def _biases(
    layer: _Section, checkpoint_format: CheckpointFormat, generation: int, found: Collection[str]
) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the attention's output has one."""
    if checkpoint_format == "speculators":
        both = layer.flag("attention_bias")
        return both, both
    if generation == 2:
        return layer.flag("qkv_bias"), False
    # EAGLE-3's code has no such setting: in configurations copied from a target it does not describe the head.
    return "layer.self_attn.q_proj.bias" in found, "layer.self_attn.o_proj.bias" in found


def _rope_settings(layer: _Section) -> dict[str, Any]:
    """The settings of the rotary embedding, as `rope_parameters`, or as `rope_theta` and `rope_scaling`."""
    rope: dict[str, Any] = {"max_position_embeddings": layer.count("max_position_embeddings", 2048)}
    theta = layer.values.get("rope_theta")
    if theta is not None:
        if not _is_rope_number(theta) or not theta > 0:
            raise layer.fail("rope_theta", f"must be a positive number, got {shown_value(theta)}")
        rope["rope_theta"] = theta
    for key in ("rope_parameters", "rope_scaling"):
        section = layer.section(key)
        for name, value in section.values.items():
            if not _is_rope_value(value):
                raise section.fail(name, f"must be a number, a name or a list of numbers, got {shown_value(value)}")
        if section.values:
            rope[key] = dict(section.values)
    return rope


def _is_rope_value(value: Any) -> bool:
    """Whether a value has an acceptable type and size. transformers checks it further."""
    if isinstance(value, list):
        return len(value) <= _LONGEST_FACTORS and all(map(_is_rope_number, value))
    return value is None or isinstance(value, bool | str) or _is_rope_number(value)


def _is_rope_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_ROPE_NUMBER
