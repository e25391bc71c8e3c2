"""A store, workers and a builder of the toy pipeline with the null vendor, for tests of builds."""

from pathlib import Path

from sdkit_dispatch.build import Builder
from sdkit_dispatch.build_tools import BuildTools
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import Device, GenerateRequest, Plan, Precision
from sdkit_dispatch.errors import VendorEnvError
from sdkit_dispatch.failures import Failures
from sdkit_dispatch.pipeline_files import read_pipeline
from sdkit_dispatch.reference import Reference
from sdkit_dispatch.wanted import Wanted, wanted
from sdkit_dispatch.workers import Workers
from sdkit_null import SPEC
from toy_pipeline import SIDE_PX

CPU = Device(id="cpu", kind="cpu", maker="unknown", name="a processor")
REQUEST = GenerateRequest(prompt="", width_px=SIDE_PX, height_px=SIDE_PX, steps=2, guidance=3.0)


class Bench:
    """A store and a builder in a folder of their own, and workers."""

    def __init__(self, home: Path, workers: Workers) -> None:
        self.store = EngineStore(home)
        self.workers = workers

    def plan(
        self, *, device: Device = CPU, precision: Precision | None = None, **options: object
    ) -> Plan:
        plan = self.workers.probe(SPEC, device, precision, options)
        assert isinstance(plan, Plan)
        return plan

    def builder(self, **settings: object) -> Builder:
        def never(spec, report):
            raise VendorEnvError("not in this test")

        tools = BuildTools(
            store=self.store,
            workers=self.workers,
            reference=Reference(store=self.store, workers=self.workers, device=CPU),
            failures=Failures(self.store.home),
            **settings,
        )
        return Builder(tools, install=never)

    def want(self, folder: Path, request: GenerateRequest = REQUEST) -> Wanted:
        return wanted(read_pipeline(folder), request, token_chunks=1, memo=self.store.memo)

    def leftovers(self) -> list[Path]:
        folder = self.store.home / "tmp"
        return list(folder.iterdir()) if folder.exists() else []


def new_workers(home: Path, config: Config | None = None) -> Workers:
    return Workers(home=home, config=config or Config(), specs={"null": SPEC})
