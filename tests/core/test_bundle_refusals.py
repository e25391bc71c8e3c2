"""Bundles that somebody made to do harm: each is refused, and nothing appears anywhere."""

import hashlib
import json
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bundle_examples import (
    RECORDING,
    RECORDING_NAME,
    REQUEST,
    entries_of,
    export,
    npz,
    publish,
    sealed,
    take,
    tree,
    with_index,
    write_zip,
)
from sdkit_dispatch import bundle_file
from sdkit_dispatch.bundle_file import INDEX, MODE, SIGNATURE
from sdkit_dispatch.bundle_names import collision, name_fault
from sdkit_dispatch.check import recording_bytes, recording_from_bytes
from sdkit_dispatch.errors import CacheError

ENGINE = f"engines/{REQUEST.key}/"
A_DIGEST = "0" * 64


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    export(publish(folder / "home"), folder / "a.sdkit")
    return folder / "a.sdkit"


@pytest.fixture
def refused(tmp_path) -> Callable:
    """Imports a bundle with everything allowed that can be; nothing may appear."""

    def check(path: Path, words: str) -> None:
        before = tree(tmp_path)
        with pytest.raises(CacheError, match=words):
            take(path, tmp_path / "there", may_misfit=True)
        assert {
            name: data for name, data in tree(tmp_path).items() if "there" not in name
        } == before
        left = [
            path
            for path in tmp_path.glob("there/**/*")
            if path.is_file() and path.suffix != ".lock" and path.name != "LAYOUT"
        ]
        assert left == []

    return check


NAMES = {
    "../../evil": "relative",
    "/etc/cron.d/evil": "relative",
    "a/../../evil": "relative",
    "./a": "relative",
    "a//b": "relative",
    "": "relative",
    "C:\\Windows\\evil.dll": "character",
    "C:/evil": "character",
    "a\\..\\evil": "character",
    "\\\\server\\share\\evil": "character",
    "engine.bin:stream": "character",
    "a\0b": "character",
    "a\nb": "character",
    "\x1b[2Jevil": "character",
    "\u202egnp.exe": "character",
    "\ud800": "Unicode",
    "nul": "device",
    "aux.bin": "device",
    "a/COM1.txt": "device",
    "con .x": "device",
    "COM¹": "device",
    "dot.": "ends with",
    "space ": "ends with",
    "...": "ends with",
    "x" * 201: "longer than",
    "/".join("abcdefghi"): "9 parts",
    "/".join(["x" * 150] * 3): "bytes",
    "manifest.json": "reserved",
    "Manifest.JSON": "reserved",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_that_could_mean_another_file_is_refused(name, sound, tmp_path, refused):
    def rename(content):
        files = content["engines"][REQUEST.key]["files"]
        files[name] = files.pop("engine.bin")

    refused(with_index(sound, tmp_path / "bad.sdkit", rename), NAMES[name])


@pytest.mark.parametrize("name", ["a b.bin", "模型/重み.bin", "a.b.c", "console", "é", ".hidden"])
def test_an_ordinary_name_is_fine(name):
    assert name_fault(name) == ""


@pytest.mark.parametrize(
    "names",
    [
        ["Engine.bin", "engine.bin"],
        ["a/x", "A/y"],
        ["a", "a/b"],
        ["A/b", "a"],
        ["straße", "STRASSE"],
        ["\u00e9", "e\u0301"],
        ["\u212a", "k"],
    ],
)
def test_names_that_are_one_file_on_some_system_collide(names):
    assert collision(names)
    assert collision(reversed(names))


def test_names_in_folders_of_one_spelling_do_not_collide():
    assert collision(["a/x", "a/y", "a/b/x", "b/x"]) == ""


def test_colliding_names_are_refused(sound, tmp_path, refused):
    def twice(content):
        files = content["engines"][REQUEST.key]["files"]
        files["ENGINE.bin"] = files["engine.bin"]

    refused(with_index(sound, tmp_path / "bad.sdkit", twice), "folds case")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda rows: [*rows, ("../evil", b"x")], "relative"),
        (lambda rows: [*rows, ("engines/extra", b"x")], "in one only"),
        (lambda rows: [*rows, rows[-1]], "twice, or moved"),
        (lambda rows: [*rows, (f"{ENGINE}new/", b"")], "relative"),
        (lambda rows: rows[:-1], "in one only"),
        (lambda rows: [rows[0], *rows[:0:-1]], "moved"),
        (lambda rows: rows[1:], "first entry"),
        (lambda rows: [*rows[1:], rows[0]], "first entry"),
        (lambda rows: [rows[0], (SIGNATURE, b"{}"), *rows[1:]], "signature.json"),
        (lambda rows: [rows[0], (SIGNATURE, b"x" * 5000), *rows[1:]], "at most 4096"),
        (lambda rows: [], "first entry"),
        (lambda rows: [(INDEX, b"{}"), *rows[1:]], "not the index"),
        (lambda rows: [(INDEX, b"[" * 100_000), *rows[1:]], "not JSON"),
        (lambda rows: [(INDEX, b'{"a":' * 100_000), *rows[1:]], "not JSON"),
    ],
)
def test_entries_that_are_not_those_of_the_index_are_refused(edit, words, sound, tmp_path, refused):
    rows = edit(list(entries_of(sound).items()))
    refused(write_zip(tmp_path / "bad.sdkit", rows), words)


