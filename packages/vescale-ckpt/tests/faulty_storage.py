"""A disk that fails, or a process that dies, at the n-th storage operation."""

import errno
import os
import signal

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
