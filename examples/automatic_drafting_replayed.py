"""Compare `num_assistant_tokens="auto"`, and `policy="auto"`, with fixed settings on recorded drafts, domain by
domain, so that neither random draws nor changes in the computer's speed, which are larger than the differences in
question, decide the result. `automatic_drafting.py` times whole calls instead.

Each prompt is continued once, token by token, and at each place of the text the longest draft is made anew. It is
noted how probable the drafter found each token of it, what the text said of it, and how many were accepted. Then
rounds of every length are timed, in turns. With these times the texts are gone through again: with each fixed length,
and as automatic drafting itself chooses, which sees one text after another and knows nothing at first. It does so
several times, with the texts in another order each time; the mean is compared, and the worst is shown too. What
choosing takes, with one policy, is timed in calls of its own and counted in each round. `--noise` makes each time that
it is told longer or shorter by chance, and single ones several times as long; what it chose is counted without. With
several policies all of this is done with each of them, and automatic drafting chooses between them too; or between
them alone, with `--length`.

Of twelve lengths that are about as good, one is the luckiest with the texts that happened to be drawn. With several
`--draws` each prompt is continued so often, and what automatic drafting does in the texts of one draw, which it goes
through knowing nothing at first, is compared with the length that was best in the others. `--texts` goes through those
that were recorded before, and times rounds anew: so changes of what chooses are compared on the same texts.

So each draft follows what has come out, as in a call, however short those before it were. Reading prompts takes no
time here, nor does what a drafter reads after rounds without drafts, or a policy after another one's rounds. Where
tokens are drawn, a text goes on as it was recorded, whatever a draft of it held. After a change of policy it goes on
at as many tokens of the text that the other policy led to. Greedily both led to the same. What is drawn from text to
text differs by more than policies do, so that policies then go through one another's texts as well as their own, and
what differs is the time that they take. On the embedded pair:

    python examples/automatic_drafting_replayed.py --target examples/pocket/target --drafter examples/pocket/drafter \\
        --prompts examples/pocket/prompts.jsonl

with `--eagle` in place of `--drafter` for a head, and with `--policy hybrid --policy screen` to choose between these.
"""

import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_dynspec import DynSpecAssistant
from hf_dynspec.devices import is_host_memory
from hf_dynspec.drafting.automatic import AutomaticDrafting
from hf_dynspec.drafting.automatic_call import AutomaticCall, LearntDrafting
from hf_dynspec.drafting.draft_shapes import ALONE, LONGEST, DraftShape, shapes_of
from hf_dynspec.drafting.early_ends import DraftedToken, EarlyEnd, RunningConfidence
from hf_dynspec.drafting.expected_rounds import FinishedRound
from hf_dynspec.drafting.recurrences import Recurrence
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.drafting.token_choice import TokenChoice
from hf_dynspec.evaluation.head_product import head_product, why_not_head_product
from hf_dynspec.evaluation.pair import Pair, PairSettings, generation_config, open_pair
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.files import write_json
from hf_dynspec.generation import decoding
from hf_dynspec.generation.verification import Outcome

# How long drafts are that are recorded.
RECORDED = LONGEST
# New tokens of a call in which rounds of one length are timed, and how many such calls the first prompt of each domain
# gets.
TIMED_TOKENS, TIMED_CALLS = 64, 2
# The share of rounds that are stalls, and how many times as long those are, with `--noise`.
STALLS, STALLED = 0.01, (2, 10)

PLAIN, AUTO, WORST = "no drafts", "auto", "auto, worst"

app = typer.Typer(add_completion=False)


class Round(NamedTuple):
    """What was recorded at a place of a text: what was known of each drafted token, and how many of them were
    accepted."""

    tokens: list[DraftedToken]
    accepted: int


Text = list[Round]
# A prompt's texts of one draw, one of each policy.
Texts = tuple[Text, ...]


