"""What people may do to jobs and nodes; each is asked for twice, and done once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from gemini_ft.client.api_client import AsyncApiClient
from gemini_ft.client.call import new_key
from gemini_ft.contracts.api import Decision, JobModel, JobPhase, NodeModel, NodeStatus
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.dashboard.dashboard import Visit
from gemini_ft.dashboard.words import node_name

__all__ = ["Action", "confirm", "job_actions", "node_actions"]

_HOLDABLE = (JobPhase.ASSIGNED, JobPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class Action:
    """A change: its button, what is asked before it is made, and the request, which takes an idempotency key."""

    label: str
    question: str
    request: Callable[[AsyncApiClient, str], Awaitable[Any]]


def job_actions(job: JobModel) -> list[Action]:
    """Return what can be done to a job in its phase."""
    job_id, name, found = job.job_id, job.spec.name, []
    if job.phase in _HOLDABLE:
        found += [
            Action(
                "Checkpoint now",
                f"Let the ranks of {name} make a version at their next step?",
                lambda api, key: api.checkpoint_job(job_id, idempotency_key=key),
            ),
            Action(
                "Stop",
                f"Let {name} come to rest at a committed step? It stays in memory and can be resumed from there.",
                lambda api, key: api.stop_job(job_id, idempotency_key=key),
            ),
        ]
    if job.phase is JobPhase.SUSPENDED:
        found.append(
            Action(
                "Resume",
                f"Let {name} go on from step {job.final_step}?",
                lambda api, key: api.resume_job(job_id, idempotency_key=key),
            )
        )
    if job.phase is JobPhase.BLOCKED:
        found.append(
            Action(
                "Restart from zero",
                f"Let {name} begin again from step 0? What it has trained is lost.",
                lambda api, key: api.decide_job(job_id, Decision.RESTART_FROM_ZERO, idempotency_key=key),
            )
        )
    if job.outcome is None:
        found.append(
            Action(
                "Stop at once",
                f"End {name} now and free its memory? It cannot be resumed.",
                lambda api, key: api.stop_job(job_id, now=True, idempotency_key=key),
            )
        )
    if job.outcome is not None or job.phase in (JobPhase.PENDING, JobPhase.SUSPENDED):
        found.append(
            Action(
                "Delete",
                f"Hide {name} and free what it holds in memory?",
                lambda api, key: api.delete_job(job_id),
            )
        )
    return found


def node_actions(node: NodeModel) -> list[Action]:
    """Return what can be done to a node in its state."""
    node_id, name, found = node.node_id, node_name(node), []
    if not node.draining and node.status is not NodeStatus.FAILED:
        found.append(
            Action(
                "Drain",
                f"Give {name} nothing new, and let its job replace it without losing a step?",
                lambda api, key: api.drain_node(node_id, idempotency_key=key),
            )
        )
    if node.cordoned or node.draining:
        found.append(
            Action(
                "Uncordon",
                f"Let jobs use {name} again?",
                lambda api, key: api.uncordon_node(node_id, idempotency_key=key),
            )
        )
    elif node.status is not NodeStatus.FAILED:
        found.append(
            Action(
                "Cordon",
                f"Give {name} no new slot and no standby's part?",
                lambda api, key: api.cordon_node(node_id, idempotency_key=key),
            )
        )
    if node.job_id is None or node.status is NodeStatus.FAILED:
        found.append(
            Action(
                "Remove",
                f"Forget {name}? Its id is never issued again.",
                lambda api, key: api.remove_node(node_id),
            )
        )
    return found


async def confirm(visit: Visit, action: Action) -> None:
    """Ask whether it is meant, do it, and say how it went."""
    # The button that was pressed may disappear meanwhile.
    with ui.context.client.content:
        await _confirm(visit, action)


async def _confirm(visit: Visit, action: Action) -> None:
    with ui.dialog() as dialog, ui.card().props(f'role="alertdialog" aria-label="{action.label}"'):
        ui.label(action.question)
        with ui.row():
            ui.button(action.label, on_click=lambda: dialog.submit(True)).props("outline no-caps")
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps autofocus")
    agreed = await dialog
    dialog.delete()
    if not agreed:
        return
    try:
        await action.request(visit.api, new_key())
    except GeminiError as error:
        ui.notify(str(error), type="negative", timeout=0, close_button="Close", multi_line=True)
    else:
        ui.notify(f"{action.label}: done, or under way", type="positive")
        visit.feed.hurry()
