import contextlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdkit_dispatch.errors import RunError, WorkerError
from sdkit_dispatch.wire import MAGIC, PREFIX, Frame, read_frame, write_frame


def round_trip(frame: Frame) -> Frame:
    stream = io.BytesIO()
    write_frame(stream, frame)
    stream.seek(0)
    result = read_frame(stream)
    assert result is not None
    assert read_frame(stream) is None
    return result


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.float16(1.5),
        np.array(7, dtype=np.int64),
        np.zeros((2, 0, 3), np.uint8),
        np.array([True, False]),
        np.arange(3, dtype=">i4"),
    ],
    ids=["strided", "half scalar", "0-d", "empty", "bool", "big endian"],
)
def test_arrays_come_back_with_their_shape_dtype_and_values(array):
    result = round_trip(Frame(header={"id": 1}, arrays={"x": array})).arrays["x"]
    assert result.shape == np.shape(array)
    assert result.dtype == np.asarray(array).dtype.newbyteorder("=")
    np.testing.assert_array_equal(result, array)


def test_received_arrays_can_be_written_to():
    round_trip(Frame(header={}, arrays={"x": np.zeros(3)})).arrays["x"][0] = 1


def test_header_survives_any_unicode():
    header = {"path": "C:\\Модели\\画像 файл\\x.onnx", "n": None}
    assert round_trip(Frame(header=header)).header == header


def test_a_dtype_that_does_not_cross_is_refused_before_anything_is_written():
    stream = io.BytesIO()
    with pytest.raises(RunError, match="complex128"):
        write_frame(stream, Frame(header={}, arrays={"x": np.zeros(1, complex)}))
    assert stream.getvalue() == b""


def framed(header: object, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text), len(payload)) + text + payload


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"Loading model... 3%\nSDW1", "where a frame should start"),
        (PREFIX.pack(MAGIC, 1 << 31, 0), "at most"),
        (PREFIX.pack(MAGIC, 2, 1 << 60) + b"{}", "at most"),
        (PREFIX.pack(MAGIC, 4, 0) + b"{}", "ended 2 bytes before"),
        (PREFIX.pack(MAGIC, 3, 0) + b"{]}", "not JSON"),
        (framed([1]), "not an object"),
        (framed({"arrays": [["x", "object", [1]]]}, b"12345678"), "where a tensor was expected"),
        (framed({"arrays": [["x", "uint8", [-1]]]}), "has the shape"),
        (framed({"arrays": [["x", "uint8", [True]]]}, b"1"), "has the shape"),
        (framed({"arrays": [["x", "uint8", [9]]]}, b"12345678"), "add up to 9"),
        (framed({"arrays": 3}), "where a tensor was expected"),
    ],
)
def test_what_is_not_a_frame_is_a_worker_error(data, words):
    with pytest.raises(WorkerError, match=words):
        read_frame(io.BytesIO(data))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(data):
    with contextlib.suppress(WorkerError):
        read_frame(io.BytesIO(data))


@given(st.data())
def test_a_damaged_frame_never_raises_anything_else(data):
    good = framed({"id": 1, "arrays": [["x", "float32", [2, 2]]]}, bytes(16))
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WorkerError):
        read_frame(io.BytesIO(bytes(damaged)))
