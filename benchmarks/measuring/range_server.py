"""`RangeServer`: the objects of a folder over HTTP, in a process of its own, behind a line of some latency and rate."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socketserver
import threading
import time
import urllib.parse
from typing import Any, NamedTuple, Self

# Bytes that one answer sends before it is another's turn.
PIECE = 2**16
LATENCY, RATE, REQUESTS, NBYTES, PORT = range(5)


class Counts(NamedTuple):
    requests: int
    nbytes: int

    def __sub__(self, other: tuple[int, ...]) -> Counts:
        return Counts(self.requests - other[0], self.nbytes - other[1])


class RangeServer:
    """Attributes:
    url: Without a slash at the end.
    """

    def __init__(self, folder: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._shared, started = spawn.Array("d", 5), spawn.Event()
        self._process = spawn.Process(target=serve, args=(folder, self._shared, started), daemon=True)
        self._process.start()
        if not started.wait(60):
            raise RuntimeError("the range server does not start")
        self.url = f"http://127.0.0.1:{int(self._shared[PORT])}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def set(self, milliseconds: float, mbit: float) -> None:
        """Set the delay of each answer, and the rate of the line that all answers share."""
        self._shared[LATENCY], self._shared[RATE] = milliseconds / 1e3, mbit * 1e6 / 8

    @property
    def bytes_per_s(self) -> float:
        return float(self._shared[RATE])

    @property
    def counts(self) -> Counts:
        """Requests and bytes since the start."""
        return Counts(int(self._shared[REQUESTS]), int(self._shared[NBYTES]))


class Answers(socketserver.StreamRequestHandler):
    """The requests of one connection; parsed by hand, since http.server takes longer than the store's client."""

    disable_nagle_algorithm, wbufsize = True, 0
    shared: Any
    folder: str
    turn = threading.Lock()
    free_at = 0.0

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while line := self.rfile.readline():
                asked = None
                while (header := self.rfile.readline()) not in (b"\r\n", b""):
                    if header[:6].lower() == b"range:":
                        asked = re.search(rb"(\d+)-(\d*)", header)
                time.sleep(self.shared[LATENCY])
                method, target, _ = line.decode().split(" ")
                name, _, query = urllib.parse.unquote(target).lstrip("/").partition("?")
                path = os.path.join(self.folder, name)
                if "list-type" in query:
                    self.list(path, dict(urllib.parse.parse_qsl(query)).get("prefix", ""))
                elif os.path.isfile(path):
                    self.answer(method, path, asked)
                else:
                    self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def list(self, bucket: str, prefix: str) -> None:
        """The objects of a folder, as S3 names them."""
        names = (os.path.join(folder, name) for folder, _, names in os.walk(bucket) for name in names)
        found = ((os.path.relpath(name, bucket), os.path.getsize(name)) for name in sorted(names))
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-11-28T10:00:00.000Z</LastModified></Contents>"
            for key, size in found
            if key.startswith(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def answer(self, method: str, path: str, asked: re.Match[bytes] | None) -> None:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            begin, end, ranged = 0, status.st_size, ""
            if asked is not None:
                begin, end = int(asked[1]), min(int(asked[2]) + 1, end) if asked[2] else end
                ranged = f"Content-Range: bytes {begin}-{end - 1}/{status.st_size}\r\n"
            head = (
                f"HTTP/1.1 {206 if ranged else 200} OK\r\nContent-Length: {end - begin}\r\nAccept-Ranges: bytes\r\n"
                f'ETag: "{status.st_mtime_ns:x}"\r\nLast-Modified: Sat, 28 Nov 2026 10:00:00 GMT\r\n{ranged}\r\n'
            )
            self.wfile.write(head.encode())
            if method == "HEAD":
                return
            for at in range(begin, end, PIECE):
                size = min(PIECE, end - at)
                self.wait_for_turn(size)
                sent = 0
                while sent < size:
                    sent += os.sendfile(self.connection.fileno(), file.fileno(), at + sent, size - sent)
        with self.turn:
            self.shared[REQUESTS] += 1

    def wait_for_turn(self, nbytes: int) -> None:
        """All connections take turns in their order; one that is late catches up."""
        with self.turn:
            now, rate = time.monotonic(), self.shared[RATE]
            Answers.free_at = max(Answers.free_at, now - 0.004) + (nbytes / rate if rate else 0)
            self.shared[NBYTES] += nbytes
            left = Answers.free_at - now
        if left > 0:
            time.sleep(left)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024


def serve(folder: str, shared: Any, started: Any) -> None:
    Answers.folder, Answers.shared = folder, shared.get_obj()
    with Server(("127.0.0.1", 0), Answers) as server:
        shared[PORT] = server.server_address[1]
        started.set()
        server.serve_forever()
