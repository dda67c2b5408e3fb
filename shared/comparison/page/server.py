"""Serve the live page over HTTP to this machine, within limits.

No request reads or writes a file. The server answers only requests that name
this machine as their host, and only questions that come from its own page. The
size of a request and the time to read it are limited.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
MOST_BYTES = 65_536  # most bytes of a question
SKIPPED_BYTES = 2**24  # most bytes to discard of a question that is too large
SOCKET_SECONDS = 10.0  # longest pause in a request's data
REQUEST_SECONDS = 30.0  # longest time to read a request
WAIT_SECONDS = 20.0  # longest wait for earlier answers
LOOK_SECONDS = 0.1  # how often to check whether the server was closed
MOST_CONNECTIONS = 16  # most connections that may be open at once

Question = Callable[[Mapping[str, Any]], dict[str, Any]]


class Refused(Exception):
    """Raised to refuse a request, with a status and a reason."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class PageServer(ThreadingTCPServer):
    """Serve one page, and the answers to its questions.

    The server listens once it is made; `open` sets the page and the functions
    that answer questions. It answers one question at a time, because running
    a model occupies the whole process. To answer another kind of question, add
    a method to `Live` and to `Live.questions`.

    Args:
        port: port of this machine; 0 lets the system choose.

    Raises:
        ValueError: for a port in use.
    """

    # on Windows, reuse would let a second server take the port of this one
    allow_reuse_address = os.name != "nt"
    allow_reuse_port = False
    # False, so that the process waits for threads that run torch
    daemon_threads = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int):
        self.page = b""
        self.questions: Mapping[str, Question] = {}
        self.one_answer = threading.Lock()
        self.closed = False
        # sockets of requests that are being answered
        self.requests: set[socket.socket] = set()
        self.connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "in use" if error.errno == errno.EADDRINUSE else "not free"
            raise ValueError(
                f"port {port} is {why}: give another one with --port"
            ) from None
        self.port: int = self.server_address[1]

    @property
    def address(self) -> str:
        """Return the address of the page for a browser."""
        return f"http://{HOST}:{self.port}/"

    def open(self, page: str, questions: Mapping[str, Question]) -> None:
        """Set the page, and the function that answers each path."""
        self.page, self.questions = page.encode(), questions

    def run(self) -> None:
        """Answer requests until Ctrl-C."""
        try:
            self.serve_forever(poll_interval=LOOK_SECONDS)
        except KeyboardInterrupt:
            pass
        finally:
            self.server_close()

    def server_close(self) -> None:
        """Close the server; wait only for the answer that is computed now."""
        self.closed = True
        for request in [*self.requests]:
            _stop_reading(request)
        super().server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; refuse if too many connections are open."""
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self.requests.add(request)
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: Any, client_address: Any
    ) -> None:
        """Answer a request, then make room for another connection."""
        # end the request if its sender is too slow
        end = threading.Timer(REQUEST_SECONDS, _stop_reading, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self.requests.discard(request)
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a browser that has closed its connection."""


def _stop_reading(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RD)


class Handler(BaseHTTPRequestHandler):
    """Answer one request, and close the connection."""

    server: PageServer
    timeout = SOCKET_SECONDS
    server_version, sys_version = "gpt-duet", ""

    def do_GET(self) -> None:
        """Send the page to a browser that asks for it."""
        try:
            self._require_host()
            if self.path != "/":
                raise Refused(404, "there is one page: /")
            self._send(200, "text/html; charset=utf-8", self.server.page)
        except Refused as refused:
            self._refuse(refused)

    def do_POST(self) -> None:
        """Answer a question of the page, which is a POST request."""
        try:
            self._require_host()
            self._require_origin()
            answer = self.server.questions.get(self.path)
            if answer is None:
                raise Refused(404, "there is no such question")
            asked = self._question()
            content = self._answered(answer, asked)
            self._send(200, "application/json", content)
        except Refused as refused:
            self._refuse(refused)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the terminal already shows the address."""

    def _require_host(self) -> None:
        """Refuse a request for another host, which a foreign site may send."""
        port = self.server.port
        hosts = [f"{name}:{port}" for name in NAMES]
        hosts += [*NAMES] * (port == 80)
        if self.headers.get("Host", "").lower() not in hosts:
            raise Refused(403, f"the page is at {self.server.address}")

    def _require_origin(self) -> None:
        """Refuse a question from any page but the server's own."""
        port = self.server.port
        origins = [f"http://{name}:{port}" for name in NAMES]
        origins += [f"http://{name}" for name in NAMES] * (port == 80)
        if self.headers.get("Origin", "").lower() not in origins:
            raise Refused(403, f"only {self.server.address} may ask")
        kind = self.headers.get("Content-Type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise Refused(415, "a question is application/json")

    def _question(self) -> Mapping[str, Any]:
        """Return the body, which is a JSON object."""
        written = self.headers.get("Content-Length", "")
        if not (written.isascii() and written.isdigit()):
            raise Refused(411, "a question says its length in bytes")
        length = int(written[:20])
        if length > MOST_BYTES:
            self._skip(length)
            raise Refused(
                413,
                f"a question has at most {MOST_BYTES:,} bytes, got {length:,}",
            )
        try:
            body = self.rfile.read(length)
            asked = json.loads(body)
        except (ValueError, RecursionError, OSError):
            raise Refused(400, "the question cannot be read") from None
        if not isinstance(asked, dict):
            raise Refused(400, "a question is a JSON object")
        return asked

    def _skip(self, length: int) -> None:
        """Read and discard a body that is too large, up to SKIPPED_BYTES."""
        left = min(length, SKIPPED_BYTES)
        try:
            while left > 0 and (part := self.rfile.read(min(left, 65_536))):
                left -= len(part)
        except OSError:
            self.close_connection = True

    def _answered(self, answer: Question, asked: Mapping[str, Any]) -> bytes:
        """Return the answer as JSON, once earlier answers are ready."""
        self._wait_for_turn()
        try:
            return json.dumps(answer(asked), allow_nan=False).encode()
        except ValueError as error:
            raise Refused(400, str(error)) from None
        except Exception as error:
            raise Refused(500, f"{type(error).__name__}: {error}") from None
        finally:
            self.server.one_answer.release()

    def _wait_for_turn(self) -> None:
        """Wait for the lock that lets one answer at a time run."""
        turn, end = self.server.one_answer, time.monotonic() + WAIT_SECONDS
        while not turn.acquire(timeout=LOOK_SECONDS):
            if self.server.closed or time.monotonic() > end:
                words = "other questions are being answered: try again"
                raise Refused(503, words)
        if self.server.closed:
            turn.release()
            raise Refused(503, "the server is closed")

    def _refuse(self, refused: Refused) -> None:
        content = json.dumps({"error": str(refused)}).encode()
        self._send(refused.status, "application/json", content)

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
