"""What a store holds, from the reference's memory and from Redis, in one form; and what must be true of it always."""

from __future__ import annotations

from typing import Any

from aiodigest.backend import DIGEST_BYTES, NEVER_MS
from aiodigest.backends.memory.timelines import Held, Shard
from aiodigest.records.entries import identity

State = dict[str, Any]

SETS = ("waiting", "ready", "leased")
ORDERED = (*SETS, "postponed", "seens", "mutes")  # of timelines, by times
# the keys of a shard, and the kinds of those that its timelines and dead letters have
SHARED = (
    b"waiting", b"ready", b"leased", b"postponed", b"mutes", b"silences", b"dead", b"pauses", b"wake", b"layout",
)  # fmt: skip
FIELDS = {
    "end", "token", "done", "attempts", "lost", "iteration", "last", "cool", "dropped", "open_dropped", "id", "part",
    "cut", "bound", "frozen", "parted", "since", "error", "flush", "own", "opening", "counted", "needs",
    "next", "pass", "bytes", "max_bytes", "due",
}  # fmt: skip
KINDS = (b"log", b"open", b"meta", b"ids", b"seen", b"letter", b"remains", b"moved")
REMEMBERED = {"iteration", "last", "cool", "done", "opening", "needs"}  # of a timeline without records
COUNTERS = ("digests", "delivered", "dropped", "aged", "expired", "buried", "letters_dropped", "duplicates", "muted")


def reference_state(machine: Shard) -> State:
    state: State = {name: {key.encode(): due for key, due in getattr(machine, name).items()} for name in SETS}
    state["postponed"] = {key.encode(): due for key, due in machine.postponed.items()}
    state["seens"] = {key.encode(): end for key, end in machine.seens.items()}
    state["seen"] = {key.encode(): ids for key, ids in machine.seen.items() if ids}
    state["mutes"] = {key.encode(): silence.look_ms for key, silence in machine.mutes.items()}
    state["silences"] = {
        key: f"{silence.end_ms if silence.end_ms < NEVER_MS else 0} {silence.drops:d}"
        for key, silence in machine.mutes.items()
    }
    state["layout"] = {"mutes": 1} if machine.mutes else {}
    state["layout"] |= {name: machine.counts[name] for name in COUNTERS if machine.counts[name]}
    times = {
        "seen": machine.seen_ms, "clock": machine.clock_ms, "shift": machine.shift_ms, "stepped": machine.stepped_ms,
        "step": machine.step_ms,
    }  # fmt: skip
    state["layout"] |= {name: time for name, time in times.items() if time}
    marks = {"hold": machine.hold_ms, "lease": machine.lease_ms, "past": machine.past_ms}
    state["layout"] |= marks if machine.seen_ms else {}
    bucket = machine.bucket
    if bucket.tat_us is not None:
        state["layout"] |= {"tat": bucket.tat_us, "took": bucket.took_us, "refused": bucket.refused}
        state["layout"] |= {"paused": bucket.paused} if bucket.paused else {}
    state["pauses"] = {name.encode(): end for name, end in bucket.pauses.items()}
    timelines = {key.encode(): _timeline(held) for key, held in machine.held.items()}
    state["timelines"] = {key: timeline for key, timeline in timelines.items() if any(timeline.values())}
    state["dead"] = {
        letter.id: (
            letter.buried_ms, letter.key, letter.reason, letter.attempt, letter.digest_id, list(letter.entries),
            " ".join(map(str, letter.limits or ())),
        )
        for letter in machine.dead.values()
    }  # fmt: skip
    return state


def _timeline(held: Held) -> State:
    delivery = held.delivery
    meta: dict[str, str | int] = {
        "end": held.end_ms, "iteration": held.iteration, "last": held.last_ms, "cool": held.cool_ms,
        "dropped": held.dropped, "flush": int(held.flush), "opening": held.opening_ms, "needs": held.needs,
        "next": held.next_ms, "pass": int(held.passes), "due": held.due_ms,
        "bytes": held.log_bytes, "max_bytes": held.max_bytes,
    }  # fmt: skip
    if held.own:
        meta["own"] = " ".join(map(str, held.own))
    if held.done:
        token, digest_id, (status, next_id, left, _) = held.done
        meta["done"] = f"{token} {digest_id} {status} {next_id} {left}"
    if delivery:
        meta |= {
            "id": delivery.digest_id, "token": delivery.token, "attempts": delivery.attempts, "lost": delivery.lost,
            "part": delivery.part, "bound": 0 if delivery.bound == DIGEST_BYTES else delivery.bound,
            "open_dropped": delivery.dropped, "cut": delivery.cut_ms,
            "frozen": int(delivery.frozen), "parted": int(delivery.parted), "since": delivery.deferred_ms,
            "error": delivery.last_error,
        }  # fmt: skip
    return {
        "log": held.log,
        "open": delivery.entries if delivery else [],
        "meta": {name: str(value) for name, value in meta.items() if value},
    }


