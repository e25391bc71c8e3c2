import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from sdkit_dispatch import pipeline_files
from sdkit_dispatch.errors import PipelineError
from sdkit_dispatch.pipeline_files import (
    component_digests,
    file_digest,
    pipeline_mark,
    read_pipeline,
)

SAMPLE = Path(pipeline_files.__file__).with_name("_data") / "sample" / "digits-sd"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "pipeline"))


def with_external_data(folder: Path, location: str = "model.onnx_data") -> Path:
    model = onnx.load(folder / "unet" / "model.onnx")
    onnx.save_model(
        model,
        folder / "unet" / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=location,
        size_threshold=0,
    )
    return folder / "unet" / location


def test_sample_is_read_with_its_components_and_shapes():
    pipeline = read_pipeline(SAMPLE)
    assert pipeline.family == "sd"
    assert list(pipeline.components) == ["text_encoder", "unet", "vae_decoder", "vae_encoder"]
    inputs = {tensor.name: tensor for tensor in pipeline.components["unet"].inputs}
    assert inputs["sample"].dims == ("batch", 4, "height", "width")
    assert inputs["timestep"].dims == ()
    assert inputs["sample"].dtype == "float32"
    assert pipeline.configs["scheduler"]["beta_schedule"] == "scaled_linear"


@pytest.mark.parametrize("name", ["with space", "модели", "画像モデル", "emoji 🎨", "quote'd"])
def test_any_folder_name_works(name, tmp_path):
    folder = Path(shutil.copytree(SAMPLE, tmp_path / name))
    with_external_data(folder)
    pipeline = read_pipeline(folder)
    assert pipeline.components["unet"].external[0].is_file()
    assert component_digests(pipeline.components["unet"])[1]


@pytest.mark.parametrize(
    "missing",
    [
        "model_index.json",
        "unet/model.onnx",
        "unet/config.json",
        "text_encoder/model.onnx",
        "vae_decoder/model.onnx",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
    ],
)
def test_a_missing_file_is_named(sample, missing):
    (sample / missing).unlink()
    with pytest.raises(PipelineError) as caught:
        read_pipeline(sample)
    assert Path(missing).parent.name in caught.value.message
    assert caught.value.hint


def test_a_pipeline_without_vae_encoder_is_fine(sample):
    shutil.rmtree(sample / "vae_encoder")
    assert "vae_encoder" not in read_pipeline(sample).components


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_a_broken_json_file_is_named(sample, text):
    (sample / "unet" / "config.json").write_text(text)
    with pytest.raises(PipelineError, match=r"unet/config\.json"):
        read_pipeline(sample)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3440868\n",
        lambda data: data[: len(data) // 2],
        lambda data: b"PK\x03\x04" + data,
    ],
    ids=["empty", "git-lfs pointer", "truncated", "something else"],
)
def test_a_broken_graph_is_named(sample, damage):
    path = sample / "unet" / "model.onnx"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PipelineError, match=r"unet/model\.onnx"):
        read_pipeline(sample)


def test_an_unknown_pipeline_class_is_named_with_the_known_ones(sample):
    index = json.loads((sample / "model_index.json").read_text())
    index["_class_name"] = "FluxPipeline"
    (sample / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PipelineError, match="FluxPipeline.*StableDiffusionXLPipeline"):
        read_pipeline(sample)


def relocate(graph: Path, location: str) -> None:
    model = onnx.load(graph, load_external_data=False)
    for tensor in model.graph.initializer:
        for pair in tensor.external_data:
            if pair.key == "location":
                pair.value = location
    graph.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "", "x/../../secret"])
def test_external_data_outside_the_folder_is_refused(sample, location):
    data = with_external_data(sample)
    shutil.copy(data, sample / "secret")
    (sample / "unet" / "x").mkdir()
    relocate(sample / "unet" / "model.onnx", location)
    with pytest.raises(PipelineError, match="outside its folder"):
        read_pipeline(sample)


def test_external_data_behind_a_link_out_of_the_folder_is_refused(sample, tmp_path):
    data = with_external_data(sample)
    data.rename(tmp_path / "elsewhere")
    try:
        data.symlink_to(tmp_path / "elsewhere")
    except OSError:
        pytest.skip("this user may not make links")
    with pytest.raises(PipelineError, match="outside its folder"):
        read_pipeline(sample)


def test_missing_external_data_is_named(sample):
    with_external_data(sample).unlink()
    with pytest.raises(PipelineError, match=r"model\.onnx_data'?, which is missing"):
        read_pipeline(sample)


def test_external_data_in_a_subgraph_is_found(sample):
    """An If branch may hold weights of its own."""
    graph = sample / "unet" / "model.onnx"
    weights = onnx.numpy_helper.from_array(np.zeros(4, np.float32), "inner")
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    pair = weights.external_data.add()
    pair.key, pair.value = "location", "../outside"
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["inner"], ["branch_out"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("branch_out", onnx.TensorProto.FLOAT, [4])],
        [weights],
    )
    model = onnx.load(graph)
    model.graph.node.append(
        onnx.helper.make_node("If", ["timestep"], ["y"], then_branch=branch, else_branch=branch)
    )
    onnx.save(model, graph)
    with pytest.raises(PipelineError, match="outside its folder"):
        read_pipeline(sample)


