"""A server of files on this machine, with and without ranges, that remembers what was asked of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

Answer = Callable[[BaseHTTPRequestHandler], bool]


class Served:
    """The address of a folder and the requests for it.

    Attributes:
        sent: bytes of all bodies.
        asked: paths with the range that was asked for.
        headers: of each request, by lower-case name.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.sent = 0
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []


@contextmanager
def served(folder: Path, *, ranges: bool = True, odd: Answer | None = None) -> Iterator[Served]:
    """Serve a folder; `odd` may answer a request itself and then returns True."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0]).lstrip("/")
            seen.asked.append((path, self.headers.get("Range", "")))
            seen.headers.append({name.lower(): value for name, value in self.headers.items()})
            if odd is not None and odd(self):
                return
            file = folder / path
            if not file.is_file():
                self.send_error(404)
                return
            size = file.stat().st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if ranges else None
            start, end = (int(wanted[1]), min(int(wanted[2]), size - 1)) if wanted else (0, size - 1)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
            self.send_header("Content-Length", str(end - start + 1))
            self.end_headers()
            with file.open("rb") as stream:
                stream.seek(start)
                body = stream.read(end - start + 1)
            try:
                self.wfile.write(body)
            except ConnectionError:
                return
            seen.sent += len(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen = Served(f"http://127.0.0.1:{server.server_address[1]}/")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
