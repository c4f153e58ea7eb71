"""The process group of a simulated world, with the methods that torch calls on a backend.

Members are threads that run one at a time. Each call arrives at the group's `Meeting`; the last
member to arrive moves the data of all, and the handles of the others become ready.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._engine import reference_semantics
from vescale_comm._engine.annotated_groups import AnnotatedGroup
from vescale_comm._errors import CommError, CommMismatchError
from vescale_comm._simulation.log_comparison import WorldLogs
from vescale_comm._simulation.meeting import CallNote, Meeting, Run, Slot, finish
from vescale_comm._simulation.scheduler import Scheduler
from vescale_comm._torch.call_site import call_site
from vescale_comm._watchdog.execution_log import WatchedGroup
from vescale_comm._wire.fold import FOLDS

_REDUCTIONS = (*FOLDS, "AVG")


class SimulatedWork(dist.Work):
    """A collective or a message under way.

    Args:
        scheduler: of the simulation.
        what: name, for the report of a deadlock.
        ready: whether it can complete.
        finish: completes it, or raises.
        results: tensors that hold the result.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        what: str,
        ready: Callable[[], bool],
        finish: Callable[[], None],
        results: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self._scheduler, self._what, self._results = scheduler, what, list(results)
        self._ready = ready
        self._finish: Callable[[], None] | None = finish
        self._sender = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is complete; other ranks run until then."""
        if self._finish is not None:
            # The other ranks run inside this call.
            self._scheduler.wait_until(self._ready, self._what)
            # Forgotten before it runs: torch may wait for one handle twice, and a receive takes a
            # message.
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        """Tell whether it is complete, after others had a turn."""
        if self._finish is not None and not self._ready():
            # A rank that polls would otherwise keep the turn for ever, and what it polls for never
            # come.
            self._scheduler.pause(self._what)
        return self._finish is None or self._ready()

    def is_success(self) -> bool:
        """Tell whether it is complete."""
        return self.is_completed()

    def get_future(self) -> Any:
        """Return a future of the results. Waits: nothing would complete it later."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> list[Tensor]:
        """Return the results."""
        return self._results

    def _source_rank(self) -> int:
        return self._sender


if TYPE_CHECKING:  # torch declares overloads that its own callers do not use
    _ProcessGroup: Any = object
