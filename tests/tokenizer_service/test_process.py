from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from shared.lifecycle import EXIT_CONFIG, EXIT_OK
from tests.tokenizer_service.rig import CollectingGateway, spec, text_of

ROOT = Path(__file__).parents[2]


async def start(*flags: str) -> asyncio.subprocess.Process:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")} | {"PYTHONPATH": str(ROOT)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "tokenizer_service", *flags, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def test_it_says_what_it_waits_for_and_stops_when_asked(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/t"
    process = await start(f"--listen={endpoint}", f"--engine-endpoint=ipc://{tmp_path}/e", "--beat-s=0.2")
    gateway = CollectingGateway(endpoint)
    await gateway.until(lambda: gateway.hello and gateway.hello.card, 60)
    assert gateway.hello is not None
    assert (gateway.hello.ready, gateway.hello.status) == (False, "waiting for the engine")
    (log,) = await gateway.ask("empty", spec(""))
    assert text_of(log) == ""
    assert log.end is not None
    assert log.end.error is not None
    gateway.close()
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == EXIT_OK, errors.decode()
    assert "Traceback" not in errors.decode()


async def test_what_makes_a_start_impossible_is_said_in_words(tmp_path: Path) -> None:
    process = await start(f"--listen=ipc://{tmp_path}/t", f"--model={tmp_path}")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == EXIT_CONFIG
    assert "holds no config.json" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_a_malformed_engine_endpoint_ends_it(tmp_path: Path) -> None:
    process = await start(f"--listen=ipc://{tmp_path}/t", "--engine-endpoint=tcp://nowhere")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == EXIT_CONFIG
    assert "tcp://nowhere" in errors.decode()


async def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, tokenizer_service.service, tokenizer_service.gguf_vocabulary\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'huggingface_hub') if name in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]"


async def test_its_template_process_ends_with_it(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/t"
    process = await start(f"--listen={endpoint}", f"--engine-endpoint=ipc://{tmp_path}/e", "--beat-s=0.2")
    gateway = CollectingGateway(endpoint)
    await gateway.until(lambda: gateway.hello and gateway.hello.card, 60)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    (child,) = (await gateway.until(children.read_text)).split()
    process.kill()
    await process.communicate()
    await gateway.until(lambda: not alive(child))
    gateway.close()


def alive(pid: str) -> bool:
    """Also a process that has ended and that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
