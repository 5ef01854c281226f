"""The proof of the mutual challenge stands for one connection, one role and one key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import AuthenticationError
from gemini_ft.contracts.handshake import check_proof, make_proof, new_job_key, new_nonce

FACTS = ("server", "job-a", "node-a", "node-b", new_nonce(), new_nonce(), "certificates")


def test_the_right_key_passes() -> None:
    key = new_job_key()
    check_proof(make_proof(key, *FACTS), make_proof(key, *FACTS), "node-b", "job-a")


def test_another_key_is_refused_and_the_peer_named() -> None:
    with pytest.raises(AuthenticationError, match=r"node-b .* key of job-a"):
        check_proof(make_proof(new_job_key(), *FACTS), make_proof(new_job_key(), *FACTS), "node-b", "job-a")


@given(position=st.integers(0, len(FACTS) - 1), other=st.text("abcdef0123456789-", min_size=1))
def test_a_proof_is_of_no_use_in_any_other_place(position: int, other: str) -> None:
    changed = list(FACTS)
    changed[position] = other
    key = "ab" * 32
    if tuple(changed) != FACTS:
        assert make_proof(key, *changed) != make_proof(key, *FACTS)


def test_keys_and_nonces_are_fresh() -> None:
    assert len({new_job_key() for _ in range(100)} | {new_nonce() for _ in range(100)}) == 200
