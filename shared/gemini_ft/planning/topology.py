"""Which nodes there are and which failure domains each is in: its host, rack, switch, zone or parallel group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["Topology", "load_topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Labels of each node, and the levels over which replica sets are spread, the most important first.

    `nodes`: name -> {level: domain}, in order of preference. Two nodes are in one domain of a level when their labels
    for it are equal. Of a node without the label nothing is known: it shares its domain with no other node.

    Raises:
        ConfigurationError: a level is given twice.
    """

    nodes: Mapping[str, Mapping[str, str]]
    levels: tuple[str, ...]

    def __post_init__(self) -> None:
        for level in self.levels:
            if self.levels.count(level) > 1:
                raise ConfigurationError(f"the level {level!r} is given twice; name each level once")

    def domains(self, level: str) -> dict[str, tuple[str, ...]]:
        """Return domain -> its nodes, both in order of appearance."""
        members: dict[str, list[str]] = {}
        for node, labels in self.nodes.items():
            if level in labels:
                members.setdefault(labels[level], []).append(node)
        return {domain: tuple(nodes) for domain, nodes in members.items()}


def load_topology(path: Path) -> Topology:
    """Read a topology from a YAML file, or from a JSON file if its name ends in `.json`.

    `nodes` maps each node to its labels (`n0: {rack: a1, zone: a}`) or only lists the nodes. Any other key is a level
    in the plural (or as in `levels`) and maps its domains to their members, nodes or domains of another level:
    `racks: {a1: [n0, n1]}`, `zones: {a: [a1]}`, `parallel_groups: {dp0: [n0, n4]}`. `levels` lists the levels to
    spread over, the most important first; without it all levels count, in the order of the file.

    Raises:
        ConfigurationError: the file cannot be read or makes no sense; the sentence names the line or the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: byte {error.start} is {error.reason}") from error
    try:
        document = _parse_json(text) if path.suffix == ".json" else _parse_yaml(text)
        return _Reader(document).topology()
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _parse_json(text: str) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigurationError(f"the key {key!r} is given twice in one mapping; merge the two")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=without_duplicates, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"line {error.lineno} is not JSON: {error.msg}") from error


def _parse_yaml(text: str) -> Any:
    """Every scalar stays the text that it is: a rack named `no`, `010` or `1e3` is no boolean and no number."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            "reading YAML needs the extra `planning`: pip install 'gemini-ft[planning]'"
        ) from error

    class Loader(yaml.BaseLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigurationError(f"line {line} gives the key {key.value!r} a second time; merge the two")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigurationError(f"line {line} is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"the text is not YAML: {error}") from error


class _Reader:
    """Turns a parsed document into a topology."""

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict):
            raise ConfigurationError("the file must map keys such as `nodes`, `racks` and `levels` to their values")
        self._document = document
        self._nodes: dict[str, dict[str, str]] = {}
        self._levels: list[str] = []
        # level -> domain -> members
        self._compact: dict[str, dict[str, Sequence[str]]] = {}
        self._declared: frozenset[str] | None = None
        self._wanted = _names(document["levels"], "levels") if "levels" in document else None

    def topology(self) -> Topology:
        for key, value in self._document.items():
            if key == "nodes":
                self._read_nodes(value)
            elif key != "levels":
                self._read_level(key, value)
        for level, domains in self._compact.items():
            for domain in domains:
                for node in self._expand(level, domain, ()):
                    self._label(node, level, domain)
        if not self._nodes:
            raise ConfigurationError("there is no node; list some under `nodes` or in a level such as `racks`")
        levels = self._chosen_levels()
        for level in levels:
            without = [node for node, labels in self._nodes.items() if level not in labels]
            if without:
                others = f" and {len(without) - 1} more have" if without[1:] else " has"
                raise ConfigurationError(
                    f"node {without[0]}{others} no {level}; give every node one, or leave {level} out of `levels`"
                )
        return Topology(self._nodes, levels)

    def _read_nodes(self, value: Any) -> None:
        if isinstance(value, list):
            value = {node: {} for node in _names(value, "nodes")}
        labels_of = _mapping(value, "nodes")
        if not labels_of:
            raise ConfigurationError("`nodes` is empty; list some, or leave the key out")
        self._declared = frozenset(labels_of)
        for node, labels in labels_of.items():
            self._nodes[node] = {}
            for level, domain in _mapping(labels, f"nodes.{node}").items():
                self._nodes[node][level] = _name(domain, f"nodes.{node}.{level}")
                self._add_level(level)

    def _read_level(self, key: str, value: Any) -> None:
        if self._wanted is not None and key in self._wanted:
            level = key
        elif key.endswith(("ches", "shes", "xes")):
            level = key[:-2]
        elif key.endswith("s") and key != "s":
            level = key[:-1]
        else:
            raise ConfigurationError(
                f"the key {key!r} is not known; use `nodes`, `levels`, or a level in the plural such as `racks`"
            )
        self._add_level(level)
        self._compact[level] = {
            _name(domain, key): _names(members, f"{key}.{domain}") for domain, members in _mapping(value, key).items()
        }

    def _add_level(self, level: str) -> None:
        if level not in self._levels:
            self._levels.append(level)

    def _expand(self, level: str, domain: str, above: tuple[tuple[str, str], ...]) -> Iterator[str]:
        """Yield the nodes of a domain, whose members may be domains of other levels; it is inside those `above`."""
        where = f"a member of {level} {domain}"
        if (level, domain) in above:
            raise ConfigurationError(f"{level} {domain} is, by way of its members, inside itself; take it out of one")
        for member in self._compact[level][domain]:
            levels = [other for other, domains in self._compact.items() if other != level and member in domains]
            is_node = self._declared is not None and member in self._declared
            if len(levels) + is_node > 1:
                kinds = " and a ".join([*levels, *["node"] * is_node])
                raise ConfigurationError(f"{member}, {where}, is the name of a {kinds}; give each a name of its own")
            if levels:
                yield from self._expand(levels[0], member, (*above, (level, domain)))
            elif is_node or self._declared is None:
                yield member
            else:
                raise ConfigurationError(f"{member}, {where}, is not under `nodes`; add it there")

    def _label(self, node: str, level: str, domain: str) -> None:
        known = self._nodes.setdefault(node, {}).setdefault(level, domain)
        if known != domain:
            raise ConfigurationError(f"node {node} is in two domains of the level {level}, {known} and {domain}")

    def _chosen_levels(self) -> tuple[str, ...]:
        if self._wanted is None:
            return tuple(self._levels)
        for level in self._wanted:
            if level not in self._levels:
                known = ", ".join(self._levels) or "none at all"
                raise ConfigurationError(f"`levels` names {level!r}, but the nodes have these levels: {known}")
        return self._wanted


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"`{where}` must be a mapping, not {_shown(value)}")
    for key in value:
        _name(key, where)
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigurationError(f"`{where}` must be a list of names, not {_shown(value)}")
    names = dict.fromkeys(_name(name, where) for name in value)
    if len(names) < len(value):
        (twice, _), *_ = Counter(value).most_common(1)
        raise ConfigurationError(f"`{where}` lists {twice} more than once")
    return tuple(names)


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"`{where}` must hold names that are text, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value in (None, "") else json.dumps(value)[:40]
