"""Coverage of shortlists: the target's probability mass on them, and the acceptance that follows from it.

Measured teacher-forced, without drafting: the target writes a continuation of each prompt, both models read it, and
every policy is led along it round by round, as in a session. So all policies are compared on the same text, and chance
in a run of `generate` is computed instead: see `rounds.RoundsAlongText`. Prompts and texts are still a sample, but the
same for all policies, so that a comparison prompt by prompt is sharper than the standard errors of each policy.
"""

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from transformers import PreTrainedModel

from ...assistant import DynSpecAssistant
from ...drafters import Drafter
from ...fields import SettingError
from ...protocol import VocabularyInfo
from ...shortlists import ShortlistPolicy, ShortlistState
from ..pair import INTERRUPTION, Pair, generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt, read_workload
from ..settings import MTP
from .result import CoverageResult, DepthCoverage, TextCoverage
from .rounds import RoundFigures, RoundsAlongText, learns_from_verdicts
from .settings import CoverageSettings
from .teacher_forcing import ForcedText, first_draft


def measure_coverage(
    settings: CoverageSettings,
    *,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    only: Collection[str] | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
    save: Callable[[CoverageResult], None] = lambda result: None,
) -> CoverageResult:
    """Measure what the policies cover on the target's own continuations of the prompts.

    Settings, prompts and the policies of every domain are checked before any model is loaded. The target's logits of
    one text are held in memory, `max_new_tokens` rows.

    Args:
        settings: what to measure.
        target, drafter, tokenizer, prompts: used instead of what the settings name, see `open_pair`.
        only: measure on the prompts with these identifiers, and find on each what all together would find, unless
            policies' states are kept from prompt to prompt (None: on all).
        report: called before each text with its prompt's identifier, how many are done and how many there are.
        save: called after each text and at the end, so that a killed process loses one text at most.

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
    eagle = [settings.eagle] if settings.eagle and drafter is None else []
    reads_target = (
        drafter.reads if isinstance(drafter, Drafter) else eagle or (drafter is None and settings.drafter == MTP)
    )
    if reads_target and settings.max_new_tokens < 3:
        raise SettingError(
            "max_new_tokens",
            "must be at least 3 for an EAGLE head or MTP layers, which draft neither the first token of a text nor "
            f"the last, got {settings.max_new_tokens}",
        )
    given = {"eagle": eagle, "allow_pickle": settings.allow_pickle}
    with open_pair(settings, target, drafter, tokenizer, prompts, **given) as pair:
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
                identifier = pair.prompts[number % len(pair.prompts)].identifier
                if only is None or identifier in only:
                    report(identifier, number, texts)
                    measurement.take(number)
                    save(result)
            report("done", texts, texts)
            result.finished = utc_now()
        except KeyboardInterrupt:
            result.notes.append(INTERRUPTION)
        finally:
            measurement.close_states()
    save(result)
    return result


class _Measurement:
    """Measures text by text and extends a result. Raises as `measure_coverage`."""

    def __init__(self, result: CoverageResult, pair: Pair):
        self._result, self._settings, self._pair = result, result.settings, pair
        (self._drafter,) = pair.drafters.values()
        policies = {id(one): one for of_domain in result.policies.values() for one in of_domain.values()}
        self._vocabularies = {key: _vocabulary(pair, self._drafter, one) for key, one in policies.items()}
        self._vocabulary = next(iter(self._vocabularies.values()))
        size, recall_k = self._vocabulary.size, self._settings.recall_k
        if recall_k > size:
            raise SettingError("recall_k", f"must be at most the size of the vocabulary, {size:,}, got {recall_k:,}")
        # By label, policy and draw: a state, and how many tokens it has observed.
        self._states: dict[tuple[str, int, int | None], tuple[ShortlistState, int]] = {}
        self._started: list[ShortlistState] = []
        self._learners = {key for key, one in policies.items() if learns_from_verdicts(self._start(one))}
        self.close_states()
        # Greedy decoding leaves nothing to chance.
        self._is_drawn = bool(self._learners) and self._settings.temperature > 0
        if self._settings.draws > 1 and not self._is_drawn:
            result.notes.append("nothing is drawn, however many draws: no policy learns from verdicts")
        self._needs = reduce(or_, (policy.needs for policy in policies.values()))

    @torch.no_grad()
    def take(self, number: int) -> None:
        """Measure on one text. `number` counts the first continuations of all prompts, then the second ones, and so
        on."""
        settings, pair = self._settings, self._pair
        continuation, index = divmod(number, len(pair.prompts))
        if index == 0 or not settings.stream:
            self.close_states()
        prompt, prompt_ids = pair.prompts[index], pair.encoded[index]
        token_ids, seeds = self._text(number, prompt_ids)
        if token_ids.shape[0] - first_draft(self._drafter, len(prompt_ids)) < 2:
            which = f"text {continuation + 1} of " if settings.continuations > 1 else ""
            problem = "was left out: the target ends it before there is anything to draft"
            self._result.notes.append(f"{which}{prompt.identifier} {problem}")
            return
        models = pair.target, self._drafter
        text = ForcedText(*models, token_ids, len(prompt_ids), self._vocabulary, settings, self._needs)
        expected: dict[str, RoundFigures] = {}
        drawn: dict[str, RoundFigures] = {}
        along: list[RoundsAlongText] = []
        for label, by_domain in self._result.policies.items():
            policy = by_domain[prompt.domain]
            if id(policy) not in self._learners:
                expected[label] = RoundFigures(settings.num_assistant_tokens)
                along.append(self._rounds(text, label, policy, expected[label]))
            if self._is_drawn or label not in expected:
                drawn[label] = RoundFigures(settings.num_assistant_tokens, settings.draws)
                along += [self._rounds(text, label, policy, drawn[label], *one) for one in enumerate(seeds)]
        # The oracle's mass for sizes that are powers of two, and for the whole head.
        largest = pair.target.get_output_embeddings().weight.shape[0]
        sizes = [*(2**power for power in range((largest - 1).bit_length())), largest]
        oracle = torch.zeros(len(sizes), dtype=torch.float64)
        for starts in text.blocks():
            oracle += text.oracle(starts)[:, [size - 1 for size in sizes]].double().sum(0).cpu()
            for rounds in along:
                rounds.follow(starts)
        where, draws = (prompt.identifier, continuation, prompt.domain), settings.draws if self._is_drawn else 0
        of_drawn = {label: _row(where, label, draws, figures) for label, figures in drawn.items()}
        rows = of_drawn | {label: _row(where, label, 0, figures) for label, figures in expected.items()}
        # All policies at once, so that an interrupt leaves a prompt out of all of them.
        self._result.measured += [rows[label] for label in self._result.policies]
        self._result.drawn += of_drawn.values() if self._is_drawn else []
        masses = oracle / (token_ids.shape[0] - len(prompt_ids))
        self._result.oracle_curves[prompt.identifier, continuation] = list(zip(sizes, masses.tolist(), strict=True))

    def close_states(self) -> None:
        """Close the policies' states: a text or a stream ends."""
        self._states.clear()
        while self._started:
            self._started.pop().close()

    def _text(self, number: int, prompt_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
        """A prompt with its continuation, int64 `[n]`, and the seeds of the draws along it."""
        target, settings = self._pair.target, self._settings
        input_ids = torch.tensor([prompt_ids], device=target.device)
        torch.manual_seed(settings.seed + number)
        config = generation_config(target, settings.max_new_tokens, settings.temperature)
        text = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        # Not the seed of the text, or the same draws would decide both the tokens and whether drafts are accepted.
        return text[0], [int(torch.randint(2**31, ())) for _ in range(settings.draws)]

    def _rounds(
        self,
        text: ForcedText,
        label: str,
        policy: ShortlistPolicy,
        figures: RoundFigures,
        draw: int | None = None,
        seed: int | None = None,
    ) -> RoundsAlongText:
        """The rounds of one policy along a text, none of which has begun."""
        key = (label, id(policy), draw)
        state, offset = self._states.get(key) or (self._start(policy), 0)
        if offset:
            # Like a turn of a conversation that has nothing in common with the one before.
            state.resume(torch.empty(0, dtype=torch.int64, device=self._vocabulary.device))
        self._states[key] = state, offset + text.token_ids.shape[0]
        return RoundsAlongText(state, policy.needs, text, figures, seed, offset)

    def _start(self, policy: ShortlistPolicy) -> ShortlistState:
        self._started.append(policy.start(self._vocabularies[id(policy)]))
        return self._started[-1]


def _row(where: tuple[str, int, str], label: str, draws: int, figures: RoundFigures) -> TextCoverage:
    by_depth = tuple(DepthCoverage(**values) for values in figures.by_depth())
    return TextCoverage(*where, label, draws, **figures.overall(), by_depth=by_depth)


def _vocabulary(pair: Pair, drafter: Drafter, policy: ShortlistPolicy) -> VocabularyInfo:
    """The vocabulary that a policy gets in a session. Refuses what an assistant of these models refuses."""
    assistant = DynSpecAssistant(drafter, policy, target=pair.target, tokenizer=pair.tokenizer)
    try:
        eos = assistant.scored_eos_token_ids(pair.target.generation_config)
        return assistant.take_session(eos).vocabulary
    finally:
        assistant.unbind()
