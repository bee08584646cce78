"""Digests as messages: what is shown of them, how templates are kept in bounds, and that no value does any harm."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple, cast
from unicodedata import bidirectional, category, name
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr
from pydantic import Field as PydanticField

import aiodigest.rendering
from aiodigest import ConfigurationError, Digest, InvalidArgument, Record
from aiodigest.rendering import Message, Template, plain
from aiodigest.rendering.formats import Formats
from aiodigest.rendering.texts import clean, line, masked
from aiodigest.rendering.view import View, shares, view

NOW = datetime(2026, 11, 30, 14, 5, tzinfo=UTC)


def digest_of(*values: Any, key: str = "ops", minutes: int = 1, **more: Any) -> Digest[Any]:
    """Return a digest of records that came a minute apart, the last one now."""
    first = NOW - timedelta(minutes=minutes * (len(values) - 1))
    records = [Record(f"r{i}", value, first + timedelta(minutes=minutes * i)) for i, value in enumerate(values)]
    return Digest(key, records, "d1", **more)


def seen(digest: Digest[Any], **chosen: Any) -> View:
    return view(digest, Formats(NOW), **chosen)


def lines_of(digest: Digest[Any], **settings: Any) -> list[tuple[str, str]]:
    """Return the title and the details of each item that a template shows."""
    message = Template(**settings)(digest, now=NOW)
    return [(block.text, block.details) for block in message.blocks if block.kind == "item"]


# What is shown


@dataclass
class Alert:
    """A value of a user's own class, with a field that is nobody's business."""

    message: str
    host: str
    token: str = field(default="secret", repr=False)


class Comment(BaseModel):
    """The same as a model of pydantic."""

    author: str
    text: str
    token: str = PydanticField(default="secret", repr=False)
    password: SecretStr = SecretStr("secret")


class Point(NamedTuple):
    """A named tuple."""

    name: str
    x: int


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("build failed", ("build failed", "")),
        ("build failed\n  in main.py\n", ("build failed", "in main.py")),
        ({"host": "db-1", "message": "disk full", "level": "error"}, ("disk full", "host: db-1, level: error")),
        ({"Title": "Release", "body": "It is out.", "URL": "x"}, ("Release", "It is out.\nURL: x")),
        ({"user": "ann", "name": "", "text": "hello"}, ("hello", "user: ann")),
        ({"event": "push", "action": "created", "size": 3}, ("push created", "size: 3")),
        ({"event": "push", "payload": {"issue": {"title": "A bug"}}}, ("push: A bug", "")),
        ({"a": 1, "user_name": "bob", "ok": True, "none": None}, ("a: 1, user name: bob, ok: yes", "")),
        ({"at": "2026-11-30T13:00:00Z", "title": "x"}, ("x", "at: 13:00")),
        ({"key": "ops", "id": "r0", "title": "x"}, ("x", "")),  # what is known is not said again
        ({"a": {"b": [1, 2]}}, ("a: b: 1, 2", "")),
        ([1, "a", None], ("1, a, none", "")),
        (list(range(20)), ("0, 1, 2, 3, 4, 5 and 14 more", "")),
        (12.5, ("12.5", "")),
        (None, ("none", "")),
        ({}, ("(empty)", "")),
        ([], ("none", "")),
        ("", ("(empty)", "")),
        (Alert("disk full", "db-1"), ("disk full", "host: db-1")),
        (Comment(author="ann", text="hello"), ("hello", f"author: ann, password: {'*' * 10}")),
        (Point("here", 3), ("here", "x: 3")),
    ],
)
def test_what_reads_well_of_a_value_is_shown(value: Any, shown: tuple[str, str]) -> None:
    assert lines_of(digest_of(value)) == [shown]


def test_the_fields_that_are_chosen_are_shown_in_their_order() -> None:
    value = {"id": 7, "user": {"name": "ann"}, "tags": ["a", "b"], "text": "not this"}
    shown = lines_of(digest_of(value), fields=["user.name", "id", "tags.1", "no.such"])
    assert shown == [("ann", "id: 7, tags 1: b")]


def test_a_long_text_is_divided_after_a_sentence() -> None:
    text = "A first sentence that says what it is about. " + "Another one follows. " * 10
    ((title, details),) = lines_of(digest_of(text))
    assert title.endswith("Another one follows.")
    assert f"{title} {details}" == text.strip()


def test_similar_records_are_told_once_and_the_latest_stands_for_them() -> None:
    digest = digest_of("disk at 91 %", "login of ann@example.org", "disk at 95 %", "login of bob@example.org", "disk")
    assert [text for text, _ in lines_of(digest)] == ["disk at 95 % × 2", "login of bob@example.org × 2", "disk"]  # noqa: RUF001
    assert len(lines_of(digest, collapse="equal")) == 5
    assert lines_of(digest_of("a", "a", "b"), collapse="equal") == [("a × 2", ""), ("b", "")]  # noqa: RUF001
    assert len(lines_of(digest_of("a", "a"), collapse=None)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("took 12.5 s", "took 7 s"),
        ("job 8f14e45f-ceea-467f-a8d5-1a2b3c4d5e6f done", "job 00000000-ceea-467f-a8d5-1a2b3c4d5e6f done"),
        ("commit 4f2a99e1 pushed", "commit 00aa11bb pushed"),
        ("at 0x7f00deadbeef", "at 0x1"),
        ("from 10.0.0.1:80", "from 192.168.12.1"),
        ("from fe80::1", "from 2001:db8:0:0:0:0:0:1"),
        ("mail to ann@example.org", "mail to bob.b+c@mail.example.com"),
        ("at 2026-11-30T14:05:00Z", "at 2026-12-01 00:00:01.123+02:00"),
        ("at 14:05", "at 9:00:01"),
    ],
)
def test_numbers_ids_addresses_and_times_make_no_difference(one: str, other: str) -> None:
    assert masked(one) == masked(other)


def test_what_is_nothing_but_numbers_or_addresses_is_not_similar() -> None:
    assert len(lines_of(digest_of("10.0.0.1", "10.0.0.2"))) == 2
    assert len(lines_of(digest_of(1, 2, 3))) == 3
    assert masked("added deed") != masked("faded cafe"), "words of the letters a to f are words"


def test_groups_have_headings_the_largest_first_and_do_not_repeat_them() -> None:
    values = [{"host": "web", "text": "a"}, {"host": "db", "text": "b"}, {"host": "db", "text": "c"}, {"text": "d"}]
    message = Template(group_by="host")(digest_of(*values), now=NOW)
    assert [(block.kind, block.text) for block in message.blocks[1:]] == [
        ("heading", "db (2)"), ("item", "b"), ("item", "c"), ("heading", "web"), ("item", "a"),
        ("heading", "other"), ("item", "d"),
    ]  # fmt: skip
    assert not [block for block in message.blocks if "host" in block.details]
    by_length = Template(group_by=lambda value: len(value["text"]))(digest_of(*values), now=NOW)
    assert by_length.blocks[1].text == "1 (4)"


@pytest.mark.parametrize(
    ("sizes", "most", "given"),
    [
        ([50], 20, [20]),
        ([50, 1], 20, [19, 1]),
        ([50, 50, 5], 20, [8, 7, 5]),
        ([9] * 30, 20, [4, 4, 3, 3, 3, 3]),
        ([1] * 30, 20, [1] * 20),
        ([9, 9], 1, [1]),
        ([], 20, []),
    ],
)
def test_places_are_divided_fairly_among_groups(sizes: list[int], most: int, given: list[int]) -> None:
    assert sorted(shares(sizes, most)) == sorted(given)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 60))
def test_no_more_places_are_given_than_there_are(sizes: list[int], most: int) -> None:
    given_ = shares(sizes, most)
    assert sum(given_) <= most
    assert all(0 < share <= size for share, size in zip(given_, sizes, strict=False))
    assert len(given_) == len(sizes) or sum(given_) == most or most - sum(given_) < 3


def test_what_is_left_out_is_counted() -> None:
    digest = digest_of(*(f"event {'x' * n}" for n in range(57)))
    message = Template()(digest, now=NOW)
    assert "and 37 more" in message.text
    assert "and 37 more" in str(message.html)
    assert message.blocks[-1].text == "and 37 more"
    assert message.subject == "ops: event and 56 more"
    many = Template(group_by="host", top=6)(digest_of(*({"host": f"h{n}", "text": "x"} for n in range(1500))), now=NOW)
    assert "and 1,494 more in 1,494 other groups" in many.text
    huge = Template()(digest_of(*(["a"] * 5_000), minutes=0), now=NOW)
    assert "and 3,000 more" in huge.text, "what is not looked at is counted"


def test_the_time_of_a_digest_is_that_of_all_its_records() -> None:
    first, last = (Formats(NOW).when(NOW - timedelta(minutes=minutes)) for minutes in (4_999, 0))
    assert f"5,000 updates, {first} to {last}" in plain(digest_of(*(["a"] * 5_000)), now=NOW).text


def test_what_was_dropped_and_when_the_next_one_comes_is_told() -> None:
    message = Template(tz="Europe/Berlin")(digest_of("a", dropped=3, next_due=NOW + timedelta(hours=20)), now=NOW)
    for told in (message.text, message.html, str(message.blocks)):
        assert "3 older ones were dropped" in str(told)
        assert "Next update, if there is news: usually not before tomorrow 11:05." in str(told)
    for minutes, is_told in ((-60, False), (4, False), (5, True)):
        near = Template()(digest_of("a", next_due=NOW + timedelta(minutes=minutes)), now=NOW)
        assert ("Next update" in near.text) is is_told, "what comes before a mail is read is not announced"


def test_times_are_those_of_the_readers_clock() -> None:
    berlin = Formats(NOW, ZoneInfo("Europe/Berlin"))
    told = [berlin.when(NOW - timedelta(hours=hours)) for hours in (0, 14, 16, 24 * 10, 24 * 400, -20)]
    assert told == ["15:05", "01:05", "yesterday 23:05", "20 Nov 15:05", "26 Oct 2025 15:05", "tomorrow 11:05"]
    ago = [berlin.ago(NOW - timedelta(minutes=minutes)) for minutes in (0, 1, 12, 60, 3000, -61)]
    assert ago == ["just now", "1 minute ago", "12 minutes ago", "1 hour ago", "2 days ago", "in 1 hour"]
    assert berlin.when("2026-11-30T10:00:00Z") == "11:00"
    assert berlin.when("no time") == berlin.ago(None) == berlin.when(datetime.max) == ""
    by_key = Template(tz=lambda key: "Asia/Tokyo" if key == "yuki@example.org" else "UTC")
    assert "(23:05)" in by_key(digest_of("a", key="yuki@example.org"), now=NOW).text
    assert "(14:05)" in by_key(digest_of("a"), now=NOW).text


def test_a_locale_has_its_own_numbers_times_and_plural_forms() -> None:
    text = (
        "{{ 12345 | number }} {{ digest.until | when }} {{ digest.until | ago }} "
        "{{ count | plural('Nachricht', 'Nachrichten') }} {{ 3 | plural('plik', 'plików', few='pliki') }}"
    )
    digest, later = digest_of("a"), NOW + timedelta(days=2)
    assert (
        Template(text=text, locale="de")(digest, now=later).text == "12.345 30. Nov. 14:05 vor 2 Tagen Nachricht plików"
    )
    assert Template(text=text, locale="pl")(digest, now=later).text.endswith("Nachricht pliki")
    assert Template(text=text)(digest, now=later).text == "12,345 30 Nov 14:05 2 days ago Nachricht plików"
    assert '<html lang="pt-BR">' in str(Template(locale="pt-BR")(digest).html)


def test_without_babel_a_locale_is_refused_and_all_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ConfigurationError, match="pip install babel"):
        Template(locale="de")
    assert Template(text="{{ 3 | plural('one', 'many') }}")(digest_of("a")).text == "many"


def test_without_jinja2_a_template_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "aiodigest.rendering.template")
    with pytest.raises(ConfigurationError, match=r"pip install 'aiodigest\[templates\]'"):
        _ = aiodigest.rendering.Template
    with pytest.raises(AttributeError, match="no attribute 'Templates'"):
        _ = aiodigest.rendering.Templates


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_message_tells_how_many_there_are(count: int) -> None:
    message = Template()(digest_of(*["a", "b"][:count], key="ann@example.org"), now=NOW)
    assert message.subject == ["Nothing new", "a", "a and 1 more"][count]
    told = ["0 updates", "1 update, 14:05", "2 updates, 14:04 to 14:05"][count]
    assert message.text.splitlines()[0] == told
    assert message.blocks[0].details.endswith(f"{told} (UTC)" if count else told)
    assert "ann@example.org" not in message.text + str(message.html), "whom it is for, the reader knows"
    assert (
        seen(digest_of("a", key="8f14e45f-ceea-467f-a8d5-1a2b3c4d5e6f")).heading
        == seen(digest_of(key="42")).heading
        == ""
    )


def test_a_digest_reads_well_as_text() -> None:
    events = [
        {"id": "e1", "event": "issues", "action": "opened", "repository": "octo/hello", "sender": "ann",
         "occurred_at": "2026-11-30T12:00:00Z", "payload": {"issue": {"title": "Spelling error", "id": 7}}},
        {"id": "e2", "event": "push", "action": None, "repository": "octo/hello", "sender": "bob", "occurred_at": None,
         "payload": {"head_commit": {"message": "Mend it\n\nAt last."}}},
    ]  # fmt: skip
    text = plain(digest_of(*events, key="octo/hello"), now=NOW).text
    assert text == (
        "octo/hello\n"
        "2 updates, 14:04 to 14:05\n"
        "\n"
        "* issues opened: Spelling error (14:04)\n"
        "  id: e1, sender: ann, occurred at: 12:00\n"
        "* push: Mend it At last. (14:05)\n"
        "  id: e2, sender: bob\n"
        "\n"
        "Times are in UTC.\n"
    )


# Templates of users

OURS = '{%% extends "digest.html" %%}{%% block %s %%}{{ %s }}{%% endblock %%}'


def test_a_block_within_a_replaced_one_may_have_any_name() -> None:
    inner = '{% extends "digest.html" %}{% block footer %}a{% block own %}b{% endblock %}{% endblock %}'
    assert ">ab</td>" in (Template(html=inner)(digest_of("x")).html or "")
    again = '{% extends "digest.html" %}{% block own %}b{% endblock %}{% block footer %}a{{ self.own() }}{% endblock %}'
    assert ">ab</td>" in (Template(html=again)(digest_of("x")).html or "")


@pytest.mark.parametrize("name", ["namespace", "dict", "loops", "gruß"])
def test_a_variable_may_have_any_name_that_is_not_taken(name: str) -> None:
    assert Template(text=f"{{{{ {name} }}}}", variables={name: "mine"})(digest_of("x")).text == "mine"


def test_a_template_is_a_string_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mail.html"
    file.write_text('<p title="{{ digest.key }}">{% for item in items %}{{ item.value.text }}{% endfor %}</p>')
    template = Template(subject="{{ count }} for {{ digest.key }}", text="{{ text }}-- \nbye", html=file)
    message = template(digest_of({"text": "<b>é"}, {"text": "&"}, key='"k'), now=NOW)
    assert message.subject == '2 for "k'
    assert message.text.endswith("Times are in UTC.\n-- \nbye")
    assert message.html == '<p title="&#34;k">&lt;b&gt;é&amp;</p>'


def test_a_part_of_the_default_page_can_be_replaced() -> None:
    template = Template(
        html='{% extends "digest.html" %}{% block footer %}<a href="https://x.example">Stop</a>{% endblock %}'
    )
    page = str(template(digest_of("a")).html)
    assert '<a href="https://x.example">Stop</a>' in page
    assert "Times are in" not in page
    assert Template(html="")(digest_of("a")).html is None


@pytest.mark.parametrize(
    "source",
    [
        OURS % ("styles", "font + wraps"),
        OURS % ("item", "item.title + group.name ~ loop.index"),
        "{% set x = 1 %}{% macro m(a) %}{{ a }}{% endmacro %}" + OURS % ("footer", "super() ~ self.notes() ~ m(x)"),
        "{% for each in items %}{% block row scoped %}{{ loop.index }}{{ each.title }}{% endblock %}{% endfor %}",
    ],
)
def test_a_block_may_name_what_is_set_around_it(source: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Template(html=source)(digest_of("a")).html
    assert not caplog.records


def test_a_variable_of_the_users_own_may_be_a_function_of_the_key() -> None:
    def stop(key: str) -> str:
        return f"https://{key}.example/?a=1&b=2"

    template = Template(
        text="{{ text }}{{ stop }}",
        html=OURS % ("footer", "stop"),
        variables={"stop": stop, "shop": "x"},
    )
    message = template(digest_of("a"), now=NOW)
    assert message.text.endswith("Times are in UTC.\nhttps://ops.example/?a=1&b=2")
    assert "https://ops.example/?a=1&amp;b=2</td>" in str(message.html)


def test_the_functions_of_items_are_filters() -> None:
    text = (
        "{% for group in items | group_by('host') %}{{ group.name }}:"
        "{% set some = group.items | collapse('equal') | top(1) %}"
        "{% for item in some %}{{ item.title }}*{{ item.count }}{% endfor %}+{{ some.more }};{% endfor %}"
    )
    values = [
        {"host": "a", "text": "x"},
        {"host": "a", "text": "x"},
        {"host": "a", "text": "y"},
        {"host": "b", "text": "z"},
    ]
    assert Template(text=text)(digest_of(*values)).text == "a:x*2+1;b:z*1+0;"


def test_a_field_comes_before_a_method_and_a_missing_one_is_empty() -> None:
    text = "{{ items[0].value.items }} {{ items[0].value.no.such.field }}{{ items[0].value.keys }}"
    assert Template(text=text)(digest_of({"items": 3, "keys": "k"})).text == "3 k"


@pytest.mark.parametrize(
    ("address", "link"),
    [("https://x.example/a?b=1", "https://x.example/a?b=1"), ("javascript:alert(1)", ""), (" data:x", ""), (7, "")],
)
def test_a_link_leads_to_the_web_or_nowhere(address: Any, link: str) -> None:
    page = Template(html='<a href="{{ items[0].value.url | url }}">x</a>')(digest_of({"url": address})).html
    assert page == f'<a href="{link}">x</a>'


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"text": "{% for %}"}, ConfigurationError, "the template of text cannot be used"),
        ({"text": "{{ x | nosuch }}"}, ConfigurationError, "nosuch"),
        ({"subject": "{{ digset.key }}"}, ConfigurationError, "names 'digset'; there are: count, digest, groups"),
        (
            {"html": OURS % ("footer", "digset.key")},
            ConfigurationError,
            "the template of html names 'digset'; there are:",
        ),
        ({"html": OURS % ("footer", "item.title")}, ConfigurationError, "names 'item'"),
        ({"text": "{% block a %}{{ item }}{% endblock %}"}, ConfigurationError, "names 'item'"),
        (
            {"html": '{% extends "base.html" %}'},
            ConfigurationError,
            "'base.html': only \"digest.html\" can be extended",
        ),
        ({"text": "{% include '/etc/passwd' %}"}, ConfigurationError, 'only "digest.html" can be extended'),
        (
            {"html": '{% extends "digest.html" %}{% block foter %}x{% endblock %}'},
            ConfigurationError,
            "has a block 'foter'; digest.html has footer, header, item, items, notes, styles",
        ),
        (
            {"variables": {"items": 1}},
            InvalidArgument,
            "variables may not name 'items'; taken are: count, digest",
        ),
        ({"variables": {"a b": 1}}, InvalidArgument, "names of variables must be names that Jinja2 can read"),
        ({"variables": {"not": 1}}, InvalidArgument, "names of variables must be names that Jinja2 can read"),
        ({"variables": {"true": 1}}, InvalidArgument, "names of variables must be names that Jinja2 can read"),
        ({"variables": ["a"]}, InvalidArgument, "variables must be a mapping from names to values"),
        ({"html": Path("/no/such/file")}, ConfigurationError, "No such file"),
        ({"text": "{% for a in items %}" * 25 + "{% endfor %}" * 25}, ConfigurationError, "too many statically nested"),
        ({"text": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"}, ConfigurationError, "recursion depth"),
        ({"text": "{{ " + "9" * 5000 + " }}"}, ConfigurationError, "4300 digits"),
        ({"text": 7}, ConfigurationError, "the template of text cannot be used"),
        ({"text": "{{ lipsum(n=9) }}"}, ConfigurationError, "names 'lipsum'"),
        ({"html": Path("/dev/zero")}, ConfigurationError, "/dev/zero is larger than 1,000,000 bytes"),
        ({"tz": "Mars/Base"}, InvalidArgument, "tz must be a time zone"),
        ({"tz": "Europe/Berln"}, InvalidArgument, r"\(is it 'Europe/Berlin'\?\)"),
        ({"locale": "xx_nowhere"}, InvalidArgument, "locale must be"),
        ({"top": 0}, InvalidArgument, "top must be a whole number from 1 to 100, not 0"),
        ({"fields": "id"}, InvalidArgument, "fields must be a list"),
        ({"fields": []}, InvalidArgument, "fields must be a list"),
        ({"collapse": "all"}, InvalidArgument, "collapse must be"),
        ({"group_by": 3}, InvalidArgument, "group_by must be"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_set_up(settings: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Template(**settings)


@pytest.mark.parametrize(
    "source",
    [
        "{{ items[0].value.text / 2 }}",
        "{{ items[0].nothing() }}",
        "{{ items.append(1) }}",
        "{% block a %}{{ x }}{% endblock %}{% if not count %}{% set x = 1 %}{% endif %}",
        "{% set file = '/etc/passwd' %}{% include file %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ '01234567890123456789' }}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 2 ** 99 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_a_template_that_fails_is_replaced_by_the_plain_default(source: str, caplog: pytest.LogCaptureFixture) -> None:
    template, digest = Template(subject=source, text=source, html=source), digest_of({"text": "a"})
    message = template(digest, now=NOW)
    assert (message.subject, message.text, message.html) == (*plain_of(digest), None)
    assert len(caplog.records) == 3
    template(digest)
    assert len(caplog.records) == 3, "it is told once"
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "the template failed, so the plain default is sent (html): " in caplog.text


def test_a_range_of_a_template_ends(caplog: pytest.LogCaptureFixture) -> None:
    assert Template(text="{% for n in range(2, 9, 3) %}{{ n }}{% endfor %}")(digest_of("a")).text == "258"
    Template(text="{% for a in range(9) %}{% for b in range(20_000) %}{% endfor %}{% endfor %}")(digest_of("a"))
    assert "its loops take more than 200,000 steps" in caplog.text


DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for n in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%900000000d' % 1 }}", "{{ '%*d' % (900000000, 1) }}", "{{ '%(a)900000000d' % {'a': 1} }}",
        "{{ '%900000000d' | format(1) }}", "{{ 'a'.encode() % 1 }}",
        "{{ '{:>900000000}'.format(1) }}", "{{ '{:{}}'.format(1, 900000000) }}",
        "{{ 'a{a:>900000000}'.format_map({'a': 1}) }}",
        "{{ 'x' | center(900000000) | length }}", "{{ 'x' | indent(900000000) }}",
        "{{ [1] | batch(900000000, 0) | list }}",
        "{{ [1] | slice(900000000) | list }}", "{{ ('a' * 1) }}",
        "{{ 'x'.ljust(900000000) }}", "{{ 'x'.zfill(width=900000000) }}", "{{ (1).to_bytes(900000000, 'big') }}",
        "{{ 'x'.translate({120: 'y'}) }}", "{{ '-'.join(items | map('string')) }}",
        DOUBLED % ("'ab'", "ns.x ~ ns.x"), DOUBLED % ("'ab'", "ns.x + ns.x"), DOUBLED % ("[1]", "ns.x + ns.x"),
        DOUBLED % ("'ab'", "ns.x | replace('a', ns.x)"), DOUBLED % ("'ab'", "ns.x.replace('a', ns.x)"),
        DOUBLED % ("'ab'", "[ns.x, ns.x] | join"), DOUBLED % ("'ab'", "'-'.join([ns.x, ns.x])"),
        DOUBLED % ("'\\\\'", "ns.x | tojson | string"), DOUBLED % ("'\\\\'", "'%r' % ns.x"),
        DOUBLED % ("'ab'", "'{0}{0}'.format(ns.x)"),
        "{% set x %}{% for n in range(9999) %}" + "y" * 5_000 + "{% endfor %}{% endset %}{{ x | length }}",
        "{% for a in items %}{% for b in items %}{% for c in items %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in items %}{% for b in items %}{% for c in items if false %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set s = namespace(x='') %}{% for n in range(60) %}{% set s.x %}{{ s.x }}.{{ s.x }}{% endset %}{% endfor %}",
    ],
)  # fmt: skip
def test_no_template_takes_more_than_its_share(source: str, caplog: pytest.LogCaptureFixture) -> None:
    digest = digest_of(*({"n": n} for n in range(100)))
    assert Template(html=source.replace("'", '"'))(digest).html is None
    assert "the template failed" in caplog.text
    kinds = {record.getMessage().split(": ")[1] for record in caplog.records}
    assert kinds == {"TooMuch"}, caplog.text


def test_what_templates_do_every_day_is_within_their_share() -> None:
    source = (
        "{{ items | map(attribute='title') | join(', ') }} {{ 'abc'.upper().replace('A', 'b') }}"
        " {{ '-'.join(['a', 'b']) }}"
        " {{ '%5d|%-4s' % (3, 'x') }} {{ '{:>5}{:,}'.format(3, 123456789) }} {{ 'x' | center(5) }} {{ 7 % 4 + 2 }}"
        " {{ [1, 2, 3] | batch(2) | list }} {% filter upper %}q{% endfilter %} {% set z | trim %} k {% endset %}{{ z }}"
        " {% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}w{% endcall %} {{ [10000000, 2] | join('-') }}"
        "{% for n in [[1, [2]]] recursive %}({{ loop(n) if n is iterable else n }}){{ loop.last }}{% endfor %}"
    )
    shown = Template(text=source)(digest_of("one", "two")).text
    assert shown == (
        "one, two bBC a-b     3|x        3123,456,789   x   5 [[1, 2], [3]] Q k [w] 10000000-2"
        "((1)False((2)True)True)True"
    )


def test_a_template_reaches_nothing_but_what_it_is_given() -> None:
    text = (
        "{{ digest.__class__ }}{{ items[0]._value }}{{ items.__len__ }}{{ cycler.__init__ }}{{ zone.format.__self__ }}."
    )
    assert Template(text=text)(digest_of("a")).text == "."
    block = "{% block a %}" + text + "{{ self.__init__ }}{% endblock %}"
    assert Template(text=block, html="")(digest_of("a")).text == "."


def plain_of(digest: Digest[Any]) -> tuple[str, str]:
    message = plain(digest, now=NOW)
    return message.subject, message.text


class Hostile:
    """An object that helps nobody."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __len__ = __hash__ = __str__  # pyright: ignore[reportAssignmentType]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no")


