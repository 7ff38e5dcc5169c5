"""/v1/embeddings: the vectors of `CompiledEncoder.embed`, to OpenAI's own client."""

from __future__ import annotations

import openai
import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from pagebinder.errors import ConfigError
from pagebinder.server import create_app
from tests.server.serving import serving
from tests.test_encoder_artefacts import TEXTS, checkpoint  # noqa: F401
from tests.test_encoder_only import bert

EAGER = CompileConfig(executable="eager")


def test_vectors_are_those_of_embed(checkpoint):  # noqa: F811
    compiled = pagebinder.compile_model(checkpoint, EAGER)
    texts = TEXTS[:2]
    expected = compiled.embed(texts).float()
    with serving(create_app(compiled)) as server:
        client = server.client()
        for options in ({"encoding_format": "float"}, {}):  # by itself the client asks for base64
            answer = client.embeddings.create(model="checkpoint", input=texts, **options)
            found = torch.tensor([entry.embedding for entry in answer.data])
            assert torch.equal(found, expected)
        assert answer.usage.prompt_tokens == sum(map(len, compiled.token_ids(texts)))
        ids = compiled.token_ids(texts[:1])[0]
        one = client.embeddings.create(model="checkpoint", input=list(ids), encoding_format="float")
        assert torch.equal(torch.tensor(one.data[0].embedding), expected[0])
        assert server.send("GET", "/health")[0] == 200


def test_bad_inputs_say_what_is_wrong(checkpoint):  # noqa: F811
    with serving(create_app(pagebinder.compile_model(checkpoint, EAGER))) as server:
        for fields, message in (
            ({"input": []}, "empty"),
            ({"input": [""]}, ""),
            ({"input": ["x", "\ud83d"]}, "half of a surrogate pair"),
            ({"input": "many " * 5000}, "tokens; this model takes"),
            ({"input": "x", "dimensions": 4}, "dimensions=4 is not supported"),
            ({"input": "x", "encoding_format": "int8"}, "use one of float, base64"),
            ({"input": [[10**6]]}, "outside the vocabulary"),
        ):
            status, answer = server.post("/v1/embeddings", fields)
            assert status in ((200,) if not message else (400,)), fields
            assert not message or message in answer["error"]["message"]
        long = {"input": "many " * 5000, "truncate": True}
        assert server.post("/v1/embeddings", long)[0] == 200
        with pytest.raises(openai.NotFoundError):
            server.client().completions.create(model="checkpoint", prompt="x")


def test_a_pooling_that_nobody_said_is_an_error_before_the_first_request():
    with pytest.raises(ConfigError, match="pooling"):
        create_app(pagebinder.compile_model(bert(), EAGER))
    create_app(pagebinder.compile_model(bert(), EAGER), pooling="mean")
