"""`gemini-ft plan`: placement, probabilities, picture, domains, schedule, refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import assert_refused, gemini_ft

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "planning"


def test_the_installed_command_plans_17_nodes() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("gemini-ft"), "plan", "--nodes", "17", "--replicas", "2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "17 nodes, 2 replicas (the local one counts): share placement" in done.stdout
    assert re.search(r"\* share +9 +93\.382 % +80\.294 % +62\.353 % +2 +3 +1 +2\n", done.stdout)
    assert re.search(r"  mixed +10 +92\.647 % +78\.235 % +58\.824 %", done.stdout)
    assert re.search(r"  ring +17 +87\.500 % +65\.000 % +39\.286 %", done.stdout)
    assert re.search(r"  coded, any 2 of 4 +4 +100 % +96\.765 % +88\.067 % +2 +2 +1\.5", done.stdout)
    assert "group placement is not possible: 2 does not divide 17" in done.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gemini_ft.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'matplotlib', 'numpy', 'simpy', 'yaml'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    for arguments in (["--help"], ["plan", "--help"], ["simulate", "--help"], ["reproduce", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "reproduce" in done.stdout or "Examples:" in done.stdout


def test_a_small_placement_is_drawn_as_a_matrix() -> None:
    done = gemini_ft("plan", "--nodes", 5, "--strategy", "mixed")
    assert "\n     01234\n  0  #o...\n  1  o#...\n  2  ..#.o\n  3  ..o#.\n  4  ...o#\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "picture"),
    [
        ((1000, 2, "best"), ["500 groups of 2 that hold each other's shards: [0 1] [2 3] [4 5] ... [998 999]"]),
        ((1000, 3, "ring"), ["1 ring of 1000, each held by the next 2 too: 0 > 1 > 2 > ... > 999 > 0"]),
        (
            (1001, 2, "mixed"),
            [
                "499 groups of 2 that hold each other's shards: [0 1] [2 3] [4 5] ... [996 997]",
                "1 ring of 3, each held by the next one too: 998 > 999 > 1000 > 998",
            ],
        ),
        ((1001, 2, "share"), ["[0 1] hold the shards of 0 1", "[0 1000] hold the shards of 1000"]),
    ],
)
def test_a_large_placement_is_summarised(arguments: tuple[int, int, str], picture: list[str]) -> None:
    nodes, replicas, strategy = arguments
    done = gemini_ft("plan", "--nodes", nodes, "--replicas", replicas, "--strategy", strategy)
    assert done.code == 0
    for line in picture:
        assert f"  {line}\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 3), (41, 3)])
def test_json_holds_a_whole_placement(nodes: int, replicas: int) -> None:
    found = json.loads(gemini_ft("plan", "--nodes", nodes, "--replicas", replicas, "--json").stdout)
    assert found["slots"] == {str(slot): str(slot) for slot in range(nodes)}
    for node, holders in found["holders"].items():
        assert holders[0] == node
        assert len(set(holders)) == replicas
        assert all(node in found["holds"][holder] for holder in holders)
    assert [option["is_chosen"] for option in found["options"]].count(True) == 1
    assert found["domains"] is None
    assert found["schedule"] is None


def test_bytes_of_memory_and_traffic() -> None:
    found = json.loads(gemini_ft("plan", "--nodes", 17, "--shard-bytes", 75_200_000_000, "--json").stdout)
    assert found["memory_bytes_max"] == 6 * 75.2e9
    assert found["traffic_bytes"] == 75.2e9
    text = gemini_ft("plan", "--nodes", 17, "--shard-bytes", 75_200_000_000).stdout
    assert "300.8 GB of memory (451.2 GB at most), 75.2 GB of traffic a version" in text


def test_the_example_topology_keeps_every_set_apart() -> None:
    topology = EXAMPLES / "racks.yaml"
    found = json.loads(gemini_ft("plan", "--topology", topology, "--json").stdout)
    assert found["num_nodes"] == 16
    assert [level["level"] for level in found["domains"]["levels"]] == ["zone", "rack", "parallel_group"]
    assert all(level["num_sets_sharing"] == 0 for level in found["domains"]["levels"])
    assert all(level["probabilities"]["1"] == 1 for level in found["domains"]["levels"])
    assert found["domains"]["is_optimal"]
    assert found["domains"]["reason"] is None
    text = gemini_ft("plan", "--topology", topology).stdout
    assert "rack (4): none of 8 sets has two members in one; any 1 lost: 100 %, any 2 lost: 66.667 %" in text
    assert "no arrangement is better" in text
    assert "spare" not in text


def test_spare_nodes_and_a_conflict_that_cannot_be_avoided(tmp_path: Path) -> None:
    topology = tmp_path / "racks.yaml"
    topology.write_text("racks: {a: [n0, n1, n2, n3, n4], b: [n5]}\n")
    done = gemini_ft("plan", "--topology", topology, "--nodes", 4)
    assert done.code == 0
    assert "rack (2): 1 of 2 sets have two members in one, 1 all; any 1 lost: " in done.stdout
    assert re.search(r"^  spare: n\d, n\d$", done.stdout, re.MULTILINE)
    reason = json.loads(gemini_ft("plan", "--topology", topology, "--nodes", 4, "--json").stdout)["domains"]["reason"]
    assert reason
    assert reason in done.stdout


def test_the_example_profile_is_scheduled() -> None:
    profile = EXAMPLES / "idle-spans.json"
    found = json.loads(gemini_ft("plan", "--nodes", 16, "--idle-spans", profile, "--json").stdout)["schedule"]
    assert found["interval"] == 1
    assert [one["scheme"] for one in found["predictions"]] == ["blocking", "naive", "one_buffer", "pipelined"]
    assert [one["overhead"] > 0 for one in found["predictions"]] == [True, False, True, False]
    done = gemini_ft("plan", "--nodes", 16, "--idle-spans", profile)
    lines = {
        line.split("|")[0].strip(): line.split("|")[1] for line in done.stdout.splitlines() if line.count("|") == 2
    }
    assert list(lines) == ["blocking", "naive", "one buffer", "pipelined"]
    assert {len(line) for line in lines.values()} == {64}
    assert lines["blocking"].startswith("!!!!")
    assert "!" not in lines["pipelined"]
    assert "#" in lines["pipelined"]
    assert "the spans vary" in done.stdout


def test_a_profile_without_idle_time_still_has_a_plan(tmp_path: Path) -> None:
    profile = tmp_path / "busy.json"
    spans = {"iteration_s": 1, "spans": [], "bandwidth_bytes_per_s": 1e9, "copy_bytes_per_s": 1e9}
    profile.write_text(json.dumps({**spans, "shard_bytes": 10**9, "free_device_bytes": 0}))
    done = gemini_ft("plan", "--nodes", 4, "--idle-spans", profile)
    assert done.code == 0
    assert "no interval is long enough: a checkpoint sends 1000000000 bytes" in done.stdout


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(gemini_ft("plan"), "how many nodes", "--nodes")
    assert_refused(gemini_ft("plan", "--nodes", 1), "num_nodes is 1")
    assert_refused(gemini_ft("plan", "--nodes", 4, "--replicas", 0), "num_replicas is 0")
    assert_refused(gemini_ft("plan", "--nodes", 9, "--strategy", "group"), "leave 1 over")
    assert_refused(gemini_ft("plan", "--nodes", 9, "--strategy", "rnig"), "'rnig'; choose from ring, ")
    assert_refused(gemini_ft("plan", "--nodes", 9, "--shard-bytes", -1), "--shard-bytes is -1")
    assert_refused(gemini_ft("plan", "--topology", tmp_path / "none.yaml"), "none.yaml cannot be read")
    assert_refused(gemini_ft("plan", "--nodes", 99, "--topology", EXAMPLES / "racks.yaml"), "99 slots", "topology")
    broken = tmp_path / "broken.json"
    broken.write_text('{"iteration_s": -1}')
    assert_refused(gemini_ft("plan", "--nodes", 4, "--idle-spans", broken), "broken.json")


def test_the_readme_shows_what_the_command_prints() -> None:
    shown = re.search(r"    gemini-ft plan (--nodes \d+ --replicas \d+)\n\n```text\n(.*?)```", _readme(), re.DOTALL)
    assert shown is not None
    assert gemini_ft("plan", *shown.group(1).split()).stdout == shown.group(2)


def _readme() -> str:
    return (ROOT / "README.md").read_text()
