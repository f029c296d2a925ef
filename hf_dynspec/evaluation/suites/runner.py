"""The runner of evaluations and benchmarks: every system generates on every prompt, and each result is a line.

Systems take turns on every prompt, so that other work on the computer slows all of them alike. The timed part is
`target.generate`, prompt included. Profiles and coverage are measured in calls of their own, as measuring takes time.
What to expect of a policy is computed along texts that the target writes, the same for all policies.

In an evaluation, what a policy or an aligned drafter learns is forgotten where the suite says so. Such a stretch of
prompts is run by one process and from its beginning, so that results depend neither on where a run was stopped nor on
the number of processes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ...stats import DraftingStatistics, Stopwatch
from ...vocabulary import as_token_ids
from ..bench.systems import COMPILED, System, open_systems
from ..coverage.measure import measure_coverage
from ..coverage.result import CoverageResult
from ..coverage.settings import CoverageSettings
from ..pair import INDEPENDENT, Pair, generation_config, open_pair, room_for_prompt, utc_now
from ..prompts import WorkloadError, WorkloadPrompt
from ..provenance import provenance
from ..settings import SystemsSettings
from .data import streams, suite_named
from .dialogue import Dialogue, require_room
from .methods import make_policies
from .paper_tables import LEAST_TOKENS
from .runs import COVERAGE, EXPECTED, PROFILE, SESSION, TIMED, Key, RunFolder, RunMemory
from .settings import SuiteSettings

_WARM_UP_TOKENS = 16
# The settings that this and `measure_coverage` have in common, and the figures of the latter in lines.
_OF_BOTH = ("max_new_tokens", "num_assistant_tokens", "chat_template", "max_prompt_tokens", "threads", "seed")
_EXPECTED = ("domain", "draws", "positions", "size", "mass", "oracle_mass", "recall", "acceptance_length")
# Rounds drawn along each text, if a policy learns from verdicts and there is something to draw.
_DRAWS = 4
# The attribute of an assistant that is set for lines of a kind.
_SWITCHES = {PROFILE: "profile", COVERAGE: "measure_coverage"}


@dataclass(frozen=True)
class Share:
    """Which of several processes this is."""

    index: int = 0  # from 0; the first puts the results together
    count: int = 1  # how many there are
    wait: Callable[[], None] = lambda: None  # waits for all of them

    @property
    def is_first(self) -> bool:
        """Whether this one puts the results together."""
        return self.index == 0

    def of(self, units: Sequence[Any]) -> Sequence[Any]:
        """Those of some units of work that are this process's."""
        return units[self.index :: self.count]


def run_suite(
    settings: SuiteSettings,
    folder: RunFolder,
    prompts: Sequence[WorkloadPrompt],
    *,
    share: Share = Share(),
    command: Sequence[str] | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
    go_on: Callable[[int], None] = lambda done: None,
) -> bool:
    """Run what the folder lacks. Everything but the models is checked before they are loaded, and where nothing is
    lacking they are not.

    Args:
        settings: what to run.
        folder: where lines are written, and what an earlier run of the same settings left.
        prompts: of the suite.
        share: which part of it this process runs.
        command: the words of the command line, for the record.
        report: called between generations with what is being done, how many of this process's are done, and how many
            there are.
        go_on: called before models are loaded with how many lines an earlier run has left that was stopped; only where
            there are some, and by the first process.

    Returns:
        Whether something was lacking.

    Raises:
        ConfigurationError: the folder holds something else, or a model or head cannot be loaded.
        WorkloadError: a conversation is too long for the models.
        UnsupportedError: the models cannot be used together.
    """
    policies = make_policies(settings.resolved_methods(), list(dict.fromkeys(one.domain for one in prompts)))
    identifiers = [prompt.identifier for prompt in prompts]
    if share.is_first:
        folder.require_settings(settings.fingerprint(policies))
        folder.put_together(identifiers)
    share.wait()
    folder.read()
    if folder.is_finished:
        return False
    if share.is_first and folder.lines:
        go_on(len(folder.lines))
    notes: list[str] = []
    with (
        open_pair(settings, prompts=prompts, eagle=settings.eagle, allow_pickle=settings.allow_pickle) as opened,
        open_systems(opened, settings, policies, notes, settings.alignments()) as systems,
    ):
        least = min(LEAST_TOKENS, settings.max_new_tokens) if settings.table else 0
        pair, left_out = _without_short_texts(opened, least)
        timed = set(settings.numbers_within(settings.limit, pair.prompts))
        units = [[one for one in unit if one in timed] for unit in streams(settings.suite, pair.prompts)]
        run = Run(settings, folder, pair, systems, units, report, share, expected=_expected_numbers(settings, pair))
        run.require_room()
        if share.is_first:
            run.begin_session(command, notes, left_out)
        try:
            run.everything()
            share.wait()
        except BaseException:
            # Others may still be writing; the next run puts theirs together.
            if share.count == 1:
                folder.put_together(identifiers)
            raise
    if share.is_first:
        folder.put_together(identifiers, finished=utc_now())
    share.wait()
    return True


