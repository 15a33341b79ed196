"""nginx as the floor of what a server of files can cost: the installed one, or the one that `make bench` unpacked."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_UNPACKED = Path(__file__).parents[2] / ".bench/nginx/usr/sbin/nginx"
_READY_SECONDS = 10.0

_CONFIG = """
daemon off;
worker_processes 1;
{user}
pid {folder}/pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_timeout 65;
    keepalive_requests 1000000000;
    default_type application/octet-stream;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    root {files};
    server {{ listen 127.0.0.1:{port}; }}
    server {{ listen 127.0.0.1:{caching_port}; open_file_cache max=1000 inactive=60s; }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nginx:
    """A running nginx.

    Args:
        caching_port: where it keeps files open for a minute, and would not see for as long that one is gone.
        pid: of its one worker.
        version: as it says itself.
    """

    port: int
    caching_port: int
    pid: int
    version: str


def find_nginx() -> Path:
    """The program; RuntimeError, saying what to do, where there is none."""
    for name in (shutil.which("nginx"), "/usr/sbin/nginx", str(_UNPACKED)):
        if name is not None and Path(name).exists():
            return Path(name)
    raise RuntimeError("there is no nginx to measure against; install it with: apt-get install nginx-light")


@contextmanager
def running_nginx(folder: Path, files: Path, preexec: Callable[[], None]) -> Iterator[Nginx]:
    """nginx over the files of a folder, for the time of the block.

    Args:
        folder: where it keeps what it needs itself.
    """
    program = find_nginx()
    port, caching_port = _free_port(), _free_port()
    user = "user root;" if folder.owner() == "root" else ""
    config = folder / "nginx.conf"
    config.write_text(
        _CONFIG.format(folder=folder, files=files, port=port, caching_port=caching_port, user=user), encoding="utf-8"
    )
    command = [str(program), "-p", str(folder), "-e", "stderr", "-c", str(config)]
    process = subprocess.Popen(command, preexec_fn=preexec)
    try:
        _await(process, caching_port)
        (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        version = subprocess.run([str(program), "-v"], stderr=subprocess.PIPE, text=True, check=True).stderr
        yield Nginx(port=port, caching_port=caching_port, pid=int(pid), version=version.strip().rpartition("/")[2])
    finally:
        process.terminate()
        process.wait(_READY_SECONDS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nginx did not start ({process.poll()})") from error
            time.sleep(0.02)
