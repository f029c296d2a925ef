"""Trains the pocket models: a small target and an even smaller drafter that complete Python code, on a CPU.

Speculative decoding with a large vocabulary is easier to look at when nothing has to be downloaded. This script makes
everything that a demonstration needs out of the running Python's own standard library:

1. a byte-level BPE tokenizer with 32,768 entries,
2. a target, trained on the library's source text,
3. a drafter, distilled from the target on the same text.

Both models tie their embedding to a projection over the whole vocabulary, which is where nearly all of the drafter's
parameters lie; shortening that projection is what `hf_dynspec` is about.

    python examples/train_pocket.py --out pocket

Step counts, not a clock, decide when training ends, so the same seed, thread count and library versions give the same
models.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY_SIZE = 32_768
END_OF_TEXT = "<|endoftext|>"
MAX_POSITIONS = 1024

# Character tables, bundled tools, help topics and deliberately broken files teach a code model nothing.
SKIPPED_FOLDERS = {
    "site-packages",
    "__pycache__",
    "cjkencodings",
    "distutils",
    "encoded_modules",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "tokenizedata",
    "turtledemo",
}
TEST_FOLDERS = {"test", "tests"}

# Words with their leading space, single digits, runs of punctuation, and indentation as a token of its own. Digits
# stay apart so that numeric tables in the source do not fill the vocabulary.
WORD_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# --- Text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """Source files, each as its whole text: the library proper and its test suite, apart."""

    library: list[str]
    tests: list[str]


def is_held_out(relative_path: str, seed: int, share: float = 0.04) -> bool:
    """Whether a file is kept from training, decided by a hash of its path and the seed."""
    digest = hashlib.sha256(f"{seed}:{relative_path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def is_table(text: str) -> bool:
    """Whether a file holds data rather than code: fewer than two thirds of it are letters and white space."""
    return sum(character.isalpha() or character.isspace() for character in text) < 2 / 3 * len(text)


def read_sources(root: Path, seed: int) -> tuple[Sources, Sources]:
    """The Python files under `root` as (training, held out)."""
    training, held_out = Sources([], []), Sources([], [])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if is_table(text):
            continue
        split = held_out if is_held_out(relative.as_posix(), seed) else training
        (split.tests if TEST_FOLDERS & set(relative.parts) else split.library).append(text)
    if not training.library or not held_out.library:
        raise SystemExit(
            f"{root} holds too few Python files. Run this with a Python that ships its library as source."
        )
    return training, held_out


def train_tokenizer(sources: Sources) -> Tokenizer:
    """A byte-level BPE tokenizer; ids ascend with the order of the merges, the end-of-text token comes first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources.library + sources.tests, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise SystemExit(f"The text suffices for {tokenizer.get_vocab_size()} tokens only, not {VOCABULARY_SIZE}.")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one row of token ids, with the end-of-text token before, between and after them."""
    separator = [tokenizer.token_to_id(END_OF_TEXT)]
    token_ids = list(separator)
    for encoding in tokenizer.encode_batch(texts):
        token_ids += encoding.ids + separator
    return torch.tensor(token_ids)


def cut(row: Tensor, window: int, offset: int = 0) -> Tensor:
    """Cuts a row of token ids into consecutive windows, shape `[windows, window]`."""
    row = row[offset:]
    count = len(row) // window
    return row[: count * window].view(count, window)


class Batches:
    """An endless, seeded stream of training windows.

    Each epoch holds the whole library and half as much of the test suite, cut at a fresh offset. Test code is
    plentiful and repetitive, and should widen the vocabulary in use without setting the tone.
    """

    def __init__(self, library: Tensor, tests: Tensor, window: int, batch: int, seed: int):
        self.library, self.tests, self.window, self.batch = library, tests, window, batch
        self.generator = torch.Generator().manual_seed(seed)

    def epoch(self) -> Tensor:
        """The windows of one epoch in random order."""
        offset = int(torch.randint(self.window, (), generator=self.generator))
        library = cut(self.library, self.window, offset)
        tests = cut(self.tests, self.window, offset)
        chosen = torch.randperm(len(tests), generator=self.generator)[: len(library) // 2]
        windows = torch.cat([library, tests[chosen]])
        return windows[torch.randperm(len(windows), generator=self.generator)]

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from (batch for batch in self.epoch().split(self.batch) if len(batch) == self.batch)


# --- Models ----------------------------------------------------------------------------------------------------------


def make_model(hidden_size: int, layers: int, intermediate_size: int, seed: int) -> Qwen3ForCausalLM:
    """A small Qwen3 model with random weights and tied embeddings."""
    torch.manual_seed(seed)
    heads = hidden_size // 32
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
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
    """Which tokens occur within `reach` of each other, `[2, pairs]`, and how often, `[pairs]`; symmetric."""
    keys = []
    for row in rows:
        for distance in range(1, reach + 1):
            earlier, later = row[:-distance], row[distance:]
            keys += [earlier * VOCABULARY_SIZE + later, later * VOCABULARY_SIZE + earlier]
    pairs, counts = torch.cat(keys).unique(return_counts=True)
    return torch.stack([pairs // VOCABULARY_SIZE, pairs % VOCABULARY_SIZE]), counts.float()


def start_embedding(model: Qwen3ForCausalLM, rows: list[Tensor], seed: int) -> None:
    """Starts a model's embedding from which tokens stand near which: a factorisation of their mutual information.

    In the minutes that training has, most of the vocabulary is seen a handful of times. Counting neighbours covers all
    of the text at once and gives rare tokens a place among similar ones before the first step.
    """
    pairs, counts = count_neighbours(rows)
    occurrences = torch.zeros(VOCABULARY_SIZE).index_add(0, pairs[0], counts)
    # The power makes rare neighbours less surprising than their counts alone would say.
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


def inherit_embedding(drafter: Qwen3ForCausalLM, target: Qwen3ForCausalLM, counts: Tensor) -> None:
    """Starts the drafter's embedding from the target's, projected onto its principal directions.

    Tokens weigh in by the square root of their frequency, so that the directions are those that common tokens use.
    """
    source = target.get_input_embeddings().weight.detach()
    destination = drafter.get_input_embeddings().weight
    weighted = source * counts.clamp(min=1).sqrt().unsqueeze(1).to(source.dtype)
    _, _, directions = torch.linalg.svd(weighted, full_matrices=False)
    with torch.no_grad():
        projected = source @ directions[: destination.shape[1]].T
        destination.copy_(projected * (source.std() / projected.std()))


# --- Losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """The tokens that one training step scores, and how to make their softmax stand for the whole vocabulary's.

    Attributes:
        token_ids: unique ids, `[candidates]`.
        log_weights: the log of how many tokens each candidate stands for, `[candidates]`; added to its logit.
        labels: where in `token_ids` each label of the step lies, in the shape of the labels.
    """

    token_ids: Tensor
    log_weights: Tensor
    labels: Tensor


class CandidateSampler:
    """Draws the tokens to score in a training step, because scoring all 32,768 would take most of the time.

    The most common tokens and the step's labels are always scored. A uniform sample of the others estimates their part
    of the softmax's denominator: each sampled token stands for as many as were left out.
    """

    def __init__(self, counts: Tensor, common: int, sampled: int, seed: int):
        self.common = counts.argsort(descending=True, stable=True)[:common]
        self.sampled = sampled
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, labels: Tensor) -> Candidates:
        """The candidates for a step whose next tokens are `labels`."""
        certain = torch.zeros(VOCABULARY_SIZE, dtype=torch.bool)
        certain[self.common] = True
        certain[labels.flatten()] = True
        rest = (~certain).nonzero().squeeze(1)
        drawn = rest[torch.randperm(len(rest), generator=self.generator)[: self.sampled]]
        always = certain.nonzero().squeeze(1)
        token_ids = torch.cat([always, drawn])
        log_weights = torch.zeros(len(token_ids))
        log_weights[len(always) :] = math.log(len(rest) / max(len(drawn), 1))
        position = torch.zeros(VOCABULARY_SIZE, dtype=torch.long)
        position[token_ids] = torch.arange(len(token_ids))
        return Candidates(token_ids, log_weights, position[labels])


def hidden_states(model: Qwen3ForCausalLM, token_ids: Tensor) -> Tensor:
    """The final hidden states of `model`, `[batch, length, hidden]`, without the projection over the vocabulary."""
    return model.model(input_ids=token_ids, use_cache=False).last_hidden_state


def candidate_log_probabilities(hidden: Tensor, weight: Tensor, candidates: Candidates) -> Tensor:
    """Log probabilities of the candidates, `[rows, candidates]`; `weight` holds the candidates' rows only."""
    return functional.log_softmax(functional.linear(hidden, weight, candidates.log_weights), dim=-1)


