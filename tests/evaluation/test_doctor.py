"""The doctor: its figures follow from the timed calls, it keeps to its seconds, and it changes nothing."""

import ast
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import perturbed, tiny, word_tokenizer
from rich.console import Console
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_dynspec import AutomaticShortlist, DynSpecAssistant, FrequencyShortlist, FullShortlist, HybridShortlist
from hf_dynspec.commands import app
from hf_dynspec.errors import ConfigurationError, NotBoundError, UnsupportedError
from hf_dynspec.evaluation.coverage.settings import CoverageSettings
from hf_dynspec.evaluation.doctor import measure
from hf_dynspec.evaluation.doctor.diagnosis import OWN_POLICY, Diagnosis, TimedCall, TimedSetting
from hf_dynspec.evaluation.doctor.drafters import ways_to_draft
from hf_dynspec.evaluation.doctor.measure import by_turns, diagnose_pair
from hf_dynspec.evaluation.doctor.settings import POLICIES, DoctorSettings
from hf_dynspec.evaluation.policy_text import policy_in_python
from hf_dynspec.evaluation.prompts import WorkloadPrompt
from hf_dynspec.evaluation.trace.settings import TraceSettings
from hf_dynspec.shortlists import as_policy
from hf_dynspec.stats import SECTIONS, Stopwatch
from hf_dynspec.tree_config import TreeConfig

POCKET = Path(__file__).parents[2] / "examples" / "pocket"
ROLES = ("target", "drafter")
TOKENIZER = word_tokenizer()
TEXTS = ("t5 t6 t7 t8 t9 t10", "t50 t60 t70")
PROMPTS = [WorkloadPrompt(text, text, text) for text in TEXTS]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny(seed=0)


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    """Agrees with the target in most of its choices."""
    return perturbed(target)


@pytest.fixture
def given(target, drafter) -> dict:
    return {"target": target, "drafter": drafter, "tokenizer": TOKENIZER, "prompts": PROMPTS}


@pytest.fixture
def undisturbed(monkeypatch) -> None:
    """Speeds by the processor's time, so that other work on the computer does not decide."""
    monkeypatch.setattr(Stopwatch, "now", lambda self: time.thread_time())


# Figures -------------------------------------------------------------------------------------------------------------


def simulate(way: TimedSetting, verdicts: Sequence[bool], seconds: Callable[[int], float], prompt: int) -> None:
    """Add a call along a text, in which a draft step is accepted or not, whose rounds take so many seconds."""
    tokens, place = [], 0
    while place < len(verdicts):
        steps = min(way.shape or 0, len(verdicts) - place - 1)
        accepted = next((n for n in range(steps) if not verdicts[place + n]), steps)
        if steps:
            way.stats.rounds += 1
            way.stats.accepted += accepted
            way.stats.rounds_of[way.policy] += 1
            for step in range(steps):
                counts = ((way.stats._drafted_at, True), (way.stats.accepted_at, step < accepted))
                for count, happened in counts:
                    count.extend([0] * (step + 1 - len(count)))
                    count[step] += happened
        tokens.append(accepted + 1)
        place += accepted + 1
    ends = itertools.accumulate([0.05, *[seconds(way.shape or 0)] * (len(tokens) - 1)])
    way.calls.append(TimedCall(prompt, tuple(ends), tuple(tokens)))


def diagnosed(
    draft_step: float = 0.002,
    acceptance: float = 0.8,
    prompts: int = 3,
    policies: Sequence[str] = ("full", "hybrid"),
    tree: str | None = None,
    length: int = 128,
    lengths: Sequence[int] = (2, 8),
    steps: Mapping[str, float] | None = None,
) -> Diagnosis:
    """A pair of which everything is known. By default `full` drafts three times as long as others."""
    own_steps = {"full": 3 * draft_step} if steps is None else steps
    settings = DoctorSettings("target", "drafter", policies=policies, tree=tree)
    chance = random.Random(3)
    texts = [[chance.random() < acceptance for _ in range(length)] for _ in range(prompts)]
    measured = Diagnosis(
        settings,
        settings.resolved_policies(),
        models={role: {"name": role, "parameters": 9e6, "dtype": "float32", "device": "cpu"} for role in ROLES},
        vocabulary={"tokens": 151_665, "target_rows": 151_936, "drafter_rows": 151_936},
        prompts=[{"identifier": f"one/{n}", "domain": "one", "tokens": 9} for n in range(prompts)],
        threads=1,
        started="",
    )
    shapes = [*((name, 5) for name in policies), *((policies[-1], one) for one in lengths)]
    measured.timed = [TimedSetting(name, steps) for name, steps in shapes]
    for number, text in enumerate(texts):
        simulate(measured.plain, text, lambda steps: 0.011, number)
        for way in measured.timed:
            step = own_steps.get(way.policy, draft_step)
            simulate(way, text, lambda count, step=step: 0.0115 + count * step, number)
    parts = {"backbone": 0.004, "head": 0.03, "policy": 0.001, "choice": 0.005, "verification": 0.014, "other": 0.001}
    measured.profiles = {name: dict(parts) for name in dict.fromkeys(("full", policies[-1]))}
    return measured


