"""Starts a worker: the script that a vendor environment's Python is given.

Our own packages live in the caller's installation. A finder lends exactly those packages to the
worker, so that nothing else of the caller's site-packages comes along: putting that folder on
`sys.path` would. Run as `python worker_boot.py '{"packages": {name: folder}, ...}'`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType


class LentPackages:
    """A meta path finder for a fixed table of top-level packages."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self.folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a lent package; the modules inside are found through its own `__path__`."""
        folder = self.folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    sys.meta_path.insert(0, LentPackages(settings["packages"]))
    from sdkit_dispatch import worker

    worker.serve(settings["adapter"], vendor=settings["vendor"], lifeline=settings.get("lifeline"))
