"""ed25519 keys and signatures of bundles.

A key is one line of text, so that it can be mailed, pasted and compared by eye. What is signed is
the index of a bundle, which holds the sha256 of everything else.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import CacheError, ConfigError

PUBLIC = "sdkit-ed25519-public:"
SECRET = "sdkit-ed25519-secret:"
KEY_BYTES = 32
SIGNATURE_BYTES = 64
DOMAIN = b"sdkit-dispatch bundle 1\0"
"""Comes before what is signed: a signature of something else is none of a bundle."""
MAX_KEY_FILE_BYTES = 4096
TRUSTED_FOLDER = "trusted-signers"
"""Below the home folder: one `.pub` file for each signer that every import trusts."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Who signed, and the signature; both in base64.

    Attributes:
        public_key: As `bundle keygen` prints it.
    """

    public_key: str
    signature: str
    algorithm: Literal["ed25519"] = "ed25519"


@dataclass(frozen=True, kw_only=True)
class Signer:
    """What is known of who made a bundle.

    Attributes:
        status: "unverified": there is a signature, and nothing here that could check it.
        public_key: Empty if unsigned.
    """

    status: Literal["unsigned", "unverified", "unknown", "trusted"]
    public_key: str = ""

    @property
    def words(self) -> str:
        """The status and the key, for a sentence."""
        if self.status == "unsigned":
            return "unsigned"
        return f"signed by {self.public_key} ({self.status})"


def new_keys() -> tuple[str, str]:
    """Returns a secret key and its public key, a line of text each.

    Raises:
        ConfigError: The extra `sign` is not installed.
    """
    _require_extra()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    secret = SECRET + base64.b64encode(key.private_bytes_raw()).decode()
    return secret, _public_of(key.public_key().public_bytes_raw())


def write_keys(secret_file: Path) -> str:
    """Writes a new secret key that only its owner may read, and FILE.pub; returns the public key.

    Raises:
        ConfigError: A file of that name is there, or cannot be made, or the extra is missing.
    """
    public_file = secret_file.with_name(f"{secret_file.name}.pub")
    secret, public = new_keys()
    written: list[Path] = []
    try:
        for path, text, mode in ((secret_file, secret, 0o600), (public_file, public, 0o644)):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(path)
            with os.fdopen(handle, "w", encoding="ascii") as stream:
                stream.write(f"{text}\n")
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"'{error.filename or secret_file}' cannot be written: {error.strerror or error}",
            "give --out a name that is not taken",
        ) from error
    return public


def sign(data: bytes, secret: str) -> Signature:
    """Returns the signature of `data`.

    Raises:
        ConfigError: It is no secret key, or the extra `sign` is not installed.
    """
    raw = _raw_key(secret, SECRET)
    _require_extra()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(raw)
    return Signature(
        public_key=_public_of(key.public_key().public_bytes_raw()),
        signature=base64.b64encode(key.sign(DOMAIN + data)).decode(),
    )


def judge_signer(
    signature: Signature | None, data: bytes, *, trusted: Iterable[str], must_be_trusted: bool
) -> Signer:
    """Says who signed `data`.

    Args:
        signature: As it stands in the bundle; None without one.
        data: What must have been signed.
        trusted: Public keys.
        must_be_trusted: No other signer, and no missing signature, will do.

    Raises:
        CacheError: The signature is wrong, or not by a trusted signer though it must be.
        ConfigError: It must be checked, and the extra `sign` is not installed.
    """
    known = set(trusted)
    if signature is None:
        if must_be_trusted:
            raise CacheError(
                "the bundle is not signed, and a trusted signature was asked for",
                "ask its maker for one made with --sign, or import it without asking for one",
            )
        return Signer(status="unsigned")
    try:
        public = _raw_key(signature.public_key, PUBLIC)
        raw = _from_base64(signature.signature, SIGNATURE_BYTES)
    except ValueError as error:
        raise CacheError(f"the bundle's signature is none: {error}") from error
    except ConfigError as error:
        raise CacheError(f"the bundle's signature is none: {error.message}") from error
    signer = _public_of(public)
    if must_be_trusted:
        _require_extra()
    if not _has_extra():
        return Signer(status="unverified", public_key=signer)
    if not _is_valid(public, raw, data):
        raise CacheError(
            f"the bundle has a bad signature: it was changed after {signer} signed it, or was "
            "signed by someone else",
            "fetch it again; nothing overrides this",
        )
    if signer in known:
        return Signer(status="trusted", public_key=signer)
    if must_be_trusted:
        raise CacheError(
            f"the bundle is signed by an unknown signer, {signer}; "
            f"trusted are {', '.join(sorted(known)) or 'none'}",
            "import it with --trust and that key, if it is its maker's",
        )
    return Signer(status="unknown", public_key=signer)


def read_key(name: str, prefix: str) -> str:
    """Returns the key that the user gave: the line itself, or a file that holds it.

    Raises:
        ConfigError: It is neither.
    """
    text = name
    if not name.startswith((PUBLIC, SECRET)):
        try:
            with Path(name).open("rb") as stream:
                text = stream.read(MAX_KEY_FILE_BYTES).decode("ascii")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"'{name}' is neither a key nor a file with one: {error}",
                "sdkit-dispatch bundle keygen",
            ) from error
    _raw_key(text.strip(), prefix)
    return text.strip()


def trusted_keys(home: Path, given: Iterable[str]) -> list[str]:
    """Returns the given public keys and those that every import on this machine trusts.

    Raises:
        ConfigError: One is no public key.
    """
    files = sorted((home / TRUSTED_FOLDER).glob("*.pub"))
    return [read_key(name, PUBLIC) for name in (*given, *map(str, files))]


def _is_valid(public: bytes, raw: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(raw, DOMAIN + data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _has_extra() -> bool:
    from importlib.util import find_spec

    return find_spec("cryptography") is not None


def _require_extra() -> None:
    if not _has_extra():
        raise ConfigError(
            "signatures need the package 'cryptography', which is not installed",
            "pip install 'sdkit-dispatch[sign]'",
        )


def _public_of(raw: bytes) -> str:
    return PUBLIC + base64.b64encode(raw).decode()


def _raw_key(text: str, prefix: str) -> bytes:
    if not text.startswith(prefix):
        found = next((one for one in (PUBLIC, SECRET) if text.startswith(one)), "something else")
        raise ConfigError(
            f"a key that starts with '{prefix}' is needed, and this one starts with '{found}'",
            "the file that `bundle keygen` wrote is secret, the one ending in .pub is public",
        )
    try:
        return _from_base64(text.removeprefix(prefix), KEY_BYTES)
    except ValueError as error:
        raise ConfigError(f"what follows '{prefix}' is no key: {error}") from error


def _from_base64(text: str, size_bytes: int) -> bytes:
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError("it is not base64") from error
    if len(raw) != size_bytes:
        raise ValueError(f"it has {len(raw)} bytes, not {size_bytes}")
    return raw
