"""The errors of this package: one base, so that `except RngError` catches every refusal."""


class RngError(Exception):
    """Base of every error that this package raises on purpose."""


class LayoutError(RngError, ValueError):
    """The layout contradicts itself, the global shape, or the local tensor."""


class DistributionError(RngError, ValueError):
    """torch refuses these parameters or this dtype for this distribution."""


class DeviceError(RngError, RuntimeError):
    """The tensor or the generator lives on a device that this version cannot serve."""


class PolicyError(RngError, NotImplementedError):
    """There is no such policy, or the one in force does not draw what was asked."""


class StateError(RngError, ValueError):
    """A saved state, or torch's own generator state, is not of the form that is understood."""
