"""A disk that fails, or a process that dies, at the n-th storage operation.

`FaultyStorage` is the local disk, and counts what changes it. `AtCall` goes around any storage, and
counts every call.
"""

import errno
import os
import signal
from contextlib import AbstractContextManager

from vescale_ckpt._storage.local import LocalStorage


class Killed(BaseException):
    """The process is gone. Not an Exception: nothing may handle it and tidy up."""


class FaultyStorage(LocalStorage):
    """Counts every operation that changes the disk; `fail(description)` is called at number `at`.

    Writing is two operations, so that a file can be left half-written.
    """

    def __init__(self, at=None, fail=None):
        self.at, self.fail = at, fail
        self.log = []

    def operation(self, name, path):
        self.log.append(f"{name} {os.path.basename(path)}")
        if self.at is not None and len(self.log) >= self.at:
            self.fail(self)

    def make_directory(self, path):
        self.operation("make_directory", path)
        super().make_directory(path)

    def create(self, path):
        self.operation("create", path)
        return FaultyWriter(self, path, super().create(path))

    def rename(self, source, target):
        self.operation("rename", target)
        super().rename(source, target)
        self.operation("renamed", target)

    def sync_directory(self, path):
        self.operation("sync_directory", path)
        super().sync_directory(path)

    def remove_file(self, path):
        self.operation("remove_file", path)
        super().remove_file(path)

    def remove_directory(self, path):
        self.operation("remove_directory", path)
        super().remove_directory(path)


class FaultyWriter:
    def __init__(self, storage, path, inner):
        self.storage, self.path, self.inner = storage, path, inner

    def write(self, data):
        self.storage.operation("write", self.path)
        half = data.nbytes // 2
        self.inner.write(data[:half])
        self.storage.operation("write rest", self.path)
        self.inner.write(data[half:])

    def finish(self):
        self.storage.operation("finish", self.path)
        self.inner.finish()

    def abandon(self):
        self.inner.abandon()


def die(storage):
    """From this operation on nothing reaches the disk."""
    raise Killed(storage.log[-1])


def die_for_real(storage):
    """kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full_once(storage):
    """This one operation fails; what tidies up afterwards succeeds."""
    if len(storage.log) == storage.at:
        raise OSError(errno.ENOSPC, "No space left on device", storage.log[-1])


def broken_disk(storage):
    """This operation fails, and so does every later one."""
    raise OSError(errno.EIO, "Input/output error", storage.log[-1])


class Failed(Exception):
    """What a client raises; not an error of this package."""


class AtCall:
    """Counts the calls of a storage and of its writers, and acts from number `at` on."""

    def __init__(self, inner, at, action, log=None):
        self.inner, self.at, self.action = inner, at, action
        self.log = [] if log is None else log

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        # Closing a file reaches no storage.
        if not callable(found) or name in ("abandon", "close"):
            return found

        def call(*arguments):
            path = arguments[0] if arguments and isinstance(arguments[0], str) else ""
            self.log.append(f"{name} {path.rpartition('/')[2]}")
            if len(self.log) < self.at:
                answer = found(*arguments)
            else:
                answer = self.action(self, lambda: found(*arguments))
            is_writer = hasattr(answer, "finish")
            return AtCall(answer, self.at, self.action, self.log) if is_writer else answer

        return call


def is_first(storage):
    """Whether this is the call at which the fault begins."""
    return len(storage.log) == storage.at


def fails_once(storage, call):
    """The call is refused; those after it are not."""
    if is_first(storage):
        raise Failed(storage.log[-1])
    return call()


def fails_from_then_on(storage, call):
    raise Failed(storage.log[-1])


def answer_is_lost(storage, call):
    """It is done, and the client hears of nothing but a timeout."""
    found = call()
    if not is_first(storage) or isinstance(found, AbstractContextManager):
        return found
    close(found)
    raise Failed(storage.log[-1])


def dies_before(storage, call):
    raise Killed(storage.log[-1])


def dies_after(storage, call):
    if is_first(storage):
        close(call())
    raise Killed(storage.log[-1])


def close(found):
    """Close a file that nobody gets to see; the tests count open ones as errors."""
    for name in {"abandon", "close"} & set(dir(found)):
        getattr(found, name)()
