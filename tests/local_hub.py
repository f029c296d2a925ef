"""A local stand-in for the Hub: a server that keeps commits and speaks the Hub's protocol to the real client."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class Repository:
    """Commits in order, each with all of its files, and the branches that point to them."""

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
    """The server's repositories and files, and a log of its requests."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.commit_headers: list[dict] = []
        self.before_answer = lambda path: None
        self.server: ThreadingHTTPServer | None = None

    @property
    def endpoint(self) -> str:
        host, port = self.server.server_address
        return f"http://{host}:{port}"

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
        commit = repository.resolve(what[1] if what[:1] in (["revision"], ["tree"]) else "main")
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        if what[:1] == ["tree"]:
            files = repository.commits[commit].items()
            digests = [(name, data, hashlib.sha256(data).hexdigest()) for name, data in files]
            return self.reply(
                [{"type": "file", "path": name, "size": len(data), "oid": digest} for name, data, digest in digests]
            )
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

    def reply(self, value: dict | list, status: int = 200):
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


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """A running server. The client reaches it whatever the environment says, and has a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = Hub()
    server.hub.server = server
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.hub.endpoint)
    yield server.hub
    server.shutdown()
    server.server_close()
    thread.join()