def test_speeds_follow_from_rounds():
    measured = diagnosed()
    plain = 0.05 + 127 * 0.011
    for way, one in zip(measured.timed, measured.speeds, strict=True):
        step = 0.006 if way.policy == "full" else 0.002
        assert one.round_seconds == pytest.approx(0.0115 + way.shape * step)
        seconds = [call.ends[-1] for call in way.calls]
        assert one.tokens_per_second == pytest.approx(128 / (sum(seconds) / 3), rel=0.03)
        assert one.ratio == pytest.approx(plain / (sum(seconds) / 3), rel=0.03)
        each = [plain / one for one in seconds]
        assert one.error == pytest.approx(torch.tensor(each).std().item() / 3**0.5, rel=0.3, abs=0.02)
        assert one.rounds == way.stats.rounds and one.prompts == 3
    hybrid = measured.speeds[1]
    tokens = hybrid.round_seconds / 0.011
    a = hybrid.pays_from
    assert sum(a**n for n in range(6)) == pytest.approx(tokens, rel=1e-4)


def test_acceptance_tells_how_many_drafts_stand_behind_it():
    """A share of ten drafts says little, and of none nothing."""
    measured = diagnosed(acceptance=0.3, prompts=1, length=24)
    (way,) = (one for one in measured.timed if one.shape == 8)
    steps = measured.acceptance(way)
    assert len(steps) == 8
    before = way.stats.drafted_at[0]
    for (share, most), accepted, drafted in zip(steps, [*way.stats.accepted_at, *[0] * 8], [before] * 8, strict=False):
        assert most <= min(before, drafted) and share == pytest.approx(accepted / most if most else 0.0)
        before = accepted
    assert steps[-1] == (0.0, 0)
    text = str(measured)
    assert f"({steps[0][1]})" in text and "–" in text
    json.dumps(measured.to_dict())


def test_interrupted_rounds_do_not_count():
    measured = diagnosed()
    calm = measured.speeds
    for way in (measured.plain, *measured.timed):
        call = way.calls[0]
        way.calls[0] = replace(call, ends=tuple(end + (n > 5) for n, end in enumerate(call.ends)))
    assert [one.round_seconds for one in measured.speeds] == pytest.approx([one.round_seconds for one in calm])


def test_texts_that_end_at_once_are_left_out_and_counted():
    measured = diagnosed()
    for way in (measured.plain, *measured.timed):
        way.calls[0] = TimedCall(0, (0.05,), (1,))
    assert all(one.prompts == 2 and one.ratio > 0 for one in measured.speeds)
    assert "Left out: 1 text without a second round." in " ".join(str(measured).split())
    for way in (measured.plain, *measured.timed):
        way.calls = [TimedCall(n, (0.05,), (1,)) for n in range(3)]
    with pytest.raises(ConfigurationError, match="all texts ended with their first token"):
        _ = measured.best


def test_the_oracle_drafts_like_full_and_pays_for_the_layers_alone():
    measured = diagnosed()
    assert measured.head_share == pytest.approx((0.03 + 0.005) / (0.004 + 0.03 + 0.001 + 0.005))
    assert measured.oracle == pytest.approx(measured.speeds[0].ratio * 0.055 / 0.020)


# The answer ----------------------------------------------------------------------------------------------------------


