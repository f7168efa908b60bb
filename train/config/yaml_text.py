"""Read what users type and write values: YAML 1.2, in UTF-8, by one rule in files and on the command line.

A plain scalar is null, a flag (true, false), a number or else a string (core schema of YAML 1.2, and 1_000 is a number,
as in Python). So 010 is ten, 1e-1 is a tenth, and `on`, 1:30 and dates are strings.
"""

from copy import deepcopy
from functools import lru_cache
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from sharding.errors import UserError, safe_repr, suggest


class _Constructor(SafeConstructor):
    """The constructor of the core schema, which has neither dates nor the tag of ``=``."""


class _Composer(Composer):
    """A composer without aliases: nested ones in a few hundred bytes take gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.parser.check_event(AliasEvent):
            event = self.parser.get_event()
            raise UserError(
                f"line {event.start_mark.line + 1}: *{event.anchor} is an alias, which is not read; write the value "
                "itself, or put a text that begins with * in quotes"
            )
        return super().compose_node(parent, index)


for tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{tag}", _Constructor.construct_scalar)


def _yaml() -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Composer = _Constructor, _Composer
    yaml.width, yaml.sort_base_mapping_type_on_output = inf, False
    return yaml


@lru_cache(maxsize=64)  # a table reads a file once for each of its cells
def _load(text: str) -> Any:
    return _yaml().load(text)


def parse_yaml(text: str) -> Any:
    """Parse a text; raise a UserError if it is not valid YAML, or has an alias, or a key twice."""
    try:
        return deepcopy(_load(text))
    except UserError:
        raise
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        raise UserError(f"line {line}: {error.problem.partition(' with value')[0]}; keep one of them") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except (YAMLError, LookupError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        line = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{line}it is not valid YAML: {' '.join(str(problem).split())}") from error


def read_yaml(path: Path) -> Any:
    """Parse a file; raise a UserError if it does not exist or is not in UTF-8, or as `parse_yaml`."""
    try:
        return parse_yaml(path.read_text("utf-8-sig"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        near = suggest(str(path), map(str, path.parent.glob("*.yaml"))) if isinstance(error, FileNotFoundError) else ""
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the config {safe_repr(str(path))}{near}: {reason}") from error


def dump_yaml(value: object, in_one_line: bool = False) -> str:
    """Return a value as YAML: a line for each entry, or everything in one line as ``{a: [6, 16], b: null}``."""
    yaml, stream = _yaml(), StringIO()
    yaml.default_flow_style = in_one_line
    yaml.representer.ignore_aliases = lambda value: True  # a list that occurs twice is written twice
    yaml.dump(value, stream)
    return stream.getvalue()


def in_yaml(value: object) -> str:
    """Return a value in one line of YAML: ``null``, ``false``, ``[6, 16]``."""
    return dump_yaml(value, in_one_line=True).removesuffix("\n").removesuffix("\n...")
