"""`pagebinder serve` as a user meets it: a process, its messages, its signals; and chats of a saved artefact."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
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
        assert process.returncode == (0 if how == signal.SIGINT else -signal.SIGTERM)
        assert "Traceback" not in rest and (how != signal.SIGINT or rest == "stopped\n")
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


def test_a_saved_tokenizer_knows_its_chat_template(artefact):
    template = ChatTemplate(SavedTokenizer(artefact / "tokenizer" / "tokenizer.json"))
    ids = template.token_ids([Message(role="user", content="The open function")], {})
    assert template._tokenizer.decode(ids) == "<user>The open function"


def test_without_its_packages_the_server_says_what_to_install():
    code = "import sys; sys.modules['fastapi'] = None; import pagebinder.cli as c; c.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "serve", str(tiny_path())], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2 and "pip install 'pagebinder[serve]'" in result.stderr
