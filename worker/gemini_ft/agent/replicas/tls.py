"""TLS between agents: both sides show a certificate that the cluster's own authority has signed.

The certificate says that a machine belongs to the cluster; the challenge with the job's key, which covers both
certificates, says who it is in the job. So a member of the cluster that sits in between gets nothing by passing a
challenge on, and certificates need not name the addresses of their nodes.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.security.tls import load_certificate

__all__ = ["PeerTls"]


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Contexts of one agent for both ends of a connection."""

    client_context: ssl.SSLContext
    server_context: ssl.SSLContext
    certificate: bytes
    """What this agent shows, in DER."""

    @classmethod
    def load(cls, certificate_file: Path, key_file: Path, ca_file: Path) -> PeerTls:
        """Read the files.

        Raises:
            ConfigurationError: one of them cannot be used, or others can read the key.
        """
        client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate_file, key_file, ca_file)
        server = _context(ssl.PROTOCOL_TLS_SERVER, certificate_file, key_file, ca_file)
        # A ticket would make an idle connection readable, which means to its owner that the peer has spoken.
        server.num_tickets = 0
        return cls(client, server, ssl.PEM_cert_to_DER_cert(_first_certificate(certificate_file.read_text())))

    def wrap(self, sock: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
        """Take over a connected, non-blocking socket; the handshake is still to come."""
        context = self.server_context if is_server else self.client_context
        return context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)

    def binding(self, peer_certificate: bytes, *, is_server: bool) -> str:
        """Return the same text on both sides of a connection, and another one for each pair of certificates."""
        shown = (peer_certificate, self.certificate) if is_server else (self.certificate, peer_certificate)
        return "/".join(hashlib.sha256(certificate).hexdigest() for certificate in shown)


def _context(protocol: int, certificate_file: Path, key_file: Path, ca_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"--tls-ca-file {ca_file} holds no certificate authority that can be read: {error}"
        ) from error
    load_certificate(context, certificate_file, key_file)
    return context


def _first_certificate(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    return pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]
