"""DynSpecAssistant: a drafter, its dynamic head and a shortlist policy, ready to be passed as `assistant_model`."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..alignment.aligner import Aligner
from ..alignment.settings import OnlineAlignment
from ..drafters import Drafter
from ..drafting.settings import as_tree_config, drafting_config
from ..errors import ConfigurationError
from ..shortlists import ShortlistPolicy, as_policy
from ..tree_config import TreeConfig
from .bound import BoundAssistant
from .models import known_drafter
from .saved import SavedAssistant

if TYPE_CHECKING:
    from ..evaluation.doctor.diagnosis import Diagnosis


class DynSpecAssistant(BoundAssistant, SavedAssistant):
    """Drafts with a small, context-dependent vocabulary; the target verifies with all of its own.

    ```python
    assistant = DynSpecAssistant(drafter, target=target)
    target.generate(**inputs, assistant_model=assistant)
    ```

    The settings that transformers reads from an assistant's `generation_config` live in `assistant.generation_config`
    here too: `num_assistant_tokens`, `num_assistant_tokens_schedule`, `assistant_confidence_threshold`. Each is taken
    from the constructor, else from the drafter's generation config where that sets it, else from the target's, else
    from the defaults below. A call may have others, by keyword or in its `generation_config`.

    Two `generate` calls on one assistant may run in two threads. A policy, drafter, tree or tokenizer that is assigned
    later takes effect at the next call, and is refused as it would be here. Weights of the models may change, adapters
    in them come and go: the next round drafts with what is there. A copy (`copy.deepcopy`) is an assistant with
    settings and statistics of its own, of the same models and bound to the same target.

    Args:
        drafter: a decoder-only causal language model of transformers with the target's tokenizer, which may be in
            wrappers (peft, `torch.compile`); an `EagleDrafter` or an `MtpDrafter`; a Gemma-4 assistant or a DFlash
            drafter beside its target; `"mtp"` for the MTP layers in the target's checkpoint; or the folder or Hub id
            of any of these, which is loaded in the target's dtype and on its device once there is a target.
        policy: a `ShortlistPolicy`, the name of one (`"full"`, `"frequency"`, `"in_context"`, `"hybrid"`, `"screen"`,
            or `"auto"` for the fastest of several in each round), or None for `HybridShortlist()`, which needs nothing
            built or trained.
        target: the model to speed up; the same as calling `bind(target)` afterwards.
        tokenizer: the tokenizer of both models. By default it is looked up, on this computer only, where the models
            were loaded from; it tells how many token ids are real, as models pad their embeddings.
        num_assistant_tokens: tokens drafted per round (default 5, or those of a block if the drafter drafts blocks),
            or `"auto"`: up to 12, as many in each round as promise the most tokens per second, and none while drafting
            loses; with `tree`, trees up to its size. Output is lossless either way. With `"auto"`, and with the policy
            `"auto"`, sampled tokens depend on the clock as well as on the seed.
        assistant_confidence_threshold: stop a draft after a token that the drafter found less probable than this. Off
            by default, and not for trees; it costs one wait for the device per draft step.
        tree: draft dynamic trees (EAGLE-2; when sampling, of drawn tokens) of this shape, or of the default shape for
            True, instead of chains of `num_assistant_tokens`.
        profile: measure where the time goes. Slows the call down where it runs on a GPU.
        measure_coverage: measure the target's probability mass on the shortlists, for study; slows the call down.
        fast_target_head: on a CPU in fp32, compute the target's logits by this package's matrix product, which is
            faster than torch's there (default True). Plain `generate` does not have it, so part of what it wins is no
            merit of speculation; `hf-dynspec bench` tells the two apart.
        validate: check every shortlist that the policy returns, for those who write policies: a broken contract raises
            `PolicyError` at the draft step where it breaks. Slows the call down (default False).
        alignment: let the drafter learn, while it generates, from what the target says of its drafts (default None:
            it stays as it is). `assistant.alignment` is then an `alignment.aligner.Aligner`.

    Raises:
        UnsupportedError: the drafter or the target cannot be used, or they do not share a tokenizer.
        ConfigurationError: a setting is mistyped or out of range.
        ArtifactError: the policy's ranking was made for another tokenizer.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter | str | os.PathLike,
        policy: ShortlistPolicy | str | None = None,
        *,
        target: PreTrainedModel | None = None,
        tokenizer: Any = None,
        num_assistant_tokens: int | str | None = None,
        assistant_confidence_threshold: float | None = None,
        tree: bool | TreeConfig = False,
        profile: bool = False,
        measure_coverage: bool = False,
        fast_target_head: bool = True,
        validate: bool = False,
        alignment: OnlineAlignment | None = None,
    ):
        super().__init__()
        drafter = known_drafter(drafter, target)
        self._policy = as_policy(policy)
        tokens = drafter.block_size if num_assistant_tokens is None else num_assistant_tokens
        own = getattr(drafter, "model", None)
        self.generation_config, self.defaults = drafting_config(own, tokens, assistant_confidence_threshold)
        self._tree = as_tree_config(tree)
        if self._tree is not None and assistant_confidence_threshold:
            raise ConfigurationError("assistant_confidence_threshold is for chains: leave it out, or tree")
        if isinstance(tokenizer, str | os.PathLike):
            raise ConfigurationError(f"tokenizer must be loaded: AutoTokenizer.from_pretrained({str(tokenizer)!r})")
        self._drafter = drafter
        self._given_tokenizer = tokenizer
        self._tokenizer = tokenizer
        self.profile = profile
        self.measure_coverage = measure_coverage
        self._fast_target_head = fast_target_head
        self._validate = validate
        self._aligner = None if alignment is None else Aligner(self._drafter, alignment)
        if target is not None:
            self.bind(target)

    def __repr__(self) -> str:
        target = f"a {type(self.target).__name__}" if self.target is not None else "no target yet"
        return f"<{type(self).__name__}: {type(self.drafter).__name__} with {self.policy.name!r} for {target}>"

    # Settings ------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> ShortlistPolicy:
        """How shortlists are made. May be assigned: a policy, the name of one, or None for the default."""
        return self._policy

    @policy.setter
    def policy(self, policy: ShortlistPolicy | str | None) -> None:
        self._change(_policy=as_policy(policy))

    @property
    def drafter(self) -> Drafter:
        """What drafts for the bound target. May be assigned: whatever the constructor takes."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: PreTrainedModel | Drafter | str | os.PathLike) -> None:
        drafter, before = known_drafter(drafter, self.target), self._aligner
        if before is None or drafter is self._drafter:
            self._change(_drafter=drafter)
            return
        with before.standing_aside(self):
            self._change(_drafter=drafter, _aligner=Aligner(drafter, before.settings, before))

    @property
    def alignment(self) -> Aligner | None:
        """What aligns the drafter, None where nothing does. Another drafter that is assigned learns anew."""
        return self._aligner

    @property
    def tree(self) -> TreeConfig | None:
        """The shape of the trees to draft, None for chains. May be assigned: also True or False."""
        return self._tree

    @tree.setter
    def tree(self, tree: bool | TreeConfig | None) -> None:
        self._change(_tree=as_tree_config(tree or False))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of both models, None where it is not known. May be assigned."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._change(_given_tokenizer=tokenizer, _tokenizer=tokenizer)

    @property
    def fast_target_head(self) -> bool:
        """Whether the target's logits are computed by this package's product, where it is faster. May be assigned."""
        return self._fast_target_head

    @fast_target_head.setter
    def fast_target_head(self, fast_target_head: bool) -> None:
        self._change(_fast_target_head=bool(fast_target_head))

    @property
    def validate(self) -> bool:
        """Whether every shortlist of the policy is checked. May be assigned."""
        return self._validate

    @validate.setter
    def validate(self, validate: bool) -> None:
        self._change(_validate=bool(validate))

    def _change(self, **attributes: Any) -> None:
        """Set attributes and bind with them anew, or raise and leave everything as it was."""
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        target = self.target
        try:
            if target is not None:
                self.bind(target)
        except BaseException:
            vars(self).update(before)
            raise

    # What to expect ------------------------------------------------------------------------------------------------

    def diagnose(
        self,
        prompts: Sequence[str] | None = None,
        *,
        report: Callable[[str, int, int], None] = lambda activity, done, total: None,
        **settings: Any,
    ) -> "Diagnosis":
        """Measure whether drafting pays for the target and the drafter on this computer, with which settings, and why.

        Takes a minute or two, in which nothing else should run. The assistant and its models stay as they were.

        Args:
            prompts: texts to measure on (None: a few of several kinds). The more they are like yours, the better.
            report: called between generations with what is being done, the seconds that went by, and about how many
                there are in all.
            settings: of `evaluation.doctor.settings.DoctorSettings`, such as `policies`, `temperature`, `tree`,
                `max_new_tokens` or `seconds`.

        Returns:
            What was found. `print` shows it; `sentence` and `line` say what to do, `speeds` has every measured setting
            and `to_dict()` everything, as JSON values.

        Raises:
            NotBoundError: the assistant is not bound to a target.
            ConfigurationError: a setting is out of range, the prompts are no texts, or the tokenizer is not known.
            WorkloadError: a prompt has no tokens or too many.
        """
        from ..evaluation.doctor.measure import diagnose_assistant

        return diagnose_assistant(self, DynSpecAssistant, prompts, report, settings)
