"""holds, drains, tokens and idempotency keys

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("hold_reason", sa.Text(), server_default="", nullable=False))
    op.add_column("jobs", sa.Column("checkpoint_requests", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("checkpoint_after_step", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("final_step", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("nodes", sa.Column("cordoned", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("nodes", sa.Column("draining", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column(
        "nodes",
        sa.Column("operator_labels", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
    )
    op.add_column("nodes", sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("job_ids", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("token_sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("name", name=op.f("uq_tokens_name")),
        sa.UniqueConstraint("token_sha256", name=op.f("uq_tokens_token_sha256")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("etag", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_idempotency_keys_created_at"), table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_table("tokens")
    for column in ("removed_at", "operator_labels", "draining", "cordoned"):
        op.drop_column("nodes", column)
    for column in ("deleted_at", "final_step", "checkpoint_after_step", "checkpoint_requests", "hold_reason"):
        op.drop_column("jobs", column)
