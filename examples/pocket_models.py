"""The pocket models: architecture, initial weights and files."""

import filecmp
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pocket_text import END_OF_TEXT, VOCABULARY_SIZE
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_dynspec import EagleDrafter
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint

# Wide and shallow within 24 MB of files: as at real sizes, the projection over the vocabulary is a large part of a
# draft step, and not the launches of many thin layers.
HIDDEN_SIZE = 96
TARGET_LAYERS, TARGET_INTERMEDIATE_SIZE = 4, 320
DRAFTER_LAYERS, DRAFTER_INTERMEDIATE_SIZE = 1, 288
HEADS, HEAD_DIM = 3, 32
MAX_POSITIONS = 1024
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def make_model(layers: int, intermediate_size: int, seed: int) -> Qwen3ForCausalLM:
    """A small Qwen3 model with random weights and tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 0
    return model


def count_neighbours(rows: list[Tensor], reach: int = 3) -> tuple[Tensor, Tensor]:
    """Pairs of tokens within `reach` of each other, `[2, pairs]`, and their counts, `[pairs]`; symmetric."""
    keys = []
    for row in rows:
        for distance in range(1, reach + 1):
            earlier, later = row[:-distance], row[distance:]
            keys += [earlier * VOCABULARY_SIZE + later, later * VOCABULARY_SIZE + earlier]
    pairs, counts = torch.cat(keys).unique(return_counts=True)
    return torch.stack([pairs // VOCABULARY_SIZE, pairs % VOCABULARY_SIZE]), counts.float()


def start_embedding(model: Qwen3ForCausalLM, rows: list[Tensor], seed: int) -> None:
    """Initialise a model's embedding by a factorisation of the mutual information of neighbouring tokens.

    Training lasts minutes, in which most of the vocabulary occurs a few times. Counts of neighbours use all of the
    text, and place rare tokens among similar ones before the first step.
    """
    pairs, counts = count_neighbours(rows)
    occurrences = torch.zeros(VOCABULARY_SIZE).index_add(0, pairs[0], counts)
    # The power reduces the information of rare neighbours.
    expected = occurrences**0.75
    information = torch.log(counts / (occurrences[pairs[0]] * (expected / expected.sum())[pairs[1]])).clamp(min=0)
    size = (VOCABULARY_SIZE, VOCABULARY_SIZE)
    matrix = torch.sparse_coo_tensor(pairs, information, size, check_invariants=True).coalesce()
    weight = model.get_input_embeddings().weight
    torch.manual_seed(seed)
    vectors, strengths, _ = torch.svd_lowrank(matrix, q=weight.shape[1])
    vectors = vectors * strengths.sqrt()
    with torch.no_grad():
        weight.copy_(vectors * (model.config.initializer_range / vectors.std()))


def make_drafter(target: Qwen3ForCausalLM, seed: int) -> Qwen3ForCausalLM:
    """A model with few layers of its own and the target's embedding and projection, which are not trained."""
    drafter = make_model(DRAFTER_LAYERS, DRAFTER_INTERMEDIATE_SIZE, seed)
    drafter.set_input_embeddings(target.get_input_embeddings())
    drafter.tie_weights()
    drafter.get_input_embeddings().requires_grad_(False)
    return drafter


def make_eagle_head(target: Qwen3ForCausalLM, seed: int) -> EagleDrafter:
    """An EAGLE-2 head with random weights, in the official layout, without an embedding or projection of its own."""
    torch.manual_seed(seed)
    width, inner = HIDDEN_SIZE, DRAFTER_INTERMEDIATE_SIZE
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "bias": False,
    }
    attended = HEADS * HEAD_DIM
    shapes = {f"self_attn.{letter}_proj": (attended, width) for letter in "qkv"} | {
        "self_attn.o_proj": (width, attended),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {f"layers.0.{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    tensors["fc.weight"] = torch.randn(width, 2 * width) * (2 * width) ** -0.5
    return EagleDrafter(EagleCheckpoint.from_parts(config, tensors), target)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` when all of it is written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files, with `tokenizer.json` unindented, as indentation would triple it."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a model's files, the embedding as a separate one. Rounds the weights to bfloat16 in place."""
    model.bfloat16().save_pretrained(folder, max_shard_size=model.get_input_embeddings().weight.nbytes)
    # safetensors makes files that only their owner can read.
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    # Half precision is for the disk only, as not every processor computes with it.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def share_with_target(folder: Path, target: Path) -> None:
    """Replace the embedding and the tokenizer of a drafter's folder by links to the target's."""
    embedding = min(folder.glob("model-*.safetensors")).name
    if not filecmp.cmp(folder / embedding, target / embedding, shallow=False):
        raise SystemExit(f"{embedding} of the drafter is not the target's.")
    (folder / embedding).unlink()
    for name in (embedding, *TOKENIZER_FILES):
        (folder / name).symlink_to(Path("..", target.name, name))


def folder_size(folder: Path) -> int:
    """Bytes of all files under `folder`, not following links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
