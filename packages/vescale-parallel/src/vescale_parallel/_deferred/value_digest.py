"""Digests what makes a value, so that ranks can compare the models that they build."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vescale_parallel._common.agreement import checksum
from vescale_parallel._deferred.tape import Constant, Fill, Value, making_of


def digest_of(value: Value) -> str:
    """A digest of the steps that make a value: ops, arguments, places in the random stream."""
    making = making_of(value)
    known: dict[Value, int] = {}

    def said(one: Any) -> Any:
        if isinstance(one, Value):
            # By the order of their use, as objects have no name that two processes share.
            return f"value {known.setdefault(one, len(known))}"
        if isinstance(one, torch.Generator):
            # Where it stood is told besides; what it is printed as differs between processes.
            return f"a generator of {one.device}"
        return f"{checksum(one.tensor):08x}" if isinstance(one, Constant) else one

    found = hashlib.blake2b(digest_size=8)
    for step in making.steps:
        # Of what is only memory the arguments do not matter: all of it is overwritten.
        arguments = "" if step in making.hollow else tree_map(said, (step.args, step.kwargs))
        told = step.func.summary if isinstance(step.func, Fill) else step.func
        place = step.draw.place if step.draw else None
        made = [said(one) for one in step.made]
        found.update(f"{told} {arguments} {place} {step.default_dtype} {made}\n".encode())
    return found.hexdigest()
