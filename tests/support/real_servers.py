"""Servers of other projects, for tests; skipped where they are not installed."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from support.threads.waits import LONG


def _needs(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -e '.[test]'")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _running(command, port):
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + LONG
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), LONG).close()
                break
            except OSError:
                assert program.poll() is None
                assert time.monotonic() < ends
        yield
    finally:
        program.terminate()
        program.wait(LONG)


@contextlib.contextmanager
def moto():
    """S3 in memory; yields its address."""
    _needs("moto", "flask_cors")
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def hadro(folder, *options):
    """S3 over the folders in a folder, which may not be written; yields the port."""
    _needs("hadro")
    port = _free_port()
    with _running([sys.executable, "-m", "hadro", str(folder), "--port", str(port), *options], port):
        yield port


def certificate(folder):
    """Files of an authority's certificate, and of the certificate and the key that it gave to 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    (folder / "extensions").write_text("basicConstraints=CA:FALSE\nsubjectAltName=IP:127.0.0.1\n")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {new} -keyout authority.key -out authority.pem -subj /CN=authority",
        f"req {new} -keyout key.pem -out request.pem -subj /CN=127.0.0.1",
        "x509 -req -in request.pem -CA authority.pem -CAkey authority.key -out cert.pem -extfile extensions",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return [folder / name for name in ("authority.pem", "cert.pem", "key.pem")]


@contextlib.contextmanager
def nginx(folder, scratch):
    """A web server of the files in a folder; yields its address."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:{sys.prefix}/usr/sbin")
    if program is None or subprocess.run([program, "-v"], capture_output=True, check=False).returncode:
        pytest.skip("nginx is not installed, or lacks a library, and apt-get had none for .ci/run")
    port = _free_port()
    temporary = "".join(
        f"{each}_temp_path {scratch}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (scratch / "nginx.conf").write_text(
        f"daemon off; pid {scratch}/pid; error_log {scratch}/errors; {user} events {{}}\n"
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}; root {folder}; autoindex on; }} }}\n"
    )
    with _running([program, "-c", str(scratch / "nginx.conf")], port):
        yield f"http://127.0.0.1:{port}/"
