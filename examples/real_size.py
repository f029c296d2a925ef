"""Measure pairs of real size on this computer without their weights: random models with a chosen agreement.

The time of a round depends on the models' shapes, not on their weights. The target repeats a cycle of common tokens,
and the drafter knows the next token at a chosen share of them. So speeds are those of real rounds, acceptance is an
input, and nothing follows about how well a policy covers real text. A random head has no low-rank structure: drafts of
`screen` are accepted less often here than with real weights.

Only configurations are read, from folders or from the Hub:

    python examples/real_size.py --target Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B
    python examples/real_size.py --target meta-llama/Llama-3.1-8B --eagle

Models are created on the GPU, if there is one, and take as much memory as real ones; tied heads are untied. Layers
must have the names of Llama's, Qwen's, Mistral's and Gemma's.
"""

import statistics
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_dynspec import DynSpecAssistant, EagleDrafter
from hf_dynspec.devices import without_attention_plans
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint
from hf_dynspec.evaluation.policy_text import parse_policy

# Length of the cycle, and its lowest id. Any list of common tokens holds ids as low as these.
CYCLE, FIRST = 1000, 3
PROMPT = 64
# The layers' output projections are scaled by this, so that they hardly disturb the cycle.
LAYER_SCALE = 0.02
PLAIN, AUTO = "plain generate", "auto"

app = typer.Typer(add_completion=False)


def cycle() -> torch.Tensor:
    """int64 `[CYCLE]`: the tokens in their order."""
    return FIRST + torch.randperm(CYCLE, generator=torch.Generator().manual_seed(7))


def known(agreement: float) -> torch.Tensor:
    """bool `[CYCLE]`: after which tokens the drafter knows the next one."""
    return torch.rand(CYCLE, generator=torch.Generator().manual_seed(8)) < agreement


@torch.no_grad()
def random_model(config_of: str, dtype: torch.dtype, device: str, seed: int, knows: torch.Tensor) -> PreTrainedModel:
    """A random model with the configuration of a folder or a repository on the Hub, which predicts the next token of
    the cycle if it is `known`."""
    config = AutoConfig.from_pretrained(config_of).get_text_config()
    # A tied head would repeat its input.
    config.tie_word_embeddings = False
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(LAYER_SCALE)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for weight in (embedding, head):
        weight.normal_()
    order, knows = cycle().to(device), knows.to(device)
    # A token's row of the head is the embedding of the token before it.
    head[order.roll(-1)[knows]] = embedding[order[knows]]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def eagle_head(target: PreTrainedModel, knows: torch.Tensor) -> EagleDrafter:
    """An EAGLE-2 head of the target's shapes that returns the embedding of the last token if the next one is known."""
    config = target.config
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv_heads, head_dim = config.num_key_value_heads, getattr(config, "head_dim", None) or width // heads
    torch.manual_seed(2)

    def random(rows: int, columns: int, spread: float = 0.02) -> torch.Tensor:
        return (torch.randn(rows, columns, device=target.device, dtype=target.dtype) * spread).cpu()

    embedding = target.get_input_embeddings().weight.clone()
    unknown = cycle()[~knows].to(target.device)
    embedding[unknown] = torch.randn_like(embedding[unknown])
    tensors = {
        "embed_tokens.weight": embedding.cpu(),
        "fc.weight": torch.eye(width, 2 * width, dtype=target.dtype),
        "layers.0.self_attn.q_proj.weight": random(heads * head_dim, width),
        "layers.0.self_attn.k_proj.weight": random(kv_heads * head_dim, width),
        "layers.0.self_attn.v_proj.weight": random(kv_heads * head_dim, width),
        "layers.0.self_attn.o_proj.weight": random(width, heads * head_dim, 0.02 * LAYER_SCALE),
        "layers.0.mlp.gate_proj.weight": random(inner, width),
        "layers.0.mlp.up_proj.weight": random(inner, width),
        "layers.0.mlp.down_proj.weight": random(width, inner, 0.02 * LAYER_SCALE),
        "layers.0.post_attention_layernorm.weight": torch.ones(width, dtype=target.dtype),
    }
    settings = {
        "model_type": "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "bias": False,
    }
    return EagleDrafter(EagleCheckpoint.from_parts(settings, tensors), target)


