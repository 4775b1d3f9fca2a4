"""What the documentation site needs beside mkdocs: our docstrings as Markdown, formulas as MathML, the commands' help.

Loaded by mkdocs (as hooks) and by mkdocstrings (as an extension); see `mkdocs.yml`. Everything is made when the site is
built, so that a page loads nothing from elsewhere.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Callable
from typing import Any, Final

import griffe
from latex2mathml.converter import convert

SECTIONS: Final = ("Parameters", "Returns", "Raises", "Attributes", "Notes", "Examples", "References")
COMMANDS: Final = "<!-- help of all commands -->"


# ------------------------------------------------------------------------------------------------ docstrings
class Docstrings(griffe.Extension):
    """Docstrings are rewritten before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Attribute) and "Annotated[" in str(obj.annotation):
            obj.annotation = plain_type(str(obj.annotation))


class _Plain(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        annotated = ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple)
        return node.slice.elts[0] if annotated else node


def plain_type(annotation: str) -> str:
    """A type without its validators, which the text below it tells in words.

    >>> plain_type("Annotated[str | Path, check('it')] | None")
    'str | Path | None'
    """
    return ast.unparse(_Plain().visit(ast.parse(annotation, mode="eval")))


def as_markdown(text: str) -> str:
    """A docstring of ours as Markdown: sections, entries of a list, doctests, formulas, tables.

    >>> print(as_markdown("Does it.\\n\\nParameters\\n----------\\nx : how far. [m]\\n\\n>>> f(1)\\n2"))
    Does it.
    <BLANKLINE>
    **Parameters**
    <BLANKLINE>
    * `x`: how far. [m]
    <BLANKLINE>
    ```pycon
    >>> f(1)
    2
    ```
    """
    text = re.sub(r":math:`([^`]+)`", r"\\(\1\\)", text)
    text = re.sub(r"^\.\. math::((?:.*\n?)(?:(?:[ ]{2,}.*)?(?:\n|\Z))*)", _display, text, flags=re.MULTILINE)
    text = re.sub(r"^\.\. code-block:: (\w+)\n\n((?:[ ]{3,}.*\n?|\n)+)", _code, text, flags=re.MULTILINE)
    text = re.sub(r"^(=+ +=+\n(?:.*\n)*?=+ +=+)$", r"```text\n\1\n```", text, flags=re.MULTILINE)
    first, *rest = re.split(rf"^({'|'.join(SECTIONS)})\n-+\n", text, flags=re.MULTILINE)
    parts = [_doctests(first)]
    for name, body in zip(rest[::2], rest[1::2], strict=True):
        parts.append(f"**{name}**\n\n{_section(name, body)}")
    return "\n\n".join(part.strip("\n") for part in parts)


def _display(found: re.Match[str]) -> str:
    return f"\\[{' '.join(found[1].split())}\\]\n\n"


def _code(found: re.Match[str]) -> str:
    lines = found[2].strip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    body = "\n".join(line[indent:] for line in lines)
    return f"```{found[1]}\n{body}\n```\n\n"


def _section(name: str, body: str) -> str:
    entries, _, after = body.partition("\n\n")  # what follows an empty line belongs to no entry
    if name in ("Parameters", "Raises", "Attributes"):
        entries = _entries(entries)
    if name == "Returns":
        entries = re.sub(r"^(\w+) : ", r"`\1`: ", entries)
    return f"{_doctests(entries)}\n\n{_doctests(after)}"


def _entries(text: str) -> str:
    """`name, other : what` and its continued lines, as points of a list."""
    text = re.sub(r"\n[ ]+", " ", text.strip("\n"))
    return re.sub(r"^([\w*., ]+?) : ", lambda m: f"* {_names(m[1])}: ", text, flags=re.MULTILINE)


def _names(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split(", "))


def _doctests(text: str) -> str:
    """Lines from `>>>` to the next empty one are code."""
    return re.sub(r"^(>>> (?:.+\n?)+)", lambda m: f"```pycon\n{m[1].rstrip()}\n```\n", text, flags=re.MULTILINE)


# ------------------------------------------------------------------------------------------------ pages
def on_page_markdown(markdown: str, **_: Any) -> str:
    """The help of the commands stands where a page asks for it."""
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def on_page_content(text: str, **_: Any) -> str:
    """Formulas become MathML, which browsers draw by themselves."""
    for tag, opening, closing, display in (("div", r"\[", r"\]", "block"), ("span", r"\(", r"\)", "inline")):
        pattern = rf'<{tag} class="arithmatex">{re.escape(opening)}(.*?){re.escape(closing)}</{tag}>'
        text = re.sub(pattern, _mathml(tag, display), text, flags=re.DOTALL)
    return text


def _mathml(tag: str, display: str) -> Callable[[re.Match[str]], str]:
    def replaced(found: re.Match[str]) -> str:
        formula = " ".join(html.unescape(found[1]).split())
        return f'<{tag} class="formula">{convert(formula, display=display)}</{tag}>'

    return replaced


def commands() -> str:
    """Help of every command of `moecost`, as the terminal shows it."""
    import typer

    from moecost.cli import app

    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():
        context = command.context_class(command, info_name=f"moecost {name}", max_content_width=100, terminal_width=100)
        parts.append(f"## moecost {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)
