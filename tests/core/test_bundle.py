"""Engines from one store to another through a bundle."""

import errno
import io
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from bundle_examples import (
    FILES,
    RECORDING_NAME,
    REQUEST,
    entries_of,
    export,
    publish,
    take,
    tree,
    with_index,
    write_zip,
)
from sdkit_dispatch import bundle, bundle_signature
from sdkit_dispatch.bundle import verify_bundle
from sdkit_dispatch.bundle_file import INDEX, SIGNATURE
from sdkit_dispatch.bundle_fit import Fit
from sdkit_dispatch.bundle_signature import PUBLIC, SECRET, new_keys, read_key, write_keys
from sdkit_dispatch.cache import EngineStore, LaterVerdict, Verdict
from sdkit_dispatch.contract import no_report
from sdkit_dispatch.errors import CacheError, CancelledByUser, ConfigError


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return publish(tmp_path / "home")


@pytest.fixture(scope="module")
def keys() -> tuple[str, str]:
    return new_keys()


@pytest.fixture
def packed(store, tmp_path) -> Path:
    export(store, tmp_path / "a.sdkit")
    return tmp_path / "a.sdkit"


def test_an_engine_arrives_with_its_files_and_unchecked(packed, tmp_path):
    result = take(packed, tmp_path / "there")
    assert [(one.key, one.state) for one in result.engines] == [(REQUEST.key, "added")]
    there = EngineStore(tmp_path / "there")
    engine, manifest = there.look_up(REQUEST, onnx=Path("model.onnx"))
    assert {name: (Path(engine.folder) / name).read_bytes() for name in FILES} == FILES
    assert manifest.verdict.status == "unchecked"
    assert "unsigned" in manifest.verdict.reason
    assert manifest.created_at > "2026-01-01T00:00:00"
    assert there.verify(there.read(REQUEST.key)) == ""
    assert list((there.home / "tmp").iterdir()) == []
    assert (there.home / "references" / "imported" / f"{RECORDING_NAME}.npz").exists()


def test_what_was_never_checked_stays_so(tmp_path):
    store = publish(tmp_path / "home", verdict=Verdict(status="unchecked-target"))
    export(store, tmp_path / "a.sdkit")
    take(tmp_path / "a.sdkit", tmp_path / "there")
    entry = EngineStore(tmp_path / "there").read(REQUEST.key)
    assert entry.manifest.verdict.status == "unchecked-target"


def test_same_content_gives_the_same_bytes(store, packed, tmp_path):
    publish(tmp_path / "other home" / "deeper")
    export(EngineStore(tmp_path / "other home" / "deeper"), tmp_path / "b.sdkit")
    assert packed.read_bytes() == (tmp_path / "b.sdkit").read_bytes()


def test_an_import_changes_nothing_in_a_second_export_but_the_time(packed, tmp_path, monkeypatch):
    take(packed, tmp_path / "there")
    take(packed, tmp_path / "elsewhere")
    for home in ("there", "elsewhere"):
        export(EngineStore(tmp_path / home), tmp_path / f"{home}.sdkit")
    one, other = (entries_of(tmp_path / f"{home}.sdkit") for home in ("there", "elsewhere"))
    assert one.pop(INDEX) is not None
    assert other.pop(INDEX) is not None
    assert one == other


def test_no_words_of_a_runtime_and_no_folder_travel(tmp_path):
    home = tmp_path / "home"
    store = publish(
        home,
        verdict=Verdict(status="unchecked", reason=f"'{home}/x' could not be read"),
        facts={"library": f"{home}/lib.so"},
        earlier=(Verdict(status="failed", reason=f"{home}/y"),),
    )
    export(store, tmp_path / "a.sdkit")
    assert str(home).encode() not in (tmp_path / "a.sdkit").read_bytes()


@pytest.mark.parametrize("coding", ["utf-8", "utf-16-le"])
@pytest.mark.parametrize("before", [0, (1 << 20) - 5, 3 << 20])
def test_an_engine_that_names_a_folder_of_this_machine_is_not_exported(tmp_path, coding, before):
    home = tmp_path / "home"
    data = b"\0" * before + f"{home}/model.onnx".encode(coding) + b"\0" * 100
    store = publish(home, files={"engine.bin": data})
    with pytest.raises(CacheError, match="names a folder of this machine"):
        export(store, tmp_path / "a.sdkit")
    assert not (tmp_path / "a.sdkit").exists()


