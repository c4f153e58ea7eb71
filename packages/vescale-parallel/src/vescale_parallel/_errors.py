"""Every error that this package raises on purpose."""


class ParallelError(Exception):
    """Base of every error that vescale-parallel raises on purpose.

    All of them are found from data that every rank holds (a plan, a mesh, the command line), or are
    exchanged before they are raised, so every rank raises or none does.
    """


class MeshError(ParallelError, ValueError):
    """The sizes of a mesh do not fit each other or the number of processes."""


class PlanError(ParallelError, ValueError):
    """A plan that cannot be read, or that does not fit the model or the mesh."""


class DisagreementError(ParallelError, RuntimeError):
    """Ranks hold different values where the same were expected."""


class DeferredError(ParallelError, RuntimeError):
    """A tensor without storage cannot be made, or is asked for what only storage has."""


class PretrainedError(ParallelError, ValueError):
    """Weights in a folder that cannot be read or written, or are not those of the model."""


class StaleParameterError(ParallelError, RuntimeError):
    """A parameter object from before `parallelize` was used; the model has another one since."""


class TrainError(ParallelError):
    """The trainer cannot do what its command line asks: options, data or checkpoint."""


class GraphError(ParallelError, ValueError):
    """A graph of a step whose communication cannot be scheduled as it was asked for."""


class MemoryPlanError(ParallelError, ValueError):
    """A graph whose memory cannot be planned, or a run that a memory plan does not fit."""


class PipelineError(ParallelError, RuntimeError):
    """A model that cannot run in stages, a batch that cannot be divided, or a stage that failed."""
