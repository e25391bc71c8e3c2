"""The files of an engine: weights in GGUF v3, and the program in JSON beside them."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sdkit_ggml.compiler.graph import Array
from sdkit_ggml.compiler.weights import WEIGHT_ALIGNMENT, Weight, layout_digest
from sdkit_ggml.program import Program, StoredWeight, stored_bytes

WEIGHTS_FILE = "weights.gguf"
EXTRA_FILE = "extra.gguf"
"""Weights that a program has beside those in a file that it shares; there if there are any."""
PROGRAM_FILE = "program.json"
ARCHITECTURE = "sdkit-ggml"
MAGIC = b"GGUF\x03\x00\x00\x00"


def write_program(folder: Path, program: Program) -> None:
    """Writes the program of an engine."""
    (folder / PROGRAM_FILE).write_bytes(msgspec.json.encode(program))


def write_weights(
    path: Path,
    weights: Sequence[Weight],
    report: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Writes a file of weights; one at a time is in memory.

    Args:
        path: To make.
        weights: By offset.
        report: Told the share that is written.
    """
    stored = [one.stored for one in weights]
    done, total = 0, max(1, sum(map(stored_bytes, stored)))

    def arrays(quantize: Callable[..., Array], types: Mapping[str, Any]) -> Iterator[Array]:
        nonlocal done
        for weight in weights:
            one = weight.stored
            array = weight.compute().reshape(one.ne[::-1])
            if one.type != "i32":
                array = quantize(np.ascontiguousarray(array, np.float32), types[one.type])
            yield array
            done += stored_bytes(one)
            report(done / total)

    _write(path, stored, arrays)


def copy_weights(folder: Path, program: Program, path: Path) -> tuple[StoredWeight, ...]:
    """Writes all weights of an engine into one file; returns what it holds.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: See `map_weights`.
    """
    sections = map_weights(folder, program)
    if not program.extras:
        shutil.copyfile(folder / WEIGHTS_FILE, path)
        return program.weights
    parts = (program.weights, program.extras)

    def arrays(quantize: Any, types: Any) -> Iterator[Array]:  # Any: not used, they are as stored
        for section, stored in zip(sections, parts, strict=True):
            for one in stored:
                size_bytes = stored_bytes(one)
                yield np.frombuffer(section, np.uint8, size_bytes, one.offset)

    moved = [
        msgspec.structs.replace(one, offset=one.offset + program.weights_bytes)
        for one in program.extras
    ]
    stored = (*program.weights, *moved)
    _write(path, stored, arrays)
    return stored


def _write(
    path: Path,
    stored: Sequence[StoredWeight],
    # Any: numpy arrays, and types of gguf by name.
    arrays: Callable[[Callable[..., Array], Mapping[str, Any]], Iterator[Array]],
) -> None:
    # Reading needs none of it, and importing it takes most of a second.
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_custom_alignment(WEIGHT_ALIGNMENT)
    writer.add_string("sdkit.layout", layout_digest(stored))
    writer.add_array("sdkit.origins", [one.origin for one in stored])
    writer.add_array("sdkit.forms", [one.form for one in stored])
    types = {name.name.lower(): name for name in gguf.GGMLQuantizationType}
    for index, one in enumerate(stored):
        # Names have at most 63 bytes in ggml; the initializer's own may be longer.
        shape = [size for size in reversed(one.ne)]
        while len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(f"w{index}", shape, dtype, stored_bytes(one), types[one.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in arrays(gguf.quants.quantize, types):
        writer.write_tensor_data(np.ascontiguousarray(array))
    writer.close()


def share_weights(source: Path, folder: Path) -> bool:
    """Gives a new engine the weights file of the engine in `source`: no second one on the disk.

    Returns False if that engine is gone.
    """
    try:
        os.link(source / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without hard links, or another one
        shutil.copyfile(source / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    return True


def read_program(folder: Path) -> Program:
    """Returns the program of an engine.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    return msgspec.json.decode((folder / PROGRAM_FILE).read_bytes(), type=Program)


def map_weights(folder: Path, program: Program) -> tuple[memoryview, ...]:
    """Returns the data sections of the weights files, mapped: pages are read when they are used.

    The mapping is private: ggml wants memory that can be written, the file stays as it is.

    Raises:
        OSError: One cannot be read.
        ValueError: One is no GGUF file, was cut, or belongs to another program.
    """
    weights = _map(folder / WEIGHTS_FILE, program.weights_bytes, program.weights_digest)
    if not program.extra_bytes:
        return (weights,)
    return weights, _map(folder / EXTRA_FILE, program.extra_bytes, program.extra_digest)


def _map(path: Path, size_bytes: int, digest: str) -> memoryview:
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    start = len(mapped) - size_bytes
    if mapped[: len(MAGIC)] != MAGIC or start < len(MAGIC) or start % WEIGHT_ALIGNMENT:
        raise ValueError(
            f"{path.name} has {len(mapped)} bytes and is no GGUF file with {size_bytes} bytes of "
            "weights"
        )
    if digest.encode() not in mapped[:start]:
        raise ValueError(f"{path.name} holds the weights of another program")
    return memoryview(mapped)[start:]