def test_a_value_that_cannot_be_read_hides_no_other() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    shared: Any = ["x"]
    for _ in range(20):
        shared = [shared] * 100
    values = [Hostile(), cycle, shared, {"a": Hostile()}, 10**5000, b"\xff", {1: {2: cycle}}, "fine"]
    message = Template(text="{{ items | map(attribute='value') | list }}")(digest_of(*values), now=NOW)
    assert "a Hostile" in str(message.blocks)
    assert "fine" in str(message.html)
    assert len(message.text) < 200_000


def test_functions_of_the_user_that_fail_are_survived(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> str:
        raise ValueError("no such reader")

    assert "* a (" in Template(group_by=fails)(digest_of("a")).text
    assert "* a (" in Template(tz=fails)(digest_of("a")).text
    assert "(digest): ValueError: no such reader" in caplog.text
    broken: Any = Digest(None, [None], None)  # type: ignore[arg-type, list-item]
    assert Template()(broken).text == plain(broken).text == "There is news, which could not be shown.\n"


# Texts of strangers


FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e007a]{3,6}\U000e007f")
ENGLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"  # a flag, spelt by tags


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("a\x00b\x07c\x7f", "abc"),
        ("\x1b[31;1mred\x1b[0m \x1b]0;title\x07x \x1b", "red x"),
        ("a\r\nb\rc\u2028d\x85e", "a b c d e"),
        ("user\u202egnp.exe", "usergnp.exe"),
        ("\u2066a\u2069\u200e\u061c", "a"),
        ("pass\u200bword\u200dx\ufeff\xad", "passwordx"),
        ("\U0001f468\u200d\U0001f469\u200d\u200d\U0001f467", "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
        ("\u0645\u06cc\u200c\u0631\u0648\u0645", "\u0645\u06cc\u200c\u0631\u0648\u0645"),  # a word of Persian
        ("e" + "\u0301" * 40, "e" + "\u0301" * 3),
        ("a\ud800b\ue000c\uffff", "a\ufffdb\ufffdc\ufffd"),
        ("a\u3164\u2800\xa0\tb", "a b"),
        ("hi\U000e0041\U000e0042", "hi"),
        (ENGLAND, ENGLAND),
        ("\U0001f3f4\U000e0067\U000e0062" + ENGLAND + "\U000e0067", "\U0001f3f4" + ENGLAND),
        ("so\xadft \xada\xad\xad\xadb\xad", "so\xadft a\xadb"),
        ("שלום עולם", "שלום עולם"),
        ("<b>&amp;", "<b>&amp;"),
    ],
)
def test_a_text_of_a_stranger_controls_and_hides_nothing(text: str, harmless: str) -> None:
    assert line(text) == harmless


