"""Topologies from files: both forms, and a sentence for every file that makes no sense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.topology import Topology, load_topology

FULL = """
levels: [zone, rack]
nodes:
  n0: {rack: a1, zone: a, model: p4d}
  n1: {rack: a2, zone: a, model: p4d}
  n2: {rack: b1, zone: b, model: p4d}
"""

COMPACT = """
# Zones matter most.
zones: {a: [a1, a2], b: [n2]}
racks:
  a1: [n0]
  a2: [n1]
  b1: [n2]
switches: {s0: [n0, n1, n2]}
"""


def written(tmp_path: Path, text: str, name: str = "topology.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_full_form_gives_each_node_its_labels(tmp_path: Path) -> None:
    topology = load_topology(written(tmp_path, FULL))
    assert topology.levels == ("zone", "rack")
    assert list(topology.nodes) == ["n0", "n1", "n2"]
    assert topology.nodes["n1"] == {"rack": "a2", "zone": "a", "model": "p4d"}
    assert topology.domains("zone") == {"a": ("n0", "n1"), "b": ("n2",)}


def test_the_compact_form_lists_the_members_of_each_domain(tmp_path: Path) -> None:
    topology = load_topology(written(tmp_path, COMPACT))
    assert topology.levels == ("zone", "rack", "switch")
    assert topology.nodes == {
        "n0": {"zone": "a", "rack": "a1", "switch": "s0"},
        "n1": {"zone": "a", "rack": "a2", "switch": "s0"},
        "n2": {"zone": "b", "rack": "b1", "switch": "s0"},
    }


def test_both_forms_together(tmp_path: Path) -> None:
    text = "nodes: {n1: {rack: a}, n0: {rack: b}}\nparallel_groups: {dp0: [n0, n1]}\nlevels: [parallel_group, rack]\n"
    topology = load_topology(written(tmp_path, text))
    assert list(topology.nodes) == ["n1", "n0"]
    assert topology.nodes["n0"] == {"rack": "b", "parallel_group": "dp0"}


def test_a_list_of_nodes_keeps_their_order(tmp_path: Path) -> None:
    topology = load_topology(written(tmp_path, "nodes: [n2, n1]\nracks: {a: [n1, n2]}\n"))
    assert list(topology.nodes) == ["n2", "n1"]


def test_json_is_read_without_yaml(tmp_path: Path) -> None:
    document = {"racks": {"1": ["n0"], "2": ["n1", "n2"]}}
    topology = load_topology(written(tmp_path, json.dumps(document, indent="\t"), "topology.json"))
    assert topology.domains("rack") == {"1": ("n0",), "2": ("n1", "n2")}


def test_names_that_yaml_takes_for_something_else_stay_as_written(tmp_path: Path) -> None:
    topology = load_topology(written(tmp_path, "racks: {no: [n0], 010: [1e3], 12:30: [on]}\n"))
    assert topology.domains("rack") == {"no": ("n0",), "010": ("1e3",), "12:30": ("on",)}


def test_a_level_whose_name_is_no_plural_is_listed_under_levels(tmp_path: Path) -> None:
    assert load_topology(written(tmp_path, "levels: [chassis]\nchassis: {c: [n0]}\n")).levels == ("chassis",)


def test_a_domain_may_bear_the_name_of_its_only_node(tmp_path: Path) -> None:
    assert load_topology(written(tmp_path, "hosts: {n0: [n0], n1: [n1]}\n")).domains("host") == {
        "n0": ("n0",),
        "n1": ("n1",),
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("racks: {a: [n0\n", "line 2 is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("racks:\n  a: [n0]\n  b: [n1]\n  a: [n2]\n", "line 4 gives the key 'a' a second time; merge the two"),
        ("racks: {[a]: [n0]}\n", "line 1 is not YAML: found unhashable key"),
        ("racks: {a: [\x07]}\n", "the text is not YAML: unacceptable character #x0007"),
        ("- n0\n", "the file must map keys"),
        ("", "the file must map keys"),
        ("levels: []\n", "there is no node; list some under `nodes`"),
        ("nodes: []\n", "`nodes` is empty"),
        ("nodes: n0\n", '`nodes` must be a mapping, not "n0"'),
        ("nodes: {n0: [a]}\n", '`nodes.n0` must be a mapping, not ["a"]'),
        ("nodes: {n0: {rack: }}\n", "`nodes.n0.rack` must hold names that are text, not nothing"),
        ("nodes: {n0: {rack: a}, n1: {}, n2: {}}\n", "node n1 and 1 more have no rack; give every node one"),
        ("racks: {a: [n0]}\nzones: {b: [n1]}\n", "node n1 has no rack; give every node one, or leave rack out"),
        ("rack: {a: [n0]}\n", "the key 'rack' is not known; use `nodes`, `levels`, or a level in the plural"),
        ("racks: [n0]\n", '`racks` must be a mapping, not ["n0"]'),
        ("racks: {a: n0}\n", '`racks.a` must be a list of names, not "n0"'),
        ("racks: {a: [n0, n1, n0]}\n", "`racks.a` lists n0 more than once"),
        ("racks: {a: [n0], b: [n0]}\n", "node n0 is in two domains of the level rack, a and b"),
        ("nodes: {n0: {rack: a}}\nracks: {b: [n0]}\n", "node n0 is in two domains of the level rack, a and b"),
        ("nodes: [n0]\nracks: {a: [n0, n7]}\n", "n7, a member of rack a, is not under `nodes`; add it there"),
        ("racks: {a: [z]}\nzones: {z: [a]}\n", "rack a is, by way of its members, inside itself"),
        ("nodes: [a]\nracks: {a: [a]}\nzones: {z: [a]}\n", "a, a member of zone z, is the name of a rack and a node"),
        ("racks: {a: [n0]}\nlevels: [rack, zone]\n", "`levels` names 'zone', but the nodes have these levels: rack"),
        ("racks: {a: [n0]}\nlevels: rack\n", '`levels` must be a list of names, not "rack"'),
    ],
    ids=lambda value: re.sub(r"[^A-Za-z0-9]+", "-", value)[:40],
)
def test_a_file_that_makes_no_sense_gets_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError, match=re.escape(f"{path}: {sentence}")):
        load_topology(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"racks": {\n"a" ["n0"]}}', "line 2 is not JSON: Expecting ':' delimiter"),
        ('{"racks": {"a": ["n0"], "a": ["n1"]}}', "the key 'a' is given twice in one mapping"),
        ('{"racks": {"a": [true]}}', "`racks.a` must hold names that are text, not true"),
    ],
    ids=["syntax", "twice", "boolean"],
)
def test_json_that_makes_no_sense_gets_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        load_topology(written(tmp_path, text, "topology.json"))


def test_a_file_that_cannot_be_read_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.yaml cannot be read: No such file"):
        load_topology(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"racks: {\xe9: [n0]}")
    with pytest.raises(ConfigurationError, match=r"latin\.yaml is not UTF-8 text: byte 8"):
        load_topology(tmp_path / "latin.yaml")


def test_a_level_given_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the level 'rack' is given twice"):
        Topology({"n0": {"rack": "a"}}, ("rack", "zone", "rack"))
