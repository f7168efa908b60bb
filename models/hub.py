"""Read what Hugging Face's packages keep in folders and on the hub, quietly, with errors of one line."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharding.errors import UserError
from sharding.rounds.failures import one_line

log = logging.getLogger(__name__)
_told: set[str] = set()


class _Heard(logging.Handler):
    """Keeps what transformers logs, to tell what was not told before."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "LOAD REPORT" not in (message := one_line(record.getMessage())):  # `models.pretrained` has its own
            self.messages.append(message)

    def tell(self) -> None:
        for message in dict.fromkeys(self.messages):
            if message not in _told:
                _told.add(message)
                log.warning("transformers: %s", message)


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """Read from a folder or the hub, with transformers installed; its warnings are logged here, each once.

    Any error becomes a UserError in one line, with a name of what is read, such as `weights=bert for causal_lm`.
    """
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - an extra

    disable_progress_bar()
    hub, theirs, heard = logging.getLogger("huggingface_hub"), logging.getLogger("transformers"), _Heard()
    before = hub.level, theirs.level, theirs.handlers, theirs.propagate
    hub.setLevel(logging.ERROR)  # it logs each attempt to connect
    theirs.setLevel(logging.WARNING)
    theirs.handlers, theirs.propagate = [heard], False
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # readers raise many kinds of errors
        reason = one_line(error) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which this program does not run; name a model of transformers itself"
        where = "" if Path(source).is_dir() else "there is no such folder, and from the Hugging Face hub: "
        raise UserError(f"cannot read {what}: {where}{reason}") from error
    finally:
        hub.setLevel(before[0])
        theirs.setLevel(before[1])
        theirs.handlers, theirs.propagate = before[2:]
    heard.tell()


def read_config(weights: str, what: str | None = None, **options: Any) -> Any:
    """Return the configuration of a model of transformers, or raise a UserError if it cannot be read."""
    from transformers import AutoConfig  # noqa: PLC0415 - an extra

    with reading(weights, what or f"weights={weights}"):
        return AutoConfig.from_pretrained(weights, trust_remote_code=False, **options)


def is_url(path: str | Path) -> bool:
    """Return whether it is a URL, such as https://… or hf://…, which `Path` would take for a folder."""
    return re.match(r"[a-z0-9+]{2,}:/", str(path), re.IGNORECASE) is not None


def refuse_url(path: str | Path, key: str) -> None:
    """Raise a UserError for the URL of a file that has to be on this machine."""
    if is_url(path):
        raise UserError(f"{key}={path} is a URL, which is not read; download it, and give the path of the copy")


def reads_last(config: Any) -> bool:
    """Return whether a classifier reads the last position, be it padding, as XLNet's does: texts are padded before it.

    All others find the last token themselves, or read the first.
    """
    return getattr(config, "summary_type", None) == "last"
