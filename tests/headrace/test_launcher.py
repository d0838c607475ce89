"""What the launcher checks, and the commands that it makes, without starting anything."""

from __future__ import annotations

import pathlib
import socket
import sys
from collections.abc import Callable, Iterator

import pytest

from headrace.launcher import API_KEY_VARIABLE, Launcher, claim_port, programs
from headrace.run_dir import RunDir
from headrace.supervisor import Program
from shared.config import ENGINE, GATEWAY, SERVICES, TOKENIZER, WORKER, Settings, parse_settings
from shared.errors import StartupError
from shared.model_source import ModelSource

Made = Callable[..., list[Program]]
DEMO = ModelSource(pathlib.Path("/site-packages/demo.gguf"), "gguf", "demo")


@pytest.fixture
def made(tmp_path: pathlib.Path) -> Iterator[Made]:
    run_dir = RunDir(str(tmp_path / "run"))
    yield lambda settings, source=DEMO, services=SERVICES: programs(settings, source, run_dir, services)
    run_dir.close()


def parsed(program: Program) -> Settings:
    service = program.argv[3]
    return parse_settings(service, program.argv[4:], environ={})


def test_processes_show_their_names_and_stop_from_the_front(made: Made) -> None:
    found = made(Settings())
    assert [program.name for program in found] == [GATEWAY, TOKENIZER, ENGINE, WORKER]
    for program in found:
        assert program.argv[:4] == (sys.executable, "-P", "-m", program.name)


def test_some_of_the_services(made: Made) -> None:
    found = made(Settings(tokenizers=2), services=(TOKENIZER, ENGINE))
    assert [program.name.partition("/")[0] for program in found] == [TOKENIZER, TOKENIZER, ENGINE]


def test_links_join_up(made: Made) -> None:
    gateway, first, second, engine, worker = made(Settings(tokenizers=2))
    assert first.name.partition("/")[0] == second.name.partition("/")[0] == TOKENIZER
    assert parsed(gateway).tokenizer_endpoint == [parsed(first).listen, parsed(second).listen]
    assert parsed(first).engine_endpoint == parsed(second).engine_endpoint == [parsed(engine).listen]
    assert parsed(worker).worker_endpoint == parsed(engine).listen_workers
    endpoints = {parsed(first).listen, parsed(second).listen, parsed(engine).listen, parsed(worker).worker_endpoint}
    assert len(endpoints) == 4


def test_replicas_have_names_and_one_engine(made: Made) -> None:
    *_, engine, first, second = made(Settings(data_parallel_size=2))
    assert [engine.name, first.name, second.name] == [ENGINE, f"{WORKER}/0", f"{WORKER}/1"]
    assert [parsed(first).name, parsed(second).name] == ["worker-0", "worker-1"]
    assert {parsed(first).worker_endpoint, parsed(second).worker_endpoint} == {parsed(engine).listen_workers}


def test_every_process_has_a_heartbeat_file_of_its_own(made: Made) -> None:
    found = made(Settings(data_parallel_size=2, tokenizers=2))
    assert len({program.heartbeat for program in found}) == len(found) == 6


@pytest.mark.parametrize(
    ("source", "argument"),
    [
        (DEMO, "demo"),
        (ModelSource(pathlib.Path("/models/x"), "folder", "x"), "/models/x"),
        (ModelSource(pathlib.Path("/cache/blobs/5ab"), "gguf", "/models/y.gguf"), "/models/y.gguf"),
        (ModelSource(pathlib.Path("/cache/snapshots/1"), "folder", "org/name"), "/cache/snapshots/1"),
    ],
)
def test_services_get_files_and_the_api_the_name_as_given(made: Made, source: ModelSource, argument: str) -> None:
    found = made(Settings(model=source.name, revision="main"), source)
    assert {parsed(program).model for program in found} == {argument}
    assert parsed(found[0]).served_model_name == [source.name]
    assert parsed(found[0]).revision is None


def test_served_model_name_is_kept(made: Made) -> None:
    assert parsed(made(Settings(served_model_name=["a", "b"]))[0]).served_model_name == ["a", "b"]


def test_environment_reaches_the_services_without_our_settings(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for program in made(Settings(max_num_seqs=256)):
        assert "HEADRACE_MAX_NUM_SEQS" not in program.environ
        assert program.environ["OMP_NUM_THREADS"] == "1"


def test_keys_are_on_no_command_line(made: Made) -> None:
    found = made(Settings(api_key=["-secret", "other"]))
    assert not any("secret" in argument for program in found for argument in program.argv)
    assert [program.environ.get(API_KEY_VARIABLE) for program in found] == ["-secret,other", None, None, None]


@pytest.mark.parametrize("flag", ["--listen=ipc:///x", "--engine-endpoint=ipc:///x", "--curve-dir=/x", "--name=x"])
def test_flags_of_single_services_are_refused(flag: str) -> None:
    with pytest.raises(StartupError, match=flag.partition("=")[0]):
        Launcher(parse_settings(None, [flag], environ={})).run()


def test_key_with_a_comma_is_refused() -> None:
    with pytest.raises(StartupError, match="comma"):
        Launcher(Settings(api_key=["a,b"])).run()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use_is_named(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} .*in use.*--port"):
            claim_port(host, port)


def test_port_zero_is_a_free_port() -> None:
    port = claim_port("127.0.0.1", 0)
    assert port > 0
    assert claim_port("127.0.0.1", port) == port


def test_foreign_address_and_unknown_host_are_named() -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
        claim_port("192.0.2.1", 0)
    with pytest.raises(StartupError, match=r"--host no\.such\.host\.invalid"):
        claim_port("no.such.host.invalid", 0)
