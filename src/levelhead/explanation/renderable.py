"""What `Explanation` and `TextExplanation` share: their output as text, page, drawing and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod

from levelhead.explanation import html, svg, terminal
from levelhead.explanation.head_report import HeadReport


class Renderable(ABC):
    @abstractmethod
    def story(self, head: int | None = None) -> HeadReport:
        """What is shown of one head."""

    def text(self, *, head: int | None = None, colour: bool = False, width: int | None = None) -> str:
        """For a terminal; `width` columns, or as many as the terminal has."""
        return "\n".join(terminal.lines(self.story(head), colour=colour, width=width))

    def html(self, *, head: int | None = None) -> str:
        """One self-contained page."""
        return html.html(self.story(head))

    def svg(self, *, head: int | None = None) -> str:
        """The block diagram with its shapes, and the weights with and without the scale."""
        return svg.standalone(self.story(head))

    def _repr_html_(self) -> str:
        return html.notebook(self.story())

    def __repr__(self) -> str:
        return self.text()