def test_the_answer_is_a_sentence_and_a_line():
    measured = diagnosed()
    best = measured.best
    assert measured.pays and measured.is_sure and best.policy == "hybrid" and best.ratio > 1.3
    assert measured.sentence.startswith(f"Use hybrid with chains of {best.steps}: {best.ratio:.2f} times (±")
    assert measured.sentence.endswith(f"measured on 3 prompts with {best.rounds} drafts.")
    expected = f'DynSpecAssistant(drafter, "hybrid", target=target, num_assistant_tokens={best.steps})'
    assert measured.line.splitlines() == ["# loaded with dtype=torch.float32:", expected]
    text = str(measured)
    assert measured.sentence in " ".join(text.split()) and measured.line in text
    assert "drafter: drafter, 9.0M parameters, float32 on cpu" in " ".join(text.split())


@pytest.mark.parametrize(("step", "best"), [(0.0019, "hybrid"), (0.0014, "frequency"), (0.003, "hybrid")])
def test_a_tie_goes_to_the_default(step, best):
    """Of two policies that draft alike, at 2 ms a step with the default one."""
    steps = {"full": 0.006, "frequency": step}
    measured = diagnosed(policies=("full", "frequency", "hybrid"), lengths=(), steps=steps)
    assert max(measured.speeds, key=lambda one: one.ratio).policy == ("frequency" if step < 0.002 else "hybrid")
    assert measured.best.policy == best and f" {best} with chains of 5" in measured.sentence


def test_findings_name_what_was_left_out():
    measured = diagnosed()
    assert (
        "Measured, of 3 prompts: " in str(measured)
        and "--seconds takes more" not in str(measured)
        and "whole vocabulary here" not in str(measured)
    )
    measured.prompts.append(measured.prompts[-1])
    for way in measured.timed:
        way.stats._active_sum, way.stats._draft_steps = 3 * measured.vocabulary["tokens"], 3
    text = " ".join(str(measured).split())
    assert "Measured, of 4 prompts: " in text and "on 3 prompts: --seconds takes more." in text
    assert "The shortlist of hybrid is the whole vocabulary here" in text and "shortlist of full" not in text


@pytest.mark.parametrize(("acceptance", "draft_step"), [(0.05, 0.002), (0.8, 0.02)])
def test_use_none_if_drafting_loses(acceptance, draft_step):
    measured = diagnosed(draft_step, acceptance)
    assert not measured.pays and measured.best.ratio < 1
    assert measured.sentence.startswith("Use none: ") and "Assistant" not in measured.line
    assert (
        "Use none" in str(measured)
        and f"measured on 3 prompts with {measured.best.rounds} drafts" in measured.sentence
    )


def test_use_none_if_nothing_is_accepted():
    """A gain without accepted drafts is chance, or the head product's."""
    measured = diagnosed(0.0001, 0.0)
    measured.plain = TimedSetting("plain generate", None)
    for number in range(3):
        simulate(measured.plain, [False] * 128, lambda steps: 0.02, number)
    assert measured.best.ratio > 1.1 and not measured.pays
    assert measured.sentence.startswith("Use none: hardly any draft is accepted.")
    assert f"the {measured.best.ratio:.2f} times of plain generate's speed come from no draft" in measured.sentence


@pytest.mark.parametrize("few", [{"prompts": 1}, {"prompts": 2, "length": 20}], ids=["one prompt", "few drafts"])
def test_few_drafts_make_nothing_sure(few):
    measured = diagnosed(**few)
    assert measured.pays and not measured.is_sure
    assert measured.sentence.startswith("Try hybrid") and "would make that surer" in measured.sentence


def test_a_policy_with_settings_can_be_pasted():
    measured = diagnosed(policies=("full", "frequency:size=1024"))
    shown = str(measured).splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("from "))
    assert ast.dump(ast.parse("\n".join(shown[start:]))) == ast.dump(ast.parse(measured.line))
    passed = {}

    def assistant(drafter, policy, **settings):
        passed.update(settings, policy=policy)

    # The user has the models, and what the documentation imports.
    exec(measured.line, {"DynSpecAssistant": assistant, "drafter": "drafter", "target": "target"})
    policy = passed.pop("policy")
    assert policy.settings() == FrequencyShortlist(size=1024).settings()
    assert passed == {"target": "target", "num_assistant_tokens": measured.best.steps}


