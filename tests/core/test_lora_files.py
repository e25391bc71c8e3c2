"""LoRA files: what is read of them, and what is refused."""

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from checkpoint_files import gguf_bytes
from fuzzing import fuzz, mutated
from lora_examples import CONV, layer, lora_bytes, write_lora
from sdkit_dispatch.errors import ConfigError, PipelineError
from sdkit_dispatch.lora import Lora, lora_from_text
from sdkit_dispatch.lora.file import read_lora


def read(path: Path):
    return read_lora(Lora(path=path))


@pytest.mark.parametrize(
    ("text", "path", "strength"),
    [
        ("style.safetensors", "style.safetensors", 1.0),
        ("style.safetensors:0.8", "style.safetensors", 0.8),
        ("style.safetensors:-1", "style.safetensors", -1.0),
        (r"C:\loras\style.safetensors", r"C:\loras\style.safetensors", 1.0),
        (r"C:\loras\style.safetensors:1e-1", r"C:\loras\style.safetensors", 0.1),
        ("C:1", "C:1", 1.0),
        ("no-ending:2", "no-ending", 2.0),
        ("odd:name.safetensors", "odd:name.safetensors", 1.0),
    ],
)
def test_a_strength_stands_behind_the_last_colon(text, path, strength):
    assert lora_from_text(text) == Lora(path=Path(path), strength=strength)


@pytest.mark.parametrize("text", ["", " ", "a.safetensors:much", "a.safetensors:nan", "a.st:inf"])
def test_a_strength_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match="lora|LoRA"):
        lora_from_text(text)


