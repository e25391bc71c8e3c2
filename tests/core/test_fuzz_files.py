"""Frames, manifests, recordings and YAML that nobody wrote: an error of ours, or sound data."""

import hashlib
import io
import json
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from bundle_examples import RECORDING, REQUEST, publish
from fuzzing import changed_json, fuzz, mutated
from sdkit_dispatch.bundle_signature import PUBLIC, SECRET, new_keys, read_key
from sdkit_dispatch.cache import MANIFEST
from sdkit_dispatch.check import Recording, recording_bytes, recording_from_bytes
from sdkit_dispatch.config import load_config, load_profile, shipped_folder
from sdkit_dispatch.contract import record_to_json
from sdkit_dispatch.errors import CacheError, ConfigError, WorkerError
from sdkit_dispatch.store_explain import explain
from sdkit_dispatch.store_manifest import seal_of
from sdkit_dispatch.wire import Frame, read_frame, write_frame

pytestmark = pytest.mark.filterwarnings("error")


def test_frames():
    stream = io.BytesIO()
    arrays = {"sample": np.ones((2, 3), np.float32), "ids": np.arange(4), "flag": np.array(True)}
    write_frame(stream, Frame(header={"method": "run", "id": 7}, arrays=arrays))
    write_frame(stream, Frame(header={"method": "close"}))

    def check(data: bytes) -> None:
        reader = io.BytesIO(data)
        with suppress(WorkerError):
            while read_frame(reader) is not None:
                pass

    fuzz(mutated(stream.getvalue()), check, examples=150)


class TestManifests:
    @pytest.fixture
    def store(self, tmp_path):
        return publish(tmp_path / "home")

    def check_store(self, store) -> None:
        entry = store.read(REQUEST.key)
        assert entry is not None
        assert [one.key for one in store.entries()] == [REQUEST.key]
        assert store.find(REQUEST.key[:6]) == [entry]
        damage = store.verify(entry)
        assert explain(store, REQUEST).status == ("damaged" if damage else "hit")
        with suppress(CacheError):
            engine, manifest = store.look_up(REQUEST, onnx=Path("model.onnx"))
            assert (engine.key, manifest.request.key, damage) == (REQUEST.key, REQUEST.key, "")

    def test_bytes(self, store):
        file = store.folder(REQUEST.key) / MANIFEST

        def check(data: bytes) -> None:
            file.write_bytes(data)
            self.check_store(store)

        fuzz(mutated(file.read_bytes()), check, examples=150)

    def test_content_that_is_sealed_again(self, store):
        """Whoever can write to the store can also compute a seal."""
        file = store.folder(REQUEST.key) / MANIFEST
        sound = record_to_json(store.read(REQUEST.key).manifest)

        def check(content: object) -> None:
            document = {"sha256": seal_of(content), "manifest": content}
            file.write_text(json.dumps(document))
            self.check_store(store)

        fuzz(changed_json(sound), check, examples=150)


def test_recordings_that_are_sealed_again():
    def check(data: bytes) -> None:
        found = recording_from_bytes(hashlib.sha256(data).digest() + data)
        assert found is None or isinstance(found, Recording)

    fuzz(mutated(recording_bytes(RECORDING)[32:]), check, examples=150)


@pytest.mark.parametrize("name", ["sample", "sd15"])
def test_profiles(name, tmp_path):
    sound = (shipped_folder("profiles") / f"{name}.yaml").read_bytes()
    file = tmp_path / "mine.yaml"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        with suppress(ConfigError):
            load_profile(file, home=tmp_path)

    fuzz(mutated(sound), check, examples=60)


def test_configs(tmp_path):
    sound = (shipped_folder("configs") / "default.yaml").read_bytes()
    file = tmp_path / "mine.yaml"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        with suppress(ConfigError):
            load_config(file, home=tmp_path)

    fuzz(mutated(sound), check, examples=60)


def test_aliases_that_expand_to_gigabytes(tmp_path):
    """Billion laughs, in a profile and in a config."""
    file = tmp_path / "laughs.yaml"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for last, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]")
    file.write_text("\n".join(lines))
    for load in (load_profile, load_config):
        with pytest.raises(ConfigError, match="aliases"):
            load(file, home=tmp_path)


def test_keys(tmp_path):
    secret, public = new_keys()
    file = tmp_path / "key"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        for prefix in (PUBLIC, SECRET):
            with suppress(ConfigError):
                assert read_key(str(file), prefix).startswith(prefix)

    fuzz(mutated(public.encode()) | mutated(secret.encode()) | st.binary(), check, examples=80)
    shutil.rmtree(tmp_path)
