"""Sections of a configuration and types of values, with their checks."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from models.hub import is_url

LONGEST_NAME = 255  # bytes of a file's name, on nearly all file systems
LONGEST_PATH = 4000


class Section(BaseModel):
    """A part of the configuration. Unknown keys, NaN, infinities, and true or false for a number are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # a clip of inf stays one
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _flags_are_flags(cls, value: object, info: ValidationInfo) -> object:
        is_flag = _is_flag(cls, info.field_name or "")
        return value if is_flag is None else refuse_mistaken_flag(value, is_flag)


@cache
def _is_flag(section: type[Section], key: str) -> bool | None:
    """Return whether a key is a flag; None if it may be anything, or pydantic refuses a mistaken flag."""
    annotation = section.model_fields[key].annotation
    refused_anyway = section_of(section, key) or Any in _types(annotation) or get_origin(annotation) is Literal
    return None if refused_anyway else annotation is bool


@cache
def section_of(section: type[Section], key: str) -> type[Section] | None:
    """Return the section, or the section of a list's items, that a key has for a value; None for other values."""
    types = _types(section.model_fields[key].annotation)
    return next((kind for kind in types if isinstance(kind, type) and issubclass(kind, Section)), None)


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(kind for part in get_args(annotation) for kind in _types(part))]


def refuse_mistaken_flag(value: object, is_flag: bool) -> object:
    """Raise an error unless a value is true or false if and only if its key is a flag. Python takes true for 1."""
    if is_flag and not isinstance(value, bool):
        raise PydanticCustomError("flag", "true or false is needed")
    if not is_flag and _has_flag(value):
        raise PydanticCustomError("flag", "true and false are not numbers or names; put a name in quotes")
    return value


def _has_flag(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_flag, [*value.keys(), *value.values()]))
    return any(map(_has_flag, value)) if isinstance(value, list | tuple) else isinstance(value, bool)


def _file_name(value: object) -> object:
    """Check that a name can be part of a file's name, and stays in its folder."""
    if not isinstance(value, str):
        return value  # refused by pydantic
    if not value.isprintable() or not value.strip() or value.startswith(".") or set("/\\") & set(value):
        raise PydanticCustomError("name", "a plain name is needed, without slashes and not starting with a dot")
    if len(os.fsencode(value)) > LONGEST_NAME // 2:
        raise PydanticCustomError("name", f"at most {LONGEST_NAME // 2} bytes are allowed: folders are named after it")
    return value


def check_path(value: object) -> Path:
    """Return a valid path, with the home folder in place of ``~``.

    Raise an error if it is empty, of another type, too long, has control characters or names an unknown user.
    """
    if not isinstance(value, str | Path) or not str(value).strip():
        raise PydanticCustomError("path", "a path is needed; put it in quotes if YAML reads it as another type")
    if not str(value).isprintable():
        raise PydanticCustomError("path", "a path without control characters is needed")
    if is_url(value):
        raise PydanticCustomError("path", "a path is needed, not a URL; give that of a copy on this machine")
    longest = max((len(part.encode()) for part in Path(value).parts), default=0)
    if longest > LONGEST_NAME or len(str(value).encode()) > LONGEST_PATH:
        raise PydanticCustomError("path", f"a shorter path is needed: names of at most {LONGEST_NAME} bytes")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise PydanticCustomError("path", "the user of the home folder ~ does not exist") from error


FileName = Annotated[str, BeforeValidator(_file_name)]
UserPath = Annotated[Path, BeforeValidator(check_path)]
