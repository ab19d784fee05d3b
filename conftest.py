"""Runs the doctests in the pages: `pycon` blocks, on the installed package."""

from pathlib import Path

from sybil import Document, Region, Sybil
from sybil.evaluators.doctest import DocTestEvaluator
from sybil.parsers.abstract import DocTestStringParser
from sybil.parsers.myst import CodeBlockParser

ROOT = Path(__file__).parent


class PyconParser:
    """Takes `pycon` fences apart into examples."""

    def __init__(self) -> None:
        self.blocks = CodeBlockParser("pycon", lambda example: None)
        self.examples = DocTestStringParser(DocTestEvaluator())

    def __call__(self, document: Document) -> list[Region]:
        found = []
        for block in self.blocks(document):
            for example in self.examples(block.parsed, document.path):
                example.adjust(block, block.parsed)
                found.append(example)
        return found


def setup(namespace: dict) -> None:
    import torch

    import openreg

    namespace.update(torch=torch, openreg=openreg)


pytest_collect_file = Sybil(
    parsers=[PyconParser()],
    path=str(ROOT),
    patterns=["README.md", "index.md", "chapters/*.md", "docs/**/*.md"],
    setup=setup,
).pytest()