MARKS = [code for code in range(0x110000) if category(chr(code)) in ("Mn", "Me")]


def test_no_letter_has_more_than_three_of_any_marks() -> None:
    for first in range(0, len(MARKS), 5):
        marks = "".join(map(chr, MARKS[first : first + 5]))
        found = clean(f"a{marks}b{marks * 200}c")
        runs = "".join("m" if category(char) in ("Mn", "Me") else char for char in found)
        assert "mmmm" not in runs, marks
        assert runs.replace("m", "").replace(" ", "") == "abc"  # some are blank


def test_what_is_cut_is_cut_between_characters() -> None:
    assert clean("abc", 3) == "abc"
    assert clean("abcd", 3) == "ab…"
    assert clean("ab" + "e\u0301" * 5, 4) == "ab…"
    assert not clean("x" + "\U0001f468\u200d\U0001f469" * 9, 6)[:-1].endswith("\u200d")
    for most in range(2, 12):
        assert is_harmless(clean("xxx" + ENGLAND + "yyy", most))
    assert clean("x" * 10_000_000, 10) == "x" * 9 + "…"
    assert clean("\u202e" * 10_000_000 + "x", 10) == "…"


PIECES = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</style></title></table>", "<!--", "]]>",
    "\"'><a href=x>",
    "&lt;b&gt;", "&#x202e;", "{{ 7 * 7 }}", "{% for x in range(10 ** 9) %}", "{{ digest.__class__ }}", "{#", "%s%n",
    "\r\nBcc: all@example.org\r\n\r\n", "\x00", "\x1b[2J", "\x9b31m", "\x07", "\u202e", "\u2067", "\u200d", "\u200b",
    "\ufeff", "\u2028", "\x85", "\ud800", "\udfff", "\ufffe", "\U000e0041", "\u115f", "e" + "\u0301" * 300,
    "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627\u202c", "\U0001f3f3\ufe0f\u200d\U0001f308",
    "javascript:alert(1)",
    "a" * 1_000_000, "\u202e\n" * 400_000, "aA0:" * 250_000, " " * 100_000, "\n", " ", "@here", "*_`~|>#",
    "and 37 more",
    "text", "title",
]  # fmt: skip

