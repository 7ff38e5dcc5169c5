"""`pagebinder serve` as a user meets it: a process, its messages, its signals; and chats of a saved artefact."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import pagebinder
from pagebinder import CompileConfig
from pagebinder.models import tiny_path
from pagebinder.runtime.saved_tokenizer import SavedTokenizer
from pagebinder.server.chat import ChatTemplate
from pagebinder.server.protocol import Message

SERVE = [sys.executable, "-m", "pagebinder", "serve"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def artefact(tmp_path_factory) -> Path:
    """A compilation of the shipped model with a chat template, saved."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_path(), folder / "talker")
    (folder / "talker" / "chat_template.jinja").write_text(TEMPLATE)
    pagebinder.compile_model(folder / "talker", CompileConfig(executable="eager")).save(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_server_from_its_first_line_to_its_last(artefact, how):
    process = subprocess.Popen(
        [*SERVE, str(artefact), "--port", "0", "--name", "talker"], stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stderr.readline()
        assert line.startswith("serving talker at http://127.0.0.1:"), line
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}).encode()
        url = line.split()[3] + "/chat/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["model"] == "talker" and answer["usage"]["completion_tokens"] <= 3
        process.send_signal(how)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and rest == "stopped\n"
    finally:
        process.kill()


@pytest.mark.parametrize(("seconds", "signals"), [(0, 1), (600, 2)])
def test_requests_that_run_at_the_end_are_told_so(artefact, seconds, signals):
    """After the seconds that they are given, or at once at the second signal."""
    command = [
        *SERVE,
        str(artefact),
        "--port",
        "0",
        "--shutdown-seconds",
        str(seconds),
        "--max-num-seqs",
        "1",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = int(process.stderr.readline().split("/v1")[0].rsplit(":", 1)[1])
        body = {"prompt": ["x"] * 50, "max_tokens": 900, "ignore_eos": True}
        connections = []
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            data = json.dumps(body | {"stream": stream})
            connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
            connections.append(connection)
        first = connections[0].getresponse()
        first.readline()
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert "The server is shutting down." in first.read().decode()
        second = connections[1].getresponse()
        assert second.status == 503 and "shutting down" in json.load(second)["error"]["message"]
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and rest == "stopped\n"
    finally:
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_three_signals_at_once_end_it_quietly(artefact, how):
    process = subprocess.Popen([*SERVE, str(artefact), "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        process.stderr.readline()
        for _ in range(3):
            process.send_signal(how)
            time.sleep(0.02)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and rest == "stopped\n"
    finally:
        process.kill()


def fails(*arguments) -> str:
    result = subprocess.run([*SERVE, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_what_cannot_be_served_is_said_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be listened on" in fails(tiny_path(), "--port", port)
    assert "does not exist" in fails(tmp_path / "nothing")
    assert "No such file" in fails(tiny_path(), "--chat-template", tmp_path / "nothing.jinja")
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in fails(tiny_path(), "--chat-template", tmp_path / "bad.jinja")


def test_a_saved_tokenizer_knows_its_chat_template(artefact):
    template = ChatTemplate(SavedTokenizer(artefact / "tokenizer" / "tokenizer.json"))
    ids = template.prompt([Message(role="user", content="The open function")], {})
    assert template._tokenizer.decode(ids) == "<user>The open function"


def test_without_its_packages_the_server_says_what_to_install():
    code = "import sys; sys.modules['fastapi'] = None; import pagebinder.cli as c; c.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "serve", str(tiny_path())], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2 and "pip install 'pagebinder[serve]'" in result.stderr
