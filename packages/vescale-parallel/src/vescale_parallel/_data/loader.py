"""`loader`: torch's `DataLoader`, of which each rank reads its rows, and which resumes anywhere."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from vescale_comm.agreement import Facts, require_same
from vescale_comm.generators import States, generators_of, mixed

from vescale_parallel._common.mesh import everyone, mesh_sizes
from vescale_parallel._common.rows import shard_of, sharing_axes
from vescale_parallel._data.draws import CollateRead, SeededSamples
from vescale_parallel._data.rows import (
    CollateRows,
    RowsOfBatches,
    Share,
    SkippingSampler,
    without_rows,
)
from vescale_parallel._data.samplers import SamplerGenerators
from vescale_parallel._errors import DisagreementError, PlanError
from vescale_parallel._notation.layout import parse_layout
from vescale_parallel._plan.plan import Plan

_HEAD = "ranks read their data in different orders:"
_ADVICE = (
    "Pass the same dataset, sampler and options on every rank, and generators in the same state: "
    "call torch.manual_seed with one seed before."
)


def loader(
    dataset: Any,
    mesh: DeviceMesh,
    plan: Plan,
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[list[Any]] | None = None,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_type: Callable[..., Any] = DataLoader,
    **options: Any,
) -> Loader:
    """Return a loader of which each rank reads its rows of the batches of one device.

    Batches, their order and where generators end are those of
    `DataLoader(dataset, batch_size, ...)` on one device; random numbers that a sample draws belong
    to its number in the epoch, on any number of ranks and with any number of workers. A rank gets
    the rows that the plan's `batch` layout gives it, the last and uneven batch included; where a
    batch has fewer rows than ranks, some get tensors of no rows. Ranks that differ along other axes
    (tp) get the same rows. The plan has to say `batch_is="local"`.

    Args:
        dataset: with `__getitem__`, which is called for the rows of this rank only; or an
            `IterableDataset`, which every rank iterates, as nobody can skip in a stream, and of
            which it collates its rows.
        mesh: as for `parallelize`.
        plan: as for `parallelize`.
        batch_size: samples of the global batch.
        shuffle: as for `DataLoader`.
        sampler: as for `DataLoader`; the order of one device, not a `DistributedSampler`.
        batch_sampler: as for `DataLoader`; batches of one device, in place of `batch_size`.
        drop_last: as for `DataLoader`: a last batch that is not whole is left out.
        generator: as for `DataLoader`; by default that of torch, in the same state on all ranks.
        collate_fn: as for `DataLoader`; rows are dim 0 of the tensors that it returns.
        loader_type: `DataLoader`, or what takes its arguments: `torchdata`'s `StatefulDataLoader`
            resumes a stream without reading what came before.
        **options: of `loader_type`: `num_workers`, `pin_memory`, `prefetch_factor` and so on.

    Raises:
        PlanError: the plan says that every rank passes the whole batch, or the arguments exclude
            each other.
    """
    _require_meaning(dataset, plan, batch_size, shuffle, sampler, batch_sampler)
    if not options.get("in_order", True):
        raise PlanError(
            "loader: in_order=False passes on what is ready first, and ranks would put together "
            "rows of different batches. Leave it out."
        )
    if batch_sampler is not None and drop_last:
        raise PlanError("loader: drop_last is for batch_size; a batch_sampler drops by itself.")
    share, collate = _share(mesh, plan), collate_fn or default_collate
    rows, start = None, None
    if isinstance(dataset, IterableDataset):
        batches: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
        batches["collate_fn"] = CollateRows(collate, share)
    else:
        if batch_sampler is None:
            random = RandomSampler(dataset, generator=generator) if shuffle else None
            start = SkippingSampler(_first(sampler, random, SequentialSampler(dataset)))
            batch_sampler = BatchSampler(start, batch_size, drop_last)
        rows = RowsOfBatches(batch_sampler, share)
        batches = {"batch_sampler": rows, "collate_fn": CollateRead(collate)}
    read = dataset if rows is None else SeededSamples(dataset)
    inner = loader_type(read, generator=generator, **batches, **options)
    return Loader(inner, dataset, mesh, plan, collate, generator, rows, start)


def _require_meaning(
    dataset: Any, plan: Plan, batch_size: Any, shuffle: bool, sampler: Any, batch_sampler: Any
) -> None:
    if plan.batch_is != "local":
        raise PlanError(
            "loader: every rank reads its own rows, and the plan says that it passes the whole "
            "batch. Use plan.with_(batch_is='local'), for parallelize as well."
        )
    whole = batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None)
    if batch_size is None or whole:
        raise PlanError("loader: say batch_size or batch_sampler, and a sampler with the first.")
    samplers = shuffle or sampler is not None or batch_sampler is not None
    if isinstance(dataset, IterableDataset) and samplers:
        raise PlanError("loader: a stream has its own order: no shuffle and no samplers with it.")
    if sampler is not None and shuffle:
        raise PlanError("loader: sampler and shuffle exclude each other.")


def _first(*found: Any) -> Any:
    # Not by truth: a sampler of no samples has a length of 0.
    return next(one for one in found if one is not None)


def _share(mesh: DeviceMesh, plan: Plan) -> Share:
    sizes = mesh_sizes(mesh)
    axes = sharing_axes(mesh, parse_layout(plan.batch).axes if plan.batch else ())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    here = dict(zip(sizes, coordinate, strict=True))
    extents = tuple(sizes[axis] for axis in axes)
    return Share(extents, shard_of([here[axis] for axis in axes], extents))


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.sha256(state.numpy().tobytes()).digest()


_Passed = tuple[int, Any, int]
"""Samples of a global batch, this rank's rows of it, and a digest of which samples they are."""


