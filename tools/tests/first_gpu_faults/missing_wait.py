"""Nobody waits for a sum of values: it is read before the others have come."""

from vescale_comm._simulation.group import SimulatedWork

right = SimulatedWork.wait


def wrong(self, timeout=None):
    values = "all_reduce(SUM) of torch.float32" in self._what
    return True if values else right(self, timeout)


SimulatedWork.wait = wrong
