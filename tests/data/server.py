"""A web server on loopback that goes wrong when it is told to.

with Server({"points.npy": data}) as server:
    server.cut_after = 1000              # the next answer ends after so many bytes
    server.url, server.asked             # http://127.0.0.1:…, [(path, Range header or None), …]
"""

from __future__ import annotations

import hashlib
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str | None]] = []
        self.authorization: str | None = None
        """As the last request had it."""
        self.headers = Message()
        """Those of the last request."""
        self.cut_after: int | None = None
        self.statuses: list[int] = []
        """Answered first, one a request."""
        self.redirects: dict[str, str] = {}
        """Addresses that are answered for a path."""
        self.named = True
        """Whether files have an ETag, without which a beginning cannot be gone on with."""
        self.weak = ""
        """`W/` for ETags that promise the same meaning, and not the same bytes."""
        self.goes_on_from: int | None = None
        """Where the next answer to a Range begins, whatever was asked for."""
        self.range_of: int | None = None
        """The most bytes of an answer to a Range."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, wanted = request.path.lstrip("/").partition("?")[0], request.headers["Range"]
        self.asked.append((path, wanted))
        self.authorization, self.headers = request.headers["Authorization"], request.headers
        if path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[path])
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        data = self.files.get(path)
        if self.statuses or data is None:
            request.send_error(self.statuses.pop(0) if self.statuses else 404)
            return
        tag = f'{self.weak}"{hashlib.md5(data).hexdigest()}"'
        start = 0
        if wanted and request.headers["If-Range"] == tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if self.goes_on_from is None else self.goes_on_from
            self.goes_on_from = None
            if start >= len(data):
                request.send_error(416)
                return
            request.send_response(206)
            total = len(data)
            data = data[: None if self.range_of is None else start + self.range_of]
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{total}")
        else:
            request.send_response(200)
        if self.named:
            request.send_header("ETag", tag)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        cut, self.cut_after = self.cut_after, None
        request.wfile.write(data[start:] if cut is None else data[start : start + cut])
        request.close_connection = True

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
