"""Images of rows: their bytes are found, checked before they are decoded, and decoded when a loader wants them.

An example knows of its images what can be known without decoding them: a digest and a size. In its messages `PLACE`
stands for an image. The bytes, or the path, go beside the text (`WithImages`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from PIL import Image, ImageOps, UnidentifiedImageError

from hfdist.data.sources.base import ContentError
from hfdist.errors import HfdistError

PLACE = "\U000ffff2"
"""Private character that stands for an image in the text of a message."""
IMAGES = "images"
"""Key of the images in an example. A message has the key, too, until `take_images`, for images in its own parts."""
COLUMNS = ("images", "image")
"""Columns of a row that hold images."""
_LITERAL = "<image>"
"""What stands for an image in the texts of LLaVA's and LLaMA-Factory's data."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""PIL's modes with more than 8 bits a channel; PIL would cut them off."""
_ORIENTATION = 0x0112
"""Tag of the orientation in EXIF."""
_SIDEWAYS = (5, 6, 7, 8)
"""Orientations in EXIF by which width and height change places."""
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class ImageRules:
    """Limits of the images of a source."""

    folder: str | None = None
    """Folder in which paths are looked up, and which they may not leave; None: rows may have no paths."""
    max_bytes: int = 32 * 2**20
    max_pixels: int = 64_000_000


class ImageFile(NamedTuple):
    """An image that is not decoded yet."""

    digest: str
    """Hash of its bytes."""
    data: bytes | None
    """Bytes of the image; None: they are in the file at `path`."""
    path: str | None
    size: tuple[int, int]
    """Width and height in pixels, after the image is turned upright."""
    rules: ImageRules
    """Limits of the images of its source."""


class WithImages(str):
    """The text of an example, with the images that it names, in their order."""

    files: tuple[ImageFile, ...] = ()

    @classmethod
    def of(cls, text: str, files: tuple[ImageFile, ...]) -> WithImages:
        """Join a text and its images."""
        made = cls(text)
        made.files = files
        return made


def take_images(
    example: dict[str, Any], row: Mapping[str, object], rules: ImageRules | None
) -> tuple[dict[str, Any], tuple[ImageFile, ...]]:
    """Give an example with what is known of its images, and the images; an example without images stays as it is.

    Args:
        example: An example in its canonical form; its messages may hold images of their parts under the key `IMAGES`.
        row: The columns of which the example was made.
        rules: Limits of the images of the source; None: columns of images are not read.

    Raises:
        ContentError: An image is not there or is refused, or there are more or fewer images than places for them.
    """
    of_columns: list[object] = []
    if rules is not None:
        of_columns = [value for name in COLUMNS for value in _listed(row.get(name))]
    messages = example.get("messages")
    if messages is None:
        if of_columns:
            raise ContentError("images stand in the turns of a chat, and this row has none", allowed="messages")
        return example, ()
    of_parts = [ref for message in messages for ref in message.pop(IMAGES, ())]
    rejected = example.get("rejected")
    if isinstance(rejected, list) and _num_places(rejected):
        raise ContentError("an image stands in a rejected answer, and models learn to write text alone")
    if of_columns and not _num_places(messages):
        _find_places(messages, len(of_columns))
    if rules is None and (_num_places(messages) or of_parts):
        raise ContentError("a part is an image, and the run reads text alone", allowed="parts of type text")
    num_images, num_places = len(of_parts) + len(of_columns), _num_places(messages)
    # Images of parts have places of their own: with images of columns too, nothing says which place is whose.
    if num_images != num_places or (of_parts and of_columns):
        found = f"images: {num_images}; places: {num_places}"
        raise ContentError("there are more or fewer images than places for them", found=found, allowed="as many")
    if rules is None or not num_images:
        return example, ()
    if _num_places([message for message in messages if message["role"] == "assistant"]):
        raise ContentError("an image stands in what the assistant says, and models learn to write text alone")
    files = tuple(_open(ref, rules) for ref in of_parts or of_columns)
    return example | {IMAGES: [{"digest": file.digest, "size": list(file.size)} for file in files]}, files


