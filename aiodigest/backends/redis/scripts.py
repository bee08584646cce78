"""The scripts in ``aiodigest/backends/redis/lua``, their arguments, and the way to read their answers.

A script is a file ``lua/NAME.lua``, and the comment at its top declares it: docs/design.md, section 5, says how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from hashlib import sha1
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from aiodigest import backend, policy
from aiodigest.backend import Add, Close, Closed, Grant, Lease, Mute, Postpone, Retry, StoredTimeline, Tokens
from aiodigest.errors import BackendUnavailable
from aiodigest.models import State
from aiodigest.policy import Limits, Terms
from aiodigest.records import entries as records
from aiodigest.records.entries import ARRIVAL_END, ARRIVING

if TYPE_CHECKING:
    from aiodigest.timing.hours import Hours
    from aiodigest.timing.throttle import Rate

Argument: TypeAlias = bytes | str | int

# Dragonfly, where no other keys than the given one may be used unless a script's first line says so; else a comment
FIRST = "--!df flags=allow-undeclared-keys\n"
LUA = Path(__file__).with_name("lua")
CONSTANTS: Mapping[str, int] = {
    name: getattr(module, name)
    for module, names in (
        (backend, ("ALONE", "ASIDE_MS", "DEAD_LETTER_BASE", "DEAD_LETTER_TTL_MS", "DIGEST_BYTES", "GIVE_BACK_MS")),
        (backend, ("LONGEST", "LOOKS", "MOST_SEEN", "MOVES", "NEVER_MS", "PAUSES", "SAME_MS", "SAMPLE", "SLICE")),
        (backend, ("STEP_MS", "STEP_TOLD_MS")),
        (policy, ("MAX_CAPACITY",)),
        (records, ("ARRIVAL", "CONTEXT_SIZE", "PACKED", "TRACED", "VERSION")),
    )
    for name in names
}
HEADER = re.compile(r"^-- (Flags|Parts|Commands|Reply) +(.+(?:\n-- {5,}.+)*)", re.MULTILINE)
NEEDS = re.compile(r"-- Needs +(.+)\n")
MINUTE, DAY = 60_000, 86_400_000  # milliseconds
COVERED = 3_600_000  # by how much the time that calendars and hours are worked out for may be wrong
WINDOWS = 64  # of hours that a script is told
TYPES: Mapping[str, frozenset[type]] = {
    "int": frozenset({int}),
    "text": frozenset({bytes}),
    "number": frozenset({int, bytes}),  # or the text of an error
    "list": frozenset({list}),  # checking its contents would take longer than it is worth
    "nil": frozenset({type(None)}),
}


class Shape(NamedTuple):
    """The shape of an answer: of one of some types, or a list."""

    types: frozenset[type]
    items: Sequence[Shape] | None  # of a list: one for any number of such, several for just these


class Script:
    """A script, and what its header declares: ``parts`` of the work for which a user needs it ("add", "deliver",
    "look", "move by hand"), and ``commands``: if the user may not run one, the script is not begun, because refused
    half-way it is half done.

    Its text is put together when it is first asked for: all of them would take a tenth of a cold process's first add.
    """

    def __init__(self, name: str, texts: Mapping[str, str]) -> None:
        self._name = name
        self._texts = texts
        head = texts[name].partition("\n\n")[0]
        self._header: dict[str, str] = {field: value.replace("\n--", " ") for field, value in HEADER.findall(head)}
        flags = self._header.get("Flags", "").split(", ")
        self.parts = frozenset(part for part in self._header.get("Parts", "").split(", ") if part)
        self.commands = frozenset(self._header.get("Commands", "").split())
        self.begins_namespace = "begins-namespace" in flags
        self.repeatable = "repeatable" in flags  # running it twice is harmless
        self.replicated = "replicated" in flags  # waited for by `wait_replicas`: must not be forgotten once answered

    @cached_property
    def source(self) -> str:
        body = assemble(self._name, self._texts.__getitem__)
        given = {"CREATES": str(self.begins_namespace).lower(), **CONSTANTS}
        return FIRST + "".join(f"local {key} = {value}\n" for key, value in given.items() if key in body) + body

    @cached_property
    def sha(self) -> str:
        return sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def timed(self) -> bool:
        """True if ARGV[2] may say from when on it does nothing."""
        return "\n-- late: " in self.source

    @cached_property
    def reply(self) -> Shape:
        return read_shape(self._header["Reply"])


def assemble(name: str, read: Callable[[str], str]) -> str:
    """Return the text of a script, each of its ``Needs`` followed by the files that are not there yet."""

    def expand(part: str, known: set[str]) -> str:
        def with_helpers(needs: re.Match[str]) -> str:
            margin = needs.start() - needs.string.rfind("\n", 0, needs.start()) - 1
            scope = set(known) if margin else known  # in a function they are known only there
            text = ""
            for helper in needs[1].split():
                if helper not in scope:
                    scope.add(helper)
                    text += expand(f"shared/{helper}", scope)
            return needs[0] + (indent(text, " " * margin) if margin else text)

        return NEEDS.sub(with_helpers, read(part))

    return expand(name, set())


@cache
def load_scripts() -> Mapping[str, Script]:
    """Read all scripts, once a process: they then match its code, even if the package is replaced while it runs,
    and the first failure of a delivery needs no file that can be opened."""
    try:
        texts = {
            folder + path.stem: path.read_text(encoding="utf-8")
            for folder in ("", "shared/")
            for path in (LUA / folder).iterdir()
            if path.suffix == ".lua"
        }
    except OSError as error:
        raise BackendUnavailable(f"the scripts of aiodigest cannot be read: {error}") from error
    return {name: Script(name, texts) for name in sorted(texts) if "/" not in name}


def load_script(name: str) -> Script:
    """Return the script of a transition."""
    return load_scripts()[name]


def commands_of(*names: str) -> frozenset[str]:
    """Return the commands that some scripts run."""
    return frozenset[str]().union(*(load_script(name).commands for name in names))


# What scripts are given


@lru_cache(256)
def pack_limits(limits: Limits) -> str:
    return " ".join(map(str, limits))


def pack_delays(terms: Terms, now_ms: int, span_ms: int = 0, to_ms: int = 0) -> str:
    """Return the delays of terms, or JSON of all that they have: of calendars and hours what they tell of now, and
    of due times up to ``span_ms`` after it; and of hours what they tell of ``to_ms``, however far that is."""
    if terms.is_plain:
        return _pack_plain(terms.initial_ms, terms.increment_ms, terms.maximum_ms)
    return _pack_rich(terms, now_ms // MINUTE * MINUTE, span_ms // DAY, to_ms // MINUTE * MINUTE)


@lru_cache(256)
def _pack_plain(*delays: int) -> str:
    return " ".join(map(str, delays))


@lru_cache(256)
def _pack_rich(terms: Terms, about_ms: int, days: int, to_ms: int) -> str:
    known: dict[str, object] = {
        "rule": terms.rule, "initial": terms.initial_ms, "increment": terms.increment_ms, "maximum": terms.maximum_ms,
        "quiet": terms.quiet_ms, "price": terms.price_ms, "randomised": terms.randomised,
        "at_once": terms.first_at_once, "needs": terms.needs, "dedupe": terms.dedupe_ms, "max_bytes": terms.max_bytes,
    }  # fmt: skip
    if terms.at or terms.hours:
        known |= {"since": about_ms - COVERED, "before": about_ms + COVERED}
    instants = terms.at.instants(about_ms - COVERED, 2, about_ms + COVERED) if terms.at else ()
    if terms.at:
        known["instants"] = instants
    if terms.hours:
        # a cool-down may be one of an earlier policy
        until = about_ms + max(terms.initial_ms, terms.maximum_ms, days * DAY) + 2 * DAY
        known |= _hours_around(terms.hours, about_ms, until, instants, to_ms)
    return json.dumps(known, separators=(",", ":"))


def pack_hours(hours: Hours | None, now_ms: int, span_ms: int) -> str:
    """Return JSON of the hours around ``now_ms`` and for ``span_ms`` after it; '' if there are none."""
    return "" if hours is None else _pack_hours(hours, now_ms // MINUTE * MINUTE, span_ms // DAY + 1)


@lru_cache(256)
def _pack_hours(hours: Hours, about_ms: int, days: int) -> str:
    return json.dumps(_hours_around(hours, about_ms, about_ms + days * DAY), separators=(",", ":"))


def _hours_around(
    hours: Hours, about_ms: int, until_ms: int, instants: Sequence[int] = (), to_ms: int = 0
) -> dict[str, object]:
    """Return the windows from a while before a time until another, at most so many, and those of the instants and
    around ``to_ms``."""
    windows = [*hours.windows(about_ms - COVERED, until_ms, WINDOWS)]
    if windows[-1][0] >= until_ms:  # else a time between these and those around the other would seem closed
        far = hours.windows(to_ms - COVERED, to_ms + COVERED, WINDOWS) if to_ms > windows[-1][0] else ()
        windows += (each for each in far if each[0] > windows[-1][0])
    for instant in instants:
        if instant >= windows[-1][0]:
            windows += (each for each in hours.windows(instant, instant, 0) if each[0] > windows[-1][0])
    spread = round(hours.spread * 1000)
    return {"since": about_ms - COVERED, "windows": [time for each in windows for time in each], "spread": spread}


def pack_adds(adds: Sequence[Add], indices: Iterable[int], now_ms: int) -> tuple[list[Argument], list[int]]:
    """Return the arguments for some of the adds, and the order in which they stand there.

    Those to one timeline under the same terms stand together, as one append; those to a timeline stay in order, and
    those that are urgent stand apart.
    """
    arguments: list[Argument] = []
    order: list[int] = []
    for terms, flags, singles, groups in _parts_of(adds, indices):
        head, before = len(arguments) + 3, len(order)
        arguments += (pack_delays(terms, now_ms), pack_limits(terms.limits), flags, 0, 0)
        for key, index in singles.items():
            entry = adds[index].entry
            if entry[0] == ARRIVING and not terms.max_bytes:  # as most: the script knows the rest
                arguments += (key, entry[ARRIVAL_END:])
                order.append(index)
            else:
                groups[key] = [index]
        arguments[head : head + 2] = (len(order) - before, len(groups))
        for key, group in groups.items():
            order += group
            entries = [adds[index].entry for index in group]
            if terms.max_bytes:
                sizes = " ".join(str(adds[index].size) for index in group)
                arguments += (key, len(group), sizes, *entries)
                continue
            short = [entry[ARRIVAL_END:] for entry in entries if entry[0] == ARRIVING]
            arguments += (key, -len(short), *short) if len(short) == len(group) else (key, len(group), *entries)
    return arguments, order


Part = tuple[Terms, int, dict[str, int], dict[str, list[int]]]


def _parts_of(adds: Sequence[Add], indices: Iterable[int]) -> list[Part]:
    """Return the parts of a call: terms, flags, and by their timelines the indices of the adds under these: of those
    that are the only one, and of the others."""
    parts: list[Part] = []
    places: dict[tuple[Terms, int], int] = {}  # of terms: the last part that has them
    begun: dict[str, int] = {}  # of a timeline: the last part that has it, if that is not the first
    seen, own, urgent, flags, place, last = None, False, False, 0, 0, -1
    singles: dict[str, int] = {}  # those of the part at this place
    groups: dict[str, list[int]] = {}
    for index in indices:
        add = adds[index]
        key = add.key
        if add.terms is not seen or add.own is not own or add.urgent is not urgent:  # most adds of a call have the same
            seen, own, urgent = add.terms, add.own, add.urgent
            flags = own + 2 * urgent
            place = places.get((seen, flags), len(parts))
            if place < len(parts):
                _, _, singles, groups = parts[place]
        if place > last or (begun and begun.get(key, 0) > place):  # not before what came to it earlier
            place = last = places[seen, flags] = len(parts)
            singles, groups = {}, {}
            parts.append((add.terms, flags, singles, groups))
        if place:
            begun[key] = place
        if key in groups:
            groups[key].append(index)
        elif key in singles:
            groups[key] = [singles.pop(key), index]
        else:
            singles[key] = index
    return parts


def pack_lease(lease: Lease) -> tuple[str, str, str]:
    return lease.key, lease.token, lease.digest_id


def pack_postpone(postpone: Postpone) -> tuple[Argument, ...]:
    return *pack_lease(postpone.lease), postpone.lease.due_ms, postpone.delay_ms


def pack_mute(key: str, mute: Mute) -> tuple[Argument, ...]:
    if mute.at_ms is not None:
        return key, "at", mute.at_ms, int(mute.drop)
    return key, "" if mute.delay_ms is None else "delay", mute.delay_ms or 0, int(mute.drop)


def pack_close(close: Close, now_ms: int) -> list[Argument]:
    lease, limits = close.lease, close.limits
    arguments: list[Argument] = [
        lease.key, lease.token, lease.digest_id, close.taken, close.delivered, close.aged,
        close.counts + 2 * (close.dedupe_ms > 0) + 4 * close.mute, close.cool_ms,
        close.lease_ms, limits.max_size, limits.ttl_ms,
        "" if close.hours is None else pack_hours(close.hours, now_ms, close.cool_ms), len(close.dead_letters),
    ]  # fmt: skip
    for letter in close.dead_letters:
        arguments += (_readable(letter.reason), pack_limits(close.limits), close.letter_bytes, *_pack_ids(letter.ids))
    return [*arguments, close.dedupe_ms, *_pack_ids(close.seen)] if close.dedupe_ms else arguments


def pack_retry(retry: Retry, now_ms: int) -> list[Argument]:
    return [
        *pack_lease(retry.lease), retry.delay_ms, _readable(retry.error), retry.limits.ttl_ms, retry.taken,
        retry.delivered, retry.aged, int(retry.give_back), int(retry.unknown),
        pack_hours(retry.hours, now_ms, retry.delay_ms), *_pack_ids(retry.failed), retry.dedupe_ms,
        *(_pack_ids(retry.seen) if retry.dedupe_ms else ()),
    ]  # fmt: skip


def pack_throttle(
    rate: Rate, asker: int, known: int, returned: Sequence[Tokens], pauses: Sequence[tuple[str, int]]
) -> list[Argument]:
    arguments: list[Argument] = [*rate, asker, known, len(returned)]
    for tokens in returned:
        arguments += (tokens.at_us, tokens.number)
    for name, delay_ms in pauses:
        arguments += (name.encode(errors="surrogatepass"), delay_ms)
    return arguments


def _pack_ids(ids: Sequence[bytes] | None) -> tuple[Argument, ...]:
    return (-1,) if ids is None else (len(ids), *ids)


def _readable(message: str) -> bytes:
    return message.encode(errors="replace")  # the text of an exception may hold anything, half a character too


# What they answer


def read_shape(text: str) -> Shape:
    """Parse the shape of an answer: ``a | b``, ``[a, b]`` of two items, ``[a...]`` of any number."""
    tokens = re.findall(r"\w+|[][|,]", text)

    def shape() -> Shape:
        types, items = frozenset[type](), None
        if (token := tokens.pop(0)) != "[":
            types = TYPES[token]
        else:
            items = [shape()]
            while tokens.pop(0) == ",":
                items.append(shape())
        if tokens[:1] == ["|"]:
            tokens.pop(0)
            other = shape()
            return Shape(types | other.types, items or other.items)
        return Shape(types, items)

    return shape()


REPLIES: Mapping[str, str] = {  # of commands that are sent beside the scripts
    "HMGET": "[text | nil...]",
    "INFO": "text",
    "SCAN": "[text, [text...]]",
    "TIME": "[text, text]",
    "UNLINK": "int",
    "XREAD": "nil | [[text, [[text, [text...]]...]]...]",
}


@cache
def shape_of(name: str) -> Shape | None:
    """Return the shape of a script's or a command's answers; None if it is not known."""
    if name.islower():
        return load_script(name).reply
    return read_shape(REPLIES[name]) if name in REPLIES else None


def fits(reply: object, shape: Shape) -> bool:
    """True if an answer has the shape."""
    if shape.items is None or not isinstance(reply, list):
        return type(reply) in shape.types
    items = cast("list[object]", reply)
    if len(shape.items) > 1:
        return len(items) == len(shape.items) and all(map(fits, items, shape.items))
    [each] = shape.items
    # most have plain items, and may have many
    return each.types.issuperset(map(type, items)) or all(fits(item, each) for item in items)


def text(value: Any) -> str:
    """Decode a name or a message. Text from another program may not be UTF-8, and is shown as well as possible."""
    try:
        return value.decode()  # in a quarter of the time
    except UnicodeDecodeError:
        return value.decode(errors="replace")


def number(value: object) -> int:
    return value if type(value) is int else int(cast("bytes", value))


@lru_cache(256)
def unpack_limits(packed: str) -> Limits | None:
    """Read limits as they are stored; None if there are none, or another program wrote them."""
    fields = packed.split(" ")
    return Limits(*map(int, fields)) if len(fields) == 4 and all(map(str.isdecimal, fields)) else None


def done(answer: object) -> bool:
    return answer == 1


def unpack_added(reply: Sequence[object]) -> list[object]:
    """Return the answer of each add that was looked at: True if it made its timeline ready, or the text of its error.
    None of them if this is no reply to adds."""
    looked, *told = reply or (0,)
    if type(looked) is bytes and (digits := looked.partition(b" ")[0]).isdigit():  # with the limits of workers
        looked = int(digits)
    answers: list[object] = [False] * looked if type(looked) is int else []
    last = 0
    for found in told:
        if type(found) is int and last < found <= len(answers):
            answers[found - 1], last = True, found
        elif type(found) is bytes and last and answers[last - 1] is True:
            answers[last - 1] = found
        else:
            return []
    return answers


def other_limits(reply: Sequence[object]) -> Limits | None:
    """Return the limits by which workers drop, if an answer to adds says that some of theirs are others."""
    if not reply or type(reply[0]) is not bytes:
        return None
    try:
        return Limits(*map(int, reply[0].split()[1:]))
    except (TypeError, ValueError):  # another program has written them
        return None


def stale_at(answer: object) -> int | None:
    """Return the server's time of an answer that terms did not tell of it; None of another answer."""
    if isinstance(answer, bytes):
        return int(answer.removeprefix(b"STALE ")) if answer.startswith(b"STALE ") else None
    match answer:
        case [b"stale", int(now_ms)]:
            return now_ms
        case _:
            return None


