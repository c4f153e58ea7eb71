"""The exceptions of this package: one base, a class for each way a collective can go wrong."""


class CommError(Exception):
    """Base of every exception that vescale-comm raises."""


class CommArgumentError(CommError, ValueError):
    """An argument does not fit; found on this rank, before anything was sent."""


class CollectiveError(CommError, RuntimeError):
    """torch.distributed failed while a collective was under way."""


class CommTimeoutError(CollectiveError):
    """A collective did not complete within its process group's timeout."""


class RankFailedError(CollectiveError):
    """Another rank raised, or its process ended, while this one communicated with it."""


class CommMismatchError(CollectiveError):
    """The members of a group do not call the same thing."""


class DeadlockError(CollectiveError):
    """Every rank of a simulation waits for another."""
