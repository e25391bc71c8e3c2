"""An engine of a bundle on a machine that has no reference: what comes with it checks it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bundle_examples import export, take
from sdkit_dispatch import graph, reference
from sdkit_dispatch.build import Builder
from sdkit_dispatch.build_tools import BuildTools
from sdkit_dispatch.bundle_fit import Fit, fit_here
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.check import Recording, recorded_request, recording_bytes
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import BuildRequest, Device, GenerateRequest, no_report
from sdkit_dispatch.errors import NumericError, VendorEnvError
from sdkit_dispatch.failures import Failures
from sdkit_dispatch.pipeline_files import read_pipeline
from sdkit_dispatch.reference import Reference, portable_name
from sdkit_dispatch.wanted import wanted
from sdkit_dispatch.workers import Workers
from sdkit_null import SPEC
from toy_pipeline import SIDE_PX, make_toy_pipeline

CPU = Device(id="cpu", kind="cpu", maker="unknown", name="a processor")
GPU = Device(
    id="gpu", kind="discrete", maker="nvidia", name="a GPU", arch="sm_120", pci_id="10de:1"
)
SIZE = GenerateRequest(prompt="", width_px=SIDE_PX, height_px=SIDE_PX, steps=2, guidance=3.0)


class Site:
    """A machine: its store, and the workers that all share."""

    def __init__(self, home: Path, workers: Workers, pipeline: Path) -> None:
        self.store = EngineStore(home)
        self.workers = workers
        read = read_pipeline(pipeline)
        self.want = wanted(read, SIZE, token_chunks=1, memo=self.store.memo)
        self.reference = Reference(store=self.store, workers=workers, device=CPU)

    def build(self):
        def never(spec, report):
            raise VendorEnvError("not in this test")

        tools = BuildTools(
            store=self.store,
            workers=self.workers,
            reference=self.reference,
            failures=Failures(self.store.home),
        )
        plan = self.workers.probe(SPEC, CPU, None, {})
        return Builder(tools, install=never).build(self.want, [plan], no_report)

    def recording(self) -> Recording:
        want = self.want
        return self.reference.recording(
            want.pipeline,
            want.request,
            shapes=want.shapes,
            digests=want.digests,
            token_chunks=1,
            report=no_report,
        )


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    home = tmp_path_factory.mktemp("workers")
    with Workers(home=home, config=Config(), specs={"null": SPEC}) as workers:
        yield workers


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline", external=True)


@pytest.fixture(scope="module")
def maker(tmp_path_factory, workers, pipeline) -> tuple[Site, Recording]:
    """A machine with a reference and engines, and its recording."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "VENDOR", "null")
        patch.setattr(reference, "OPTIONS", {})
        site = Site(tmp_path_factory.mktemp("maker") / "home", workers, pipeline)
        site.build()
        return site, site.recording()


def bundle_of(maker: tuple[Site, Recording], out: Path, **references: Recording) -> Path:
    site, recording = maker
    want = site.want
    name = portable_name(
        want.pipeline, recorded_request(want.request), want.digests, token_chunks=1
    )
    recording = references.get("recording", recording)
    export(site.store, out, references={name: recording_bytes(recording)})
    return out


@pytest.fixture
def elsewhere(tmp_path, workers, pipeline, monkeypatch) -> Site:
    monkeypatch.setattr(reference, "VENDOR", "absent")
    return Site(tmp_path / "there", workers, pipeline)


def test_an_imported_engine_is_checked_with_what_came_along(maker, elsewhere, tmp_path):
    take(bundle_of(maker, tmp_path / "a.sdkit"), elsewhere.store.home)
    result = elsewhere.build()
    assert result.is_hit
    for built in result.components:
        assert built.manifest.verdict.status == "passed"
        assert "from a bundle" in built.manifest.verdict.reference


def test_an_imported_engine_says_what_runs_at_every_hit(maker, elsewhere, tmp_path):
    take(bundle_of(maker, tmp_path / "a.sdkit"), elsewhere.store.home)
    first, again = (elsewhere.build().components for _ in range(2))
    for before, now in zip(first, again, strict=True):
        assert before.manifest.facts["device"] == CPU.name
        assert now.manifest.facts == before.manifest.facts
        assert now.manifest.verdict == before.manifest.verdict