def test_a_damaged_engine_is_not_exported(store, tmp_path):
    (store.folder(REQUEST.key) / "engine.bin").write_bytes(b"ENGINE" * 100)
    with pytest.raises(CacheError, match="has changed since"):
        export(store, tmp_path / "a.sdkit")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_an_existing_engine_is_kept_and_a_damaged_one_replaced(packed, tmp_path):
    store = publish(tmp_path / "there")
    before = tree(store.folder(REQUEST.key))
    assert take(packed, tmp_path / "there").engines[0].state == "kept"
    assert tree(store.folder(REQUEST.key)) == before
    (store.folder(REQUEST.key) / "engine.bin").write_bytes(b"short")
    assert take(packed, tmp_path / "there").engines[0].state == "added"
    assert store.verify(store.read(REQUEST.key)) == ""


def test_an_engine_does_not_inherit_what_was_said_of_other_bytes_under_its_key(packed, tmp_path):
    """Compilers are not deterministic, and a bundle may hold anything under a key."""
    store = publish(tmp_path / "there", verdict=Verdict(status="unchecked"))
    store.keep_later_verdict(REQUEST.key, "gpu 1", LaterVerdict(verdict=Verdict(status="passed")))
    assert take(packed, tmp_path / "there").engines[0].state == "kept"
    assert store.later_verdict(REQUEST.key, "gpu 1").verdict.status == "passed"
    store.remove(REQUEST.key)
    assert take(packed, tmp_path / "there").engines[0].state == "added"
    assert store.later_verdict(REQUEST.key, "gpu 1") is None


def test_an_option_that_names_a_folder_of_this_machine_is_not_exported(tmp_path):
    home = tmp_path / "home"
    for value in (f"{home}/lib.so", str(home), [{"path": f"{home}/x"}]):
        shutil.rmtree(home, ignore_errors=True)
        store = publish(home, replace(REQUEST, options={"library": value}))
        with pytest.raises(CacheError, match="the manifest of .* names a folder"):
            export(store, tmp_path / "a.sdkit")


def test_a_recording_that_is_there_is_never_replaced(packed, tmp_path):
    place = tmp_path / "there" / "references" / "imported" / f"{RECORDING_NAME}.npz"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"mine")
    take(packed, tmp_path / "there")
    assert place.read_bytes() == b"mine"


