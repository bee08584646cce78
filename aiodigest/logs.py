"""The log: each line of an engine names its namespace, as there may be several engines in a process. Channels and
callbacks may log like this too."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

__all__ = ["current_namespace", "logger_of"]

# Set in the context in which an engine runs its tasks: whatever they log is about it.
NAMESPACE: ContextVar[str] = ContextVar("NAMESPACE", default="")


class EngineLogger(logging.LoggerAdapter[logging.Logger]):
    """Puts the namespace before the text, and among the fields: the one that a line names, else that of its task."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        facts: Mapping[str, object] = kwargs.get("extra") or {}
        if namespace := str(facts.get("namespace") or NAMESPACE.get()):
            kwargs["extra"] = {**facts, "namespace": namespace}
            msg = f"{namespace.replace('%', '_')}: {msg}"  # of a store of one's own, where any text is a namespace
        return msg, kwargs


def logger_of(module: str) -> EngineLogger:
    """Return the logger of ``module``, for callbacks and channels too: its lines name the engine whose digest is being
    delivered, in the text and as the field ``namespace``."""
    return EngineLogger(logging.getLogger(module))


def current_namespace() -> str:
    """Return the namespace of the engine that has called, as in its callback; ``""`` elsewhere."""
    return NAMESPACE.get()
