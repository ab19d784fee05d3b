"""The symptom index: every error a chapter provokes, and the chapter.

Errors are read from the executed pages' outputs, where `raises`, `%%before`
and `%%fresh` print them as ``RuntimeError: first sentence.``
"""

from __future__ import annotations

import re
from collections import defaultdict

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ERROR = re.compile(r"^(?:\w+(?:Error|Exception|Warning)|SIG[A-Z]+): .+", re.M)


class Symptoms(SphinxDirective):
    """Stands for the index until every page is read."""

    def run(self) -> list[nodes.Node]:
        return [nodes.bullet_list()]


def gather(app, doctree) -> None:
    """Keep a page's errors, each with the section that it stands in."""
    found: dict[str, str] = {}
    for section in doctree.findall(nodes.section):
        for block in section.findall(nodes.literal_block):
            if "output" in block["classes"]:
                errors = ERROR.findall(block.astext())
                found |= dict.fromkeys(errors, section["ids"][0])
    app.env.metadata[app.env.docname]["symptoms"] = found


def resolve(app, doctree, docname) -> None:
    if docname != "docs/symptoms":
        return
    links = defaultdict(list)
    for page, about in sorted(app.env.metadata.items()):
        number = app.env.toc_secnumbers.get(page, {}).get("", ())
        title = f"{'.'.join(map(str, number))} {app.env.titles[page].astext()}"
        uri = app.builder.get_relative_uri(docname, page)
        for message, section in about.get("symptoms", {}).items():
            link = nodes.reference("", title, refuri=f"{uri}#{section}")
            links[message] += [nodes.Text(" "), link]
    index = next(doctree.findall(nodes.bullet_list))
    for message in sorted(links):
        text = nodes.paragraph("", "", nodes.literal("", message))
        text += links[message]
        index += nodes.list_item("", text)


def setup(app):
    app.add_directive("symptoms", Symptoms)
    app.connect("doctree-read", gather)
    # The index is written anew whenever anything is read.
    app.connect("env-updated", lambda app, env: ["docs/symptoms"])
    app.connect("doctree-resolved", resolve)
    return {"version": "1", "parallel_read_safe": True}
