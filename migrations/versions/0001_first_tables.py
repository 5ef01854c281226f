"""first tables

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("job_key", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("zero_generation", sa.BigInteger(), nullable=False),
        sa.Column("from_zero", sa.Boolean(), nullable=False),
        sa.Column("waiting_for", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("blocked_by", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("num_fruitless_recoveries", sa.BigInteger(), nullable=False),
        sa.Column("progress_step", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_phase"), "jobs", ["phase"], unique=False)
    op.create_table(
        "generations",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("plan", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_generations_job_id")),
        sa.PrimaryKeyConstraint("job_id", "generation", name=op.f("pk_generations")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("port", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("judged_sequence", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("registered_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_nodes_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("incarnation", name=op.f("uq_nodes_incarnation")),
    )
    op.create_index(op.f("ix_nodes_job_id"), "nodes", ["job_id"], unique=False)
    op.create_table(
        "recoveries",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("finished_step", sa.BigInteger(), nullable=True),
        sa.Column("restored_step", sa.BigInteger(), nullable=True),
        sa.Column("num_steps_lost", sa.BigInteger(), nullable=True),
        sa.Column("phases_ms", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_recoveries_job_id")),
        sa.PrimaryKeyConstraint("job_id", "generation", name=op.f("pk_recoveries")),
    )
    op.create_table(
        "versions",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_versions_job_id")),
        sa.PrimaryKeyConstraint("job_id", "generation", "step", name=op.f("pk_versions")),
    )
    op.create_table(
        "slots",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_slots_job_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_slots_node_id")),
        sa.PrimaryKeyConstraint("job_id", "slot", name=op.f("pk_slots")),
        sa.UniqueConstraint("node_id", name=op.f("uq_slots_node_id")),
    )


def downgrade() -> None:
    op.drop_table("slots")
    op.drop_table("versions")
    op.drop_table("recoveries")
    op.drop_index(op.f("ix_nodes_job_id"), table_name="nodes")
    op.drop_table("nodes")
    op.drop_table("generations")
    op.drop_index(op.f("ix_jobs_phase"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_index("ix_events_job_id_id", table_name="events")
    op.drop_table("events")
