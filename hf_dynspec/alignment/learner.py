"""Training of a copy of a drafter on recorded requests."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..drafters.base import Drafter
from ..errors import ConfigurationError, UnsupportedError, shown_text
from ..modeling.parts import is_memory
from .objectives import OBJECTIVES, Horizon, choose_places, unroll
from .replay import Trajectory
from .settings import ALL_LINEAR, ALL_PARAMETERS, OnlineAlignment

if TYPE_CHECKING:
    from peft import LoraConfig

LARGEST_GRADIENT_NORM = 1.0
# peft's name of the only adapter, and its prefix of modules in an adapter's file.
_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."
_16_BITS = (torch.float16, torch.bfloat16)


class Learner:
    """Trains a copy of a drafter: LoRA on some of its modules, or all of its weights.

    The drafter itself is only copied, and never changed; its owner copies the trained `weights` into it. The copy has
    fp32 in place of 16-bit weights. Not for several threads at once.

    Args:
        drafter: the drafter to copy.
        settings: see `OnlineAlignment`.

    Attributes:
        drafter: the copy.
        dropped: the number of steps that were dropped because loss or gradients were not finite.

    Raises:
        ConfigurationError: the drafter has no modules of the names in `settings.modules`, or peft cannot adapt them.
        NotImplementedError, UnsupportedError: the drafter cannot be copied, or its weights are packed.
    """

    def __init__(self, drafter: Drafter, settings: OnlineAlignment):
        self.settings = settings
        self.dropped = 0
        packed = next((name for name, one in drafter.module.named_parameters() if not is_memory(one)), None)
        if packed is not None:
            raise UnsupportedError(f"alignment cannot change {packed}, which is packed: load the drafter unpacked.")
        with torch.inference_mode(False):
            self.drafter = drafter.copy()
            module = self.drafter.module
            self._dtypes = {name: one.dtype for name, one in module.named_parameters()}
            if any(dtype in _16_BITS for dtype in self._dtypes.values()):
                module.float()
                # This renews the copy's own copies of weights.
                _ = self.drafter.weights_version
            self._adapted = {} if settings.trains_all_parameters else self._inject()
            if settings.trains_all_parameters and not any(one.requires_grad for one in module.parameters()):
                module.requires_grad_(True)
            self._trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
            # LoRA does not change the adapted weights. Trained weights must be kept.
            self._base = {} if self._adapted else {name: one.detach().clone() for name, one in self._trained.items()}
            self.reset()

    def _inject(self) -> dict[str, nn.Module]:
        """Put LoRA around the modules of the settings, and return its layers by these modules' names."""
        from peft import LoraConfig, inject_adapter_in_model

        module = self.drafter.module
        names = _modules_named(module, self.settings.modules)
        _require_untied(module, names)
        self._adapter_config = LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.alpha,
            lora_dropout=0.0,
            target_modules=names,
            fan_in_fan_out=any(_is_transposed(module.get_submodule(name)) for name in names),
        )
        try:
            # Without storage: peft would draw the matrices from the generator that users seed and other threads use.
            inject_adapter_in_model(self._adapter_config, module, _ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigurationError(f"modules: peft cannot adapt {', '.join(names)}: {error}") from error
        adapted = {name: module.get_submodule(name) for name in names}
        for layer in adapted.values():
            for matrices in (layer.lora_A, layer.lora_B):
                matrices[_ADAPTER].to_empty(device=layer.get_base_layer().weight.device)
        return adapted

    # Training --------------------------------------------------------------------------------------------------------

    def chosen(self, trajectory: Trajectory) -> Trajectory | None:
        """The request with its training places (None: it has none). See `choose_places`."""
        with torch.inference_mode(False):
            return choose_places(self.drafter, trajectory, self.settings)

    def chosen_again(self, trajectory: Trajectory) -> Trajectory | None:
        """`chosen` for a loaded request, which keeps its places if this chooses any.

        Raises:
            RuntimeError: the request is another drafter's.
        """
        with torch.inference_mode(False), torch.no_grad():
            if unroll(self.drafter, trajectory, self.settings) is None:
                return None
        chosen = self.chosen(replace(trajectory, is_chosen=None))
        if chosen is None or chosen.is_chosen is None or trajectory.is_chosen is None:
            return chosen
        return trajectory

    def step(self, trajectories: Sequence[Trajectory]) -> float | None:
        """One optimizer step on the mean loss of some trajectories, with gradients clipped to a norm of 1. Requests
        have equal weights, or, if places were chosen, their places do.

        Returns:
            The loss before the step. None if there was nothing to learn from, or if loss or gradients were not finite,
            which leaves the weights unchanged.
        """
        with torch.inference_mode(False), torch.enable_grad():
            try:
                weights = [one.places or 1 for one in trajectories]
                shares = [weight / sum(weights) for weight in weights]
                losses = [self._backward(*each) for each in zip(trajectories, shares, strict=True)]
                scored = [(share, loss) for share, loss in zip(shares, losses, strict=True) if loss is not None]
                if not scored:
                    return None
                # Waits for the device once.
                total = torch.stack([share * loss for share, loss in scored]).sum()
                return self._descend(float(total / sum(share for share, _ in scored)))
            finally:
                self._scored.clear()
                self._optimizer.zero_grad(set_to_none=True)

    def _descend(self, loss: float) -> float | None:
        """Make the optimizer's step, and return the loss (None: the step was dropped)."""
        self._gradient_bytes = sum(one.grad.nbytes for one in self._trained.values() if one.grad is not None)
        norm = nn.utils.clip_grad_norm_(self._trained.values(), LARGEST_GRADIENT_NORM)
        if not math.isfinite(loss) or not bool(norm.isfinite()):
            self.dropped += 1
            return None
        self._optimizer.step()
        return loss

    def _backward(self, trajectory: Trajectory, share: float) -> torch.Tensor | None:
        """Add a request's share to the gradients, and return its loss (None: it has none)."""
        horizon = self._scored.pop(trajectory, None) or unroll(self.drafter, trajectory, self.settings)
        if horizon is None:
            return None
        loss = OBJECTIVES[self.settings.objective].loss(horizon, self.settings)
        (share * loss).backward()
        return loss.detach()

    def acceptance(self, trajectory: Trajectory) -> tuple[float, float] | None:
        """`acceptance_of` a trajectory with the base weights and with the trained ones, for the gate (None: nothing
        could be scored). A step on the same trajectory right after it costs less."""
        # Without gradients an EAGLE head would fuse its weights each time.
        with torch.inference_mode(False), torch.enable_grad():
            with self._with_base_weights():
                before = unroll(self.drafter, trajectory, self.settings)
            learnt = unroll(self.drafter, trajectory, self.settings)
            if before is None or learnt is None:
                return None
            self._scored = {trajectory: learnt}
            scores = before.acceptance(), learnt.acceptance()
            return None if None in scores else scores

    @contextmanager
    def _with_base_weights(self) -> Iterator[None]:
        learnt = {name: one.data for name, one in self._trained.items()} if self._base else {}
        try:
            for layer in self._adapted.values():
                layer.enable_adapters(False)
            for name in learnt:
                self._trained[name].data = self._base[name]
            yield
        finally:
            for layer in self._adapted.values():
                layer.enable_adapters(True)
            for name, tensor in learnt.items():
                self._trained[name].data = tensor

    def reset(self) -> None:
        """Go back to `base_weights`, with a new optimizer."""
        random = torch.Generator().manual_seed(self.settings.seed)
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._adapted.values():
                first, second = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
                # As peft does, but with a generator of its own.
                drawn = torch.empty(first.shape, dtype=first.dtype, device="cpu")
                first.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=random))
                second.zero_()
            for name, tensor in self._base.items():
                self._trained[name].copy_(tensor)
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        # Drafts unrolled by `acceptance` with the present weights.
        self._scored: dict[Trajectory, Horizon] = {}
        self._gradient_bytes = 0
        parameters = list(self._trained.values())
        self._optimizer = torch.optim.AdamW(parameters, lr=self.settings.learning_rate, weight_decay=0.0)

    # Weights ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """New tensors of the trained or adapted weights, by the names of the `module`'s parameters, with adapters
        merged and in the drafter's dtypes."""
        if not self._adapted:
            return {name: one.detach().to(self._dtypes[name], copy=True) for name, one in self._trained.items()}
        merged = {}
        for name, layer in self._adapted.items():
            weight = layer.get_base_layer().weight
            merged[f"{name}.weight"] = (weight + layer.get_delta_weight(_ADAPTER)).to(self._dtypes[f"{name}.weight"])
        return merged

    @torch.no_grad()
    def base_weights(self) -> dict[str, torch.Tensor]:
        """The drafter's own weights before training, with the names of `weights` and the same bits. Not to be written
        to."""
        adapted = {f"{name}.weight": layer.get_base_layer().weight for name, layer in self._adapted.items()}
        return {name: one.detach().to(self._dtypes[name]) for name, one in (self._base or adapted).items()}

    def adapter_config(self) -> "LoraConfig | None":
        """peft's configuration of the adapter (None: there is no LoRA)."""
        return self._adapter_config if self._adapted else None

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """Copies of the LoRA matrices by peft's names in an adapter's file; without LoRA, of all trained weights by
        their own names."""
        return {name: one.detach().clone() for name, one in self._named_state().items()}

    def load_adapter_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load an `adapter_state`, and begin with a new optimizer.

        Raises:
            ConfigurationError: names or shapes are not those of this learner, or a value is not finite. It names them,
                and nothing is changed.
        """
        own = self._named_state()
        wrong = sorted(set(own) ^ set(state)) or [name for name in own if own[name].shape != state[name].shape]
        if wrong:
            shown = shown_text(", ".join(wrong), 400)
            raise ConfigurationError(
                f"the adapter is of another drafter, or of other modules or another rank: {shown}. Load it with the "
                "settings that it was learnt with."
            )
        if broken := [name for name in own if not bool(state[name].isfinite().all())]:
            raise ConfigurationError(f"the adapter holds NaN or infinity: {shown_text(', '.join(broken), 400)}.")
        with torch.inference_mode(False), torch.no_grad():
            for name, one in own.items():
                one.copy_(state[name])
        self._start_optimizer()

    def _named_state(self) -> dict[str, nn.Parameter]:
        if not self._adapted:
            return self._trained
        return {_PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): one for name, one in self._trained.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's state and of the last step's gradients."""
        states = (value for state in self._optimizer.state.values() for value in state.values())
        return self._gradient_bytes + sum(value.nbytes for value in states if isinstance(value, torch.Tensor))

    def base_digest(self) -> str:
        """SHA-256 of all the drafter's weights before training, which does not change it."""
        digest = hashlib.sha256()
        frozen = {name: one for name, one in self.drafter.module.named_parameters() if name not in self._trained}
        for name, one in sorted((frozen | self._base).items()):
            digest.update(f"{name} {tuple(one.shape)} {one.dtype}".encode())
            digest.update(one.detach().cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer of GPT-2, which has a transposed weight."""
    return type(module).__name__ == "Conv1D"


def _modules_named(module: nn.Module, wanted: str | tuple[str, ...]) -> list[str]:
    """The full names of the linear layers to adapt. An unknown name is refused with the names that there are."""
    find_projection = getattr(module, "get_output_embeddings", None)
    projection = getattr(module, "lm_head", None) if find_projection is None else find_projection()
    linear = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear) or _is_transposed(one)}
    if wanted == ALL_LINEAR:
        return [name for name, one in linear.items() if one is not projection]
    found: list[str] = []
    for last in wanted:
        of_this = [name for name in linear if name == last or name.endswith(f".{last}")]
        if not of_this:
            there_are = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigurationError(f"modules: the drafter has no linear layer {last!r}. There are {there_are}.")
        found += [name for name in of_this if name not in found]
    return found


def _require_untied(module: nn.Module, names: list[str]) -> None:
    """Refuse to adapt weights that other modules share, such as an output projection that is the embedding too."""
    shares: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shares.setdefault(id(parameter), []).append(name)
    for name in names:
        others = [one for one in shares[id(module.get_submodule(name).weight)] if one != f"{name}.weight"]
        if others:
            raise ConfigurationError(
                f"modules: the weight of {name} is {others[0]} too, which would change with it. Leave it out, or "
                f'train all weights with "{ALL_PARAMETERS}".'
            )
