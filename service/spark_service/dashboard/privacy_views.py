"""What the privacy page says: what came in, field by field, under which rules, and for how long. Pure."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from spark_service.dashboard.render import day_text
from spark_service.db.activity import Received
from spark_service.db.audit import AuditEntry
from spark_service.live import MIN_SESSIONS as MIN_LIVE_SESSIONS
from spark_service.tokens import TokenInfo
from spark_service.windows import WINDOW_STEPS_DAYS

__all__ = [
    "AuditView",
    "DeletionView",
    "Field",
    "PrivacyView",
    "ReceivedView",
    "Rule",
    "TokensView",
    "received_of",
    "rules_of",
]


class Field(BaseModel):
    """One field of what agents upload."""

    name: str
    count: int | None
    """How many of them are stored; null for what is not kept."""
    counted: str
    """What the number counts."""
    meaning: str
    kept: str


class Rule(BaseModel):
    """One threshold or kind of noise in force."""

    name: str
    value: str
    meaning: str


class ReceivedView(BaseModel):
    """Everything that came in."""

    fields: list[Field]
    never: list[str]
    """What no upload has a field for."""
    first_day: str | None
    last_day: str | None
    sessions: int
    deleted_sessions: int
    expired_parts: int


class PrivacyView(BaseModel):
    """The whole page."""

    as_of: datetime | None
    is_current: bool
    received: ReceivedView | None
    """Null while it is being counted."""
    rules: list[Rule]
    retention_days: int
    """0: everything is kept."""


class TokensView(BaseModel):
    """Tokens, the newest first."""

    tokens: list[TokenInfo]
    may_create: bool
    """A service started with --open gives no lasting secrets."""
    default_expiry_days: int
    max_expiry_days: int
    fault: str | None = None
    created: str | None = None
    """The new token, this once."""
    created_id: str | None = None


class AuditView(BaseModel):
    """Some entries of the audit log, the newest first."""

    entries: list[AuditEntry]
    before: int | None
    """Those numbered below it; null: the newest."""
    next_before: int | None
    """To go on; null at the end."""


class DeletionView(BaseModel):
    """A session that somebody wants removed."""

    session_hash: str
    parts: int
    workloads: list[str]
    removed: int | None = None
    """Parts removed, once it is done."""


def received_of(counts: Received) -> ReceivedView:
    """Say of every field what it is and how much of it there is."""
    fields = [
        _field("model", counts.models, "models", "the shape of a model: sizes, expert counts, quantisation, hashes of "
               "sampled weights. The same for everybody who has the file", "once a model"),
        _field("session_hash", counts.sessions, "sessions", "a keyed hash of how a conversation began: tells that two "
               "histograms are of one session, and nothing to whoever lacks the team's key", "with each histogram"),
        _field("split", counts.held_out, "sessions held out", "which side a session is on, a function of its hash: "
               f"{counts.calibration:,} others make profiles, these judge them", "with each histogram"),
        _field("workload", counts.workloads, "names", "the class of work that a person named, such as code-heavy",
               "with each histogram"),
        _field("prefill", counts.prefill, "histograms", "tokens read, and how often each layer chose each expert "
               "while reading; sums, without order", "until retention or deletion"),
        _field("decode", counts.decode, "histograms", "tokens written, and the same sums while writing",
               "until retention or deletion"),
        _field("reuse", counts.decode, "histograms", "how many selections came back after how many other experts, by "
               "layer; sums too", "with decode"),
        _field("live", counts.live, "measurements", "of served sessions: selections, how many missed, bytes of video "
               f"memory for experts; {counts.with_profile:,} followed a manifest and name it", "with each histogram"),
        _field("agent_version", counts.versions, "versions", "which version of spark-agent counted",
               "as numbers of uploads by day, not with histograms"),
        _field("schema_version", None, "", "which version of the format", "not kept"),
        _field("Idempotency-Key", counts.receipts, "receipts", "a random name of an upload, with a hash of its bytes, "
               "so that one sent twice counts once", "for good"),
    ]  # fmt: skip
    return ReceivedView(
        fields=fields,
        never=[
            "text, prompts, answers",
            "token ids or their order",
            "file, folder, host or user names",
            "network addresses",
            "which agent or token sent a histogram",
        ],
        first_day=None if counts.first_day is None else day_text(counts.first_day),
        last_day=None if counts.last_day is None else day_text(counts.last_day),
        sessions=counts.sessions,
        deleted_sessions=counts.deleted_sessions,
        expired_parts=counts.expired_parts,
    )


def rules_of(*, min_sessions: int, window_days: int, half_life_days: int, segment_after_days: int | None) -> list[Rule]:
    """What is in force in this service."""
    rules = [
        Rule(
            name="Sessions behind a profile",
            value=f"at least {min_sessions}",
            meaning="calibration sessions; a profile of fewer is given to nobody, because it would show what is in "
            "each. Of a mix, every workload needs as many",
        ),
        Rule(
            name="Sessions behind a measured rate",
            value=f"at least {MIN_LIVE_SESSIONS}",
            meaning="held-out sessions; means of fewer are not shown. Sizes of video memory are told apart from as "
            "many on",
        ),
        Rule(
            name="Noise",
            value="none",
            meaning="counts and profiles are exact: who may read profiles should be people who may see each other's "
            "counts. Two profiles whose sessions differ by one show that one's counts by subtraction",
        ),
        Rule(
            name="Agents behind a profile",
            value="no minimum",
            meaning="uploads do not say which agent they came from, so agents cannot be counted",
        ),
        Rule(
            name="Windows that readers choose",
            value=f"{', '.join(map(str, WINDOW_STEPS_DAYS[1:]))} days",
            meaning="a few steps, so that single days cannot be taken apart; all sessions otherwise"
            + (f", here the last {window_days} days" if window_days else "")
            + (f", each worth half after {half_life_days} days" if half_life_days else ""),
        ),
        Rule(
            name="Tokens behind a histogram",
            value="at least 2,000",
            meaning="by default, and decided by the agents: smaller sessions are merged with others before they "
            "leave a machine",
        ),
        Rule(
            name="Time of arrival",
            value="the day",
            meaning="is kept with a histogram; the audit log keeps to the second which token sent how many",
        ),
    ]
    if segment_after_days:
        rules.append(
            Rule(
                name="Old histograms",
                value=f"after {segment_after_days} days",
                meaning="move from the database into files beside it; deletion and retention reach them there",
            )
        )
    return rules


def _field(name: str, count: int | None, counted: str, meaning: str, kept: str) -> Field:
    return Field(name=name, count=count, counted=counted, meaning=meaning, kept=kept)
