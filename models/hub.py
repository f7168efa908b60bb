"""Read what Hugging Face's packages keep in folders and on the hub, quietly, with errors of one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sharding.errors import UserError
from sharding.rounds.failures import one_line


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """Read from a folder or from the hub, with transformers installed.

    Args:
        source: the folder, or an id on the hub.
        what: is read, for messages, such as `weights=bert for causal_lm`.

    Raises:
        UserError: any error, in one line.
    """
    from transformers.utils import logging as logs  # noqa: PLC0415 - an extra

    hub, verbosity = logging.getLogger("huggingface_hub"), logs.get_verbosity()
    level = hub.level
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    hub.setLevel(logging.ERROR)  # it logs each attempt to connect
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # readers raise many kinds of errors
        reason = one_line(error) or type(error).__name__
        where = "" if Path(source).is_dir() else "there is no such folder, and from the Hugging Face hub: "
        raise UserError(f"cannot read {what}: {where}{reason}") from error
    finally:
        logs.set_verbosity(verbosity)
        hub.setLevel(level)
