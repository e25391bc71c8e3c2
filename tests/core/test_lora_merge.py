"""Pipelines with LoRAs in their weights: the numbers, and how they are kept."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from lora_examples import (
    CONV,
    PIPELINES,
    RECORDED,
    kernel,
    layer,
    make_named_pipeline,
    weights,
    write_lora,
)
from sdkit_dispatch import pipeline_files
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.contract import Progress
from sdkit_dispatch.errors import CacheError, ConfigError, PipelineError
from sdkit_dispatch.lora import Lora, component, merged
from sdkit_dispatch.lora.merged import merged_pipeline
from sdkit_dispatch.lora.stored import merged_damage, merged_entries
from sdkit_dispatch.pipeline_files import component_digests, read_pipeline
from sdkit_dispatch.store_cleaning import over_size, removable, remove_unused, unused_since, usage

ROUNDING = 3e-6
"""Relative, of a sum of a few products in float32 against the same in float64."""


@pytest.fixture
def store(tmp_path):
    with EngineStoreThatCloses(tmp_path / "home") as running:
        yield running


class EngineStoreThatCloses(EngineStore):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def base(tmp_path):
    return read_pipeline(make_named_pipeline(tmp_path / "pipeline"))


@pytest.fixture
def lora(tmp_path):
    return write_lora(tmp_path / "style.safetensors", layer(alpha=1.0))


def merge(store, base, *loras, **settings):
    done = merged_pipeline(store, base, [*loras], **settings)
    done.close()
    return done


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def difference(tensors, module: str = CONV) -> np.ndarray:
    """alpha / rank * up @ down of a file, in float64."""
    down = tensors[f"{module}.lora_down.weight"].astype("f8")
    up = tensors[f"{module}.lora_up.weight"].astype("f8")
    alpha = float(tensors.get(f"{module}.alpha", len(down)))
    return alpha / len(down) * np.einsum("or,rikl->oikl", up[:, :, 0, 0], down)


def test_a_convolution_gets_strength_times_alpha_over_rank_times_the_product(store, base, tmp_path):
    one, two = layer(alpha=1.0), layer(rank=3, alpha=6.0, seed=1)
    paths = [write_lora(tmp_path / f"{n}.safetensors", t) for n, t in (("a", one), ("b", two))]
    done = merge(store, base, Lora(path=paths[0], strength=0.5), Lora(path=paths[1], strength=-2))
    expected = kernel(base.folder) + 0.5 * difference(one) - 2 * difference(two)
    assert np.allclose(kernel(done.folder), expected, rtol=ROUNDING, atol=ROUNDING)
    assert [(one.name, one.layers) for one in done.loras] == [("a", 1), ("b", 1)]


def test_a_middle_of_three_by_three_is_multiplied_in(store, base, tmp_path):
    rng = np.random.default_rng(3)
    up, mid, down = (
        rng.standard_normal(shape).astype("f4")
        for shape in ((4, 2, 1, 1), (2, 2, 3, 3), (2, 4, 1, 1))
    )
    tensors = {f"{CONV}.lora_{role}.weight": one for role, one in
               (("up", up), ("mid", mid), ("down", down))}  # fmt: skip
    path = write_lora(tmp_path / "a.safetensors", tensors)
    expected = kernel(base.folder) + np.einsum(
        "om,mnkl,ni->oikl", up[:, :, 0, 0], mid, down[:, :, 0, 0]
    )
    found = kernel(merge(store, base, Lora(path=path)).folder)
    assert np.allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_half_precision_weight_is_summed_in_float32_and_rounded_once(store):
    base = read_pipeline(PIPELINES / "sd15-dynamo-fp16")
    done = merge(store, base, Lora(path=RECORDED / "sd15-kohya.safetensors", strength=0.7))
    name = "model.down_blocks.0.resnets.0.conv1.weight"
    before = weights(base.components["unet"].onnx)[name]
    after = weights(done.folder / "unet" / "model.onnx")[name]
    full = merge(
        store,
        read_pipeline(PIPELINES / "sd15-dynamo"),
        Lora(path=RECORDED / "sd15-kohya.safetensors", strength=0.7),
    )
    exact = weights(full.folder / "unet" / "model.onnx")[name]
    assert after.dtype == np.float16
    # The unrounded base differs from the rounded one by half a step, and so may the sum.
    assert np.abs(after - exact).max() <= np.spacing(np.abs(exact).max().astype("f2"))
    assert not np.array_equal(before, after)


def test_a_graph_with_all_weights_outside_stays_as_it_is(store, base, lora):
    done = merge(store, base, Lora(path=lora))
    merged_base = read_pipeline(done.folder)
    old = component_digests(base.components["unet"])
    new = component_digests(merged_base.components["unet"])
    assert (old[0], old[1] != new[1]) == (new[0], True)
    for name in ("text_encoder/model.onnx", "vae_decoder/model.onnx", "unet/model.onnx"):
        assert os.path.samefile(base.folder / name, done.folder / name)
    assert not os.path.samefile(
        base.folder / "unet" / "model.onnx_data", done.folder / "unet" / "model.onnx_data"
    )


def test_a_graph_with_weights_inside_is_the_same_for_every_lora(store, tmp_path):
    base = read_pipeline(PIPELINES / "sd15-torchscript")
    found = [
        component_digests(read_pipeline(merge(store, base, one).folder).components["unet"])
        for one in (
            Lora(path=RECORDED / "sd15-kohya.safetensors"),
            Lora(path=RECORDED / "sd15-peft.safetensors", strength=0.3),
        )
    ]
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_the_pipeline_itself_is_never_changed(store, base, lora):
    before = digests(base.folder)
    merge(store, base, Lora(path=lora, strength=3))
    assert digests(base.folder) == before


def test_nothing_is_linked_where_links_cannot_be_made(store, base, lora, monkeypatch):
    def no_links(source, target):
        raise OSError(errno.EXDEV, "this mock has two disks")

    linked = digests(merge(store, base, Lora(path=lora)).folder)
    (entry,) = merged_entries(store)
    store.remove(entry.key)
    monkeypatch.setattr(os, "link", no_links)
    copied = merge(store, base, Lora(path=lora)).folder
    assert digests(copied) == linked
    assert not os.path.samefile(
        base.folder / "vae_decoder" / "model.onnx", copied / "vae_decoder" / "model.onnx"
    )


def test_the_same_loras_give_the_same_bytes_and_another_order_another_key(
    store, base, tmp_path, lora
):
    other = write_lora(tmp_path / "other.safetensors", layer(seed=5))
    both = [Lora(path=lora, strength=0.3), Lora(path=other, strength=0.7)]
    first = merge(store, base, *both)
    before = digests(first.folder)
    store.remove(first.folder.name)
    assert digests(merge(store, base, *both).folder) == before
    assert merge(store, base, *both[::-1]).folder.name != first.folder.name


def test_a_then_b_then_a_gives_the_first_weights_again(store, base, tmp_path, lora):
    other = write_lora(tmp_path / "other.safetensors", layer(seed=5))
    a1 = kernel(merge(store, base, Lora(path=lora)).folder)
    b = kernel(merge(store, base, Lora(path=other)).folder)
    a3 = kernel(merge(store, base, Lora(path=lora)).folder)
    assert np.array_equal(a1, a3)
    assert not np.array_equal(a1, b)


def test_a_strength_of_zero_is_the_pipeline_itself(store, base, tmp_path, lora):
    done = merge(store, base, Lora(path=lora, strength=0))
    assert done.folder == base.folder
    assert [(one.name, one.strength, one.layers) for one in done.loras] == [("style", 0, 0)]
    other = write_lora(tmp_path / "other.safetensors", layer(seed=5))
    alone = merge(store, base, Lora(path=other))
    assert merge(store, base, Lora(path=lora, strength=0), Lora(path=other)).folder == alone.folder


def test_a_renamed_file_is_the_same_lora(store, base, tmp_path, lora):
    first = merge(store, base, Lora(path=lora))
    again = merge(store, base, Lora(path=shutil.copy(lora, tmp_path / "new name.safetensors")))
    assert again.folder == first.folder
    assert [one.name for one in again.loras] == ["new name"]


def test_a_lora_for_another_family_is_refused_with_both_shapes(store):
    base = read_pipeline(PIPELINES / "sd15-dynamo")
    with pytest.raises(PipelineError, match=r"\[8, 40\].*\[8, 16\]"):
        merge(store, base, Lora(path=RECORDED / "sdxl-kohya.safetensors"))
    assert list(merged_entries(store)) == []


def test_keys_that_match_nothing_are_counted_and_named(store, base, tmp_path):
    tensors = {**layer(), **layer("lora_te_text_model_encoder_layers_0_mlp_fc1"), "emb": np.ones(3)}
    path = write_lora(tmp_path / "a.safetensors", tensors)
    for _ in range(2):  # the second time it comes from the store
        (one,) = merge(store, base, Lora(path=path)).loras
        assert (one.layers, one.unmatched) == (1, 3)
        assert "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight" in one.warning
        assert "emb" in one.warning
        assert "3 tensors" in one.warning


def test_a_lora_without_any_place_is_an_error(store, base, tmp_path):
    path = write_lora(tmp_path / "a.safetensors", layer("lora_unet_mid_block_attentions_0_proj_in"))
    with pytest.raises(PipelineError, match="nothing for this pipeline") as caught:
        merge(store, base, Lora(path=path))
    assert "lora_unet_mid_block_attentions_0_proj_in.lora_down.weight" in caught.value.message
    assert list(merged_entries(store)) == []
    assert list((store.home / "tmp").iterdir()) == []


def test_numbers_that_grow_beyond_all_bounds_are_refused(store, base, tmp_path):
    tensors = {name: one * 1e25 for name, one in layer().items()}
    path = write_lora(tmp_path / "a.safetensors", {k: v.astype("f4") for k, v in tensors.items()})
    with pytest.raises(PipelineError, match="not finite"):
        merge(store, base, Lora(path=path))
    with pytest.raises(ConfigError, match="inf"):
        Lora(path=path, strength=float("inf"))


def edit_unet(folder: Path, edit) -> None:
    path = folder / "unet" / "model.onnx"
    model = onnx.load(path)
    edit(model.graph)
    path.write_bytes(model.SerializeToString())


def test_a_quantised_weight_is_refused_with_its_type(store, tmp_path, lora):
    folder = make_named_pipeline(tmp_path / "pipeline", external=False)

    def quantise(graph) -> None:
        for tensor in graph.initializer:
            if tensor.name == "unet.conv_in.weight":
                tensor.CopyFrom(numpy_helper.from_array(np.ones((4, 4, 3, 3), "i1"), tensor.name))

    edit_unet(folder, quantise)
    with pytest.raises(PipelineError, match="INT8"):
        merge(store, read_pipeline(folder), Lora(path=lora))


@pytest.mark.parametrize("external", [True, False])
def test_a_tensor_of_two_layers_is_changed_for_one_only(store, tmp_path, lora, external):
    folder = make_named_pipeline(tmp_path / "pipeline", external=False)

    def share(graph) -> None:
        graph.node[0].name = "/conv_in/Conv"
        other = onnx.helper.make_node(
            "Conv", ["sample", "unet.conv_in.weight"], ["more"], "/conv_out/Conv", pads=[1] * 4
        )
        both = onnx.helper.make_node("Add", ["told", "more"], ["told_more"])
        for node in graph.node:
            if node.output[0] == "time":
                index = list(graph.node).index(node)
        nodes = [*list(graph.node)[:index], other, both, *list(graph.node)[index:]]
        nodes[-2].input[0] = "told_more"
        del graph.node[:]
        graph.node.extend(nodes)

    edit_unet(folder, share)
    path = folder / "unet" / "model.onnx"
    if external:
        onnx.save_model(
            onnx.load(path), path, save_as_external_data=True, location="d", size_threshold=0
        )
    base = read_pipeline(folder)
    done = merge(store, base, Lora(path=lora))
    model = onnx.load(done.folder / "unet" / "model.onnx")
    values = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    used = {node.name: node.input[1] for node in model.graph.node if node.op_type == "Conv"}
    before = kernel(folder)
    expected = before + difference(layer(alpha=1.0))
    assert np.allclose(values[used["/conv_in/Conv"]], expected, rtol=ROUNDING, atol=ROUNDING)
    assert np.array_equal(values[used["/conv_out/Conv"]], before)


def test_two_tensors_in_one_place_of_the_data_file_are_told_apart(store, base, lora):
    path = base.folder / "unet" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    (old,) = (one for one in model.graph.initializer if one.name == "unet.conv_in.weight")
    twin = model.graph.initializer.add()
    twin.CopyFrom(old)
    twin.name = "twin"
    path.write_bytes(model.SerializeToString())
    done = merge(store, read_pipeline(base.folder), Lora(path=lora))
    found = weights(done.folder / "unet" / "model.onnx")
    assert np.array_equal(found["twin"], kernel(base.folder))
    assert not np.array_equal(found["unet.conv_in.weight"], found["twin"])


@pytest.fixture
def every_digest_is_remembered(monkeypatch):
    """As of large files that have settled, so that the tests need neither."""
    monkeypatch.setattr(pipeline_files, "MEMO_FROM_BYTES", 1)
    monkeypatch.setattr(pipeline_files, "RACY_S", -1.0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no time of the last status change")
def test_the_second_time_no_weight_is_read(
    store, base, lora, monkeypatch, every_digest_is_remembered
):
    first = merge(store, base, Lora(path=lora))
    hashed = []

    def counting_file_digest(stream, kind):
        hashed.append(Path(stream.name).name)
        return hashlib.new(kind, stream.read())

    monkeypatch.setattr(pipeline_files.hashlib, "file_digest", counting_file_digest)
    assert merge(store, base, Lora(path=lora)).folder == first.folder
    for name in base.components:
        component_digests(base.components[name], memo=store.memo)
    assert [name for name in hashed if name.startswith("model.onnx")] == []


def test_a_damaged_one_is_found_and_made_again(store, base, lora):
    done = merge(store, base, Lora(path=lora))
    sound = digests(done.folder)
    data = done.folder / "unet" / "model.onnx_data"
    for spoil in (
        lambda: data.write_bytes(bytes(data.stat().st_size)),
        lambda: data.write_bytes(b""),
        data.unlink,
        lambda: (done.folder / "extra").write_text("x"),
        lambda: (done.folder / "manifest.json").write_text("{}"),
    ):
        spoil()
        (entry,) = merged_entries(store)
        assert merged_damage(entry)
        assert digests(merge(store, base, Lora(path=lora)).folder) == sound
        (entry,) = merged_entries(store)
        assert merged_damage(entry) == ""


def test_a_pipeline_that_is_edited_where_it_is_gets_weights_of_its_own(store, base, lora):
    """Its files have a second name in the store: the old one is damaged, and never used."""
    old = merge(store, base, Lora(path=lora))
    path = base.folder / "vae_decoder" / "model.onnx"
    model = onnx.load(path)
    model.producer_name = "somebody else"
    with path.open("r+b") as stream:
        stream.write(model.SerializeToString())
    new = merge(store, read_pipeline(base.folder), Lora(path=lora))
    assert new.folder != old.folder
    assert [bool(merged_damage(one)) for one in merged_entries(store)].count(True) == 1


def test_merged_pipelines_count_and_the_longest_unused_go_first(store, base, tmp_path):
    folders = []
    for seed in range(3):
        path = write_lora(tmp_path / f"{seed}.safetensors", layer(seed=seed))
        folders.append(merge(store, base, Lora(path=path)).folder)
        (note,) = (store.memo / "uses").rglob(f"{folders[-1].name}.json")
        os.utime(note, (2e9 + seed, 2e9 + seed))
    (row,) = usage(merged_entries(store))
    assert (row.vendor, row.component, row.engines) == ("merged", "pipeline", 3)
    old = unused_since(store, removable(store), before_s=2e9 + 1)
    assert [one.key for one in old] == [folders[0].name]
    # What is linked to the user's own pipeline is not freed.
    sizes = {path: path.stat() for path in folders[0].rglob("*") if path.is_file()}
    assert any(found.st_nlink > 1 for found in sizes.values())
    own_bytes = sum(found.st_size for found in sizes.values() if found.st_nlink == 1)
    assert old[0].frees_bytes == own_bytes
    chosen = over_size(store, removable(store), limit_bytes=0)
    assert [one.key for one in chosen] == [folder.name for folder in folders]
    assert all(not one.kept for one in remove_unused(store, chosen[:2]))
    assert [one.folder for one in merged_entries(store)] == [folders[2]]


def test_one_in_use_stays(store, base, lora):
    held = merged_pipeline(store, base, [Lora(path=lora)])
    kept = remove_unused(store, over_size(store, removable(store), limit_bytes=0))
    assert [bool(one.kept) for one in kept] == [True]
    held.close()
    gone = remove_unused(store, over_size(store, removable(store), limit_bytes=0))
    assert [one.kept for one in gone] == [""]
    assert not held.folder.exists()


def fail_on_full_disk(times: int):
    """A mock of a disk that is full the first few times."""
    left = [times]

    def full_disk(*arguments, **settings):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "no space left on this mock")
        return component.write_component(*arguments, **settings)

    return full_disk


def test_on_a_full_disk_it_is_made_elsewhere_and_not_kept(store, base, lora, monkeypatch):
    home = store.home
    monkeypatch.setattr(merged, "write_component", fail_on_full_disk(1))
    done = merge(store, base, Lora(path=lora))
    assert store.is_temporary
    assert not done.folder.is_relative_to(home)
    assert list((home / "tmp").iterdir()) == []
    assert list((home / "merged").iterdir()) == []


def test_a_disk_without_room_for_the_weights_is_not_filled_first(store, base, lora, monkeypatch):
    def small_disk(place):
        """A mock of a disk with a kilobyte left."""
        return shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)

    monkeypatch.setattr(merged.shutil, "disk_usage", small_disk)
    with pytest.raises(CacheError, match="MB are needed"):
        merge(store, base, Lora(path=lora))


def test_where_no_disk_has_room_the_store_is_named(store, base, lora, monkeypatch):
    home = store.home
    monkeypatch.setattr(merged, "write_component", fail_on_full_disk(2))
    with pytest.raises(CacheError, match="no space left") as caught:
        merge(store, base, Lora(path=lora))
    assert caught.value.concerns_store
    assert str(home) in caught.value.message
    assert list((home / "tmp").iterdir()) == []


CHILD = """
import os, signal, sys
from pathlib import Path
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.lora import Lora
from sdkit_dispatch.lora.merged import merged_pipeline
from sdkit_dispatch.pipeline_files import read_pipeline

