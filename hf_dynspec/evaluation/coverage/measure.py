"""What shortlists cover: the target's probability mass on them, and the acceptance that follows from it.

Measured teacher-forced, without drafting: the target writes a continuation of each prompt, both models read it, and
every policy is led along it as in a session, round by round, so that all policies are compared on the same text and
what is a matter of chance in a run of `generate` is computed instead. Given the text, the figures of policies that
learn nothing from verdicts are exact expectations; of the others' it is drawn where their rounds start
(`rounds.RoundsAlongText`). What remains is the choice of prompts and texts. It is the same for all policies, so that
a comparison prompt by prompt is sharper than the standard errors of each.

Papers: DynaSpec (Zhang et al., 2025), section 3.2: acceptance probability (equation 3), acceptance rate (equation 4),
lemmas 1 and 2; expected acceptance length (section 3.1, equation 1, after Leviathan et al., 2023).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ...assistant import DynSpecAssistant
from ...drafters import Drafter, EagleDrafter
from ...errors import ConfigurationError
from ...protocol import VocabularyInfo
from ...shortlists import ShortlistPolicy
from ..pair import INTERRUPTION, Pair, PairSettings, generation_config, is_temperature, open_pair, utc_now
from ..policy_text import shorten_paths
from ..prompts import WorkloadPrompt
from .rounds import RoundsAlongText, expected_acceptance_length
from .teacher_forcing import ForcedText, Rows, first_draft

# What to measure ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoverageSettings(PairSettings):
    """What to measure, and on what. `PairSettings` has the models, policies and prompts.

    Args:
        eagle: folder or Hub id of an EAGLE head for the target, in place of the drafter.
        allow_pickle: read a head that is not in safetensors, as `EagleDrafter.from_pretrained`.
        temperature: of the target and the drafter. At 0 the target decodes greedily and a draft is accepted where the
            two argmaxes agree; masses are then those of the target's distribution at temperature 1.
        recall_k: `k` of Recall@k.
        continuations: texts that the target draws for each prompt. The figures of a prompt are means over its texts.

    Raises:
        ConfigurationError: a setting is out of range, a text is no policy, there are two drafters, or several greedy
            continuations, which would all be one.
    """

    eagle: str | None = None
    allow_pickle: bool = False
    temperature: float = 0.0
    recall_k: int = 10
    continuations: int = 1

    # A text of one token leaves nothing to draft, as the last token of a text never is.
    _LEAST: ClassVar[Mapping[str, int]] = {
        **PairSettings._LEAST,
        "max_new_tokens": 2,
        "recall_k": 1,
        "continuations": 1,
    }

    def __post_init__(self):
        super().__post_init__()
        if not is_temperature(self.temperature):
            raise ConfigurationError(f"temperature must be a number of at least 0, got {self.temperature!r}")
        if self.continuations > 1 and self.temperature == 0:
            raise ConfigurationError(
                f"{self.continuations:,} greedy continuations of a prompt would all be one; set a temperature"
            )
        if self.drafter and self.eagle:
            raise ConfigurationError("name a drafter or an EAGLE head, not both: each is measured by itself")

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        return {**super().to_dict(), "eagle": None if self.eagle is None else shorten_paths(str(self.eagle))}


# What was measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthCoverage:
    """One policy on one text at one draft depth, for a depth that is verified.

    Args:
        depth: how many drafts of the round come before.
        draft_steps: expected number of rounds that draft at this depth.
        positions: expected number of them in which all drafts before were accepted, so that this one is verified.
        size: as for `TextCoverage`, over the draft steps at this depth.
        mass, acceptance: likewise, over its positions.
    """

    depth: int
    draft_steps: float
    positions: float
    size: float
    mass: float
    acceptance: float


@dataclass(frozen=True)
class TextCoverage:
    """One policy on one text, a continuation of a prompt. Means are over the positions that a run verifies and has a
    shortlist for: the accepted drafts of every round and the first that is not accepted. The size's alone is over all
    draft steps, each of which scores a shortlist.

    Counts are expectations over what chance could do along the text, and means are weighted by the same probabilities.
    For policies that learn from verdicts they are those of one draw, and counts are whole.

    Args:
        prompt: the prompt's identifier.
        continuation: which of its texts, from 0.
        domain: the prompt's domain.
        policy: the policy's label.
        draft_steps: expected number of draft steps.
        positions: expected number of positions.
        rounds: expected number of rounds.
        size: mean number of token ids on the shortlist `V_t`, over draft steps, as `bench`'s active vocabulary.
        mass: the target's probability mass on `V_t`, the largest acceptance probability that any drafter can reach
            with it (lemma 1).
        oracle_mass: the mass of the `|V_t|` most probable tokens, the most that a shortlist of that size can have
            (lemma 2).
        recall: share of the target's `recall_k` most probable tokens that `V_t` holds.
        oov: share of positions at which `V_t` does not hold the text's own token.
        acceptance: acceptance probability `Σ_x min(p(x), q(x))`, `q` being the drafter's distribution on `V_t`
            (equation 3).
        acceptance_length: expected tokens per round, the target's own token included, see
            `rounds.expected_tokens`.
        by_depth: from the first draft of a round to the last that is verified.
    """

    prompt: str
    continuation: int
    domain: str
    policy: str
    draft_steps: float
    positions: float
    rounds: float
    size: float
    mass: float
    oracle_mass: float
    recall: float
    oov: float
    acceptance: float
    acceptance_length: float
    by_depth: tuple[DepthCoverage, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error, which is None where there is one prompt."""

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of these values, one for each prompt."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(fmean(values), error)

    @classmethod
    def of_ratio(cls, values: Sequence[float], baseline: Sequence[float]) -> "Estimate":
        """The ratio of the means of two paired lists of values, one pair for each prompt, and its standard error
        (Cochran, 1977, section 2.11): that of the mean of `value - ratio * base`, as a share of the baseline's mean.
        What prompts do to both lists in proportion is not in it."""
        mean = fmean(baseline)
        ratio = fmean(values) / mean
        residuals = cls.of([value - ratio * base for value, base in zip(values, baseline, strict=True)])
        error = None if residuals.standard_error is None else residuals.standard_error / mean
        return cls(ratio, error)