def unpack_counts(reply: object) -> dict[str, int]:
    words = cast("list[bytes | int]", reply)
    return {text(name): number(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def unpack_lease(fields: Sequence[Any]) -> Lease:
    key, token, digest_id, attempt, iteration, dropped, due, size, part, cut, error, lost, *more = fields
    bound, own, passes, entries = more
    name = text(token)
    return Lease(  # the score of a set is text, and all other numbers are none
        text(key), name, name if digest_id == token else text(digest_id), attempt, iteration, dropped, number(due),
        size, part, cut, text(error) if error else "", lost, tuple(entries), bound,
        unpack_limits(text(own)) if own else None, (), passes == 1,
    )  # fmt: skip


def unpack_grant(source: int, reply: Sequence[Any]) -> Grant:
    count, at, wait, contended, known, told = reply
    pauses = tuple(
        (name.decode(errors="surrogatepass"), number(left)) for name, left in zip(told[::2], told[1::2], strict=True)
    )
    return Grant(Tokens(source, at, count), wait, contended == 1, known, pauses)


CLOSED = [b"closed", b"", 0, 0]  # what most closes answer
_closed = Closed("closed")


def unpack_closed(fields: object) -> Closed:
    if fields == CLOSED:
        return _closed
    status, digest_id, left, *let_go = cast("tuple[bytes, bytes, int, int]", fields)
    known = cast("Literal['closed', 'part', 'deleted', 'lost']", status.decode())
    return Closed(known, text(digest_id), left, *let_go)


def unpack_timeline(fields: Sequence[object]) -> StoredTimeline:
    key, state, due, logged, opened, attempt, iteration, dropped, cool, digest_id, error, *more = fields
    last, opening, following, until, flushed, passes, needs, mute, drops = more
    return StoredTimeline(
        text(key), cast("State", text(state)), number(due), number(logged), number(opened), number(attempt),
        number(iteration), number(dropped), number(cool), text(digest_id), text(error), number(last), number(opening),
        number(following), number(until), flushed == 1, passes == 1, text(needs), number(mute), drops == 1,
    )  # fmt: skip
