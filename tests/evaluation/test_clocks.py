"""Everything that measures goes on where the clock stands still, is coarse, or holds whoever reads it up at random: it
raises nothing, and what it says is a number."""

import json
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_line import invoke, shown, write_rows
from models import perturbed, prompt, tiny, word_tokenizer
from transformers import PreTrainedModel

from hf_dynspec import AutomaticShortlist, DynSpecAssistant, FullShortlist, HybridShortlist, OnlineAlignment
from hf_dynspec.evaluation.bench.benchmark import BenchmarkSettings, run_benchmark
from hf_dynspec.evaluation.bench.report import acceptance_table, round_table, speed_table, to_dict
from hf_dynspec.evaluation.doctor.measure import diagnose_pair
from hf_dynspec.evaluation.doctor.settings import DoctorSettings
from hf_dynspec.evaluation.prompts import WorkloadPrompt
from hf_dynspec.evaluation.trace import report
from hf_dynspec.evaluation.trace.measure import trace_prompt
from hf_dynspec.evaluation.trace.settings import TraceSettings
from hf_dynspec.stats import Clock
from hf_dynspec.tree_config import TreeConfig

POCKET = Path(__file__).parents[2] / "examples" / "pocket"
TOKENIZER = word_tokenizer()
PROMPTS = [WorkloadPrompt(text, "words", text) for text in ("t5 t6 t7 t8 t9 t10", "t50 t60 t70")]
POLICIES = {"full": FullShortlist(), "hybrid": HybridShortlist()}


class StandsStill:
    """Says the same at each reading."""

    def __call__(self) -> float:
        return 1000.0


class IsCoarse:
    """Goes on by 15 ms at a time, as some systems' clocks do."""

    def __init__(self):
        self._real = time.perf_counter

    def __call__(self) -> float:
        return 0.015 * (self._real() // 0.015)


class HoldsUp:
    """Whoever reads it is held up for up to a second, now and then or always.

    Args:
        share: of the readings.
    """

    def __init__(self, share: float):
        self._real, self._share = time.perf_counter, share
        self._chance, self._held_up = random.Random(0), 0.0

    def __call__(self) -> float:
        if self._chance.random() < self._share:
            self._held_up += self._chance.random()
        return self._real() + self._held_up


CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "stands still": StandsStill,
    "is coarse": IsCoarse,
    "holds up at each reading": lambda: HoldsUp(1.0),
    "holds up now and then": lambda: HoldsUp(0.05),
}


@pytest.fixture(params=CLOCKS)
def hostile_clock(request, monkeypatch) -> None:
    """Everybody reads one clock, whatever it is to tell."""
    clock = CLOCKS[request.param]()
    for name in ("perf_counter", "monotonic", "thread_time"):
        monkeypatch.setattr(time, name, clock)


@pytest.fixture
def models() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A target that ends the first text with its first token, and a drafter."""
    target = tiny()
    input_ids = TOKENIZER(PROMPTS[0].text, return_tensors="pt")["input_ids"]
    target.generation_config.eos_token_id = target.generate(input_ids, max_new_tokens=1)[0, -1].item()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "drafting does not pay here")
        yield target, perturbed(target)


def require_numbers(text: str, figures: dict) -> None:
    """Whatever is told is a number."""
    json.dumps(figures, allow_nan=False)
    assert not re.search(r"\b(nan|inf)\b", text), text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_doctor_says_what_to_do(hostile_clock, models, temperature):
    target, drafter = models
    settings = DoctorSettings(
        policies=POLICIES,
        tree=TreeConfig(8, 2, 3),
        num_assistant_tokens=3,
        max_new_tokens=20,
        seconds=0.1,
        temperature=temperature,
    )
    given = {"target": target, "drafter": drafter, "tokenizer": TOKENIZER, "prompts": PROMPTS}
    diagnosis = diagnose_pair(settings, DynSpecAssistant, **given)
    require_numbers(str(diagnosis), diagnosis.to_dict())
    assert all(one.ratio > 0 and one.tokens_per_second > 0 for one in diagnosis.speeds)


def test_the_benchmark_compares(hostile_clock, models):
    target, drafter = models
    settings = BenchmarkSettings(policies=POLICIES, num_assistant_tokens="auto", max_new_tokens=12, profile_prompts=1)
    result = run_benchmark(settings, target=target, drafter=drafter, tokenizer=TOKENIZER, prompts=PROMPTS)
    tables = [table(result, 0.0) for table in (speed_table, round_table, acceptance_table)]
    require_numbers(shown(*tables), to_dict(result))


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_drafting_chooses(hostile_clock, models, tree):
    target, drafter = models
    target.generation_config.eos_token_id = None
    assistant = DynSpecAssistant(
        drafter,
        AutomaticShortlist(list(POLICIES.values())),
        target=target,
        num_assistant_tokens="auto",
        tree=TreeConfig(8, 2, 3) if tree else False,
        profile=True,
        alignment=OnlineAlignment(synchronous=False),
    )
    for new_tokens in (1, 100, 2, 40):
        expected = target.generate(prompt(), max_new_tokens=new_tokens, do_sample=False)
        tokens = target.generate(prompt(), max_new_tokens=new_tokens, do_sample=False, assistant_model=assistant)
        assert torch.equal(tokens, expected)
        for stats in (assistant.stats, assistant.alignment.stats):
            require_numbers(str(stats), stats.to_dict())


def test_a_trace_is_drawn(hostile_clock, models):
    target, drafter = models
    given = {"target": target, "drafter": drafter, "tokenizer": TOKENIZER, "prompts": PROMPTS[1:]}
    trace = trace_prompt(TraceSettings(policies=("retrieval:size=40",), max_new_tokens=20), **given)
    require_numbers(shown(*report.text_report(trace)), report.to_dict(trace))


@pytest.mark.parametrize("hostile_clock", ["stands still", "holds up at each reading"], indirect=True)
def test_an_evaluation_is_summed_up(hostile_clock, tmp_path):
    rows = [{"question_id": n, "category": "code", "turns": [text]} for n, text in enumerate(("import ", "class "))]
    data = tmp_path / "data.jsonl"
    write_rows(data, rows)
    words = ["--target", POCKET / "target", "--drafter", POCKET / "drafter", "--threads", 1, "--data", data]
    words += [
        "--policy",
        "frequency:size=512",
        "--max-new-tokens",
        4,
        "--profile-prompts",
        1,
        "--out",
        tmp_path / "out",
    ]
    result = invoke("evaluate", *words)
    assert result.exit_code == 0, result.exception


def test_a_clock_tells_each_time_more_than_before():
    said = iter([5.0, 5.0, 4.0, 6.0, 6.0])
    clock = Clock(lambda: next(said))
    times = [clock() for _ in range(5)]
    assert times == sorted(set(times)) and times == pytest.approx([5.0, 5.0, 5.0, 6.0, 6.0])
