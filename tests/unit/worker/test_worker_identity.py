"""A rank learns from its environment who it is, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.worker.identity import RankIdentity

GOOD = {
    "GEMINI_FT_AGENT_SOCKET": "/run/a",
    "GEMINI_FT_JOB": "job-1",
    "GEMINI_FT_GENERATION": "3",
    "RANK": "1",
    "WORLD_SIZE": "4",
}


def test_identity_is_read_from_the_environment() -> None:
    assert RankIdentity.from_environment(GOOD) == RankIdentity("job-1", 3, 1, 4, Path("/run/a"))


def test_without_a_socket_the_sentence_says_how_to_start() -> None:
    with pytest.raises(ConfigurationError, match=r"GEMINI_FT_AGENT_SOCKET is not set.*`gemini-ft run`"):
        RankIdentity.from_environment({})


@pytest.mark.parametrize("name", [name for name in GOOD if name != "GEMINI_FT_AGENT_SOCKET"])
def test_each_other_variable_is_required(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is not set although"):
        RankIdentity.from_environment({key: value for key, value in GOOD.items() if key != name})


def test_numbers_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="RANK is 'one'; it must be a whole number"):
        RankIdentity.from_environment(GOOD | {"RANK": "one"})