def data_loss(model: Qwen3ForCausalLM, sampler: CandidateSampler, windows: Tensor) -> Tensor:
    """Cross entropy of the windows' next tokens."""
    labels = windows[:, 1:]
    candidates = sampler.draw(labels)
    weight = model.lm_head.weight[candidates.token_ids]
    losses = []
    # One window at a time keeps the logits inside the processor's cache.
    for hidden, positions in zip(hidden_states(model, windows[:, :-1]), candidates.labels, strict=True):
        losses.append(functional.nll_loss(candidate_log_probabilities(hidden, weight, candidates), positions))
    return torch.stack(losses).mean()


def distillation_loss(
    drafter: Qwen3ForCausalLM,
    target: Qwen3ForCausalLM,
    sampler: CandidateSampler,
    windows: Tensor,
    data_share: float = 0.2,
) -> Tensor:
    """A mix of the drafter's cross entropy on the text and its divergence from the target's distribution."""
    labels = windows[:, 1:]
    candidates = sampler.draw(labels)
    drafter_weight = drafter.lm_head.weight[candidates.token_ids]
    with torch.no_grad():
        target_weight = target.lm_head.weight[candidates.token_ids]
        target_hidden = hidden_states(target, windows[:, :-1])
    losses = []
    drafter_hidden = hidden_states(drafter, windows[:, :-1])
    for own, teacher, positions in zip(drafter_hidden, target_hidden, candidates.labels, strict=True):
        drafted = candidate_log_probabilities(own, drafter_weight, candidates)
        with torch.no_grad():
            wanted = candidate_log_probabilities(teacher, target_weight, candidates)
        divergence = functional.kl_div(drafted, wanted, reduction="batchmean", log_target=True)
        losses.append(data_share * functional.nll_loss(drafted, positions) + (1 - data_share) * divergence)
    return torch.stack(losses).mean()


