"""Sessions for a first look without anybody's transcripts.

``dialogues/`` holds conversations written for this project (ours, Apache-2.0). The other workloads are read, when
asked for, from what is installed on this machine; nothing of it is copied into the project.
"""

from __future__ import annotations

from spark_agent.demo.sessions import DEMO_KEY, DEMO_WORKLOADS, demo_session_hash, demo_sessions

__all__ = ["DEMO_KEY", "DEMO_WORKLOADS", "demo_session_hash", "demo_sessions"]