def test_a_file_that_only_the_directory_renames_is_refused(sound, tmp_path, refused):
    """The local header says one name, the directory another."""
    data = bytearray(sound.read_bytes())
    name = f"{ENGINE}engine.bin".encode()
    place = data.index(name)
    data[place : place + len(name)] = name.replace(b"engine.bin", b"ENGINE.bin")
    (tmp_path / "bad.sdkit").write_bytes(data)
    refused(tmp_path / "bad.sdkit", "differ")


@pytest.mark.parametrize(
    "kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFDIR, 0]
)
def test_links_devices_pipes_and_folders_are_refused(kind, sound, tmp_path, refused):
    def change(info):
        if info.filename.endswith("engine.bin"):
            info.external_attr = (kind | 0o777) << 16

    rows = [
        (name, b"/etc/passwd" if name.endswith("engine.bin") else data)
        for name, data in entries_of(sound).items()
    ]
    refused(write_zip(tmp_path / "bad.sdkit", rows, change=change), "special file")


def test_a_compressed_entry_is_refused_so_there_are_no_bombs(sound, tmp_path, refused):
    bad = tmp_path / "bad.sdkit"
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries_of(sound).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = MODE << 16
            archive.writestr(
                info, data, zipfile.ZIP_STORED if name == INDEX else zipfile.ZIP_DEFLATED
            )
    refused(bad, "compressed")


def test_entries_that_share_their_bytes_are_refused(sound, tmp_path, refused):
    """A small file that claims much content: every directory entry points to the same bytes."""

    def many(content):
        files = content["engines"][REQUEST.key]["files"]
        for number in range(2000):
            files[f"copy{number:04}"] = files["weights/part 1.bin"]

    listed = with_index(sound, tmp_path / "listed.sdkit", many)
    rows = dict.fromkeys(
        json.loads(entries_of(listed)[INDEX])["bundle"]["engines"][REQUEST.key]["files"]
    )
    content = entries_of(sound)
    real = content[f"{ENGINE}weights/part 1.bin"]
    bad = tmp_path / "bad.sdkit"
    with zipfile.ZipFile(bad, "w") as archive:
        for name, data in [
            (INDEX, entries_of(listed)[INDEX]),
            (f"{ENGINE}copy0000", real),
        ]:
            info = zipfile.ZipInfo(name)
            info.external_attr = MODE << 16
            archive.writestr(info, data)
        template = archive.infolist()[-1]
        for name in sorted(rows):
            if name != "copy0000":
                twin = zipfile.ZipInfo(f"{ENGINE}{name}")
                for field in (
                    "external_attr",
                    "CRC",
                    "compress_size",
                    "file_size",
                    "header_offset",
                ):
                    setattr(twin, field, getattr(template, field))
                archive.filelist.append(twin)
        archive._didModify = True
    refused(bad, "claims|in one only|Overlapped")


@pytest.mark.parametrize("field", ["compress", "size", "flags"])
def test_a_header_that_lies_is_refused(field, sound, tmp_path, refused):
    data = bytearray(sound.read_bytes())
    place = data.rindex(b"PK\x01\x02")  # the directory's last entry
    offset, size, value = {
        "compress": (20, "<I", 1 << 30),
        "size": (24, "<I", 1 << 30),
        "flags": (8, "<H", 1),
    }[field]
    struct.pack_into(size, data, place + offset, value)
    (tmp_path / "bad.sdkit").write_bytes(data)
    refused(tmp_path / "bad.sdkit", "compressed|encrypted")