# The figures of texts that are summarised over prompts.
FIGURES = ("size", "mass", "oracle_mass", "recall", "oov", "acceptance", "acceptance_length")
DEPTH_FIGURES = ("size", "mass", "acceptance")


@dataclass(frozen=True)
class DepthSummary:
    """One policy at one draft depth, on those prompts of a domain on which it was verified. Each weighs the same.

    Args:
        depth: as for `DepthCoverage`.
        prompts: how many prompts.
        positions: expected number of positions.
        figures: the names of `DEPTH_FIGURES`.
    """

    depth: int
    prompts: int
    positions: float
    figures: dict[str, Estimate]


@dataclass(frozen=True)
class CoverageSummary:
    """One policy on the prompts of a domain. Every prompt weighs the same; the figures are those of `TextCoverage`.

    Args:
        policy: the policy's label.
        domain: the domain's label; None for all prompts.
        prompts: how many prompts.
        positions: expected number of positions.
        figures: the names of `FIGURES`.
        relative_acceptance_length: the mean acceptance length divided by that of the first policy on the same prompts,
            with the standard error of such a ratio, see `Estimate.of_ratio`.
        expected_acceptance_length: equation 1 for the mean acceptance probability, as if it were the same at all
            positions and drafts were never cut short. `acceptance_length` assumes neither.
        by_depth: from the first draft of a round to the last that was verified on any prompt.
    """

    policy: str
    domain: str | None
    prompts: int
    positions: float
    figures: dict[str, Estimate]
    relative_acceptance_length: Estimate
    expected_acceptance_length: float
    by_depth: list[DepthSummary]


@dataclass
class CoverageResult:
    """Everything that was measured, as far as it was; `coverage.report` shows it.

    Args:
        settings: what was asked for.
        policies: the policies by label, in the order of the table. The others are compared with the first.
        prompts: identifier, domain and number of tokens of each prompt.
        models: what is known of the target and the drafter.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        finished: UTC time; None while the run is not complete.
        notes: what a reader should know, such as a prompt that was left out.
        measured: each policy on each text.
        oracle_curves: by prompt and continuation: pairs of a shortlist size and the mean oracle mass at that size
            (lemma 2), over all tokens of the continuation.
    """

    settings: CoverageSettings
    policies: dict[str, ShortlistPolicy]
    prompts: list[dict[str, Any]]
    models: dict[str, Any]
    threads: int
    started: str
    finished: str | None = None
    notes: list[str] = field(default_factory=list)
    measured: list[TextCoverage] = field(default_factory=list)
    oracle_curves: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        return self.finished is not None

    @property
    def domains(self) -> list[str]:
        """The domains that were measured."""
        return list(dict.fromkeys(one.domain for one in self.measured))

    @property
    def baseline(self) -> str:
        """The label of the policy that the others are compared with: the first."""
        return next(iter(self.policies))

    def summaries(self) -> list[CoverageSummary]:
        """Each policy on all prompts and on those of each domain."""
        summaries = []
        for domain in (None, *self.domains):
            for label in self.policies:
                if rows := self._rows(label, domain):
                    summaries.append(self._summarize(label, domain, rows))
        return summaries

    def _rows(self, label: str, domain: str | None) -> list[TextCoverage]:
        """One policy on each of the texts of a domain, which are the same for all policies."""
        return [one for one in self.measured if one.policy == label and domain in (None, one.domain)]

    def _summarize(self, label: str, domain: str | None, rows: list[TextCoverage]) -> CoverageSummary:
        by_prompt = {name: _by_prompt((row.prompt, getattr(row, name)) for row in rows) for name in FIGURES}
        figures = {name: Estimate.of(values) for name, values in by_prompt.items()}
        lengths = by_prompt["acceptance_length"]
        of_baseline = _by_prompt((row.prompt, row.acceptance_length) for row in self._rows(self.baseline, domain))
        return CoverageSummary(
            policy=label,
            domain=domain,
            prompts=len(lengths),
            positions=sum(row.positions for row in rows),
            figures=figures,
            relative_acceptance_length=Estimate.of_ratio(lengths, of_baseline),
            expected_acceptance_length=expected_acceptance_length(
                figures["acceptance"].mean, self.settings.num_assistant_tokens
            ),
            by_depth=_summarize_depths(rows),
        )

    def oracle_curve(self) -> list[tuple[int, float]]:
        """Pairs of a shortlist size and the mean oracle mass at that size, over prompts."""
        sizes = [size for size, _ in next(iter(self.oracle_curves.values()), [])]
        masses = [
            _by_prompt((prompt, curve[index][1]) for (prompt, _), curve in self.oracle_curves.items())
            for index in range(len(sizes))
        ]
        return list(zip(sizes, map(fmean, masses), strict=True))


