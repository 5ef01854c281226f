"""A certificate authority of a test's own, and certificates that it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gemini_ft.security.secret_files import write_secret

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Files in PEM; the key's is 0600."""

    certificate_file: Path
    key_file: Path


class CertificateAuthority:
    """Signs certificates for hosts; `ca_file` is what makes others trust them."""

    def __init__(self, folder: Path, name: str = "test-ca") -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(
            **dict.fromkeys(
                (
                    "digital_signature",
                    "content_commitment",
                    "key_encipherment",
                    "data_encipherment",
                    "key_agreement",
                    "encipher_only",
                    "decipher_only",
                ),
                False,
            ),
            key_cert_sign=True,
            crl_sign=True,
        )
        certificate = (
            _builder(self._name, self._name, self._key, datetime.now(UTC) + _DAY)
            .add_extension(constraints, critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, host: str = "127.0.0.1", expired: bool = False) -> Certificate:
        """Return a certificate for `host`, an address or a name, whether or not it is still good."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            subject = x509.DNSName(host)
        until = datetime.now(UTC) + (-timedelta(minutes=1) if expired else _DAY)
        certificate = (
            _builder(_name(name), self._name, key, until)
            .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        certificate_file = self._folder / f"{name}.pem"
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Certificate(certificate_file, write_secret(self._folder / f"{name}.key", pem.decode()))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - 2 * _DAY)
        .not_valid_after(until)
    )