class TestAllOrNothing:
    @pytest.fixture
    def two(self, tmp_path) -> Path:
        store = publish(tmp_path / "home")
        publish(tmp_path / "home", replace(REQUEST, component="vae_decoder"))
        export(store, tmp_path / "two.sdkit")
        return tmp_path / "two.sdkit"

    def require_nothing(self, home: Path) -> None:
        assert not list((home / "engines").rglob("manifest.json"))
        assert [path for path in (home / "tmp").glob("*")] == []
        assert not list(home.glob("references/**/*.npz"))

    def test_one_wrong_byte_in_the_last_engine_keeps_out_the_first(self, two, tmp_path):
        entries = list(entries_of(two).items())
        name, data = entries[-2]
        entries[-2] = (name, data[:-1] + bytes([data[-1] ^ 1]))
        write_zip(tmp_path / "bad.sdkit", entries)
        with pytest.raises(CacheError, match="is not what its index says"):
            take(tmp_path / "bad.sdkit", tmp_path / "there", may_misfit=True)
        self.require_nothing(tmp_path / "there")

    def test_cancelling_leaves_nothing(self, two, tmp_path):
        reports = []

        def cancel(progress):
            reports.append(progress)
            if len(reports) == 3:
                raise CancelledByUser

        with pytest.raises(CancelledByUser):
            take(two, tmp_path / "there", report=cancel)
        self.require_nothing(tmp_path / "there")

    def test_cancelling_an_export_leaves_nothing_and_keeps_the_old_file(self, store, tmp_path):
        def cancel(progress):
            raise CancelledByUser

        (tmp_path / "a.sdkit").write_bytes(b"old")
        with pytest.raises(CancelledByUser):
            export(store, tmp_path / "a.sdkit", report=cancel)
        assert (tmp_path / "a.sdkit").read_bytes() == b"old"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.sdkit", "home"]

    def test_a_full_disk_is_named_before_anything_is_written(self, two, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(bundle.shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(CacheError, match="is full") as caught:
            take(two, tmp_path / "there")
        assert caught.value.concerns_store
        assert not (tmp_path / "there").exists()

    def test_a_disk_that_fills_up_meanwhile_is_named(self, two, tmp_path, monkeypatch):
        def full(name, sink, on_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(
            bundle.BundleReader, "copy", lambda self, name, sink, on: full(name, sink, on)
        )
        with pytest.raises(CacheError, match="No space left"):
            take(two, tmp_path / "there")
        self.require_nothing(tmp_path / "there")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
    def test_a_full_disk_is_not_taken_for_a_damaged_bundle(self, two):
        with (
            bundle.open_bundle(two) as reader,
            open("/dev/full", "wb", buffering=0) as sink,
            pytest.raises(OSError, match="No space left"),
        ):
            reader.copy(next(iter(reader.index.files)), sink)


class TestFit:
    def test_an_engine_for_something_else_is_refused_by_name(self, packed, tmp_path):
        for status in ("target", "version"):
            fit = Fit(status=status, message="built for sm_89; here is sm_120")
            with pytest.raises(CacheError, match=f"{status}: built for sm_89") as caught:
                take(packed, tmp_path / "there", fit=lambda request, fit=fit: fit)
            assert "--force" in caught.value.hint
        assert not (tmp_path / "there").exists()

    def test_force_overrides_target_and_version_only(self, packed, tmp_path):
        misfit = {"fit": lambda request: Fit(status="target", message="no"), "may_misfit": True}
        assert take(packed, tmp_path / "there", **misfit).engines[0].message == "no"
        entries = entries_of(packed)
        name = next(name for name in entries if "engine.bin" in name)
        entries[name] = entries[name][::-1]
        write_zip(tmp_path / "bad.sdkit", list(entries.items()))
        with pytest.raises(CacheError, match="damaged"):
            take(tmp_path / "bad.sdkit", tmp_path / "elsewhere", **misfit)

    def test_what_cannot_be_confirmed_is_taken_and_said(self, packed, tmp_path):
        fit = Fit(status="unconfirmed", message="null is not installed")
        result = take(packed, tmp_path / "there", fit=lambda request: fit)
        assert result.engines[0].message == "null is not installed"


class TestSignatures:
    @pytest.fixture
    def signed(self, store, keys, tmp_path) -> Path:
        export(store, tmp_path / "signed.sdkit", secret=keys[0])
        return tmp_path / "signed.sdkit"

    def test_a_trusted_signature_is_named_and_its_engines_are_still_checked(
        self, signed, keys, tmp_path
    ):
        result = take(signed, tmp_path / "there", trusted=[keys[1]], must_be_trusted=True)
        assert (result.signer.status, result.signer.public_key) == ("trusted", keys[1])
        entry = EngineStore(tmp_path / "there").read(REQUEST.key)
        assert entry.manifest.verdict.status == "unchecked"
        assert keys[1] in entry.manifest.verdict.reason

    def test_an_unknown_signer_is_named_and_refused_where_one_was_asked_for(
        self, signed, keys, tmp_path
    ):
        assert take(signed, tmp_path / "there").signer.status == "unknown"
        other = new_keys()[1]
        with pytest.raises(CacheError, match="unknown signer") as caught:
            take(signed, tmp_path / "elsewhere", trusted=[other], must_be_trusted=True)
        assert keys[1] in caught.value.message
        assert other in caught.value.message

    def test_an_unsigned_bundle_is_refused_where_a_signature_was_asked_for(self, packed, tmp_path):
        with pytest.raises(CacheError, match="is not signed"):
            take(packed, tmp_path / "there", must_be_trusted=True)

    @pytest.mark.parametrize("must_be_trusted", [True, False])
    def test_a_changed_index_is_a_bad_signature_whatever_is_asked(
        self, signed, keys, tmp_path, must_be_trusted
    ):
        def forge(index):
            index["engines"][REQUEST.key]["build_s"] = 2.0

        forged = with_index(signed, tmp_path / "forged.sdkit", forge)
        with pytest.raises(CacheError, match="bad signature"):
            take(
                forged,
                tmp_path / "there",
                trusted=[keys[1]],
                must_be_trusted=must_be_trusted,
                may_misfit=True,
            )

    def test_a_signature_of_another_key_in_its_name_is_bad(self, signed, packed, tmp_path):
        entries = entries_of(signed)
        mine = new_keys()[1]
        text = entries[SIGNATURE].decode()
        entries[SIGNATURE] = text.replace(text.split('"')[7], mine).encode()
        assert mine.encode() in entries[SIGNATURE]
        write_zip(tmp_path / "forged.sdkit", list(entries.items()))
        with pytest.raises(CacheError, match="bad signature"):
            take(tmp_path / "forged.sdkit", tmp_path / "there", trusted=[mine])

    def test_without_the_extra_a_signature_is_not_believed_and_not_required(
        self, signed, keys, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(bundle_signature, "_has_extra", lambda: False)
        assert take(signed, tmp_path / "there", trusted=[keys[1]]).signer.status == "unverified"
        for settings in ({"trusted": [keys[1]]}, {}):
            with pytest.raises(ConfigError, match="cryptography") as caught:
                take(signed, tmp_path / "elsewhere", must_be_trusted=True, **settings)
            assert "sdkit-dispatch[sign]" in caught.value.hint

    def test_keys_are_written_once_and_the_secret_one_for_its_owner_only(self, tmp_path):
        public = write_keys(tmp_path / "k")
        assert read_key(str(tmp_path / "k.pub"), PUBLIC) == public
        assert read_key(str(tmp_path / "k"), SECRET).startswith(SECRET)
        if os.name != "nt":
            assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
        before = tree(tmp_path)
        with pytest.raises(ConfigError, match="cannot be written"):
            write_keys(tmp_path / "k")
        assert tree(tmp_path) == before

    def test_a_secret_key_where_a_public_one_is_needed_is_refused_without_showing_it(
        self, tmp_path
    ):
        write_keys(tmp_path / "k")
        with pytest.raises(ConfigError, match="is needed") as caught:
            read_key(str(tmp_path / "k"), PUBLIC)
        secret = (tmp_path / "k").read_text().strip().removeprefix(SECRET)
        assert secret not in str(caught.value)

    @pytest.mark.parametrize("text", ["", "x", PUBLIC, f"{PUBLIC}AAAA", f"{PUBLIC}щщ", "/nowhere"])
    def test_what_is_no_key_is_a_config_error(self, text):
        with pytest.raises(ConfigError):
            read_key(text, PUBLIC)


def test_show_verifies_every_byte_and_takes_nothing(packed, tmp_path):
    before = tree(tmp_path)
    index, signer = verify_bundle(packed, trusted=(), report=no_report)
    assert (list(index.engines), signer.status) == ([REQUEST.key], "unsigned")
    assert tree(tmp_path) == before
    entries = entries_of(packed)
    last = list(entries)[-1]
    entries[last] = entries[last][:-1] + b"x"
    write_zip(tmp_path / "bad.sdkit", list(entries.items()))
    with pytest.raises(CacheError, match="not what its index says"):
        verify_bundle(tmp_path / "bad.sdkit", trusted=(), report=no_report)


def test_a_bundle_that_is_not_there_or_no_file_is_a_config_error(tmp_path):
    for path in (tmp_path / "none", tmp_path, Path("x" * 300), Path("a\0b")):
        with pytest.raises(ConfigError):
            take(path, tmp_path / "there")


def test_progress_grows_to_the_whole(packed, tmp_path):
    fractions = []
    take(packed, tmp_path / "there", report=lambda progress: fractions.append(progress.fraction))
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_an_entry_larger_than_its_manifest_is_not_written_on(store, tmp_path):
    """The pieces stop where the size that was announced ends."""
    from sdkit_dispatch.bundle_file import BundleWriter
    from sdkit_dispatch.cache import StoredFile

    def endless():
        while True:
            yield b"x" * 1000

    with pytest.raises(CacheError, match="has changed"), BundleWriter(io.BytesIO()) as writer:
        writer.write("x", StoredFile(size_bytes=2500, sha256="0" * 64), endless())


def test_a_bundle_does_not_tell_which_device_its_engines_were_checked_on(tmp_path):
    verdict = Verdict(status="passed", device="uuid:GPU-0123, a card, 570.1")
    store = publish(tmp_path / "here", verdict=verdict)
    made = export(store, tmp_path / "a.sdkit")
    assert made.index.engines[REQUEST.key].verdict.device == ""
    assert b"GPU-0123" not in (tmp_path / "a.sdkit").read_bytes()
