"""Decode labeled images into one uint8 tensor."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from train.data.dataset import reading

THREADS = 2  # decoders share Python's lock: a third thread was measured to slow the others down
Shape = tuple[int, int, int]  # (channels, height, width)
DARK = 2**14  # cameras write 12 or 14 bits into 16
CHUNK = 500  # images a thread decodes at a time
ORIENTATION, SIDEWAYS = 0x0112, 5  # a tag of EXIF, and the first of its values for which width is height
TURNED = (  # back, by orientation
    *("", "", "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM"),
    *("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)

log = logging.getLogger(__name__)


class Images(NamedTuple):
    """One split: uint8 images (samples, channels, height, width), int64 labels (samples,).

    `lossy` names the files' encoding if it does not preserve pixels exactly.
    """

    inputs: Tensor
    targets: Tensor
    lossy: str = ""


def lossy_encoding(file: bytes) -> str:
    """Return ``JPEG`` or ``WebP`` for an image file of a lossy encoding, by its first bytes; else nothing."""
    if file.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "WebP" if file[:4] == b"RIFF" and file[8:16] == b"WEBPVP8 " else ""


def shape_of(file: bytes) -> Shape:
    """Return the (channels, height, width) of an image file, upright: one channel if it is gray, else three."""
    with _opened(file) as image:
        width, height = image.size if _orientation(image) < SIDEWAYS else reversed(image.size)
        return (1 if image.mode in ("1", "L") or image.mode.startswith("I;16") else 3, height, width)


def is_image(path: Path) -> bool:
    """Return whether a file is an image that Pillow can read, or is named like one and may be damaged."""
    from PIL import Image  # noqa: PLC0415 - heavy

    if path.suffix.lower() in _suffixes():
        return True
    with suppress(Exception), Image.open(path):
        return True
    return False


@cache
def _suffixes() -> frozenset[str]:
    """Return how the names of images that Pillow can read end."""
    from PIL import Image  # noqa: PLC0415 - heavy

    formats = Image.registered_extensions()
    return frozenset(suffix for suffix, format in formats.items() if format in Image.OPEN)


def _opened(file: bytes) -> Any:
    """Open an image file of any format, or raise a ValueError if it begins like none."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - heavy

    try:
        return Image.open(BytesIO(file))
    except UnidentifiedImageError as error:
        raise ValueError(f"an image is of no known format: its file begins with {file[:12]!r}") from error


def _orientation(image: Any) -> int:
    """Return how a camera was turned, 1 to 8, as EXIF counts; 1 is upright, as is a photo with damaged EXIF."""
    orientation = 1
    if "exif" in image.info:  # asking for EXIF decodes other images
        with suppress(Exception):
            orientation = image.getexif().get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _pixels(image: Any, mode: str, size: tuple[int, int], resize: bool) -> bytes:
    """Return the pixels of an image of 8 bits: upright, in a mode of Pillow's, and of this size.

    Raise a ValueError if it has another size, or its values have no range that is known.
    """
    from PIL import Image  # noqa: PLC0415 - heavy

    orientation = _orientation(image)
    upright = image.size if orientation < SIDEWAYS else image.size[::-1]
    if upright != size and not resize:
        raise ValueError("an image has {}x{} pixels, not {}x{}".format(*upright, *size))
    if turned := TURNED[orientation]:
        image = image.transpose(Image.Transpose[turned])
    if image.mode.startswith("I;16"):  # Pillow would make everything above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"an image has values of 32 bits (mode {image.mode}), whose range is unknown; save 8 bits")
    if image.mode != mode:
        image = image.convert(mode)
    if upright != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels: bytes = image.tobytes()
    return pixels


def decode(
    encoded: Iterable[bytes],
    shape: Shape,
    resize: bool = False,
    place: Callable[[int], str] = lambda row: f"image {row + 1}",
) -> Tensor:
    """Decode image files into a uint8 tensor (images, channels, height, width).

    Photos are turned upright, of 16 bits the upper 8 are kept, and of several pages the first; warnings tell of later
    pages, and of images with 12 of 16 bits. The sizes that the files state are checked before
    their pixels are decoded: a small file may hold a huge image.

    Args:
        encoded: image files.
        shape: (channels, height, width) of the images.
        resize: stretch or shrink images of other sizes, bilinearly.
        place: names the place that an image, counted from 0, is from, for messages.

    Raises:
        UserError: an image is damaged, or has another size.
    """
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - heavy

    encoded, mode = list(encoded), {1: "L", 3: "RGB"}[shape[0]]
    with reading(place(0)), _opened(encoded[0]) as first:
        formats = (first.format or "",)  # naming the format halves the time: no guessing

    channels, height, width = shape
    several: list[int] = []  # images with more than one page
    brightest: list[int] = []  # largest values of the images of 16 bits

    def opened(file: bytes) -> Image.Image:
        try:
            return Image.open(BytesIO(file), formats=formats)
        except UnidentifiedImageError:  # of another format than the first
            return _opened(file)

    def pixels(start: int) -> bytes:
        parts = []
        for row, file in enumerate(encoded[start : start + CHUNK], start):
            with reading(place(row)), opened(file) as image:
                parts.append(_pixels(image, mode, (width, height), resize))
                if getattr(image, "is_animated", False) and image.format != "MPO":  # of a phone, with a preview
                    several.append(row)
                if image.mode.startswith("I;16"):
                    brightest.append(int(np.asarray(image).max()))
        return b"".join(parts)

    with ThreadPoolExecutor(THREADS) as pool:
        raw = bytearray().join(pool.map(pixels, range(0, len(encoded), CHUNK)))
    if several:
        log.warning("%s: of its pages the first is used, as in all %d such images", place(min(several)), len(several))
    if brightest and max(brightest) < DARK:
        log.warning(
            "the images of 16 bits have values up to %d, of which %d grays are left; stretch them to 65535",
            *(max(brightest), 1 + (max(brightest) >> 8)),
        )
    images = np.frombuffer(raw, dtype=np.uint8).reshape(-1, height, width, channels)
    # A copy in any case: the strides of one channel, which kernels are chosen by, must not depend on how it was read.
    return torch.from_numpy(images).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
