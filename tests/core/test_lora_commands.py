"""LoRAs on the command line and in the Python API, with the null vendor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from lora_examples import layer, make_named_pipeline, write_lora
from sdkit_dispatch import Choice, Dispatcher, Lora
from sdkit_dispatch.cli import app

UNKNOWN = "lora_te_text_model_encoder_layers_0_mlp_fc1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    make_named_pipeline(folder / "pipeline")
    write_lora(folder / "style.safetensors", {**layer(alpha=1.0), **layer(UNKNOWN)})
    return folder


@pytest.fixture(scope="module")
def home(folder):
    return folder / "home"


def run(home: Path, *words: object, code: int = 0):
    done = CliRunner().invoke(app, ["--home", str(home), *map(str, words)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def drawn(folder, home):
    """A picture with the LoRA, and what the command said."""
    done = run(
        home,
        *("generate", "a dog", "-p", folder / "pipeline", "-o", folder / "dog.png"),
        *("--vendor", "null", "--no-check", "--steps", "2", "--json", "-q"),
        *("--lora", f"{folder / 'style.safetensors'}:0.5"),
    )
    return done.stderr, json.loads(done.stdout)["result"]


def test_the_result_says_which_loras_are_in_the_weights(drawn, folder):
    _, result = drawn
    (row,) = result["loras"]
    assert (row["name"], row["strength"], row["layers"]) == ("style", 0.5, 1)
    assert len(row["sha256"]) == 64
    assert row["unmatched"] == 2
    assert str(folder) not in json.dumps(result)


def test_what_has_no_place_is_said_on_stderr(drawn):
    stderr, _ = drawn
    assert "! the LoRA 'style' has 2 tensors that belong to nothing" in stderr
    assert UNKNOWN in stderr


def test_the_picture_says_it_too_and_no_path(drawn, folder):
    with Image.open(folder / "dog.png") as image:
        text = " ".join(map(str, image.text.values()))
    assert '"loras"' in text
    assert '"style"' in text
    assert str(folder) not in text


def test_build_takes_the_same_option(drawn, folder, home):
    words = ("build", folder / "pipeline", "--vendor", "null", "--no-check", "-q", "--json")
    plain = json.loads(run(home, *words).stdout)["build"]
    lora = ("--lora", f"{folder / 'style.safetensors'}:0.5")
    styled = json.loads(run(home, *words, *lora).stdout)["build"]
    assert plain["loras"] == []
    assert [row["name"] for row in styled["loras"]] == ["style"]
    assert styled["is_hit"]  # generate built it
    keys = [{row["component"]: row["key"] for row in one["components"]} for one in (plain, styled)]
    assert [name for name in keys[0] if keys[0][name] != keys[1][name]] == ["unet"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no.safetensors", "no.safetensors"),
        ("style.safetensors:much", "'much', not a number"),
    ],
)
def test_a_lora_that_cannot_be_taken_ends_with_an_error_of_ours(folder, home, text, words):
    command = [sys.executable, "-m", "sdkit_dispatch", "--home", str(home)]
    command += ["build", str(folder / "pipeline"), "--vendor", "null", "--lora", text]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_of_the_store_know_a_merged_pipeline(drawn, home):
    (key,) = [path.name for path in (home / "merged").iterdir()]
    assert "1 pipelines with LoRAs in their weights" in run(home, "cache", "du").stdout
    (row,) = json.loads(run(home, "cache", "du", "--json").stdout)["merged"]
    assert row["own_bytes"] > 0
    assert "and 1 pipelines with LoRAs verified, 0 damaged" in run(home, "cache", "verify").stdout
    (data,) = (home / "merged" / key / "unet").glob("model.onnx_data")
    sound = data.read_bytes()
    data.write_bytes(bytes(len(sound)))
    document = json.loads(run(home, "cache", "verify", "--json", code=4).stdout)
    assert list(document["damaged"]) == [key]
    data.write_bytes(sound)
    text = run(home, "cache", "prune", "--dry-run", "--max-size", "0").stdout
    assert key[:12] in text
    assert "merged" in text
    run(home, "cache", "remove", key[:12])
    assert list((home / "merged").iterdir()) == []


def test_the_python_interface_takes_loras_in_order(folder):
    loras = [Lora(path=folder / "style.safetensors", strength=s) for s in (1.0, -0.25)]
    choice = Choice(vendor="null", gpu="cpu", must_check=False)
    with Dispatcher(home=folder / "other") as dispatcher:
        loaded = dispatcher.load(folder / "pipeline", choice, loras=loras)
        assert [one.strength for one in loaded.loras] == [1.0, -0.25]
        kept = dispatcher.store.evict(loaded.pipeline.folder.name)
        assert not kept  # it may be drawn from
        merged = loaded.pipeline.folder
        del loaded
        assert dispatcher.store.evict(merged.name)
