"""Names of classes and functions, with doors for what comes from outside.

A name is one of

=========================  ==========================================================================================
a built-in name            ``gae``
an entry point             of an installed package, in the registry's group, such as ``embodied_rl.algorithms``
``module:Class``           imported as usual
``path/to/file.py:Class``  a relative path starts at the working directory
=========================  ==========================================================================================

A file becomes the module ``embodied_rl.registry.<its absolute path, quoted>``. Any process that imports such a name,
also by unpickling, finds the file again: that is why this module is a package without a folder (``__path__``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

from embodied_rl.errors import UserError, place_of, suggestion

__path__: Final[list[str]] = []
_PREFIX: Final = f"{__name__}."
_QUOTED: Final = {"%": "%25", ".": "%2E"}


class _FileFinder(MetaPathFinder):
    """Finds the module of a file by its name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not fullname.startswith(_PREFIX):
            return None
        file = fullname.removeprefix(_PREFIX)
        for character, quoted in reversed(_QUOTED.items()):
            file = file.replace(quoted, character)
        return spec_from_file_location(fullname, file)


sys.meta_path.append(_FileFinder())


def module_of_file(path: str | Path) -> str:
    """The name under which the file is imported."""
    file = str(Path(path).resolve())
    for character, quoted in _QUOTED.items():
        file = file.replace(character, quoted)
    return f"{_PREFIX}{file}"


def import_own(where: str) -> ModuleType:
    """Import a module, or the file of one, of a user's.

    Raises:
        UserError: it cannot be imported, which says where it fails.
    """
    from_file = where.endswith(".py")
    named = f"the file {where}" if from_file else f"module {where!r}"
    try:
        return importlib.import_module(module_of_file(where) if from_file else where)
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"{named} cannot be imported: {error}") from error
    except Exception as error:
        raise UserError(f"{named} cannot be imported: {type(error).__name__}: {error} ({place_of(error)})") from error


class Registry(Mapping[str, str]):
    """Names of one kind of thing. As a mapping: the built-in names and their ``module:attribute``.

    Args:
        key: the config key that gives a name, for messages.
        builtin: name -> ``module:attribute``, imported when it is chosen.
        group: entry points of installed packages that are found, too.
        kind: a ``function`` may be any callable, classes included.
        needs_params: a class must have a dataclass ``Params``, which says what options it has.
        also: further names that ``key`` takes and somebody else resolves, for messages.
    """

    def __init__(
        self,
        key: str,
        builtin: Mapping[str, str],
        *,
        group: str = "",
        kind: Literal["class", "function"] = "class",
        needs_params: bool = False,
        also: Sequence[str] = (),
    ) -> None:
        self.key, self._builtin, self._group, self._kind = key, builtin, group, kind
        self._needs_params, self._also = needs_params, also

    def __getitem__(self, name: str) -> str:
        return self._builtin[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._builtin)

    def __len__(self) -> int:
        return len(self._builtin)

    def names(self) -> list[str]:
        """Built-in names and those of installed packages."""
        return sorted({*self._builtin, *(entry.name for entry in self._entry_points())})

    def problem(self, name: str) -> str | None:
        """The message for a name that leads nowhere, as far as that is known without importing anything."""
        try:
            self._target(name)
        except UserError as error:
            return str(error)
        return None

    def load(self, name: str) -> Any:
        """The class or function that ``name`` stands for.

        Raises:
            UserError: no such name, file, module or class; one name of two owners; or a class without ``Params``.
        """
        where, _, attribute = self._target(name).rpartition(":")
        from_file = where.endswith(".py")
        found_in = f"the file {where}" if from_file else f"module {where!r}"
        try:
            module = import_own(where)
        except UserError as error:
            raise UserError(f"{self.key}: got {name!r}, but {error}") from error
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if not self._fits(found):
            known = [own for own, value in vars(module).items() if self._fits(value)]
            raise UserError(
                f"{self.key}: got {name!r}, but {found_in} has no {self._kind} {attribute!r}."
                f"{suggestion(attribute, known)}"
            )
        if (
            self._needs_params
            and isinstance(found, type)
            and not dataclasses.is_dataclass(getattr(found, "Params", None))
        ):
            raise UserError(
                f"{self.key}: got {name!r}, but the class {found.__name__} has no dataclass Params, which says what "
                "options it has; one without any will do"
            )
        return found

    def _target(self, name: str) -> str:
        """``module:attribute`` or ``file.py:attribute``."""
        where, colon, attribute = name.rpartition(":")
        if where.endswith(".py") or name.endswith(".py"):
            return self._target_in_file(name, where, attribute)
        if where == "__main__":
            raise UserError(
                f"{self.key}: got {name!r}, but workers do not execute your script or notebook; write the class into a "
                f"file and give path/to/file.py:{attribute}"
            )
        if colon:
            if not all(part.isidentifier() for part in (*where.split("."), *attribute.split("."))):
                raise UserError(
                    f"{self.key}: got {name!r}, expected module:{self._placeholder}, or "
                    f"path/to/file.py:{self._placeholder}"
                )
            return name
        targets = {f"{entry.value} of {_owner(entry)}": entry.value for entry in self._entry_points(name)}
        if name in self._builtin:
            targets = {f"{self._builtin[name]} of embodied_rl itself": self._builtin[name], **targets}
        if len(targets) > 1:
            raise UserError(
                f"{self.key}: got {name!r}, which stands for {' and for '.join(targets)}; write out the one you mean "
                "as module:name, or uninstall the other"
            )
        if not targets:
            known = sorted({*self.names(), *self._also})
            doors = f"module:{self._placeholder}, or path/to/file.py:{self._placeholder}"
            raise UserError(
                f"{self.key}: got {name!r}, expected one of {', '.join([*known, doors])}.{suggestion(name, known)}"
            )
        return next(iter(targets.values()))

    def _target_in_file(self, name: str, path: str, attribute: str) -> str:
        if not path or not attribute.isidentifier():
            raise UserError(f"{self.key}: got {name!r}, expected path/to/file.py:{self._placeholder}")
        if not Path(path).is_file():
            raise UserError(
                f"{self.key}: got {name!r}, but there is no such file; a relative path starts at {Path.cwd()}"
            )
        return name

    @property
    def _placeholder(self) -> str:
        return "Class" if self._kind == "class" else "function"

    def _fits(self, value: object) -> bool:
        return isinstance(value, type) if self._kind == "class" else callable(value)

    def _entry_points(self, name: str | None = None) -> list[EntryPoint]:
        found = _installed(self._group, tuple(sys.path)) if self._group else ()
        return [entry for entry in found if name in (None, entry.name)]


@functools.cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of a group on ``sys.path``: read once, since it opens a file of every installed package, and
    training steps look names up, too."""
    del path
    return tuple(entry_points(group=group))


def _owner(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else "an installed package"


def load_class(key: str, table: Mapping[str, str], name: str) -> type:
    """The class of a closed table, such as the tasks'."""
    return Registry(key, table).load(name)


def load_function(key: str, table: Mapping[str, str], name: str) -> Callable[..., Any]:
    """The function of a closed table, such as the commands'."""
    return Registry(key, table, kind="function").load(name)
