"""The source archive of a runtime: fetched or given, compared with its digest, unpacked."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import zipfile
from pathlib import Path

from sdkit_dispatch.contract import Report
from sdkit_dispatch.env.download import download_source
from sdkit_dispatch.errors import ConfigError, VendorEnvError
from sdkit_dispatch.native.recipe import Source

BLOCK_BYTES = 1 << 20
ENDINGS = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")


def archive_digest(given: Path | None, source: Source) -> str:
    """Returns the sha256 of the archive that will be used, before any is fetched.

    Raises:
        ConfigError: The given file is no archive that we can unpack.
    """
    if given is None:
        return source.sha256
    if not given.is_file() or not given.name.endswith(ENDINGS):
        raise ConfigError(
            f"--from is '{given}', which is not a file that ends in {', '.join(ENDINGS)}",
            f"give the source archive of {source.package}",
        )
    return _digest(given)


def unpacked_source(given: Path | None, source: Source, folder: Path, report: Report) -> Path:
    """Fetches the archive, if none is given, and unpacks it. Returns the folder of its CMakeLists.

    Args:
        given: The archive.
        source: Which one to fetch else.
        folder: Empty; archive and source are put into it.
        report: Told of progress.

    Raises:
        VendorEnvError: It cannot be had, or is not what it should be.
    """
    archive = given
    if archive is None:
        archive = download_source(
            source.package, source.version, sha256=source.sha256, to=folder, report=report
        )
        if _digest(archive) != source.sha256:
            raise VendorEnvError(
                f"{archive.name} has the sha256 {_digest(archive)}, and not {source.sha256}",
                "download it again; give another one with --from",
            )
    unpacked = folder / "unpacked"
    try:
        unpacked.mkdir()
        if zipfile.is_zipfile(archive):
            shutil.unpack_archive(archive, unpacked, "zip")
        else:
            with tarfile.open(archive) as opened:
                _extract(opened, unpacked)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise VendorEnvError(f"{archive} cannot be unpacked: {error}") from error
    tops = [path for path in unpacked.iterdir() if path.is_dir()]
    place = (tops[0] if len(tops) == 1 else unpacked) / source.folder
    if not (place / "CMakeLists.txt").is_file():
        raise VendorEnvError(
            f"there is no {source.folder}/CMakeLists.txt in {archive.name}",
            f"give the source archive of {source.package}",
        )
    return place


def _extract(archive: tarfile.TarFile, to: Path) -> None:
    """Unpacks plain files and folders that stay inside; everything else is refused."""
    for member in archive.getmembers():
        is_inside = (to / member.name).resolve().is_relative_to(to.resolve())
        if not is_inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"it holds {member.name}, which is no plain file inside it")
    # Python 3.11.4 and newer warn without a filter; older ones know none.
    filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(to, **filtered)  # type: ignore[arg-type]


def source_name(place: Path, source: Source) -> str:
    """Returns what an unpacked source calls itself: "libggml_python-0.20.2"."""
    parts = len(Path(source.folder).parts)
    return place.parents[parts - 1].name if parts else place.name


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