def test_an_enormous_directory_is_not_read(tmp_path):
    """The end of the file claims a directory of 1 GB; the file is long enough for it."""
    bad = tmp_path / "bad.sdkit"
    with bad.open("wb") as stream:
        stream.truncate(1 << 30)  # a hole: it takes no room
        stream.seek(0, os.SEEK_END)
        stream.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 9, 9, 1 << 30, 0, 0))
    with pytest.raises(CacheError, match="has more than"), bundle_file.open_bundle(bad):
        pass
    bad.unlink()


INDEX_EDITS = {
    "another key": lambda c: c["engines"].update({A_DIGEST: c["engines"].pop(REQUEST.key)}),
    "another request": lambda c: c["engines"][REQUEST.key]["request"].update(runtime="null 2"),
    "another schema": lambda c: c.update(schema=2),
    "no schema": lambda c: c.pop("schema"),
    "another schema of a manifest": lambda c: c["engines"][REQUEST.key].update(schema=9),
    "no engine": lambda c: c.update(engines={}),
    "no file": lambda c: c["engines"][REQUEST.key].update(files={}),
    "a negative size": lambda c: c["engines"][REQUEST.key]["files"]["engine.bin"].update(
        size_bytes=-1
    ),
    "an absurd size": lambda c: c["engines"][REQUEST.key]["files"]["engine.bin"].update(
        size_bytes=1 << 62
    ),
    "a size beyond 64 bits": lambda c: c["engines"][REQUEST.key]["files"]["engine.bin"].update(
        size_bytes=1 << 90
    ),
    "no digest": lambda c: c["engines"][REQUEST.key]["files"]["engine.bin"].update(sha256="zz"),
    "an escape sequence": lambda c: c["engines"][REQUEST.key].update(tool="\x1b]0;evil\x07"),
    "a path as recording": lambda c: c["references"].update(
        {"../x": c["references"][RECORDING_NAME]}
    ),
    "a huge recording": lambda c: c["references"][RECORDING_NAME].update(size_bytes=1 << 40),
    "too many recordings": lambda c: c["references"].update(
        {f"{number:064x}": c["references"][RECORDING_NAME] for number in range(99)}
    ),
    "too many files": lambda c: c["engines"][REQUEST.key]["files"].update(
        {f"f{number}": {"size_bytes": 0, "sha256": A_DIGEST} for number in range(5000)}
    ),
    "a list of engines": lambda c: c.update(engines=[]),
    "not a number": lambda c: c["engines"][REQUEST.key].update(build_s=float("nan")),
}
INDEX_WORDS = {
    "another key": "by its own request",
    "another request": "by its own request",
    "another schema": "has the schema 2",
    "no schema": "has the schema None",
    "another schema of a manifest": "has the schema 9",
    "no engine": "no engine",
    "no file": "has no file",
    "a negative size": "no size",
    "an absurd size": "bytes, not",
    "a size beyond 64 bits": "bytes, not",
    "no digest": "no size and sha256",
    "an escape sequence": "cannot be shown",
    "a path as recording": "not a recording",
    "a huge recording": "not a recording",
    "too many recordings": "100 recordings",
    "too many files": "5002 files",
    "a list of engines": "not what this version writes",
    "not a number": "NaN is no number",
}


@pytest.mark.parametrize("what", INDEX_EDITS)
def test_an_index_that_cannot_be_true_is_refused(what, sound, tmp_path, refused):
    refused(with_index(sound, tmp_path / "bad.sdkit", INDEX_EDITS[what]), INDEX_WORDS[what])


def test_an_index_that_was_changed_is_refused_without_any_signature(sound, tmp_path, refused):
    entries = entries_of(sound)
    entries[INDEX] = entries[INDEX].replace(b'"fp32"', b'"fp16"')
    refused(write_zip(tmp_path / "bad.sdkit", list(entries.items())), "has changed")