def test_a_policy_is_written_in_python_as_it_was_named():
    texts = ["full", "frequency:ranking=/data/made/rank,size=3"]
    before, argument = policy_in_python("frequency:ranking=made/rank,size=3", texts)
    assert before and argument == f"parse_policy({texts[1]!r})"
    assert policy_in_python("screen", texts) == ("", '"screen"')
    assert policy_in_python(OWN_POLICY, {OWN_POLICY: FullShortlist()}) == ("", OWN_POLICY)


def test_tables_fit_80_columns():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(diagnosed(policies=POLICIES, tree="default"))
    shown = capture.get()
    assert max(map(len, shown.splitlines())) <= 80
    for name in POLICIES:
        assert shown.count(f"│ {name} ") >= 2


def test_a_head_product_that_wins_nothing_is_not_credited():
    measured = diagnosed()
    for seconds, said in ((0.010, "would make plain generate 1.10 times"), (0.012, "would not make plain generate")):
        measured.head_product = TimedSetting("head product", None)
        simulate(measured.head_product, [False] * 128, lambda steps, one=seconds: one, 0)
        assert said in " ".join(str(measured).split())


# Measuring -----------------------------------------------------------------------------------------------------------


def test_domains_take_turns():
    prompts = [WorkloadPrompt(f"{domain}/{n}", domain, "x") for domain in ("a", "b") for n in range(2)]
    assert [one.identifier for one in by_turns(prompts)] == ["a/0", "b/0", "a/1", "b/1"]


@pytest.mark.parametrize(("longest", "lengths"), [(3, (1, 2, 3)), (4, (1, 2, 4)), (8, (2, 5, 8)), (20, (5, 12, 20))])
def test_three_lengths_are_measured(longest, lengths):
    assert DoctorSettings(num_assistant_tokens=longest).lengths == lengths


def test_the_seconds_are_kept_however_slow_the_models_are(given, monkeypatch):
    """Each forward of the target takes as long as that of a large model: every part of a measurement is cut, warm-ups
    and profiles too."""
    target, forward = given["target"], type(given["target"]).forward

    def slow(self, *args, **kwargs):
        if self is target:
            time.sleep(0.05)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", slow)
    began = time.monotonic()
    diagnosis = diagnose_pair(
        DoctorSettings(seconds=3.0, max_new_tokens=128), DynSpecAssistant, fast_target_head=False, **given
    )
    assert time.monotonic() - began < 3.0 + 9.0
    # Every policy has a prompt, and none is left out.
    assert {one.policy for one in diagnosis.speeds} == {"full", "hybrid", "frequency", "in_context", "screen"}
    assert diagnosis.speeds and diagnosis.sentence
    for note in diagnosis.notes:
        assert "--seconds has no time for it" in note or "something else" in note


def test_other_work_on_the_computer_is_noted(given, monkeypatch):
    def diagnose() -> Diagnosis:
        settings = DoctorSettings(policies=["full"], tree=None, max_new_tokens=16, seconds=0.1)
        return diagnose_pair(settings, DynSpecAssistant, **given)

    # A thread without processor time is not told.
    monkeypatch.setattr(time, "thread_time", lambda: 0.5 * time.monotonic())
    disturbed = diagnose()
    assert "50% of the time went to something else" in str(disturbed)
    monkeypatch.setattr(time, "thread_time", time.monotonic)
    assert "something else" not in str(diagnose())
    assert disturbed.to_dict()["notes"] == disturbed.notes


