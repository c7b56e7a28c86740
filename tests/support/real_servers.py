"""Servers of other projects, for tests; skipped where they are not installed."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from support.threads.waits import LONG


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _running(command, url):
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + LONG
        while True:
            try:
                urllib.request.urlopen(url, timeout=LONG).close()
                break
            except OSError:
                assert program.poll() is None
                assert time.monotonic() < ends
        yield url
    finally:
        program.terminate()
        program.wait(LONG)


@contextlib.contextmanager
def moto():
    """S3 in memory; yields its address."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextlib.contextmanager
def nginx(folder, scratch):
    """A web server of the files in a folder; yields its address."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    port = _free_port()
    temporary = "".join(
        f"{each}_temp_path {scratch}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (scratch / "nginx.conf").write_text(
        f"daemon off; pid {scratch}/pid; error_log {scratch}/errors; {user} events {{}}\n"
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}; root {folder}; autoindex on; }} }}\n"
    )
    with _running(["nginx", "-c", str(scratch / "nginx.conf")], f"http://127.0.0.1:{port}/") as url:
        yield url
