"""Adapters by name, what is kept of them in memory and in files, and that no text is unless asked."""

import copy
import json
import warnings
from dataclasses import fields
from pathlib import Path

import peft
import pytest
import torch
from aligned import QUICK, TREE, digest, quick_assistant, recorded, stream, taught
from eagle_heads import agreeing_head, drafter_of, soft
from huggingface_hub import HfApi
from local_hub import running_hub
from models import perturbed, prompt, tiny
from transformers import AutoModelForCausalLM

from hf_dynspec import ArtifactError, ConfigurationError, DynSpecAssistant, EagleDrafter, OnlineAlignment
from hf_dynspec.alignment import Trajectory

# Adapters and files --------------------------------------------------------------------------------------------------


def test_adapters_are_switched_between_calls(target, drafter):
    own = digest(drafter)
    assistant = quick_assistant(drafter, target)
    alignment = assistant.alignment
    stream(target, assistant, 2)
    first = digest(drafter)
    alignment.add_adapter("law")
    assert digest(drafter) == first and alignment.adapters == ("default", "law")
    alignment.set_adapter("law")
    assert alignment.active_adapter == "law" and digest(drafter) == own
    assert recorded(assistant) == [], "one user's requests are not learnt from for another"
    stream(target, assistant, 1)
    law = digest(drafter)
    alignment.set_adapter("default")
    assert digest(drafter) == first
    alignment.set_adapter("law")
    assert digest(drafter) == law
    with pytest.raises(ConfigurationError, match="no adapter 'med'"):
        alignment.set_adapter("med")
    with pytest.raises(ConfigurationError, match="already"):
        alignment.add_adapter("law")
    with pytest.raises(ConfigurationError, match="not active"):
        alignment.delete_adapter("law")
    alignment.delete_adapter("default")
    assert alignment.adapters == ("law",)


def test_a_state_is_taken_up_by_another_assistant(target, drafter):
    own = copy.deepcopy(drafter)
    assistant = taught(2, drafter, target)
    assistant.alignment.add_adapter("law")
    other = quick_assistant(own, target)
    other.alignment.load_state_dict(assistant.alignment.state_dict())
    assert digest(own) == digest(drafter) and other.alignment.adapters == ("default", "law")
    for wrong in ({}, {"active": "x", "adapters": {}}, {"active": "a", "adapters": {"a": {"weights": {"b": 1}}}}):
        with pytest.raises(ConfigurationError):
            other.alignment.load_state_dict(wrong)
        assert digest(own) == digest(drafter)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_peft_loads_what_is_saved(family, tmp_path):
    """And says the same: a wrong prefix would only be warned of."""
    target = tiny(family)
    drafter = perturbed(target, 0.3)
    plain = copy.deepcopy(drafter)
    assistant = taught(3, drafter, target)
    assistant.alignment.save_pretrained(tmp_path)
    text = prompt(20, seed=5)
    with torch.no_grad():
        expected, before = drafter(text).logits, plain(text).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = peft.PeftModel.from_pretrained(plain, tmp_path)
        actual = model(text).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, before, atol=1e-2)


def test_what_is_saved_is_loaded(target, drafter, tmp_path):
    own = copy.deepcopy(drafter)
    assistant = taught(2, drafter, target)
    folder = assistant.alignment.save_pretrained(tmp_path / "adapter")
    other = quick_assistant(own, target)
    other.alignment.load(folder)
    assert digest(own) == digest(drafter)
    another = DynSpecAssistant(perturbed(target), target=target, alignment=OnlineAlignment(**QUICK | {"rank": 4}))
    with pytest.raises(ArtifactError, match=r"adapter_config.json: r: is 8"):
        another.alignment.load(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="is a pickle"):
        other.alignment.load(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern: sets ranks"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: sets ranks"),
        # peft takes 8 for it then.
        ({"lora_alpha": None}, "lora_alpha: is 8, and this drafter learns with 32.0"),
    ],
    ids=["alpha_pattern", "rank_pattern", "lora_alpha"],
)
def test_an_adapter_that_would_be_scaled_otherwise_is_refused(changes, problem, target, drafter, tmp_path):
    aligner = quick_assistant(drafter, target).alignment
    folder = aligner.save_pretrained(tmp_path / "adapter")
    path = folder / "adapter_config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))
    with pytest.raises(ArtifactError, match=f"adapter_config.json: {problem}"):
        aligner.load(folder)