def _without_short_texts(pair: Pair, least: int) -> tuple[Pair, dict[str, int]]:
    """The pair without the prompts that the target answers greedily with less than `least` tokens, and by domain how
    many those are. Raises `WorkloadError` if nothing is left."""
    if not least:
        return pair, {}
    config, kept, left_out = generation_config(pair.target, least, 0.0), [], Counter()
    for prompt, token_ids in zip(pair.prompts, pair.encoded, strict=True):
        input_ids = torch.tensor([token_ids], device=pair.target.device)
        text = pair.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        if text.shape[1] - len(token_ids) < least:
            left_out[prompt.domain] += 1
        else:
            kept.append((prompt, token_ids))
    if not kept:
        raise WorkloadError(f"the target ends its text within {least} tokens on every prompt; take longer ones")
    prompts, encoded = map(list, zip(*kept, strict=True))
    return replace(pair, prompts=prompts, encoded=encoded), dict(left_out)


def _expected_numbers(settings: SuiteSettings, pair: Pair) -> list[int]:
    """The numbers of the prompts with expectations: none of conversations, whose later turns go unmeasured there."""
    if not settings.expected_prompts or suite_named(settings.suite).least_turns > 1:
        return []
    return settings.numbers_within(settings.expected_prompts, pair.prompts)


