"""On-page checks: their findings in pages, and the command."""

import json
import re

import pytest

from datamodules.text.encoding import sentences_of, words_of
from lit_models.seo.onpage import check_page, check_site, main
from tests.toy import csv_rows

SOUND = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pies</title>
<meta name="description" content="How to make an apple pie as grandmothers did: what you need, how
long it takes, and what to do with the peel."><link rel="canonical" href="https://ex.org/pie">
</head><body><h1>Apple pie</h1><h2>Peel</h2><p>Keep it.</p></body></html>"""


def report(html):
    return check_page(f"<meta charset=utf-8>{html}".encode(), "page")


def rules(html, check):
    """Return the rules that one check reports, with evidence."""
    found = report(html).findings
    return [(f.rule.split(";")[0], f.evidence, f.place) for f in found if f.check == check]


def test_a_sound_page_has_no_finding():
    done = report(SOUND)
    assert done.findings == []
    assert (done.facts["title"], done.facts["title_length"]) == ("Pies", 4)
    assert done.facts["description_length"] == 109
    assert done.facts["canonical"] == "https://ex.org/pie"
    assert done.facts["headings"] == [(1, "Apple pie"), (2, "Peel")]
    assert done.facts["words"] == 5


def test_titles_and_descriptions_are_measured_in_characters():
    head = "<title>{}</title><meta name=description content='{}'>"
    at_the_limit = report(head.format("é" * 60, "x" * 70)).findings
    assert not [f for f in at_the_limit if f.check in ("title", "description")]
    assert rules(head.format("é" * 61, ""), "title")[0][1].startswith("61: éé")
    assert rules(head.format("", "x" * 161), "description")[0][1].startswith("161: xx")
    assert rules(head.format(" ", "x"), "title")[0][0] == "the <title> is empty"
    assert rules("<p>x", "description") == [("there is no meta description", "", "head")]
    two = "<title>a</title><title>b</title>"
    assert rules(two, "title") == [("another <title>", "b", "head > title:nth-of-type(2)")]
    assert report("<p>x<svg><title>drawing</title></svg>").facts["title"] is None


@pytest.mark.parametrize(
    ("link", "rule"),
    [
        ('<link rel="canonical" href="">', "the canonical link has no address"),
        ('<link rel="canonical" href="http://[">', "the canonical link has no address"),
        ('<link rel="x CANONICAL" href="/a">', "the canonical address is relative"),
        ("<p>x</p><link rel=canonical href=https://a.b/>", "the canonical link stands in the body"),
    ],
)
def test_a_canonical_link_must_be_whole_and_in_the_head(link, rule):
    assert rules(link, "canonical")[0][0].startswith(rule)
    two = "<link rel=canonical href=https://a.b/><link rel=canonical href=https://c.d/>"
    [(broken_rule, evidence, _)] = rules(two, "canonical")
    assert (broken_rule, evidence) == (
        "the canonical links name different addresses",
        "https://a.b/, https://c.d/",
    )


def test_robots_and_language_are_read():
    html = '<html lang="en_us!"><meta name="ROBOTS" content="NOINDEX,follow"><p>x'
    assert rules(html, "robots")[0][1] == '<meta name="ROBOTS" content="NOINDEX,follow">'
    assert report(html).facts["robots"] == {"robots": "noindex,follow"}
    [(rule, evidence, place)] = rules(html, "language")
    assert rule == "no language is declared by a code such as en or pt-BR"
    assert (evidence, place) == ("en_us!", "html")


def test_the_order_of_headings_is_checked():
    html = "<h2>a<br>a</h2><h4>b</h4><h1>c</h1><h1>d</h1><h2></h2>"
    assert report(html).facts["headings"][0] == (2, "a a")
    broken = ["levels are skipped", "another h1", "an empty heading"]
    assert [rule for rule, _, _ in rules(html, "headings")] == broken
    assert rules("<p>x", "headings") == [("there is no heading", "", "")]
    assert rules("<h2>a</h2>", "headings") == [("there is no h1", "a", "body > h2:nth-of-type(1)")]


def test_an_image_without_alt_differs_from_one_with_an_empty_alt():
    html = "<img src=a><img src=b alt><img src=c alt='A pie'><img src=d aria-label=x>"
    assert report(html).facts["images"] == {"described": 2, "decorative": 1, "without": 1}
    [(_, evidence, place)] = rules(html, "images")
    assert (evidence, place) == ('<img src="a">', "body > img:nth-of-type(1)")


def test_many_faults_of_one_kind_are_counted():
    found = report("<img src=a>" * 30).findings
    assert [f.rule for f in found if f.check == "images"][-1] == "more of these"
    assert len([f for f in found if f.check == "images"]) == 21


def test_links_that_say_nothing_or_lead_nowhere_are_findings():
    silent = (
        "<a href='/a'><img src=x></a><a href='/b'><img src=x alt=Home></a><a href='http://['>y</a>"
    )
    assert report(silent).facts["links"] == 3
    assert [rule for rule, _, _ in rules(silent, "links")] == [
        "a link without a text says nothing of its target",
        "the address cannot be read",
    ]


def test_structured_data_of_all_kinds_is_listed():
    html = (
        '<script type="application/ld+json">{"@graph": [{"@type": ["A", "B"]}]}</script>'
        '<script type="application/ld+json; charset=utf-8">{"@type": "C"}</script>'
        '<div itemscope itemtype="https://schema.org/Recipe"></div><p typeof="Person">x</p>'
    )
    held = report(html).facts["structured_data"]
    assert (held["json_ld"], held["rdfa"]) == (["A", "B", "C"], ["Person"])
    assert held["microdata"] == ["https://schema.org/Recipe"]


@pytest.mark.parametrize(
    ("content", "read", "rule"),
    [
        ("<meta charset=utf-8><p>é".encode("cp1252"), "utf-8", "utf-8 is declared and the bytes"),
        ("<meta charset=latin1><p>é".encode(), "cp1252", "cp1252 is declared and the bytes are UT"),
        ("<p>é".encode(), "utf-8", "no encoding is declared"),
        ("<p>é".encode("cp1252"), "cp1252", "no encoding is declared"),
        (b"<meta charset=klingon><p>x", "utf-8", "the declared encoding is not known"),
        (b"<meta charset=base64><p>x", "utf-8", "the declared encoding is not known"),
        (b"<meta charset=idna><p>x", "utf-8", "the declared encoding is not known"),
        (b" ", "utf-8", "the file is empty"),
    ],
)
def test_a_wrong_encoding_is_a_finding(content, read, rule):
    done = check_page(content, "a.html")
    assert done.facts["encoding_read"] == read
    assert done.findings[0].rule.startswith(rule)


@pytest.mark.parametrize(
    ("html", "encoding"),
    [
        ('<meta charset="iso-8859-1"><title>é', "cp1252"),
        ("\ufeff<title>é", "utf-16"),
        ('<meta charset="utf-16"><title>é', "utf-8"),
        ("<meta charset=gb2312><title>镕", "gb18030"),
        ("<?xml version='1.0' encoding='Shift_JIS'?><title>①", "cp932"),
    ],
)
def test_a_declared_encoding_is_used_as_browsers_do(html, encoding):
    done = check_page(html.encode(encoding), "a")
    assert done.facts["title"] == html[-1]
    assert not [finding for finding in done.findings if finding.check == "encoding"]


def test_malformed_html_is_read_as_browsers_do():
    html = "<h1>One<p>two</h1></b><div>" + "<div>" * 5000 + "deep<style>p{}</style><p hidden>no"
    done = report(html + "<p style='display: none'>no</p>un<b>broken</b>")
    assert done.words == ["One", "two", "deep", "unbroken"]


def test_the_command_prints_the_report_of_each_page(tmp_path, capsys):
    page = tmp_path / "a.html"
    page.write_text(SOUND, encoding="utf-8")
    main([str(page)])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "0 findings" in printed
    main([str(page), str(tmp_path)])  # the same page given twice is not its own duplicate
    assert capsys.readouterr().out == printed
    (tmp_path / "b.html").write_text(SOUND, encoding="utf-8")
    main([str(tmp_path), f"--csv={tmp_path / 'site.csv'}"])
    first, second = csv_rows(tmp_path / "site.csv")
    assert (first["headings"], first["findings"]) == ("2", "0")
    findings = csv_rows(tmp_path / "site-findings.csv")
    assert {f["check"] for f in findings} == {"duplicates"}
    assert len(findings) == int(second["findings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.html"], "the page: nowhere.html does not exist. Name a file"),
        (["empty"], "the folder empty holds no text; its files must end in .html"),
        (["linked"], "the page: linked/b.html does not exist"),
    ],
)
def test_wrong_input_is_named(arguments, message, own_folder):
    for folder in ("empty", "linked"):
        (own_folder / folder).mkdir()
    (own_folder / "linked" / "b.html").symlink_to("gone.html")
    with pytest.raises((OSError, ValueError), match=re.escape(message)):
        main(arguments)


def test_pages_of_a_site_that_repeat_each_other_are_named():
    words = " ".join(f"w{i}" for i in range(100))
    texts = (("a", "One", words), ("b", "one ", words.upper()), ("c", "Two", "w0 w1 w2 w3 w4 x"))
    reports = check_site((n, f"<title>{t}</title><p>{text}".encode()) for n, t, text in texts)
    found = [[f.rule for f in r.findings if f.check == "duplicates"] for r in reports]
    same = "the same {} as another page"
    assert found == [[], [same.format("title"), same.format("text")], []]
    assert reports[1].findings[-1].evidence.startswith("a: W0 W1")


def test_pages_of_folders_are_a_site_with_a_summary_and_tables(own_folder, capsys):
    for name in ("bakery/index.html", "bakery/shop/pie.htm", "garden/a.html", "garden/notes.txt"):
        path = own_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        long = f"<title>{name}{'x' * (40 + len(name))}</title><img><p>pie {name}"
        path.write_text(SOUND if "index" in name else long, encoding="utf-8")
    main(["bakery", "garden"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for words in (
        "── 3 pages",
        "1 without a finding",
        "2 x 1 to 60 characters are shown whole",
        "each page in onpage.csv, each finding in onpage-findings.csv",
    ):
        assert words in printed
    pages = csv_rows("onpage.csv")
    names = ["bakery/index.html", "bakery/shop/pie.htm", "garden/a.html"]
    assert [page["page"] for page in pages] == names
    assert pages[0]["title"] == "Pies"
    assert [page["images_without"] for page in pages[:2]] == ["0", "1"]
    findings = csv_rows("onpage-findings.csv")
    counts = [sum(f["page"] == page["page"] for f in findings) for page in pages]
    assert counts == [int(page["findings"]) for page in pages]
    assert {f["check"] for f in findings if f["page"] == names[2]} >= {"title", "images"}
    (own_folder / "garden" / "b.html").write_text(SOUND.replace("pie", "plum"), encoding="utf-8")
    main(["garden/b.html"])
    assert "── garden/b.html" in capsys.readouterr().out
    main(["garden", "--csv=my.site.csv.gz"])
    assert "each finding in my.site-findings.csv.gz" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith paid 3.5 dollars, e.g. for pie.", "He left."],
        ["What?!", "Yes.", '"No!" he said.', 'She said: "Go."', "They went."],
        ["J. R. R. Tolkien wrote it.", "So did I.", "He did not."],
        ["Buy eggs, milk etc. and flour.", "Buy eggs, etc.", "Then bake."],
        ["See fig. 3 and No. 5 of vol. 2.", "Well ... not yet…", "Now."],
        ["It is in the U.S. today.", "It is in the U.S.", "It stays."],
    ],
)
def test_sentences_end_where_they_end(sentences):
    assert sentences_of([" ".join(sentences)]) == sentences


def test_no_sentence_goes_over_a_line():
    found = sentences_of(["Apple pie", "Peel it. Bake", "***", ""])
    assert found == ["Apple pie", "Peel it.", "Bake"]


def test_words_keep_apostrophes_hyphens_and_decimals():
    found = words_of("It's a well-known 3.5 of 1,000 _x_ – naïve")
    assert "|".join(found) == "It's|a|well-known|3.5|of|1,000|x|naïve"


def checked(text):
    """Return the types of JSON-LD, and the rules that it breaks."""
    html = f'<script type="application/ld+json">{text}</script>'
    types = report(html).facts["structured_data"]["json_ld"]
    return types, [rule for rule, _, _ in rules(html, "structured data")]


def test_types_of_json_ld_are_texts_only():
    value = {"@type": ["A", 1, None, "B"], "about": [{"@type": {"@type": "C"}}, {"@type": True}]}
    assert checked(json.dumps(value)) == (["A", "B", "C"], [])


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, '{"@type": }'])
def test_json_ld_that_cannot_be_parsed_is_a_finding(text):
    types, [rule] = checked(text)
    assert not types
    assert rule.startswith("JSON-LD that is no JSON")
