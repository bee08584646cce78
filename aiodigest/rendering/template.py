"""Digests as messages by templates of Jinja2 (``aiodigest[templates]``): sandboxed, escaped and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, tzinfo
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from aiodigest import ConfigurationError, Digest, InvalidArgument
from aiodigest.errors import printable, shown
from aiodigest.logs import logger_of
from aiodigest.rendering.formats import Formats, language, zone
from aiodigest.rendering.message import Message
from aiodigest.rendering.plaintext import blocks_of, notes, plain, summary, text_of, zone_name
from aiodigest.rendering.texts import clean, line, simple, url
from aiodigest.rendering.view import View, collapse, group_by, top, view

try:
    import jinja2
    from jinja2 import meta, nodes
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import missing

    from aiodigest.rendering.limits import (
        BRACES,
        TooMuch,
        check_added,
        check_call,
        check_widths,
        counting,
        limit_filters,
        limited,
        short,
        writes,
    )
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "jinja2":
        raise
    raise ConfigurationError("Jinja2 is not installed: pip install 'aiodigest[templates]'") from error

logger = logger_of(__name__)

BOUNDS = {"subject": 1_000, "text": 200_000, "html": 1_000_000}  # characters that a template may write
SUBJECT = 200  # characters of a subject
SOURCE = 1_000_000  # bytes of a file with a template
DEFAULT_HTML = Path(__file__).parent / "templates" / "digest.html.jinja"
PAGE = {"font", "wraps"}  # names that the default page gives its blocks
SCOPED = {"group", "item", "loop"}  # and those that it gives the block "item" besides
NAMES = {"count", "digest", "groups", "items", "lang", "notes", "now", "preview", "summary", "text", "zone"}


class Template:
    """Turns a digest into a message by templates of Jinja2, or as it is without any: readable, on phones and in the
    dark too. Call it with a digest; that raises no Exception. Give it to a channel as ``render``, or call it in a
    callback.

    What values hold stays text: HTML is escaped, and controls, marks that reorder text and what hides are taken out.
    A template is sandboxed, and may write 200,000 characters of text and 1,000,000 of HTML, take 200,000 steps in loops
    and macros, and make no text or list longer than 10 million. If it fails or takes more, that part is replaced by
    what ``plain`` says (there is no HTML then), and a warning is logged, once for each kind of error. These bounds are
    against mistakes: a template is your own code, which runs in the event loop, and lists in lists of its own making
    may still take long. Only the first 2,000 records of a digest are looked at; the others are counted.

    Parameters
    ----------
    subject : str | Path | None, default None
        A template for the subject: its source, or the path of a file, which is read now. None is the default subject.
    text : str | Path | None, default None
        A template for the text, likewise.
    html : str | Path | None, default None
        A template for the part in HTML, likewise; "" is no such part.
    group_by : str | Callable | None, default None
        A heading for each value of a field, such as "issue.title", or of a function of the value.
    collapse : "similar" | "equal" | None, default "similar"
        Which records of a group are shown once, with how often they came: those that differ in numbers, ids, addresses
        and times alone, only those that read the same, or none.
    top : int, default 20
        The most items that are shown, up to 100, fairly divided among groups; then "and 37 more".
    fields : Sequence[str] | None, default None
        The fields of a value to show, the title first: paths such as "issue.title". None shows those that read well.
    tz : str | tzinfo | Callable, default "UTC"
        The reader's time zone, such as "Europe/Berlin", or a function from the key to it.
    locale : str | None, default None
        The reader's language for times and numbers, such as "de"; it needs Babel. None is English. Words stay English.
    variables : Mapping[str, object], default {}
        What templates may name besides. A function is called with the key for each digest: ``{"unsubscribe": link}``
        makes ``{{ unsubscribe }}`` what ``link(key)`` returns.

    Raises
    ------
    ConfigurationError
        If a template cannot be read or compiled, names a variable that there is not, extends or includes another one
        than "digest.html", has a block that digest.html lacks, or Babel is not installed.
    InvalidArgument
        If another argument is not allowed.
    """

    def __init__(
        self,
        *,
        subject: str | Path | None = None,
        text: str | Path | None = None,
        html: str | Path | None = None,
        group_by: str | Callable[[Any], object] | None = None,
        collapse: Literal["similar", "equal"] | None = "similar",
        top: int = 20,
        fields: Sequence[str] | None = None,
        tz: str | tzinfo | Callable[[str], str | tzinfo] = "UTC",
        locale: str | None = None,
        variables: Mapping[str, object] = {},
    ) -> None:
        _check(group_by, collapse, top, fields)
        self._variables = _checked(variables)
        self._shown: dict[str, Any] = {"by": group_by, "alike": collapse, "most": top, "chosen": fields}
        self._zone = tz if callable(tz) else zone(tz)
        self._locale = language(locale)
        given = {"subject": subject, "text": text, "html": DEFAULT_HTML if html is None else html}
        self._parts = {
            part: _compiled(part, source, NAMES | self._variables.keys()) for part, source in given.items() if source
        }
        self._told = set[tuple[str, type]]()

    def __call__(self, digest: Digest[Any], /, *, now: datetime | None = None) -> Message:
        """Return the message of a ``digest`` for who reads it ``now`` (aware; the time of this call if None)."""
        now = now or datetime.now(UTC)
        try:
            here = zone(self._zone(digest.key)) if callable(self._zone) else self._zone
            formats = Formats(now, here, self._locale)
            seen = view(digest, formats, **self._shown)
            text, blocks = text_of(seen, formats), blocks_of(seen, formats)
            own = {name: each(digest.key) if callable(each) else each for name, each in self._variables.items()}
            variables = own | _variables(seen, formats, text)
        except Exception as error:  # of a function or a value of the user's
            self._tell("digest", error)
            return plain(digest, now=now)
        subject = line(self._rendered("subject", variables, formats) or seen.subject, SUBJECT)
        text = self._rendered("text", variables, formats) or text
        return Message(subject or seen.subject, text, self._rendered("html", variables, formats) or None, blocks)

    def _rendered(self, part: str, variables: Mapping[str, Any], formats: Formats) -> str | None:
        """Return what a template writes; None if there is none, or if it fails."""
        template = self._parts.get(part)
        if template is None:
            return None
        written, size = list[str](), 0
        try:
            with limited() as left:
                for piece in template.generate(variables, formats=formats, range=left.range):
                    written.append(piece)
                    size += len(piece)
                    if size > BOUNDS[part]:
                        raise TooMuch(f"it writes more than {BOUNDS[part]:,} characters")
            return "".join(written)
        except Exception as error:  # of the user's template
            self._tell(part, error)
            return None

    def _tell(self, part: str, error: Exception) -> None:
        if (part, type(error)) not in self._told:
            self._told.add((part, type(error)))
            told = printable(shown(error, str))
            kind, facts = type(error).__name__, {"reason": told}
            logger.warning(
                "the template failed, so the plain default is sent (%s): %s: %s", part, kind, told, extra=facts
            )


def _check(group_by: object, collapse: object, top: object, fields: Any) -> None:
    if not (group_by is None or isinstance(group_by, str) or callable(group_by)):
        raise InvalidArgument(f"group_by must be a field or a function of the value, not {shown(group_by)}")
    if collapse not in ("similar", "equal", None):
        raise InvalidArgument(f'collapse must be "similar", "equal" or None, not {shown(collapse)}')
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= 100:
        raise InvalidArgument(f"top must be a whole number from 1 to 100, not {shown(top)}")
    several = cast("Sequence[object]", fields if isinstance(fields, list | tuple) else ())
    if fields is not None and not (several and all(isinstance(name, str) for name in several)):
        raise InvalidArgument(f"fields must be a list of names of fields, not {shown(cast('object', fields))}")


def _checked(variables: Any) -> dict[str, object]:
    if not isinstance(variables, Mapping):
        raise InvalidArgument(f"variables must be a mapping from names to values, not {shown(variables)}")
    named, taken = cast("Mapping[Any, object]", variables), NAMES | PAGE | SCOPED | {"formats", "range"}
    for name in named:
        if not isinstance(name, str) or not _is_variable(name):
            raise InvalidArgument(f"names of variables must be names that Jinja2 can read, not {shown(name)}")
        if name in taken:
            raise InvalidArgument(f"variables may not name {name!r}; taken are: {', '.join(sorted(taken))}")
    return dict(named)


def _is_variable(name: str) -> bool:
    """True if it is a name, and no word of the language, such as ``not`` or ``true``."""
    if not name.isidentifier():
        return False
    try:
        return _environment(False).parse(f"{{{{ {name} }}}}").find(nodes.Name) is not None
    except jinja2.TemplateSyntaxError:
        return False


def _variables(seen: View, formats: Formats, text: str) -> dict[str, Any]:
    """Return what a template may name, as the reference lists it."""
    first = next((item for group in seen.groups for item in group.items), None)
    return {
        "digest": seen,
        "groups": seen.groups,
        "items": seen.items,
        "count": seen.count,
        "text": text,
        "summary": summary(seen, formats),
        "preview": "" if first is None else first.title,
        "notes": tuple(notes(seen, formats)),
        "now": formats.now.astimezone(formats.zone),
        "zone": zone_name(formats),
        "lang": "en" if formats.locale is None else str(formats.locale).replace("_", "-"),
    }


# Jinja2


class _Undefined(jinja2.ChainableUndefined):
    """Writes nothing for a field that a value lacks, or a field of that; a variable that there is not is an error."""

    __slots__ = ()

    def __str__(self) -> str:
        if self._undefined_obj is missing and self._undefined_name is not None:
            self._fail_with_undefined_error()
        return ""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which a field of a value comes before a method of dict, and whatever is written is harmless."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return cast("dict[str, Any]", obj)[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply numbers that have an end, and nothing else; and make no text that is too long."""
        if operator == "+":
            check_added(left, right)
        elif operator == "%":
            check_widths(left)
        elif not all(isinstance(each, int | float) and abs(each) < 2**32 for each in (left, right)):
            raise TooMuch(f"{operator} is for numbers below 4 billion")
        if operator == "**" and abs(right) > 64:
            raise TooMuch("no power above 64 is raised")
        return short(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_call(called, (*args, *kwargs.values()))
        return super().call(context, called, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (found := super().wrap_str_format(value)) is not None:
            check_widths(value.__self__, BRACES)
        return found


def _written(value: Any) -> Any:
    """Return what an expression writes, made harmless; what the template itself has marked as HTML stays."""
    if value is None:
        return ""
    if not hasattr(value, "__html__"):
        value = clean(value) if isinstance(value, str) else str(simple(value))
    writes(value)
    return value


@cache
def _environment(escaped: bool) -> _Environment:
    made = _Environment(
        loader=jinja2.FunctionLoader({"digest.html": DEFAULT_HTML.read_text(encoding="utf-8")}.get),
        autoescape=escaped,
        finalize=_written,
        undefined=_Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.globals.pop("lipsum")  # writes without end
    filters = cast("dict[str, Any]", made.filters)
    limit_filters(filters)
    filters |= {"collapse": collapse, "group_by": group_by, "top": top, "line": line, "url": url}
    filters |= {name: _of_reader(name) for name in ("when", "ago", "number", "plural")}
    return made


def _of_reader(name: str) -> Callable[..., str]:
    """Return the filter that formats for the reader of this message."""

    @jinja2.pass_context
    def formatted(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
        return str(getattr(context.resolve("formats"), name)(value, *args, **kwargs))

    return formatted


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(SOURCE + 1)
    if len(content) > SOURCE:
        raise ConfigurationError(f"{file} is larger than {SOURCE:,} bytes, which no template is")
    return content.decode()


def _compiled(part: str, given: str | Path, known: AbstractSet[str]) -> jinja2.Template:
    """Return a template that names what is ``known``; raise ConfigurationError if it cannot be one."""
    try:
        source = given if isinstance(given, str) else _read(given)
        environment = _environment(part == "html")
        parsed = environment.parse(source)
        _check_names(part, parsed, known)
        return environment.from_string(counting(parsed, environment))
    except ConfigurationError:
        raise
    except Exception as error:  # of many kinds: Jinja2 lets pass what Python says to what it makes of a template
        raise ConfigurationError(f"the template of {part} cannot be used: {shown(error, str)}") from error


def _check_names(part: str, parsed: nodes.Template, known: AbstractSet[str]) -> None:
    """Refuse templates and variables that there are not."""
    for name in meta.find_referenced_templates(parsed):
        if name not in ("digest.html", None):  # None is one that is known at last when it is used
            raise ConfigurationError(f'the template of {part} names {name!r}: only "digest.html" can be extended')
    taken = set[str]()
    if blocks := {block.name for block in parsed.find_all(nodes.Block)}:
        # A block is looked at for itself: what is set around it counts as unknown.
        taken = {each.name for each in parsed.find_all(nodes.Name) if each.ctx != "load"}
        taken |= {each.name for each in parsed.find_all(nodes.Macro)} | {"loop", "self"}
        if parsed.find(nodes.Extends) is not None:
            if lost := {*_outer_blocks(parsed)} - _page_blocks() - {*_of_itself(parsed)}:
                has = ", ".join(sorted(_page_blocks()))
                raise ConfigurationError(f"the template of {part} has a block {min(lost)!r}; digest.html has {has}")
            taken |= PAGE | (SCOPED if "item" in blocks else set())
    if unknown := meta.find_undeclared_variables(parsed) - known - taken - set(_environment(False).globals):
        names = ", ".join(sorted(known))
        raise ConfigurationError(f"the template of {part} names {min(unknown)!r}; there are: {names}")


def _outer_blocks(node: nodes.Node) -> Iterator[str]:
    """Yield the names of blocks that are in no other block, and so in the place of those of another page."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Block):
            yield child.name
        else:
            yield from _outer_blocks(child)


def _of_itself(parsed: nodes.Template) -> Iterator[str]:
    """Yield the names of blocks that a template shows in other places, by ``self``."""
    for node in parsed.find_all(nodes.Getattr):
        if isinstance(node.node, nodes.Name) and node.node.name == "self":
            yield node.attr


@cache
def _page_blocks() -> AbstractSet[str]:
    """Return the names of the blocks of the default page."""
    parsed = _environment(True).parse(DEFAULT_HTML.read_text(encoding="utf-8"))
    return {block.name for block in parsed.find_all(nodes.Block)}
