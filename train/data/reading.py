"""Report damaged or unexpected data files in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sharding.errors import UserError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error in reading a file or folder into a UserError, since readers raise many kinds of errors.

    Raises:
        UserError: naming the path, with the reader's message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"cannot read {path}: {words}; it is damaged, incomplete or of another kind; replace it with a valid copy"
        ) from error
