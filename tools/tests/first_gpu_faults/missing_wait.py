"""Nobody waits for a gather: its result is read before the others have come."""

from vescale_comm._simulation.group import SimulatedWork

right = SimulatedWork.wait


def wrong(self, timeout=None):
    return True if "gather" in self._what else right(self, timeout)


SimulatedWork.wait = wrong
