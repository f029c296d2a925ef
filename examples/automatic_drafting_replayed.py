"""Compare `num_assistant_tokens="auto"` with fixed draft lengths on recorded drafts, domain by domain, so that neither
random draws nor changes in the computer's speed, which are larger than the differences in question, decide the result.
`automatic_drafting.py` times whole calls instead.

Each prompt is continued once with long drafts, and it is noted how probable the drafter found each token of them and
how many were accepted. Then rounds of every length are timed, in turns. With these times the texts are gone through
again: with each fixed length, and as automatic drafting itself chooses, which sees one text after another and knows
nothing at first. `--noise` makes each time that it is told longer or shorter by chance, and single ones several times
as long; what it chose is counted without.

Where a replayed draft is shorter than the recorded one, the next begins where that went on. A real one would be
drafted anew, by a shortlist, and with a head by features, that know more of the text: so all short drafts do better in
reality, unless a small model drafts from a shortlist that stays the same. Reading prompts takes no time here, nor does
what a drafter reads after rounds without drafts. On the embedded pair:

    python examples/automatic_drafting_replayed.py --target examples/pocket/target --drafter examples/pocket/drafter \\
        --prompts examples/pocket/prompts.jsonl

with `--eagle` in place of `--drafter` for a head.
"""

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_dynspec import DynSpecAssistant
from hf_dynspec.devices import is_free_to_look
from hf_dynspec.drafting.automatic import AutomaticDrafting
from hf_dynspec.drafting.automatic_call import AutomaticCall
from hf_dynspec.drafting.draft_shapes import LONGEST, DraftShape, shapes_of
from hf_dynspec.drafting.early_ends import EarlyEnd, RunningConfidence
from hf_dynspec.evaluation.head_product import head_product, why_not_head_product
from hf_dynspec.evaluation.pair import Pair, PairSettings, generation_config, open_pair
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.files import write_json

# How long drafts are that are recorded: longer than any that is replayed, so that fewer end with what was recorded.
RECORDED = LONGEST + 4
# New tokens of a call in which rounds of one length are timed, and how many such calls the first prompt of each domain
# gets.
TIMED_TOKENS, TIMED_CALLS = 64, 2
# The share of rounds that are stalls, and how many times as long those are, with `--noise`.
STALLS, STALLED = 0.01, (2, 10)

app = typer.Typer(add_completion=False)


class Round(NamedTuple):
    """A recorded round: how probable the drafter found each token, and how many of them were accepted."""

    probabilities: list[float]
    accepted: int


Text = list[Round]


# Recording and timing ------------------------------------------------------------------------------------------------


class LongDrafts(AutomaticDrafting):
    """Lets an assistant draft long chains whatever they bring, and notes what became of them: of all rounds but the
    last of a call, and those that are cut short at its end."""

    def __init__(self):
        super().__init__(shapes_of(None, True), ends_early=True)
        self.text: Text = []

    def under(self, *setting: object) -> "LongDrafts":
        """Stands for all that an assistant has learnt too, under whichever setting."""
        return self

    def choose(self, fixed: DraftShape | None = None) -> DraftShape:
        return DraftShape(RECORDED, RECORDED)

    def early_end(self, shape: DraftShape) -> EarlyEnd:
        # Asks for the probabilities, and never ends a draft: any is likely enough.
        return EarlyEnd(RunningConfidence().acceptances(), RECORDED * [0.0])

    def record(
        self, shape: DraftShape, accepted: int, began: float, ended: float, is_usual: bool, end: EarlyEnd | None = None
    ) -> None:
        self.text.append(Round(end.probabilities, accepted))


def record(pair: Pair, policy: str, config: GenerationConfig, progress: Progress) -> dict[str, list[Text]]:
    """The texts of each domain."""
    assistant = DynSpecAssistant(
        next(iter(pair.drafters.values())),
        parse_policy(policy),
        num_assistant_tokens="auto",
        target=pair.target,
        tokenizer=pair.tokenizer,
    )
    texts: dict[str, list[Text]] = {prompt.domain: [] for prompt in pair.prompts}
    calls = list(zip(pair.prompts, pair.encoded, strict=True))
    for place, (prompt, token_ids) in enumerate(progress.track(calls, description="recording")):
        assistant.learnt_drafting = drafts = LongDrafts()
        torch.manual_seed(place)
        input_ids = torch.tensor([token_ids], device=pair.target.device)
        pair.target.generate(input_ids, generation_config=config, assistant_model=assistant)
        texts[prompt.domain].append(drafts.text)
    assistant.unbind()
    for domain, of_domain in texts.items():
        if not any(of_domain):
            raise typer.BadParameter(
                f"all texts of {domain} end within a round or two; give it other prompts", param_hint="--prompts"
            )
    return texts