WRITTEN = {0xE000 + number: piece for number, piece in enumerate(PIECES)}  # hypothesis keeps what it draws: a character

texts = st.lists(st.sampled_from(list(map(chr, WRITTEN))) | st.text(max_size=8), max_size=4).map("".join)
huge = st.builds(pow, st.just(10), st.just(5000))
scalars = texts | st.none() | st.booleans() | st.integers() | st.floats() | huge | st.binary(max_size=9)
names = st.sampled_from(["title", "text", "name", "message", "event", "at", "host", "a.b"]) | texts
hostile = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)
moments = st.datetimes(timezones=st.just(UTC))
records = st.builds(Record[Any], texts, hostile, moments)
dropped = st.integers(0, 2**53)
digests = st.builds(
    Digest[Any], texts, st.lists(records, max_size=6), texts, dropped=dropped, next_due=st.none() | moments
)


def written(value: Any) -> Any:
    """Return a value with the pieces that its characters stand for."""
    match value:
        case str():
            return value.translate(WRITTEN)
        case list():
            return [written(each) for each in cast("list[object]", value)]
        case dict():
            return {written(name): written(each) for name, each in cast("dict[str, object]", value).items()}
        case _:
            return value


def expanded(digest: Digest[Any]) -> Digest[Any]:
    several = [Record(written(record.id), written(record.value), record.timestamp) for record in digest.records]
    return replace(digest, key=written(digest.key), id=written(digest.id), records=several)


