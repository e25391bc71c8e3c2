"""The files of an engine: weights in GGUF v3, and the program in JSON beside them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from sdkit_ggml.compiler.compile import WEIGHT_ALIGNMENT, Compiled
from sdkit_ggml.program import Program

WEIGHTS_FILE = "weights.gguf"
PROGRAM_FILE = "program.json"
ARCHITECTURE = "sdkit-ggml"
MAGIC = b"GGUF\x03\x00\x00\x00"


def write_engine(
    folder: Path, compiled: Compiled, report: Callable[[float], None] = lambda fraction: None
) -> None:
    """Writes an engine; one weight at a time is in memory."""
    # Reading needs none of it, and importing it takes most of a second.
    import gguf

    writer = gguf.GGUFWriter(folder / WEIGHTS_FILE, ARCHITECTURE)
    writer.add_custom_alignment(WEIGHT_ALIGNMENT)
    writer.add_string("sdkit.layout", compiled.program.weights_digest)
    writer.add_array("sdkit.origins", [one.origin for one in compiled.weights])
    writer.add_array("sdkit.forms", [one.form for one in compiled.weights])
    types = {name.name.lower(): name for name in gguf.GGMLQuantizationType}
    for index, one in enumerate(compiled.weights):
        # Names have at most 63 bytes in ggml; the initializer's own may be longer.
        shape = [size for size in reversed(one.ne)]
        while len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        writer.add_tensor_info(
            f"w{index}", shape, np.dtype(np.float32), one.nbytes, types[one.type]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done, total = 0, max(1, sum(one.nbytes for one in compiled.weights))
    for one in compiled.weights:
        array = one.compute().reshape(one.ne[::-1])
        if one.type != "i32":
            array = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), types[one.type])
        writer.write_tensor_data(np.ascontiguousarray(array))
        done += one.nbytes
        report(done / total)
    writer.close()
    (folder / PROGRAM_FILE).write_bytes(msgspec.json.encode(compiled.program))


def read_program(folder: Path) -> Program:
    """Returns the program of an engine.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    return msgspec.json.decode((folder / PROGRAM_FILE).read_bytes(), type=Program)


def map_weights(folder: Path, program: Program) -> memoryview:
    """Returns the data section of the weights, mapped: pages are read when they are used.

    The mapping is private: ggml wants memory that can be written, the file stays as it is.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no GGUF file, was cut, or belongs to another program.
    """
    path = folder / WEIGHTS_FILE
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    start = len(mapped) - program.weights_bytes
    if mapped[: len(MAGIC)] != MAGIC or start < len(MAGIC) or start % WEIGHT_ALIGNMENT:
        raise ValueError(
            f"{path.name} has {len(mapped)} bytes and is no GGUF file with "
            f"{program.weights_bytes} bytes of weights"
        )
    if program.weights_digest.encode() not in mapped[:start]:
        raise ValueError(f"{path.name} holds the weights of another program")
    return memoryview(mapped)[start:]
