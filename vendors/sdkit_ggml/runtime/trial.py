"""Loads a build of ggml in a process of its own and says what it is: run as a script.

What a process has loaded stays loaded, and would take the place of another build's libraries of
the same name. So builds are tried elsewhere before one of them is loaded for good. It imports the
standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys


def main() -> None:
    """Reads the question from the command line and prints the answer, both JSON."""
    question = json.loads(sys.argv[1])
    if sys.platform == "win32":
        os.add_dll_directory(question["folder"])
    base = ctypes.CDLL(question["base"])
    answer: dict[str, object] = {"version": ""}
    if hasattr(base, "ggml_version"):
        base.ggml_version.restype = ctypes.c_char_p
        answer["version"] = base.ggml_version().decode()
    if question["cpu"]:
        ctypes.CDLL(question["cpu"])
    registry = ctypes.CDLL(question["registry"])
    answer["missing"] = [
        name
        for library, names in ((base, question["base_symbols"]), (registry, question["symbols"]))
        for name in names
        if not hasattr(library, name)
    ]
    devices: dict[str, int] = {}
    if not answer["missing"]:
        registry.ggml_backend_load.restype = ctypes.c_void_p
        for name, path in question["modules"].items():
            found = registry.ggml_backend_load(os.fsencode(path))
            if found:
                count = base.ggml_backend_reg_dev_count
                count.restype, count.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
                devices[name] = count(found)
    print(json.dumps({**answer, "devices": devices}))


if __name__ == "__main__":
    main()
