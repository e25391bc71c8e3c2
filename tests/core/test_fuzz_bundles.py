"""Bundles that nobody made: refused as such, or sound; nothing appears outside the store."""

import json
from pathlib import Path

import pytest

from bundle_examples import REQUEST, entries_of, export, publish, sealed, take, tree, write_zip
from fuzzing import changed_json, fuzz, mutated
from sdkit_dispatch.bundle_file import INDEX
from sdkit_dispatch.bundle_signature import new_keys
from sdkit_dispatch.cache import EngineStore
from sdkit_dispatch.errors import CacheError

pytestmark = pytest.mark.filterwarnings("error", "ignore:Duplicate name:UserWarning")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    files = {"engine.bin": b"engine", "weights/part 1.bin": b"weights"}
    export(publish(folder / "home", files=files), folder / "a.sdkit", secret=new_keys()[0])
    return (folder / "a.sdkit").read_bytes()


class Sandbox:
    """A folder with a store in it, to see that nothing else changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        (folder / "precious").write_text("mine")

    def take(self, path: Path) -> bool:
        """Imports a bundle into a new store; False if it was refused."""
        self.number += 1
        home = self.folder / f"home{self.number}"
        before = tree(self.folder)
        try:
            take(path, home, may_misfit=True)
        except CacheError:
            assert not list(home.glob("engines/*/*"))
            is_taken = False
        else:
            store = EngineStore(home)
            assert [store.verify(entry) for entry in store.entries()] == [""]
            is_taken = True
        after = {
            name: data for name, data in tree(self.folder).items() if not name.startswith(home.name)
        }
        assert after == before
        for path in sorted(home.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if home.exists():
            home.rmdir()
        return is_taken


@pytest.fixture
def sandbox(tmp_path) -> Sandbox:
    (tmp_path / "sandbox").mkdir()
    return Sandbox(tmp_path / "sandbox")


def test_bytes(sound, sandbox, tmp_path):
    file = tmp_path / "b.sdkit"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        sandbox.take(file)

    fuzz(mutated(sound), check, examples=150)


def test_indexes_that_are_sealed_again(sound, sandbox, tmp_path):
    (tmp_path / "a.sdkit").write_bytes(sound)
    entries = entries_of(tmp_path / "a.sdkit")
    del entries["signature.json"]
    content = json.loads(entries[INDEX])["bundle"]

    def check(changed: object) -> None:
        rows = [(INDEX, sealed(changed)), *list(entries.items())[1:]]
        sandbox.take(write_zip(tmp_path / "b.sdkit", rows))

    fuzz(changed_json(content), check, examples=100)


def test_the_bundle_that_is_spoilt_above_is_taken(sound, sandbox, tmp_path):
    (tmp_path / "a.sdkit").write_bytes(sound)
    assert sandbox.take(tmp_path / "a.sdkit")
    assert REQUEST.key.encode() in sound
