"""Reuses the plan of the save before, where every rank's state has the layout that it had then.

One short message per rank tells whether all of them can, and the ranks copy their state while it is
on its way. What differs from save to save (values, and the copies that are compared) is exchanged
in the background.
"""

from typing import Any, NamedTuple

from vescale_ckpt._coordination.coordinator import Coordinator, all_or_none
from vescale_ckpt._save.commit import SaveLocation, open_location
from vescale_ckpt._save.plan import Offers, check_copies
from vescale_ckpt._save.save import (
    PreparedSave,
    SaveAgreement,
    SaveOptions,
    check_one_target,
    health_notes,
)
from vescale_ckpt._save.write import LocalTensors
from vescale_ckpt._state.flatten import flatten
from vescale_ckpt._state.merge import merge
from vescale_ckpt._state.values import Node
from vescale_ckpt._storage.base import Storage

# Fixed, so that all messages are equally long and go in one collective. A generation has 18.
_NAME_BYTES = 24


class KnownSave(NamedTuple):
    """What the ranks agreed on before, and what this one had then."""

    # The generation for which it was agreed on: equal names on two ranks mean the same plan.
    name: str
    offers: Offers
    agreed: SaveAgreement


class MatchingState(NamedTuple):
    """A state that this rank can save by what is known."""

    tree: Node
    local_tensors: LocalTensors
    digests: dict[str, list[int]]


def known_save_of(prepared: PreparedSave) -> KnownSave:
    """Keep what a save that was agreed on says about the next one."""
    return KnownSave(
        prepared.location.generation, prepared.local_tensors.offers(compare=False), prepared.agreed
    )


def match_known(
    storage: Storage,
    coordinator: Coordinator,
    location: SaveLocation,
    state: dict[Any, Any],
    options: SaveOptions,
    known: KnownSave | None,
) -> MatchingState | None:
    """Flatten `state`, if its layout is known; rank 0 also opens the location."""
    if known is None:
        return None
    try:
        flat = flatten(state, coordinator.rank)
        local_tensors = LocalTensors(flat)
        # Dtypes, shapes and boxes of all tensors: the plan was a function of these, and of no
        # values.
        if local_tensors.offers(compare=False) != known.offers:
            return None
        compared = options.check_replicas and coordinator.world_size > 1
        matching = MatchingState(
            flat.tree, local_tensors, local_tensors.digests() if compared else {}
        )
        if coordinator.rank == 0:
            open_location(storage, location)
    except Exception:
        # Not told to the others here. Without a plan all ranks begin anew, where it is raised
        # again, and on all of them.
        return None
    return matching


def encode_proposal(
    known: KnownSave | None, matching: MatchingState | None, location: SaveLocation
) -> bytes:
    """Encode the plan that this rank can go by, and where it would write, for the others."""
    name = known.name if known is not None and matching is not None else ""
    return f"{name:{_NAME_BYTES}}{location.generation:{_NAME_BYTES}}".encode()


def common_generation(words: list[bytes]) -> str | None:
    """Return rank 0's generation, where all ranks can go by one plan; else None."""
    names = {word[:_NAME_BYTES].strip() for word in words}
    # One rank without a plan, or with another one, and all begin anew.
    if len(names) > 1 or b"" in names:
        return None
    return words[0][_NAME_BYTES:].strip().decode()


def exchange_values(
    coordinator: Coordinator,
    prepared: PreparedSave,
    digests: dict[str, list[int]],
    *,
    healthy: bool,
) -> PreparedSave:
    """Exchange what differs from save to save; returns `prepared` with the tree of all ranks."""
    mine = {
        "target": prepared.location.target,
        "tree": prepared.tree,
        "digests": digests,
        "healthy": healthy,
    }
    # In the background group: the values of all ranks, which the manifest holds, are compared only
    # now.
    answers = all_or_none(coordinator, lambda: mine)
    check_one_target(answers)
    for name in dict.fromkeys(name for answer in answers for name in answer["digests"]):
        told = [answer["digests"].get(name) for answer in answers]
        # A plain tensor is one box, so it has one digest, or none if it has no elements.
        check_copies(name, {rank: one[0] for rank, one in enumerate(told) if one})
    notes = prepared.notes | health_notes(answer["healthy"] for answer in answers)
    return prepared._replace(tree=merge([answer["tree"] for answer in answers]), notes=notes)
