"""A cache of decoded images. The name of a file depends on the content of its sources.

So the cache cannot be out of date, and you may delete it at any time. It is in `$SHARDING_CACHE`, or
`spectral-sharding` under `$XDG_CACHE_HOME` or `~/.cache`; where it cannot be written, images are decoded each time.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor

from train.runtime.stages import enter

log = logging.getLogger(__name__)

FEW = 2000  # fewer images are not worth caching


def cached(encoded: Sequence[bytes], how: str, decode: Callable[[], Tensor]) -> Tensor:
    """Return what `decode` returns, from the cache if it is there.

    Args:
        encoded: the files' content.
        how: everything else that the pixels depend on.
        decode: makes uint8 images (images, channels, height, width).
    """
    if len(encoded) < FEW:
        return decode()
    path = folder() / f"{_digest(encoded, how)}.npy"
    with suppress(OSError, ValueError, EOFError):
        images = np.load(path, allow_pickle=False)
        if images.dtype == np.uint8 and images.ndim == 4 and len(images) == len(encoded):
            return torch.from_numpy(images)
    enter(f"decoding {len(encoded):,} images, once on this machine")
    images = decode()
    try:
        _write(path, images)
    except OSError as error:
        log.debug("%s is not written: %s", path, error)
    return images


def folder() -> Path:
    """Return the cache's folder."""
    if own := os.environ.get("SHARDING_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectral-sharding"


def _digest(encoded: Sequence[bytes], how: str) -> str:
    digest = blake2b(how.encode(), digest_size=16)
    for content in encoded:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _write(path: Path, images: Tensor) -> None:
    """Write the file atomically: other processes may be writing the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.save(file, images.numpy())
            file.flush()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise
