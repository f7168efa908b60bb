"""Kinds of values that a configuration has, checked where they are read."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

LONGEST_NAME = 255  # bytes of a file's name, on nearly all file systems
LONGEST_PATH = 4000


def refuse_mistaken_flag(value: object, wanted: bool) -> object:
    """Return the value of a key that wants a truth value, or one that does not.

    Raises:
        PydanticCustomError: it is the other way round; in Python, and so by default, true would pass for 1.
    """
    if wanted and not isinstance(value, bool):
        raise PydanticCustomError("flag", "true or false is needed")
    if not wanted and _has_flag(value):
        raise PydanticCustomError("flag", "true and false stand for no number and no name; put a name in quotes")
    return value


def _has_flag(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_flag, [*value.keys(), *value.values()]))
    return any(map(_has_flag, value)) if isinstance(value, list | tuple) else isinstance(value, bool)


def _file_name(value: object) -> object:
    """Check that a name can be part of a file's name, without leading out of its folder."""
    if not isinstance(value, str):
        return value  # which pydantic refuses
    if not value.isprintable() or not value.strip() or value.startswith(".") or set("/\\") & set(value):
        raise PydanticCustomError("name", "a plain name is needed, without slashes and not starting with a dot")
    if len(os.fsencode(value)) > LONGEST_NAME // 2:
        raise PydanticCustomError("name", f"at most {LONGEST_NAME // 2} bytes are allowed: folders are named after it")
    return value


def check_path(value: object) -> Path:
    """Return a path that can be one, with the home folder in the place of ``~``.

    Raises:
        PydanticCustomError: empty, of another type, too long, with control characters, of an unknown user.
    """
    if not isinstance(value, str | Path) or not str(value).strip():
        raise PydanticCustomError("path", "a path is needed, in quotes where YAML would take it for something else")
    if not str(value).isprintable():
        raise PydanticCustomError("path", "a path without control characters is needed")
    if max(map(_num_bytes, Path(value).parts), default=0) > LONGEST_NAME or _num_bytes(str(value)) > LONGEST_PATH:
        raise PydanticCustomError("path", f"a shorter path is needed: names of at most {LONGEST_NAME} bytes")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise PydanticCustomError("path", "there is no such user, whose home folder ~ would be") from error


def _num_bytes(text: str) -> int:
    return len(text.encode())


FileName = Annotated[str, BeforeValidator(_file_name)]
UserPath = Annotated[Path, BeforeValidator(check_path)]
