"""The one place that loads models and tokenizers and finds the ids that end a text."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle_heads import random_head
from models import EOS, perturbed, prompt, tiny, word_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_dynspec
from hf_dynspec import ConfigurationError, DynSpecAssistant
from hf_dynspec.devices import dtype_for_training, multiplies_fast
from hf_dynspec.errors import counted
from hf_dynspec.loading import find_eos_token_ids, load_config, load_model, load_tokenizer, local_tokenizer


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


@pytest.mark.parametrize("load", [load_model, load_tokenizer, lambda name: load_config(name, "target")])
@pytest.mark.parametrize("name", ["/no/folder", "two/folders/deep", "./here"])
def test_a_path_that_cannot_be_a_repository_is_told_to_be_no_folder(load, name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match=f"{name}.*: there is no such folder") as caught:
        load(name)
    assert "Repo id" not in str(caught.value)


@pytest.mark.parametrize("layout", ["eagle2", "eagle3"])
def test_an_eagle_head_is_no_model(layout, tmp_path, caplog):
    """transformers would make up the weights that it lacks, and draft with them."""
    random_head(
        layout, draft_vocabulary=110 if layout == "eagle3" else None, architectures=["LlamaForCausalLM"]
    ).write(tmp_path)
    with pytest.raises(ConfigurationError, match=r"the drafter .* is an EAGLE head.*--eagle"):
        load_model(tmp_path, device="cpu", role="drafter")
    assert not caplog.records


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"intermediate_size": 48}])
def test_a_model_that_lacks_weights_is_refused(folder, changes, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes, "layer_types": None}))
    with pytest.raises(ConfigurationError, match=r"the target .* has \d+ weights that .* such as model\.layers\."):
        load_model(tmp_path, device="cpu", role="target")


def test_a_single_weight_that_is_lacking_is_told_as_one(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"has 1 weight that its files lack .* such as model\.norm\.weight\."):
        load_model(tmp_path / "model", device="cpu", role="target")


@pytest.mark.parametrize(("count", "said"), [(0, "0 tokens"), (1, "1 token"), (1024, "1,024 tokens")])
def test_numbers_of_things(count, said):
    assert counted(count, "token") == said
    assert counted(count, "token id", "ids") == said.replace("tokens", "ids").replace("1 token", "1 token id")


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


def test_models_are_trained_in_16_bits_where_these_are_fast():
    assert dtype_for_training(torch.device("cuda:0")) == "auto"
    expected = "auto" if multiplies_fast(torch.bfloat16) else torch.float32
    assert dtype_for_training(torch.device("cpu")) == expected
    threads = torch.get_num_threads()
    multiplies_fast.__wrapped__(torch.bfloat16)
    assert torch.get_num_threads() == threads


ON_A_SLOW_CPU = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner
from hf_dynspec.commands import app
torch.set_num_threads(1)
root, pocket = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("target", "drafter"):
    AutoModelForCausalLM.from_pretrained(pocket / name, dtype=torch.bfloat16).save_pretrained(root / name)
    AutoTokenizer.from_pretrained(pocket / name).save_pretrained(root / name)
words = ["--target", root / "target", "--drafter", root / "drafter", "--policy", "hybrid", "--tree", "none"]
words += ["--seconds", 6, "--device", "cpu", "--json", root / "doctor.json"]
result = CliRunner().invoke(app, ["doctor", *map(str, words)])
if result.exception:
    raise result.exception
print(json.dumps({"text": result.stdout}))
"""


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are oneDNN's and torch's for x86")
def test_without_units_for_16_bits_and_without_a_compiler_the_doctor_tries_fp32_too(tmp_path):
    """The same processor, told to do without them."""
    root = Path(hf_dynspec.__file__).parents[1]
    slow = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    slow |= {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_SLOW_CPU, str(tmp_path), str(root / "examples" / "pocket")],
        env={**os.environ, **slow, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    values = json.loads((tmp_path / "doctor.json").read_text())
    assert list(values["dtypes"]) == ["bfloat16", "float32"]
    fastest = max(values["dtypes"], key=lambda name: max(values["dtypes"][name]))
    assert values["models"]["target"]["dtype"] == fastest
    assert values["line"].startswith(f"# loaded with dtype=torch.{fastest}:") and values["line"] in found["text"]
    assert "Tokens per second of plain generate and with drafts: in bfloat16 " in found["text"]
