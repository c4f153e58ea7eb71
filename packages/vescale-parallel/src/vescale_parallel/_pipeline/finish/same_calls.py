"""Compares calls of `forward_backward` on all ranks, as their stages wait for each other."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import DTensor

from vescale_parallel._common.agreement import Facts, checksum, everyone, start_same
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._pipeline.run.optimizer_watch import StepWatcher
from vescale_parallel._pipeline.trace.streams import Place
from vescale_parallel._step.parts import Part

_CHECKED: Final = 2
"""How many batches are compared by value: a loader that is wrong is wrong from the start."""

_HEAD: Final = "forward_backward is not called with the same on all ranks:"
_ADVICE: Final = "Pass the whole batch on every rank, on those of other stages as well."


class HooksChanged(Exception):
    """A rank has other forward hooks than at the call before: what was known may miss them."""


class SameCalls:
    """Compares the calls of all ranks, of one model.

    Args:
        mesh: its ranks. Others may run another model, or none.
        stepped: hears of steps of its optimizers.
    """

    def __init__(self, mesh: DeviceMesh, stepped: StepWatcher) -> None:
        self._stepped = stepped
        # Asked for once: a mesh takes a hundred calls to tell how many ranks it has.
        self._peers, self._group = mesh_ranks(mesh), everyone(mesh)
        self._calls = 0
        # The modes of the latest call, and their digest: mostly they are those of this one, and
        # their text is long.
        self._digest: tuple[object, str] = (), ""

    def start(
        self,
        part: Part,
        modes: object,
        setting: Mapping[str, str],
        *,
        has_new: bool = False,
    ) -> Callable[[], None]:
        """Tell the others of a call; returns what waits for them, and raises. Collective.

        Args:
            part: the arguments.
            modes: what decides beside them what a model does.
            setting: what else has to be the same, by name.
            has_new: whether modules have other forward hooks here than at the call before. Ranks
                may differ in that: somebody looks at what a module computes, on one of them.

        Raises:
            DisagreementError: on every rank, by what is returned: ranks do not call alike.
            HooksChanged: on every rank, by what is returned, where `has_new` is true on one.
        """
        found = {n: f"{tuple(one.shape)} {one.dtype}" for n, one in part.tensors().items()}
        facts = {
            "tensor": found,
            "value of": self._values_of(part),
            "argument": {name: repr(value) for name, value in plain_of(part).items()},
            "setting": {
                "train mode, requires_grad, autocast": self._digest_of(modes),
                "gradients": str(torch.is_grad_enabled()),
                "calls before": str(self._calls),
                "a step of an optimizer since the call before": str(self._stepped.lately),
                **setting,
            },
        }
        require = self._started(facts, int(has_new))

        def agreed() -> None:
            told = require()
            self._calls += 1
            self._stepped.lately = False
            if any(told):
                raise HooksChanged

        return agreed

    def require(self, setting: Mapping[str, str]) -> None:
        """Compare what was found out since. Collective."""
        self._started({"setting": setting})()

    def _started(self, facts: Facts, told: int = 0) -> Callable[[], list[int]]:
        advice = dict.fromkeys(facts, _ADVICE)
        return start_same(
            facts, peers=self._peers, head=_HEAD, advice=advice, group=self._group, told=told
        )

    def _digest_of(self, modes: object) -> str:
        """One number for thousands of modules: which of them differs is not said."""
        if self._digest[0] != modes:
            self._digest = modes, f"digest {zlib.crc32(repr(modes).encode()):08x}"
        return self._digest[1]

    def _values_of(self, part: Part) -> dict[str, str]:
        if self._calls >= _CHECKED:
            return {}
        # DTensors were compared when they were made, or differ by rank as they should.
        plain = {n: one for n, one in part.tensors().items() if not isinstance(one, DTensor)}
        return {name: f"checksum {checksum(one):08x}" for name, one in plain.items()}


def drawn_from(start: Place) -> dict[str, str]:
    """Where random streams stand from which a model draws: each stage draws from its own."""
    digest = f"digest {zlib.crc32(repr(start).encode()):08x}"
    return {"state of the random generators (torch.manual_seed)": digest}


def plain_of(part: Part) -> dict[str, bool | int | float | str]:
    """Plain values among the arguments, by their paths."""
    found: dict[str, bool | int | float | str] = {}

    def look(value: Any, path: str) -> None:
        if isinstance(value, bool | int | float | str):
            found[path] = value
        elif isinstance(value, Mapping):
            for key, one in value.items():
                look(one, f"{path}[{key!r}]")
        elif isinstance(value, tuple | list):
            for at, one in enumerate(value):
                look(one, f"{path}[{at}]")

    look(part.args, "args")
    look(part.kwargs, "kwargs")
    look(part.targets, "loss")
    return found
