"""`RangeServer`: files of a folder over HTTP, with ranges, ETags and lists; with faults on demand.

It is S3, Google Cloud Storage and Azure, whose buckets are folders in it, and a hub of Hugging Face, whose files are in
``datasets/ORG/NAME/resolve/REVISION``.
"""

import contextlib
import datetime as dt
import hashlib
import http.server
import json
import re
import socket
import struct
import threading
import urllib.parse
from pathlib import Path
from xml.sax.saxutils import escape

# What a request can meet instead of its answer; the name says what the server does.
FAULTS = (
    "whole",  # 200 with all bytes, though a range was asked for
    "shorter",  # fewer bytes, with an honest length and range
    "ends early",  # fewer bytes than Content-Length says
    "another place",  # right bytes, but the header says another range
    "shifted",  # bytes of another place, under an honest header
    "another version",  # another ETag; If-Match is ignored
    "reset",
    "half closed",  # the connection ends behind the headers
    "hang",  # no answer until the server ends
    "drip",  # 1 KiB, and no more until the server ends
    "redirect",  # to a server that is not there
    "moved",  # to another address of this server, which has it
)

KEYS = {"key": "ours", "secret": "hidden secret", "token": "hidden token", "region": "us-east-1"}


def patience(seconds):
    """Options with which a store gives up soon."""
    moment = dt.timedelta(milliseconds=1)
    return {
        "client_options": {"timeout": dt.timedelta(seconds=seconds)},
        "retry_config": {
            "max_retries": 2,
            "retry_timeout": dt.timedelta(seconds=10 * seconds),
            "backoff": {"init_backoff": moment, "max_backoff": 2 * moment, "base": 2},
        },
    }


