"""Reads a checkpoint by FORMAT.md alone: numpy and the standard library, none of our code."""

import hashlib
import importlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np

DTYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "int64": "<i8", "int32": "<i4",
          "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "?", "complex64": "<c8"}  # fmt: skip


def read_checkpoint(path):
    commit = json.loads((Path(path) / "COMMIT").read_bytes())
    assert commit["format"] == "vescale-ckpt"
    assert commit["version"] in (1, 2)
    directory = Path(path) / commit["generation"]
    content = (directory / "manifest.json").read_bytes()
    assert len(content) == commit["manifest_bytes"]
    assert hashlib.sha256(content).hexdigest() == commit["manifest_sha256"]
    manifest = json.loads(content)
    checksum = {"crc32": crc32, "xxh3_64": xxh3}[manifest.get("checksum", "crc32")]
    tensors = {
        name: read_tensor(directory, tensor, manifest["block_bytes"], checksum)
        for name, tensor in manifest["tensors"].items()
    }
    return rebuild(manifest["state"], tensors)


def crc32(data):
    return f"{zlib.crc32(data):08x}"


def xxh3(data):
    return importlib.import_module("xxhash").xxh3_64_hexdigest(data)


def read_tensor(directory, tensor, block, checksum):
    whole = np.empty(tensor["shape"], DTYPES[tensor["dtype"]])
    for chunk in tensor["chunks"]:
        with open(directory / chunk["file"], "rb") as file:
            file.seek(chunk["start"])
            data = file.read(chunk["bytes"])
        blocks = [data[i : i + block] for i in range(0, len(data), block)]
        # Version 1 had CRC-32 only, and named it.
        assert "".join(map(checksum, blocks)) == chunk.get("checksums", chunk.get("crc32"))
        spans = zip(chunk["offset"], chunk["shape"], strict=True)
        box = tuple(slice(o, o + n) for o, n in spans)
        whole[box] = np.frombuffer(data, whole.dtype).reshape(chunk["shape"])
    return whole


def rebuild(node, tensors):
    if isinstance(node, list):
        return [rebuild(entry, tensors) for entry in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    return {
        "dict": lambda: {key: rebuild(entry, tensors) for key, entry in content},
        "tuple": lambda: tuple(rebuild(content, tensors)),
        "rank_local": lambda: rebuild(content, tensors),
        "tensor": lambda: tensors[content],
        "int": lambda: int(content, 16),
        "float": lambda: struct.unpack(">d", bytes.fromhex(content))[0],
    }[kind]()
