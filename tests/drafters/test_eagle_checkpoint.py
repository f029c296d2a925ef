"""EAGLE checkpoints: what is recognised, refused, written and converted."""

import json
import sys
from pathlib import Path

import pytest
import torch
from command_line import invoke
from eagle_heads import LAYOUTS, Head, random_head
from models import tiny
from safetensors.torch import load_file, save_file

from hf_dynspec.commands import main
from hf_dynspec.drafters.eagle import checkpoint as eagle_checkpoint
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint, read_checkpoint, write_checkpoint
from hf_dynspec.drafters.eagle.conversion import convert_checkpoint, read_output_rows
from hf_dynspec.errors import ArtifactError

TRIMMED = 100
VERIFIER = {"verifier": "some/target", "architectures": ["LlamaForCausalLM"]}


def checkpoint_of(head: Head) -> EagleCheckpoint:
    return EagleCheckpoint.from_parts(head.config, head.tensors)


def trimmed(layout: str, **changes) -> Head:
    return random_head(layout, draft_vocabulary=None if layout == "eagle2" else TRIMMED, **changes)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognised(layout, tmp_path):
    head = trimmed(layout)
    checkpoint = read_checkpoint(head.write(tmp_path))
    assert checkpoint.format == ("speculators" if layout == "speculators" else "official")
    assert checkpoint.settings.generation == (2 if layout == "eagle2" else 3)
    assert checkpoint.config == head.config
    assert same(checkpoint.named_tensors(), head.tensors)
    assert "layer.mlp.up_proj.weight" in checkpoint.tensors


def test_a_missing_bias_key_means_a_bias():
    head = random_head("eagle2")
    assert "bias" not in head.config
    assert checkpoint_of(head).settings.fc_bias
    head.config["bias"] = False
    with pytest.raises(ArtifactError, match=r"unexpected fc\.bias"):
        checkpoint_of(head)
    assert not checkpoint_of(random_head("eagle2", bias=False)).settings.fc_bias


def test_draft_tokens_are_offsets():
    head = trimmed("eagle3")
    expected = head.tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(checkpoint_of(head).token_ids(), expected)
    assert checkpoint_of(random_head("eagle3")).token_ids() is None
    full = random_head("eagle3", draft_vocabulary=301)
    assert not full.tensors["d2t"].any()
    assert checkpoint_of(full).token_ids() is None


def test_the_mask_of_draft_tokens_follows_from_their_offsets(tmp_path):
    head = trimmed("eagle3")
    known = head.tensors.pop("t2d")
    for checkpoint in (checkpoint_of(head), read_checkpoint(head.write(tmp_path))):
        assert torch.equal(checkpoint.tensors["t2d"], known)
        assert torch.equal(checkpoint.token_ids(), known.nonzero()[:, 0])
    del head.tensors["d2t"]
    with pytest.raises(ArtifactError, match="missing d2t"):
        checkpoint_of(head)