# --- Training --------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' scales alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def schedule(step: int, steps: int, warm_up_share: float = 0.05) -> float:
    """The learning rate's factor: a linear warm-up, then half a cosine down to zero."""
    warm_up = max(1, round(steps * warm_up_share))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(
    name: str,
    model: nn.Module,
    loss_function: Callable[[Tensor], Tensor],
    batches: Batches,
    *,
    steps: int,
    learning_rate: float,
    console: Console,
) -> None:
    """Runs `steps` optimizer steps on `model` under a progress bar."""
    optimizer = make_optimizer(model, learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    model.train()
    smoothed = None
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=steps, loss=math.nan)
        for step, windows in zip(range(steps), batches, strict=False):
            loss = loss_function(windows)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            value = loss.item()
            smoothed = value if smoothed is None else 0.95 * smoothed + 0.05 * value
            progress.update(task, completed=step + 1, loss=smoothed)
    model.eval()


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What held-out text says about the pair; losses are nats per token over the whole vocabulary."""

    tokens: int
    target_loss: float
    drafter_loss: float
    agreement: float


@torch.inference_mode()
def measure(target: Qwen3ForCausalLM, drafter: Qwen3ForCausalLM, windows: Tensor) -> Measurement:
    """Both models' losses on `windows`, and the share of positions where their greedy choices are equal."""
    tokens = 0
    target_loss = drafter_loss = agreement = 0.0
    for window in windows:
        parts = [hidden_states(model, window[None, :-1])[0].split(128) for model in (target, drafter)]
        # A few rows at a time: the logits of a whole window would be allocated afresh, page by page.
        for target_hidden, drafter_hidden, labels in zip(*parts, window[1:].split(128), strict=True):
            target_logits, drafter_logits = target.lm_head(target_hidden), drafter.lm_head(drafter_hidden)
            target_loss += functional.cross_entropy(target_logits, labels, reduction="sum").item()
            drafter_loss += functional.cross_entropy(drafter_logits, labels, reduction="sum").item()
            agreement += (target_logits.argmax(-1) == drafter_logits.argmax(-1)).sum().item()
            tokens += len(labels)
    return Measurement(tokens, target_loss / tokens, drafter_loss / tokens, agreement / tokens)


