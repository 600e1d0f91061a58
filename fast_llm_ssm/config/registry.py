"""Names that a `type:` in YAML can have, open to packages outside the tree."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fast_llm_ssm.config.errors import UserError
from fast_llm_ssm.config.wording import shown, suggestion

T = TypeVar("T")

_imports_allowed: ContextVar[bool] = ContextVar("imports_allowed", default=True)


@contextlib.contextmanager
def imports(allowed: bool) -> Iterator[None]:
    """Whether a name looked up inside may import a package that offers it."""
    token = _imports_allowed.set(allowed)
    try:
        yield
    finally:
        _imports_allowed.reset(token)


class Registry(Generic[T]):
    """Classes by name.

    A field `mixer: Annotated[MixerConfig, mixers]` reads a mapping whose `type` names a registered class, and
    validates the mapping with that class.

    Args:
        kind: what the names stand for, as messages say it: "mixer".
        entry_points: the group in which installed packages offer more: name -> module, or module:class. Loaded
            at the first listing, or the first time that its name is asked for and not known.
    """

    def __init__(self, kind: str, entry_points: str):
        self.kind = kind
        self.group = entry_points
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """A class decorator. A name can be taken once."""

        def add(cls: type[T]) -> type[T]:
            known = self._classes.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(
                    f"{self.kind} `{name}` of {cls.__module__} is already registered by {known.__module__}"
                )
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """All names, sorted; a package that cannot be imported is a warning."""
        for entry_point in self._offered().values():
            if entry_point.name not in self._classes and _imports_allowed.get():
                try:
                    self._load(entry_point)
                except UserError as error:
                    warnings.warn(str(error), stacklevel=2)
        return sorted(self._classes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self._offered()

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            entry_point = self._offered().get(name)
            if entry_point is None:
                raise UserError(f"unknown {self.kind} `{name}`{suggestion(name, self.names())}")
            if not _imports_allowed.get():
                raise UserError(
                    f"{self.kind} `{name}` comes from `{entry_point.value}`, whose import this file must not trigger; "
                    "--allow-plugins permits it"
                )
            self._load(entry_point)
        return self._classes[name]

    def loaded(self, name: Any) -> type[T] | None:
        """The class of this name if it is registered, without importing anything."""
        return self._classes.get(name) if isinstance(name, str) else None

    def _offered(self) -> dict[str, EntryPoint]:
        return {entry_point.name: entry_point for entry_point in entry_points(group=self.group)}

    def _load(self, entry_point: EntryPoint) -> None:
        try:
            offered = entry_point.load()
        except Exception as error:
            raise UserError(
                f"{self.kind} `{entry_point.name}`: importing `{entry_point.value}` failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if entry_point.name not in self._classes:
            if not isinstance(offered, type):
                raise UserError(f"{self.kind} `{entry_point.name}`: `{entry_point.value}` did not register it")
            self._classes[entry_point.name] = offered

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> Any:
            if isinstance(value, source):
                return value
            if not isinstance(value, Mapping):
                raise PydanticCustomError("not_a_mapping", "not a mapping")
            if "type" not in value:
                raise self._error(f"missing key, expected one of {', '.join(self.names())}")
            name = value["type"]
            if not isinstance(name, str):
                raise self._error(f"got {shown(name)}, expected one of {', '.join(self.names())}")
            try:
                cls: Any = self[name]
            except UserError as error:
                raise self._error(str(error)) from None
            return cls.model_validate(value)

        return core_schema.no_info_plain_validator_function(validate)

    def _error(self, message: str) -> ValidationError:
        kind = PydanticCustomError("ready", "{text}", {"text": message})
        return ValidationError.from_exception_data(self.kind, [InitErrorDetails(type=kind, loc=("type",), input=None)])