class Loader:
    """What `loader` returns: iterate it once an epoch.

    Attributes:
        inner: the loader of torch that reads this rank's rows.
        epoch: what `set_epoch` was told last.
    """

    def __init__(
        self,
        inner: Any,
        dataset: Any,
        mesh: DeviceMesh,
        plan: Plan,
        collate: Callable[[list[Any]], Any],
        generator: torch.Generator | None,
        rows: RowsOfBatches | None,
        start: SkippingSampler | None,
    ) -> None:
        self.inner, self.epoch = inner, 0
        self._dataset, self._mesh, self._plan, self._collate = dataset, mesh, plan, collate
        self._generator, self._rows, self._start = generator, rows, start
        sampler = getattr(rows, "batches", None) if start is None else start.sampler
        self._drawn_by = SamplerGenerators(sampler, generator)
        self._drawn_from: dict[str, torch.Tensor] = {}
        # Global samples that were passed on in this epoch, and generators at its beginning: above
        # those of samplers, here the one by which torch shuffles.
        self._samples = 0
        self._began: torch.Tensor | None = None
        self._seed = 0
        self._resumes: dict[str, Any] | None = None
        self._form: Any = None

    def __len__(self) -> int:
        """Batches of an epoch, the same on all ranks."""
        return len(self.inner) if self._rows is None else len(self._rows.batches)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, the batch sampler and the dataset, as far as they want to know."""
        self.epoch = epoch
        told = [self._dataset]
        if self._start is not None:
            told.append(self._start.sampler)
        elif self._rows is not None:
            told += [self._rows.batches, getattr(self._rows.batches, "sampler", None)]
        for one in told:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader is: alike on all ranks, and for any mesh.

        `samples` of the global order were passed on in this epoch, which began with `generator` in
        that state (None between epochs where it is torch's own, which is not the loader's), and
        with generators of the sampler in the states `samplers`.

        Raises:
            PlanError: the sampler draws by a generator of its own that is not torch's.
        """
        if self._resumes is not None:  # loaded, and not gone on with yet
            return {**self._resumes, "epoch": self.epoch}
        self._drawn_by.require_kept()
        own = None if self._generator is None else self._generator.get_state()
        state: dict[str, Any] = {
            "samples": self._samples,
            "epoch": self.epoch,
            "generator": self._began if self._began is not None else own,
        }
        samplers = self._drawn_by.states() if self._began is None else self._drawn_from
        if samplers:
            state["samplers"] = samplers
        if self._rows is None and hasattr(self.inner, "state_dict"):
            state["stream"] = self.inner.state_dict()
        elif self._rows is None:
            state["workers"] = self._workers()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next iteration: also on another mesh, or with another size.

        A stream of a plain `DataLoader` goes on at the beginning of a batch only, and with as many
        workers where there are several.
        """
        self.set_epoch(state["epoch"])
        self._samples, self._began = state["samples"], None
        self._resumes = dict(state)
        if state["generator"] is not None and state["samples"] == 0 and self._generator is not None:
            self._generator.set_state(state["generator"])

    def __iter__(self) -> Iterator[Any]:
        """Pass on the batches of an epoch, or what is left of one that is resumed. Collective.

        Raises:
            PlanError: on every rank: it is resumed with other options, or another sampler, than it
                was saved with.
            DisagreementError: on every rank: ranks are at other places, or their generators are in
                other states; at the end of the epoch: their samplers gave other samples.
        """
        resumed = self._resumes
        own = self._generator if self._generator is not None else torch.default_generator
        now = own.get_state()
        try:
            found = self._begun(resumed, own)
        finally:
            if resumed is not None and resumed["samples"] and self._generator is None:
                # torch's own generator is where the caller has put it; the order was drawn again.
                torch.set_rng_state(now)
        # Only now: where nothing could be read, the next iteration begins there again.
        self._resumes = None
        return self._passed_on(*found)

    def _begun(
        self, resumed: dict[str, Any] | None, own: torch.Generator
    ) -> tuple[_Passed | None, Iterator[_Passed]]:
        """Read the first batch; returns it, and those behind it."""
        samples = 0 if resumed is None else resumed["samples"]
        # At the beginning of an epoch an own generator stands there already, unless the first read
        # has failed before.
        is_here = samples or self._generator is not None
        if is_here and resumed is not None and resumed["generator"] is not None:
            own.set_state(resumed["generator"])
        if resumed is not None:
            self._drawn_by.put(resumed.get("samplers", {}))
        # Before the order is drawn: from here a resumed epoch draws the same order again, and skips
        # what was passed on.
        self._samples, self._began = samples, own.get_state()
        self._drawn_from = self._drawn_by.states()
        # By the state and not drawn: more must not be drawn than on one device.
        self._seed = int.from_bytes(_digest(self._began)[:8], "little")
        # Before the first sample is read: ranks that would read other batches raise here, on all of
        # them.
        self._agree({"begins": self._begins()})
        if resumed is not None and "stream" in resumed and hasattr(self.inner, "load_state_dict"):
            self.inner.load_state_dict(resumed["stream"])
            samples = 0
        elif samples and resumed is not None and self._rows is None:
            self._require_workers(resumed)
        batches = self._batches(samples, self._samples - samples)
        # At once, and not when the caller asks: a sampler draws when it is first asked, and must do
        # so while the generator stands where the epoch began.
        return next(batches, None), batches

    def _passed_on(self, first: _Passed | None, rest: Iterator[_Passed]) -> Iterator[Any]:
        digest = 0
        one = first
        while one is not None:
            self._samples += one[0]
            # One number for the whole epoch: what samplers gave is compared at its end, and no step
            # waits for it.
            digest = zlib.crc32(repr(one[2]).encode(), digest)
            yield one[1]
            one = next(rest, None)
        self._agree({"ends": f"after {self._samples} samples, digest {digest:08x}"})
        self._samples, self._began = 0, None

    def _batches(self, skip: int, number: int) -> Iterator[_Passed]:
        """Sizes of the global batches, this rank's rows of each, and digests.

        Args:
            skip: samples that come, and were passed on.
            number: of the first that comes.
        """
        if self._rows is None:
            for size, batch in self._stream(number):
                if skip and skip >= size:
                    skip -= size
                elif skip:
                    raise PlanError(
                        f"loader: the stream was left {skip} samples into what is now a batch of "
                        f"{size}, and ranks read parts of whole batches only. Resume it with the "
                        "batch size with which the state was saved."
                    )
                else:
                    yield size, batch, size
            return
        self._rows.seed = self._seed
        if self._start is not None:
            self._start.skip = self._rows.number = skip
        else:
            self._rows.skip = skip
        iterator = iter(self.inner)
        noted = self._rows.noted
        while True:
            batch = next(iterator, None)
            # Batches without rows here, which torch's loader never saw, up to this one.
            # The sampler runs ahead of the loader, by what workers prefetch: notes come in the
            # order of the batches, and those without rows stand before the next that was read.
            while noted and (batch is None or not noted[0].read):
                empty = noted.popleft()
                yield empty.samples, self._empty(batch, empty.first), empty.digest
            if batch is None:
                return
            # Once it is known, a batch without rows need not read a sample for its form.
            self._form = without_rows(batch) if self._form is None else self._form
            whole = noted.popleft()
            yield whole.samples, batch, whole.digest

    def _stream(self, number: int) -> Iterator[tuple[int, Any]]:
        """Batches of a stream, with how many samples each has of all ranks."""
        # Workers have seeds of torch's, alike on all ranks. Here each batch has its own: other
        # draws, of the model, come in between, and not again where the stream is resumed.
        is_here = getattr(self.inner, "num_workers", 0) == 0
        states = States()
        states.seed(self._seed)
        try:
            iterator = iter(self.inner)
        finally:
            states.restore()
        while True:
            states = States(default=True)
            if is_here:
                states.seed(mixed(self._seed, number))
            try:
                found = next(iterator, None)
            finally:
                states.restore()
            if found is None:
                return
            number += found[0]
            yield found

    def _empty(self, near: Any, first: Any) -> Any:
        """A batch of no rows."""
        if self._form is None:
            seen = near if near is not None else self._sample(first)
            self._form = without_rows(seen)
        return without_rows(self._form)

    def _sample(self, first: Any) -> Any:
        """A batch of one sample, of which the form is looked at."""
        states = States(generators_of(self._dataset), default=True)
        try:
            return self._collate([self._dataset[first]])
        finally:
            states.restore()

    def _workers(self) -> list[int]:
        """Workers and batch size, where the order of a stream depends on them."""
        workers = getattr(self.inner, "num_workers", 0)
        return [workers, self.inner.batch_size] if workers > 1 else []

    def _require_workers(self, resumed: dict[str, Any]) -> None:
        before, now = resumed.get("workers", self._workers()), self._workers()
        if before != now:
            raise PlanError(
                "loader: several workers take turns with the batches of a stream, and this one was "
                f"left with [workers, batch_size] {before or 'of one worker'}, now "
                f"{now or 'of one worker'}: other samples would follow. Resume it as it was saved."
            )

    def _begins(self) -> str:
        where = self._began
        assert where is not None
        states = [_digest(one) for one in (where, *self._drawn_from.values())]
        digest = hashlib.sha256(b"".join(states)).hexdigest()[:16]
        size = len(self._dataset) if hasattr(self._dataset, "__len__") else "any"
        return (
            f"{type(self._dataset).__name__} of {size} samples, epoch {self.epoch}, after "
            f"{self._samples} samples, generator {digest}"
        )

    def _agree(self, facts: dict[str, str]) -> None:
        held = {"loader": facts}
        require_same(Facts(held, _HEAD, _ADVICE, DisagreementError), everyone(self._mesh))
