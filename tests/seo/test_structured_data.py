"""JSON-LD of any shape: a page is checked whatever somebody wrote into it."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lit_models.seo.onpage import Page, check_page

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["@type", "@graph"]), inner),
    max_leaves=8,
)


def checked(text):
    """Return the types of JSON-LD, and the rules that it breaks."""
    html = f'<script type="application/ld+json">{text}</script>'
    report = check_page(Page("page", html))
    rules = [finding.rule for finding in report.findings if finding.check == "structured data"]
    return report.facts["structured_data"]["json_ld"], rules


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
@example({"@type": 5})
def test_any_json_can_be_checked(value):
    types, rules = checked(json.dumps(value).replace("<", "\\u003c"))
    assert not rules
    assert all(isinstance(name, str) for name in types)


@pytest.mark.parametrize(
    ("value", "types"),
    [
        ({"@type": 5}, []),
        ({"@type": True, "about": {"@type": "A"}}, ["A"]),
        ({"@type": ["A", 1, None, "B"]}, ["A", "B"]),
        ([{"@type": {"@type": "A"}}], ["A"]),
    ],
)
def test_what_is_no_text_names_no_type(value, types):
    assert checked(json.dumps(value)) == (types, [])


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, '{"@type": }'])
def test_what_cannot_be_read_is_a_finding(text):
    types, [rule] = checked(text)
    assert not types
    assert rule.startswith("JSON-LD that is no JSON")