def test_a_changed_byte_of_external_data_changes_only_the_weights_digest(sample):
    data = with_external_data(sample)
    before = component_digests(read_pipeline(sample).components["unet"])
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    after = component_digests(read_pipeline(sample).components["unet"])
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_same_content_elsewhere_has_the_same_digests(sample, tmp_path):
    with_external_data(sample)
    other = Path(shutil.copytree(sample, tmp_path / "other name"))
    digests = [component_digests(read_pipeline(x).components["unet"]) for x in (sample, other)]
    assert digests[0] == digests[1]


class TestMemo:
    """A large file is hashed once, unless anything about it changed."""

    @pytest.fixture(autouse=True)
    def every_file_is_large_and_old(self, monkeypatch):
        monkeypatch.setattr(pipeline_files, "MEMO_FROM_BYTES", 0)
        monkeypatch.setattr(pipeline_files, "RACY_S", -60.0)

    @pytest.fixture
    def hashed(self, monkeypatch):
        calls = []
        real = pipeline_files.hashlib.file_digest

        def counting(stream, name):
            calls.append(stream.name)
            return real(stream, name)

        monkeypatch.setattr(pipeline_files.hashlib, "file_digest", counting)
        return calls

    @pytest.mark.skipif(os.name == "nt", reason="Windows has no time of status change in stat")
    def test_an_unchanged_file_is_hashed_once(self, tmp_path, hashed):
        file = tmp_path / "weights"
        file.write_bytes(b"a" * 100)
        digests = {file_digest(file, memo=tmp_path / "memo") for _ in range(3)}
        assert len(digests) == 1
        assert len(hashed) == 1

    def test_a_change_with_the_time_stamp_kept_is_seen(self, tmp_path, hashed):
        file = tmp_path / "weights"
        file.write_bytes(b"a" * 100)
        before = file.stat()
        first = file_digest(file, memo=tmp_path / "memo")
        with file.open("r+b") as stream:
            stream.write(b"b")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_mtime_ns == before.st_mtime_ns
        assert file_digest(file, memo=tmp_path / "memo") != first
        assert len(hashed) == 2

    def test_a_damaged_memo_is_ignored(self, tmp_path, hashed):
        file = tmp_path / "weights"
        file.write_bytes(b"a" * 100)
        first = file_digest(file, memo=tmp_path / "memo")
        for note in (tmp_path / "memo").rglob("*.json"):
            note.write_text("[[[")
        assert file_digest(file, memo=tmp_path / "memo") == first

    def test_a_memo_that_cannot_be_written_is_no_loss(self, tmp_path):
        file = tmp_path / "weights"
        file.write_bytes(b"a")
        (tmp_path / "memo").write_text("a file where the folder should be")
        assert file_digest(file, memo=tmp_path / "memo")


def test_a_file_that_just_changed_is_not_memoised(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_files, "MEMO_FROM_BYTES", 0)
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    file_digest(file, memo=tmp_path / "memo")
    assert not list((tmp_path / "memo").rglob("*.json"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no time that a program cannot set back")
def test_a_mark_stays_until_a_file_of_the_pipeline_changes(sample, monkeypatch):
    old_s = time.time() - 3600
    for path in sample.rglob("*"):
        os.utime(path, (old_s, old_s))
    assert pipeline_mark(sample) is None  # their status was changed a moment ago
    later_s = time.time() + 3600
    monkeypatch.setattr(pipeline_files.time, "time", lambda: later_s)
    mark = pipeline_mark(sample)
    assert mark is not None
    assert pipeline_mark(sample) == mark
    assert pipeline_mark(sample, known=mark) == mark
    assert pipeline_mark(sample / "unet", known=mark) == pipeline_mark(sample / "unet")
    config = sample / "unet" / "config.json"
    config.write_bytes(config.read_bytes())
    assert pipeline_mark(sample) != mark
    assert pipeline_mark(sample, known=mark) != mark


@pytest.mark.skipif(os.name == "nt", reason="Windows has no time that a program cannot set back")
@pytest.mark.parametrize("is_gained", [True, False])
def test_a_mark_changes_with_a_file_gained_or_lost_though_no_folder_is_listed(
    sample, monkeypatch, is_gained
):
    later_s = time.time() + 3600
    monkeypatch.setattr(pipeline_files.time, "time", lambda: later_s)
    mark = pipeline_mark(sample)
    if is_gained:
        (sample / "unet" / "more.json").write_text("{}")
    else:
        (sample / "unet" / "config.json").unlink()
    assert pipeline_mark(sample, known=mark) != mark