@pytest.mark.parametrize("layout", ["eagle2", "eagle3", "speculators"])
def test_an_eagle_head_is_saved_in_its_own_layout(layout, tmp_path):
    target = soft()
    head = drafter_of(agreeing_head(layout), target)
    assistant = taught(3, head, target, tree=TREE)
    assistant.alignment.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path, target=target)
    for name, one in loaded.module.named_parameters():
        torch.testing.assert_close(one, head.module.get_parameter(name), rtol=1e-5, atol=1e-5)
    again = drafter_of(agreeing_head(layout), target)
    other = quick_assistant(again, target)
    other.alignment.load(tmp_path)
    assert digest(again.module) == digest(head.module)


def test_a_model_that_was_trained_whole_is_saved_whole(target, drafter, tmp_path):
    own = copy.deepcopy(drafter)
    settings = OnlineAlignment.osd(synchronous=True)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    stream(target, assistant, 2)
    assistant.alignment.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert digest(loaded) == digest(drafter)
    other = DynSpecAssistant(own, "full", target=target, alignment=settings)
    other.alignment.load(tmp_path)
    assert digest(own) == digest(drafter)


def test_what_is_learnt_is_published_and_fetched(target, drafter, monkeypatch, tmp_path):
    own = copy.deepcopy(drafter)
    assistant = taught(2, drafter, target)
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        api = HfApi(endpoint=hub.endpoint, token="secret")
        assistant.alignment.push_to_hub("acme/aligned", api=api)
        names = ("adapter_config.json", "adapter_model.safetensors")
        paths = [Path(api.hf_hub_download("acme/aligned", name)) for name in names]
    other = quick_assistant(own, target)
    other.alignment.load(paths[0].parent)
    assert digest(own) == digest(drafter)