class Seconds(NamedTuple):
    """What rounds take, and how much of that drafting does, by policy and by how many tokens they draft."""

    rounds: list[list[float]]
    drafting: list[list[float]]


# Recording and timing ------------------------------------------------------------------------------------------------


class FirstTokens(decoding._Verifier):
    """Lets the first token of each round come out and no other, as if no candidate had been accepted: it is the
    target's own in either case."""

    # Of the latest round, whichever call it was of: they are made one after another.
    accepted = 0

    def verify(self, *of_round: Any) -> tuple[Outcome, bool]:
        outcome, is_done = super().verify(*of_round)
        FirstTokens.accepted = outcome.accepted
        if not outcome.accepted:
            return outcome, is_done
        return Outcome(outcome.token_ids[:1], outcome.rows[:1], outcome.scores[:1]), False


@contextmanager
def first_tokens() -> Iterator[None]:
    """Calls take a round for each token meanwhile."""
    usual, decoding._Verifier = decoding._Verifier, FirstTokens
    try:
        yield
    finally:
        decoding._Verifier = usual


class LongDrafts(AutomaticDrafting):
    """Lets an assistant draft long chains whatever they bring, and notes what became of them: of all but those that
    are cut short at a call's end, and the one that its text ends in. Among `first_tokens`."""

    def __init__(self):
        super().__init__(shapes_of(None, True), ends_early=True)
        self.text: Text = []

    def call_under(self, *setting: Any) -> AutomaticCall:
        """Stands for all that an assistant has learnt too, under whichever setting."""
        return AutomaticCall(self)

    def choose(self, fixed: DraftShape | None = None, room: int = LONGEST) -> DraftShape:
        return DraftShape(RECORDED, RECORDED)

    def early_end(self, shape: DraftShape) -> EarlyEnd:
        # Asks for what is known of tokens, and never ends a draft: any is likely enough.
        return EarlyEnd(RunningConfidence().acceptances(), RECORDED * [0.0])

    def record(self, round: FinishedRound, ended: float) -> None:
        # Times are measured apart.
        if round.steps == RECORDED and round.is_known:
            self.text.append(Round(round.end.tokens, FirstTokens.accepted))


class TimedCall(AutomaticCall):
    """Times itself."""

    def __init__(self, drafting: AutomaticDrafting):
        self.rounds, self.seconds = 0, 0.0
        with self._timed():
            super().__init__(drafting)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def begin_round(self, most: int, fixed: DraftShape | None = None, behind: int = 0) -> DraftShape:
        self.rounds += 1
        with self._timed():
            return super().begin_round(most, fixed, behind)

    def begin_draft(self, text: torch.Tensor) -> None:
        with self._timed():
            super().begin_draft(text)

    def goes_on_after(self, token_id: torch.Tensor, choice: TokenChoice) -> bool:
        with self._timed():
            return super().goes_on_after(token_id, choice)

    def has_drafted(self, steps: int | None = None) -> None:
        with self._timed():
            super().has_drafted(steps)

    def end_round(self, accepted: int, is_last: bool = False) -> None:
        with self._timed():
            super().end_round(accepted, is_last)

    def end_call(self) -> None:
        with self._timed():
            super().end_call()


class TimedChoices(LearntDrafting):
    """Gives calls that time themselves."""

    def __init__(self):
        super().__init__()
        self.calls: list[TimedCall] = []

    def call_under(self, *setting: Any, **more: Any) -> AutomaticCall:
        self.calls.append(TimedCall(self.under(*setting, **more)))
        return self.calls[-1]


def bound_assistants(pair: Pair, policies: list[str]) -> list[DynSpecAssistant]:
    """One for each policy."""
    drafter = next(iter(pair.drafters.values()))
    return [
        DynSpecAssistant(drafter, parse_policy(policy), target=pair.target, tokenizer=pair.tokenizer)
        for policy in policies
    ]


