"""Artifacts on the Hub: the real client against a local server that keeps commits and speaks the Hub's protocol."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from local_hub import Hub, Repository

from hf_dynspec.artifacts import push_artifact, read_artifact, write_artifact
from hf_dynspec.artifacts.card import is_unedited_card
from hf_dynspec.artifacts.config import DynSpecConfig, ModelReference, PolicyConfig, weights_files
from hf_dynspec.drafters.eagle.checkpoint import read_checkpoint
from hf_dynspec.errors import ArtifactError
from hf_dynspec.shortlists import FrequencyShortlist, UnionShortlist
from hf_dynspec.vocabulary import TokenizerFingerprint

SIZE = 50
REPO = "acme/dynspec"
TOKENIZER = TokenizerFingerprint(size=SIZE, sha256="ab" * 32, eos_token_ids=(2,))
OLD_RANKING, NEW_RANKING = torch.arange(SIZE), torch.arange(SIZE).flip(0)
POLICY = FrequencyShortlist(OLD_RANKING, size=20)
CONFIG = DynSpecConfig(
    PolicyConfig(POLICY.name, POLICY.settings()),
    tokenizer=TOKENIZER,
    target=ModelReference("acme/large"),
    drafter=ModelReference("acme/small"),
)


@pytest.fixture
def api(hub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token="secret")


@pytest.fixture
def old(tmp_path) -> Path:
    return write_artifact(tmp_path / "old", CONFIG, {"ranking": OLD_RANKING})


@pytest.fixture
def new(tmp_path) -> Path:
    return write_artifact(tmp_path / "new", replace(CONFIG, num_assistant_tokens=9), {"ranking": NEW_RANKING})


def refusal(*arguments, **options) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        read_artifact(*arguments, **options)
    return caught.value


# --- Reading ---


def test_only_the_files_of_an_artifact_are_fetched(hub, api, old):
    for name in ("modeling_evil.py", "pytorch_model.bin", "notes.txt"):
        (old / name).write_bytes(b"never fetched")
    hub.publish(REPO, old)
    read_artifact(REPO, api=api)
    assert {Path(path).name for _, path in hub.requests} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("moves_before", [2, 3, 4, 5, 6])
def test_all_files_come_from_one_commit_while_the_branch_moves(hub, api, old, new, moves_before):
    """Somebody pushes while the artifact is being downloaded, between any two requests in turn."""
    commits = [hub.publish(REPO, old)]

    def push(path):
        if len(hub.requests) == moves_before:
            commits.append(hub.publish(REPO, new))

    hub.before_answer = push
    config, tensors = read_artifact(REPO, api=api)
    assert len(commits) == 2 and len(hub.requests) == 6
    assert config == CONFIG and torch.equal(tensors["ranking"], OLD_RANKING)
    assert hub.requests[0] == ("HEAD", f"/{REPO}/resolve/main/config.json")
    assert all(path.startswith(f"/{REPO}/resolve/{commits[0]}/") for _, path in hub.requests[1:])
    hub.before_answer = lambda path: None
    assert torch.equal(read_artifact(REPO, api=api)[1]["ranking"], NEW_RANKING)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, api, old, new):
    first = hub.publish(REPO, old)
    hub.publish(REPO, new)
    hub.publish(REPO, old, branch="v1")
    for revision, ranking in ((None, NEW_RANKING), ("main", NEW_RANKING), ("v1", OLD_RANKING), (first, OLD_RANKING)):
        assert torch.equal(read_artifact(REPO, revision=revision, api=api)[1]["ranking"], ranking)


def test_a_cached_artifact_needs_no_network(hub, api, old, monkeypatch):
    commit = hub.publish(REPO, old)
    expected, _ = read_artifact(REPO, api=api)
    hub.requests.clear()
    read_artifact(REPO, revision=commit, api=api)
    assert hub.requests == []  # a commit never changes, so nobody is asked
    hub.server.shutdown()
    hub.server.server_close()
    config, tensors = read_artifact(REPO, api=api)  # the server is gone
    assert config == expected and torch.equal(tensors["ranking"], OLD_RANKING)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config, tensors = read_artifact(REPO, api=api)  # the user said not to try
    assert config == expected and torch.equal(tensors["ranking"], OLD_RANKING)
    assert refusal("acme/never-loaded", api=api).field == "config.json"


def test_a_cache_folder_is_used(hub, api, old, tmp_path):
    hub.publish(REPO, old)
    read_artifact(REPO, api=api, cache_dir=tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").glob("models--*/snapshots/*/model.safetensors"))
    assert not (tmp_path / "cache").exists()


def test_a_token_opens_a_private_repository(hub, api, old):
    hub.publish(REPO, old)
    hub.repositories[REPO].private = True
    stranger = HfApi(endpoint=api.endpoint, token=False)
    assert refusal(REPO, api=stranger).field == "repository"
    assert read_artifact(REPO, api=stranger, token="secret")[0] == CONFIG


def test_what_is_missing_is_named(hub, api, old):
    assert refusal("acme/nothing", api=api).field == "repository"
    hub.publish(REPO, old)
    assert refusal(REPO, revision="nowhere", api=api).field == "revision"
    (old / "model.safetensors").unlink()
    hub.publish(REPO, old)
    assert refusal(REPO, api=api).field == "model.safetensors"
    (old / "pytorch_model.bin").write_bytes(b"\x80\x04never fetched")
    hub.publish(REPO, old)
    assert refusal(REPO, api=api).field == "pytorch_model.bin"
    (old / "config.json").unlink()
    hub.publish(REPO, old)
    assert refusal(REPO, api=api).field == "pytorch_model.bin"
    assert not any(path.endswith(".bin") for _, path in hub.requests)
    (old / "pytorch_model.bin").unlink()
    hub.publish(REPO, old)
    assert refusal(REPO, api=api).field == "config.json"


def test_a_name_that_may_be_a_folders_is_said_to_be_none(hub, api, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = str(refusal("acme/nothing", api=api))
    assert "there is no folder acme/nothing here, and acme/nothing does not exist on the Hub" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for read in (read_artifact, read_checkpoint):
        with pytest.raises(ArtifactError, match=r"of nowhere is not in the cache.*nor is there a folder nowhere here"):
            read("nowhere")


def test_files_of_the_wrong_size_are_not_downloaded(hub, api, old):
    (old / "model.safetensors").write_bytes(bytes(2**20))
    commit = hub.publish(REPO, old)
    assert refusal(REPO, api=api).field == "model.safetensors"
    assert [path for method, path in hub.requests if method == "GET"] == [f"/{REPO}/resolve/{commit}/config.json"]
    (old / "config.json").write_bytes(b" " * (2**20 + 1))
    hub.publish(REPO, old)
    hub.requests.clear()
    assert refusal(REPO, api=api).field == "config.json"
    assert {method for method, _ in hub.requests} == {"HEAD"}


def test_a_damaged_artifact_on_the_hub_is_refused(hub, api, old):
    data = bytearray((old / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (old / "model.safetensors").write_bytes(data)
    hub.publish(REPO, old)
    assert refusal(REPO, api=api).field == "model.safetensors"
    other = TokenizerFingerprint(SIZE, "cd" * 32, (2,))
    hub.requests.clear()
    assert refusal(REPO, api=api, tokenizer_fingerprint=other).field == "config.json: tokenizer.sha256"
    assert not any(path.endswith(".safetensors") for _, path in hub.requests)


# --- Shards ---

LISTS = UnionShortlist(*(FrequencyShortlist(torch.roll(OLD_RANKING, shift)) for shift in (1, 2, 3)))
LISTS_CONFIG = replace(CONFIG, policy=PolicyConfig(LISTS.name, LISTS.settings()))
SHARDS = weights_files(3)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """An artifact of three shards."""
    return write_artifact(tmp_path / "sharded", LISTS_CONFIG, LISTS.tensors(), max_shard_size=1)


def require_lists(tensors: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == LISTS.tensors().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in LISTS.tensors().items())


def test_shards_are_published_and_read_back(hub, api, sharded):
    info = push_artifact(sharded, REPO, api=api)
    files = hub.repositories[REPO].commits[info.oid]
    assert set(files) == {".gitattributes", "config.json", "README.md", *SHARDS}
    assert len(hub.large_files) == 3 and len(hub.repositories[REPO].commits) == 2
    config, tensors = read_artifact(REPO, tokenizer_fingerprint=TOKENIZER, api=api)
    assert config == LISTS_CONFIG
    require_lists(tensors)


def test_the_sizes_of_all_shards_are_looked_at_before_any_is_downloaded(hub, api, sharded):
    last = sharded / SHARDS[-2]
    last.write_bytes(last.read_bytes() + b"more")
    hub.publish(REPO, sharded)
    assert refusal(REPO, api=api).field == last.name
    assert [Path(path).name for method, path in hub.requests if method == "GET"] == ["config.json"]


def test_publishing_again_removes_the_shards_of_before(hub, api, sharded, old, tmp_path):
    def published() -> set[str]:
        repository = hub.repositories[REPO]
        return set(repository.commits[repository.branches["main"]]) - {".gitattributes", "config.json", "README.md"}

    push_artifact(sharded, REPO, api=api)
    assert published() == set(SHARDS)
    write_artifact(sharded, LISTS_CONFIG, LISTS.tensors(), max_shard_size=8 * SIZE * 2)
    push_artifact(sharded, REPO, api=api)
    assert published() == set(weights_files(2))
    require_lists(read_artifact(REPO, api=api)[1])
    push_artifact(old, REPO, api=api)
    assert published() == {"model.safetensors"}
    push_artifact(sharded, REPO, api=api)
    assert published() == set(weights_files(2))
    push_artifact(write_artifact(tmp_path / "bare", DynSpecConfig(PolicyConfig("full")), {}), REPO, api=api)
    assert published() == set()


def test_nothing_is_published_where_the_hub_is_switched_off(hub, api, old, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ArtifactError, match="HF_HUB_OFFLINE"):
        push_artifact(old, REPO, api=api)


# --- Publishing ---


def test_an_artifact_is_published_in_one_commit_and_read_back(hub, api, old):
    (old / "notes.txt").write_text("stays here")
    (old / ".hidden").write_text("stays here")
    info = push_artifact(old, REPO, private=True, api=api)
    repository = hub.repositories[REPO]
    assert repository.private and len(repository.commits) == 2 and info.oid == repository.branches["main"]
    files = repository.commits[info.oid]
    assert set(files) == {".gitattributes", "config.json", "model.safetensors", "README.md"}
    for name in ("config.json", "model.safetensors"):
        assert files[name] == (old / name).read_bytes()
    assert f'from_pretrained("{REPO}", target=target)' in files["README.md"].decode()
    assert hub.commit_headers[0]["summary"] == "Upload the frequency shortlist policy with hf_dynspec"
    config, tensors = read_artifact(REPO, api=api)
    assert config == CONFIG and torch.equal(tensors["ranking"], OLD_RANKING)


def test_a_name_without_an_owner_becomes_the_users(hub, api, old):
    push_artifact(old, "dynspec", api=api)
    assert 'from_pretrained("jane/dynspec"' in read_card(hub, "jane/dynspec")


def test_branches_and_pull_requests(hub, api, old, new):
    push_artifact(old, REPO, api=api)
    before = hub.repositories[REPO].branches["main"]
    push_artifact(new, REPO, revision="experiment", api=api)
    info = push_artifact(new, REPO, create_pr=True, api=api)
    assert info.pr_url.endswith("/discussions/1") and info.pr_revision == "refs/pr/1"
    assert hub.repositories[REPO].branches["main"] == before
    assert torch.equal(read_artifact(REPO, revision="experiment", api=api)[1]["ranking"], NEW_RANKING)
    assert torch.equal(read_artifact(REPO, revision=info.oid, api=api)[1]["ranking"], NEW_RANKING)
    assert torch.equal(read_artifact(REPO, api=api)[1]["ranking"], OLD_RANKING)


def read_card(hub: Hub, repo_id: str) -> str:
    repository = hub.repositories[repo_id]
    return repository.commits[repository.branches["main"]]["README.md"].decode()


def test_cards_that_somebody_edited_are_kept(hub, api, old):
    push_artifact(old, REPO, api=api)
    assert is_unedited_card(read_card(hub, REPO))
    hub.repositories[REPO].commit(
        {**hub.repositories[REPO].commits[hub.repositories[REPO].branches["main"]], "README.md": b"edited there"}
    )
    push_artifact(old, REPO, api=api)
    assert read_card(hub, REPO) == "edited there"
    (old / "README.md").write_text("edited here")
    push_artifact(old, REPO, api=api)
    assert read_card(hub, REPO) == "edited here"


def test_another_librarys_repository_is_not_overwritten(hub, api, old):
    for files in (
        {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights"},
        {"model.safetensors": b"weights"},
    ):
        hub.repositories[REPO] = Repository()
        commit = hub.repositories[REPO].commit(files)
        with pytest.raises(ArtifactError) as caught:
            push_artifact(old, REPO, api=api)
        assert caught.value.field == "repository"
        assert hub.repositories[REPO].branches == {"main": commit}


def test_a_damaged_folder_is_not_published(hub, api, old):
    (old / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ArtifactError):
        push_artifact(old, REPO, api=api)
    assert hub.requests == []


def test_a_push_that_meets_another_push_fails_and_overwrites_nothing(hub, api, old, new):
    push_artifact(old, REPO, api=api)
    theirs = []

    def push(path):
        if "/preupload/" in path and not theirs:
            theirs.append(hub.publish(REPO, new))

    hub.before_answer = push
    with pytest.raises(OSError, match="412"):
        push_artifact(old, REPO, api=api)
    assert hub.repositories[REPO].branches["main"] == theirs[0]


@pytest.mark.parametrize("name", ["a/b/c", "white space", "-dash"])
def test_an_impossible_name_is_refused(hub, api, old, name):
    with pytest.raises(ArtifactError) as caught:
        push_artifact(old, name, api=api)
    assert caught.value.field == "repository" and hub.requests == []
