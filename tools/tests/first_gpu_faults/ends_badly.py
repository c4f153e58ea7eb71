"""Cases that hang, die and end, each in the middle of others that go on."""

import os
import signal
import time

from tools.first_gpu.cases import Case, holds
from tools.first_gpu.sections import machine


def hangs(device):
    time.sleep(600)


def dies(device):
    os.kill(os.getpid(), signal.SIGSEGV)


def ends(device):
    os._exit(3)


def raises(device):
    raise ValueError("not today")


def goes_on(device):
    return holds("that it goes on", True)


def cases(device):
    bad = [Case(one.__name__, one) for one in (hangs, dies, raises, ends)]
    return [Case("first", goes_on), *bad, Case("last", goes_on)]


machine.cases = cases
