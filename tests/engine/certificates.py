"""A certificate authority of one's own, made with the openssl command, and certificates signed by it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


def find_openssl() -> str | None:
    """Return the path of the program, or None if it is missing."""
    return shutil.which("openssl")


@dataclass(frozen=True)
class Certificate:
    """A key and its certificate, as files."""

    key: Path
    certificate: Path


class Authority(Certificate):
    """Signs itself, and others for `127.0.0.1`."""

    @classmethod
    def create(cls, folder: Path, name: str = "ca") -> Authority:
        made = cls(folder / f"{name}.key", folder / f"{name}.crt")
        # Python 3.13 and later refuse an authority that does not say that it may sign.
        may_sign = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        _openssl("req", "-x509", *_new_key(made), "-subj", f"/CN={name}", "-days", "2", *may_sign)
        return made

    def sign(self, name: str) -> Certificate:
        """Issue a certificate for a server at 127.0.0.1, or for a client with this name."""
        key, certificate, request, extensions = (
            self.key.parent / f"{name}.{kind}" for kind in ("key", "crt", "csr", "ext")
        )
        _openssl("req", *_new_key(Certificate(key, request)), "-subj", f"/CN={name}")
        identifiers = "authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        extensions.write_text(f"subjectAltName=IP:127.0.0.1\n{identifiers}")
        words = ["-CA", str(self.certificate), "-CAkey", str(self.key), "-CAcreateserial", "-days", "2"]
        _openssl("x509", "-req", "-in", str(request), *words, "-extfile", str(extensions), "-out", str(certificate))
        return Certificate(key, certificate)


def _new_key(made: Certificate) -> list[str]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    return [*curve, "-keyout", str(made.key), "-out", str(made.certificate)]


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
