"""Pages that need no other file."""

import numpy as np
from html_reader import Reader

from attention_jax.reports import html_page, plotting
from attention_jax.runs.run_folder import write_text


def drawn():
    figure, (axes,) = plotting.new_figure(2, 1)
    axes.plot(np.arange(3))
    return figure


def test_what_users_wrote_is_text_and_not_markup():
    evil = "<script>alert('x')</script> & \"quotes\""
    parts = [
        html_page.heading(evil),
        html_page.paragraph(evil),
        html_page.code(evil),
        html_page.table((evil,), [(evil,)]),
        html_page.figure(drawn(), evil),
    ]
    page = Reader(html_page.page(evil, parts))
    assert page.open == []
    assert not page.attributes("script")
    assert page.text.count(evil) == 8  # title, h1, the five parts (a table has two)
    assert page.attributes("img")[0]["alt"] == evil


def test_the_name_of_a_file_in_another_encoding_can_be_written(tmp_path):
    write_text(tmp_path / "page.html", html_page.page("a\udcff", []))
    assert "<title>a\\udcff</title>" in (tmp_path / "page.html").read_text()