def test_no_text_is_written(target, drafter, tmp_path):
    assistant = taught(1, drafter, target)
    assistant.alignment.save_pretrained(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    integers = [one for one in _tensors_in(assistant.alignment.state_dict()) if not one.is_floating_point()]
    assert integers == []


def _tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [one for item in value.values() for one in _tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


# Users' text ---------------------------------------------------------------------------------------------------------


FULL = {"update_at": "full_buffer", "fill": "gate", "buffer": 10}


def assert_same_requests(ones: list[Trajectory], others: list[Trajectory]) -> None:
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        for field in fields(Trajectory):
            value, its = getattr(one, field.name), getattr(other, field.name)
            assert torch.equal(value, its) if isinstance(value, torch.Tensor) else value == its, field.name


@pytest.mark.parametrize("way", ["state", "files"])
@pytest.mark.parametrize("settings", [{}, FULL], ids=["", "full"])
def test_requests_are_kept_where_that_is_asked_for(settings, way, target, drafter, tmp_path):
    settings = OnlineAlignment(**QUICK | settings)
    assistant = DynSpecAssistant(copy.deepcopy(drafter), "full", target=target, alignment=settings)
    other = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    stream(target, assistant, 3)
    if way == "state":
        other.alignment.load_state_dict(assistant.alignment.state_dict(include_buffer=True))
    else:
        assistant.alignment.save_pretrained(tmp_path, include_buffer=True)
        other.alignment.load(tmp_path, include_buffer=True)
    assert_same_requests(recorded(assistant), recorded(other))
    assert other.alignment.stats.buffer_bytes == assistant.alignment.stats.buffer_bytes
    assert other.alignment.update_now() is not None
    other.alignment.reset()
    assert recorded(other) == []


def test_requests_of_an_eagle_head_are_kept_with_what_it_reads(tmp_path):
    target = soft()
    assistants = [quick_assistant(drafter_of(agreeing_head("eagle3"), target), target) for _ in range(2)]
    stream(target, assistants[0], 2)
    assistants[0].alignment.save_pretrained(tmp_path, include_buffer=True)
    assistants[1].alignment.load(tmp_path, include_buffer=True)
    assert_same_requests(*map(recorded, assistants))
    independent = DynSpecAssistant(perturbed(target), target=target, alignment=OnlineAlignment(**QUICK))
    independent.alignment.save_pretrained(tmp_path / "other")
    (tmp_path / "replay_buffer.safetensors").rename(tmp_path / "other" / "replay_buffer.safetensors")
    with pytest.raises(ConfigurationError, match="reads other things of the target"):
        independent.alignment.load(tmp_path / "other", include_buffer=True)


def test_text_that_was_written_is_removed_when_it_is_not_asked_for_again(target, drafter, tmp_path):
    assistant = taught(1, drafter, target)
    assistant.alignment.save_pretrained(tmp_path, include_buffer=True)
    assert (tmp_path / "replay_buffer.safetensors").exists()
    assistant.alignment.save_pretrained(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(ArtifactError, match=r"replay_buffer\.safetensors"):
        assistant.alignment.load(tmp_path, include_buffer=True)
    with pytest.raises(ArtifactError, match="requests are never published"):
        assistant.alignment.load("acme/aligned", include_buffer=True)


def with_changed(state: dict, **changes) -> dict:
    """A state whose first request has other values; None leaves one out."""
    adapter = state["adapters"]["default"]
    first, *others = adapter["requests"]
    first = {name: one for name, one in (first | changes).items() if one is not None}
    return {**state, "adapters": {"default": {**adapter, "requests": [first, *others]}}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": torch.full((36,), 301)}, "an id is no token; there are 301"),
        ({"token_ids": torch.zeros(5, dtype=torch.int64)}, "tokens are verified, and they begin at"),
        ({"first": torch.tensor(0)}, "tokens are verified, and they begin at"),
        ({"top_ids": torch.zeros(2, 50, dtype=torch.int64)}, "top_ids has the shape"),
        ({"top_logits": torch.zeros(24, 50, dtype=torch.int64)}, "top_logits is torch.int64"),
        ({"is_wrong": torch.zeros(24)}, "is_wrong is torch.float32"),
        ({"log_normalisers": torch.full((24,), torch.nan)}, "log_normalisers holds NaN"),
        ({"temperature": torch.tensor(-1.0)}, "its temperature is -1"),
        ({"shortlist_ids": torch.tensor([-1])}, "an id is no token"),
        ({"shortlist_ids": None}, "lacks or has too much of shortlist_ids"),
        ({"more": torch.zeros(1)}, "lacks or has too much of more"),
        ({"token_ids": [1, 2]}, "token_ids is no tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_requests_that_cannot_be_are_refused_whole(changes, problem, target, drafter):
    assistant = taught(2, drafter, target)
    held, before = recorded(assistant), digest(drafter)
    state = assistant.alignment.state_dict(include_buffer=True)
    with pytest.raises(ConfigurationError, match=rf"request 0 of the replay buffer: .*{problem}"):
        assistant.alignment.load_state_dict(with_changed(state, **changes))
    assert recorded(assistant) == held and digest(drafter) == before


@pytest.mark.parametrize("settings", [{}, {"modules": "all-parameters"}], ids=["LoRA", "all"])
@pytest.mark.parametrize("kind", ["independent", "eagle3"])
def test_options_that_say_nothing_of_a_folder_are_refused(kind, settings, tmp_path):
    """A revision of a repository whose name a folder here has would be taken for one that was loaded."""
    target = soft()
    drafter = perturbed(target) if kind == "independent" else drafter_of(agreeing_head(kind), target)
    alignment = quick_assistant(drafter, target, **settings).alignment
    alignment.save_pretrained(tmp_path)
    for name, value in {"revision": "main", "cache_dir": tmp_path / "cache", "token": "secret"}.items():
        with pytest.raises(ArtifactError, match=rf"{name}: is of a repository, and .* is a folder here") as error:
            alignment.load(tmp_path, **{name: value})
        assert "secret" not in str(error.value)
    with pytest.raises(TypeError, match="'revison'"):
        alignment.load(tmp_path, revison="main")
    alignment.load(tmp_path)
