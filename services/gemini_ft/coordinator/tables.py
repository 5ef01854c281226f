"""The tables. `migrations/` builds them; a test compares the two.

Wall-clock times are for people to read; nothing is decided by them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, ForeignKey, Index, MetaData, Text, false, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = ["Base", "Event", "Generation", "IdempotencyKey", "Job", "Node", "Recovery", "Slot", "Token", "Version"]


class Base(DeclarativeBase):
    """Constraint names are spelled out, so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {
        str: Text,
        int: BigInteger,
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[str]: JSONB,
    }


class Job(Base):
    """One training run. (generation, phase) is what every transition compares."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[dict[str, Any]]
    job_key: Mapped[str]
    phase: Mapped[str] = mapped_column(index=True)
    generation: Mapped[int] = mapped_column(default=0)
    zero_generation: Mapped[int] = mapped_column(default=0)
    """Generation of the newest start from zero: versions before it do not count."""
    from_zero: Mapped[bool] = mapped_column(default=False)
    """A person has decided that this generation starts from zero."""
    waiting_for: Mapped[str] = mapped_column(default="")
    cause: Mapped[str] = mapped_column(default="")
    """Why the newest generation began, why the job is blocked, or why it ended."""
    blocked_by: Mapped[list[str]] = mapped_column(default=list)
    """Lost nodes whose memory is missing."""
    num_fruitless_recoveries: Mapped[int] = mapped_column(default=0)
    progress_step: Mapped[int | None]
    hold_reason: Mapped[str] = mapped_column(default="", server_default="")
    """Why the ranks are to be held (a HoldReason)."""
    checkpoint_requests: Mapped[int] = mapped_column(default=0, server_default="0")
    """Rises whenever a person asks for a checkpoint."""
    checkpoint_after_step: Mapped[int | None]
    """The newest step when that was asked: a newer committed version answers it."""
    final_step: Mapped[int | None]
    """The version that a suspended job holds."""
    deleted_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Node(Base):
    """One machine with one agent. `job_id` is the job that it serves, in a slot or as a standby."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    incarnation: Mapped[str] = mapped_column(unique=True)
    hostname: Mapped[str]
    labels: Mapped[dict[str, Any]]
    host: Mapped[str]
    port: Mapped[int]
    status: Mapped[str]
    judged_sequence: Mapped[int] = mapped_column(default=0)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    cordoned: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Gets no new slot and no standby's part."""
    draining: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Its job is to replace it; it is cordoned as well."""
    operator_labels: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """Count more than the agent's own `labels`."""
    removed_at: Mapped[datetime | None]
    registered_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Slot(Base):
    """Who sits where. The keys keep two nodes out of one slot and one node out of two."""

    __tablename__ = "slots"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    slot: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), unique=True)


class Generation(Base):
    """An incarnation of a job; `plan` (a StoredPlan) comes when it is assigned, and never changes."""

    __tablename__ = "generations"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    cause: Mapped[str]
    plan: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Version(Base):
    """A committed version, as heartbeats told it."""

    __tablename__ = "versions"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    committed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Recovery(Base):
    """One recovery: the generation that it made, and how long its phases took. Outcome: open, completed or
    superseded.
    """

    __tablename__ = "recoveries"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    cause: Mapped[str]
    outcome: Mapped[str]
    finished_step: Mapped[int | None]
    """Newest step that any rank had finished before the failure."""
    restored_step: Mapped[int | None]
    num_steps_lost: Mapped[int | None]
    phases_ms: Mapped[dict[str, Any]]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Event(Base):
    """What happened, for people; `id` is the cursor."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job_id_id", "job_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    kind: Mapped[str]
    job_id: Mapped[str | None]
    node_id: Mapped[str | None]
    generation: Mapped[int | None]
    message: Mapped[str]


class Token(Base):
    """A bearer token, of which only the hash is known. `job_ids` None: all jobs."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    job_ids: Mapped[list[str] | None]
    token_sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class IdempotencyKey(Base):
    """The first answer to a request that may be repeated."""

    __tablename__ = "idempotency_keys"

    token_id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_sha256: Mapped[str]
    status: Mapped[int]
    body: Mapped[dict[str, Any]]
    etag: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), index=True)