def test_an_assistant_is_diagnosed_and_stays_as_it_was(target, drafter):
    own, bound = FrequencyShortlist(size=64), vars(target).get("generate")
    assistant = DynSpecAssistant(drafter, own, target=target, tokenizer=TOKENIZER, num_assistant_tokens=4)
    inputs = TOKENIZER(TEXTS[0], return_tensors="pt")
    before = target.generate(**inputs, assistant_model=assistant, max_new_tokens=12)
    parameters = [*target.parameters(), *drafter.parameters()]
    weights = [one.clone() for one in parameters]
    stats, policy, steps = assistant.stats, assistant.policy, assistant.generation_config.num_assistant_tokens
    drafters = drafter.generation_config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    activities, tree = [], TreeConfig(8, 2, 3)
    diagnosis = assistant.diagnose(
        TEXTS,
        report=lambda activity, done, total: activities.append(activity),
        seconds=5,
        max_new_tokens=16,
        tree=tree,
        num_assistant_tokens=4,
    )
    assert torch.equal(torch.rand(1), expected)
    assert (assistant.stats, assistant.policy, assistant.target) == (stats, policy, target)
    assert assistant.generation_config.num_assistant_tokens == steps
    assert drafter.generation_config.to_dict() == drafters
    assert all(map(torch.equal, parameters, weights))
    assert torch.equal(target.generate(**inputs, assistant_model=assistant, max_new_tokens=12), before)
    assert list(diagnosis.policies) == [*POLICIES, OWN_POLICY] and diagnosis.policies[OWN_POLICY] is own
    shapes = [(one.policy, one.steps, one.tree) for one in diagnosis.speeds]
    compared = [(policy, 2, None) for policy in diagnosis.policies]
    best = shapes[-1][0]
    assert shapes == [*compared, (best, 1, None), (best, 4, None), (best, 3, tree)]
    assert diagnosis.measured_prompts == 2 and activities[-1] == "done"
    assert set(diagnosis.profiles["full"]) == {*SECTIONS, "other"}
    assert diagnosis.sentence in " ".join(str(diagnosis).split())
    assistant.unbind()
    assert vars(target).get("generate") is bound


def test_every_policy_of_an_assistant_that_chooses_is_diagnosed():
    frequent = FrequencyShortlist(size=64)
    own = AutomaticShortlist([HybridShortlist(), frequent, FullShortlist()])
    policies = measure._with_own(own)
    assert list(policies) == [*POLICIES, f"{OWN_POLICY}.policies[1]"]
    assert policies[f"{OWN_POLICY}.policies[1]"] is frequent


@pytest.mark.parametrize("settings", [DoctorSettings, CoverageSettings, TraceSettings])
def test_a_policy_that_chooses_by_the_clock_is_not_measured_as_one(settings):
    with pytest.raises(ConfigurationError, match="'auto' chooses by the clock from hybrid, screen"):
        made = settings(policies={"chosen": AutomaticShortlist()})
        made.policies_by_domain(["code"])


def test_a_drafter_that_is_never_right_is_of_no_use(given, undisturbed):
    target, bound = given["target"], vars(given["target"]).get("generate")
    settings = DoctorSettings(policies=("full",), tree=None, num_assistant_tokens=3, max_new_tokens=24, seconds=1)
    diagnosis = diagnose_pair(settings, DynSpecAssistant, **{**given, "drafter": tiny(seed=9)})
    assert max(share for share, _ in diagnosis.acceptance(diagnosis.timed[0])) < 0.2
    assert not diagnosis.pays and diagnosis.sentence.startswith("Use none")
    assert vars(target).get("generate") is bound


def test_default_policies_that_a_pair_cannot_have_are_left_out(given, monkeypatch):
    def refuse(self, vocabulary, memory=None):
        raise ConfigurationError("not with this drafter")

    monkeypatch.setattr(type(as_policy("screen")), "start", refuse)
    settings = DoctorSettings(tree=None, num_assistant_tokens=3, max_new_tokens=8, seconds=5)
    diagnosis = diagnose_pair(settings, DynSpecAssistant, **given)
    assert "screen" not in diagnosis.policies and "hybrid" in diagnosis.policies
    assert "screen was left out: not with this drafter" in diagnosis.notes
    assert "Note: screen was left out" in str(diagnosis)
    with pytest.raises(ConfigurationError, match="not with this drafter"):
        diagnose_pair(replace(settings, policies=("screen",)), DynSpecAssistant, **given)


# The command ---------------------------------------------------------------------------------------------------------


