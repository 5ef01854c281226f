"""Contexts: which one counts, and a file that nobody else may read."""

import stat
from pathlib import Path

import pytest
from command_line import assert_refused, gemini_ft

from gemini_ft.cli.config import Access, Contexts, access_to, contexts_path, load_contexts, logged_in, save_contexts
from gemini_ft.contracts.errors import ConfigurationError, NotFoundError

PROD, TEST = Access(url="http://prod", token="p"), Access(url="http://test", token="t")


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("GEMINI_FT_API", "GEMINI_FT_API_TOKEN_FILE", "GEMINI_FT_CONTEXT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_contexts() -> None:
    save_contexts(Contexts(current="prod", contexts={"prod": PROD, "test": TEST}))


@pytest.mark.usefixtures("two_contexts")
def test_the_file_is_its_owners_only_and_comes_back_as_it_was() -> None:
    path = contexts_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_contexts() == Contexts(current="prod", contexts={"prod": PROD, "test": TEST})
    assert "token" not in repr(PROD)


@pytest.mark.usefixtures("two_contexts")
def test_a_file_that_others_can_read_is_refused() -> None:
    contexts_path().chmod(0o640)
    assert_refused(gemini_ft("contexts", "list"), "others can read the secret", f"run chmod 600 {contexts_path()}")


@pytest.mark.usefixtures("two_contexts")
def test_a_damaged_file_is_refused() -> None:
    contexts_path().write_text('{"current": 3}')
    assert_refused(gemini_ft("contexts", "list"), "is damaged: current", "remove it and log in again")


@pytest.mark.usefixtures("two_contexts")
def test_the_first_that_is_given_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert access_to() == PROD
    monkeypatch.setenv("GEMINI_FT_CONTEXT", "test")
    assert access_to() == TEST
    monkeypatch.setenv("GEMINI_FT_API", "http://env")
    with pytest.raises(ConfigurationError, match="GEMINI_FT_API_TOKEN_FILE is not; set it"):
        access_to()
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    monkeypatch.setenv("GEMINI_FT_API_TOKEN_FILE", str(token))
    assert access_to() == Access(url="http://env", token="secret")
    assert access_to("prod") == PROD
    token.chmod(0o644)
    with pytest.raises(ConfigurationError, match="GEMINI_FT_API_TOKEN_FILE: others can read"):
        access_to()


def test_without_any_the_way_to_one_is_told() -> None:
    assert_refused(gemini_ft("jobs", "list"), "run `gemini-ft login URL`, or set GEMINI_FT_API")
    with pytest.raises(NotFoundError, match="there is no context 'prod'; known: none"):
        access_to("prod")


@pytest.mark.usefixtures("two_contexts")
def test_contexts_are_listed_chosen_and_removed() -> None:
    assert gemini_ft("contexts", "list").stdout.split() == ["context", "url", "*", "prod", PROD.url, "test", TEST.url]
    assert gemini_ft("contexts", "use", "test").stderr == "test is in use: http://test\n"
    assert load_contexts().current == "test"
    assert gemini_ft("contexts", "remove", "test").code == 0
    assert load_contexts() == Contexts(contexts={"prod": PROD})
    assert '"is_current": false' in gemini_ft("contexts", "list", "--json").stdout
    unknown = gemini_ft("contexts", "use", "test")
    assert (unknown.code, unknown.stderr.startswith("error: there is no context 'test'; known: prod")) == (4, True)


@pytest.mark.usefixtures("two_contexts")
def test_a_passing_context_is_in_use_and_leaves_the_others_as_they_were() -> None:
    before = load_contexts()
    with logged_in("local", TEST):
        assert access_to() == TEST
        with logged_in("local", PROD):
            assert access_to() == PROD
        assert "local" not in load_contexts().contexts
    assert load_contexts() == before