def test_a_request_that_is_forged_with_its_key_lands_under_that_key_only(sound, tmp_path):
    """Whoever computes the key again made another engine; it hides no other."""
    other = replace(REQUEST, runtime="null 2")

    def forge(content):
        manifest = content["engines"].pop(REQUEST.key)
        manifest["request"]["runtime"] = "null 2"
        content["engines"][other.key] = {**manifest, "key": other.key}

    entries = entries_of(sound)
    content = json.loads(entries[INDEX])["bundle"]
    forge(content)
    rows = [
        (name.replace(REQUEST.key, other.key), sealed(content) if name == INDEX else data)
        for name, data in entries.items()
    ]
    take(write_zip(tmp_path / "b.sdkit", rows), tmp_path / "there")
    assert [path.name for path in (tmp_path / "there" / "engines").glob("*/*")] == [other.key]


def npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + data


def header_of(descr: str, shape: str, order: str = "False") -> bytes:
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}".encode()


SOUND_ARRAYS = {
    "reference.npy": npy(header_of("<U1", "()"), "x".encode("utf-32-le")),
    "unet/0/feeds/x.npy": npy(header_of("<f4", "()"), bytes(4)),
    "unet/0/outputs/y.npy": npy(header_of("<f4", "(2,)"), bytes(8)),
}


def with_array(name: str, data: bytes) -> bytes:
    return npz({**SOUND_ARRAYS, name: data})


FEED = "unet/0/feeds/x.npy"
RECORDINGS = {
    "a petabyte": with_array(FEED, npy(header_of("<f4", "(1125899906842624,)"))),
    "2^63 twice": with_array(FEED, npy(header_of("<f4", f"({2**63}, {2**63})"))),
    "a product that wraps around to nothing": with_array(
        FEED, npy(header_of("<f4", f"({2**32}, {2**32})"))
    ),
    "a negative size": with_array(FEED, npy(header_of("<f4", "(-1,)"), bytes(4))),
    "objects": with_array(FEED, npy(header_of("|O", "(1,)"), b"cos\nsystem\n")),
    "code as header": with_array(FEED, npy(b"{'descr': __import__('os').system('id')}")),
    "a deep header": with_array(FEED, npy(b"(" * 60_000)),
    "texts of no size": with_array(FEED, npy(header_of("<U0", f"({2**40},)"))),
    "a bomb": npz(
        {**SOUND_ARRAYS, FEED: npy(header_of("<f4", "(25000000,)"), bytes(100_000_000))},
        compression=zipfile.ZIP_DEFLATED,
    ),
    "a path": with_array("../../x.npy", npy(header_of("<f4", "()"), bytes(4))),
    "a bad index": with_array("unet/x/feeds/x.npy", npy(header_of("<f4", "()"), bytes(4))),
    "a bad side": with_array("unet/0/other/x.npy", npy(header_of("<f4", "()"), bytes(4))),
    "a bad text": with_array("reference.npy", npy(header_of("<U1", "()"), b"\xff" * 4)),
    "an escape sequence": with_array(
        "reference.npy", npy(header_of("<U1", "()"), "\x1b".encode("utf-32-le"))
    ),
    "no maker": npz({FEED: SOUND_ARRAYS[FEED]}),
    "no zip file": b"PK",
    "nothing": b"",
}


def read_sealed(data: bytes) -> object:
    return recording_from_bytes(hashlib.sha256(data).digest() + data)


def test_the_recording_that_is_spoilt_below_is_sound():
    assert read_sealed(npz(SOUND_ARRAYS)).reference == "x"


@pytest.mark.parametrize("what", RECORDINGS)
def test_a_recording_that_was_made_to_do_harm_is_damaged(what):
    assert read_sealed(RECORDINGS[what]) is None


def test_a_recording_comes_back_as_it_was():
    found = recording_from_bytes(recording_bytes(RECORDING))
    assert found.reference == RECORDING.reference
    (case,), (expected,) = found.cases["unet"], RECORDING.cases["unet"]
    for side in ("feeds", "outputs"):
        arrays, wanted = getattr(case, side), getattr(expected, side)
        assert set(arrays) == set(wanted)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, wanted[name], strict=True)
            array[...] = 0  # the caller may keep and change it


def test_a_damaged_recording_keeps_its_bundle_out(tmp_path, refused):
    store = publish(tmp_path / "home")
    export(store, tmp_path / "a.sdkit", references={RECORDING_NAME: b"not a recording"})
    refused(tmp_path / "a.sdkit", "recording 9999")