# --- Writing ---------------------------------------------------------------------------------------------------------


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files, with `tokenizer.json` unindented: indentation would triple it."""
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


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a model's folder whole or not at all. The weights are rounded to float16 in place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.half().save_pretrained(temporary)
        # Half precision is for the disk: processors without native half arithmetic compute it very slowly.
        path = temporary / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = "float32"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_tokenizer(tokenizer, temporary)
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def folder_size(folder: Path) -> int:
    """Bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- Command line ----------------------------------------------------------------------------------------------------


def report(out: Path, library: Tensor, tests: Tensor, console: Console) -> None:
    """Measures the models as they lie on disk and prints the figures."""
    target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    drafter = AutoModelForCausalLM.from_pretrained(out / "drafter", dtype=torch.float32).eval()
    table = Table("held-out text", "tokens", "target loss", "drafter loss", "greedy agreement")
    for name, windows in (("library", library), ("tests", tests)):
        if len(windows):
            figures = measure(target, drafter, windows)
            losses = (f"{figures.target_loss:.3f}", f"{figures.drafter_loss:.3f}")
            table.add_row(name, f"{figures.tokens:,}", *losses, f"{figures.agreement:.1%}")
    console.print(table)
    for name, model in (("target", target), ("drafter", drafter)):
        console.print(f"{name}: {model.num_parameters():,} parameters, {folder_size(out / name):,} bytes on disk")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the pocket target and drafter on the standard library's source."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that receives target/ and drafter/")
    parser.add_argument("--target-steps", type=int, default=1900, help="optimizer steps of the target")
    parser.add_argument("--drafter-steps", type=int, default=1200, help="optimizer steps of the drafter")
    parser.add_argument("--window", type=int, default=640, help="tokens per training window")
    parser.add_argument("--batch", type=int, default=2, help="windows per optimizer step")
    parser.add_argument("--target-learning-rate", type=float, default=3e-3)
    parser.add_argument("--drafter-learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0, help="decides the split, the weights and the order of the text")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="processor threads to use")
    parser.add_argument("--overwrite", action="store_true", help="replace target/ and drafter/ where they exist")
    return parser.parse_args()


def main() -> None:
    """Trains the tokenizer, the target and the drafter, writes both folders and prints what held-out text says."""
    arguments = parse_arguments()
    folders = [arguments.out / "target", arguments.out / "drafter"]
    existing = [str(folder) for folder in folders if folder.exists()]
    if existing and not arguments.overwrite:
        raise SystemExit(f"{' and '.join(existing)} exist. Choose another --out or pass --overwrite.")
    started = time.monotonic()
    console = Console()
    torch.set_num_threads(arguments.threads)
    # The tokenizers library reads this when it first encodes.
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)

    training, held_out = read_sources(Path(sysconfig.get_paths()["stdlib"]), arguments.seed)
    tokenizer = train_tokenizer(training)
    library, tests = encode(tokenizer, training.library), encode(tokenizer, training.tests)
    console.print(f"training text: {len(library):,} tokens of library and {len(tests):,} tokens of tests")
    counts = torch.bincount(torch.cat([library, tests]), minlength=VOCABULARY_SIZE)

    def batches(offset: int) -> Batches:
        return Batches(library, tests, arguments.window, arguments.batch, arguments.seed + offset)

    target = make_model(hidden_size=160, layers=6, intermediate_size=448, seed=arguments.seed)
    start_embedding(target, [library, tests], arguments.seed)
    sampler = CandidateSampler(counts, common=2048, sampled=2048, seed=arguments.seed)
    train(
        "target",
        target,
        lambda windows: data_loss(target, sampler, windows),
        batches(1),
        steps=arguments.target_steps,
        learning_rate=arguments.target_learning_rate,
        console=console,
    )
    drafter = make_model(hidden_size=64, layers=2, intermediate_size=192, seed=arguments.seed)
    inherit_embedding(drafter, target, counts)
    train(
        "drafter",
        drafter,
        lambda windows: distillation_loss(drafter, target, sampler, windows),
        batches(2),
        steps=arguments.drafter_steps,
        learning_rate=arguments.drafter_learning_rate,
        console=console,
    )

    for model, folder in zip((target, drafter), folders, strict=True):
        save_model(model, tokenizer, folder)
    windows = [cut(encode(tokenizer, texts), 512)[:128] for texts in (held_out.library, held_out.tests)]
    report(arguments.out, *windows, console)
    console.print(f"took {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
