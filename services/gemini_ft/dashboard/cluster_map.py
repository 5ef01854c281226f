"""The page's element that shows a cluster: one SVG, to which only what has changed is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from nicegui.element import Element
from nicegui.events import GenericEventArguments

from gemini_ft.contracts.ids import NodeId
from gemini_ft.dashboard.map_model import Arc, ClusterPicture, Look, changes

__all__ = ["ClusterMap", "Legend"]


class ClusterMap(Element, component="cluster_map.js"):
    """A node is picked by click, or with the arrow keys and Enter."""

    def __init__(self, picture: ClusterPicture, label: str, on_pick: Callable[[NodeId], None]) -> None:
        super().__init__()
        self._picture = picture
        self._arcs: tuple[NodeId | None, list[Arc]] = (None, [])
        self._props["first"] = changes(None, picture)
        self._props["label"] = label

        def pick(event: GenericEventArguments) -> None:
            on_pick(str(event.args))

        self.on("pick", pick)

    def show(self, picture: ClusterPicture) -> None:
        """Show the next picture."""
        found = changes(self._picture, picture)
        self._picture = picture
        if found:
            self.run_method("patch", found)

    def show_arcs(self, picked: NodeId | None, arcs: Sequence[Arc]) -> None:
        """Mark a node, and show arcs to and from it instead of those before."""
        if (picked, list(arcs)) != self._arcs:
            self._arcs = (picked, list(arcs))
            self.run_method("show_arcs", picked, [asdict(arc) for arc in arcs])


class Legend(Element, component="legend.js"):
    """What the signs of the map mean."""

    def __init__(self) -> None:
        super().__init__()
        self._props["looks"] = list(Look)
