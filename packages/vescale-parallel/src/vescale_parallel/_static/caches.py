"""Caches of keys and values, which layers write to: none in training, and none in a program.

A layer that fills a cache changes an object that it is given, which no replay would do again. In
training nobody reads it, so a model that makes one because its configuration says so makes none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from vescale_dtensor import untraced

from vescale_parallel._common.pickle_refusal import NotPickled

_USE, _PAST = "use_cache", "past_key_values"
_SAID: Final = (
    "static=True: {kind} makes no cache of keys and values in calls that train or have labels, and "
    "returns none: its layers would write to it, so that they could not be captured. Pass "
    "use_cache=True to a call that is to have one; with config.use_cache = False nothing is said."
)


class WithoutCache(NotPickled):
    """A hook before a forward that makes a cache by itself: without one where it trains.

    Args:
        names: of the forward's arguments, in their order.
    """

    def __init__(self, names: list[str]) -> None:
        self._places = {name: names.index(name) for name in (_USE, _PAST)}

    @untraced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Say that no cache is wanted, unless the caller has said what is."""
        trains = module.training and torch.is_grad_enabled()
        if not (trains or kwargs.get("labels") is not None):
            return None
        if any(self._given(name, args, kwargs) is not None for name in (_USE, _PAST)):
            return None
        at = self._places[_USE]
        if at < len(args):
            return (*args[:at], False, *args[at + 1 :]), kwargs
        return args, {**kwargs, _USE: False}

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self._places[name]
        return args[at] if at < len(args) else kwargs.get(name)


def train_without_caches(model: nn.Module) -> None:
    """Let the models inside that cache keys and values by default do so outside of training only.

    A warning says so.
    """
    for module, names in _makers(model):
        warnings.warn(_SAID.format(kind=type(module).__name__), stacklevel=2)
        module.register_forward_pre_hook(WithoutCache(names), with_kwargs=True)


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is given a cache of keys and values."""
    for one in (*args, *kwargs.values()):
        if one is not None and not isinstance(one, Tensor) and hasattr(one, "get_seq_length"):
            return True
    return False


def _makers(module: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """The outermost modules whose forward may make a cache, with the names of its arguments."""
    try:
        names = list(signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward that says nothing of its arguments
        names = []
    if _USE in names and _PAST in names and _asks(getattr(module, "config", None)):
        yield module, names
        return
    for child in module.children():
        yield from _makers(child)


def _asks(config: Any) -> bool:
    """Whether a configuration asks for a cache: its own part, or that of its text model."""
    parts = (config, getattr(config, "text_config", None))
    return any(
        getattr(one, _USE, False)
        # Of encoders it says so too, and means nothing.
        and (getattr(one, "is_decoder", True) or getattr(one, "is_encoder_decoder", False))
        for one in parts
    )