EVERYWHERE = Template(
    subject="{{ digest.key }}{{ items[0].value }}",
    text="{% for item in items %}{{ item.value }} {{ item.value | string | line }}{{ item.time | when }}\n{% endfor %}",
    html="<p title='{{ digest.id }}'>{% for item in items %}<b>{{ item.value }}</b>{{ item.title }}{% endfor %}</p>",
)
TEMPLATES = [
    Template(),
    Template(group_by="host", fields=["title", "a.b", "at"], tz="Asia/Tokyo", locale="de"),
    EVERYWHERE,
]


class Page(HTMLParser):
    """The elements and attributes of a page, which must be closed in the order in which they were opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found, self.open = set[str](), list[str]()
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_pi = unknown_decl = handle_comment


KNOWN = Page(
    str(Template(group_by="host")(digest_of(*["a. b\nc"] * 2 + [{"host": "b", "text": "c", "x": 1}])).html)
).found | {"b", "p title"}


def is_harmless(text: str) -> bool:
    """True if each character shows as itself, or is one of a flag that is spelt by tags."""
    return all(char == "\n" or shows_itself(char) for char in set(FLAG.sub("", text)))


def shows_itself(char: str) -> bool:
    """Ask the tables of Unicode, and not the code that is tested."""
    if category(char) == "Cf":
        return char in "\u200c\u200d\xad" or name(char).startswith(("ARABIC", "SYRIAC", "KAITHI", "EGYPTIAN"))
    isolates = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return category(char) not in ("Cc", "Cs", "Co", "Zl", "Zp") and bidirectional(char) not in isolates


def assert_harmless(message: Message) -> None:
    for text, most in [(message.subject, 200), *((f"{block.text}{block.details}", 2_500) for block in message.blocks)]:
        assert len(text) <= most
        assert is_harmless(text)
    assert "\n" not in message.subject
    assert message.subject
    assert len(message.blocks) <= 60
    assert len(message.text) <= 200_000
    assert is_harmless(message.text)
    if message.html is not None:
        assert len(message.html) <= 1_000_000
        assert is_harmless(message.html)
        assert Page(message.html).found <= KNOWN


def check_hostile(digest: Digest[Any], now: datetime) -> None:
    for render in (plain, *TEMPLATES):
        assert_harmless(render(digest, now=now))


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
fuzzed = settings(deadline=None, suppress_health_check=SLOW)


@settings(fuzzed, max_examples=150)
@given(digests, moments)
def test_no_value_of_a_stranger_does_any_harm(digest: Digest[Any], now: datetime) -> None:
    check_hostile(expanded(digest), now)


@pytest.mark.fuzz
@pytest.mark.parametrize("thousand", range(10))  # hypothesis remembers what it has tried until a test ends
@settings(fuzzed, max_examples=1_000)
@given(digest=digests, now=moments)
def test_none_of_ten_thousand_hostile_digests_does_any_harm(thousand: int, digest: Digest[Any], now: datetime) -> None:
    check_hostile(expanded(digest), now)


@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
def test_no_piece_of_hostile_text_does_any_harm_wherever_it_is(piece: str) -> None:
    values = [
        piece,
        piece * 3,
        {piece: piece},
        {"title": piece, "text": piece, "host": piece},
        [piece] * 5,
        {"a": {"title": piece}},
    ]
    check_hostile(digest_of(*values * 5, key=piece), NOW)