@pytest.mark.parametrize(
    ("down", "up"),
    [
        (".lora_down.weight", ".lora_up.weight"),
        (".lora_A.weight", ".lora_B.weight"),
        (".lora_A.default.weight", ".lora_B.default.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    ],
)
def test_every_dialect_is_read(tmp_path, down, up):
    tensors = {f"x.y{down}": np.ones((3, 5), "f4"), f"x.y{up}": np.ones((7, 3), "f4")}
    found = read(write_lora(tmp_path / "a.safetensors", tensors))
    assert list(found.layers) == ["x.y"]
    one = found.layers["x.y"]
    assert (one.down.shape, one.up.shape, one.rank, one.alpha) == ((3, 5), (7, 3), 3, 3.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_numbers_are_read_in_every_precision(tmp_path, dtype):
    values = np.array([[1.5, -2.0], [0.25, 96.0]], "f4")
    stored = (values.view("u4") >> 16).astype("u2") if dtype == "bfloat16" else values.astype(dtype)
    tensors = {"m.lora_down.weight": stored, "m.lora_up.weight": stored}
    found = read(write_lora(tmp_path / "a.safetensors", tensors))
    array = found.array(found.layers["m"].down)
    assert array.dtype == np.float32
    assert np.array_equal(array, values)


def test_alpha_is_the_rank_unless_a_tensor_or_the_header_says_it(tmp_path):
    named = {"unet.a.b.lora_A.weight": np.ones((4, 2), "f4")}
    named |= {"unet.a.b.lora_B.weight": np.ones((2, 4), "f4")}
    note = {"unet.lora_alpha": 8, "unet.alpha_pattern": {"c": 3}}
    plain = read(write_lora(tmp_path / "plain.safetensors", named))
    noted = write_lora(tmp_path / "b.safetensors", named, lora_adapter_metadata=json.dumps(note))
    note["unet.alpha_pattern"] = {"b": 3}
    other = write_lora(tmp_path / "c.safetensors", named, lora_adapter_metadata=json.dumps(note))
    tensor = read(write_lora(tmp_path / "d.safetensors", layer(alpha=0.5)))
    assert plain.layers["unet.a.b"].alpha == 4
    assert read(noted).layers["unet.a.b"].alpha == 8
    assert read(other).layers["unet.a.b"].alpha == 3
    assert tensor.layers[CONV].alpha == 0.5


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (f"{CONV}.dora_scale", "DoRA"),
        ("unet.a.lora_magnitude_vector", "DoRA"),
        (f"{CONV}.hada_w1_a", "LoHa"),
        (f"{CONV}.lokr_w1", "LoKr"),
        (f"{CONV}.oft_blocks", "OFT"),
        (f"{CONV}.a1.weight", "GLoRA"),
        (f"{CONV}.on_input", "IA3"),
        (f"{CONV}.diff_b", "full difference"),
        ("unet.a.lora_B.bias", "biases"),
    ],
)
def test_other_kinds_are_refused_with_their_keys(tmp_path, key, kind):
    path = write_lora(tmp_path / "a.safetensors", {**layer(), key: np.ones(2, "f4")})
    with pytest.raises(PipelineError, match=kind) as caught:
        read(path)
    assert key in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.parametrize("note", ["use_dora", "use_rslora"])
def test_other_kinds_that_only_the_header_tells_are_refused(tmp_path, note):
    named = {"unet.a.lora_A.weight": np.ones((4, 2), "f4")}
    named |= {"unet.a.lora_B.weight": np.ones((2, 4), "f4")}
    text = json.dumps({f"unet.{note}": True})
    with pytest.raises(PipelineError, match="header"):
        read(write_lora(tmp_path / "a.safetensors", named, lora_adapter_metadata=text))


def without(tensors, end):
    return {name: one for name, one in tensors.items() if not name.endswith(end)}


WRONG = {
    "half a layer": (without(layer(), "up.weight"), "lora_down.weight' and no 'up'"),
    "a middle alone": ({"m.lora_mid.weight": np.ones((2, 2, 3, 3), "f4")}, "without its other"),
    "two ranks": (
        {**layer(), f"{CONV}.lora_up.weight": np.ones((4, 3, 1, 1), "f4")},
        "make no product",
    ),
    "an up of 3x3": (
        {**layer(), f"{CONV}.lora_up.weight": np.ones((4, 2, 3, 3), "f4")},
        "make no product",
    ),
    "one dimension": (
        {"m.lora_down.weight": np.ones(4, "f4"), "m.lora_up.weight": np.ones(4, "f4")},
        "make no product",
    ),
    "many alphas": ({**layer(), f"{CONV}.alpha": np.ones(3, "f4")}, "3 numbers in"),
    "an infinite alpha": ({**layer(), f"{CONV}.alpha": np.array(np.inf, "f4")}, "not finite"),
    "a type without a range": (
        {**layer(), f"{CONV}.lora_up.weight": np.ones((4, 2, 1, 1), "u1")},
        "f8_e4m3",
    ),
    "a whole model": ({"model.diffusion_model.out.2.weight": np.ones((2, 2), "f4")}, "is no LoRA"),
    "alphas alone": ({f"{CONV}.alpha": np.array(1.0, "f4")}, "is no LoRA"),
    "one layer twice": (
        {**layer("m"), "m.lora_A.weight": np.ones((2, 4), "f4")},
        "twice",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_file_that_is_no_sound_lora_is_named_with_its_fault(tmp_path, fault):
    tensors, words = WRONG[fault]
    path = write_lora(tmp_path / "a.safetensors", tensors)
    with pytest.raises(PipelineError, match=words) as caught:
        read(path)
    assert str(path) in caught.value.message


def test_numbers_that_are_not_finite_are_named(tmp_path):
    tensors = layer()
    tensors[f"{CONV}.lora_up.weight"][1, 1] = np.nan
    found = read(write_lora(tmp_path / "a.safetensors", tensors))
    with pytest.raises(PipelineError, match=r"lora_up\.weight' that are not finite"):
        found.array(found.layers[CONV].up)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.safetensors", b"", "neither"),
        ("a.safetensors", lora_bytes(layer())[:-4], "ends before"),
        ("a.safetensors", b"PK\x03\x04" + bytes(40), "pickled"),
        ("a.ckpt", b"\x80\x02" + bytes(40), "pickled"),
        ("a.gguf", gguf_bytes(), "gguf"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(PipelineError, match=words):
        read(path)


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path):
    for path in (tmp_path / "no.safetensors", tmp_path):
        with pytest.raises(PipelineError, match="cannot be read|not a plain file"):
            read(path)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path):
    path = write_lora(tmp_path / "a.safetensors", layer())
    found = read(path)
    found.require_unchanged()
    os.replace(write_lora(tmp_path / "b.safetensors", layer(seed=1)), path)
    with pytest.raises(PipelineError, match="was changed"):
        found.require_unchanged()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(PipelineError, match="was changed"):
        found.array(found.layers[CONV].up)


def test_files_that_nobody_wrote(tmp_path):
    path = tmp_path / "a.safetensors"
    note = json.dumps({"unet.lora_alpha": 8})
    sound = lora_bytes({**layer(alpha=1.0), **layer("unet.a")}, {"lora_adapter_metadata": note})

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(PipelineError):
            found = read(path)
            for one in found.layers.values():
                found.array(one.down), found.array(one.up)

    fuzz(mutated(sound), check, examples=200)
