"""`.pt` frequency lists: reading what others wrote, and refusing what is hostile."""

import os
import pickle
import zipfile
from collections import Counter

import pytest
import torch
from command_line import invoke
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_dynspec.artifacts import read_artifact
from hf_dynspec.build.frequency_list import import_frequency_list
from hf_dynspec.errors import ArtifactError, ConfigurationError


def saved(path, content, **options):
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize("content", [[5, 3, 9], (5, 3, 9), torch.tensor([5, 3, 9]), torch.tensor([5, 3, 9]).int()])
@pytest.mark.parametrize("is_zip", [True, False])
def test_lists_and_tensors_are_read_in_their_order(tmp_path, content, is_zip):
    path = saved(tmp_path / "freq.pt", content, _use_new_zipfile_serialization=is_zip)
    ids = import_frequency_list(path, vocabulary_size=10)
    assert ids == [5, 3, 9]
    assert all(type(token_id) is int for token_id in ids)


@pytest.mark.parametrize("kind", [dict, Counter])
def test_counts_are_sorted_by_count_and_then_by_id(tmp_path, kind):
    path = saved(tmp_path / "token_freq.pt", kind({4: 2, 1: 9, 3: 2, 8: 0}))
    assert import_frequency_list(path, 10) == [1, 3, 4, 8]


def test_repeats_keep_their_first_place_and_missing_eos_comes_first(tmp_path):
    path = saved(tmp_path / "freq.pt", [5, 3, 5, 9, 3])
    assert import_frequency_list(path, 10) == [5, 3, 9]
    assert import_frequency_list(path, 10, eos_token_ids=[7, 9, 0, 7]) == [7, 0, 5, 3, 9]


BAD = {
    "past the end": ([1, 10], r"holds the id 10, but the tokenizer's ids are 0 … 9"),
    "negative": ([1, -1], "holds the id -1"),
    "far past the end": ([2**70], "holds the id"),
    "empty": ([], "holds no token ids"),
    "floats": ([1.0], "holds a float where a token id is expected"),
    "truths": ([True], "holds a bool where a token id is expected"),
    "text": ({"model.weight": 3}, "holds a str where a token id is expected"),
    "tensors": ([torch.tensor(1)], "holds a Tensor where a token id is expected"),
    "float tensor": (torch.ones(3), r"holds a torch.float32 tensor of shape \(3,\)"),
    "matrix": (torch.ones(3, 1).long(), r"holds a torch.int64 tensor of shape \(3, 1\)"),
    "no values": (torch.ones(3, dtype=torch.int64, device="meta"), "without its values"),
    "sparse": (torch.tensor([1, 0]).to_sparse(), "without its values"),
    "a number": (3, "holds a int, not a list of token ids"),
    "negative count": ({1: -3}, "holds -3 where a count is expected"),
    "no count": ({1: float("nan")}, "holds nan where a count is expected"),
    "too many": (torch.zeros(1, dtype=torch.int64).expand(10**12), "holds 1000000000000 entries for 10 ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_list_of_ids_is_refused(tmp_path, name):
    content, message = BAD[name]
    with pytest.raises(ArtifactError, match=message) as caught:
        import_frequency_list(saved(tmp_path / "freq.pt", content), vocabulary_size=10)
    assert caught.value.field == "freq.pt"


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, form):
    path, folder = tmp_path / "freq.pt", tmp_path / "made by the file"
    if form == "plain pickle":
        path.write_bytes(pickle.dumps([1, 2, Hostile(folder)], protocol=2))
    else:
        torch.save([1, 2, Hostile(folder)], path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(ArtifactError, match="Nothing in the file was run") as refusal:
        import_frequency_list(path, vocabulary_size=10)
    assert not folder.exists()
    assert "weights_only" not in str(refusal.value), "torch's advice is to run it"
    # Keeps this test honest: the file does make the folder where a reader trusts it.
    if form != "plain pickle":
        torch.load(path, weights_only=False)
        assert folder.exists()


def test_a_file_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "freq.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("freq/data.pkl", b"\0" * (64 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ArtifactError, match="it is compressed"):
        import_frequency_list(path, vocabulary_size=10)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4 cut off"])
def test_damaged_and_missing_files_are_told(tmp_path, content):
    (tmp_path / "freq.pt").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"freq\.pt: "):
        import_frequency_list(tmp_path / "freq.pt", 10)
    with pytest.raises(ArtifactError, match="there is no file"):
        import_frequency_list(tmp_path / "missing.pt", 10)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["draft and verify"], trainers.BpeTrainer(show_progress=False, vocab_size=270, initial_alphabet=alphabet)
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def test_a_list_goes_through_an_artifact_and_back(tmp_path, tokenizer_folder):
    eos = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder).eos_token_id
    path = saved(tmp_path / "freq_4.pt", [260, 3, eos, 3, 259])
    out = tmp_path / "artifact"
    result = invoke("build", "frequency-import", path, "--tokenizer", tokenizer_folder, "--out", out)
    assert result.exit_code == 0, result.output
    config, tensors = read_artifact(out)
    assert config.policy.settings == {"size": 4, "position_aware": False}
    assert config.tokenizer.eos_token_ids == (eos,)
    assert config.provenance["list"] == "freq_4.pt"
    assert tensors["ranking"][:4].tolist() == [260, 3, eos, 259]
    assert sorted(tensors["ranking"].tolist()) == list(range(eos + 1)), "the whole ranking is kept"
    assert str(tmp_path) not in (out / "config.json").read_text()

    result = invoke("export", "sglang", out, "--size", 4, "--out", tmp_path / "again.pt")
    assert result.exit_code == 0, result.output
    assert torch.load(tmp_path / "again.pt", weights_only=True) == [260, 3, eos, 259]
    result = invoke("export", "sglang", out, "--size", 10**6, "--out", tmp_path / "more.pt")
    assert isinstance(result.exception, ConfigurationError)


def test_a_list_of_another_tokenizer_is_refused(tmp_path, tokenizer_folder):
    path = saved(tmp_path / "freq.pt", [1, 100_000])
    result = invoke("build", "frequency-import", path, "--tokenizer", tokenizer_folder, "--out", tmp_path / "out")
    assert isinstance(result.exception, ArtifactError)
    assert not (tmp_path / "out").exists()
