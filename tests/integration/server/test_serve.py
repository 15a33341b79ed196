"""`torchtpu-cache serve`: how it starts, refuses to start, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.mounts import tmpfs
from support.served import SERVE, Served, path_of, read_all
from support.waiting import wait_until
from torchtpu_cache_core import wire
from torchtpu_cache_core.testing.entries import entry_for


def _refused(*options: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [*SERVE, *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.strip()


def test_it_says_where_it_listens(tmp_path: Path) -> None:
    command = [*SERVE, "--listen", ":0", "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(rf"listening on http://127\.0\.0\.1:(\d+) \(data in {re.escape(str(tmp_path))}/data\)\n", line)
    assert match
    with socket.create_connection(("127.0.0.1", int(match[1])), timeout=10):
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")


def test_json_and_settings_from_the_environment(tmp_path: Path) -> None:
    environ = {"TORCHTPU_CACHE_LISTEN": "[::1]:0", "TORCHTPU_CACHE_DATA_DIR": str(tmp_path / "elsewhere")}
    process = subprocess.Popen([*SERVE, "--json"], stdout=subprocess.PIPE, text=True, env={**os.environ, **environ})
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    port = int(said["url"].rpartition(":")[2])
    assert said == {
        "schema": 1,
        "url": f"http://[::1]:{port}",
        "data_dir": str(tmp_path / "elsewhere"),
        "pid": process.pid,
    }
    served = Served(process, port, tmp_path / "elsewhere", host="::1")
    entry = entry_for("over IPv6")
    assert served.put(entry).status == 201
    assert served.stop() == 0
    assert oct((tmp_path / "elsewhere").stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:0", "[::]:0", "example.com:80", "10.1.2.3:8077", "[::1:0", "127.0.0.1:99999", "a:b"]
)
def test_beyond_loopback_or_senseless(tmp_path: Path, listen: str) -> None:
    code, said = _refused("--listen", listen, "--data-dir", str(tmp_path / "data"))
    assert code == 2
    assert len(said.splitlines()) == 1
    assert "127.0.0.1" in said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("size", ["", "0", "-1GB", "many", "5 parsecs", "nan", "1e999GB"])
def test_senseless_sizes(tmp_path: Path, size: str) -> None:
    code, said = _refused("--listen", ":0", "--data-dir", str(tmp_path / "data"), f"--max-size={size}")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "50GB" in said


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said = _refused("--listen", f"127.0.0.1:{port}", "--data-dir", str(tmp_path / "data"))
    assert (code, len(said.splitlines())) == (1, 1)
    assert f"port {port}" in said
    assert not (tmp_path / "data").exists()


def test_a_data_folder_in_use(start: Callable[..., Served]) -> None:
    served = start()
    code, said = _refused("--listen", ":0", "--data-dir", str(served.data_dir))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "another service" in said
    assert served.ask("GET", "/readyz").status == 200


@pytest.mark.parametrize("kind", ["file", "others may write", "below a file", "dangling"])
def test_a_data_folder_that_cannot_be(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    match kind:
        case "file":
            path.write_text("mine")
        case "others may write":
            path.mkdir()
            path.chmod(0o777)
        case "below a file":
            path.write_text("mine")
            path = path / "below"
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
    code, said = _refused("--listen", ":0", "--data-dir", str(path))
    assert (code, len(said.splitlines())) == (1, 1)
    assert str(path) in said


def test_a_read_only_folder_from_which_nothing_was_ever_served(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("capability: only root may mount")
    with tmpfs(tmp_path / "disk", size_bytes=1 << 20) as mount:
        mount.set_read_only(True)
        code, said = _refused("--listen", ":0", "--data-dir", str(mount.folder))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "cannot be written to" in said
    assert "Read-only file system" in said


def test_help_imports_no_server() -> None:
    script = (
        "import sys, typer; from torchtpu_cache_server.commands import register\n"
        "app = typer.Typer(); register(app); typer.main.get_command(app).get_help\n"
        "assert not {'fastapi', 'uvicorn', 'pydantic', 'prometheus_client', 'sqlite3'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_it_is_ready_in_about_a_second(start: Callable[..., Served]) -> None:
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        served = start()
        seconds.append(time.monotonic() - began)
        served.stop()
    print(f"ready after {min(seconds):.2f} s")
    assert min(seconds) < 5  # a busy machine; about 1 s on a quiet one


def _refuses_connections(served: Served) -> bool:
    try:
        socket.create_connection((served.host, served.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_end_waits_for_requests_that_run(start: Callable[..., Served]) -> None:
    """SIGTERM in the middle of a put: it is taken to its end, acknowledged, and there after the next start."""
    served = start()
    entry = entry_for("at the end", size_bytes=200_000)
    head = (
        f"PUT {path_of(entry)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {entry.size_bytes}\r\n"
        f"Content-Digest: {wire.content_digest(entry.digest)}\r\n\r\n"
    )
    with socket.create_connection((served.host, served.port), timeout=30) as connection:
        connection.sendall(head.encode() + bytes(entry.buffer[:1000]))
        taken = b"torchtpu_cache_service_uploads_running 1.0"
        wait_until(lambda: taken in served.ask("GET", "/metrics").body, "the put did not begin")
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _refuses_connections(served), "it still takes connections")
        assert served.process.poll() is None
        connection.sendall(bytes(entry.buffer[1000:]))
        assert b" 201 " in read_all(connection)
    assert served.stop() == 0
    again = start()
    assert again.get(entry).body == bytes(entry.buffer)


def test_no_acknowledged_entry_is_lost_at_the_end(start: Callable[..., Served]) -> None:
    """Several writers put until the service goes away; whatever was acknowledged is there afterwards."""
    served = start()
    acknowledged: list[int] = []
    begun = threading.Barrier(5)

    def write(writer: int) -> None:
        begun.wait()
        for i in range(writer, 100_000, 4):
            try:
                if served.put(entry_for(f"stream {i}", size_bytes=20_000)).status == 201:
                    acknowledged.append(i)
            except OSError:
                return

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in writers:
        thread.start()
    begun.wait()
    wait_until(lambda: len(acknowledged) > 20, "nothing was acknowledged")
    served.process.send_signal(signal.SIGTERM)
    for thread in writers:
        thread.join(60)
    assert served.stop() == 0
    assert len(acknowledged) > 20
    again = start()
    for i in acknowledged:
        entry = entry_for(f"stream {i}", size_bytes=20_000)
        assert again.get(entry).body == bytes(entry.buffer)
    assert list(again.data_dir.rglob(".writing-*")) == []
