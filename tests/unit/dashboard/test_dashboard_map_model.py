"""The picture of a cluster: where nodes stand, how they look, and what is sent when something changes."""

from __future__ import annotations

from typing import Any

import pytest
from api_examples import job, node, rank

from gemini_ft.contracts.api import NodeModel, PlacementModel, VersionDetailModel
from gemini_ft.dashboard.map_model import (
    Arc,
    ClusterPicture,
    Look,
    arcs_of_node,
    arcs_of_rank,
    changes,
    cluster_picture,
    look_of,
)

JOB = job()


def member(number: int, slot: int | None, **values: Any) -> NodeModel:
    return node(number, job_id=JOB.job_id, slot=slot, **values)


def picture(*nodes: NodeModel) -> ClusterPicture:
    return cluster_picture(nodes, {JOB.job_id: JOB})


@pytest.mark.parametrize(
    ("shown", "look"),
    [
        (node(1), Look.FREE),
        (member(1, 0), Look.TRAINING),
        (member(1, None), Look.STANDBY),
        (node(1, cordoned=True), Look.CORDONED),
        (member(1, 0, cordoned=True, draining=True), Look.DRAINING),
        (node(1, cordoned=True, draining=True), Look.CORDONED),
        (node(1, heard_s_ago=None), Look.SILENT),
        (member(1, 0, status="suspected"), Look.SUSPECTED),
        (member(1, 0, status="failed", draining=True), Look.FAILED),
    ],
)
def test_a_node_looks_like_what_matters_most(shown: NodeModel, look: Look) -> None:
    assert look_of(shown) is look


def test_nodes_stand_in_their_racks_and_in_nobody_elses_place() -> None:
    nodes = [node(n, labels={"zone": f"z{n % 3}", "rack": f"r{n % 7}"}) for n in range(1000)]
    shown = picture(*nodes)
    assert {rack.label for rack in shown.racks} == {f"zone z{n % 3}, rack r{n % 7}" for n in range(21)}
    corners = {(cell.x, cell.y) for cell in shown.cells.values()}
    assert len(corners) == len(nodes)
    for cell in shown.cells.values():
        homes = [
            rack
            for rack in shown.racks
            if rack.x <= cell.x
            and cell.x + shown.side <= rack.x + rack.width
            and rack.y <= cell.y
            and cell.y + shown.side <= rack.y + rack.height
        ]
        assert len(homes) == 1
        assert cell.x + shown.side <= shown.width
        assert cell.y + shown.side <= shown.height


def test_racks_come_in_the_order_of_their_numbers() -> None:
    shown = picture(*(node(n, labels={"rack": f"r{n}"}) for n in (10, 9, 100)), node(1))
    assert [rack.label for rack in shown.racks] == ["no rack", "rack r9", "rack r10", "rack r100"]


def test_what_is_said_of_a_node_names_state_job_slot_and_ranks() -> None:
    shown = picture(member(1, 3, assigned_generation=2, ranks=[rank(3, 2), rank(3, 1)]))
    (cell,) = shown.cells.values()
    assert cell.text == "host1, in a job, job job 1, slot 3, rank 3 running"


def test_only_what_has_changed_is_sent() -> None:
    before = picture(node(1), node(2), node(3))
    after = picture(node(1), node(2, status="failed"), node(3))
    assert changes(before, before) == {}
    change = changes(before, after)
    assert set(change) == {"cells"}
    assert [cell["look"] for cell in change["cells"].values()] == [Look.FAILED]
    assert set(changes(None, before)) == {"frame", "cells"}


def test_nodes_that_are_gone_are_told() -> None:
    change = changes(picture(node(1), node(2)), picture(node(1)))
    assert change["gone"] == [node(2).node_id]


def test_arcs_lead_to_the_holders_and_come_from_those_whose_shards_are_held() -> None:
    slots = {slot: node(slot).node_id for slot in range(4)}
    placement = PlacementModel(placement={0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2, 0)}, slots=slots)
    assert arcs_of_node(member(0, 0), placement) == [
        Arc(slots[0], slots[1]),
        Arc(slots[1], slots[0]),
        Arc(slots[3], slots[0]),
    ]
    assert arcs_of_node(member(9, None), placement) == []


def test_arcs_of_a_rank_tell_which_copies_are_not_whole() -> None:
    holders = [{"slot": slot, "node_id": node(slot).node_id, "digest": None} for slot in range(3)]
    ranks = [{"rank": number, "is_sealed_everywhere": number == 0, "holders": holders[:2]} for number in range(2)]
    told = {"step": 5, "generation": None, "committed_at": None, "is_committed": False, "is_in_memory": True}
    version = VersionDetailModel.model_validate({**told, "ranks": ranks})
    here, there = node(0).node_id, node(1).node_id
    assert arcs_of_rank(0, here, version) == [Arc(here, there, is_whole=True)]
    assert arcs_of_rank(1, here, version) == [Arc(here, there, is_whole=False)]
    assert arcs_of_rank(7, here, version) == []
