"""What the API shows of jobs, nodes and ranks, and takes for them: all of it is defined in `contracts.api`."""

from __future__ import annotations

from gemini_ft.contracts.api import (
    DecisionRequest,
    EventModel,
    HolderModel,
    JobModel,
    JobRankModel,
    LabelsRequest,
    NodeModel,
    PlacementModel,
    RankModel,
    RankVersionModel,
    RecoveryDetailModel,
    RecoveryModel,
    RequestModel,
    StopRequest,
    VersionDetailModel,
    VersionModel,
)

__all__ = [
    "DecisionRequest",
    "EventModel",
    "HolderModel",
    "JobModel",
    "JobRankModel",
    "LabelsRequest",
    "NodeModel",
    "PlacementModel",
    "RankModel",
    "RankVersionModel",
    "RecoveryDetailModel",
    "RecoveryModel",
    "RequestModel",
    "StopRequest",
    "VersionDetailModel",
    "VersionModel",
]
