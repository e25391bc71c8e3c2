"""What makes an engine another one: each is a miss whose field and values `cache explain` names."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sdkit_dispatch import api
from sdkit_dispatch.__main__ import main
from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.contract import no_report
from sdkit_dispatch.pipeline_files import read_pipeline
from sdkit_dispatch.store_explain import explain
from sdkit_dispatch.wanted import build_request, wanted
from sdkit_null import SPEC
from toy_bench import CPU, REQUEST, Bench
from toy_pipeline import make_toy_pipeline

BOUND = {"target": "driver={driver}"}
"""A vendor whose engines are bound to the driver, as an OpenVINO blob for a GPU is."""
DEVICE = replace(CPU, driver="31.0.101")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline", external=True)


@pytest.fixture(scope="module")
def stored(recorded_bench, tmp_path_factory, toy):
    """A home that holds the engines of the toy pipeline."""

    bench = Bench(tmp_path_factory.mktemp("stored") / "home", recorded_bench.workers)
    plan = bench.plan(device=DEVICE, **BOUND)
    bench.builder(must_check=False).build(bench.want(toy), [plan], no_report)
    return bench


def with_other_weights(folder, copy):
    """A copy with one byte of the UNet's weights changed, and its time stamps kept."""
    shutil.copytree(folder, copy)
    data = copy / "unet" / "model.onnx_data"
    before = data.stat()
    content = bytearray(data.read_bytes())
    content[101] ^= 0x10
    data.write_bytes(content)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    return copy


MISSES = {
    # what changes -> field, the stored value, the wanted value (None: a digest)
    "weights": ("weights_digest", None, None),
    "precision": ("precision", "fp32", "fp16"),
    "shape": ("shapes.sample", "[2, 4, 8, 8]", "[2, 4, 8, 16]"),
    "vendor version": ("runtime", "null ", "null 99"),
    "driver": ("target", "driver=31.0.101", "driver=32.0.0"),
    "options": ("options.compile_steps", "3", "4"),
    "adapter revision": ("revision", str(SPEC.revision), str(SPEC.revision + 1)),
    "graph passes": ("passes", "", "99"),
}


@pytest.mark.parametrize("change", MISSES)
def test_is_a_miss_that_explain_names_by(change, stored, toy, tmp_path):
    plan, spec, pipeline, request = stored.plan(device=DEVICE, **BOUND), SPEC, toy, REQUEST
    if change == "weights":
        pipeline = with_other_weights(toy, tmp_path / "copy")
    elif change == "precision":
        plan = replace(plan, precision="fp16")
    elif change == "shape":
        request = replace(REQUEST, width_px=2 * REQUEST.width_px)
    elif change == "vendor version":
        plan = replace(plan, runtime="null 99")
    elif change == "driver":
        plan = stored.plan(device=replace(DEVICE, driver="32.0.0"), **BOUND)
    elif change == "options":
        plan = stored.plan(device=DEVICE, **BOUND, compile_steps=4)
    elif change == "adapter revision":
        spec = replace(SPEC, revision=SPEC.revision + 1)
    wanted_now = build_request(plan, spec, stored.want(pipeline, request), "unet")
    if change == "graph passes":
        wanted_now = replace(wanted_now, passes=99)
    explanation = explain(stored.store, wanted_now)
    assert explanation.status == "miss"
    (difference,) = explanation.differences
    field, before, after = MISSES[change]
    assert difference.field == field
    assert field in explanation.message
    if before is None:
        assert difference.stored != difference.wanted
        assert {len(difference.stored), len(difference.wanted)} == {64}
    else:
        assert difference.stored.startswith(before)
        assert difference.wanted == after


HITS = {
    "another path": lambda toy, tmp: shutil.copytree(toy, tmp / "deep" / "er" / "x"),
    "another name": lambda toy, tmp: shutil.copytree(toy, tmp / "модель 7"),
    "other time stamps": lambda toy, tmp: shutil.copytree(
        toy, tmp / "x", copy_function=shutil.copy
    ),
    "a link to it": lambda toy, tmp: linked(toy, tmp / "link"),
}


def linked(folder, link):
    link.symlink_to(folder, target_is_directory=True)
    return link


@pytest.mark.parametrize("change", HITS)
def test_same_content_is_a_hit_under(change, stored, toy, tmp_path):
    folder = Path(HITS[change](toy, tmp_path))
    for component in ("text_encoder", "unet", "vae_decoder"):
        want = wanted(read_pipeline(folder), REQUEST, token_chunks=1, memo=tmp_path / "memo")
        request = build_request(stored.plan(device=DEVICE, **BOUND), SPEC, want, component)
        assert explain(stored.store, request).status == "hit"
    found = stored.store.look_up(request, onnx=folder / "vae_decoder" / "model.onnx")
    assert found is not None


def test_a_profile_of_another_name_is_a_hit(stored, toy, tmp_path):
    with Dispatcher(home=stored.store.home) as dispatcher:
        dispatcher._devices = [DEVICE]
        for name in ("one", "two"):
            profile = tmp_path / f"{name}.yaml"
            profile.write_text(json.dumps({"options": {"null": BOUND}, "width_px": 16}))
            choice = Choice(vendor="null", profile=str(profile))
            rows = dispatcher.explain(toy, choice, height_px=16)
            assert {row.status for row in rows} == {"hit"}, rows


def test_another_driver_is_a_hit_for_a_vendor_whose_engines_are_not_bound_to_it(stored):
    plans = [stored.plan(device=replace(CPU, driver=driver)) for driver in ("1", "2")]
    assert plans[0].target == plans[1].target == ""


def test_the_command_shows_the_field_with_both_values(stored, toy, tmp_path, monkeypatch, capsys):
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        json.dumps({"options": {"null": {**BOUND, "compile_steps": 9}}, "width_px": 16})
    )
    monkeypatch.setattr(api, "detect", lambda: [DEVICE])
    command = ["--home", str(stored.store.home), "cache", "explain", str(toy), "--vendor", "null"]
    arguments = [*command, "--gpu", "cpu", "--height", "16", "--profile", str(profile)]
    monkeypatch.setattr(sys, "argv", ["sdkit-dispatch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert printed.count("differs from the nearest stored engine in options.compile_steps") == 3
    assert printed.count("options.compile_steps: 3 -> 9") == 3
