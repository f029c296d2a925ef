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

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from transformers import PreTrainedModel

from ...assistant import DynSpecAssistant
from ...drafters import Drafter, EagleDrafter
from ...fields import SettingError
from ...protocol import VocabularyInfo
from ...shortlists import ShortlistPolicy
from ..pair import INTERRUPTION, Pair, generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt, read_workload
from .courses import Courses, States
from .result import CoverageResult, DepthCoverage, TextCoverage
from .rounds import RoundFigures, RoundsAlongText
from .settings import CoverageSettings
from .teacher_forcing import ForcedText, Rows, first_draft


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

    Settings, prompts and the policies of every domain are checked before any model is loaded. A text may be of any
    length: full-vocabulary rows are held for `teacher_forcing.CHUNK + num_assistant_tokens` positions at a time, in
    fp32, three of them for each. Of an EAGLE head, which says something else in every round, there are
    `num_assistant_tokens` rows for each position; fewer positions are read at a time, so that the rows read are as
    many.

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
    prompts = read_workload(settings.prompts, settings.limit) if prompts is None else list(prompts)
    policies = settings.policies_by_domain(list(dict.fromkeys(prompt.domain for prompt in prompts)))
    head = {"eagle": [settings.eagle] if settings.eagle and drafter is None else []}
    if head["eagle"] or isinstance(drafter, EagleDrafter):
        _require_drafts(settings)
    with open_pair(settings, target, drafter, tokenizer, prompts, **head, allow_pickle=settings.allow_pickle) as pair:
        result = CoverageResult(
            settings=settings,
            policies=policies,
            prompts=pair.described_prompts(),
            models=pair.described_models(),
            threads=torch.get_num_threads(),
            started=utc_now(),
        )
        measurement = _Measurement(result, pair)
        texts = len(pair.prompts) * settings.continuations
        try:
            for number in range(texts):
                report(pair.prompts[number % len(pair.prompts)].identifier, number, texts)
                measurement.take(number)
                save(result)
            report("done", texts, texts)
            result.finished = utc_now()
        except KeyboardInterrupt:
            result.notes.append(INTERRUPTION)
        finally:
            measurement.close()
    save(result)
    return result


def _require_drafts(settings: CoverageSettings) -> None:
    """Refuse texts that leave an EAGLE head nothing to draft."""
    if settings.max_new_tokens < 3:
        raise SettingError(
            "max_new_tokens",
            "must be at least 3 for an EAGLE head, which drafts neither the first token of a text nor the last, got "
            f"{settings.max_new_tokens}",
        )


