"""What can draft for a target, and how it is used."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from ...drafters import MtpDrafter
from ...errors import DynSpecError
from ...generation.refusals import check_target
from ...generation.target import TargetForward


class WayToDraft(NamedTuple):
    """A kind of drafter for a target.

    Args:
        drafter: what drafts.
        why_not: why it cannot (None: it can).
        use: how it is used.
    """

    drafter: str
    why_not: str | None
    use: str


class WaysToDraft(NamedTuple):
    """The kinds of drafters for a target, and its limits.

    Args:
        target: its class.
        ways: the kinds of drafters.
        why_no_trees: why the target verifies chains alone (None: trees too).
        why_no_batches: why texts are generated one by one in transformers' own cache (None: batches, static caches
            and graphs on a GPU work).
    """

    target: str
    ways: list[WayToDraft]
    why_no_trees: str | None
    why_no_batches: str | None

    def to_dict(self, command: Sequence[str]) -> dict[str, object]:
        """As JSON values, with the words of the command."""
        return self._asdict() | {"ways": [way._asdict() for way in self.ways], "command": list(command)}

    def report(self) -> Iterator[str]:
        """Lines for a terminal."""
        yield f"What can draft for {self.target}:"
        for way in self.ways:
            yield f"* {way.drafter}: {f'no. {way.why_not}' if way.why_not else f'yes, by {way.use}'}"
        for what, reason in (("Trees", self.why_no_trees), ("Batches and graphs", self.why_no_batches)):
            yield f"{what}: {f'no. {reason}' if reason else 'yes'}"


def ways_to_draft(target: PreTrainedModel, name: str) -> WaysToDraft:
    """Find what can draft for a target.

    Args:
        target: the model.
        name: its folder or Hub id, for commands.

    Raises:
        UnsupportedError: nothing can, as it cannot verify.
    """
    check_target(target)
    forward = TargetForward(target, fast_head=False)
    why_no_trees = _why_not(lambda: TargetForward(target, fast_head=False, verifies_trees=True))
    why_no_states = None
    if not forward.has_head_state:
        why_no_states = "The output projection is given another hidden state than transformers returns."
    of_gemma4 = target.config.get_text_config().model_type.startswith("gemma4")
    ways = [
        WayToDraft("a small model with the same tokenizer", None, "--drafter FOLDER; train drafter makes one"),
        WayToDraft(
            "an EAGLE head",
            why_no_states,
            f"--eagle FOLDER; hf-dynspec train eagle --target {name} makes one",
        ),
        WayToDraft("its own MTP layers", _why_not(lambda: MtpDrafter.from_pretrained(target)), "--drafter mtp"),
    ]
    if of_gemma4:
        ways.append(WayToDraft("a Gemma-4 assistant", None, "--drafter FOLDER, with --policy native or another one"))
    return WaysToDraft(type(target).__name__, ways, why_no_trees, _why_not(forward.require_batches))


def _why_not(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except DynSpecError as error:
        return str(error)
    return None
