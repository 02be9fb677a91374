"""A local server with the part of the Hugging Face hub's HTTP interface for files."""

import contextlib
import dataclasses
import hashlib
import http.server
import threading
from collections.abc import Iterator

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@dataclasses.dataclass
class Hub:
    """Repositories, and what was asked of them.

    Attributes:
      files: contents by (repository, commit, name).
      revisions: commits by (repository, revision).
      tokens: the token that a private repository asks for.
      large: suffixes of files in large storage, named by their SHA-256.
      requests: (method, path) of every request.
      url: of the server.
    """

    files: dict[tuple[str, str, str], bytes] = dataclasses.field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    gated: set[str] = dataclasses.field(default_factory=set)
    large: tuple[str, ...] = (".safetensors",)
    requests: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    url: str = ""

    def put(self, repository: str, *, revision: str = "main", **files: bytes) -> None:
        """Add files to a repository; "config" and "model" name the usual two."""
        usual = {"config": "config.json", "model": "model.safetensors"}
        commit = COMMIT if revision == "main" else OTHER_COMMIT
        self.revisions[repository, revision] = commit
        self.revisions[repository, commit] = commit
        for name, content in files.items():
            self.files[repository, commit, usual.get(name, name)] = content


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub on a free port of this machine, in a thread."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *args: object) -> None:
            pass

        def _fail(self, status: int, code: str, commit: str | None = None) -> None:
            self.send_response(status)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _answer(self, body: bool) -> None:
            hub.requests.append((self.command, self.path))
            if self.path.startswith("/storage/"):
                assert "Authorization" not in self.headers
                digest = self.path.removeprefix("/storage/")
                content = next(
                    c for c in hub.files.values() if _sha256(c) == digest.split("?")[0]
                )
                return self._send(content, _sha256(content), body)
            if self.path.count("/resolve/") != 1:
                return self._fail(404, "EntryNotFound")
            owner, name, _, revision, file = self.path.strip("/").split("/", 4)
            repository = f"{owner}/{name}"
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if repository in hub.gated and given != hub.tokens.get(repository):
                return self._fail(403, "GatedRepo")
            if repository in hub.tokens and given != hub.tokens[repository]:
                return self._fail(401, "RepoNotFound")
            if repository not in {key[0] for key in hub.revisions}:
                return self._fail(404, "RepoNotFound")
            commit = hub.revisions.get((repository, revision))
            if commit is None:
                return self._fail(404, "RevisionNotFound")
            content = hub.files.get((repository, commit, file))
            if content is None:
                return self._fail(404, "EntryNotFound", commit)
            if file.endswith(hub.large):
                digest = _sha256(content)
                self.send_response(302)
                self.send_header("X-Repo-Commit", commit)
                self.send_header("X-Linked-Etag", f'"{digest}"')
                self.send_header("X-Linked-Size", str(len(content)))
                # Large storage is another host, which gets no token.
                other = hub.url.replace("127.0.0.1", "localhost")
                self.send_header("Location", f"{other}/storage/{digest}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            return self._send(content, blob, body, commit)

        def _send(
            self, content: bytes, etag: str, body: bool, commit: str | None = None
        ) -> None:
            self.send_response(200)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub to which the client's endpoint points, without a token."""
    from huggingface_hub import constants

    with serve() as hub:
        known = constants.ENDPOINT
        for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
            there = getattr(constants, name).replace(known, hub.url)
            monkeypatch.setattr(constants, name, there)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