class RoundEnds(BaseStreamer):
    """Notes the time in seconds at which each round ended, and how many tokens there were then."""

    def __init__(self):
        self.ends: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        before = self.ends[-1][1] if self.ends else 0
        self.ends.append((time.perf_counter(), before + value.numel()))

    def end(self) -> None:
        pass


def time_rounds(pair: Pair, policy: str, temperature: float, progress: Progress) -> list[float]:
    """The usual seconds of rounds that draft 0, 1, 2, … tokens.

    All lengths take turns on a prompt of each domain. A length's share of the time of a turn is compared with what it
    was in others, so that a turn at which the computer was slow is like any other. Rounds that read a prompt, or are
    cut short at the end of a call, are left out.
    """
    drafter = next(iter(pair.drafters.values()))
    assistant = DynSpecAssistant(drafter, parse_policy(policy), target=pair.target, tokenizer=pair.tokenizer)
    first: dict[str, list[int]] = {}
    for prompt, token_ids in zip(pair.prompts, pair.encoded, strict=True):
        first.setdefault(prompt.domain, token_ids)
    config = generation_config(pair.target, TIMED_TOKENS + LONGEST + 1, temperature)
    turns = []
    for token_ids in progress.track(TIMED_CALLS * list(first.values()), description="timing rounds of each length"):
        turn = [median_round(pair, assistant, length, token_ids, config) for length in range(LONGEST + 1)]
        if None not in turn:
            turns.append(turn)
    assistant.unbind()
    if not turns:
        raise typer.BadParameter("all texts end within a round or two; give other prompts", param_hint="--prompts")
    usual = median(map(sum, turns))
    shares = ([one / sum(turn) for one in turn] for turn in turns)
    return [usual * median(of_length) for of_length in zip(*shares, strict=True)]


def median_round(
    pair: Pair, assistant: DynSpecAssistant, length: int, token_ids: list[int], config: GenerationConfig
) -> float | None:
    """The median seconds of the rounds of a call that drafts so many tokens in each; None where there is none."""
    ends = RoundEnds()
    assistant.generation_config.num_assistant_tokens = max(length, 1)
    # Without drafts, plain generation stands for a round of this package, whose rounds compute logits by its product.
    takes_product = not length and why_not_head_product(pair.target) is None
    with head_product(pair.target) if takes_product else nullcontext():
        pair.target.generate(
            torch.tensor([token_ids], device=pair.target.device),
            generation_config=config,
            assistant_model=assistant if length else None,
            streamer=ends,
        )
    # The prompt comes first, then the round in which the target reads it, then the one in which a head does.
    whole = [end for end, tokens in ends.ends[2:] if tokens - len(token_ids) <= TIMED_TOKENS]
    return median(end - began for began, end in pairwise(whole)) if len(whole) > 1 else None


# Replaying -----------------------------------------------------------------------------------------------------------

# Says how many tokens a round drafts, given how probable the drafter finds those that it can; and is told how many it
# drafted and how many of them were accepted.
Choose = Callable[[list[float]], int]
Tell = Callable[[int, int], None]


def replay(text: Text, choose: Choose, tell: Tell) -> Iterator[tuple[int, int]]:
    """Go through a text. Yields of each round how many tokens it drafted and how many came out."""
    for probabilities, accepted in text:
        done = 0
        # Of a draft that was accepted whole the target's own token may be left, which nobody knows a draft for.
        while done <= accepted and done < len(probabilities):
            coming = probabilities[done:]
            drafted = min(choose(coming), len(coming))
            came = min(drafted, accepted - done)
            tell(drafted, came)
            yield drafted, came + 1
            done += came + 1


def speed(rounds: list[tuple[int, int]], seconds: list[float]) -> float:
    """Tokens per second."""
    return sum(tokens for _, tokens in rounds) / sum(seconds[drafted] for drafted, _ in rounds)


def replay_fixed(texts: list[Text], length: int) -> list[tuple[int, int]]:
    """The rounds of drafts of a fixed length."""
    return [one for text in texts for one in replay(text, lambda _: length, lambda *_: None)]


class NoisyClock:
    """Says the time in seconds of a computer on which rounds take as long as they do, but for chance."""

    def __init__(self, seconds: list[float], noise: float, seed: int):
        self.now = 0.0
        self._seconds, self._noise, self._random = seconds, noise, random.Random(seed)

    def round(self, drafted: int) -> None:
        """A round is over."""
        stall = self._random.uniform(*STALLED) if self._noise and self._random.random() < STALLS else 1.0
        self.now += self._seconds[drafted] * stall * self._random.lognormvariate(0, self._noise)


