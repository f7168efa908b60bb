"""Files of data that are damaged, or are something else, told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sharding.errors import UserError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read a file or folder; whatever goes wrong, for its readers raise errors of all kinds, is its fault.

    Raises:
        UserError: naming it, and what was wrong in the reader's words.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"cannot read {path}: {words}; it is damaged, cut off or something else: put a sound copy in its place"
        ) from error
