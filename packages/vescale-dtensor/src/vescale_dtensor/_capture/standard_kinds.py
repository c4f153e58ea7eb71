"""How the walk of a recording takes in objects of the standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from vescale_dtensor._capture.code_files import is_library_class
from vescale_dtensor._capture.equality import has_attributes
from vescale_dtensor._capture.looks import (
    Steady,
    decimals,
    handling,
    in_cache,
    in_context,
    level_of,
    referents,
)
from vescale_dtensor._capture.places import MISSING, Origin, environment, in_cell

# What reads attributes by names that it is given. Code may name a variable that holds it.
_BY_GIVEN_NAME = (getattr, hasattr, vars, dir)


def has_more(cls: type) -> bool:
    """Whether objects of a class may have something that users have set on them."""
    return has_attributes(cls) or not is_library_class(cls)


class StandardKinds:
    """The kinds of objects that lead to others, or to a value that the guard asks for again.

    `StateReads` is the walk itself, and has the first five methods.
    """

    def meet(self, value: Any, origin: Origin | None) -> None:
        """Take in a value that code can get at."""
        raise NotImplementedError

    def _look(self, look: Callable[[], Any], origin: Origin | None) -> Any:
        raise NotImplementedError

    def _follow_all(self) -> None:
        raise NotImplementedError

    def _name_attributes(self, names: Iterable[str]) -> None:
        raise NotImplementedError

    def _meet_object(self, value: Any, origin: Origin | None) -> None:
        raise NotImplementedError

    def _meet_more(self, value: Any, origin: Origin | None) -> None:
        """Take in what users may have set on an object beside what its kind says.

        Its class is the user's, or one of Python's whose instances have room for attributes:
        `OrderedDict` has, `dict` has not.
        """
        if has_more(type(value)):
            self._meet_object(value, origin)

    def _meet_environment(self, value: Any, origin: Origin | None) -> None:
        """Take in the variables of the environment, as one value."""
        self._look(partial(environment, value), origin)

    def _meet_cell(self, value: CellType, origin: Origin | None) -> None:
        self._look(partial(in_cell, value), origin)

    def _meet_method(self, value: MethodType, origin: Origin | None) -> None:
        self.meet(value.__self__, origin)
        self.meet(value.__func__, origin)

    def _meet_builtin(self, value: Any, origin: Origin | None) -> None:
        """Take in what a builtin method is bound to."""
        if value in _BY_GIVEN_NAME:
            self._follow_all()
        if not isinstance(value.__self__, ModuleType):
            self.meet(value.__self__, origin)  # a list's append, a dict's get

    def _meet_getter(self, value: Any, origin: Origin | None) -> None:
        """Take in the names that an `attrgetter` or `methodcaller` will read."""
        parts, keywords = _given_to(value)
        names = [name for one in parts if type(one) is str for name in one.split(".")]
        self._name_attributes(names)
        for one in (*parts, *keywords.values()):
            self.meet(one, origin)

    def _meet_slice(self, value: slice, origin: Origin | None) -> None:
        for one in (value.start, value.stop, value.step):
            self.meet(one, origin)

    def _meet_zoned(self, value: Any, origin: Origin | None) -> None:
        """Take in the zone of a moment; a class of the user's may have more."""
        self.meet(value.tzinfo, Origin(origin, ".tzinfo", "tzinfo"))
        self._meet_more(value, origin)

    def _meet_view(self, value: Any, origin: Origin | None) -> None:
        self.meet(value.mapping, origin)

    def _meet_wrapped(self, value: Any, origin: Origin | None) -> None:
        self.meet(getattr(value, "__wrapped__", None), origin)
        self._meet_more(value, origin)

    def _meet_cache(self, value: Any, origin: Origin | None) -> None:
        """Take in a function that remembers results, and what it has remembered."""
        self.meet(value.__wrapped__, origin)
        # Without calling it: what it remembers may be forgotten, and another value come of it.
        self._look(Steady(partial(in_cache, value)), origin)
        self._meet_object(value, origin)

    def _meet_decimal(self, value: Any, origin: Origin | None) -> None:
        """Take in the context that decides about the results of decimals."""
        self._look(Steady(decimals), Origin(origin, " in its context", ""))
        self._meet_object(value, origin)  # its class may be the user's, with attributes

    def _meet_logger(self, value: Any, origin: Origin | None) -> None:
        """Take in which messages a logger lets pass."""
        self._look(Steady(partial(level_of, value)), origin)

    def _meet_handler(self, value: Any, origin: Origin | None) -> None:
        """Take in which messages a handler takes; a class of the user's may have more."""
        self._look(Steady(partial(handling, value)), origin)
        self._meet_more(value, origin)

    def _meet_property(self, value: property, origin: Origin | None) -> None:
        for function in (value.fget, value.fset, value.fdel):
            self.meet(function, origin)
        self._meet_more(value, origin)

    def _meet_captured(self, value: Any, origin: Origin | None) -> None:
        """Take in the function of a captured one: inside of a recording it runs itself."""
        self.meet(value.function, origin)

    def _meet_variable(self, value: Any, origin: Origin | None) -> None:
        """Take in what a context variable is set to, and the default of one that is not."""
        # One that is not set, and one that is set to its default or to None, differ: `get` may be
        # given another default.
        if self._look(partial(value.get, MISSING), origin) is MISSING:
            with suppress(LookupError):
                self.meet(value.get(), origin)

    def _meet_context(self, value: Any, origin: Origin | None) -> None:
        self._look(Steady(partial(in_context, value)), origin)

    def _meet_referring(self, value: Any, origin: Origin | None) -> None:
        """Take in what an object in C refers to, which has no names."""
        self._look(Steady(partial(referents, value)), origin)

    def _meet_numpy(self, value: Any, origin: Origin | None) -> None:
        """Take in the names of the fields of a dtype, or the function behind a ufunc."""
        if hasattr(value, "names"):
            self._look(Steady(partial(getattr, value, "names")), Origin(origin, ".names", "names"))
        for one in referents(value):
            if isinstance(one, FunctionType | MethodType | partial):
                self.meet(one, origin)

    def _meet_whole(self, value: Any, origin: Origin | None) -> None:
        """Take in an object of a library's with all its attributes: what reads them is unknown."""
        self._meet_object(value, origin)

    def _meet_bytes(self, value: Any, origin: Origin | None) -> None:
        # By value: the buffer stays the same object whatever is written into it.
        self._look(partial(bytes, value), origin)
        self._meet_more(value, origin)


def name_called_by(value: Any) -> str:
    """The name of the method that a `methodcaller` calls."""
    name: str = _given_to(value)[0][0]
    return name


def _given_to(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """What an `attrgetter` or `methodcaller` was made of."""
    make, given = value.__reduce__()[:2]
    # With keywords, a `methodcaller` is made by a partial of its class.
    named, keywords = (make.args, make.keywords) if isinstance(make, partial) else ((), {})
    return [*named, *given], keywords
