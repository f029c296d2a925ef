"""Artifacts on the Hub: the real client against a local server that keeps commits and speaks the Hub's protocol."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import HfApi, constants

from hf_dynspec.configuration import DynSpecConfig, ModelReference, PolicyConfig, TokenizerFingerprint
from hf_dynspec.errors import ArtifactError
from hf_dynspec.hub import push_artifact, read_artifact, write_artifact
from hf_dynspec.hub.card import is_unedited_card
from hf_dynspec.shortlists import FrequencyShortlist

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


@dataclass
class Repository:
    """Commits in the order they were made, each with all of its files, and the branches that point to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        text = repr((len(self.commits), sorted(files.items())))
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class Hub:
    """What the server knows, and a log of what it was asked."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.commit_headers: list[dict] = []
        self.before_answer = lambda path: None

    def publish(self, repo_id: str, folder: Path, branch: str = "main") -> str:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return self.repositories.setdefault(repo_id, Repository()).commit(files, branch)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def handle_request(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, path))
        self.hub.before_answer(path)
        self.answer(path.strip("/").split("/"), body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, parts: list[str], body: bytes):
        if parts[2:3] == ["resolve"]:
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts == ["api", "repos", "create"]:
            self.create(json.loads(body))
        elif parts == ["api", "validate-yaml"]:
            self.reply({"errors": [], "warnings": []})
        elif parts[:2] == ["api", "models"]:
            self.model("/".join(parts[2:4]), parts[4:], body)
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            href = f"http://{self.headers['Host']}/large"
            self.reply(
                {
                    "transfer": "basic",
                    "objects": [
                        {**item, "actions": {"upload": {"href": f"{href}/{item['oid']}"}}}
                        for item in json.loads(body)["objects"]
                    ],
                }
            )
        elif parts[0] == "large":
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.hub.large_files[parts[1]] = body
            self.reply({})
        else:
            self.fail(404, "NotFound")

    def resolve(self, repo_id: str, revision: str, filename: str):
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and self.headers.get("Authorization") != "Bearer secret"):
            return self.fail(401, "RepoNotFound")
        commit = repository.resolve(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        data = repository.commits[commit].get(filename)
        if data is None:
            return self.fail(404, "EntryNotFound", {"X-Repo-Commit": commit})
        etag = hashlib.sha256(data).hexdigest()
        self.send(
            200, data, {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Content-Type": "application/octet-stream"}
        )

    def model(self, repo_id: str, what: list[str], body: bytes):
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            return self.fail(404, "RepoNotFound")
        if what[:1] == ["branch"]:
            repository.branches.setdefault(what[1], repository.branches["main"])
            return self.reply({})
        if what[:1] == ["preupload"]:
            modes = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            return self.reply({"files": modes})
        if what[:1] == ["commit"]:
            return self.commit(repo_id, repository, what[1], [json.loads(line) for line in body.splitlines()])
        commit = repository.resolve(what[1] if what[:1] == ["revision"] else "main")
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        names = [{"rfilename": name} for name in repository.commits[commit]]
        return self.reply({"id": repo_id, "sha": commit, "siblings": names, "private": repository.private})

    def create(self, request: dict):
        repo_id = f"{request['organization'] or 'jane'}/{request['name']}"
        url = f"http://{self.headers['Host']}/{repo_id}"
        exists = repo_id in self.hub.repositories
        if not exists:
            repository = Repository(private=request.get("visibility") == "private" or request.get("private") is True)
            repository.commit({".gitattributes": b""})
            self.hub.repositories[repo_id] = repository
        self.reply({"url": url, "name": repo_id, "id": repo_id}, 409 if exists else 200)

    def commit(self, repo_id: str, repository: Repository, branch: str, lines: list[dict]):
        self.hub.commit_headers.append(lines[0]["value"])
        pull_request = "create_pr=1" in self.path
        parent = lines[0]["value"].get("parentCommit")
        if parent not in (None, repository.resolve(branch)):
            return self.fail(412, "ParentMoved")
        files = dict(repository.commits[repository.resolve(branch)])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large_files[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        name = repository.commit(files, "refs/pr/1" if pull_request else branch)
        url = f"http://{self.headers['Host']}/{repo_id}"
        pull_request_url = f"{url}/discussions/1" if pull_request else None
        return self.reply({"commitUrl": f"{url}/commit/{name}", "commitOid": name, "pullRequestUrl": pull_request_url})

    def reply(self, value: dict, status: int = 200):
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def fail(self, status: int, code: str, headers: dict[str, str] | None = None):
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def send(self, status: int, data: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running server. The client may reach it whatever the environment says, and keeps its cache to itself."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = Hub()
    server.hub.server = server
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server.hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def api(hub) -> HfApi:
    host, port = hub.server.server_address
    return HfApi(endpoint=f"http://{host}:{port}", token="secret")


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


def test_an_artifact_is_read_from_the_hub(hub, api, old):
    hub.publish(REPO, old)
    config, tensors = read_artifact(REPO, tokenizer_fingerprint=TOKENIZER, api=api)
    assert config == CONFIG and torch.equal(tensors["ranking"], OLD_RANKING)


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


def test_publishing_again_replaces_and_removes(hub, api, old, tmp_path):
    push_artifact(old, REPO, api=api)
    bare = write_artifact(tmp_path / "bare", DynSpecConfig(PolicyConfig("full")), {})
    info = push_artifact(bare, REPO, commit_message="Smaller", api=api)
    assert set(hub.repositories[REPO].commits[info.oid]) == {".gitattributes", "config.json", "README.md"}
    assert hub.commit_headers[-1]["summary"] == "Smaller"
    assert read_artifact(REPO, api=api)[1] == {}


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
