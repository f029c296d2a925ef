"""What `hf-dynspec doctor --config` counts is what real tensors do, what hand arithmetic gives, and what whole rounds
are made of."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from typer.testing import CliRunner

from hf_dynspec import DynSpecAssistant
from hf_dynspec.cache_names import CACHE
from hf_dynspec.commands import app
from hf_dynspec.drafting.expected_speed import RoundCosts, break_even_acceptance, expected_speed
from hf_dynspec.errors import ConfigurationError, UnsupportedError
from hf_dynspec.evaluation.doctor.counted_round import head_work, layers_work, record_overhead, verification_work
from hf_dynspec.evaluation.doctor.estimate import Estimate, EstimateSettings, Machine, estimate_speed
from hf_dynspec.evaluation.doctor.estimate_report import estimate_report, line_to_paste, sentence
from hf_dynspec.evaluation.operations.counting import Work, counting
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.evaluation.operations.rounds import operations, recording
from hf_dynspec.loading import empty_model
from hf_dynspec.shortlists import HybridShortlist

DOCS = Path(__file__).parents[2] / "docs"
TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
MIXTURES = ("mixtral", "qwen3_moe")
BF16 = torch.bfloat16

# As published.
QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA32_1B = LLAMA31_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "torch_dtype": "bfloat16",
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
}


def config_of(settings: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**settings)


def family(name: str) -> PreTrainedConfig:
    return config_of({"model_type": name, **TINY, **FAMILIES[name]})


# Counting ------------------------------------------------------------------------------------------------------------


def forward(config: PreTrainedConfig, device: str, ids: torch.Tensor, cached: int = 8) -> Work:
    """A forward over `ids`, int64 `[n]`, after a text."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = DynamicCache(config=config)
    with counting(model):
        model(torch.arange(cached, device=device).unsqueeze(0), **{CACHE: cache}, use_cache=True)
    ids = ids.to(device).unsqueeze(0)
    with counting(model, rows=ids.shape[1]) as counter:
        model(ids, **{CACHE: cache}, use_cache=True)
    return counter.work


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_alone_give_the_counts_of_real_tensors(name, rows):
    ids = torch.arange(rows) * 101 + 7
    real, counted = forward(family(name), "cpu", ids), forward(family(name), "meta", ids)
    assert counted.operations == real.operations > 50
    assert (counted.other_bytes, counted.flops) == (real.other_bytes, real.flops)
    if rows == 1 or name not in MIXTURES:
        assert counted.weight_bytes == real.weight_bytes


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixtures_experts_are_an_expectation_over_tokens(name):
    generator = torch.Generator().manual_seed(0)
    config = family(name)
    real = [
        forward(config, "cpu", torch.randint(8, 512, (4,), generator=generator), 4).weight_bytes for _ in range(30)
    ]
    counted = forward(config, "meta", torch.arange(4), 4).weight_bytes
    assert counted == pytest.approx(sum(real) / len(real), rel=0.05)
    everything = sum(one.numel() for one in empty_model(config, torch.float32, "model").parameters()) * 4
    assert counted < everything


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MIXTURES])
def test_a_forward_reads_each_weight_once_and_rows_of_the_embedding(name, rows):
    config = family(name)
    model = empty_model(config, torch.float32, "model")
    embedding = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    read = sum(one.numel() for one in model.parameters()) - (0 if tied else embedding) + rows * config.hidden_size
    (work,) = verification_work(model, [rows], 16)
    # Besides, buffers: the frequencies of the rotary embedding, and Gemma's scale.
    assert 4 * read <= work.weight_bytes <= 4 * read + 200


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
    one, six = verification_work(empty_model(config_of(settings), BF16, "target"), [1, 6], 64)
    assert one.weight_bytes == pytest.approx(2 * (products + head), rel=3e-4)
    assert six.weight_bytes == pytest.approx(one.weight_bytes, rel=1e-4)
    assert six.flops == pytest.approx(6 * 2 * (products + head), rel=0.02)
    assert six.operations >= one.operations


@pytest.mark.parametrize(
    ("settings", "products"),
    [
        (QWEN3_06B, 28 * layer(1024, 3072, 16, 8, 128)),
        (LLAMA32_1B, 16 * layer(2048, 8192, 32, 8, 64)),
        (GEMMA3_1B, 26 * layer(1152, 6912, 4, 1, 256)),
    ],
    ids=["Qwen3-0.6B", "Llama-3.2-1B", "gemma-3-1b"],
)
def test_layers_of_drafters_of_real_size_leave_the_head_out(settings, products):
    work = layers_work(empty_model(config_of(settings), BF16, "drafter"), 64)
    assert work.weight_bytes == pytest.approx(2 * products, rel=3e-4)


