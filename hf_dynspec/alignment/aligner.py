"""Online alignment of an assistant's drafter, as users see it."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, shown_value
from ..fields import require_name
from .replay_state import requests_state
from .requests import RequestLearner, alone
from .saved import push_learnt, read_learnt, read_requests, save_learnt
from .statistics import AlignmentStatistics

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


class Aligner(RequestLearner):
    """Aligns a drafter with its target on what requests leave. Made by `DynSpecAssistant(…, alignment=…)`.

    What is learnt is learnt by a copy of the drafter, in fp32. While it has been measured to draft better than the
    drafter itself (`OnlineAlignment.gate`), its weights stand in the place of the drafter's own, in the drafter's
    model: between two drafts, all at once. `reset`, unbinding the assistant and dropping it put back the drafter's
    own, bit for bit. A drafter of 16 bits rounds what it is given, so that small changes count when they have added
    up in the copy. The target is never written to. Requests may run in several threads, and copies of an assistant
    share its aligner.

    An adapter is what is learnt under one name, such as a domain's or a user's: with its own requests and its own
    gate. What goes wrong while learning is warned of once and turns learning off; generation goes on.

    Args:
        drafter: what drafts. Its weights are read once, for the copy.
        settings: what is learnt, and when.
        before: the aligner in whose place this one comes, if any.

    Attributes:
        settings: as given.

    Raises:
        ConfigurationError: the drafter has no such modules, or another assistant aligns its model already.
    """

    @property
    def stats(self) -> AlignmentStatistics:
        """What has been done so far, and what it cost."""
        stats = self._training.statistics
        stats.error = self._error
        return stats

    def pause(self) -> None:
        """Record and learn nothing until `resume`. What is served stays."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    @alone
    def reset(self) -> None:
        """Forget all that was learnt, all adapters, and every request. The drafter has its own weights again. Where an
        error has turned learning off, it begins anew."""
        self._inbox.clear()
        self._training.forget()
        self._training.serves, self._error = bool(self._users), None

    @alone
    def update_now(self) -> float | None:
        """Learn from the requests that are over, whatever it takes. Errors are the caller's.

        Returns:
            The loss before the last step; None where there was nothing to learn from.
        """
        training = self._training
        training.follow_changes()
        while self._inbox:
            training.remember(*self._take_out())
        if not len(training.active_adapter.buffer):
            return None
        start = time.perf_counter()
        training.update()
        while self.settings.waits_for_full_buffer and len(training.active_adapter.buffer):
            training.update()
        training.budget.spend(time.perf_counter() - start)
        return training.statistics.loss

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of all adapters."""
        return tuple(self._training.adapters)

    @property
    def active_adapter(self) -> str:
        """The name of the adapter that is learnt and served."""
        return self._training.active

    @alone
    def add_adapter(self, name: str) -> None:
        """Add an adapter of which nothing is learnt yet. `set_adapter` switches to it.

        Raises:
            ConfigurationError: there is one of that name, or it is no name.
        """
        require_name("adapter", name)
        if name in self._training.adapters:
            raise ConfigurationError(f"there is an adapter {shown_value(name)} already. Call set_adapter.")
        self._training.add(name)

    @alone
    def set_adapter(self, name: str) -> None:
        """Learn and serve another adapter, from the next request on: requests that run now are learnt into the one
        that was active when they began.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name not in self._training.adapters:
            names = ", ".join(map(shown_value, self._training.adapters))
            raise ConfigurationError(f"there is no adapter {shown_value(name)} among {names}. Call add_adapter first.")
        if name != self.active_adapter:
            self._training.activate(name)

    @alone
    def delete_adapter(self, name: str) -> None:
        """Forget an adapter and its requests.

        Raises:
            ConfigurationError: there is none of that name, or it is the active one.
        """
        if name == self.active_adapter or name not in self._training.adapters:
            raise ConfigurationError(f"adapter {shown_value(name)} cannot be deleted: name one that is not active.")
        del self._training.adapters[name]

    # Keeping it ----------------------------------------------------------------------------------------------------

    @alone
    def state_dict(self, include_buffer: bool = False) -> dict[str, Any]:
        """All that was learnt, and how it did; no optimizer's state. Tensors are copies.

        Args:
            include_buffer: also the requests that are remembered, which are users' text.
        """
        return self._training.state(include_buffer)

    @alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave. Other requests than those that it holds are forgotten.

        Raises:
            ConfigurationError: it is of other settings or another drafter; names what differs. Nothing was changed.
        """
        self._training.load_state(state)
        self._inbox.clear()

    @alone
    def save_pretrained(self, directory: str | os.PathLike, include_buffer: bool = False) -> Path:
        """Write what the active adapter has learnt, and no user's text unless asked.

        An independent drafter's is a PEFT adapter: `peft.PeftModel.from_pretrained(model, directory)`. An EAGLE head's
        is the head with what was learnt in it, in its own layout, and beside it the adapter, for `load`. Where all
        weights are trained, it is the model or the head.

        Args:
            directory: made if needed.
            include_buffer: write the adapter's remembered requests too, to `replay_buffer.safetensors`. One that was
                written before is removed otherwise.

        Returns:
            The folder.

        Raises:
            ArtifactError: it is a file.
        """
        requests = requests_state(self._training.active_adapter.buffer) if include_buffer else None
        return save_learnt(directory, self._training.learner, requests)

    @alone
    def load(
        self,
        directory_or_repo: str | os.PathLike,
        *,
        include_buffer: bool = False,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
    ) -> None:
        """Take up what `save_pretrained` wrote, into the active adapter. With the gate it is served when it has earned
        that on the next requests.

        Args:
            directory_or_repo: a folder, or a repository on the Hub.
            include_buffer: of a folder: also the requests that lie there, in the place of those that are remembered.
            revision: of a repository: the branch, tag or commit.
            cache_dir: of a repository: where downloads are kept (None: the Hub's usual cache).
            token: of a private repository (None: the one that you are logged in with).

        Raises:
            ArtifactError: a file is missing, damaged or a pickle, or the adapter was learnt with other settings; an
                option is of a folder and this is a repository, or the other way round.
            ConfigurationError: it is of another drafter; names what differs. Nothing was changed.
        """
        training = self._training
        requests = read_requests(directory_or_repo) if include_buffer else None
        weights = read_learnt(directory_or_repo, training.learner, revision, cache_dir, token)
        training.load_saved(weights, requests)

    @alone
    def push_to_hub(self, repo_id: str, **options: Any) -> "CommitInfo":
        """Publish what `save_pretrained` writes, in one commit. Requests are never published.

        Args:
            repo_id: the repository; made if needed.
            options: `private`, `token`, `commit_message` and `api`, the client of another Hub.

        Raises:
            ArtifactError: there is no such place, or the Hub is not to be asked.
        """
        return push_learnt(self._training.learner, repo_id, **options)
