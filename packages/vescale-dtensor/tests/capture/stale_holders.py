"""Where state is held: each holder gives a function that reads it there, and how to replace it."""

import types

from torch import nn

HELD = None


def argument(use):
    state = {}
    return use, lambda value: state.update(value=value), lambda: (state["value"],)


def closure(use):
    held = None

    def function(x):
        return use(x, held)

    def put(value):
        nonlocal held
        held = value

    return function, put, tuple


class _Globals:
    """Globals of its own for every function that is made of this code."""

    @staticmethod
    def code(x):
        return USE(x, HELD)  # noqa: F821


def a_global(use):
    space = {"USE": use, "HELD": None, "__builtins__": __builtins__, "__name__": "own_globals"}
    function = types.FunctionType(_Globals.code.__code__, space, "of_global")
    return function, lambda value: space.update(HELD=value), tuple


def default(use):
    def function(x, held=None):
        return use(x, held)

    def put(value):
        function.__defaults__ = (value,)

    return function, put, tuple


class Holding(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use, self.held = use, None

    def forward(self, x):
        return self.use(x, self.held)


def attribute_of_a_module(use):
    module = Holding(use)
    return module, lambda value: setattr(module, "held", value), tuple


class Box:
    held = None


def object_in_a_container(use):
    boxes = {"first": [Box()]}

    def function(x):
        return use(x, boxes["first"][0].held)

    return function, lambda value: setattr(boxes["first"][0], "held", value), tuple


def name_in_a_python_module(use):
    settings = types.ModuleType("settings")
    settings.held = None

    def function(x):
        return use(x, settings.held)

    return function, lambda value: setattr(settings, "held", value), tuple


HOLDERS = {
    "argument": argument,
    "closure": closure,
    "global": a_global,
    "default": default,
    "attribute of a module": attribute_of_a_module,
    "object in a container": object_in_a_container,
    "name in a Python module": name_in_a_python_module,
}