def test_each_token_before_is_read_copied_and_read():
    """The cache of transformers is laid anew at each step, and read by the attention after that."""
    target = empty_model(config_of(QWEN3_8B), BF16, "target")
    short, long = (verification_work(target, [1], cached)[0] for cached in (1024, 2048))
    keys_and_values = 36 * 2 * 8 * 128 * 2
    assert long.other_bytes - short.other_bytes == pytest.approx(1024 * 3 * keys_and_values, rel=1e-3)
    assert (long.operations, long.weight_bytes) == (short.operations, short.weight_bytes)


def test_layers_with_a_window_read_no_more_than_it_holds():
    target = empty_model(config_of(GEMMA3_1B), BF16, "target")
    short, long = (verification_work(target, [1], cached)[0] for cached in (1024, 2048))
    everywhere = 1024 * 3 * 26 * 2 * 1 * 256 * 2
    assert 0 < long.other_bytes - short.other_bytes < 0.25 * everywhere


# Rounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
def test_the_parts_are_a_whole_round_of_other_models():
    """What is counted apart, of models of other kinds and depths than those that were recorded, adds up to all the
    operations of their round."""
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
    empty_target, empty_drafter = (empty_model(one, torch.float32, "model") for one in configs)
    overhead = record_overhead(policy, 512, torch.float32, 0.0)
    head, update = head_work(empty_drafter, overhead)
    step = layers_work(empty_drafter, 12) + head + overhead.step
    (verification,) = verification_work(empty_target, [6], 12)
    parts = verification.operations + 5 * step.operations + update.operations + overhead.round.operations
    assert parts == whole


@pytest.fixture(scope="module")
def qwen() -> Estimate:
    settings = EstimateSettings("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", Machine(1000, 0), ("hybrid", "screen"))
    return estimate_speed(settings, config_of(QWEN3_8B), config_of(QWEN3_06B))


def test_heads_read_their_rows(qwen):
    full, hybrid, screen = (qwen.policies[name] for name in ("full", "hybrid", "screen"))
    assert (full.rows, full.head.weight_bytes) == (151936, 151936 * 1024 * 2)
    assert full.head.weight_bytes == 311_164_928
    assert (hybrid.rows, hybrid.head.weight_bytes) == (5120, 5120 * 1024 * 2)
    # Its candidates' rows, copied and read, and beside that the factor: a sixteenth of the columns and one more, in
    # groups of 4, which its rank fills.
    assert screen.rows == 2048 and screen.head.weight_bytes == 2 * 2048 * 1024 * 2
    assert screen.step.weight_bytes == 151936 * 68 + 67 * 1024 * 4
    # A round in which nothing is accepted replaces the rows of 150 tokens that the target names, of the 5 drafted and
    # of its own: they are read where they lie, and read once more from the copy to be put in their places.
    assert hybrid.round.weight_bytes == 2 * (150 + 5 + 1) * 1024 * 2


def test_seconds_and_speeds_follow_from_the_counts(qwen):
    full, (one, *_) = qwen.policies["full"], qwen.verification
    in_memory = [work.bytes / 1e12 for work in (full.head, qwen.layers, full.step)]
    assert full.costs.draft_step == pytest.approx(sum(in_memory))
    assert full.head_share == pytest.approx(in_memory[0] / sum(in_memory))
    assert 0.15 < full.head_share < 0.3
    assert qwen.plain_speed == pytest.approx(1e12 / (one.bytes + qwen.plain.bytes))
    for rate, (steps, speed) in zip(qwen.settings.acceptance, full.chains, strict=True):
        assert speed == max(expected_speed([rate], full.costs, count) for count in range(9))
        assert speed == expected_speed([rate], full.costs, steps)
    hybrid = qwen.policies["hybrid"]
    assert all(shorter[1] > speed for shorter, (_, speed) in zip(hybrid.chains, full.chains, strict=True))
    assert expected_speed([full.break_even], full.costs, 1) == pytest.approx(qwen.plain_speed, rel=1e-4)
    assert "Estimate" in sentence(qwen) and "hybrid" in line_to_paste(qwen)
    json.dumps(qwen.to_dict())


def test_a_device_is_waited_for_by_its_slowest_part():
    work = Work(operations=10, weight_bytes=2e9, other_bytes=1e9, flops=4e12)
    assert Machine(1000, 0).seconds(work) == pytest.approx(3e-3)
    assert Machine(1000, 5).seconds(work) == pytest.approx(3e-3 + 50e-6)
    assert Machine(1000, 5, 500).seconds(work) == pytest.approx(8e-3 + 50e-6)


def test_parts_of_every_size_have_figures(qwen):
    """The launches of a small model are microseconds, and its bytes nanoseconds."""
    fast = replace(qwen, settings=replace(qwen.settings, machine=Machine(1e7, 0)))
    console = Console(width=80)
    with console.capture() as capture:
        for part in estimate_report(fast):
            console.print(part)
    assert not re.search(r"│ +0\.000 ", capture.get())