def invoke(*words: object):
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def test_the_command_from_end_to_end(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "doctor.json"
    words = ["--target", POCKET / "target", "--drafter", POCKET / "drafter", "--prompts", POCKET / "prompts.jsonl"]
    words += ["--limit", 2, "--policy", "hybrid", "--tree", "8/2/3", "--num-assistant-tokens", 4]
    words += ["--max-new-tokens", 16, "--seconds", 60, "--threads", 1, "--temperature", 0.8, "--json", file]
    result = invoke(*words)
    assert result.exit_code == 0, result.exception
    written = json.loads(file.read_text(encoding="utf-8"))
    # A console folds long lines between words.
    unfolded = " ".join(result.stdout.split())
    assert " ".join(written["line"].split()) in unfolded and written["sentence"] in unfolded
    assert written["settings"]["temperature"] == 0.8 and written["settings"]["tree"] == "8/2/3"
    assert list(written["policies"]) == ["full", "hybrid"] == [one["policy"] for one in written["measured"][:2]]
    assert [(one["steps"], one["tree"] is None) for one in written["measured"]] == [
        *((steps, True) for steps in (2, 2, 1, 4)),
        (3, False),
    ]
    assert written["best"] == max(written["measured"][1:], key=lambda one: one["ratio"])
    assert [len(one["by_step"]) for one in written["acceptance"]] == [2, 2, 1, 4]
    assert 0 < written["head_share"] < 1 and len(written["prompts"]) == 2
    assert written["provenance"]["command"][:3] == ["hf-dynspec", "doctor", "--target"]
    assert str(POCKET.parent) not in file.read_text(encoding="utf-8")
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--target", "nowhere"), "There is no folder nowhere here"),
        (("--target", "nowhere", "--policy", "full"), "name the drafter"),
        (("--drafter", "nowhere"), "name the target"),
        (("--target", "nowhere", "--drafter", "x", "--eagle", "y"), "name a drafter or an EAGLE head, not both"),
        (("--target", "nowhere", "--drafter", "x"), "nowhere"),
        (("--target", "nowhere", "--drafter", "x", "--prompts", "none.jsonl"), "none.jsonl"),
        (("--target", "nowhere", "--drafter", "x", "--policy", "best"), "there is no policy 'best'"),
        (("--target", "nowhere", "--drafter", "x", "--tree", "tall"), "total_tokens/depth/top_k"),
        (("--target", "nowhere", "--drafter", "x", "--temperature", -1), "temperature must be"),
        (("--target", "nowhere", "--drafter", "x", "--seconds", 0), "seconds must be"),
        (("--target", "nowhere", "--drafter", "x", "--num-assistant-tokens", 2), "--num-assistant-tokens must be"),
        (("--target", "nowhere", "--drafter", "x", "--json", "none/x.json"), "--json takes a file"),
    ],
)
def test_bad_input_is_refused_before_models_are_loaded(words, problem):
    result = invoke(*words)
    assert result.exit_code != 0
    assert problem in str(result.exception)


def test_without_a_drafter_it_says_what_can_draft(tmp_path):
    results = tmp_path / "ways.json"
    result = invoke("--target", POCKET / "target", "--json", results)
    assert result.exit_code == 0, result.output
    ways = {way["drafter"]: way["why_not"] for way in json.loads(results.read_text())["ways"]}
    assert [drafter for drafter, why_not in ways.items() if why_not is None] == [
        "a small model with the same tokenizer",
        "an EAGLE head",
    ]
    assert "has no multi-token-prediction layers" in ways["its own MTP layers"]
    assert "Batches and graphs: yes" in result.output and "Trees: yes" in result.output
    mamba = MambaForCausalLM(MambaConfig(vocab_size=301, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedError, match="read one by one"):
        ways_to_draft(mamba.eval(), "mamba")


def test_an_assistant_without_a_target_or_a_tokenizer_is_refused(target, drafter):
    with pytest.raises(NotBoundError, match="bind"):
        DynSpecAssistant(drafter, tokenizer=TOKENIZER).diagnose()
    assistant = DynSpecAssistant(drafter, target=target, tokenizer=TOKENIZER)
    assistant._tokenizer = None
    with pytest.raises(ConfigurationError, match="tokenizer"):
        assistant.diagnose()
    assistant.unbind()


@pytest.mark.parametrize("prompts", ["def read_csv(path):", ["def read_csv(path):", 3]], ids=["a text", "a number"])
def test_prompts_that_are_no_list_of_texts_are_refused(prompts, target, drafter, monkeypatch):
    """A text by itself would be measured letter by letter."""
    monkeypatch.setattr(measure, "diagnose_pair", lambda *_, **__: pytest.fail("measured"))
    assistant = DynSpecAssistant(drafter, target=target, tokenizer=TOKENIZER)
    with pytest.raises(ConfigurationError, match="prompts must be a list of texts"):
        assistant.diagnose(prompts)
    assistant.unbind()
