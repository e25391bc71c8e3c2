"""Checkpoints are read before an engine sees them: a damaged one is refused with its reason."""

import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_files import TENSOR, entry, gguf_bytes, gguf_tensor, safetensors_bytes, text
from sdkit_dispatch.checkpoint import is_checkpoint, read_checkpoint
from sdkit_dispatch.errors import PipelineError

MANY_DIGITS = b'{"a": {"dtype": "F32", "shape": [' + b"9" * 4000 + b'], "data_offsets": [0, 4]}}'
U32, ARRAY = 4, 9
ALIGNMENT = text("general.alignment") + struct.pack("<I", U32)
NESTED = struct.pack("<IQ", ARRAY, 1) * 10


def one(**fields):
    return {"a": {**entry(), **fields}}


DAMAGED = {
    # what is wrong -> the file, and words that must be in the message
    "an empty file": (b"", "neither"),
    "three bytes": (b"abc", "neither"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "neither"),
    "a zip archive": (b"PK\x03\x04" + b"\0" * 64, "pickled"),
    "a bare pickle": (b"\x80\x02}q\0." + b"\0" * 64, "pickled"),
    "a header longer than the file": (safetensors_bytes(length=10**6), "header of 1000000"),
    "a header of exabytes": (safetensors_bytes(length=2**63), "header of"),
    "a header that is cut": (safetensors_bytes(length=20), "not JSON"),
    "a header in another encoding": (safetensors_bytes(b'{"\xff\xfe": 1}'), "not JSON"),
    "a header nested without end": (safetensors_bytes(b'{"a":' * 10**5), "not JSON"),
    "no tensors": (safetensors_bytes({}), "0 tensors"),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"a": 1}, **one()}), "metadata"),
    "a tensor that is a number": (safetensors_bytes({"a": 1}), "no type, shape and place"),
    "a tensor without a place": (safetensors_bytes({"a": {"dtype": "F32"}}), "no type"),
    "three offsets": (safetensors_bytes(one(data_offsets=[0, 1, 2])), "no type"),
    "an unknown type": (safetensors_bytes(one(dtype="Q3")), "type 'Q3'"),
    "a negative offset": (safetensors_bytes(one(data_offsets=[-16, 0])), "-16"),
    "an offset of text": (safetensors_bytes(one(data_offsets=["0", 16])), "'0'"),
    "an offset that is true": (safetensors_bytes(one(data_offsets=[False, 16])), "False"),
    "offsets the wrong way": (safetensors_bytes(one(data_offsets=[16, 0])), "16 bytes in"),
    "a size that does not fit the shape": (safetensors_bytes(one(shape=[3, 2])), "24 bytes"),
    "a shape of billions": (safetensors_bytes(one(shape=[2**40, 2**40])), "shape"),
    "a shape of thousands of digits": (safetensors_bytes(MANY_DIGITS), "a"),
    "a shape of nothing": (safetensors_bytes(one(shape=[0], data_offsets=[0, 0])), "shape"),
    "eight dimensions": (safetensors_bytes(one(shape=[1] * 8)), "8 dimensions"),
    "a tensor past the end": (
        safetensors_bytes(one(data_offsets=[32, 48])),
        "48 bytes of data are needed",
    ),
    "a file that is cut": (safetensors_bytes(data=b"\0" * 31), "ends before"),
    "two tensors in one place": (
        safetensors_bytes({"a": entry(), "b": entry(offsets=[8, 24])}),
        "in one place",
    ),
    "a name twice": (
        safetensors_bytes(b'{"a": 1, "a": 2}'),
        "'a' twice",
    ),
    "GGUF of version 1": (gguf_bytes(version=1), "version 1"),
    "GGUF in the other byte order": (gguf_bytes(version=3 << 24), "version 50331648"),
    "GGUF without tensors": (gguf_bytes(tensors=()), "0 tensors"),
    "GGUF of 2**60 tensors": (gguf_bytes(count=2**60), f"{2**60} tensors"),
    "GGUF of 2**60 keys": (gguf_bytes(keys=2**60), f"{2**60} keys"),
    "GGUF that ends after its magic": (b"GGUF", "ends within"),
    "GGUF that ends in its tensors": (gguf_bytes(count=9, data=b""), "ends within"),
    "a key twice": (gguf_bytes(values=(ALIGNMENT + b"\x20\0\0\0",) * 2), "twice"),
    "a key of exabytes": (gguf_bytes(values=(struct.pack("<Q", 2**62),)), "name of"),
    "a key that is no text": (gguf_bytes(values=(text(b"\xff\xfe"),)), "no text"),
    "a value of an unknown type": (gguf_bytes(values=(text("a") + b"\x63\0\0\0",)), "type 99"),
    "an array of 2**60 values": (
        gguf_bytes(values=(text("a") + struct.pack("<IIQ", ARRAY, U32, 2**60),)),
        "array of",
    ),
    "arrays in arrays without end": (
        gguf_bytes(values=(text("a") + struct.pack("<I", ARRAY) + NESTED,)),
        "value of type 9",
    ),
    "an alignment of 0": (gguf_bytes(values=(ALIGNMENT + b"\0\0\0\0",)), "alignment 0"),
    "an alignment of 3": (gguf_bytes(values=(ALIGNMENT + b"\x03\0\0\0",)), "power of two"),
    "an alignment of a gigabyte": (
        gguf_bytes(values=(ALIGNMENT + struct.pack("<I", 1 << 30),)),
        "no alignment",
    ),
    "a tensor of an unknown type": (gguf_bytes(tensors=(gguf_tensor(kind=77),)), "type 77"),
    "a tensor of 9 dimensions": (gguf_bytes(tensors=(gguf_tensor(shape=(1,) * 9),)), "9 dim"),
    "a tensor of no size": (gguf_bytes(tensors=(gguf_tensor(shape=(0, 2)),)), "shape"),
    "rows that are no whole blocks": (gguf_bytes(tensors=(gguf_tensor(kind=8),)), "blocks of 32"),
    "a tensor between places": (gguf_bytes(tensors=(gguf_tensor(offset=4),)), "between places"),
    "a GGUF tensor past the end": (gguf_bytes(tensors=(gguf_tensor(offset=64),)), "80 bytes"),
    "GGUF tensors in one place": (
        gguf_bytes(tensors=(gguf_tensor("a"), gguf_tensor("b"))),
        "in one place",
    ),
    "a GGUF name twice": (
        gguf_bytes(tensors=(gguf_tensor("a"), gguf_tensor("a", offset=32))),
        "twice",
    ),
    "a name without an end": (gguf_bytes(tensors=(gguf_tensor("a" * 200),)), "name of 200"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_checkpoint_is_refused_with_its_reason(fault, tmp_path):
    data, words = DAMAGED[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(PipelineError) as caught:
        read_checkpoint(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert len(caught.value.message) < 600 + len(str(path))


def test_sound_safetensors_tells_its_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes())
    checkpoint = read_checkpoint(path)
    assert checkpoint.format == "safetensors"
    assert [(one.name, one.dtype, one.shape, one.start) for one in checkpoint.tensors] == [
        (TENSOR, "f32", (2, 2), 0),
        ("model.diffusion_model.out.2.bias", "f16", (8,), 16),
    ]
    assert checkpoint.side_px == 512


def test_sound_gguf_tells_its_tensors_with_the_outer_dimension_first(tmp_path):
    path = tmp_path / "anything"
    tensors = (gguf_tensor(shape=(32, 3), kind=8), gguf_tensor("b", shape=(), offset=128))
    path.write_bytes(gguf_bytes(version=2, tensors=tensors, data=b"\0" * 132))
    checkpoint = read_checkpoint(path)
    assert checkpoint.format == "gguf"
    assert [(one.dtype, one.shape, one.size_bytes) for one in checkpoint.tensors] == [
        ("q8_0", (3, 32), 102),
        ("f32", (), 4),
    ]
    assert checkpoint.dtype == "q8_0"


def test_a_second_text_encoder_draws_1024_pixels(tmp_path):
    path = tmp_path / "xl.safetensors"
    path.write_bytes(safetensors_bytes({"conditioner.embedders.1.model.ln_final.bias": entry()}))
    assert read_checkpoint(path).side_px == 1024


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.bin"])
def test_pickles_are_refused_by_name_too_and_point_to_safetensors(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"anything at all, longer than a header")
    with pytest.raises(PipelineError, match="pickled") as caught:
        read_checkpoint(path)
    assert ".safetensors" in caught.value.hint


def test_what_is_not_there_is_a_checkpoint_by_its_name_alone(tmp_path):
    assert is_checkpoint(tmp_path / "none.safetensors")
    assert not is_checkpoint(tmp_path / "none")
    assert not is_checkpoint(tmp_path)
    with pytest.raises(PipelineError, match="cannot be read"):
        read_checkpoint(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["a" * 5000, "null\0byte.safetensors"])
def test_a_name_that_no_file_can_have_is_an_error_of_ours(name, tmp_path):
    assert is_checkpoint(tmp_path / name) in (True, False)
    with pytest.raises(PipelineError):
        read_checkpoint(tmp_path / name)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_a_device_is_not_read():
    with pytest.raises(PipelineError, match="plain file"):
        read_checkpoint(Path("/dev/zero"))


SOUND = {
    "safetensors": safetensors_bytes(),
    "gguf": gguf_bytes(tensors=(gguf_tensor(), gguf_tensor("b", offset=32))),
}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(SOUND)),
    spots=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 300) | st.none(),
)
def test_any_damage_ends_in_a_pipeline_error_or_a_sound_file(kind, spots, cut, tmp_path):
    data = bytearray(SOUND[kind])
    for at, value in spots:
        data[at % len(data)] = value
    path = tmp_path / "model"
    path.write_bytes(bytes(data[:cut]))
    try:
        checkpoint = read_checkpoint(path)
    except PipelineError:
        return
    for tensor in checkpoint.tensors:
        assert tensor.start >= 0
        assert tensor.start + tensor.size_bytes <= len(data)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=400), kind=st.sampled_from(["safetensors", "gguf"]))
def test_any_bytes_behind_a_sound_start_end_in_a_pipeline_error(kind, tail, tmp_path):
    path = tmp_path / "model"
    start = b"GGUF\x03\0\0\0" if kind == "gguf" else len(tail).to_bytes(8, "little") + b"{"
    path.write_bytes(start + tail)
    with suppress(PipelineError):  # by luck it may be a sound file
        read_checkpoint(path)
