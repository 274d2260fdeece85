# SPDX-License-Identifier: LGPL-2.1-or-later

"""``dataclass`` whose classes cost next to nothing until many objects are made.

The standard one writes and compiles up to six methods for each class, which took a
fifth of a command's time: a command has some 200 such classes, and makes few objects
of most. Here the classes share methods that look at the fields. A class of which many
objects are made gets the compiled methods then, as it would have from the start.

Its objects are those of ``dataclasses.dataclass`` in all but this: there is no
``__post_init__`` and no ``InitVar``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

MANY = 100
"""Number of a class's objects from which on it has methods of its own: to compile them
takes as long as it takes to make some 500 objects without."""

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        eq: bool = True,
        kw_only: bool = False,
        slots: bool = False,
    ) -> Any:
        """Return the class with its fields and methods, or what does so.

        See ``dataclasses.dataclass``.
        """

        def decorate(cls: type) -> type:
            made = dataclasses.dataclass(
                init=False, repr=False, eq=False, kw_only=kw_only, slots=slots
            )(cls)
            own = vars(cls)
            for name, method in _methods(frozen, eq, slots).items():
                # A class that defines __eq__ alone has None for its hash.
                if own.get(name) is None:
                    setattr(made, name, method)
            return made

        return decorate if cls is None else decorate(cls)


def _methods(frozen: bool, eq: bool, slots: bool) -> dict[str, Any]:
    """Return the methods that a class of this kind has from here, by their names."""
    methods: dict[str, Any] = {"__init__": _init, "__repr__": _repr}
    if eq:
        methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
    if frozen and slots:
        methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    return methods


class _Shape:
    """The fields of a class, in the order of its bases and its source."""

    def __init__(self, cls: type) -> None:
        self.fields = dataclasses.fields(cls)
        self.names = frozenset(each.name for each in self.fields)
        self.positional = [each.name for each in self.fields if not each.kw_only]
        self.defaults = {
            each.name: each.default
            for each in self.fields
            if each.default is not dataclasses.MISSING
        }
        self.factories: dict[str, Callable[[], Any]] = {
            each.name: each.default_factory
            for each in self.fields
            if each.default_factory is not dataclasses.MISSING
        }
        self.objects = 0


_SHAPES: dict[type, _Shape] = {}


def _shape(record: Any) -> _Shape:
    cls = type(record)
    if cls not in _SHAPES:
        _SHAPES[cls] = _Shape(cls)
    return _SHAPES[cls]


def _init(self: Any, *args: Any, **values: Any) -> None:
    shape = _shape(self)
    shape.objects += 1
    if shape.objects >= MANY:
        _compile(type(self), shape)
    if args:
        given = dict(zip(shape.positional, args, strict=False))
        if len(given) < len(args) or not given.keys().isdisjoint(values):
            raise TypeError(_misfit(self, args, values))
        values = given | values
    if values.keys() != shape.names:
        made = {
            name: make() for name, make in shape.factories.items() if name not in values
        }
        values = {**shape.defaults, **made, **values}
        if values.keys() != shape.names:
            raise TypeError(_misfit(self, args, values))
    for name, value in values.items():
        object.__setattr__(self, name, value)


def _misfit(self: Any, args: tuple[Any, ...], values: Mapping[str, Any]) -> str:
    shape = _shape(self)
    given = ", ".join(sorted(values)) or "none"
    return (
        f"{type(self).__qualname__} has the fields {', '.join(sorted(shape.names))}, "
        f"of which {len(shape.positional)} by position; given by position: "
        f"{len(args)}, by name or by default: {given}"
    )


def _compile(cls: Any, shape: _Shape) -> None:
    """Give a class methods of its own in place of the shared ones."""
    fields = [
        (
            each.name,
            object,
            dataclasses.field(
                default=each.default,
                default_factory=each.default_factory,
                compare=each.compare,
                kw_only=each.kw_only,
            ),
        )
        for each in shape.fields
    ]
    twin = dataclasses.make_dataclass(
        cls.__name__, fields, repr=False, frozen=cls.__setattr__ is _refuse
    )
    for shared in (_init, _eq, _hash):
        name = f"_{shared.__name__}__"
        if getattr(cls, name) is shared:
            setattr(cls, name, getattr(twin, name))


def _repr(self: Any) -> str:
    shown = (
        f"{each.name}={getattr(self, each.name)!r}"
        for each in _shape(self).fields
        if each.repr
    )
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _compared(self) == _compared(other)


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple(
        [getattr(self, each.name) for each in _shape(self).fields if each.compare]
    )


def _refuse(self: Any, name: str, *_: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"{name} cannot be changed")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in _shape(self).fields]


def _setstate(self: Any, state: list[Any]) -> None:
    for each, value in zip(_shape(self).fields, state, strict=True):
        object.__setattr__(self, each.name, value)
