"""Checkpoints for tests, byte by byte: sound ones, and what is needed to spoil them."""

import json
import struct

TENSOR = "model.diffusion_model.input_blocks.0.0.weight"


def safetensors_bytes(header=None, *, data=b"\0" * 32, length=None):
    if header is None:
        header = {
            "__metadata__": {"format": "pt"},
            TENSOR: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "model.diffusion_model.out.2.bias": {
                "dtype": "F16",
                "shape": [8],
                "data_offsets": [16, 32],
            },
        }
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_tensor(name=TENSOR, shape=(2, 2), kind=0, offset=0):
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


KEYS = (text("general.architecture") + struct.pack("<I", 8) + text("sd1"),)
TENSORS = (gguf_tensor(),)


def gguf_bytes(
    *,
    magic=b"GGUF",
    version=3,
    count=None,
    keys=None,
    values=KEYS,
    tensors=TENSORS,
    data=b"\0" * 64,
):
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if count is None else count,
        len(values) if keys is None else keys,
    )
    body = head + b"".join(values) + b"".join(tensors)
    return body + b"\0" * (-len(body) % 32) + data
