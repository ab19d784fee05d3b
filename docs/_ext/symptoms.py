"""The symptom index: every error a chapter provokes, and the chapter.

Errors are read from the executed pages' outputs, where `raises`, `%%before`
and `%%fresh` print them as ``RuntimeError: first sentence.``
"""

from __future__ import annotations

import re
from collections import defaultdict

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ERROR = re.compile(
    r"^((?:\w+(?:Error|Exception|Warning)|SIG[A-Z]+): .+)$", re.M
)


class Placeholder(nodes.General, nodes.Element):
    """Stands for the index until every page is read."""


class Symptoms(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return [Placeholder()]


def gather(app, doctree) -> None:
    """Keep a page's errors, each with the section that it stands in."""
    found: dict[str, str] = {}
    for section in doctree.findall(nodes.section):
        for block in section.findall(nodes.literal_block):
            if "output" in block["classes"]:
                errors = ERROR.findall(block.astext())
                found |= dict.fromkeys(errors, section["ids"][0])
    app.env.metadata[app.env.docname]["symptoms"] = found


def updated(app, env) -> list[str]:
    """Write the index anew whenever anything is read."""
    return ["docs/symptoms"]


def resolve(app, doctree, docname) -> None:
    places = defaultdict(list)
    for page, about in sorted(app.env.metadata.items()):
        for message, section in about.get("symptoms", {}).items():
            places[message].append((page, section))
    for node in list(doctree.findall(Placeholder)):
        rows = nodes.bullet_list()
        for message in sorted(places):
            text = nodes.paragraph("", "", nodes.literal("", message))
            for page, section in places[message]:
                uri = app.builder.get_relative_uri(docname, page)
                number = app.env.toc_secnumbers.get(page, {}).get("", ())
                title = (
                    ".".join(map(str, number))
                    + " "
                    + app.env.titles[page].astext()
                )
                link = nodes.reference("", title, refuri=f"{uri}#{section}")
                text += [nodes.Text(" "), link]
            rows += nodes.list_item("", text)
        node.replace_self(rows)


def setup(app):
    app.add_node(Placeholder)
    app.add_directive("symptoms", Symptoms)
    app.connect("doctree-read", gather)
    app.connect("env-updated", updated)
    app.connect("doctree-resolved", resolve)
    return {"version": "1", "parallel_read_safe": True}
