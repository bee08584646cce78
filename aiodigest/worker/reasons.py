"""The reasons that are stored and logged for what was not delivered; docs/howto/read-the-log.md explains the lines."""

from __future__ import annotations

from aiodigest.backend import Claims, Lease
from aiodigest.errors import ChannelError, CodecError, DeliverySignal, one_line, shown, text_of
from aiodigest.logs import logger_of
from aiodigest.models import Delivery
from aiodigest.policy import Limits

logger = logger_of(__name__)

LATER = "; it runs alone from the second time on"
_unknown_needs = set[str]()  # of which this process has told
MOST_NEEDS = 50  # of which it tells: another program may write any
FEW = 5  # timelines of a claim named in the log, if something is wrong with many


class TimedOut(Exception):
    """The callback took longer than ``delivery_timeout``; its outcome is unknown."""


def describe(error: BaseException) -> str:
    """Describe an error in one line of bounded length, for dead letters and retries."""
    text = text_of(error)
    says_all = isinstance(error, (ChannelError, CodecError, DeliverySignal, TimedOut))
    return one_line(text if says_all else f"{type(error).__name__}: {text}")


def facts_of(what: Lease | Delivery, reason: object = "", delay_ms: int | None = None) -> dict[str, object]:
    """Return the fields that name a line's attempt, and if given the reason, and in how long the next one is."""
    facts: dict[str, object] = {"timeline": what.key, "digest_id": what.digest_id, "attempt": what.attempt}
    if reason:
        facts["reason"] = str(reason)
    return facts if delay_ms is None else {**facts, "next_in": delay_ms / 1000}


def log_let_go(shard: int, count: int) -> None:
    """Log that dead letters made room for another one."""
    line = "%d dead letters of shard %d were let go: the oldest, 30 days old or over the shard's bytes for them"
    logger.error(line, count, shard, extra={"shard": shard, "letters": count})


def log_dropped(lease: Lease) -> None:
    """Log that a timeline has outgrown its capacity since its last digest, once that has ended."""
    if lease.dropped:
        facts = {**facts_of(lease), "records": lease.dropped}
        logger.warning("timeline %r was over its capacity: %s", lease.key, _lost(lease.dropped), extra=facts)


def _lost(count: int) -> str:
    return "1 record is lost" if count == 1 else f"{count} records are lost"


def log_other_limits(lease: Lease, own: Limits, ours: Limits) -> bool:
    """Log that a timeline has other limits than this worker's policy gives it, and return True; else False."""
    if own == ours:
        return False
    line = "the policy of timeline %r differs where its records are added (%s) and here (%s): the limits there count"
    logger.warning(line, lease.key, own.told, ours.told, extra=facts_of(lease))
    return True


def log_doubt(lease: Lease) -> None:
    """Log that a digest is tried again that may end its worker."""
    how, later = ("with nothing beside it", "") if lease.is_alone else ("beside others", LATER)
    line = "the digest of %r is tried again %s: its worker died or lost the server before it reported (%s in a row)"
    logger.warning(line + later, lease.key, how, times(lease.lost), extra=facts_of(lease))


def times(count: int) -> str:
    """Return how often something happened, in words."""
    return f"{count} time{'' if count == 1 else 's'}"


def log_rest(destination: str, seconds: float, *, is_over: bool = False) -> None:
    """Log that a destination, or without a name the process, begins to rest, or that it has ended its rests."""
    who = f"destination {shown(destination)}" if destination else "the process"
    facts = {"destination": destination, "seconds": round(seconds, 3)}
    if is_over:
        logger.info("%s delivers again, %.1f s after it began to rest", who, seconds, extra=facts)
    else:
        logger.warning("%s rests for %.1f s: its latest deliveries have all failed", who, seconds, extra=facts)


def log_needs(claims: Claims) -> None:
    """Log of each feature that timelines need and this version does not know, once a process."""
    for key, name in claims.left:
        if name not in _unknown_needs and len(_unknown_needs) < MOST_NEEDS:
            _unknown_needs.add(name)
            line = "timeline %r needs %s, which this version of aiodigest does not know: such are left to other workers"
            logger.warning(line, key, shown(name), extra={"timeline": key, "feature": name})


def log_losses(claims: Claims) -> None:
    """Log the problems a claim found: a few timelines by name, and the number of others."""
    for key, reason in claims.broken[:FEW]:
        facts, told = {"timeline": key, "reason": reason}, one_line(reason)
        logger.error("timeline %r cannot be read and is set aside for a lease: %s", key, told, extra=facts)
    if more := claims.broken[FEW:]:
        facts = {"reason": more[0][1]}
        logger.error("%d more timelines cannot be read and are set aside for a lease", len(more), extra=facts)
    if empty := [key for key, count in claims.expired if not count]:  # evicted, or written by another program
        line = "%d timelines were due and hold no records, such as %r: the server or a program may have taken them"
        logger.warning(line, len(empty), empty[0], extra={"timeline": empty[0]})
    lost = [(key, count) for key, count in claims.expired if count]
    for key, count in lost[:FEW]:
        facts = {"timeline": key, "records": count}
        logger.error("timeline %r outlived its ttl: %s", key, _lost(count), extra=facts)
    if more := lost[FEW:]:
        records = sum(count for _, count in more)
        facts = {"records": records}
        logger.error("%d more timelines outlived their ttl: %s", len(more), _lost(records), extra=facts)