def test_where_drafting_pays_nowhere_there_is_no_break_even():
    costs = RoundCosts(draft_step=1.0, verified_rows=(1, 2), verification=(1.0, 1.1))
    assert break_even_acceptance(costs, 8, plain_seconds=1.0) is None
    cheap = RoundCosts(draft_step=0.1, verified_rows=(1, 2), verification=(1.0, 1.1))
    assert break_even_acceptance(cheap, 1, plain_seconds=1.0) == pytest.approx(0.2, abs=1e-4)


# Bad input -----------------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, settings: Any) -> str:
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings), encoding="utf-8")
    return str(path)


GOOD = {"model_type": "llama", **TINY}


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ("{", ConfigurationError, "drafter's configuration cannot be read"),
        ("[]", ConfigurationError, "drafter's configuration cannot be read"),
        ({"hidden_size": 8}, ConfigurationError, "model_type"),
        ({"model_type": "no-such-kind"}, ConfigurationError, "no-such-kind"),
        (
            {"model_type": "theirs", "auto_map": {"AutoConfig": "configuration_theirs.Theirs"}},
            ConfigurationError,
            "code that comes with a model is not run",
        ),
        ({"model_type": "t5", "vocab_size": 512}, UnsupportedError, "encoder-decoder"),
        ({"model_type": "vit"}, ConfigurationError, "vocab_size"),
        ({"model_type": "bert", "vocab_size": 512, "hidden_size": 30}, UnsupportedError, "bert"),
        ({"model_type": "mamba", "vocab_size": 512, "num_hidden_layers": 2}, UnsupportedError, "recurrent"),
        (GOOD | {"vocab_size": 4096}, UnsupportedError, "different tokenizers"),
        (GOOD | {"num_hidden_layers": 10**9}, ConfigurationError, "num_hidden_layers"),
        (GOOD | {"quantization_config": {"quant_method": "fp8"}}, ConfigurationError, "quantised"),
        (GOOD | {"draft_vocab_size": 128}, UnsupportedError, "EAGLE"),
        (GOOD | {"bias": False}, UnsupportedError, "EAGLE"),
    ],
)
def test_configurations_that_are_of_no_use(settings, error, said, tmp_path):
    target, drafter = written(tmp_path, "target", GOOD), written(tmp_path, "drafter", settings)
    with pytest.raises(error, match=said):
        estimate_speed(EstimateSettings(target, drafter, Machine(100, 5), ("full",)))


def test_a_missing_configuration(tmp_path):
    with pytest.raises(ConfigurationError, match="target's configuration cannot be read"):
        estimate_speed(EstimateSettings(tmp_path / "none.json", tmp_path, Machine(100, 5), ("full",)))


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
    return CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "80"})


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
    assert len(titles) >= 4 and "ESTIMATE" in result.output and "Tokenizers were not compared" in result.output
    # A small model has parameters too.
    assert re.search(r"of\s+[1-9][\d.]*k\s+parameters", result.output)
    saved = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert saved["is_estimate"] and saved["vocabulary"] == 512
    assert saved["models"]["target"]["dtype"] == "bfloat16" and saved["models"]["drafter"]["dtype"] == "float32"
    command = saved["provenance"]["command"]
    assert command[command.index("--config") + 1 :][:2] == ["target/config.json", "drafter/config.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--config needs --device-memory-bandwidth and --launch-latency"),
        (["--launch-latency", "5"], "--device-memory-bandwidth"),
        (["--device-memory-bandwidth", "100"], "--launch-latency"),
        (["--device-memory-bandwidth", "0", "--launch-latency", "5"], "--device-memory-bandwidth must be"),
        (["--device-memory-bandwidth", "100", "--launch-latency", "5", "--eagle", "head"], "--eagle"),
        (["--device-memory-bandwidth", "100", "--launch-latency", "5", "--seconds", "9"], "so leave --seconds out"),
        (["--device-memory-bandwidth", "100", "--launch-latency", "5", "--tree", "none"], "so leave --tree out"),
        (["--device-memory-bandwidth", "100", "--launch-latency", "5", "a.jsonl"], "so leave --prompts out"),
    ],
)
def test_a_command_that_is_not_whole_is_refused(words, said, pair):
    result = run("--config", *pair, *words)
    assert isinstance(result.exception, ConfigurationError) and said in str(result.exception)


def test_one_configuration_is_not_enough(pair):
    result = run("--config", pair[0], "--device-memory-bandwidth", "100", "--launch-latency", "5")
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception).startswith(
        "--config takes two configurations, the target's and the drafter's, got --"
    )


@pytest.mark.parametrize("option", ["--device-memory-bandwidth", "--acceptance", "--cached-tokens"])
def test_what_is_for_estimates_is_refused_without_configurations(option):
    result = run("--target", "a", "--drafter", "b", option, "1")
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception).startswith(f"{option} is for estimates: name two configurations with --config")


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
