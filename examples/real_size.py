"""Measure pairs of real size on this computer without their weights: random models that agree as often as one says.

What a round costs depends on the models' shapes, and not on what they say; how much of a draft is accepted is chosen
here. The target's text walks through a circle of common tokens, which its layers hardly disturb, and the drafter knows
the way at as many of them as it is to agree on. So the figures are speeds of real rounds of an acceptance that was
chosen, and say nothing of how well a policy covers real text. A head of random rows has nothing in common with itself
that a factor of low rank could find: `screen` is accepted less often here than with real weights.

Only configurations are read, from folders or from the Hub:

    python examples/real_size.py --target Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B
    python examples/real_size.py --target meta-llama/Llama-3.1-8B --eagle

Models are made on the GPU, where there is one, and take as much memory there as real ones; those whose head is their
embedding have another one here. Their layers have to be called as those of Llama, Qwen, Mistral and Gemma are.
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

# The circle is of this many tokens, from this id on, all of which any list of common tokens holds.
CIRCLE, FIRST = 1000, 3
PROMPT = 64
# Layers add this share of what random ones would.
SHARE_OF_LAYERS = 0.02
PLAIN, AUTO = "plain generate", "auto"

app = typer.Typer(add_completion=False)


def circle() -> torch.Tensor:
    """int64 `[CIRCLE]`: the tokens in the order in which they follow one another."""
    return FIRST + torch.randperm(CIRCLE, generator=torch.Generator().manual_seed(7))


def known(agreement: float) -> torch.Tensor:
    """bool `[CIRCLE]`: of which tokens of the circle the drafter knows the next one."""
    return torch.rand(CIRCLE, generator=torch.Generator().manual_seed(8)) < agreement


@torch.no_grad()
def random_model(config_of: str, dtype: torch.dtype, device: str, seed: int, knows: torch.Tensor) -> PreTrainedModel:
    """A model of that configuration which says the next token of the circle where it knows it.

    Args:
        config_of: a folder or a repository on the Hub with a `config.json`.
        dtype, device: of all weights.
        seed: of the weights.
        knows: as `known` returns it.
    """
    config = AutoConfig.from_pretrained(config_of).get_text_config()
    # A tied head would repeat what it reads.
    config.tie_word_embeddings = False
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(SHARE_OF_LAYERS)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for weight in (embedding, head):
        weight.normal_()
    order = circle().to(device)
    knows = knows.to(device)
    # A row is likest to the token before the one that it stands for.
    head[order.roll(-1)[knows]] = embedding[order[knows]]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def eagle_head(target: PreTrainedModel, knows: torch.Tensor) -> EagleDrafter:
    """An EAGLE-2 head of the target's shapes that passes on the embedding of the last token, where it knows it."""
    config = target.config
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv_heads, head_dim = config.num_key_value_heads, getattr(config, "head_dim", None) or width // heads
    torch.manual_seed(2)

    def random(rows: int, columns: int, spread: float = 0.02) -> torch.Tensor:
        return (torch.randn(rows, columns, device=target.device, dtype=target.dtype) * spread).cpu()

    embedding = target.get_input_embeddings().weight.clone()
    unknown = circle()[~knows].to(target.device)
    embedding[unknown] = torch.randn_like(embedding[unknown])
    tensors = {
        "embed_tokens.weight": embedding.cpu(),
        "fc.weight": torch.eye(width, 2 * width, dtype=target.dtype),
        "layers.0.self_attn.q_proj.weight": random(heads * head_dim, width),
        "layers.0.self_attn.k_proj.weight": random(kv_heads * head_dim, width),
        "layers.0.self_attn.v_proj.weight": random(kv_heads * head_dim, width),
        "layers.0.self_attn.o_proj.weight": random(width, heads * head_dim, 0.02 * SHARE_OF_LAYERS),
        "layers.0.mlp.gate_proj.weight": random(inner, width),
        "layers.0.mlp.up_proj.weight": random(inner, width),
        "layers.0.mlp.down_proj.weight": random(width, inner, 0.02 * SHARE_OF_LAYERS),
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
    prompt = circle()[:PROMPT].unsqueeze(0).to(target.device)
    seconds: dict[str, list[float]] = {name: [] for name in assistants}
    texts = {}
    # Plain generation could leave them out too.
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
    target: Annotated[str, typer.Option(help="Folder or Hub id whose configuration the target has.")],
    drafter: Annotated[str | None, typer.Option(help="Likewise the drafter.")] = None,
    eagle: Annotated[bool, typer.Option("--eagle", help="Draft with an EAGLE-2 head in its place.")] = False,
    agreement: Annotated[float, typer.Option(help="How often the drafter agrees, 0 to 1.")] = 0.75,
    policy: Annotated[list[str], typer.Option(help="Shortlist policy. Repeatable.")] = ["full", "hybrid"],  # noqa: B006
    tokens: Annotated[list[str], typer.Option(help='Draft tokens of a chain, or "auto". Repeatable.')] = ["5"],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="New tokens of each call.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="How often all of it is timed.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="Of all weights.")] = "bfloat16",
) -> None:
    """Compare policies with plain generate on random models of real size."""
    if (drafter is None) != eagle:
        raise typer.BadParameter("name a configuration with --drafter, or take --eagle")
    lengths = [int(count) if count.isdecimal() else count for count in tokens]
    if any(length != AUTO and (length == 0 or isinstance(length, str)) for length in lengths):
        raise typer.BadParameter('--tokens takes numbers of at least 1, or "auto"')
    device, kind, knows = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, dtype), known(agreement)
    model = random_model(target, kind, device, 0, torch.ones(CIRCLE, dtype=torch.bool))
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