home, base, lora, deed = sys.argv[1:]

def report(progress):
    if progress.phase.startswith("hash"):
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        print("ready", flush=True)
        sys.stdin.readline()

merged_pipeline(EngineStore(Path(home)), read_pipeline(Path(base)), [Lora(path=Path(lora))],
                report=report)
"""


def child(store, base, lora, deed: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(store.home), str(base.folder), str(lora), deed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_what_a_killed_process_leaves_is_swept(store, base, lora):
    with child(store, base, lora, "die") as running:
        running.wait()
    assert running.returncode < 0
    assert list(merged_entries(store)) == []
    assert len(list((store.home / "tmp").iterdir())) == 1
    assert store.sweep() == 1
    assert list((store.home / "tmp").iterdir()) == []
    assert merged_damage_of_all(store, merge(store, base, Lora(path=lora))) == [""]


def merged_damage_of_all(store, done) -> list[str]:
    assert done.folder.is_dir()
    return [merged_damage(one) for one in merged_entries(store)]


def test_of_two_processes_one_merges_and_the_other_waits(store, base, lora):
    phases = []
    with child(store, base, lora, "wait") as running:
        assert running.stdout.readline() == "ready\n"

        def report(progress: Progress) -> None:
            phases.append(progress.phase)
            if len(phases) == 1:
                running.stdin.write("go\n")
                running.stdin.flush()

        done = merge(store, base, Lora(path=lora), report=report)
    assert running.returncode == 0
    assert all(phase.startswith("wait for another process") for phase in phases)
    assert merged_damage_of_all(store, done) == [""]


def test_a_lora_that_changes_while_it_is_merged_leaves_nothing(store, base, tmp_path, lora):
    other = write_lora(tmp_path / "other.safetensors", layer(seed=9))
    now_ns = time.time_ns()

    def report(progress: Progress) -> None:
        shutil.copy(other, lora)
        os.utime(lora, ns=(now_ns, now_ns + 10**9))

    with pytest.raises(PipelineError, match="was changed"):
        merge(store, base, Lora(path=lora), report=report)
    assert list(merged_entries(store)) == []
    assert list((store.home / "tmp").iterdir()) == []


def test_a_pipeline_that_changes_while_it_is_merged_leaves_nothing(store, base, lora):
    path = base.folder / "unet" / "model.onnx_data"
    later_ns = time.time_ns() + 10**9

    def report(progress: Progress) -> None:
        path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, ns=(later_ns, later_ns))

    with pytest.raises(PipelineError, match="was changed"):
        merge(store, base, Lora(path=lora), report=report)
    assert list(merged_entries(store)) == []
