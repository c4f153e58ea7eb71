"""What planning asks torch by tensors without data, and torch refuses, is no error of a program."""

import logging
import threading

import pytest
import torch
from vescale_dtensor._torch.compat import asking_fake_tensors

LOG = logging.getLogger("torch._subclasses.fake_tensor")


@torch.library.custom_op("vescale_tests::without_data", mutates_args=())
def without_data(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@without_data.register_fake
def _(x):
    raise RuntimeError("not without data")


def test_an_operator_that_refuses_them_raises_and_nothing_is_logged(caplog):
    caplog.set_level(logging.DEBUG, LOG.name)
    with pytest.raises(RuntimeError, match="not without data"), asking_fake_tensors():
        without_data(torch.empty(2))
    assert not caplog.records
    assert not LOG.filters


def test_other_threads_and_later_errors_are_logged(caplog):
    with asking_fake_tensors():
        thread = threading.Thread(target=LOG.error, args=("of another thread",))
        thread.start()
        thread.join(30)
    LOG.error("later")
    assert [record.message for record in caplog.records] == ["of another thread", "later"]