class RangeServer:
    """Attributes:
    url: Where it listens, without a slash at the end.
    requests: Method, path and range of every request so far.
    signed: The keys and tokens that came with requests. Signatures are not checked.
    accepted: The keys and tokens that may read; None: all, and requests without any.
    fault: A name of `FAULTS`, or a status such as 503, for each object that is asked for; None: none.
    after: How many requests come before those that meet it.
    times: How many requests meet it.
    open: While it is not set, no object is answered.
    """

    def __init__(self, root):
        self.root, self.requests, self.signed, self.accepted = Path(root), [], set(), None
        self.fault, self.after, self.times, self.open = None, 0, 1 << 60, threading.Event()
        self.open.set()
        self.ended, self._lock = threading.Event(), threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self.server.block_on_close = True
        self.server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._sockets, self._thread = set(), threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.open.set()
        self.server.shutdown()
        with self._lock:
            for each in self._sockets:  # connections that clients keep open
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self.server.server_close()
        self._thread.join()

    def etag(self, path):
        status = path.stat()
        return f'"{hashlib.md5(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}".encode()).hexdigest()}"'

    def ranges(self):
        return [(path, asked) for method, path, asked in self.requests if method == "GET" and asked]

    def _met(self):
        with self._lock:
            if not self.fault or self.after > 0 or self.times < 1:
                self.after -= 1
                return None
            self.times -= 1
            return self.fault


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, owner = "HTTP/1.1", None
    wbufsize = -1

    def setup(self):
        super().setup()
        with self.owner._lock:
            self.owner._sockets.add(self.connection)

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()
        with self.owner._lock:
            self.owner._sockets.discard(self.connection)

    def handle(self):
        with contextlib.suppress(OSError):  # the client has gone, or the server ends
            super().handle()

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        place = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(place.path).lstrip("/"), dict(urllib.parse.parse_qsl(place.query))
        self.owner.requests.append((self.command, path, self.headers.get("Range")))
        given = re.search("(?:Credential=|SharedKey |Bearer )([^/:]+)", self.headers.get("Authorization", ""))
        self.owner.signed |= {given[1]} if given else set()
        if path.startswith("api/"):  # a hub tells everybody which files a gated repository has
            self._hub(path)
            return
        if self.owner.accepted is not None and (given is None or given[1] not in self.owner.accepted):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", {"X-Error-Code": "GatedRepo"})
            return
        if ("list-type" in query or "comp" in query) and (self.owner.root / path).is_dir():
            listed = self._listed(path, query.get("prefix", ""), azure="comp" in query)
            self._answer(200, listed, {"Content-Type": "application/xml"})
            return
        self.owner.open.wait()
        file = self.owner.root / path
        fault = self.owner._met() if self.command == "GET" and place.query != "moved" else None
        if not file.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if isinstance(fault, int):
            self._answer(fault, b"<Error><Code>SlowDown</Code></Error>", {"Retry-After": "1"})
            return
        etag = self.owner.etag(file)
        if fault != "another version" and self.headers.get("If-Match", etag) != etag:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self._object(file.read_bytes(), '"another"' if fault == "another version" else etag, fault)

    def _object(self, data, etag, fault):
        status, begin, end = 200, 0, len(data)
        if (asked := self.headers.get("Range")) and fault != "whole":
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
            status, begin, end = 206, int(first), min(int(last) + 1, len(data)) if last else len(data)
            if begin >= len(data):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
        if fault == "shorter":
            end = begin + max((end - begin) // 2, 1)
        body, said = data[begin:end], begin + 7 if fault == "another place" else begin
        if fault == "shifted":
            body = (data[end:] + data)[: len(body)]
        headers = {"ETag": etag, "Last-Modified": "Sat, 28 Nov 2026 10:00:00 GMT", "Accept-Ranges": "bytes"}
        if fault == "no version":
            del headers["ETag"], headers["Last-Modified"]
        if status == 206:
            headers["Content-Range"] = f"bytes {said}-{said + len(body) - 1}/{len(data)}"
        if fault in ("redirect", "moved"):
            there = f"{self.owner.url}{self.path}?moved" if fault == "moved" else "http://127.0.0.1:9/elsewhere"
            status, headers, body = 302, {"Location": there}, b""
        if fault == "hang":
            self.owner.ended.wait()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            raise ConnectionResetError
        sent = {"ends early": len(body) // 2, "half closed": 0, "drip": 1024}.get(fault, len(body))
        self._answer(status, body, headers, sent)
        if fault == "drip":
            self.owner.ended.wait()
        self.close_connection |= sent < len(body)

    def _answer(self, status, body, headers=None, sent=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        self.wfile.flush()

    def _listed(self, bucket, prefix, *, azure):
        root = self.owner.root / bucket.strip("/")
        files = {each.relative_to(root).as_posix(): each for each in sorted(root.rglob("*")) if each.is_file()}
        named = [(escape(name), file) for name, file in files.items() if name.startswith(prefix)]
        head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
        if azure:
            rows = "".join(
                f"<Blob><Name>{name}</Name><Properties><Last-Modified>Sat, 28 Nov 2026 10:00:00 GMT</Last-Modified>"
                f"<Content-Length>{file.stat().st_size}</Content-Length><Etag>{self.owner.etag(file)}</Etag>"
                "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
                for name, file in named
            )
            found = f"<EnumerationResults>{head}<Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
        else:
            rows = "".join(
                f"<Contents><Key>{name}</Key><Size>{file.stat().st_size}</Size><ETag>{self.owner.etag(file)}</ETag>"
                "<LastModified>2026-11-28T10:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
                for name, file in named
            )
            found = f"<ListBucketResult>{head}<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return f'<?xml version="1.0"?>{found}'.encode()

    def _hub(self, path):
        repository, kind, place = re.fullmatch("api/(datasets/[^/]+/[^/]+)(?:/(revision|tree)/(.*))?", path).groups(
            "main"
        )
        root = self.owner.root / repository / "resolve" / place.partition("/")[0]
        if not root.is_dir():
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted(each for each in (root.parent / place).iterdir() if each.is_file())
        tree = [
            {
                "type": "file",
                "oid": self.owner.etag(each).strip('"'),
                "size": each.stat().st_size,
                "path": each.relative_to(root).as_posix(),
            }
            for each in files
        ]
        found = tree if kind == "tree" else {"id": repository, "sha": "0" * 40, "siblings": []}
        self._answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