def record(
    pair: Pair, assistants: list[DynSpecAssistant], config: GenerationConfig, draws: int, progress: Progress
) -> dict[str, list[list[Texts]]]:
    """The texts of each domain, by draw and prompt."""
    texts = {prompt.domain: [[] for _ in range(draws)] for prompt in pair.prompts}
    calls = [(draw, *prompt) for prompt in zip(pair.prompts, pair.encoded, strict=True) for draw in range(draws)]
    for seed, (draw, prompt, token_ids) in enumerate(progress.track(calls, description="recording")):
        input_ids = torch.tensor([token_ids], device=pair.target.device)
        texts[prompt.domain][draw].append(
            tuple(record_text(pair, assistant, input_ids, config, seed) for assistant in assistants)
        )
    for domain, of_domain in texts.items():
        if not all(any(map(all, of_draw)) for of_draw in of_domain):
            raise typer.BadParameter(
                f"all texts of {domain} end within a round or two; give it other prompts", param_hint="--prompts"
            )
    return texts


def read_texts(path: Path, pair: Pair, policies: list[str], temperature: float) -> dict[str, list[list[Texts]]]:
    """Those that `--out` has written before, of the same models, policies and temperature."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        made_with = written["models"], written["policies"]
    except (ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"{path} is no --out of this example", param_hint="--texts") from error
    if made_with != (pair.described_models(), policies):
        raise typer.BadParameter(f"{path} holds texts of other models or policies", param_hint="--texts")
    if f"{temperature:g}" not in written["results"]:
        raise typer.BadParameter(f"{path} holds no texts at T = {temperature:g}", param_hint="--texts")

    def text(rounds: list[Any]) -> Text:
        return [
            Round([DraftedToken(probability, Recurrence(said)) for probability, said in tokens], accepted)
            for tokens, accepted in rounds
        ]

    return {
        domain: [[tuple(map(text, of_prompt)) for of_prompt in of_draw] for of_draw in of_domain]
        for domain, of_domain in written["results"][f"{temperature:g}"]["texts"].items()
    }


def record_text(
    pair: Pair, assistant: DynSpecAssistant, input_ids: torch.Tensor, config: GenerationConfig, seed: int
) -> Text:
    """What is drafted at each place of the text of a call, and how much of it is accepted."""
    assistant.generation_config.num_assistant_tokens = AUTO
    assistant.learnt_drafting = drafts = LongDrafts()
    torch.manual_seed(seed)
    with first_tokens():
        pair.target.generate(input_ids, generation_config=config, assistant_model=assistant)
    return drafts.text


class RoundEnds(BaseStreamer):
    """Notes the time in seconds at which each round ended, and how many tokens there were then."""

    def __init__(self):
        self.ends: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        before = self.ends[-1][1] if self.ends else 0
        self.ends.append((time.perf_counter(), before + value.numel()))

    def end(self) -> None:
        pass


@contextmanager
def drafts_timed() -> Iterator[list[float]]:
    """Gives the seconds that each draft takes meanwhile."""
    usual, seconds = DraftSession.draft_chain, []

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        chain = usual(*arguments)
        seconds.append(time.perf_counter() - began)
        return chain

    DraftSession.draft_chain = timed
    try:
        yield seconds
    finally:
        DraftSession.draft_chain = usual


def time_rounds(pair: Pair, assistants: list[DynSpecAssistant], temperature: float, progress: Progress) -> Seconds:
    """The usual seconds of rounds that draft 0, 1, 2, … tokens, with each policy, and of drafting in them.

    All of them take turns on a prompt of each domain. A length's share of the time of a turn is compared with what it
    was in others, so that a turn at which the computer was slow is like any other. Rounds that read a prompt, or are
    cut short at the end of a call, are left out.
    """
    first: dict[str, list[int]] = {}
    for prompt, token_ids in zip(pair.prompts, pair.encoded, strict=True):
        first.setdefault(prompt.domain, token_ids)
    config = generation_config(pair.target, TIMED_TOKENS + LONGEST + 1, temperature)
    drafted = [(assistant, length) for length in range(1, LONGEST + 1) for assistant in assistants]
    turns = []
    for token_ids in progress.track(TIMED_CALLS * list(first.values()), description="timing rounds of each length"):
        turn = [median_round(pair, *one, token_ids, config) for one in [(assistants[0], 0), *drafted]]
        if None not in turn:
            turns.append(turn)
    if not turns:
        raise typer.BadParameter("all texts end within a round or two; give other prompts", param_hint="--prompts")
    usual = median(sum(seconds for seconds, _ in turn) for turn in turns)

    def by_policy(what: int) -> list[list[float]]:
        shares = ([one[what] / sum(seconds for seconds, _ in turn) for one in turn] for turn in turns)
        alone, *others = (usual * median(of_one) for of_one in zip(*shares, strict=True))
        return [[alone, *others[policy :: len(assistants)]] for policy in range(len(assistants))]

    return Seconds(by_policy(0), by_policy(1))


def median_round(
    pair: Pair, assistant: DynSpecAssistant, length: int, token_ids: list[int], config: GenerationConfig
) -> tuple[float, float] | None:
    """The median seconds of the rounds of a call that drafts so many tokens in each, and of drafting in them; None
    where there is none."""
    ends = RoundEnds()
    assistant.generation_config.num_assistant_tokens = max(length, 1)
    # Without drafts, plain generation stands for a round of this package, whose rounds compute logits by its product.
    takes_product = not length and why_not_head_product(pair.target) is None
    with drafts_timed() as drafting, head_product(pair.target) if takes_product else nullcontext():
        pair.target.generate(
            torch.tensor([token_ids], device=pair.target.device),
            generation_config=config,
            assistant_model=assistant if length else None,
            streamer=ends,
        )
    # The prompt comes first, then the round in which the target reads it, then the one in which a head does.
    whole = [end for end, tokens in ends.ends[2:] if tokens - len(token_ids) <= TIMED_TOKENS]
    if len(whole) < 2:
        return None
    # The first draft reads the prompt.
    return median(end - began for began, end in pairwise(whole)), median(drafting[1:] or [0.0])


def time_choosing(pair: Pair, assistant: DynSpecAssistant, temperature: float, progress: Progress) -> float:
    """The usual seconds that automatic drafting takes itself in a round, as calls time it: those of the call in the
    middle."""
    config = generation_config(pair.target, TIMED_TOKENS, temperature)
    assistant.generation_config.num_assistant_tokens = AUTO
    assistant.learnt_drafting = choices = TimedChoices()
    for token_ids in progress.track(pair.encoded, description="timing what choosing takes"):
        input_ids = torch.tensor([token_ids], device=pair.target.device)
        pair.target.generate(input_ids, generation_config=config, assistant_model=assistant)
    # The first one learns more than others.
    calls = choices.calls[1:] or choices.calls
    return median(call.seconds / call.rounds for call in calls)


# Replaying -----------------------------------------------------------------------------------------------------------

# Says what a round drafts, given what is known of the tokens that it can draft with each policy; and is told what it
# drafted and how many of these were accepted.
Choose = Callable[[list[list[DraftedToken]]], DraftShape]
Tell = Callable[[DraftShape, int], None]


def replay(texts: Texts, choose: Choose, tell: Tell) -> Iterator[tuple[DraftShape, int]]:
    """Go through the texts of a prompt. Yields of each round what it drafted and how many tokens came out."""
    place, end = 0, min(map(len, texts))
    while place < end:
        here = [of_policy[place] for of_policy in texts]
        drafted = choose([one.tokens for one in here])
        came = min(drafted.steps, here[drafted.policy].accepted)
        tell(drafted, came)
        yield drafted, came + 1
        place += came + 1


def speed(rounds: list[tuple[DraftShape, int]], seconds: Seconds, choosing: float = 0.0) -> float:
    """Tokens per second, where choosing takes so many seconds in each round."""
    taken = sum(seconds.rounds[drafted.policy][drafted.steps] for drafted, _ in rounds)
    return sum(tokens for _, tokens in rounds) / (taken + choosing * len(rounds))


def replay_fixed(texts: list[Texts], shape: DraftShape) -> list[tuple[DraftShape, int]]:
    """The rounds of drafts of a fixed length, with a fixed policy."""
    return [one for of_prompt in texts for one in replay(of_prompt, lambda _: shape, lambda *_: None)]


class NoisyClock:
    """Says the time in seconds of a computer on which rounds take as long as they do, but for chance."""

    def __init__(self, seconds: Seconds, noise: float, seed: int):
        self.now = self._left = 0.0
        self._seconds, self._noise, self._random = seconds, noise, random.Random(seed)

    def draft(self, drafted: DraftShape) -> None:
        """A draft is there."""
        stall = self._random.uniform(*STALLED) if self._noise and self._random.random() < STALLS else 1.0
        longer = stall * self._random.lognormvariate(0, self._noise)
        drafting = longer * self._seconds.drafting[drafted.policy][drafted.steps]
        self._left = longer * self._seconds.rounds[drafted.policy][drafted.steps] - drafting
        self.now += drafting

    def end_round(self) -> None:
        """The target has spoken on it."""
        self.now += self._left


def replay_auto(
    texts: list[Texts], clock: NoisyClock, ends_early: bool, fixed: DraftShape | None = None
) -> list[tuple[DraftShape, int]]:
    """The rounds that automatic drafting has, or the choice of a policy for drafts of a fixed shape."""
    policies = len(texts[0])
    learnt, rounds = AutomaticDrafting(shapes_of(None, ends_early), policies, ends_early), []
    for of_prompt in texts:
        rounds += replay_call(of_prompt, AutomaticCall(learnt, lambda: clock.now), clock, fixed)
    return rounds


def replay_call(
    texts: Texts, call: AutomaticCall, clock: NoisyClock, fixed: DraftShape | None
) -> Iterator[tuple[DraftShape, int]]:
    """The same of one prompt."""

    def choose(here: list[list[DraftedToken]]) -> DraftShape:
        shape = call.begin_round(LONGEST, fixed)
        tokens = here[shape.policy][: shape.steps]
        ends = (step for step, token in enumerate(tokens, start=1) if not call.goes_on(token))
        steps = next(ends, shape.steps) if call.ends_early else shape.steps
        drafted = shape._replace(steps=steps, nodes=steps)
        clock.draft(drafted)
        if steps:
            call.has_drafted()
        return drafted

    def tell(drafted: DraftShape, came: int) -> None:
        clock.end_round()
        call.end_round(came)

    return replay(texts, choose, tell)


def replay_passes(
    passes: list[list[Texts]], clock: NoisyClock, seed: int, ends_early: bool, fixed: DraftShape | None
) -> list[tuple[DraftShape, int]]:
    """The rounds of automatic drafting in several lists of prompts, each from nothing and in a random order."""
    shuffled, rounds = random.Random(seed), []
    for texts in passes:
        rounds += replay_auto(shuffled.sample(texts, len(texts)), clock, ends_early and fixed is None, fixed)
    return rounds


def in_turn(texts: list[Texts]) -> list[list[Texts]]:
    """The texts of prompts, so often that each policy gets those of every policy once."""
    return [[(*of_prompt[first:], *of_prompt[:first]) for of_prompt in texts] for first in range(len(texts[0]))]


def compare(
    passes: list[list[Texts]],
    seconds: Seconds,
    policies: list[str],
    ends_early: bool,
    noise: float,
    seeds: int,
    length: int | None = None,
    choosing: float = 0.0,
) -> dict[str, float]:
    """Tokens per second without drafts, of each fixed setting, and of automatic drafting: the mean over several random
    seeds, and the worst. Where there is a `length`, all drafts have it, and automatic drafting chooses between
    policies alone.

    Args:
        passes: prompts with their texts. Automatic drafting goes through each of these lists knowing nothing at first,
            with each seed in another order: how soon it knows enough depends on the first drafts.
        choosing: the seconds that choosing takes in a round.
    """
    lengths = range(1, LONGEST + 1) if length is None else [length]
    shapes = {
        f"{name} {steps}": DraftShape(steps, steps, policy)
        for policy, name in enumerate(policies)
        for steps in lengths
    }
    prompts = [of_prompt for texts in passes for of_prompt in texts]
    speeds = {name: speed(replay_fixed(prompts, shape), seconds) for name, shape in {PLAIN: ALONE, **shapes}.items()}
    fixed = None if length is None else DraftShape(length, length)
    with warnings.catch_warnings():
        # Where drafting loses is in the table.
        warnings.filterwarnings("ignore", "drafting does not pay here")
        chosen = [
            speed(replay_passes(passes, NoisyClock(seconds, noise, seed), seed, ends_early, fixed), seconds, choosing)
            for seed in range(seeds)
        ]
    return speeds | {AUTO: mean(chosen), WORST: min(chosen)}


# Tokens per second of every setting, in each draw of a domain's texts.
Draws = list[dict[str, float]]


def speeds_of(texts: dict[str, list[list[Texts]]], temperature: float, *how: Any) -> dict[str, Draws]:
    """What `compare` finds in each domain, and in all of them together."""
    of_all = [[of for of_domain in draw for of in of_domain] for draw in zip(*texts.values(), strict=True)]
    return {
        domain: [compare(in_turn(draw) if temperature else [draw], *how) for draw in draws]
        for domain, draws in (texts | {"all": of_all}).items()
    }


def best_fixed(draws: Draws) -> list[str]:
    """For each draw the fixed setting that was best in the others; where there are none, in itself."""
    names = [name for name in draws[0] if name not in (PLAIN, AUTO, WORST)]
    others = (draws[:place] + draws[place + 1 :] or draws for place in range(len(draws)))
    return [max(names, key=lambda name: sum(of[name] for of in among)) for among in others]


def mean_speed(draws: Draws, names: list[str]) -> float:
    """The mean over draws, of one setting in each."""
    return mean(of[name] for of, name in zip(draws, names, strict=True))


def show_speeds(console: Console, title: str, speeds: dict[str, Draws]) -> None:
    """Print a table of tokens per second, with how automatic drafting compares with the best fixed setting of each
    domain, with the one that is the best of all, and with no drafts."""
    ratios = *(f"auto /\n{other}" for other in ("best fixed", "best of all", PLAIN)), "worst /\nbest fixed"
    table = Table("", PLAIN, "best fixed", "", AUTO, *ratios, title=title)
    best_of_all = best_fixed(speeds["all"])
    for domain, draws in speeds.items():
        best = best_fixed(draws)
        draw_by_draw = *(len(draws) * [one] for one in (PLAIN, AUTO, WORST)), best, best_of_all
        plain, auto, worst, fixed, of_all = (mean_speed(draws, names) for names in draw_by_draw)
        table.add_row(
            *(domain, f"{plain:.1f}", ", ".join(dict.fromkeys(best)), f"{fixed:.1f}", f"{auto:.1f}"),
            *(f"{ratio:.3f}" for ratio in (auto / fixed, auto / of_all, auto / plain, worst / fixed)),
        )
    console.print(table)


def show_times(console: Console, rounds: dict[str, list[float]], choosing: float) -> None:
    """Print what was timed: seconds of rounds that draft 0, 1, 2, … tokens by policy, and of choosing in a round."""
    for policy, seconds in rounds.items():
        times = ", ".join(f"{1e3 * one:.1f}" for one in seconds)
        console.print(f"ms of a round that drafts 0, 1, 2, … tokens with {policy}: {times}")
    console.print(f"ms that choosing takes in a round: {1e3 * choosing:.3f}")


@app.command()
def main(
    target: Annotated[str, typer.Option("--target", help="Folder or Hub id of the model to speed up.")],
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSON lines files of prompts.")],
    drafter: Annotated[str | None, typer.Option("--drafter", help="Folder or Hub id of the small model.")] = None,
    eagle: Annotated[str | None, typer.Option(help="Folder or Hub id of an EAGLE head, in its place.")] = None,
    policy: Annotated[list[str], typer.Option(help="Shortlist policies; several are also chosen from.")] = ["hybrid"],  # noqa: B006
    length: Annotated[
        int | None,
        typer.Option(help="Draft so many tokens, and choose between policies alone.", min=1, max=LONGEST),
    ] = None,
    temperature: Annotated[list[float], typer.Option(help="0 decodes greedily.")] = [0.0, 0.8],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Prompts of each domain; all unless given.")] = None,
    draws: Annotated[int, typer.Option(help="How often each prompt is continued, where tokens are drawn.", min=1)] = 1,
    texts: Annotated[
        Path | None,
        typer.Option(help="An earlier --out, whose texts to go through again: all draws of them.", exists=True),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of each prompt, about.", min=1)] = 128,
    noise: Annotated[float, typer.Option(help="Spread of the times that automatic drafting is told.", min=0)] = 0.05,
    seeds: Annotated[int, typer.Option(help="Runs with different noise and orders of prompts.", min=1)] = 16,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write rounds, times and speeds to.")] = None,
) -> None:
    """Compare automatic drafting with every fixed setting on the same drafts."""
    if any(len(parse_policy(one).alternatives(None)) > 1 for one in policy):
        raise typer.BadParameter("give the policies that are to be chosen from, one by one", param_hint="--policy")
    if len(set(policy)) < len(policy):
        raise typer.BadParameter("give each policy once", param_hint="--policy")
    if length is not None and len(policy) == 1:
        raise typer.BadParameter("with one policy and one length there is nothing to choose", param_hint="--length")
    console, results = Console(), {}
    settings = PairSettings(target, drafter, prompts, max_new_tokens=max_new_tokens, limit=limit, threads=threads)
    with open_pair(settings, eagle=[eagle] if eagle else []) as pair, Progress(transient=True) as progress:
        ends_early = is_host_memory(pair.target.device)
        assistants = bound_assistants(pair, policy)
        written = {"models": pair.described_models(), "policies": policy, "results": results}
        earlier = {} if texts is None else {value: read_texts(texts, pair, policy, value) for value in temperature}
        for value in temperature:
            gone_through = earlier.get(value)
            if gone_through is None:
                config = generation_config(pair.target, max_new_tokens + RECORDED, value)
                gone_through = record(pair, assistants, config, draws if value else 1, progress)
            results[f"{value:g}"] = result = {"texts": gone_through}
            if out is not None:
                # What took the longest is there for --texts, whatever becomes of the rest.
                write_json(out, written)
            seconds = time_rounds(pair, assistants, value, progress)
            # Policies alone are chosen between now and then, which takes next to nothing.
            choosing = 0.0 if length else time_choosing(pair, assistants[0], value, progress)
            speeds = speeds_of(gone_through, value, seconds, policy, ends_early, noise, seeds, length, choosing)
            result |= {
                "seconds_of_rounds": seconds.rounds,
                "seconds_of_drafting": seconds.drafting,
                "seconds_of_choosing": choosing,
                "tokens_per_second": speeds,
            }
            if out is not None:
                write_json(out, written)
            number = sum(len(of_domain[0]) for of_domain in gone_through.values())
            title = f"tokens per second, T = {value:g}, {number} prompts, each {len(speeds['all'])} times"
            show_speeds(console, title, speeds)
            show_times(console, dict(zip(policy, seconds.rounds, strict=True)), choosing)


if __name__ == "__main__":
    app()