def test_layers_are_counted_from_the_embedding():
    settings = checkpoint_of(random_head("eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 4])).settings
    assert settings.target_layer_ids == (1, 2, 4)
    head = random_head("eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    assert checkpoint_of(head).settings.target_layer_ids == (2, 3, 5)
    head.config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    with pytest.raises(ArtifactError, match=r"\[2, 3, 5\]"):
        checkpoint_of(head)


def test_shards_are_read(tmp_path):
    head = trimmed("eagle3")
    head.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(head.tensors)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: head.tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(read_checkpoint(tmp_path).named_tensors(), head.tensors)
    save_file({"norm.weight": head.tensors["norm.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ArtifactError, match=r"norm\.weight: is in model-00001"):
        read_checkpoint(tmp_path)
    index["weight_map"]["d2t"] = "../model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="weight_map"):
        read_checkpoint(tmp_path)


def test_a_pickle_is_read_only_when_told_to(tmp_path):
    head = random_head("eagle2")
    head.write(tmp_path, pickled=True)
    with pytest.raises(ArtifactError, match="allow_pickle=True") as error:
        read_checkpoint(tmp_path)
    assert error.value.field == "pytorch_model.bin"
    assert same(read_checkpoint(tmp_path, allow_pickle=True).named_tensors(), head.tensors)


class Evil:
    def __reduce__(self):
        return (print, ("this runs",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, capsys):
    head = random_head("eagle2").write(tmp_path, pickled=True)
    for content in ({"fc.weight": Evil()}, [1, 2], {"fc.weight": 3}):
        torch.save(content, head / "pytorch_model.bin")
        with pytest.raises(ArtifactError, match="pytorch_model"):
            read_checkpoint(tmp_path, allow_pickle=True)
    assert "this runs" not in capsys.readouterr().out


def test_missing_files_are_named(tmp_path):
    def refuse(problem: str, folder: Path = tmp_path, **options) -> None:
        with pytest.raises(ArtifactError, match=problem):
            read_checkpoint(folder, **options)

    refuse(r"config\.json")
    (tmp_path / "config.json").write_text("{}")
    refuse(r"model\.safetensors")
    refuse(r"model\.safetensors", allow_pickle=True)
    refuse("no folder", tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    refuse("cannot be read")


def test_a_repository_is_read_at_one_commit(monkeypatch, tmp_path):
    folder = trimmed("eagle3").write(tmp_path)
    asked, given = {}, {"revision": "v1", "token": "secret", "cache_dir": "there"}
    monkeypatch.setattr(
        "hf_dynspec.artifacts.hub.snapshot_download",
        lambda repo_id, **options: asked.update(options, repo_id=repo_id) or str(folder),
    )
    read_checkpoint("some/head", **given)
    assert {"repo_id": "some/head", **given}.items() <= asked.items()
    assert "pytorch_model.bin" not in asked["allow_patterns"]
    read_checkpoint("some/head", allow_pickle=True)
    assert "pytorch_model.bin" in asked["allow_patterns"]


def test_a_repository_that_cannot_be_reached_is_an_error_of_ours(tmp_path):
    with pytest.raises(ArtifactError, match="cache"):
        read_checkpoint("some/head", cache_dir=tmp_path)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_accounted_for(layout):
    for name in trimmed(layout).tensors:
        head = trimmed(layout)
        tensor = head.tensors.pop(name)
        if name != "t2d":
            with pytest.raises(ArtifactError) as missing:
                checkpoint_of(head)
            assert name in str(missing.value) or name == "fc.weight"
        head.tensors[name] = torch.cat([tensor, tensor])
        with pytest.raises(ArtifactError) as misshaped:
            checkpoint_of(head)
        expected = f"{name} has shape {list(head.tensors[name].shape)}, expected {list(tensor.shape)}"
        assert expected in str(misshaped.value)
    head = trimmed(layout)
    head.tensors["another.weight"] = torch.zeros(2)
    with pytest.raises(ArtifactError, match=r"unexpected another\.weight"):
        checkpoint_of(head)


def test_all_that_is_wrong_is_named_at_once(tmp_path):
    head = trimmed("eagle3")
    head.tensors["norm.weight"] = torch.ones(5)
    head.tensors["x"] = head.tensors.pop("midlayer.hidden_norm.weight")
    head.tensors["fc.weight"] = head.tensors["fc.weight"].double()
    with pytest.raises(ArtifactError) as error:
        read_checkpoint(head.write(tmp_path))
    for words in ("missing midlayer.hidden_norm", "unexpected x", "[5], expected [32]", "fc.weight has dtype"):
        assert words in str(error.value)
    assert error.value.field == "model.safetensors"


def test_shapes_are_checked_before_tensors_are_loaded(monkeypatch, tmp_path):
    head = trimmed("eagle3")
    head.tensors["norm.weight"] = torch.ones(5)
    monkeypatch.setattr(eagle_checkpoint, "load_tensors", lambda files: pytest.fail("loaded"))
    with pytest.raises(ArtifactError, match="norm"):
        read_checkpoint(head.write(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_are_finite(value):
    head = random_head("eagle2")
    head.tensors["fc.bias"][3] = value
    with pytest.raises(ArtifactError, match=r"fc\.bias: holds NaN"):
        checkpoint_of(head)


FIRST = int(trimmed("eagle3").tensors["d2t"][0])


@pytest.mark.parametrize(
    ("name", "index", "value", "problem"),
    [
        ("d2t", 99, 301 - 99, "the id 301"),
        ("d2t", 0, -1, "the id -1"),
        ("d2t", 1, FIRST - 1, f"the id {FIRST} more than once"),
        ("t2d", FIRST, 0, f"opposite of d2t of the id {FIRST}"),
    ],
)
def test_draft_tokens_are_tokens(name, index, value, problem):
    head = trimmed("eagle3")
    head.tensors[name][index] = value
    with pytest.raises(ArtifactError, match=problem):
        checkpoint_of(head)


WRONG = [
    ("eagle2", {"hidden_size": "32"}, "hidden_size"),
    ("eagle2", {"hidden_size": True}, "hidden_size"),
    ("eagle2", {"intermediate_size": 0}, "intermediate_size"),
    ("eagle2", {"num_attention_heads": 6}, "num_attention_heads"),
    ("eagle2", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("eagle2", {"num_hidden_layers": 2}, "num_hidden_layers"),
    ("eagle2", {"rms_norm_eps": "small"}, "rms_norm_eps"),
    ("eagle2", {"hidden_act": "nothing"}, "hidden_act"),
    ("eagle2", {"hidden_act": 3}, "hidden_act"),
    ("eagle2", {"bias": "yes"}, "bias"),
    ("eagle2", {"rope_theta": -1.0}, "rope_theta"),
    ("eagle2", {"rope_scaling": "linear"}, "rope_scaling"),
    ("eagle2", {"mlp_bias": True}, "mlp_bias"),
    ("eagle2", {"vocab_size": None}, "vocab_size"),
    ("eagle3", {"draft_vocab_size": 302}, "draft_vocab_size"),
    ("eagle3", {"norm_output": True}, "norm_output"),
    ("eagle3", {"fc_norm": True}, "fc_norm"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, -1, 2]}, "eagle_aux_hidden_state_layer_ids"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
    ("eagle3", {"eagle_config": 3}, "eagle_config"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type"),
    ("speculators", {"transformer_layer_config": []}, "transformer_layer_config"),
    ("speculators", {"norm_after_dinner": True}, "norm_after_dinner"),
    ("speculators", {"norm_before_residual": 1}, "norm_before_residual"),
]


@pytest.mark.parametrize(("layout", "changes", "field"), WRONG)
def test_settings_are_checked(layout, changes, field):
    head = random_head(layout)
    head.config.update(changes)
    with pytest.raises(ArtifactError) as error:
        checkpoint_of(head)
    assert error.value.field == f"config.json: {field}"


def test_embeddings_are_where_they_are_said_to_be():
    head = random_head("speculators")
    head.config["has_own_embed_tokens"] = True
    for refused, problem in (
        (head, r"missing embed_tokens\.weight"),
        (random_head("eagle3", own_embedding=True, tie_word_embeddings=True), "tie_word_embeddings"),
        (random_head("speculators", model_type="gemma3_text"), "gemma3_text"),
    ):
        with pytest.raises(ArtifactError, match=problem):
            checkpoint_of(refused)
    checkpoint_of(Head(head.layout, head.config, random_head("speculators", own_embedding=True).tensors))
    checkpoint_of(random_head("eagle3", tie_word_embeddings=True))


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_what_was_read(layout, tmp_path):
    folder = trimmed(layout, own_embedding=True).write(tmp_path / "a")
    write_checkpoint(tmp_path / "b", read_checkpoint(folder))
    write_checkpoint(tmp_path / "b", read_checkpoint(tmp_path / "b"))  # over the files that it was read from
    assert same(load_file(tmp_path / "b" / "model.safetensors"), load_file(folder / "model.safetensors"))
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]


def test_a_write_that_fails_leaves_the_old_checkpoint(monkeypatch, tmp_path):
    folder = random_head("eagle2").write(tmp_path / "a")
    other = checkpoint_of(random_head("eagle2", seed=1))
    monkeypatch.setattr(eagle_checkpoint, "save_file", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(folder, other)
    assert same(read_checkpoint(folder).named_tensors(), random_head("eagle2").tensors)
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(ArtifactError, match="is a file"):
        write_checkpoint(folder / "config.json", other)


# Conversion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocabulary", [TRIMMED, 301])
def test_official_to_speculators_and_back(draft_vocabulary):
    head = random_head("eagle3", draft_vocabulary=draft_vocabulary, own_embedding=True)
    there = convert_checkpoint(checkpoint_of(head), "speculators", **VERIFIER)
    assert there.format == "speculators" and there.config["norm_before_residual"] is False
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert there.config["speculators_config"]["verifier"] == verifier
    assert "layers.0.hidden_norm.weight" in there.named_tensors()
    back = convert_checkpoint(there, "official")
    assert same(back.named_tensors(), head.tensors) and head.config.items() <= back.config.items()
    assert back.settings == checkpoint_of(head).settings


def test_speculators_to_official_and_back():
    head = trimmed("speculators", eagle_aux_hidden_state_layer_ids=[2, 4, 5], target_hidden_size=64)
    there = convert_checkpoint(checkpoint_of(head), "official")
    assert there.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    back = convert_checkpoint(there, "speculators", **VERIFIER)
    assert same(back.named_tensors(), head.tensors)
    assert back.settings == checkpoint_of(head).settings


@pytest.mark.parametrize(
    ("layout", "changes", "to", "problem"),
    [
        ("speculators", {"norm_before_residual": True}, "official", "norm_before_residual"),
        ("speculators", {"norm_before_residual": True}, "sglang", "norm_before_residual"),
        ("speculators", {"norm_before_fc": True}, "official", "norm_before_fc"),
        ("speculators", {"norm_before_fc": True}, "sglang", "norm_before_fc"),
        (
            "speculators",
            {"model_type": "qwen3", "attention_biases": True},
            "official",
            "qk_norm, attention_bias, output_bias",
        ),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}, "official", "always reads"),
        ("eagle2", {}, "speculators", "EAGLE-2"),
        ("eagle3", {"attention_biases": True}, "speculators", "a part of"),
        ("eagle2", {"attention_biases": True}, "sglang", "qkv_bias"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, "sglang", "cannot read the embedding"),
        ("eagle3", None, "speculators", "--verifier"),
    ],
)
def test_what_the_other_layout_cannot_say_is_refused(layout, changes, to, problem):
    verifier = VERIFIER if to == "speculators" and changes is not None else {}
    with pytest.raises(ArtifactError, match=problem):
        convert_checkpoint(checkpoint_of(trimmed(layout, **(changes or {}))), to, **verifier)


def test_eagle2_for_sglang_gets_a_zero_bias():
    head = random_head("eagle2", bias=False)
    converted = convert_checkpoint(checkpoint_of(head), "sglang")
    assert "bias" not in converted.config
    assert converted.config["architectures"] == ["LlamaForCausalLMEagle"]
    bias = converted.named_tensors().pop("fc.bias")
    assert bias.shape == (32,) and not bias.any()
    assert same({**head.tensors, "fc.bias": bias}, converted.named_tensors())
    with_bias = random_head("eagle2")
    assert same(convert_checkpoint(checkpoint_of(with_bias), "sglang").named_tensors(), with_bias.tensors)


def test_eagle3_for_sglang_counts_outputs_and_shares_the_head():
    shared = checkpoint_of(random_head("eagle3", eagle_aux_hidden_state_layer_ids=[1, 4, 5]))
    converted = convert_checkpoint(shared, "sglang")
    assert converted.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 4]
    assert converted.config["draft_vocab_size"] is None
    assert converted.settings == shared.settings
    own = convert_checkpoint(checkpoint_of(trimmed("speculators")), "sglang")
    assert own.config["draft_vocab_size"] == TRIMMED


@pytest.mark.parametrize("tied", [True, False])
def test_a_shared_head_takes_the_verifiers_rows(tied, tmp_path):
    target = tiny("llama", tie_word_embeddings=tied)
    target.save_pretrained(tmp_path)
    rows, architectures = read_output_rows(tmp_path)
    assert torch.equal(rows, target.get_output_embeddings().weight)
    assert architectures == ("LlamaForCausalLM",)
    shared = checkpoint_of(random_head("eagle3"))
    with pytest.raises(ArtifactError, match="--target"):
        convert_checkpoint(shared, "speculators", **VERIFIER)
    with pytest.raises(ArtifactError, match=r"expected \[301, 32\]"):
        convert_checkpoint(shared, "speculators", output_rows=rows[:-1], **VERIFIER)
    converted = convert_checkpoint(shared, "speculators", output_rows=rows, **VERIFIER)
    assert torch.equal(converted.tensors["lm_head.weight"], rows)


def test_another_model_is_no_head_and_a_head_no_target(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(ArtifactError, match="neither"):
        read_checkpoint(tmp_path / "target")
    with pytest.raises(ArtifactError, match=r"no lm_head\.weight"):
        read_output_rows(random_head("eagle2").write(tmp_path / "head"))


# The command ---------------------------------------------------------------------------------------------------------


def convert(*words: object):
    return invoke("convert", "eagle", *words)


def test_the_command_converts_there_and_back(tmp_path):
    head = trimmed("eagle3")
    head.write(tmp_path / "a")
    options = ["--verifier", "some/target", "--architectures", "LlamaForCausalLM", "--speculative-tokens", "3"]
    done = convert(tmp_path / "a", tmp_path / "b", "--to", "speculators", *options)
    assert done.exit_code == 0, done.output
    assert "EAGLE-3 head in the speculators layout" in done.output
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert convert(tmp_path / "b", tmp_path / "c", "--to", "official").exit_code == 0
    assert same(load_file(tmp_path / "c" / "model.safetensors"), head.tensors)


def test_the_command_takes_rows_and_architectures_of_a_target(tmp_path):
    random_head("eagle3").write(tmp_path / "a")
    tiny("llama").save_pretrained(tmp_path / "target")
    words = ["--to", "speculators", "--verifier", "some/target", "--target", tmp_path / "target"]
    done = convert(tmp_path / "a", tmp_path / "b", *words)
    assert done.exit_code == 0, done.output
    checkpoint = read_checkpoint(tmp_path / "b")
    assert checkpoint.config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_the_command_keeps_what_is_there_and_says_why(tmp_path, monkeypatch, capsys):
    random_head("eagle2", bias=False).write(tmp_path / "a", pickled=True)
    words = [tmp_path / "a", tmp_path / "b", "--to", "sglang"]
    assert "allow_pickle" in str(convert(*words).exception)
    assert convert(*words, "--allow-pickle").exit_code == 0
    assert "already" in str(convert(*words, "--allow-pickle").exception)
    assert convert(*words, "--allow-pickle", "--overwrite").exit_code == 0
    monkeypatch.setattr(sys, "argv", ["hf-dynspec", "convert", "eagle", *map(str, words), "--overwrite"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 1
    assert capsys.readouterr().err.startswith("error: pytorch_model.bin: is a pickle")
