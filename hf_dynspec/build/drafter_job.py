"""The whole training of a drafter for a target, from texts to weights, which goes on where it was stopped."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from ..drafters import Drafter
from ..errors import ConfigurationError, UnsupportedError, counted
from ..modeling.parts import output_rows
from .corpus import Corpus
from .drafter_losses import HeldOutFigures, target_states
from .drafter_training import DrafterTraining, DrafterTrainingSettings, DrafterTrainingState
from .jobs import begin_job, describe_files, describe_model, describe_tokenizer
from .ranking import vocabulary_size
from .recording import RecordingSettings
from .self_written import SelfWriter
from .tokens import prefix_ids
from .windows import kept_windows, sample_windows

_WINDOWS, _TRAINING = "windows.npz", "training.pt"
_HELD_OUT, _WRITTEN = "held-out", "written"
# Tokens of text that are kept at most, and windows of them that are held out.
_MOST_TOKENS, _MOST_HELD_OUT = 20_000_000, 16
# Tokens that a new drafter is made from, for each number of a hidden state; and at most.
_SAMPLED, _MOST_SAMPLED = 48, 24_576
# Texts that the target writes at once.
_TEXTS_ON_CPU, _TEXTS = 16, 64
# If time is limited, the target writes during this part of it, times the share of texts that it is to write.
_WRITING = 0.5
_FEWEST_BATCHES = 200  # before which a drafter is rarely of use

# Takes an activity, how much of it is done, and how much there is.
Report = Callable[[str, int, int], None]
# Makes a drafter; takes a function that gives some texts with the target's hidden states along them.
MakeDrafter = Callable[[Callable[[], Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]]], Drafter]


@dataclass(frozen=True, eq=False)
class TrainedDrafter:
    """A trained drafter with its best weights, and what is known of it."""

    drafter: Drafter
    figures: HeldOutFigures  # at held-out texts
    state: DrafterTrainingState
    tokens: tuple[int, int]  # of the user's texts and of those that the target wrote


def require_trainable(config: Any, name: str) -> None:
    """Refuse targets that no drafter is trained for, by their configuration.

    Raises:
        UnsupportedError: it is an encoder-decoder, or quantised.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder model. Drafters are trained for decoder-only models.")
    if getattr(config.get_text_config(), "quantization_config", None) or getattr(config, "quantization_config", None):
        raise UnsupportedError(
            f"{name} is quantised, and a drafter learns from the target's own numbers. Train beside the model that it "
            "was quantised from; the drafter then drafts for both."
        )


