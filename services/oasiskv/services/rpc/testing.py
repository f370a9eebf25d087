"""Makes certificates for tests of mutual TLS."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from oasiskv.core.service_config import TlsConfig


def make_certificate(
    folder: Path,
    name: str,
    authority: "tuple[Any, Any] | None" = None,
    days: int = 1,
    addresses: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Write `name.pem` and `name.key`: a certificate for 127.0.0.1, further addresses and the name.

    It is an authority if none is given.
    """
    numbers = [x509.IPAddress(ipaddress.ip_address(each)) for each in ("127.0.0.1", *addresses)]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, issuer_key = (subject, key) if authority is None else (authority[0].subject, authority[1])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([*numbers, x509.DNSName(name)]),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / f"{name}.key").write_bytes(pem)
    return certificate, key


def tls_files(folder: Path, name: str, authority: str = "authority") -> TlsConfig:
    """Return where `make_certificate` put what a process of that name needs."""
    return TlsConfig(
        certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / f"{authority}.pem"
    )