def _by_prompt(values: Iterable[tuple[str, float]]) -> list[float]:
    """The mean of each prompt's texts, which are too alike to count as so many prompts.

    Args:
        values: of each text: its prompt and a figure.
    """
    of_prompt: dict[str, list[float]] = {}
    for prompt, value in values:
        of_prompt.setdefault(prompt, []).append(value)
    return list(map(fmean, of_prompt.values()))


def _summarize_depths(rows: list[TextCoverage]) -> list[DepthSummary]:
    summaries = []
    for depth in range(max(len(row.by_depth) for row in rows)):
        parts = [(row.prompt, row.by_depth[depth]) for row in rows if depth < len(row.by_depth)]
        by_prompt = {
            name: _by_prompt((prompt, getattr(part, name)) for prompt, part in parts) for name in DEPTH_FIGURES
        }
        figures = {name: Estimate.of(values) for name, values in by_prompt.items()}
        prompts = len(by_prompt[DEPTH_FIGURES[0]])
        summaries.append(DepthSummary(depth, prompts, sum(part.positions for _, part in parts), figures))
    return summaries


# The run -----------------------------------------------------------------------------------------------------------


def measure_coverage(
    settings: CoverageSettings,
    *,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
    save: Callable[[CoverageResult], None] = lambda result: None,
) -> CoverageResult:
    """Measure what the policies cover on the target's own continuations of the prompts.

    Settings and prompts are checked before any model is loaded. A text may be of any length: full-vocabulary rows are
    held for `teacher_forcing.CHUNK + num_assistant_tokens` positions at a time, in fp32, three of them for each. Of an
    EAGLE head, which says something else in every round, there are `num_assistant_tokens` rows for each position;
    fewer positions are read at a time, so that the rows read are as many.

    Args:
        settings: what to measure.
        target: the loaded model, in place of the one that the settings name; likewise the next three.
        drafter: the loaded small model or EAGLE head.
        tokenizer: the tokenizer of both.
        prompts: prompts that are not read from files.
        report: called before each text with its prompt's identifier, how many are done and how many there are.
        save: called after each text and at the end, to keep what was measured even if the process is killed.

    Returns:
        The result. After an interrupt from the keyboard, what was measured until then.

    Raises:
        ConfigurationError: a setting is out of range, or a model cannot be loaded.
        WorkloadError: the prompts cannot be read or are too long.
        UnsupportedError: the models cannot be used together.
        ArtifactError: a policy's ranking was made for another tokenizer.
    """
    head = {"eagle": [settings.eagle] if settings.eagle and drafter is None else []}
    if head["eagle"] or isinstance(drafter, EagleDrafter):
        _require_drafts(settings)
    with open_pair(settings, target, drafter, tokenizer, prompts, **head, allow_pickle=settings.allow_pickle) as pair:
        result = CoverageResult(
            settings=settings,
            policies=pair.policies,
            prompts=pair.described_prompts(),
            models=pair.described_models(),
            threads=torch.get_num_threads(),
            started=utc_now(),
        )
        (own_drafter,) = pair.drafters.values()
        vocabulary = _vocabulary(pair, own_drafter)
        if settings.recall_k > vocabulary.size:
            raise ConfigurationError(
                f"recall_k must be at most the size of the vocabulary, {vocabulary.size:,}, got {settings.recall_k:,}"
            )
        texts = len(pair.prompts) * settings.continuations
        try:
            for number in range(texts):
                report(pair.prompts[number % len(pair.prompts)].identifier, number, texts)
                _measure_text(result, pair, own_drafter, vocabulary, number)
                save(result)
            report("done", texts, texts)
            result.finished = utc_now()
        except KeyboardInterrupt:
            result.notes.append(INTERRUPTION)
    save(result)
    return result


