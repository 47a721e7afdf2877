"""A small OCI registry: blobs and manifests in memory, open to meddling."""

from __future__ import annotations

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Store(ThreadingHTTPServer):
    """A registry: blobs and manifests in memory, open to meddling.

    Attributes:
        gets: What was asked for, in order.
        uploads: How many blobs came.
        full_after: It takes no more blobs than that.
        breaks_after: Connections that send blobs end after so many bytes; 0: never.
        continues: Whether a blob can be had from a byte on.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.gets: list[str] = []
        self.uploads = 0
        self.full_after = 1 << 20
        self.breaks_after = 0
        self.continues = True

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    """The part of the distribution protocol that push and pull speak."""

    server: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        """Send one answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        """What came."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        """A blob or a manifest."""
        name = self.path.rsplit("/", 1)[1]
        kind = (
            self.server.manifests if "/manifests/" in self.path else self.server.blobs
        )
        if self.command == "GET":
            self.server.gets.append(name)
        if name in kind:
            self.answer_from(kind[name])
        else:
            self.answer(404)

    do_HEAD = do_GET

    def answer_from(self, data: bytes) -> None:
        """Send all, or what a Range asks for, as far as the connection lasts."""
        asked = self.headers.get("Range", "") if self.server.continues else ""
        status = 206 if asked else 200
        data = data[int(asked.removeprefix("bytes=").removesuffix("-") or 0) :]
        last = self.server.breaks_after
        if self.command == "HEAD" or not last or len(data) <= last:
            self.answer(status, data)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:last])
        self.close_connection = True

    def do_POST(self) -> None:
        """Where to upload to."""
        self.body()
        self.answer(202, Location=f"http://{self.server.address}/upload")

    def do_PUT(self) -> None:
        """A blob or a manifest, under its digest."""
        data = self.body()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if "/manifests/" in self.path:
            self.server.manifests[self.path.rsplit("/", 1)[1]] = data
            self.server.manifests[digest] = data
        elif self.server.uploads == self.server.full_after:
            self.answer(507)
            return
        else:
            self.server.uploads += 1
            self.server.blobs[digest] = data
        self.answer(201, Location=self.path)