def measure(
    target: PreTrainedModel, assistants: dict[str, DynSpecAssistant | None], new_tokens: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Seconds of all calls, and the text of each system. Systems take turns; the first turn is a warm-up."""
    prompt = cycle()[:PROMPT].unsqueeze(0).to(target.device)
    seconds: dict[str, list[float]] = {name: [] for name in assistants}
    texts = {}
    # A setting that would speed up plain generation too.
    with without_attention_plans(target.device):
        for repeat in track(range(repeats + 1), "measuring", transient=True):
            for name, assistant in assistants.items():
                start = time.perf_counter()
                texts[name] = target.generate(
                    prompt, assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False
                ).cpu()
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    return seconds, texts


@app.command()
def main(
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target's configuration.")],
    drafter: Annotated[str | None, typer.Option(help="Folder or Hub id of the drafter's configuration.")] = None,
    eagle: Annotated[bool, typer.Option("--eagle", help="Draft with an EAGLE-2 head instead.")] = False,
    agreement: Annotated[float, typer.Option(help="How often the drafter agrees, 0 to 1.")] = 0.75,
    policy: Annotated[list[str], typer.Option(help="Shortlist policy. Repeatable.")] = ["full", "hybrid"],  # noqa: B006
    tokens: Annotated[list[str], typer.Option(help='Draft tokens of a chain, or "auto". Repeatable.')] = ["5"],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="New tokens of each call.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Timed calls of each system.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="Of all weights.")] = "bfloat16",
) -> None:
    """Compare policies with plain generate on random models of real size."""
    if (drafter is None) != eagle:
        raise typer.BadParameter("name a configuration with --drafter, or take --eagle")
    lengths = [int(count) if count.isdecimal() else count for count in tokens]
    if any(length != AUTO and (length == 0 or isinstance(length, str)) for length in lengths):
        raise typer.BadParameter('--tokens takes numbers of at least 1, or "auto"')
    device, kind, knows = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, dtype), known(agreement)
    model = random_model(target, kind, device, 0, torch.ones(CYCLE, dtype=torch.bool))
    drafts = eagle_head(model, knows) if eagle else random_model(drafter, kind, device, 1, knows)
    assistants: dict[str, DynSpecAssistant | None] = {PLAIN: None}
    for text in policy:
        for length in lengths:
            name = text if len(lengths) == 1 else f"{text}, {length}"
            assistants[name] = DynSpecAssistant(drafts, parse_policy(text), target=model, num_assistant_tokens=length)
    seconds, texts = measure(model, assistants, new_tokens, repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    console = Console()
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    title = f"{target}, {'an EAGLE-2 head' if eagle else drafter}, {dtype}, {where}"
    table = Table("", "tokens/s", "of plain", "acceptance\nlength", "ms a round", "same\ntokens", title=title)
    for name, assistant in assistants.items():
        rounds = new_tokens if assistant is None else assistant.stats.rounds
        length = "" if assistant is None else f"{assistant.stats.acceptance_length:.2f}"
        same = "" if assistant is None else ("yes" if torch.equal(texts[name], texts[PLAIN]) else "no")
        speed, ratio = f"{new_tokens / medians[name]:.1f}", f"{medians[PLAIN] / medians[name]:.2f}×"
        table.add_row(name, speed, ratio, length, f"{1e3 * medians[name] / rounds:.1f}", same)
    console.print(table)
    worst = max(max(abs(one / medians[name] - 1) for one in times) for name, times in seconds.items())
    console.print(f"Medians of {repeats}; single calls differ from them by up to {worst:.0%}.")


if __name__ == "__main__":
    app()
