"""`hf-dynspec doctor --config`: its bytes are those of hand arithmetic, and its operations those of whole rounds."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import invoke, shown
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_dynspec import DynSpecAssistant
from hf_dynspec.drafting.expected_speed import expected_speed
from hf_dynspec.errors import ConfigurationError, UnsupportedError
from hf_dynspec.evaluation.doctor.estimate import (
    Estimate,
    EstimateSettings,
    Machine,
    Work,
    count_round,
    estimate_speed,
    forward_work,
)
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.evaluation.operations.rounds import operations, recording
from hf_dynspec.loading import empty_model
from hf_dynspec.shortlists import HybridShortlist

DOCS = Path(__file__).parents[2] / "docs"
TINY = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
TINY |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4},
}
MIXTURES = ("mixtral", "qwen3_moe")
BF16 = torch.bfloat16


# As published.
def published(kind: str, width: int, inner: int, layers: int, heads: int, kv_heads: int, rows: int, **more) -> dict:
    """A configuration as it was published."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": rows}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": kind, **sizes, **attention, "torch_dtype": "bfloat16", **more}


QWEN3_8B = published("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=False)
QWEN3_8B["architectures"] = ["Qwen3ForCausalLM"]
QWEN3_06B = published("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True)
QWEN3_06B["architectures"] = ["Qwen3ForCausalLM"]
LLAMA31_8B = published("llama", 4096, 14336, 32, 32, 8, 128256, tie_word_embeddings=False)
LLAMA32_1B = published("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True)
_GEMMA3_TEXT = published("gemma3_text", 5376, 21504, 62, 32, 16, 262208, head_dim=128, sliding_window=1024)
GEMMA3_27B = {"model_type": "gemma3", "text_config": _GEMMA3_TEXT, "torch_dtype": "bfloat16"}
GEMMA3_1B = published("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512)


def config_of(settings: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**settings)


def family(name: str) -> PreTrainedConfig:
    return config_of({"model_type": name, **TINY, **FAMILIES[name]})


# Forwards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_reads_each_parameter_once_and_rows_of_the_embedding(name):
    config = family(name)
    model = empty_model(config, torch.float32, "model")
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    experts = sum(one.numel() for key, one in model.named_parameters() if ".experts." in key)
    always = sum(one.numel() for one in model.parameters()) - experts - (0 if tied else embedding.numel())
    share = 0.0
    if name in MIXTURES:
        count = getattr(config, "num_local_experts", None) or config.num_experts
        share = 1 - (1 - config.num_experts_per_tok / count) ** 3
    (work,) = forward_work(model, [3], 0)
    assert work.bytes == pytest.approx(4 * (always + share * experts + 3 * config.hidden_size), rel=1e-6)
    assert work.operations > 50
    assert bool(experts) == (name in MIXTURES)


def layer(width: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Weights of a layer's products."""
    return 2 * width * heads * head_dim + 2 * width * kv_heads * head_dim + 3 * width * inner


@pytest.mark.parametrize(
    ("settings", "products", "head"),
    [
        (QWEN3_8B, 36 * layer(4096, 12288, 32, 8, 128), 151936 * 4096),
        (LLAMA31_8B, 32 * layer(4096, 14336, 32, 8, 128), 128256 * 4096),
        (GEMMA3_27B, 62 * layer(5376, 21504, 32, 16, 128), 262208 * 5376),
    ],
    ids=["Qwen3-8B", "Llama-3.1-8B", "gemma-3-27b"],
)
def test_targets_of_real_size_read_what_hand_arithmetic_gives(settings, products, head):
    one, six = forward_work(empty_model(config_of(settings), BF16, "target"), [1, 6], 0)
    assert one.bytes == pytest.approx(2 * (products + head), rel=3e-4)
    assert six.bytes == pytest.approx(one.bytes, rel=1e-4)
    assert six.flops == pytest.approx(6 * 2 * (products + head), rel=0.02)
    assert six.operations >= one.operations


def test_layers_of_a_drafter_leave_the_head_out():
    work = forward_work(empty_model(config_of(LLAMA32_1B), BF16, "drafter"), [1], 0, has_head=False)[0]
    assert work.bytes == pytest.approx(2 * 16 * layer(2048, 8192, 32, 8, 64), rel=3e-4)


def test_cached_tokens_are_read_and_copied_up_to_the_window():
    """transformers' cache copies keys and values at each step, and attention reads them after that."""
    target = empty_model(config_of(QWEN3_8B), BF16, "target")
    short, long = (forward_work(target, [1], cached)[0] for cached in (1024, 2048))
    assert long.bytes - short.bytes == pytest.approx(1024 * 3 * 36 * 2 * 8 * 128 * 2)
    assert long.operations == short.operations
    windowed = empty_model(config_of(GEMMA3_1B), BF16, "target")
    short, long = (forward_work(windowed, [1], cached)[0] for cached in (1024, 2048))
    assert 0 < long.bytes - short.bytes < 0.25 * 1024 * 3 * 26 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("settings", "norms"), [(QWEN3_8B, 4), (LLAMA31_8B, 2), (GEMMA3_1B, 6)], ids=["Qwen3", "Llama", "Gemma"]
)
def test_norms_and_rotations_are_fused_in_a_graph(settings, norms):
    smaller, larger = (
        forward_work(
            empty_model(config_of({**settings, "num_hidden_layers": count, "layer_types": None}), BF16, "target"),
            [6],
            64,
            is_captured=True,
        )[0].operations
        for count in (2, 3)
    )
    # Besides these and seven products: the rotation, two writes, attention, the activation and its product, two sums;
    # and up to five more for masks and for what is not contiguous.
    assert 7 + norms + 8 <= larger - smaller <= 7 + norms + 13


# Rounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
def test_the_parts_are_a_whole_round_of_other_models():
    """Operations that are counted apart, with models of other kinds and depths, add up to a whole round."""
    configs = [config_of({"model_type": "qwen3", **TINY, "num_hidden_layers": layers}) for layers in (4, 3)]
    policy = HybridShortlist(core_size=32, window=128, verify_top_k=8, prompt_top_k=8)
    torch.manual_seed(1)
    target, drafter = (AutoModelForCausalLM.from_config(one, dtype=torch.float32).eval() for one in configs)
    with pretended_device() as device:
        assistant = DynSpecAssistant(move(drafter), policy, target=move(target), num_assistant_tokens=5)
        ids = to_device(torch.arange(3, 15).unsqueeze(0))
        mask = to_device(torch.ones(1, 12, dtype=torch.int64))
        with recording(device) as recorded:
            target.generate(ids, attention_mask=mask, assistant_model=assistant, max_new_tokens=11, eos_token_id=None)
    whole = operations(recorded.rounds(device.events)[2].events)
    counted = count_round(policy, 512, torch.float32, 0.0)
    empty_target, empty_drafter = (empty_model(one, torch.float32, "model") for one in configs)
    (layers,) = forward_work(empty_drafter, [1], 12, has_head=False)
    (verification,) = forward_work(empty_target, [6], 12)
    assert verification.operations + 5 * (layers.operations + counted.step) + counted.other == whole


@pytest.fixture(scope="module")
def qwen() -> Estimate:
    settings = EstimateSettings("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", Machine(1000, 0), ("hybrid", "screen"))
    return estimate_speed(settings, config_of(QWEN3_8B), config_of(QWEN3_06B))


def test_heads_read_their_rows(qwen):
    full, hybrid, screen = (qwen.policies[name] for name in ("full", "hybrid", "screen"))
    assert (full.rows, full.head.bytes) == (151936, 151936 * 1024 * 2) == (151936, 311_164_928)
    assert (hybrid.rows, hybrid.head.bytes) == (5120, 5120 * 1024 * 2)
    # Besides its candidates' rows: the factor, a sixteenth of the columns and one more, in groups of 4.
    assert screen.rows == 2048 and screen.head.bytes == 2048 * 1024 * 2 + 151936 * 68 + 67 * 1024 * 4


def test_seconds_and_speeds_follow_from_the_counts(qwen):
    full, one = qwen.policies["full"], qwen.forward
    in_memory = [work.bytes / 1e12 for work in (full.head, qwen.layers)]
    assert full.costs.draft_step == pytest.approx(sum(in_memory))
    assert full.head_share == pytest.approx(in_memory[0] / sum(in_memory))
    assert 0.15 < full.head_share < 0.3
    assert qwen.plain_speed == pytest.approx(1e12 / one.bytes)
    for rate, (steps, speed) in zip(qwen.settings.acceptance, full.chains, strict=True):
        assert speed == max(expected_speed([rate], full.costs, count) for count in range(9))
        assert speed == expected_speed([rate], full.costs, steps)
    hybrid = qwen.policies["hybrid"]
    assert all(shorter[1] > speed for shorter, (_, speed) in zip(hybrid.chains, full.chains, strict=True))
    assert expected_speed([full.pays_from], full.costs, 1) == pytest.approx(qwen.plain_speed, rel=1e-4)
    assert hybrid.as_fast_as(full.chains[2][1], 8) < 0.7
    assert "Estimate" in qwen.sentence and "hybrid" in qwen.line
    # A round's keys and values lie where they stay, and a dynamic cache copies them.
    assert qwen.verification[0].is_captured and qwen.compiled_speed == pytest.approx(1e12 / qwen.verification[0].bytes)
    assert qwen.verification[0].bytes < one.bytes and qwen.compiled_speed > qwen.plain_speed
    json.dumps(qwen.to_dict())


def test_a_part_takes_the_time_of_its_slowest_resource():
    work = Work(operations=10, bytes=3e9, flops=4e12)
    assert work.seconds(Machine(1000, 0)) == pytest.approx(3e-3)
    assert work.seconds(Machine(1000, 5)) == pytest.approx(3e-3 + 50e-6)
    assert work.seconds(Machine(1000, 5, 500)) == pytest.approx(8e-3 + 50e-6)
    assert replace(work, is_captured=True).seconds(Machine(1000, 5)) == pytest.approx(3e-3 + 25e-6)


def test_small_parts_have_figures_too(qwen):
    fast = replace(qwen, settings=replace(qwen.settings, machine=Machine(1e7, 0)))
    assert not re.search(r"│ +0\.000 ", shown(*fast.report(), width=80))


# Bad input -----------------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, settings: Any) -> str:
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings), encoding="utf-8")
    return str(path)


GOOD = {"model_type": "llama", **TINY}
THEIRS = {"model_type": "theirs", "auto_map": {"AutoConfig": "configuration_theirs.Theirs"}}


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (None, ConfigurationError, "drafter's configuration cannot be read"),
        ("{", ConfigurationError, "drafter's configuration cannot be read"),
        ("[]", ConfigurationError, "drafter's configuration cannot be read"),
        ({"hidden_size": 8}, ConfigurationError, "model_type"),
        ({"model_type": "no-such-kind"}, ConfigurationError, "no-such-kind"),
        (THEIRS, ConfigurationError, "code that comes with a model is not run"),
        ({"model_type": "t5", "vocab_size": 512}, UnsupportedError, "encoder-decoder"),
        ({"model_type": "vit"}, ConfigurationError, "vocab_size"),
        ({"model_type": "bert", "vocab_size": 512, "hidden_size": 30}, UnsupportedError, "bert"),
        ({"model_type": "rwkv", "vocab_size": 512, "num_hidden_layers": 2}, UnsupportedError, "recurrent"),
        (GOOD | {"vocab_size": 4096}, UnsupportedError, "different tokenizers"),
        (GOOD | {"num_hidden_layers": 10**9}, ConfigurationError, "num_hidden_layers"),
        (GOOD | {"quantization_config": {"quant_method": "fp8"}}, ConfigurationError, "quantised"),
        (GOOD | {"draft_vocab_size": 128}, UnsupportedError, "EAGLE"),
        (GOOD | {"bias": False}, UnsupportedError, "EAGLE"),
    ],
)
def test_configurations_that_are_of_no_use(settings, error, said, tmp_path):
    target, drafter = written(tmp_path, "target", GOOD), tmp_path / "none.json"
    if settings is not None:
        drafter = written(tmp_path, "drafter", settings)
    with pytest.raises(error, match=said):
        estimate_speed(EstimateSettings(target, drafter, Machine(100, 5), ("full",)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 5), "memory_bandwidth"),
        ((-3350.0, 5), "memory_bandwidth"),
        ((float("nan"), 5), "memory_bandwidth"),
        ((100, -1), "launch_latency"),
        ((100, 5, 0), "flops"),
    ],
)
def test_devices_that_there_are_not(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        Machine(*arguments)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"acceptance": (1.5,)}, "acceptance"),
        ({"acceptance": ()}, "acceptance"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"cached_tokens": -1}, "cached_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "bf16"}, "dtype"),
        ({"policies": ("retrieval",)}, "retrieval"),
        ({"policies": ("nonsense",)}, "nonsense"),
    ],
)
def test_settings_out_of_range(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        EstimateSettings("a", "b", Machine(100, 5), **settings)


# The command ---------------------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return invoke("doctor", *words, env={"COLUMNS": "80"})


@pytest.fixture
def pair(tmp_path) -> list[str]:
    """Configurations of a target in a multimodal model and of a drafter whose vocabulary is padded otherwise."""
    text = {"model_type": "gemma3_text", **TINY, **FAMILIES["gemma3_text"]}
    settings = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    return [written(tmp_path, "target", settings), written(tmp_path, "drafter", GOOD | {"vocab_size": 576})]


def test_the_command_shows_an_estimate_and_says_so(pair, tmp_path):
    machine = ("--device-memory-bandwidth", "100", "--launch-latency", "5", "--device-flops", "50")
    result = run("--config", *pair, *machine, "--policy", "hybrid", "--json", str(tmp_path / "a.json"))
    assert result.exit_code == 0, result.exception
    assert all(len(line) <= 80 for line in result.output.splitlines())
    titles = [line for line in result.output.splitlines() if line.startswith("Estimate: ")]
    assert len(titles) == 3 and "ESTIMATE" in result.output
    assert "Tokenizers were not compared" in " ".join(result.output.split())
    # A small model has parameters too.
    assert re.search(r"of\s+[1-9][\d.]*k\s+parameters", result.output)
    saved = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert saved["is_estimate"] and saved["vocabulary"] == 512
    assert saved["models"]["target"]["dtype"] == "bfloat16" and saved["models"]["drafter"]["dtype"] == "float32"
    command = saved["provenance"]["command"]
    assert command[command.index("--config") + 1 :][:2] == ["target/config.json", "drafter/config.json"]


DEVICE = ("--device-memory-bandwidth", "100", "--launch-latency", "5")
FOR_ESTIMATES = "is for estimates: name two configurations with --config"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["PAIR"], "--config needs --device-memory-bandwidth and --launch-latency"),
        (["PAIR", "--launch-latency", "5"], "--device-memory-bandwidth"),
        (["PAIR", "--device-memory-bandwidth", "100"], "--launch-latency"),
        (["PAIR", "--device-memory-bandwidth", "0", *DEVICE[2:]], "--device-memory-bandwidth must be"),
        (["PAIR", *DEVICE, "--eagle", "head"], "--eagle"),
        (["PAIR", *DEVICE, "--seconds", "9"], "so leave --seconds out"),
        (["PAIR", *DEVICE, "--tree", "none"], "so leave --tree out"),
        (["PAIR", *DEVICE, "a.jsonl"], "a.jsonl: no such file or directory"),
        (["TARGET", *DEVICE], "--config takes two configurations, the target's and the drafter's, got --"),
        (["--device-memory-bandwidth", "1"], f"--device-memory-bandwidth {FOR_ESTIMATES}"),
        (["--acceptance", "1"], f"--acceptance {FOR_ESTIMATES}"),
        (["--cached-tokens", "1"], f"--cached-tokens {FOR_ESTIMATES}"),
    ],
)
def test_a_command_that_is_not_whole_is_refused(words, said, pair):
    configs = {"PAIR": ["--config", *pair], "TARGET": ["--config", pair[0]]}.get(words[0])
    words = ["--target", "a", "--drafter", "b", *words] if configs is None else [*configs, *words[1:]]
    result = run(*words)
    assert isinstance(result.exception, ConfigurationError) and said in str(result.exception)


def test_the_docs_say_what_their_command_says(tmp_path):
    page = (DOCS / "on-a-gpu.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^hf-dynspec (doctor --config .*)$", page, re.MULTILINE)
    names = {"Qwen/Qwen3-8B": QWEN3_8B, "Qwen/Qwen3-0.6B": QWEN3_06B}
    files = {name: written(tmp_path, name.split("/")[1], settings) for name, settings in names.items()}
    _, *words = [files.get(word, word) for word in shlex.split(line)]
    said = re.findall(r"^```text\n(Estimate: .*)\n```$", page, re.MULTILINE)
    latencies = ([], ["--launch-latency", "20"], ["--launch-latency", "0"])
    assert len(said) == len(latencies)
    for added, sentence_of_page in zip(latencies, said, strict=True):
        result = run(*words, *added, "--policy", "hybrid")
        assert result.exit_code == 0, result.exception
        assert sentence_of_page in " ".join(result.output.split())