def redis_state(client: Any, tag: str) -> State:
    """Read all keys of a shard; fails if one has no expiry and should, or belongs to nothing that is known."""
    prefix = f"{{{tag}}}:".encode()
    keys = sorted(client.scan_iter(match=b"{" + tag.encode() + b"}:*", count=1000))
    # of its letters, which Pair compares, and of what was delivered, which ends with the last of it
    keys = [key for key in keys if key not in (prefix + b"sizes", prefix + b"seens")]
    pipe = client.pipeline(transaction=False)
    for name in (*ORDERED, "dead", "pauses"):
        pipe.zrange(prefix + name.encode(), 0, -1, withscores=True)
    pipe.hgetall(prefix + b"layout")
    pipe.hgetall(prefix + b"silences")
    shared = [key for key in keys if key[len(prefix) :] in SHARED]
    parts = [key for key in keys if key not in shared]
    for key in parts:
        kind, colon, _ = key[len(prefix) :].partition(b":")
        assert colon, f"{key!r} is no key of a shard"
        assert kind in KINDS, f"{key!r} is no key of a shard"
        if kind in (b"ids", b"seen"):
            pipe.zrange(key, 0, -1, withscores=kind == b"seen")
        else:
            pipe.lrange(key, 0, -1) if kind in (b"log", b"open", b"remains") else pipe.hgetall(key)
        pipe.pttl(key)
    for key in shared:
        pipe.pttl(key)
    replies = pipe.execute()
    for key in reversed(shared):
        assert replies.pop() == -1, f"{key!r} would expire, which the keys of a shard do not"
    state: State = {name: {key: int(due) for key, due in reply} for name, reply in zip(ORDERED, replies, strict=False)}
    state["layout"] = _layout_of(replies[8])
    state["silences"] = {key.decode(): said.decode() for key, said in replies[9].items()}
    state["pauses"] = {name: int(end) for name, end in replies[7]}
    remains: dict[bytes, Any] = {}
    facts: dict[bytes, Any] = {}
    timelines: dict[bytes, State] = {}
    state["seen"] = {}
    for key, value, lifetime in zip(parts, replies[10::2], replies[11::2], strict=True):
        kind, _, name = key[len(prefix) :].partition(b":")
        assert lifetime > 0, f"{key!r} has no expiry"
        if kind == b"remains":
            remains[name] = value
        elif kind == b"letter":
            facts[name] = value
        elif kind == b"seen":
            state["seen"][name] = {each: int(end) for each, end in value}
        elif kind != b"moved":  # which tells for a day that a letter of a drained shard has come
            empty: State = {"log": [], "open": [], "meta": {}, "ids": []}
            timeline = timelines.setdefault(name, empty)
            timeline[kind.decode()] = (
                {field.decode(): text.decode() for field, text in value.items() if field.decode() in FIELDS}
                if kind == b"meta"
                else value
            )
    for name, timeline in timelines.items():
        _check_index(timeline, name in state["waiting"])
    state["timelines"] = {name: timeline for name, timeline in timelines.items() if any(timeline.values())}
    state["dead"] = {
        letter.decode(): (
            int(facts[letter][b"buried"]), facts[letter][b"key"].decode(), facts[letter][b"reason"].decode(),
            int(facts[letter][b"attempt"]), facts[letter][b"digest"].decode(), remains.pop(letter),
            facts[letter][b"limits"].decode(),
        )
        for letter, _ in replies[6]
    }  # fmt: skip
    assert not remains, "records of dead letters that are no more"
    assert set(facts) == {letter for letter, _ in replies[6]}, "facts of dead letters that are no more"
    return state


def _layout_of(fields: dict[bytes, bytes]) -> dict[str, int]:
    unchanged = (b"version", b"current", b"drains", b"limits")
    return {
        name.decode(): int(value)
        for name, value in fields.items()
        if name not in unchanged and (name, value) != (b"shift", b"0")
    }


def _check_index(timeline: State, waits: bool) -> None:
    """Take the index of a log's ids out of what is compared: the reference has none. If it is in force, it is right."""
    ids, log = timeline.pop("ids"), timeline["log"]
    assert any(timeline.values()) or not ids, "the index of a timeline that is no more"
    if (counted := timeline["meta"].pop("counted", None)) and log and waits:
        last, length, records = map(int, counted.split())
        is_whole = all(identity(entry) != entry for entry in log)  # else another program has written to it
        if is_whole and (last, length) == (int(timeline["meta"].get("last", 0)), len(log)):
            assert sorted(ids) == sorted({identity(entry) for entry in log})
            assert len(ids) == records


def forget(client: Any, tag: str) -> None:
    """Drop all keys of a shard: to look for those of one is to go through all that a server has."""
    keys = list(client.scan_iter(match=b"{" + tag.encode() + b"}:*", count=1000))
    if keys:
        client.delete(*keys)


def check_invariants(state: State) -> None:
    """A timeline that holds records is in one set, or in none as it is muted; what is in a set holds records."""
    scheduled = [key for name in SETS for key in state[name]]
    holding = [key for key, timeline in state["timelines"].items() if timeline["log"] or timeline["open"]]
    muted = {key for key in holding if key in state["mutes"]} - {*scheduled}
    assert sorted([*scheduled, *muted]) == sorted(holding)
    assert sorted(state["mutes"]) == sorted(key.encode() for key in state["silences"])
    assert state["postponed"].keys() <= state["waiting"].keys(), "what was postponed waits"
    for key, timeline in state["timelines"].items():
        assert bool(timeline["open"]) == ("id" in timeline["meta"]), f"{key!r}: a digest without entries"
        assert "due" not in timeline["meta"] or key in state["mutes"] or key in state["leased"]
        if key in scheduled or key in muted:
            assert "end" in timeline["meta"]
        else:
            assert timeline["meta"].keys() <= REMEMBERED, f"{key!r} is no more, and more than its cool-down is kept"
