"""An object store as they are: names and contents, no directories, no renames, no locks."""

from contextlib import nullcontext

from vescale_ckpt import CorruptError, StorageError


class ObjectStore:
    """Objects by name. One that is being written is not there before it is complete."""

    renames = False

    def __init__(self):
        self.objects = {}

    def make_directory(self, path):
        pass

    def create(self, path):
        assert path not in self.objects
        return _Upload(self, path)

    def put(self, path, content):
        self.objects[path] = bytes(content)

    def open(self, path):
        return _Download(path, self._content(path))

    def rename(self, source, target):
        raise StorageError("an object store has no renames")

    def sync_directory(self, path):
        pass

    def locked(self, path):
        return nullcontext()

    def remove_file(self, path):
        self._content(path)
        del self.objects[path]

    def remove_directory(self, path):
        pass

    def is_directory(self, path):
        return any(name.startswith(f"{path}/") for name in list(self.objects))

    def exists(self, path):
        return path in self.objects or self.is_directory(path)

    def size(self, path):
        return len(self._content(path))

    def names_in(self, path):
        inside = [n[len(path) + 1 :] for n in list(self.objects) if n.startswith(f"{path}/")]
        return sorted({name.partition("/")[0] for name in inside})

    def _content(self, path):
        if path not in self.objects:
            raise StorageError(f"there is no {path}")
        return self.objects[path]


class _Upload:
    def __init__(self, store, path):
        self.store, self.path, self.parts = store, path, []

    def write(self, data):
        self.parts.append(bytes(data))

    def finish(self):
        self.store.put(self.path, b"".join(self.parts))

    def abandon(self):
        self.parts = []


class _Download:
    def __init__(self, path, content):
        self.path, self.content = path, content

    def read_into(self, offset, buffer):
        part = self.content[offset : offset + buffer.nbytes]
        if len(part) < buffer.nbytes:
            raise CorruptError(f"{self.path} was truncated")
        buffer[:] = part

    def close(self):
        pass
