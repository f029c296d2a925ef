"""The one place that loads models and tokenizers and finds the ids that end a text."""

import pytest
import torch
from models import EOS, perturbed, prompt, tiny, word_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_dynspec import ConfigurationError, DynSpecAssistant
from hf_dynspec.loading import find_eos_token_ids, load_model, load_tokenizer, local_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and no tokenizer beside it."""
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3").save_pretrained(folder)
    return folder


def test_a_model_is_loaded_as_it_was_saved_and_ready_to_generate(folder):
    model = load_model(folder, device=torch.device("cpu"), dtype="float32", role="target")
    assert not model.training and model.dtype == torch.float32 and model.device.type == "cpu"
    assert torch.equal(model(prompt()).logits, tiny("qwen3")(prompt()).logits)
    assert load_model(folder, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


def test_pickles_are_not_loaded(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(tiny("qwen3").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ConfigurationError, match=r"the drafter .* cannot be loaded on cpu as auto: .*safetensors"
    ) as caught:
        load_model(tmp_path, device="cpu", role="drafter")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_told_in_one_line(folder, device):
    with pytest.raises(ConfigurationError, match=f"cannot be loaded on {device}") as caught:
        load_model(folder, device=device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_mistyped_folder_is_told_to_be_none(load, monkeypatch):
    """It may be the name of a repository too, and that is all that the Hub's client speaks of."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match=r"There is no folder models/targt here\."):
        load("models/targt")


def test_a_model_without_a_tokenizer_has_none(folder, tmp_path):
    """transformers makes one up for some models, of a special token alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert local_tokenizer(model) is None
    with pytest.raises(ConfigurationError, match=r"no tokenizer can be loaded from .*Give the folder"):
        load_tokenizer(folder)
    # With one of a single token, nothing but that could be drafted.
    with pytest.warns(UserWarning, match="could not be compared"):
        assistant = DynSpecAssistant(perturbed(model), "full", target=model)
    model.generate(prompt(), max_new_tokens=6, do_sample=False, assistant_model=assistant)
    assert assistant.tokenizer is None and assistant.stats.accepted > 0
    word_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == word_tokenizer().get_vocab()


@pytest.mark.parametrize(("of_model", "found"), [(None, (EOS,)), (5, (5, EOS)), ([7, EOS, 10**6], (7, EOS))])
def test_the_ids_that_end_a_text(tmp_path, of_model, found):
    tokenizer = word_tokenizer()
    if of_model is not None:
        GenerationConfig(eos_token_id=of_model).save_pretrained(tmp_path)
    assert find_eos_token_ids(tmp_path, tokenizer) == found