else:
    _ProcessGroup = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup, AnnotatedGroup, WatchedGroup):  # type: ignore[misc]
    """Members are rank threads; the last to come to a collective moves the data for all."""

    def __init__(
        self, rank: int, size: int, meeting: Meeting, scheduler: Scheduler, logs: WorldLogs
    ) -> None:
        super().__init__(rank, size)
        self.logs = self._compared = logs
        self._member, self._members = rank, size
        self._meeting, self._scheduler = meeting, scheduler
        self._said: str | None = None
        self._in_graph = False
        self._calls = 0

    @contextmanager
    def annotated(self, more: str, *, in_graph: bool = False) -> Iterator[None]:
        """While entered, calls say in what else the members have to agree: see `CallNote`."""
        self._said, self._in_graph = more, in_graph
        try:
            yield
        finally:
            # Valid for one call of torch; reset also where that call raises.
            self._said, self._in_graph = None, False

    @property
    def group_name(self) -> str:
        """Name under which torch knows the group."""
        return self._meeting.name

    def getGroupName(self) -> str:
        """Return the same, for C++."""
        return self._meeting.name

    # --- Collectives, under the names that torch calls

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Reduce each of the tensors in place."""
        op = _name(opts)

        def _run(members: Sequence[list[Tensor]]) -> None:
            # Coalesced: the first tensors of all members are reduced, then the second, and so on.
            for same in zip(*members, strict=True):
                total = reference_semantics.reduced(same, op)
                for each in same:
                    each.copy_(total)

        tensors = _list(tensors)
        return self._arrive(f"all_reduce({op}) of {_shapes(tensors)}", tensors, tensors, _run)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Return the same: a list is what it takes."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> SimulatedWork:
        """Reduce to one member."""
        op, root, tensors = _name(opts), opts.rootRank, _list(tensors)

        def _run(members: Sequence[list[Tensor]]) -> None:
            members[root][0].copy_(reference_semantics.reduced([each[0] for each in members], op))

        call = f"reduce({op}, to={root}) of {_shapes(tensors)}"
        return self._arrive(call, tensors, tensors, _run)

    def broadcast(self, tensors: Any, opts: Any) -> SimulatedWork:
        """Copy one member's tensor to all."""
        root, tensors = opts.rootRank, _list(tensors)

        def _run(members: Sequence[list[Tensor]]) -> None:
            for each in members:
                if each is not members[root]:
                    each[0].copy_(members[root][0])

        call = f"broadcast(from={root}) of {_shapes(tensors)}"
        return self._arrive(call, tensors, tensors, _run)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Gather into a list of tensors."""

        def _run(members: Sequence[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for outs, _ in members:
                for out, (_, ins) in zip(outs[0], members, strict=True):
                    out.copy_(ins[0].view(out.shape))

        inputs = _list(inputs)
        # Flat: `result` and the future hold one list of tensors.
        results = [each for row in outputs for each in row]
        call = f"all_gather of {inputs[0].dtype} into {_shapes(outputs[0])}"
        return self._arrive(call, (outputs, inputs), results, _run)

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        """Gather several tensors, each into one."""

        def _run(members: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
            for index in range(len(outs)):
                reference_semantics.concatenate(
                    [m[1][index] for m in members], [m[0][index] for m in members]
                )

        # Copied: the caller may change its list before the last member comes.
        outs, ins = list(outs), list(ins)
        for out, x in zip(outs, ins, strict=True):
            if out.numel() != self._members * x.numel():
                raise CommError(f"all_gather of {_shapes([x])} into {_shapes([out])}: wrong size")
        return self._arrive(f"all_gather of {_numels(ins)}", (outs, ins), outs, _run)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> SimulatedWork:
        """Gather into one tensor."""
        return self.all_gather_single_coalesced([out], [x])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Gather into a list at one member."""
        root, inputs = opts.rootRank, _list(inputs)

        def _run(members: Sequence[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for out, (_, ins) in zip(members[root][0][0], members, strict=True):
                out.copy_(ins[0])

        results = [each for row in outputs for each in row]
        call = f"gather(to={root}) of {_shapes(inputs)}"
        return self._arrive(call, (outputs, inputs), results, _run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Give each member its tensor of one member's list."""
        root, outputs = opts.rootRank, _list(outputs)

        def _run(members: Sequence[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            for (outs, _), piece in zip(members, members[root][1][0], strict=True):
                outs[0].copy_(piece)

        call = f"scatter(from={root}) of {_shapes(outputs)}"
        return self._arrive(call, (outputs, inputs), outputs, _run)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Reduce a list, of which each member keeps its tensor."""
        op, outputs = _name(opts), _list(outputs)

        def _run(members: Sequence[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            for index, (outs, _) in enumerate(members):
                total = reference_semantics.reduced([ins[0][index] for _, ins in members], op)
                outs[0].copy_(total.view(outs[0].shape))

        call = f"reduce_scatter({op}) of {_shapes(inputs[0])}"
        return self._arrive(call, (outputs, inputs), outputs, _run)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> SimulatedWork:
        """Reduce one tensor, of which each member keeps its part."""
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Any, ins: Any, opts: Any = None
    ) -> SimulatedWork:
        """Return the same for several tensors."""
        op, outs, ins = _name(opts), list(outs), list(ins)
        for out, x in zip(outs, ins, strict=True):
            if x.numel() != self._members * out.numel():
                raise CommError(
                    f"reduce_scatter of {_shapes([x])} into {_shapes([out])}: wrong size"
                )

        def _run(members: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
            for index in range(len(outs)):
                total = reference_semantics.reduced([m[1][index].reshape(-1) for m in members], op)
                # chunk of an empty tensor gives one chunk, and every member needs one.
                pieces = total.chunk(self._members) if total.numel() else [total] * self._members
                for member, piece in zip(members, pieces, strict=True):
                    member[0][index].copy_(piece.view(member[0][index].shape))

        return self._arrive(f"reduce_scatter({op}) of {_numels(ins)}", (outs, ins), outs, _run)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, receive: Any, send: Any, opts: Any = None
    ) -> SimulatedWork:
        """Exchange parts of one tensor, in extents of its first dim."""
        even = [x.shape[0] // self._members] * self._members if x.ndim else []
        # torch passes empty lists for equal parts.
        send = list(send) or even
        receive = list(receive) or [out.shape[0] // self._members] * self._members

        def _run(members: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
            _agree([m[3] for m in members], [m[2] for m in members])
            reference_semantics.exchange([m[1] for m in members], [m[0] for m in members],
                            [m[3] for m in members])  # fmt: skip

        call = f"all_to_all of {x.dtype} {[*x.shape[1:]]}"
        return self._arrive(call, (out, x, receive, send), [out], _run)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Exchange lists of tensors."""
        outputs, inputs = list(outputs), list(inputs)

        def _run(members: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
            _agree(
                [[x.numel() for x in ins] for _, ins in members],
                [[out.numel() for out in outs] for outs, _ in members],
            )
            for index, (outs, _) in enumerate(members):
                for out, (_, ins) in zip(outs, members, strict=True):
                    out.copy_(ins[index].view(out.shape))

        call = f"all_to_all of lists of {inputs[0].dtype}"
        return self._arrive(call, (outputs, inputs), outputs, _run)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Complete when every member has called it."""
        return self._arrive("barrier", None, [], lambda members: None)

    # The names of torch before 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- Messages. A send is complete at once: it leaves a copy.

    def send(self, tensors: Any, target: int, tag: int = 0) -> SimulatedWork:
        """Leave a copy for a member; complete at once."""
        tensor = _list(tensors)[0]
        self._calls += 1
        # A copy, so that the sender may overwrite its tensor at once, as after a real send.
        self._meeting.put(self._member, target, tag, tensor)
        return SimulatedWork(self._scheduler, "send", lambda: True, lambda: None, [tensor])

    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> SimulatedWork:
        """Receive what a member left first."""
        meeting, me, out = self._meeting, self._member, _list(tensors)[0]
        self._calls += 1

        def _finish() -> None:
            sender = meeting.sender(source, me, tag)
            assert sender is not None
            tensor = meeting.take(sender, me, tag)
            if (tensor.numel(), tensor.dtype) != (out.numel(), out.dtype):
                raise CommMismatchError(
                    f"rank {meeting.ranks[me]} receives {_shapes([out])} at {site}, and rank "
                    f"{meeting.ranks[sender]} sent {_shapes([tensor])}"
                )
            # As many elements, in whatever shape: a backend sees memory only. Nor does it see who
            # wants gradients: torch 2.11's pipelining receives into leaves that do.
            with torch.no_grad():
                out.copy_(tensor.view(out.shape))
            work._sender = sender

        # Here and not in `_finish`, which runs at the wait: the line that called `recv` is wanted.
        site = call_site()
        what = f"recv(from {'anybody' if source is None else f'rank {meeting.ranks[source]}'})"
        work = SimulatedWork(
            self._scheduler,
            what,
            lambda: meeting.sender(source, me, tag) is not None,
            _finish,
            [out],
        )
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        """Receive what any member left."""
        return self.recv(tensors, None, tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members: here a missing member is always named."""
        self.barrier().wait()

    def _arrive(
        self, call: str, payload: Any, results: Sequence[Tensor], run: Run
    ) -> SimulatedWork:
        self._calls += 1
        note = CallNote(call, self._said, call_site(), self._in_graph)
        # All members pass an equal `run`; that of the last to come is used for all payloads.
        slot: Slot = self._meeting.arrive(self._member, note, payload, _quietly(run))
        self._compared.is_given_up |= slot.error is not None
        what = f"{call}, number {slot.number} of ranks {list(self._meeting.ranks)},"
        return SimulatedWork(
            self._scheduler,
            what,
            # An error is known before all have come, and members that wait must not wait for the
            # rest.
            lambda: slot.done or slot.error is not None,
            lambda: finish(slot),
            results,
        )

    def getBackendName(self) -> str:
        """Name of the backend, for C++."""
        return "simulated"

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls this member has made."""
        return self._calls

    def _get_backend(self, device: Any) -> "SimulatedGroup":
        """Return the group itself: it has no backends. Messages ask for one from torch 2.14 on."""
        return self


def _quietly(run: Run) -> Run:
    """Return the movements are not part of anybody's graph."""

    def _moved(members: Sequence[Any]) -> None:
        with torch.no_grad():
            run(members)

    return _moved


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors)


def _numels(tensors: Sequence[Tensor]) -> str:
    """For collectives that use memory as it is, whatever its shape."""
    return ", ".join(f"{x.numel()} {x.dtype}" for x in tensors)


def _name(opts: Any) -> str:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise CommError(f"a simulated group has no {op}: there are {', '.join(_REDUCTIONS)}")


def _agree(send: Sequence[Sequence[int]], receive: Sequence[Sequence[int]]) -> None:
    for i, row in enumerate(send):
        for j, size in enumerate(row):
            if receive[j][i] != size:
                raise ValueError(
                    f"member {i} sends {size} to member {j}, which expects {receive[j][i]}"
                )