def replay_auto(texts: list[Text], clock: NoisyClock, ends_early: bool) -> list[tuple[int, int]]:
    """The rounds that automatic drafting has."""
    learnt, rounds = AutomaticDrafting(shapes_of(None, ends_early), ends_early=ends_early), []
    for text in texts:
        call = AutomaticCall(learnt, lambda: clock.now)

        def choose(coming: list[float], call: AutomaticCall = call) -> int:
            # Nothing is learnt of a draft that is cut short.
            room = min(LONGEST, len(coming))
            most = min(call.begin_round(room).steps, room)
            if not call.ends_early:
                return most
            return next((step for step in range(1, most + 1) if not call.goes_on(coming[step - 1])), most)

        def tell(drafted: int, came: int, call: AutomaticCall = call) -> None:
            clock.round(drafted)
            call.end_round(came)

        rounds += replay(text, choose, tell)
    return rounds


def compare(texts: list[Text], seconds: list[float], ends_early: bool, noise: float, seeds: int) -> dict[str, float]:
    """Tokens per second of each fixed length and of automatic drafting, the mean over several random seeds."""
    speeds = {str(length): speed(replay_fixed(texts, length), seconds) for length in range(LONGEST + 1)}
    with warnings.catch_warnings():
        # Where drafting loses is in the table.
        warnings.filterwarnings("ignore", "drafting does not pay here")
        chosen = [replay_auto(texts, NoisyClock(seconds, noise, seed), ends_early) for seed in range(seeds)]
    return speeds | {"auto": mean(speed(rounds, seconds) for rounds in chosen)}


def show(console: Console, title: str, speeds: dict[str, dict[str, float]]) -> None:
    """Print a table of tokens per second, with how automatic drafting compares with the best fixed length of each
    domain, with the one that is the best of all, and with no drafts."""
    ratios_to = ["best fixed", "best of all", "no drafts"]
    headings = ["", "no drafts", "best fixed\nlength", "", "auto", *(f"auto /\n{other}" for other in ratios_to)]
    table = Table(*headings, title=title)
    lengths = [name for name in speeds["all"] if name not in ("0", "auto")]
    best_of_all = max(lengths, key=speeds["all"].get)
    for domain, of in speeds.items():
        best = max(lengths, key=of.get)
        ratios = [f"{of['auto'] / of[one]:.3f}" for one in (best, best_of_all, "0")]
        table.add_row(domain, f"{of['0']:.1f}", best, f"{of[best]:.1f}", f"{of['auto']:.1f}", *ratios)
    console.print(table)


@app.command()
def main(
    target: Annotated[str, typer.Option("--target", help="Folder or Hub id of the model to speed up.")],
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSON lines files of prompts.")],
    drafter: Annotated[str | None, typer.Option("--drafter", help="Folder or Hub id of the small model.")] = None,
    eagle: Annotated[str | None, typer.Option(help="Folder or Hub id of an EAGLE head, in its place.")] = None,
    policy: Annotated[str, typer.Option(help="Shortlist policy.")] = "hybrid",
    temperature: Annotated[list[float], typer.Option(help="0 decodes greedily.")] = [0.0, 0.8],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Prompts of each domain; all unless given.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of each prompt, about.", min=1)] = 128,
    noise: Annotated[float, typer.Option(help="Spread of the times that automatic drafting is told.", min=0)] = 0.05,
    seeds: Annotated[int, typer.Option(help="Runs with different noise, whose mean is shown.", min=1)] = 4,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write rounds, times and speeds to.")] = None,
) -> None:
    """Compare automatic drafting with every fixed length on the same drafts."""
    if len(parse_policy(policy).alternatives(None)) > 1:
        raise typer.BadParameter("it must be one policy, not a choice between several", param_hint="--policy")
    console, results = Console(), {}
    settings = PairSettings(target, drafter, prompts, max_new_tokens=max_new_tokens, limit=limit, threads=threads)
    with open_pair(settings, eagle=[eagle] if eagle else []) as pair, Progress(transient=True) as progress:
        ends_early = is_free_to_look(pair.target.device)
        for value in temperature:
            config = generation_config(pair.target, max_new_tokens + RECORDED, value)
            texts = record(pair, policy, config, progress)
            seconds = time_rounds(pair, policy, value, progress)
            domains = texts | {"all": [text for of_domain in texts.values() for text in of_domain]}
            speeds = {name: compare(of, seconds, ends_early, noise, seeds) for name, of in domains.items()}
            results[f"{value:g}"] = {"texts": texts, "seconds_of_rounds": seconds, "tokens_per_second": speeds}
            if out is not None:
                write_json(out, {"models": pair.described_models(), "results": results})
            show(console, f"tokens per second, T = {value:g}, {len(domains['all'])} prompts", speeds)
            console.print(
                "ms of a round that drafts 0, 1, 2, … tokens: " + ", ".join(f"{1e3 * s:.1f}" for s in seconds)
            )


if __name__ == "__main__":
    app()
