"""A server in a thread of the test's process, a client of OpenAI's, and requests as they go over the wire."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import openai
import uvicorn


class Server:
    """`app` behind uvicorn at a free port of this machine."""

    def __init__(self, app) -> None:
        self.app = app
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def start(self) -> None:
        self._thread.start()
        eventually(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not stop"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, max_retries=0, timeout=60
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(self, method: str, path: str, body=None, **headers: str) -> tuple[int, str]:
        """(status, text of the answer). body: bytes as they are, anything else as JSON."""
        connection = self.connect()
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"} | headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def post(self, path: str, body, **headers: str) -> tuple[int, dict]:
        status, text = self.send("POST", path, body, **headers)
        return status, json.loads(text)


@contextlib.contextmanager
def serving(app) -> Iterator[Server]:
    server = Server(app)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def eventually(holds: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)
