"""Files that appear whole or not at all, and notes that know when they are damaged."""

import os

import pytest

from sdkit_dispatch.whole_file import PARTIAL_S, read_note, sweep_partials, write_note, write_whole

VALUE = {"name": "modèle", "numbers": [1, 2.5, None]}


def test_a_note_survives_the_disk(tmp_path):
    write_note(tmp_path / "deep" / "note.json", VALUE)
    assert read_note(tmp_path / "deep" / "note.json") == VALUE
    assert read_note(tmp_path / "none.json") is None


def test_a_note_with_any_bit_flipped_or_cut_anywhere_is_none(tmp_path):
    note = tmp_path / "note.json"
    write_note(note, VALUE)
    content = note.read_bytes()
    for place in range(len(content)):
        note.write_bytes(content[:place])
        assert read_note(note) is None
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            note.write_bytes(flipped)
            assert read_note(note) is None


def test_what_a_killed_writer_left_is_swept_once_it_is_old(tmp_path, monkeypatch):
    def killed(*arguments, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr("pathlib.Path.unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            write_whole(tmp_path / "deep" / "file", b"x")
    (partial,) = (tmp_path / "deep").iterdir()
    assert sweep_partials(tmp_path) == 0
    os.utime(partial, (0, partial.stat().st_mtime - PARTIAL_S - 1))
    assert sweep_partials(tmp_path) == 1
    assert not list((tmp_path / "deep").iterdir())
