"""Makes a program of a torch.fx graph, which runs once without values.

Storages, not nodes, have lives: an operation's result may look at the storage of its argument. The
graph runs on fake tensors under a mode that sees every operator, so that a node may be an operator,
a method, a function of torch or a module alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from vescale_comm.nested import tensors_within
from vescale_comm.operators import arguments_of, effects_of

from vescale_parallel._common.torch_compat import FakeTensor, FakeTensorMode, schema_of
from vescale_parallel._errors import MemoryPlanError
from vescale_parallel._memory.backend_bytes import bytes_while_sent
from vescale_parallel._memory.program import Operation, Program, Storage, program

_PURE: Final = ("torch", "_operator", "operator", "math", "builtins")
_functional: Any = torch.ops._c10d_functional
_COPIED: Final = (_functional.all_reduce.default, _functional.broadcast.default)


@dataclass(frozen=True)
class Result:
    """A tensor that a node returns: what every run has to agree with.

    Attributes:
        shape: its sizes.
        stride: its strides, in elements.
        offset: where it begins in its storage, in elements.
        dtype: its dtype.
        device: where it lies.
        storage: an index in the program's storages; None where inputs or constants hold it.
        key: which storage it lies in, also for those of inputs and constants.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage: int | None
    key: int


@dataclass(frozen=True)
class TracedGraph:
    """A graph and its program.

    Attributes:
        module: the graph.
        nodes: the node of each operation.
        program: what is planned.
        results: the tensors in the value of each node, in the order of its leaves.
        inputs: the value of each placeholder, tensors as `Result`.
        writes: whether some operation writes to an input or a constant.
        written: for each operation, the keys of the storages that it writes to.
        plain: for each operation, whether all that it does is to compute its results from its
            arguments: it draws nothing, sends nothing, has no other effects.
    """

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    program: Program
    results: Mapping[fx.Node, tuple[Result, ...]]
    inputs: tuple[Any, ...]
    writes: bool
    written: tuple[frozenset[int], ...]
    plain: tuple[bool, ...]


