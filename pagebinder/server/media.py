"""Images in conversations: OpenAI's `image_url` parts with the image itself in a data: URL, read and made a prompt.

{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0..."}}
    |  decoded; no other URL is fetched, as a server that fetches what it is told reaches what its clients do not
    v
the checkpoint's processor (chat template, pixels)  ->  compiled.media_prompt  ->  token ids and embeddings
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagebinder.errors import RequestError
from pagebinder.server.contents import ContentForms, rendered

IMAGES_BODY_BYTES = 64 << 20  # of a request's body at least, where images are served
MOST_PIXELS = 64_000_000  # of the images of a request: what a few bytes of a file may ask for
MOST_IMAGES = 128  # of a request: processors make small ones as large as others
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NO_IMAGES = (
    "Images are not served: start the server with --prompt-embeds N, room for the embeddings of so many parts of "
    "images at a time."
)
NO_MODEL = (
    "Images are not served: an artefact has no model that makes embeddings of them; serve the checkpoint."
)
logger = logging.getLogger("pagebinder.server")


class MediaPrompts:
    """Makes prompts of conversations with images, for a compiled model whose directory holds its processor.

    `text`: a chat template in place of the processor's.
    """

    def __init__(self, compiled: Any, text: str | None = None) -> None:
        self._compiled, self._text = compiled, text
        self._processor, self.problem = None, NO_IMAGES  # problem: why images are not served; None: they are
        self.forms = ContentForms(lambda conversation: rendered(self._processor, text, conversation, {}))
        if compiled.prompt_rows is None:
            return
        if compiled.source.is_transformers:
            self._processor, self.problem = _processor_of(compiled.source.path, text)
        else:
            self.problem = NO_MODEL
        if self.problem is not None:
            logger.warning(self.problem)

    def prompt(self, conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list:
        """A prompt of token ids and embeddings that asks for the assistant's answer; contents are in the form that
        `forms` has for them, images as `image_part` gives them.

        Raises:
            RequestError: the processor or the model takes no such conversation.
        """
        contents = (message.get("content") for message in conversation)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        images = [part["image"] for part in parts if "image" in part]
        try:
            # In two steps: in one, variables that a client gives would reach the processor (and files and URLs).
            text = rendered(self._processor, self._text, conversation, variables)
            begin = self._processor.tokenizer.bos_token
            has_begin = {"add_special_tokens": False} if begin and text.startswith(begin) else {}
            inputs = self._processor(text=[text], images=[images], return_tensors="pt", **has_begin)
        except Exception as error:  # whatever a processor does with a conversation it was not written for
            raise RequestError(f"The model's processor does not take this conversation: {error}") from error
        return self._compiled.media_prompt(dict(inputs))


def _processor_of(path: Path | None, text: str | None) -> tuple[Any, str | None]:
    """(the processor of a checkpoint directory, None), or (None, why there is none). `text`: a chat template."""
    if path is None:
        return None, "Images are not served: the model has no directory with a processor."
    from transformers import AutoProcessor

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            processor = AutoProcessor.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # files of all kinds, and libraries that they ask for
        return None, f"Images are not served: {path} has no processor that can be read ({error})."
    if getattr(processor, "image_processor", None) is None:
        return None, f"Images are not served: the processor in {path} takes none."
    if text is None and not getattr(processor, "chat_template", None):
        return None, (
            f"Images are not served: the processor in {path} has no chat template; start the server with "
            "--chat-template FILE (Jinja)."
        )
    return processor, None


class PixelRoom:
    """What the images of one request may have, of pixels and in number."""

    def __init__(self) -> None:
        self._pixels, self._images = MOST_PIXELS, MOST_IMAGES

    def take(self, width: int, height: int, where: str) -> None:
        """Raises RequestError: there is no place for one more image of this size."""
        self._pixels -= width * height
        self._images -= 1
        if self._pixels < 0:
            raise RequestError(
                f"{where}: an image of {width} x {height} pixels: {MOST_PIXELS:,} are taken at most, of all images "
                "of a request together."
            )
        if self._images < 0:
            raise RequestError(f"{where}: {MOST_IMAGES} images of a request are taken at most.")


def image_part(part: Mapping[str, Any], where: str, room: PixelRoom) -> dict[str, Any]:
    """An `image_url` part as processors take it, decoded where `room` has place.

    Raises RequestError: it holds no image in a data: URL, or has no place.
    """
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise RequestError(f'{where} has the type "image_url" and no string in "image_url": {{"url": ...}}.')
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:image/") or not head.lower().endswith(";base64") or not comma:
        raise RequestError(
            f"{where}: give the image itself, as data:image/png;base64,...; URLs are not fetched by this server."
        )
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where}: its data is no base64: {error}.") from error
    return {"type": "image", "image": _decoded(content, where, room)}


def _decoded(content: bytes, where: str, room: PixelRoom) -> Any:
    """A PIL image in RGB, the way up that the camera says. Raises RequestError: it is none, or too large."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        room.take(*image.size, where)
        return ImageOps.exif_transpose(image).convert("RGB")
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise RequestError(
            f"{where}: its image has too many pixels: {MOST_PIXELS:,} are taken at most."
        ) from error
    except UnidentifiedImageError as error:  # its message names an object of ours
        raise RequestError(f"{where} is no image ({', '.join(FORMATS)}).") from error
    except Exception as error:  # decoders raise all kinds of errors on broken files
        raise RequestError(f"{where} is no image ({', '.join(FORMATS)}) that can be read: {error}") from error
