"""The private folder of the sockets."""

from __future__ import annotations

import fcntl
import pathlib
import shutil
import stat

import pytest

from headrace.run_dir import RunDir, _remove_abandoned
from shared.endpoints import MAX_IPC_PATH
from shared.errors import StartupError


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_made_private_and_removed(runtime_dir: pathlib.Path) -> None:
    run_dir = RunDir()
    assert run_dir.path.parent == runtime_dir
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    run_dir.close()
    assert list(runtime_dir.iterdir()) == []


def test_long_runtime_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, runtime_dir: pathlib.Path) -> None:
    long = runtime_dir / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    run_dir = RunDir()
    assert len(run_dir.ipc("tokenizer-99")) - len("ipc://") <= MAX_IPC_PATH
    run_dir.close()


def test_named_folder_is_made_kept_and_cleaned(runtime_dir: pathlib.Path) -> None:
    folder = runtime_dir / "mine"
    run_dir = RunDir(str(folder))
    pathlib.Path(run_dir.ipc("engine").removeprefix("ipc://")).touch()
    run_dir.close()
    assert list(folder.iterdir()) == []


def test_too_long_socket_path_is_refused(runtime_dir: pathlib.Path) -> None:
    run_dir = RunDir(str(runtime_dir / ("x" * 100)))
    with pytest.raises(StartupError, match="107; give a shorter folder"):
        run_dir.ipc("engine")
    run_dir.close()


def test_open_folder_is_refused(runtime_dir: pathlib.Path) -> None:
    folder = runtime_dir / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(StartupError, match="chmod 700"):
        RunDir(str(folder))


def test_folder_in_use_is_refused(runtime_dir: pathlib.Path) -> None:
    first = RunDir(str(runtime_dir / "mine"))
    with pytest.raises(StartupError, match="in use"):
        RunDir(str(runtime_dir / "mine"))
    first.close()


def test_abandoned_folders_are_removed_and_live_ones_kept(runtime_dir: pathlib.Path) -> None:
    live = RunDir()
    abandoned = runtime_dir / "headrace-gone"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    other = RunDir()
    assert not abandoned.exists()
    assert live.path.exists()
    live.close()
    other.close()


def test_folder_that_another_launcher_takes_for_abandoned_is_given_up(
    runtime_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks between the making of the lock file and the lock."""
    lock, seen = fcntl.flock, list[pathlib.Path]()

    def late(descriptor: int, operation: int) -> None:
        if not seen:
            seen.extend(runtime_dir.iterdir())
            _remove_abandoned(runtime_dir)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    run_dir = RunDir()
    assert len(seen) == 1
    assert list(runtime_dir.iterdir()) == [run_dir.path] != seen
    assert not run_dir.restore()
    run_dir.close()


def test_removed_folder_is_made_again_and_stays_ours(runtime_dir: pathlib.Path) -> None:
    folder = runtime_dir / "mine"
    run_dir = RunDir(str(folder))
    assert not run_dir.restore()
    for leftover in (folder, folder / "lock"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        assert run_dir.restore()
        assert not run_dir.restore()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(StartupError, match="in use"):
            RunDir(str(folder))
    run_dir.close()
    assert list(folder.iterdir()) == []


def test_removed_folder_that_another_launcher_made_again_is_left_to_it(runtime_dir: pathlib.Path) -> None:
    first = RunDir(str(runtime_dir / "mine"))
    shutil.rmtree(first.path)
    second = RunDir(str(runtime_dir / "mine"))
    with pytest.raises(StartupError, match="another headrace serve uses it now"):
        first.restore()
    assert not second.restore()
    second.close()


def test_removed_folder_that_somebody_opened_to_others_is_refused(runtime_dir: pathlib.Path) -> None:
    run_dir = RunDir(str(runtime_dir / "mine"))
    shutil.rmtree(run_dir.path)
    run_dir.path.mkdir(mode=0o755)
    with pytest.raises(StartupError, match="chmod 700"):
        run_dir.restore()
