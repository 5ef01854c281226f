"""Versions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from gemini_ft.cli.render.cells import facts, moment, number, table
from gemini_ft.contracts.api import HolderModel, VersionDetailModel, VersionModel

__all__ = ["version_details", "versions_table"]

_NUM_DIGITS = 12


def versions_table(versions: Sequence[VersionModel]) -> Table:
    """One line a version."""
    shown = table(">step", ">generation", "committed")
    for version in versions:
        shown.add_row(number(version.step), number(version.generation), moment(version.committed_at))
    return shown


def version_details(version: VersionDetailModel) -> Group:
    """Who holds what of one version, with the beginnings of the digests that are known."""
    head = facts(
        {
            "step": number(version.step),
            "generation": number(version.generation),
            "committed": "yes" if version.is_committed else "no",
            "recorded": moment(version.committed_at),
            "in memory": "yes" if version.is_in_memory else "no, newer versions have taken its place",
        }
    )
    shards = table(">rank", "sealed everywhere", "holders")
    for rank in version.ranks:
        held = ", ".join(map(_holder, rank.holders))
        shards.add_row(number(rank.rank), "yes" if rank.is_sealed_everywhere else "no", held)
    return Group(head, "", shards)


def _holder(holder: HolderModel) -> str:
    digest = f" {holder.digest[:_NUM_DIGITS]}" if holder.digest else ""
    return f"{holder.slot} ({holder.node_id}){digest}"
