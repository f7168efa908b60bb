"""Parts by name: a registered function or class and its options, ``{name: …, option: …}``, checked by its signature."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from sharding.errors import UserError, lookup, suggest
from train.config.values import Section, UserPath, refuse_mistaken_flag
from train.config.yaml_text import in_yaml

PLAIN = (bool, int, float, str, tuple, list)  # the types of defaults that a configuration can show


@dataclass(frozen=True)
class Registry:
    """Where parts of one kind are registered.

    Attributes:
        kind: the kind of part, for messages, e.g. ``sampler``.
        key: the key of a configuration that chooses one of them, e.g. ``clients.sampler``.
        entries: a function, a class or the dotted name of one, which is imported on demand, by name.
        num_arguments: the number of leading arguments that the program passes. All other parameters are options.
    """

    kind: str
    key: str
    entries: Mapping[str, Any]
    num_arguments: int

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return the function or class of this name.

        Raises:
            UserError: there is none.
            ImportError: a package is missing.
        """
        entry = lookup(self.entries, name, self.kind)
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.rpartition(".")
        try:
            return getattr(import_module(module), attribute)
        except ImportError as error:
            raise ImportError(f"the {self.kind} {name} needs a package: pip install {error.name} ({error})") from error


class Part(Section):
    """A part: its name and its options. A bare name in place of the mapping is a part without options.

    Options that are not given have the defaults of the part's signature, and are shown unless the default is null or
    the part is torch's own.
    """

    model_config = ConfigDict(extra="allow")
    registry: ClassVar[Registry]
    options_kept: ClassVar[tuple[str, ...]] = ()
    """Options that another part of this kind keeps, if it has them."""
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function or class."""
        return dict(self.model_extra or {})

    @classmethod
    def shared_options(cls, name: object) -> list[str]:
        """Return the options that the part of this name keeps from the one that it replaces."""
        if not cls.options_kept or not isinstance(name, str) or name not in cls.registry.entries:
            return []
        options = options_of(cls.registry[name], cls.registry.num_arguments)
        return [option for option in cls.options_kept if option in options]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function or class that are options."""
        return options_of(self.registry[self.name], self.registry.num_arguments)

    def takes(self, option: str) -> bool:
        """Whether the function or class has this option."""
        return option in self.parameters

    def value(self, option: str) -> Any:
        """Return the configured value of an option that the function or class has, or its default."""
        return self.options.get(option, self.parameters[option].default)

    def build(self, *arguments: Any, **options: Any) -> Any:
        """Call the function or class with the program's arguments and the configured options, or others.

        Raise a UserError if it refuses one.
        """
        with self.naming_key():
            return self.registry[self.name](*arguments, **self.options | options)

    @contextmanager
    def naming_key(self) -> Iterator[None]:
        """Add the key and the name to the UserError of a function or class: it knows only its own arguments."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"{self.registry.key}={self.name}: {error}") from error

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, values: Any) -> Any:
        values = as_mapping(values)
        if not isinstance(values, Mapping):
            return values  # refused by pydantic
        name = values.get("name", cls.model_fields["name"].default)
        if not isinstance(name, str):
            return values
        options = {option: value for option, value in values.items() if option not in cls.model_fields}
        function = cls.registry[name]
        return {**values, "name": name, **check_options(name, function, options, cls.registry.num_arguments)}


def registered(entries: Mapping[str, Any], kind: str, name: str) -> str:
    """Return a name, or raise a UserError if it is not registered."""
    lookup(entries, name, kind)
    return name


def as_mapping(part: Any) -> Any:
    """Return a part's mapping; a bare name is short for ``{name: …}``."""
    return {"name": part} if isinstance(part, str) else part


def check_options(
    name: str, function: Callable[..., Any], options: Mapping[str, Any], num_arguments: int
) -> dict[str, Any]:
    """Return all options of a function: those given, in the types that its annotations or defaults name, and defaults.

    The options are the parameters after the first `num_arguments`, which the program passes. Raise a ValidationError
    for an unknown one, a value of another type, or one that is needed and not given.
    """
    parameters = options_of(function, num_arguments)
    defaults = {key: parameter.default for key, parameter in parameters.items() if isinstance(parameter.default, PLAIN)}
    problems = {
        key: f"has no option {key!r}{suggest(str(key), parameters)}" for key in options if key not in parameters
    }
    problems |= {
        key: f"needs the option {key!r}"
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and key not in options
    }
    if problems:
        listed = ", ".join(f"{key}={in_yaml(defaults[key])}" if key in defaults else key for key in parameters)
        raise ValidationError.from_exception_data(
            name,
            [
                _problem(f"{name} {problem}; its options: {listed or 'none'}", key, options.get(key))
                for key, problem in problems.items()
            ],
        )
    checked = _types_of(function, num_arguments).validate_python(dict(options))
    if not function.__module__.startswith("torch."):  # torch's defaults are torch's, and many
        checked = defaults | checked
    return {key: tuple(value) if isinstance(value, list) else value for key, value in checked.items()}


@cache
def options_of(function: Callable[..., Any], num_arguments: int) -> dict[str, inspect.Parameter]:
    """Return the parameters that are options."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation that only type checkers can read
        signature = inspect.signature(function)
    options = list(signature.parameters.values())[num_arguments:]
    return {each.name: each for each in options if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}


@cache
def _types_of(function: Callable[..., Any], num_arguments: int) -> TypeAdapter[Any]:
    types = {key: _type_of(parameter) for key, parameter in options_of(function, num_arguments).items()}
    make: Any = TypedDict
    options = make("options", types, total=False)
    options.__pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(options)


def _type_of(parameter: inspect.Parameter) -> Any:
    """Return the annotation of an option, or else the type of its default; true and false are no numbers."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty or isinstance(annotation, str):
        annotation = type(default) if isinstance(default, PLAIN) else Any
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if Path in choices:
        annotation = UserPath | None if NoneType in choices else UserPath
    if annotation is Any or {bool} < {*choices} - {NoneType}:  # anything, or a flag among others
        return annotation
    return Annotated[annotation, BeforeValidator(partial(_check_flag, bool in choices))]


def _check_flag(is_flag: bool, value: object) -> object:
    return value if value is None else refuse_mistaken_flag(value, is_flag)


def _problem(message: str, key: Any, value: Any) -> InitErrorDetails:
    error = PydanticCustomError("option", "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=(key,), input=value)