class _Measurement:
    """Measures text by text, and adds what it finds to a result.

    Raises:
        ConfigurationError: `recall_k` is larger than the vocabulary.
        UnsupportedError: the models cannot be used together.
        ArtifactError: a policy's ranking was made for another tokenizer.
    """

    def __init__(self, result: CoverageResult, pair: Pair):
        self._result, self._settings, self._pair = result, result.settings, pair
        (self._drafter,) = pair.drafters.values()
        policies = _distinct(result.policies)
        vocabularies = _vocabularies(pair, self._drafter, policies)
        self._vocabulary = vocabularies[0]
        if self._settings.recall_k > self._vocabulary.size:
            raise SettingError(
                "recall_k",
                f"must be at most the size of the vocabulary, {self._vocabulary.size:,}, got "
                f"{self._settings.recall_k:,}",
            )
        self._states = States(policies, vocabularies, self._settings.stream)
        # Greedily, nothing is left to chance: the one course of rounds that there can be is what is expected.
        self._is_drawn = bool(self._states.learners) and self._settings.temperature > 0
        if self._settings.draws > 1 and not self._is_drawn:
            result.notes.append("nothing is drawn, however many draws: no policy learns from verdicts")
        self._needs = reduce(or_, (policy.needs for policy in policies))

    @torch.no_grad()
    def take(self, number: int) -> None:
        """Measure on one text; `number` counts the first continuations of all prompts, then the second ones, and so
        on."""
        continuation, index = divmod(number, len(self._pair.prompts))
        if index == 0:
            self._states.close()
        prompt, length = self._pair.prompts[index], len(self._pair.encoded[index])
        token_ids, seeds = self._text(number, self._pair.encoded[index])
        if token_ids.shape[0] - first_draft(self._drafter, length) < 2:
            one = f"text {continuation + 1} of " if self._settings.continuations > 1 else ""
            self._result.notes.append(
                f"{one}{prompt.identifier} was left out: the target ends it before there is anything to draft"
            )
            return
        text = self._forced(token_ids, length)
        courses = {
            label: self._courses(text, label, of_domain[prompt.domain], seeds)
            for label, of_domain in self._result.policies.items()
        }
        curve = _OracleCurve(self._pair.target.get_output_embeddings().weight.shape[0], length)
        for rows in text.rows(keep=self._settings.num_assistant_tokens):
            curve.add(rows)
            for one in courses.values():
                one.follow(rows)
        self._keep(courses, prompt.identifier, continuation, prompt.domain)
        self._result.oracle_curves[prompt.identifier, continuation] = curve.points()
        self._states.end_text()

    def _forced(self, token_ids: torch.Tensor, length: int) -> ForcedText:
        """A text, int64 `[n]`, along which target and drafter are led, whose prompt has `length` tokens."""
        settings = self._settings
        return ForcedText(
            self._pair.target,
            self._drafter,
            token_ids,
            length,
            self._vocabulary,
            settings.temperature,
            max(settings.recall_k, self._needs.verify_top_k, self._needs.prompt_top_k),
            settings.num_assistant_tokens,
            self._needs,
        )

    def _keep(self, courses: Mapping[str, Courses], *where: Any) -> None:
        """Add what was found on one text to the result: `where` is its prompt, continuation and domain."""
        measured, drawn = [], []
        for label, one in courses.items():
            draws = self._settings.draws if self._is_drawn else 0
            measured.append(_row(*where, label, 0 if one.expected else draws, one.figures()))
            if self._is_drawn:
                drawn.append(_row(*where, label, draws, one.drawn_figures()))
        # All policies at once, as they are compared prompt by prompt: an interrupt leaves out none of them.
        self._result.measured.extend(measured)
        self._result.drawn.extend(drawn)

    def close(self) -> None:
        """Give up what policies remember."""
        self._states.close()

    def _text(self, number: int, prompt_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
        """A prompt with its continuation, int64 `[n]`, and the seeds of the draws along it."""
        target, settings = self._pair.target, self._settings
        input_ids = torch.tensor([prompt_ids], device=target.device)
        torch.manual_seed(settings.seed + number)
        config = generation_config(target, settings.max_new_tokens, settings.temperature)
        text = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        # Not the seed of the text, whose draws would decide both the tokens and whether their drafts are accepted.
        return text[0], [int(torch.randint(2**31, ())) for _ in range(settings.draws)]

    def _courses(self, text: ForcedText, label: str, policy: ShortlistPolicy, seeds: list[int]) -> Courses:
        """The courses of rounds of one policy along a text, none of which has begun."""
        settings = self._settings

        def course(draw: int | None) -> RoundsAlongText:
            state, offset = self._states.of(label, policy, draw, text.token_ids.shape[0])
            return RoundsAlongText(
                state,
                policy.needs,
                text,
                settings.num_assistant_tokens,
                settings.recall_k,
                is_greedy=settings.temperature == 0,
                seed=None if draw is None else seeds[draw],
                offset=offset,
            )

        drawn = [course(draw) for draw in range(len(seeds))] if self._is_drawn else []
        if policy not in self._states.learners:
            return Courses(course(None), drawn)
        return Courses(None, drawn or [course(0)])


def _row(prompt: str, continuation: int, domain: str, label: str, draws: int, figures: RoundFigures) -> TextCoverage:
    by_depth = tuple(DepthCoverage(**values) for values in figures.by_depth())
    return TextCoverage(prompt, continuation, domain, label, draws, **figures.overall(), by_depth=by_depth)


def _distinct(policies: Mapping[str, Mapping[str, ShortlistPolicy]]) -> list[ShortlistPolicy]:
    """All policies, each once."""
    return list({id(policy): policy for by_domain in policies.values() for policy in by_domain.values()}.values())


def _vocabularies(pair: Pair, drafter: Drafter, policies: Sequence[ShortlistPolicy]) -> list[VocabularyInfo]:
    """What each policy is told of the vocabulary in a session. Refuses what an assistant of these models refuses."""
    vocabularies = []
    for policy in policies:
        assistant = DynSpecAssistant(drafter, policy, target=pair.target, tokenizer=pair.tokenizer)
        try:
            eos = assistant.scored_eos_token_ids(pair.target.generation_config)
            vocabularies.append(assistant.take_session(eos).vocabulary)
        finally:
            assistant.unbind()
    return vocabularies


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
