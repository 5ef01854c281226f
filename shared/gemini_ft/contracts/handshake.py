"""Mutual challenge with the job key, as pure functions.

Each side proves that it holds the key by an HMAC-SHA256 over both nonces, both names and its role, so that
neither a recorded nor a reflected proof is of use on another connection. The key itself never crosses the
wire. Where the connection is encrypted the proof covers that as well, so that it is of no use to somebody in between.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from gemini_ft.contracts.errors import AuthenticationError

__all__ = ["check_proof", "make_proof", "new_job_key", "new_nonce"]


def new_job_key() -> str:
    """Return a fresh key of 32 random bytes, in hex."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """Return a fresh nonce of 32 random bytes, in hex."""
    return secrets.token_hex(32)


def make_proof(
    job_key: str,
    role: str,
    job_id: str,
    client: str,
    server: str,
    client_nonce: str,
    server_nonce: str,
    binding: str,
) -> str:
    """Return the proof of `role` (`client` or `server`) for this connection, in hex.

    Args:
        binding: what both sides see of the connection's encryption; empty if it has none.
    """
    text = "\n".join(("gemini-ft data plane 1", role, job_id, client, server, client_nonce, server_nonce, binding))
    return hmac.new(bytes.fromhex(job_key), text.encode(), hashlib.sha256).hexdigest()


def check_proof(proof: str, expected: str, who: str, job_id: str) -> None:
    """Compare in constant time.

    Raises:
        AuthenticationError: `who` does not hold the key of the job.
    """
    if not hmac.compare_digest(proof, expected):
        raise AuthenticationError(
            f"{who} does not hold the key of {job_id}; it belongs to another job or cluster and was refused"
        )