class Run:
    """One process's part of a run.

    Args:
        settings: the drafts and generation.
        store: takes the lines, and knows those that are there already.
        pair: the models and prompts.
        systems: the systems.
        streams: the numbers of the timed prompts in stretches, at whose beginning systems that learn forget (None: all
            are timed, nothing is forgotten, and systems that learn are profiled like the others).
        report: see `run_suite`.
        share: the part of this process.
        expected: the numbers of the prompts with expectations, for each of the settings' `recall_k`.
        kinds: the kinds of lines of `profile_prompts`.
    """

    def __init__(
        self,
        settings: SystemsSettings,
        store: RunMemory,
        pair: Pair,
        systems: list[System],
        streams: Sequence[Sequence[int]] | None,
        report: Callable[[str, int, int], None],
        share: Share = Share(),
        expected: Sequence[int] = (),
        kinds: Sequence[str] = (PROFILE, COVERAGE),
    ):
        self._settings, self._store, self._pair, self._systems = settings, store, pair, systems
        self._share, self._report, self._expected = share, report, share.of(expected)
        self._studies = [(kind, switch) for kind, switch in _SWITCHES.items() if kind in kinds]
        self._write = store.writer(share.index)
        self._device = pair.target.device
        devices = [self._device, *(drafter.head.device for drafter in pair.drafters.values())]
        self._clock = Stopwatch(enabled=False, devices=tuple(devices))
        self._configs = {
            (temperature, system.label): self._config(temperature, system, settings.max_new_tokens)
            for temperature, system in product(settings.temperatures, systems)
        }
        learners = [] if streams is None else [system for system in systems if system.learns]
        self._forgets = {system.label for system in learners}
        self._forget_broken_streams(learners, streams or ())
        # If nothing is forgotten, prompts are independent of one another.
        self._timed = (
            range(len(pair.prompts)) if streams is None else sorted(number for one in streams for number in one)
        )
        self._units = share.of(streams if learners else [[number] for number in self._timed])
        of_domain: dict[str, list[int]] = {}
        for number in self._timed:
            of_domain.setdefault(pair.prompts[number].domain, []).append(number)
        first = (number for numbers in of_domain.values() for number in numbers[: settings.profile_prompts])
        self._studied = share.of(sorted(first))
        self._done, self._total = 0, sum(1 for _ in self._missing())

    def require_room(self) -> None:
        """Refuse conversations that could outgrow the models' positions."""
        room = room_for_prompt(self._settings, self._pair.target, self._pair.drafters.get(INDEPENDENT))
        for prompt in self._pair.prompts:
            require_room(self._dialogue(prompt), prompt.identifier, room, self._settings.max_new_tokens)

    def begin_session(self, command: Sequence[str] | None, notes: Sequence[str], left_out: Mapping[str, int]) -> None:
        """Write the line of a session, which describes everything that is used from here on. `left_out` are numbers of
        prompts by domain."""
        threads, prompts = torch.get_num_threads(), enumerate(self._pair.described_prompts())
        self._write(
            {
                "kind": SESSION,
                "provenance": provenance(command, utc_now(), None, threads),
                "processes": self._share.count,
                "models": self._pair.described_models(),
                "prompts": [{**one, "timed": number in self._timed} for number, one in prompts],
                "left_out": dict(left_out),
                "systems": [system.described() for system in self._systems],
                "notes": list(notes),
            }
        )

    def everything(self, after_repeat: Callable[[], None] = lambda: None) -> None:
        """Run all that is missing."""
        self._warm_up()
        for repeat in range(self._settings.repeats):
            for temperature, unit in product(self._settings.temperatures, self._units):
                self._time(unit, temperature, repeat)
            after_repeat()
        for temperature, (number, system) in product(
            self._settings.temperatures, product(self._studied, self._systems)
        ):
            self._study(number, system, temperature)
        for temperature in self._settings.temperatures if self._expected else ():
            self._expect(temperature)
        self._report("done", self._done, self._total)

    def _key(self, kind: str, number: int, system: System, temperature: float, repeat: int = 0) -> Key:
        return kind, self._pair.prompts[number].identifier, system.label, temperature, repeat

    def _has(self, *key: Any) -> bool:
        return self._key(*key) in self._store.lines

    def _forget_broken_streams(self, learners: list[System], streams: Sequence[Sequence[int]]) -> None:
        """Drop the lines of unfinished streams: what a system learned ended with its process."""
        places = product(learners, streams, self._settings.temperatures, range(self._settings.repeats))
        for system, stream, temperature, repeat in places:
            keys = [self._key(TIMED, number, system, temperature, repeat) for number in stream]
            if not all(key in self._store.lines for key in keys):
                self._store.drop(keys)

    def _missing(self) -> Iterator[Key]:
        """The keys that this process has to run."""
        s = self._settings
        for temperature, system in product(s.temperatures, self._systems):
            for repeat, unit in product(range(s.repeats), self._units):
                keys = (self._key(TIMED, number, system, temperature, repeat) for number in unit)
                yield from (key for key in keys if key not in self._store.lines)
            for number in self._studied if self._is_studied(system) else ():
                keys = [self._key(kind, number, system, temperature) for kind, _ in self._studies]
                yield from (key for key in keys if key not in self._store.lines)
            for number in self._expected if self._is_expected(system, temperature) else ():
                keys = [self._key(EXPECTED, number, system, temperature, k) for k in self._settings.recall_k]
                yield from (key for key in keys if key not in self._store.lines)

    def _is_expected(self, system: System, temperature: float) -> bool:
        """Whether there are expectations of it: they are along chains, which one of the shapes of its drafts stands
        for, with tokens drawn from all."""
        is_one = self._is_studied(system) and system.parts.tree == self._settings.resolved_shapes()[0]
        return is_one and not (temperature and self._settings.top_k)

    def _is_studied(self, system: System) -> bool:
        """Whether it is profiled: a system that forgets would learn from profiled calls."""
        return system.assistant is not None and system.label not in self._forgets

    def _warm_up(self) -> None:
        """Let every system that has something to do compile and allocate what it needs."""
        wanted = {key[2] for key in self._missing()}
        for system in self._systems:
            if system.label in wanted:
                self._report(f"warming up, {system.label}", self._done, self._total)
                prompt = self._pair.prompts[0]
                system.take_domain(prompt.domain)
                for temperature in self._settings.temperatures:
                    config = self._config(temperature, system, min(_WARM_UP_TOKENS, self._settings.max_new_tokens))
                    self._generate(system, self._dialogue(prompt).next_turn(), config, system.speaker(1))

    def _time(self, unit: Sequence[int], temperature: float, repeat: int) -> None:
        missing = {
            system.label
            for system in self._systems
            if any(not self._has(TIMED, number, system, temperature, repeat) for number in unit)
        }
        for system in self._systems:
            if system.label in self._forgets and system.label in missing:
                system.start_anew()
        for number in unit:
            # Systems take turns in going first, so that none always finds warm caches.
            turn = (number + repeat) % len(self._systems)
            for system in self._systems[turn:] + self._systems[:turn]:
                if system.label in missing and not self._has(TIMED, number, system, temperature, repeat):
                    self._converse(TIMED, number, system, temperature, repeat)

    def _study(self, number: int, system: System, temperature: float) -> None:
        """Profile a system and, in calls of their own, measure the coverage of its shortlists."""
        for kind, switch in self._studies:
            if self._is_studied(system) and not self._has(kind, number, system, temperature):
                setattr(system.assistant, switch, True)
                try:
                    self._converse(kind, number, system, temperature, 0)
                finally:
                    setattr(system.assistant, switch, False)

    def _converse(self, kind: str, number: int, system: System, temperature: float, repeat: int) -> None:
        """Let a system answer all turns of a prompt, and write the line."""
        prompt = self._pair.prompts[number]
        self._report(f"{prompt.identifier}, {system.label}", self._done, self._total)
        system.take_domain(prompt.domain)
        dialogue, speaker = self._dialogue(prompt), system.speaker(len(prompt.turns))
        stats, turns = DraftingStatistics(), []
        torch.manual_seed(self._settings.seed + number + 1000 * repeat)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        while not dialogue.is_over:
            read = dialogue.next_turn()
            config = self._configs[temperature, system.label]
            tokens, seconds, forwards = self._generate(system, read, config, speaker)
            dialogue.answer(tokens)
            rounds = forwards if system.assistant is None else system.assistant.stats.rounds
            turns.append({"read": len(read), "tokens": tokens, "seconds": seconds, "rounds": rounds})
            if system.assistant is not None:
                stats.add(system.assistant.stats)
        line = {"kind": kind, "prompt": prompt.identifier, "domain": prompt.domain, "system": system.label}
        line |= {"temperature": temperature, "repeat": repeat, "turns": turns}
        if system.assistant is not None:
            line["drafting"] = stats
            if system.assistant.alignment is not None:
                line["alignment"] = system.assistant.alignment.stats.to_dict()
        if self._device.type == "cuda":
            line["peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        self._write_line(line)

    def _generate(
        self, system: System, read: Sequence[int], config: Any, speaker: Any
    ) -> tuple[list[int], float, int]:
        """Generate once; return the new tokens, the seconds, and for baselines the number of the target's forwards."""
        input_ids = torch.tensor([read], device=self._device)
        arguments = {"attention_mask": torch.ones_like(input_ids), "generation_config": config}
        if speaker is not None:
            arguments["assistant_model"] = speaker
        # Of baselines: one for each round, and for each token without drafts.
        forwards: list[None] = []
        with system.surroundings(), ExitStack() as stack:
            # A hook on the target would keep an assistant from this package's head product, and be compiled.
            if system.assistant is None and system.label != COMPILED:
                stack.callback(self._pair.target.register_forward_hook(lambda *_: forwards.append(None)).remove)
            start = self._clock.now()
            output = self._pair.target.generate(input_ids, **arguments)
            seconds = self._clock.now() - start
        new = output[0, len(read) :].tolist()
        return new, seconds, len(forwards) or len(new)

    def _expect(self, temperature: float) -> None:
        """Compute what to expect of the policies along texts that the target writes."""
        pair = self._pair
        shared = {name: getattr(self._settings, name) for name in _OF_BOTH} | {"temperature": temperature}
        shared["draws"] = _DRAWS if temperature else 1
        for (drafter, model), k in product(pair.drafters.items(), self._settings.recall_k):
            systems = [one for one in self._systems if self._is_expected(one, temperature)]
            policies = {one.label: one.policies for one in systems if one.parts.drafter == drafter}
            wanted = (key for key in self._missing() if key[2] in policies)
            missing = {key for key in wanted if key[0] == EXPECTED and key[3:] == (temperature, k)}
            if not missing:
                continue
            # All policies on these prompts, as rounds are drawn for all if they are for one.
            found = measure_coverage(
                CoverageSettings(**shared, policies=policies, recall_k=k),
                target=pair.target,
                drafter=model,
                tokenizer=pair.tokenizer,
                prompts=pair.prompts,
                only={prompt for _, prompt, *_ in missing},
                report=lambda prompt, *_: self._report(f"{prompt}, expectations", self._done, self._total),
                save=partial(self._write_expected, missing),
            )
            if not found.complete:
                raise KeyboardInterrupt

    def _write_expected(self, missing: set[Key], found: CoverageResult) -> None:
        """Write what was found and is missing, and take it from there."""
        drawn = {(one.prompt, one.policy): one.acceptance_length for one in found.drawn}
        for one in found.measured:
            key = EXPECTED, one.prompt, one.policy, found.settings.temperature, found.settings.recall_k
            if key in missing:
                missing.remove(key)
                line = dict(zip(("kind", "prompt", "system", "temperature", "repeat"), key, strict=True))
                line |= {name: getattr(one, name) for name in _EXPECTED}
                self._write_line(line | ({"drawn_length": drawn[one.prompt, one.policy]} if drawn else {}))

    def _write_line(self, line: dict[str, Any]) -> None:
        self._write(line)
        self._done += 1

    def _config(self, temperature: float, system: System, max_new_tokens: int) -> Any:
        config = generation_config(self._pair.target, max_new_tokens, temperature, self._settings.top_k)
        config.update(**system.generation)
        return config

    def _dialogue(self, prompt: WorkloadPrompt) -> Dialogue:
        return Dialogue(
            prompt,
            self._pair.tokenizer,
            as_token_ids(self._pair.target.generation_config.eos_token_id),
            use_chat_template=self._settings.chat_template,
            truncate_to=self._settings.max_prompt_tokens,
        )