def _num_places(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the places for images in some messages."""
    return sum(message.get("content", "").count(PLACE) for message in messages)


def image_of_part(part: Mapping[str, object]) -> object:
    """Give the path, the address or the bytes that a message's part of type image has; None: a column has them."""
    found = next((part[name] for name in ("image", "path", "url", "image_url", "base64") if part.get(name)), None)
    if isinstance(found, str) and part.get("base64") is found:
        return f"data:;base64,{found}"
    # OpenAI's form holds the address in an object.
    if isinstance(found, Mapping) and "url" in found:
        return found["url"]
    return found


def decode(file: ImageFile) -> Image.Image:
    """Give the pixels of an image in RGB, upright; ContentError: the image is damaged, or has changed its size."""
    where = file.path
    data = file.data
    if data is None:
        data = _bytes_of(str(where), file.rules)
    try:
        with _header(data, file.rules) as image:
            # Reading the orientation now fixes it: a PNG may say another one after its pixels.
            _orientation(image)
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (HfdistError, MemoryError):
        raise
    except Exception as error:  # whatever a decoder raises on bytes of somebody else's
        raise ContentError(f"the image is damaged: {' '.join(str(error).split())[:200]}", found=where) from error
    if upright.size != file.size:
        raise ContentError("the image has another size than at first", found=where or f"{upright.size}")
    return upright


def _listed(value: object) -> Sequence[object]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _find_places(messages: Sequence[dict[str, Any]], num_images: int) -> None:
    """Put places where texts say `<image>`; where none does, put all of them before the first question, as TRL does."""
    asked = [message for message in messages if message["role"] != "assistant" and message.get("content")]
    if any(_LITERAL in message["content"] for message in asked):
        for message in asked:
            message["content"] = message["content"].replace(_LITERAL, PLACE)
        return
    for message in asked:
        if message["role"] == "user":
            message["content"] = PLACE * num_images + message["content"]
            return


def _open(ref: object, rules: ImageRules) -> ImageFile:
    """Read the bytes and the header of an image; `ref` is its path, its bytes, or an object that holds either."""
    path = None
    if isinstance(ref, Mapping):
        # `datasets` writes its feature Image so.
        ref = ref.get("bytes") or ref.get("path")
    if isinstance(ref, str) and ref.startswith("data:"):
        ref = _decoded(ref, rules)
    if isinstance(ref, str):
        path, data = ref, _bytes_of(ref, rules)
    elif isinstance(ref, bytes):
        data = ref
    else:
        allowed = "a path, or bytes as datasets' Image has them"
        raise ContentError("this is no image", found=f"{ref!r:.{_SHOWN_CHARACTERS}}", allowed=allowed)
    with _header(data, rules) as image:
        width, height = image.size
        if _orientation(image) in _SIDEWAYS:
            width, height = height, width
    digest = hashlib.blake2b(data, digest_size=12).hexdigest()
    return ImageFile(digest, None if path is not None else data, path, (width, height), rules)


def _decoded(address: str, rules: ImageRules) -> bytes:
    """Give the bytes of a `data:` address."""
    head, _, body = address.partition(",")
    if not head.endswith(";base64") or len(body) * 3 // 4 > rules.max_bytes:
        raise ContentError("this address holds no image that is read", found=head[:_SHOWN_CHARACTERS])
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContentError(f"this address is no base64: {error}", found=head[:_SHOWN_CHARACTERS]) from error


def _bytes_of(path: str, rules: ImageRules) -> bytes:
    """Read the file of an image, which is in the folder of its source."""
    shown = path[:_SHOWN_CHARACTERS]
    if "://" in path:
        hint = "paths in the folder of the source, or the bytes in a column of parquet"
        raise ContentError("an image is at an address, and nothing is fetched for a row", found=shown, hint=hint)
    if rules.folder is None:
        hint = "the bytes in a column of parquet"
        raise ContentError("the source is no folder of this machine, so its rows have no paths", found=shown, hint=hint)
    folder = Path(rules.folder).resolve()
    try:
        # Links are followed first: one may lead out of the folder.
        file = (folder / path).resolve(strict=True)
        if not file.is_relative_to(folder):
            raise ContentError("the path of an image leaves the folder of its source", found=shown, allowed=str(folder))
        if not file.is_file():
            raise ContentError("the path of an image is no file", found=shown)
        size_bytes = file.stat().st_size
        _check_bytes(size_bytes, rules, shown)
        with file.open("rb") as opened:
            # The file may have grown since its size was checked.
            return opened.read(rules.max_bytes)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ContentError(f"an image cannot be read: {reason}", found=shown) from error


def _check_bytes(size_bytes: int, rules: ImageRules, shown: str | None = None) -> None:
    """Raise a ContentError for an image with too many bytes; `shown` names it."""
    if size_bytes > rules.max_bytes:
        found = f"{size_bytes:,} bytes" if shown is None else f"{shown}, {size_bytes:,} bytes"
        allowed = f"{rules.max_bytes:,} (data.images.max_bytes)"
        raise ContentError("an image has too many bytes", found=found, allowed=allowed)


def _header(data: bytes, rules: ImageRules) -> Image.Image:
    """Open an image without decoding it; ContentError: it is damaged, too large, or of a kind that is not read."""
    _check_bytes(len(data), rules)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        is_animated = bool(getattr(image, "is_animated", False))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ContentError("an image has too many pixels", found=str(error)[:_SHOWN_CHARACTERS]) from error
    except UnidentifiedImageError as error:
        allowed = ", ".join(_FORMATS)
        raise ContentError("these bytes are no image", found=repr(data[:16]), allowed=allowed) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a parser raises on bytes of somebody else's
        raise ContentError(f"the image is damaged: {' '.join(str(error).split())[:200]}") from error
    pixels = image.width * image.height
    if not 0 < pixels <= rules.max_pixels:
        found, allowed = f"{image.width} x {image.height}", f"{rules.max_pixels:,} (data.images.max_pixels)"
        raise ContentError("an image has too many pixels", found=found, allowed=allowed)
    if is_animated:
        raise ContentError("an image has several frames", found=image.format, allowed="one frame")
    if image.mode in _DEEP:
        allowed = "8 bits a channel, such as RGB, L, P and CMYK"
        raise ContentError("an image has more than 8 bits a channel", found=image.mode, allowed=allowed)
    return image


def _orientation(image: Image.Image) -> int:
    """Give the orientation that EXIF or XMP says in the header, 1 to 8; 1: upright. PIL keeps what it read first."""
    # The method of the base class, since that of PNG files would decode all pixels.
    with suppress(Exception):  # whatever EXIF of somebody else's raises
        return cast(int, Image.Image.getexif(image).get(_ORIENTATION, 1))
    return 1
