"""Which imports are learned, and how they are kept."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from gemini_ft.agent.launcher import learning
from gemini_ft.contracts.errors import ProtocolError


def _module(name: str, origin: str | None) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin=origin)
    module.__spec__.has_location = origin is not None
    return module


def test_names_keep_their_import_order_and_leave_out_what_others_cannot_import() -> None:
    modules = {
        "__main__": _module("__main__", "/job/train.py"),
        "zlib": _module("zlib", "/lib/zlib.so"),
        "made_by_hand": ModuleType("made_by_hand"),
        "alias": _module("real_name", "/lib/real_name.py"),
        "abc": _module("abc", "/lib/abc.py"),
        "not a name": _module("not a name", "/lib/x.py"),
    }
    assert learning.importable_names(modules, "/job") == ["zlib", "abc"]


def test_files_beside_the_script_are_not_learned() -> None:
    package = _module("helpers", "/job/helpers/__init__.py")
    assert package.__spec__ is not None
    package.__spec__.submodule_search_locations = ["/job/helpers"]
    modules = {
        "model": _module("model", "/job/model.py"),
        "helpers": package,
        "helpers.data": _module("helpers.data", "/job/helpers/data.py"),
        "json": _module("json", "/lib/json.py"),
    }
    assert learning.importable_names(modules, "/job") == ["json"]


def test_own_modules_are_learned_as_they_are() -> None:
    names = learning.importable_names(sys.modules.copy(), "/nowhere")
    assert {"json", "os", "gemini_ft.agent.launcher.learning"} <= set(names)


def test_report_goes_where_the_launcher_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(learning.LEARNED_IMPORTS_ENV, raising=False)
    assert not learning.report_imports()
    path = tmp_path / "reported.json"
    monkeypatch.setenv(learning.LEARNED_IMPORTS_ENV, str(path))
    assert learning.report_imports()
    names = learning.read_names(path)
    assert names is not None
    assert "json" in names
    assert os.listdir(tmp_path) == ["reported.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"modules": ["ok", "rm -rf"]}', '{"modules": 3}', "\xff"])
def test_a_damaged_list_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "learned.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ProtocolError, match="delete it"):
        learning.read_names(path)


def test_an_oversized_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_text(json.dumps({"modules": ["m" * 100] * 50_000}))
    with pytest.raises(ProtocolError, match="larger"):
        learning.read_names(path)


def test_each_script_has_its_own_list(tmp_path: Path) -> None:
    assert learning.read_names(learning.learned_path(tmp_path, "/a.py")) is None
    assert learning.learned_path(tmp_path, "/a.py") != learning.learned_path(tmp_path, "/b.py")