def _require_drafts(settings: CoverageSettings) -> None:
    """Refuse texts that leave an EAGLE head nothing to draft."""
    if settings.max_new_tokens < 3:
        raise ConfigurationError(
            "max_new_tokens must be at least 3 for an EAGLE head, which drafts neither the first token of a text nor "
            f"the last, got {settings.max_new_tokens}"
        )


def _vocabulary(pair: Pair, drafter: Drafter) -> VocabularyInfo:
    """What a session's policies are told of the vocabulary. Refuses what an assistant of these models refuses."""
    for policy in pair.policies.values():
        assistant = DynSpecAssistant(drafter, policy, target=pair.target, tokenizer=pair.tokenizer)
        try:
            eos = assistant.scored_eos_token_ids(pair.target.generation_config)
            vocabulary = assistant.take_session(eos).vocabulary
        finally:
            assistant.unbind()
    return vocabulary


@torch.no_grad()
def _measure_text(
    result: CoverageResult, pair: Pair, drafter: Drafter, vocabulary: VocabularyInfo, number: int
) -> None:
    """Measure on one text; `number` counts the first continuations of all prompts, then the second ones, and so on."""
    continuation, index = divmod(number, len(pair.prompts))
    settings, prompt = result.settings, pair.prompts[index]
    prompt_ids = torch.tensor([pair.encoded[index]], device=pair.target.device)
    torch.manual_seed(settings.seed + number)
    config = generation_config(pair.target, settings.max_new_tokens, settings.temperature)
    token_ids = pair.target.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), generation_config=config)
    if token_ids.shape[1] - first_draft(drafter, prompt_ids.shape[1]) < 2:
        left_out = (
            prompt.identifier if settings.continuations == 1 else f"text {continuation + 1} of {prompt.identifier}"
        )
        result.notes.append(f"{left_out} was left out: the target ends it before there is anything to draft")
        return
    # Not the seed of the text, whose draws would then decide both the tokens and whether their drafts are accepted.
    seed = int(torch.randint(2**31, ()))
    needs = [policy.needs for policy in pair.policies.values()]
    text = ForcedText(
        pair.target,
        drafter,
        token_ids[0],
        prompt_ids.shape[1],
        vocabulary,
        settings.temperature,
        max(settings.recall_k, *(most for need in needs for most in (need.verify_top_k, need.prompt_top_k))),
        settings.num_assistant_tokens,
    )
    drafted, is_greedy = settings.num_assistant_tokens, settings.temperature == 0
    rounds_of = {
        label: RoundsAlongText(policy, vocabulary, text, drafted, settings.recall_k, is_greedy, seed)
        for label, policy in pair.policies.items()
    }
    curve = _OracleCurve(pair.target.get_output_embeddings().weight.shape[0], text.prompt_length)
    for rows in text.rows(keep=drafted):
        curve.add(rows)
        for rounds in rounds_of.values():
            rounds.follow(rows)
    measured = []
    for label, rounds in rounds_of.items():
        by_depth = tuple(DepthCoverage(**figures) for figures in rounds.figures_by_depth())
        figures = rounds.figures()
        measured.append(
            TextCoverage(prompt.identifier, continuation, prompt.domain, label, **figures, by_depth=by_depth)
        )
    # All policies at once, as they are compared prompt by prompt: an interrupt leaves out none of them.
    result.measured.extend(measured)
    result.oracle_curves[prompt.identifier, continuation] = curve.points()


class _OracleCurve:
    """Mean mass of the target's `k` most probable tokens, for `k` in powers of two and for all of them."""

    def __init__(self, largest: int, first: int):
        self._sizes = [*(2**power for power in range((largest - 1).bit_length())), largest]
        self._sum = torch.zeros(len(self._sizes), dtype=torch.float64)
        self._count = 0
        self._next = first

    def add(self, rows: Rows) -> None:
        """Take in the rows that were not there before."""
        new = rows.between(self._next, rows.end).oracle
        self._sum += new[:, [size - 1 for size in self._sizes]].double().sum(0).cpu()
        self._count += new.shape[0]
        self._next = rows.end

    def points(self) -> list[tuple[int, float]]:
        return list(zip(self._sizes, (self._sum / self._count).tolist(), strict=True))