def test_an_engine_that_computes_something_else_here_is_refused(maker, elsewhere, tmp_path):
    recording = maker[1]
    cases = {
        name: tuple(
            replace(case, outputs={key: 3 * array + 1 for key, array in case.outputs.items()})
            for case in calls
        )
        for name, calls in recording.cases.items()
    }
    other = replace(recording, cases=cases)
    take(bundle_of(maker, tmp_path / "a.sdkit", recording=other), elsewhere.store.home)
    with pytest.raises(NumericError, match="wrong numbers"):
        elsewhere.build()


def test_a_recording_of_a_bundle_is_never_taken_for_one_made_here(
    maker, tmp_path, workers, pipeline
):
    """Whoever forges the very name of a local recording cannot replace it, nor come first."""
    site, recording = maker
    local = next(path for path in (site.store.home / "references").glob("??/*.npz"))
    spoilt = replace(recording, reference="forged")
    export(site.store, tmp_path / "a.sdkit", references={local.stem: recording_bytes(spoilt)})
    take(tmp_path / "a.sdkit", tmp_path / "there")
    assert not list((tmp_path / "there" / "references").glob("??/*.npz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "VENDOR", "null")
        patch.setattr(reference, "OPTIONS", {})
        there = Site(tmp_path / "there", workers, pipeline)
        shutil.copytree(
            site.store.home / "references", tmp_path / "there" / "references", dirs_exist_ok=True
        )
        assert there.recording().reference == recording.reference


def test_without_a_reference_and_without_a_recording_it_stays_unchecked(maker, elsewhere, tmp_path):
    site = maker[0]
    export(site.store, tmp_path / "a.sdkit", references={})
    take(tmp_path / "a.sdkit", elsewhere.store.home)
    result = elsewhere.build()
    assert result.is_hit
    assert {built.manifest.verdict.status for built in result.components} == {"unchecked"}


class TestFit:
    @pytest.fixture
    def request_here(self, workers) -> BuildRequest:
        plan = workers.probe(SPEC, CPU, None, {})
        return BuildRequest(
            vendor="null",
            revision=SPEC.revision,
            runtime=plan.runtime,
            target=plan.target,
            component="unet",
            graph_digest="a" * 64,
            weights_digest="",
            precision=plan.precision,
            shapes={"x": (1,)},
            options=plan.options,
            passes=graph.REVISION,
        )

    def fit(self, request, workers, *, devices=(CPU,), specs=None) -> Fit:
        known = {"null": SPEC} if specs is None else specs
        return fit_here(request, specs=known, devices=devices, workers=workers)

    def test_what_this_machine_would_ask_for_fits(self, request_here, workers):
        assert self.fit(request_here, workers) == Fit(status="fits")

    @pytest.mark.parametrize(
        ("change", "status", "words"),
        [
            ({"target": "sm_89"}, "target", "built for sm_89"),
            ({"runtime": "null 0"}, "version", "built with null 0; here is null"),
            ({"revision": 99}, "version", "99 as the null adapter's revision"),
            ({"passes": 99}, "version", "graph passes"),
            ({"vendor": "other"}, "version", "no vendor 'other' here"),
            ({"options": {"no such": 1}}, "version", "options"),
        ],
    )
    def test_what_differs_is_named(self, request_here, workers, change, status, words):
        fit = self.fit(replace(request_here, **change), workers)
        assert fit.status == status
        assert words in fit.message

    def test_a_vendor_that_serves_no_device_here_is_named(self, request_here, workers):
        spec = replace(SPEC, device_kinds=("npu",))
        fit = self.fit(request_here, workers, specs={"null": spec})
        assert (fit.status, fit.message) == ("target", "no device here is one that null serves")

    @pytest.mark.parametrize(("target", "status"), [("sm_89", "target"), ("sm_120", "unconfirmed")])
    def test_a_vendor_that_is_not_installed_is_judged_by_its_target(
        self, request_here, target, status, tmp_path
    ):
        absent = replace(
            SPEC,
            name="absent",
            extra="absent",
            device_kinds=("discrete",),
            runtime_packages=("no-such-runtime",),
        )
        request = replace(request_here, vendor="absent", target=target)
        specs = {"absent": absent}
        with Workers(home=tmp_path, config=Config(), specs=specs) as workers:
            fit = self.fit(request, workers, devices=(CPU, GPU), specs=specs)
        assert fit.status == status
