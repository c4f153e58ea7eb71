"""Shortens what one rank has gathered of a world to a message, however many they are."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from vescale_comm._torch.ranks import ranks_of_runs, runs
from vescale_comm._watchdog.channel import Answer, Ending, answer_of, ending_of, fields
from vescale_comm._watchdog.report import WorldState
from vescale_comm._watchdog.store_reads import parsed_json, ranks_of, text_of

# Different things that ranks do, of which a state tells.
_MOST_GROUPS = 64
_OTHERS = Answer("does something else, as do too many others to tell of each")
_OTHERS_WAIT = Answer("does something else or waits, as do too many others to tell of each", "any")


def state_text(state: WorldState) -> str:
    """Write a state, with ranks that do the same together."""
    kinds: list[tuple[str, Mapping[int, Any]]] = [
        ("answers", state.answers),
        ("endings", state.endings),
        ("gone", state.gone),
    ]
    groups: dict[tuple[str, Any], list[int]] = {}
    for kind, found in kinds:
        # Many ranks share one object, which is compared with others once.
        alike: dict[int, list[int]] = {}
        for rank in sorted(found):
            alike.setdefault(id(found[rank]), []).append(rank)
        for ranks in alike.values():
            groups.setdefault((kind, found[ranks[0]]), []).extend(ranks)
    # The causes first: who failed by himself, and whose process is gone.
    ordered = sorted(groups.items(), key=lambda item: _order(*item[0]))
    told = [
        [kind, _written(what), runs(sorted(ranks))]
        for (kind, what), ranks in ordered[:_MOST_GROUPS]
    ]
    others = [rank for _, ranks in ordered[_MOST_GROUPS:] for rank in ranks]
    if others:
        # That somebody waits is not lost with the words: else nobody would report it.
        wait = any(kind == "answers" and what.waits for (kind, what), _ in ordered[_MOST_GROUPS:])
        words = _written(_OTHERS_WAIT if wait else _OTHERS)
        told.append(["answers", words, runs(sorted(others))])
    return json.dumps({"size": state.size, "answered": state.answered, "told": told})


def shortened(state: WorldState) -> WorldState:
    """Return a state as it is reported to the others."""
    return _state(json.loads(state_text(state)))


def parsed_state(told: bytes | None) -> WorldState | None:
    """Return what `state_message` has written; None for anything else."""
    return parsed_json(told, _state)


def _state(found: Any) -> WorldState:
    parts: dict[str, dict[int, Any]] = {"answers": {}, "endings": {}, "gone": {}}
    makes: dict[str, Callable[[Any], Any]]
    makes = {"answers": answer_of, "endings": ending_of, "gone": text_of}
    for kind, written, ranks in found["told"]:
        parts[kind] |= dict.fromkeys(ranks_of_runs(ranks), makes[kind](written))
    (size,) = ranks_of([found["size"]])
    return WorldState(size, answered=bool(found["answered"]), **parts)


def _written(what: Answer | Ending | str) -> Any:
    return what if isinstance(what, str) else fields(what)


def _order(kind: str, what: Any) -> tuple[int, str]:
    if kind == "endings":
        return (5 if what.consequence else 0 if what.raised else 2), what.text
    return (1, what) if kind == "gone" else (4 if what.waits else 3, what.text)
