"""Reads what a launcher such as torchrun puts into the environment of its processes."""

import os


def keeps_its_store() -> bool:
    """Return whether a launcher serves the store of this process, to one start after the other."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in os.environ


def which_start() -> str:
    """Return which start of its processes a launcher counts; empty where they may not agree.

    Each node counts the failures of its own processes alone.
    """
    one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if keeps_its_store() and one_node else ""
    )
