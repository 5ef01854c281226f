"""Scenarios from YAML files, with the files that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.simulation.demo_report import read_demo_report
from gemini_ft.planning.simulation.presets import preset
from gemini_ft.planning.simulation.scenario import Scenario
from gemini_ft.planning.simulation.trace import read_trace

__all__ = ["load_scenario"]


def load_scenario(path: Path) -> Scenario:
    """Return the scenario in the YAML (or JSON) file `path`.

    Beside the fields of `Scenario` it may name a `preset`, whose values hold where the file gives none (a section is
    replaced as a whole). A failure process `{kind: trace, path: FILE}` and a policy `{kind: gemini_ft, report: FILE}`
    read their files, relative to the folder of `path`; the report is that of `gemini-ft demo --json`.

    Raises:
        ConfigurationError: the file cannot be read or is no scenario; the sentence names the file and the line or key.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"the scenario {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the scenario {path} is not a text file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1} of " if mark else ""
        raise ConfigurationError(f"{line}the scenario {path} is no YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"the scenario {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigurationError(f"the scenario {path} must be a mapping of names to values")
    name = data.pop("preset", None)
    base = {} if name is None else dict(preset(str(name)))
    merged = base | {"name": path.stem} | data
    _read_files(merged, path.parent)
    try:
        return Scenario.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigurationError(f"the scenario {path} is wrong: {f'{key}: ' if key else ''}{reason}") from None


def _read_files(data: dict[str, Any], folder: Path) -> None:
    """Replace the names of files by what is in them; what is malformed is left to the model."""
    policy = data.get("policy")
    if isinstance(policy, dict) and "report" in policy:
        report = folder / str(policy["report"])
        data["policy"] = {key: value for key, value in policy.items() if key != "report"}
        data["policy"]["measured"] = read_demo_report(report)
    num_machines = data.get("num_machines")
    if isinstance(data.get("failures"), list) and isinstance(num_machines, int):
        data["failures"] = [
            read_trace(folder / str(process["path"]), num_machines)
            if isinstance(process, dict) and process.get("kind") == "trace" and "path" in process
            else process
            for process in data["failures"]
        ]
