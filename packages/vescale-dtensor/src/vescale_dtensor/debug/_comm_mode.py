"""`CommDebugMode`: counts collectives, in all and by the module whose forward issued them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from vescale_comm import Record, Trace, trace

from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._tensor.dtensor import DTensor

# What issued a collective: a module by its name, or this, for all that is outside of forwards:
# backward, optimizers, what the program itself does.
_OUTSIDE = "Global"

# The names by which torch's class counts; of each op that vescale_comm records.
_FUNCTIONAL = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter_tensor",
}
_DIRECT = {
    "barrier": "barrier",
    "permute": "send",
    "recv": "recv_",
    "reduce": "reduce_",
    "scatter": "scatter_",
    "send": "send",
}


def _counted_as(op: str) -> Any:
    """The operator of torch that stands for a recorded op, as torch's class names it."""
    if op in _FUNCTIONAL:
        return getattr(torch.ops.c10d_functional, _FUNCTIONAL[op])
    return getattr(torch.ops.c10d, _DIRECT[op])


class CommDebugMode:
    """Counts the collectives of a block, backward included.

    The interface is that of `torch.distributed.tensor.debug.CommDebugMode`. What is counted is what
    `vescale_comm` issues: that is all that DTensors communicate, and not what a program calls of
    `torch.distributed` itself, of which it warns. Modules are those whose forward is running when a
    collective is issued; each block starts from nothing.

    Examples:
        with CommDebugMode() as comm_mode:
            model(x).sum().backward()
        assert comm_mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 1
    """

    def __init__(self) -> None:
        """See the class."""
        self._open: ExitStack | None = None
        self._clear()

    def _clear(self) -> None:
        self._trace = Trace()
        # Modules whose forward is running, innermost last: (module, its name, the hook at its end).
        self._running: list[tuple[nn.Module, str, Any]] = []
        # The names of modules below those that a forward started from.
        self._names: dict[nn.Module, str] = {}
        # For each record that is already told apart: the module that issued it.
        self._issuers: list[str] = []
        self._parameters: dict[str, dict[str, Any]] = {}
        self._placements: dict[str, tuple[Placement, ...]] = {}
        self._order: dict[str, int] = {_OUTSIDE: 0}

    def __enter__(self) -> CommDebugMode:
        """Start counting, from nothing."""
        if self._open is not None:
            raise RuntimeError("CommDebugMode: this one is open already; make another")
        self._clear()
        thread = get_ident()

        def entering(module: nn.Module, inputs: Any) -> None:
            # Hooks of all modules are those of the process; ranks may be threads of it.
            if get_ident() == thread:
                self._entered(module)

        with ExitStack() as stack:
            self._trace = stack.enter_context(trace())
            stack.callback(register_module_forward_pre_hook(entering).remove)
            stack.callback(self._remove_hooks)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting; what was counted stays until the next block."""
        self._attribute()
        if self._open is not None:
            self._open.close()
            self._open = None

    def _attribute(self) -> None:
        """Give what was issued since the last call to the module that is running."""
        name = self._running[-1][1] if self._running else _OUTSIDE
        self._issuers += [name] * (len(self._trace.records) - len(self._issuers))

    def _entered(self, module: nn.Module) -> None:
        """Note that the forward of a module starts."""
        self._attribute()
        if not self._running:
            root = type(module).__name__
            below = module.named_modules()
            self._names = {each: f"{root}.{name}" if name else root for name, each in below}
        name = self._names.get(module, type(module).__name__)

        def leaving(module: nn.Module, inputs: Any, output: Any) -> None:
            self._left(module)

        # The last of the module's own hooks: what they communicate (a style's output) is its. Also
        # of a forward that raises, which the next one would else seem to be inside of.
        ending = module.register_forward_hook(leaving, always_call=True)
        self._running.append((module, name, ending))
        self._order.setdefault(name, len(self._running))
        own = dict(module.named_parameters(recurse=False))
        if own:
            self._parameters[name] = {n: p.data for n, p in own.items()}
        for parameter, value in own.items():
            if isinstance(value, DTensor):
                self._placements[f"{name}.{parameter}"] = value.placements

    def _left(self, module: nn.Module) -> None:
        """Note that the forward of a module has ended."""
        self._attribute()
        while self._running:
            ended, _, ending = self._running.pop()
            ending.remove()
            if ended is module:
                break

    def _remove_hooks(self) -> None:
        """Forget modules whose forward goes on after the block."""
        for _, _, ending in self._running:
            ending.remove()
        self._running.clear()

    @property
    def comm_counts(self) -> dict[Any, int]:
        """See `get_comm_counts`."""
        return self.get_comm_counts()

    def get_comm_counts(self) -> dict[Any, int]:
        """Return the number of collectives by operator, 0 for those that were not issued.

        The operators are those by which torch counts: `torch.ops.c10d_functional.all_reduce`,
        `all_gather_into_tensor`, `reduce_scatter_tensor`, `all_to_all_single`, `broadcast`; others
        are of `torch.ops.c10d`.
        """
        counts = Counter(_counted_as(record.op) for record in self._trace.records)
        return defaultdict(int, counts)

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return len(self._trace.records)

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of the modules that ran, by module and name."""
        return self._parameters

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of the distributed parameters of the modules that ran, by name."""
        return self._placements

    def _by_module(self) -> dict[str, list[Record]]:
        """What each module issued, in the order in which modules first ran."""
        self._attribute()
        found: dict[str, list[Record]] = {name: [] for name in self._order}
        for name, record in zip(self._issuers, self._trace.records, strict=True):
            found[name].append(record)
        return found

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of modules, with what each of them issued.

        Args:
            noise_level: 0: counts; 1: placements of parameters as well; 2 and more: every
                collective as well, with its group, its bytes and the line that issued it.
        """
        lines = []
        for name, records in self._by_module().items():
            indent = "  " * self._order[name]
            lines.append(f"{indent}{name}")
            if noise_level > 0:
                lines += [f"{indent}    {line}" for line in self._parameter_lines(name)]
            counts = Counter(record.op for record in records)
            lines += [f"{indent}    {op}: {count}" for op, count in sorted(counts.items())]
            if noise_level > 1:
                lines += [
                    f"{indent}        {r.op} over {r.group}, {r.bytes} B, {list(r.shape)}, {r.site}"
                    for r in records
                ]
        return "\n".join(lines) + "\n"

    def _parameter_lines(self, name: str) -> list[str]:
        """The placements of a module's own parameters, a line each."""
        own = [n for n in self._parameters.get(name, {}) if f"{name}.{n}" in self._placements]
        return [f"{n}: {list(self._placements[f'{name}.{n}'])}" for n in own]

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | Path = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write `generate_comm_debug_tracing_table` to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level))

    def generate_json_dump(
        self, file_name: str | Path = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write what the table tells as JSON: a list of modules.

        Args:
            file_name: the file.
            noise_level: as of the table.
        """
        modules: list[dict[str, Any]] = []
        for name, records in self._by_module().items():
            entry: dict[str, Any] = {"name": name, "depth": self._order[name]}
            entry["collectives"] = dict(Counter(record.op for record in records))
            if noise_level > 0:
                entry["parameters"] = self._parameter_lines(name)
            if noise_level > 1:
                entry["records"] = [
                    {"op": r.op, "group": r.group, "bytes": r.bytes, "site": r.site}
                    for r in records
                ]
            modules.append(entry)
        Path(file_name).write_text(json.dumps(modules, indent=1))

    def __repr__(self) -> str:
        """Return the total."""
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"
