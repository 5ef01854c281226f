"""What a script imports, learned in one life of its ranks for the next.

A rank calls `report_imports` after its first finished step; by then the engine has imported what it imports lazily,
which is most of the cost of a restart. The launcher collects the report and keeps it for later launchers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from gemini_ft.contracts.errors import ProtocolError

__all__ = [
    "LEARNED_IMPORTS_ENV",
    "importable_names",
    "learned_path",
    "read_names",
    "report_imports",
    "reported_path",
    "write_names",
]

LEARNED_IMPORTS_ENV = "GEMINI_FT_LEARNED_IMPORTS"

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_MAX_FILE_BYTES = 4 << 20


def report_imports() -> bool:
    """Report what this process has imported to its launcher; return False where no launcher asks for it.

    Called once per rank life, after the first finished step. Costs a few milliseconds.
    """
    path = os.environ.get(LEARNED_IMPORTS_ENV)
    if not path:
        return False
    write_names(Path(path), importable_names(sys.modules.copy(), sys.path[0]))
    return True


def importable_names(modules: Mapping[str, Any], script_dir: str) -> list[str]:
    """Return the names that another process can import, in the order in which they were imported here.

    Left out: `__main__`, modules made by hand or loaded from a path, and the user's own files in `script_dir`, which
    may change between two lives.
    """
    return [
        name
        for name, module in modules.items()
        if _NAME.fullmatch(name)
        and not name.startswith(("__main__", "__mp_main__"))
        and _spec_named(module, name) is not None
        and not _lies_in(modules, name.partition(".")[0], script_dir)
    ]


def _spec_named(module: Any, name: str) -> ModuleSpec | None:
    spec = getattr(module, "__spec__", None)
    return spec if isinstance(spec, ModuleSpec) and spec.name == name else None


def _lies_in(modules: Mapping[str, Any], name: str, folder: str) -> bool:
    spec = _spec_named(modules.get(name), name)
    if spec is None:
        return True
    if spec.submodule_search_locations:
        place = next(iter(spec.submodule_search_locations))
    elif spec.has_location and spec.origin:
        place = spec.origin
    else:
        return False
    return os.path.realpath(os.path.dirname(place)) == os.path.realpath(folder)


def learned_path(state_dir: Path, target: str) -> Path:
    """Return where the names of `target` (a script's path or a module's name) are kept for this Python."""
    identity = "\n".join([target, sys.version, sys.prefix])
    return state_dir / f"learned-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def reported_path(state_dir: Path, job_id: str, agent_socket: str) -> Path:
    """Return where names are left for the launcher of a job on the node of `agent_socket`; it takes the file away."""
    return state_dir / f"reported-{job_id}-{hashlib.sha256(agent_socket.encode()).hexdigest()[:8]}.json"


def write_names(path: Path, names: list[str]) -> None:
    """Write names so that a reader sees all of them or none."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"modules": names}))
    aside.replace(path)


def read_names(path: Path) -> list[str] | None:
    """Return the names in a file, or None if there is no such file.

    Raises:
        ProtocolError: the file is none that `write_names` wrote.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ProtocolError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; delete it")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    names = content.get("modules") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise ProtocolError(f"{path} is not a list of learned modules; delete it")
    return names
