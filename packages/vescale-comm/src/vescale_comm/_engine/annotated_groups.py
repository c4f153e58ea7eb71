"""Defines a base of process groups that learn more about a call than torch passes to them."""

from contextlib import AbstractContextManager

BACKWARD_DIFFERS = (
    "so only their backward would be a collective: call requires_grad_() or detach() on the inputs "
    "of all members alike"
)


class AnnotatedGroup:
    """Base of process groups that compare their members' calls, as that of a simulation does.

    torch hands a process group tensors and options. In what else the members have to agree, such as
    the order of a fold, only this package knows.
    """

    # Not an ABC: a process group has the metaclass of pybind11, and a class has one metaclass.
    __slots__ = ()

    def annotated(self, more: str, *, in_graph: bool = False) -> AbstractContextManager[None]:
        """Describe the calls inside by `more` as well.

        Args:
            more: in what else the members have to agree, in words.
            in_graph: whether the backward of the calling member is a collective as well.
        """
        raise NotImplementedError