@dataclass
class _NodeEffects:
    """What one node does."""

    touched: set[int] = field(default_factory=set)  # keys of storages
    written: set[int] = field(default_factory=set)
    made: dict[int, int] = field(default_factory=dict)  # bytes by key
    draws: bool = False
    communicates: bool = False
    effects: bool = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below a node, and keeps all values so that storages keep their keys."""

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.alive: list[Any] = []
        self.now = _NodeEffects()
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Constants of the graph are real tensors: they must be the same fake one at every use, or
        # they would be new storages.
        args, kwargs = tree_map(self.fake, (args, kwargs or {}))
        now = self.now
        given = arguments_of(func, args, kwargs)
        effects = effects_of(func, given)
        for name, value in given.items():
            tensors = self.keep(value)
            now.touched |= tensors
            if name in effects.writes:
                now.written |= tensors
        now.draws |= effects.draws
        now.communicates |= effects.sends
        # Without values it makes a new tensor; in truth it returns the one that it waited for.
        waits = schema_of(func).name == "_c10d_functional::wait_tensor"
        made = args[0] if waits else func(*args, **kwargs)
        for tensor in tensors_within(made):
            # By storage: a view makes nothing.
            key = self.key(tensor)
            if key not in self.known:
                self.known.add(key)
                now.made[key] = tensor.untyped_storage().nbytes()
        now.touched |= self.keep(made)
        return made

    def fake(self, value: Any) -> Any:
        """A tensor of the graph without its values; the same one each time."""
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            self.alive.append(value)
            return self.mode.from_tensor(value, static_shapes=True)
        return value

    def key(self, tensor: Tensor) -> int:
        """Which storage a tensor lies in."""
        # Kept alive: an address that is freed comes back as that of another storage.
        self.alive.append(tensor)
        return int(tensor.untyped_storage()._cdata)

    def keep(self, value: Any) -> set[int]:
        """The storages of all tensors in a value."""
        return {self.key(one) for one in tensors_within(value)}


class Tracing:
    """What nodes do, kept from one graph to the next: who changes a graph asks of what is new only.

    For copies of one graph, with other nodes put in, taken out or moved.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = _Recorder(self.mode)
        self.inputs: list[Any] | None = None
        self.known: dict[Any, tuple[Any, _NodeEffects]] = {}

    def key(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """By what a node is known: its name, what it calls, with which values; None if it is not.

        Names are unique in a graph, so that no two nodes share what one of them made.
        """
        if node.op not in ("call_function", "call_method"):
            return None  # inputs and constants are asked for by name, and modules may be others
        given = fx.node.map_arg((node.args, node.kwargs), lambda one: _Value(id(values[one])))
        return node.name, node.op, node.target, repr(given)


class _Value(int):
    """A value that is alive as long as it is known, by its address."""

    def __repr__(self) -> str:
        return f"<{int(self)}>"


class _Interpreter(fx.Interpreter):
    """Runs the graph and notes what each node does."""

    def __init__(self, module: fx.GraphModule, memory: Tracing) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.memory, self.recorder = memory, memory.recorder
        self.seen: dict[fx.Node, _NodeEffects] = {}
        self.values: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        value: Any = super().fetch_attr(target)
        return self.recorder.fake(value)

    def run_node(self, n: fx.Node) -> Any:
        key = self.memory.key(n, self.values)
        if key is not None and key in self.memory.known:
            value, seen = self.memory.known[key]
            # A reader of the program adds to it.
            self.seen[n] = replace(seen, touched=set(seen.touched))
        else:
            value = self._run_new(n)
            if key is not None:
                self.memory.known[key] = value, self.seen[n]
        self.values[n] = value
        return value

    def _run_new(self, n: fx.Node) -> Any:
        recorder = self.recorder
        recorder.now = now = _NodeEffects()
        try:
            value = super().run_node(n)
        except Exception as error:
            raise MemoryPlanError(_why_not(n, error)) from error
        if n.op in ("placeholder", "get_attr"):
            # What is there before the graph runs is not planned.
            recorder.known |= recorder.keep(value)
        for given in n.all_input_nodes:
            # Also of arguments that no operator saw: getitem, and views that Python makes.
            now.touched |= recorder.keep(self.values[given])
        now.touched |= recorder.keep(value)
        now.effects = n.op != "placeholder" and (n.is_impure() or not _pure(n, self.module))
        # Those are ordered by what they write, or by the chain of collectives.
        now.effects &= not now.written and not now.communicates
        self.seen[n] = now
        return value


CHAINS: Final = ("draws", "communicates", "effects")
"""What has to stay in the order of the graph among itself."""


def trace_program(
    module: fx.GraphModule,
    inputs: Sequence[Any] | None,
    chains: Sequence[str] = CHAINS,
    memory: Tracing | None = None,
) -> TracedGraph:
    """Run a graph without values, and return what a planner needs to know of it.

    Args:
        module: the graph.
        inputs: of it; None: what its placeholders say.
        chains: who waits for the one before; a scheduler of collectives orders those by itself.
        memory: of earlier calls, for graphs that were made of the same one, with its inputs.

    Raises:
        MemoryPlanError: shapes depend on values, inputs are missing, or a node cannot run so.
    """
    # A shape that was changed in place is another one when the graph runs for the second time.
    if memory is None or any(map(_changes_shapes, module.graph.nodes)):
        memory = Tracing()
    recorder = memory.recorder
    # Whatever history inputs have: a graph of a step holds its backward as operators.
    with memory.mode, torch.no_grad():
        if memory.inputs is None and inputs is None:
            memory.inputs = _from_metadata(module)
        elif memory.inputs is None:
            memory.inputs = [recorder.fake(one) for one in _as_many(module, inputs or ())]
        interpreter = _Interpreter(module, memory)
        with recorder:
            interpreter.run(*memory.inputs, enable_io_processing=False)
    return _Reader(module, interpreter, chains).traced(memory.inputs)


def _changes_shapes(node: fx.Node) -> bool:
    if node.op == "call_function":
        return torch.Tag.inplace_view in getattr(node.target, "tags", ())
    return node.op == "call_method" and str(node.target).endswith("_")


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _as_many(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    names = [node.name for node in placeholders(module)]
    flat = list(inputs)
    if len(flat) != len(names):
        flat = tree_leaves(flat)
    if len(flat) != len(names):
        raise MemoryPlanError(
            f"the graph has {len(names)} inputs ({', '.join(names[:6])} ...), but {len(flat)} were "
            "given: pass them flat, in the order of its placeholders."
        )
    return flat


def _from_metadata(module: fx.GraphModule) -> list[Any]:
    """Inputs like those that the graph was traced with; those that shared a storage share one."""
    values: list[Any] = []
    bases: dict[int, tuple[Tensor, torch.dtype]] = {}
    for node in placeholders(module):
        value = node.meta.get("val")
        if value is None:
            raise MemoryPlanError(
                f"input '{node.name}' of the graph says nothing of its shape: pass example inputs, "
                "plan(graph, inputs=[...])."
            )
        if isinstance(value, Tensor):
            if any(not isinstance(one, int) for one in (*value.shape, *value.stride())):
                raise MemoryPlanError(
                    f"input '{node.name}' has the symbolic shape {tuple(value.shape)}: a plan is "
                    "for one shape. Pass example inputs, plan(graph, inputs=[...])."
                )
            key, dtype = value.untyped_storage()._cdata, value.dtype
            if key not in bases:
                count = value.untyped_storage().nbytes() // max(1, dtype.itemsize)
                # Inputs that share memory have to share it here too: a write to one is one to the
                # other.
                bases[key] = torch.empty(count, dtype=dtype, device=value.device), dtype
            base, first = bases[key]
            if first != dtype:
                raise MemoryPlanError(
                    f"input '{node.name}' ({dtype}) shares memory with an input of {first}: pass "
                    "example inputs, plan(graph, inputs=[...])."
                )
            value = base.as_strided(value.shape, value.stride(), value.storage_offset())
        values.append(value)
    return values


def _why_not(node: fx.Node, error: Exception) -> str:
    if isinstance(error, MemoryPlanError):
        return str(error)
    kind = type(error).__name__
    line = " ".join(str(error).split())[:300]
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return (
            f"node '{node.name}' ({node.target}) needs values to know its result ({kind}): memory "
            "can be planned only where shapes do not depend on data. Cut the graph there, and plan "
            "the parts."
        )
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return (
            f"node '{node.name}' ({node.target}) holds graphs of its own, which are not planned: "
            "cut the graph there, and plan the parts."
        )
    return f"node '{node.name}' ({node.target}) cannot run without values: {kind}: {line}"


def _pure(node: fx.Node, module: nn.Module) -> bool:
    """Whether all that a call does is seen in its tensors, as far as its name tells."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__module__.startswith("torch.")
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return True
    # Functions of anybody else may print, count or write to what no tensor shows: they keep their
    # order.
    return str(getattr(node.target, "__module__", "")).split(".")[0] in _PURE


class _Reader:
    """Makes a program of what was seen."""

    def __init__(self, module: fx.GraphModule, ran: _Interpreter, chains: Sequence[str]) -> None:
        self.module, self.ran, self.chains = module, ran, chains
        graph = list(module.graph.nodes)
        self.nodes = [one for one in graph if one.op not in ("placeholder", "get_attr", "output")]
        self.step = {node: at for at, node in enumerate(self.nodes)}
        # Results of the graph outlive it, so they cannot lie in memory that the next run uses.
        self.kept = ran.recorder.keep(ran.values[graph[-1]])
        self.users: dict[int, set[int]] = {}
        for node, at in self.step.items():
            for key in ran.seen[node].touched:
                self.users.setdefault(key, set()).add(at)
        self.storage: dict[int, int] = {}

    def traced(self, inputs: Sequence[Any]) -> TracedGraph:
        """Put it together."""
        # Before lives are read: it lengthens some of them.
        self._until_waited()
        operations: list[Operation] = []
        storages: list[Storage] = []
        for at, node in enumerate(self.nodes):
            made, temporary = self.ran.seen[node].made, 0
            held = self.ran.recorder.keep(self.ran.values[node])
            # A node that makes several numbers them, in the order in which they were seen.
            number = 0
            for key, size in made.items():
                # What is returned, or written to something that lives on, outlives the node.
                if key not in held and len(self.users.get(key, ())) < 2:
                    temporary += size
                    continue
                self.storage[key] = len(storages)
                users = tuple(sorted(self.users[key] | {at}))
                name = f"{node.name}.{number}" if number else node.name
                device = str(self._device(key, node))
                storages.append(Storage(name, size, at, users, key in self.kept, device))
                number += 1
            storages += self._while_sent(at, node)
            operations.append(Operation(node.name, temporary))
        results = {node: self._results(value) for node, value in self.ran.values.items()}
        outside = set(self.users) - set(self.storage)
        seen = [self.ran.seen[node] for node in self.nodes]
        return TracedGraph(
            self.module,
            tuple(self.nodes),
            program(operations, storages, self._before()),
            results,
            tuple(self._results(one)[0] if isinstance(one, Tensor) else one for one in inputs),
            any(one.written & outside for one in seen),
            tuple(frozenset(one.written) for one in seen),
            tuple(not (one.draws or one.communicates or one.effects) for one in seen),
        )

    def _while_sent(self, at: int, node: fx.Node) -> Iterator[Storage]:
        """What the backend of a collective takes until somebody has waited for it."""
        inputs = node.all_input_nodes
        given, value = self.ran.values[inputs[0]] if inputs else None, self.ran.values[node]
        size = bytes_while_sent(node, given, value)
        if size:
            waits = [self.step[one] for one in node.users if "wait_tensor" in str(one.target)]
            users = tuple(sorted({at, *waits}))
            yield Storage(f"{node.name}.sent", size, at, users, False, str(value.device))

    def _device(self, key: int, node: fx.Node) -> torch.device:
        for tensor in tensors_within(self.ran.values[node]):
            if tensor.untyped_storage()._cdata == key:
                return tensor.device
        return torch.device("cpu")

    def _results(self, value: Any) -> tuple[Result, ...]:
        found = []
        for one in tensors_within(value):
            if one.layout != torch.strided:
                raise MemoryPlanError(f"tensors of layout {one.layout} cannot be planned.")
            key = int(one.untyped_storage()._cdata)
            where = int(one.storage_offset())
            found.append(
                Result(
                    tuple(one.shape),
                    one.stride(),
                    where,
                    one.dtype,
                    one.device,
                    self.storage.get(key),
                    key,
                )
            )
        return tuple(found)

    def _until_waited(self) -> None:
        """What a collective reads lives until somebody has waited for the collective.

        Not what is copied before anything is sent: an all-reduce works on a copy that it makes.
        """
        seen = [self.ran.seen[node] for node in self.nodes]
        # By the result that is waited for: of several tensors a collective makes a list.
        sent: dict[int, int] = {}
        for at, node in enumerate(self.nodes):
            if seen[at].communicates and node.target not in _COPIED:
                sent |= dict.fromkeys(seen[at].made, at)
            if "wait_tensor" not in str(node.target):
                continue
            for start in {sent[key] for key in seen[at].touched & sent.keys()}:
                for key in seen[start].touched:
                    self.users[key].add(at)
                    seen[at].touched.add(key)

    def _before(self) -> list[set[int]]:
        """What each operation waits for: arguments, writers, and the chains of the graph."""
        before: list[set[int]] = []
        last: dict[str, int] = {}
        written: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for at, node in enumerate(self.nodes):
            seen = self.ran.seen[node]
            waits = {self.step[one] for one in node.all_input_nodes if one in self.step}
            for key in seen.touched:
                if key in written:
                    # Read after write, and write after write.
                    waits.add(written[key])
                if key in seen.written:
                    # Write after read: who has read the old value goes first.
                    waits.update(readers.pop(key, ()))
                    written[key] = at
                else:
                    readers.setdefault(key, []).append(at)
            for chain in self.chains:
                if getattr(seen, chain):
                    waits |= {last[chain]} if chain in last else set()
                    last[chain] = at
            before.append(waits - {at})
        return before