def train_drafter(
    target: PreTrainedModel,
    tokenizer: Any,
    corpus: Corpus,
    make: MakeDrafter,
    settings: DrafterTrainingSettings,
    work: str | Path,
    *,
    window: int = 256,
    accelerator: Accelerator | None = None,
    job: dict[str, Any] | None = None,
    report: Report = lambda activity, done, total: None,
    look: Callable[[DrafterTrainingState, HeldOutFigures], None] = lambda state, figures: None,
    say: Callable[[str], None] = lambda text: None,
) -> TrainedDrafter:
    """Train a drafter on texts, and on texts that the target writes itself after their beginnings.

    Args:
        target: in evaluation mode. It is not changed.
        tokenizer: the target's.
        corpus: from `find_corpus`.
        make: such as `partial(new_eagle_head, target)`.
        settings: of the training.
        work: the folder that keeps what is finished. The same call goes on with it.
        window: tokens of a text that are read at a time.
        accelerator: of the processes that work together (None: this one alone).
        job: JSON values that decide what `make` returns.
        report: called as the work goes on.
        look: called after each look at the held-out texts.
        say: takes a line: what an earlier call left, and whether the minutes are going to be enough.

    Raises:
        ConfigurationError: the texts are too few, or the folder holds unfinished work of another job.
        UnsupportedError: no drafter can be trained for this target.
    """
    started, work = time.monotonic(), Path(work)
    require_trainable(target.config, type(target).__name__)
    accelerator = accelerator or Accelerator(cpu=target.device.type == "cpu")
    process, processes = accelerator.process_index, accelerator.num_processes
    size = vocabulary_size(tokenizer)
    if size > output_rows(target):
        raise ConfigurationError(
            f"the tokenizer knows {size:,} tokens, and the target scores {output_rows(target):,}: give the target's "
            "own tokenizer"
        )
    described = {
        "target": describe_model(target),
        "inputs": describe_files(file.path for file in corpus.files),
        "text field": corpus.text_field,
        "tokenizer": describe_tokenizer(tokenizer),
        "settings": {**asdict(settings), "save_every": None, "minutes": None, "window": window},
        "drafter": job,
    }
    wanted = min(_MOST_TOKENS, (settings.steps or _MOST_TOKENS) * settings.batch_tokens)
    sampled = RecordingSettings(steps=wanted, held_out=_MOST_HELD_OUT * window, window=window, seed=settings.seed)

    sample = partial(sample_windows, corpus, tokenizer, size, sampled, partial(report, "reading texts"))
    with accelerator.main_process_first():
        begin_job(work, described, is_main=accelerator.is_main_process)
        windows = kept_windows(work / _WINDOWS, sample)
    held = min(_MOST_HELD_OUT, max(1, len(windows) // 10))
    texts = [windows[index] for index in range(held, len(windows))]
    tokens = sum(map(len, texts))
    if tokens < settings.batch_tokens:
        raise ConfigurationError(
            f"the texts give {counted(tokens, 'token')} to train on, which do not make one batch of "
            f"{settings.batch_tokens:,}: give more texts"
        )

    def sample_states() -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        left = min(_SAMPLED * target.config.get_text_config().hidden_size, _MOST_SAMPLED)
        for text in texts:
            yield text, target_states(target, text)
            left -= len(text)
            if left < 0:
                return

    drafter = make(sample_states)
    read = time.monotonic() - started
    length, batch = window + len(prefix_ids(tokenizer)), _TEXTS_ON_CPU if target.device.type == "cpu" else _TEXTS
    arguments = {"length": length, "size": batch, "seed": settings.seed}
    held_writer = SelfWriter(target, windows, range(held), folder=work / _HELD_OUT, **arguments)
    writer = SelfWriter(target, windows, range(held, len(windows)), folder=work / _WRITTEN, **arguments)
    checkpoint = work / _TRAINING
    said = "an earlier run left what this goes on with" if checkpoint.exists() or writer.seconds() else "work is kept"
    say(f"{said} in {work}: if this is stopped or killed, the same command goes on")
    # A training goes on with the texts that it began with.
    if settings.self_written and not checkpoint.exists():
        most = len(writer.batches)
        if settings.steps:
            texts_read = settings.self_written * settings.steps * settings.batch_tokens / length
            most = min(most, math.ceil(texts_read / batch))
        limit = math.inf
        if settings.minutes:
            limit = 60 * settings.minutes * _WRITING * settings.self_written
        before, began = read + (held_writer.seconds() + writer.seconds()) / processes, time.monotonic()

        def goes_on(number: int, last: int = most) -> bool:
            report("the target writes texts", number, last)
            return before + time.monotonic() - began < limit

        if accelerator.is_main_process:
            held_writer.write(range(len(held_writer.batches)), lambda number: goes_on(0))
        writer.write(range(process, most, processes), goes_on)
        accelerator.wait_for_everyone()
    own, held_out = writer.written(), held_writer.written() or [windows[index] for index in range(held)]
    held_out = [text for text in held_out if len(text) > settings.depth + 1]
    if not held_out:
        raise ConfigurationError("no held-out text is longer than a draft: the texts end at once. Give longer texts.")
    seconds = read + (held_writer.seconds() + writer.seconds()) / processes
    ranking = torch.from_numpy(np.argsort(-windows.counts, kind="stable"))
    training = DrafterTraining(
        target, drafter, (texts, own), held_out, ranking, settings, checkpoint, accelerator, seconds
    )

    began, first = time.monotonic(), training.state.step

    def progress(state: DrafterTrainingState, done: float) -> None:
        took = time.monotonic() - began
        batches = state.step + max(0.0, 60 * (settings.minutes or math.inf) - state.seconds) / took
        if state.step == first + 1 and batches < _FEWEST_BATCHES:
            enough = math.ceil(_FEWEST_BATCHES * took / (1 - _WRITING * settings.self_written) / 60)
            unread = "" if own or not settings.self_written else ", and the target had no time to write any text"
            say(
                f"a batch takes {took:.1f} s, so that {settings.minutes:g} minutes have about {batches:,.0f} of them"
                f"{unread}; a drafter is rarely of use before about {_FEWEST_BATCHES}. Stop, and give this target "
                f"about --minutes {enough}: what is kept is used"
            )
        says = f"training, batch {state.step:,}, loss {state.loss:.3f}"
        by_steps = settings.steps and not settings.minutes
        report(says, *((state.step, settings.steps) if by_steps else (round(1000 * done), 1000)))

    figures = training.run(look, progress)
    return TrainedDrafter(drafter, figures, training.state, (tokens, sum(map(len, own))))
