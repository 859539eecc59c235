"""A drawing for the documentation: an SVG with colours for light and dark, which stands on any page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 760
STYLE = """
.paper{fill:#ffffff;stroke:#d0d7de}.ink{fill:#1f2328}.soft{fill:#57606a}.line{stroke:#57606a;fill:none}
.a{fill:#4c78d0}.b{fill:#bd6f14}.c{fill:#2f8059}.d{fill:#a661bf}.e{fill:#c9d1d9}.on{fill:#ffffff}
.head{fill:#57606a}
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
.title{font-weight:600;font-size:15px}
.small{font-size:12px}
@media (prefers-color-scheme: dark){.paper{fill:#161b22;stroke:#30363d}.ink{fill:#e6edf3}.soft{fill:#9da7b1}
.line{stroke:#9da7b1}.a{fill:#4670b8}.b{fill:#b06a17}.c{fill:#2f7d56}.d{fill:#8a4fa3}.e{fill:#3d444d}.head{fill:#9da7b1}}
"""


class Drawing:
    """An SVG, from the top down. Places and sizes are in units of the view box."""

    def __init__(self, title: str, height: int, described: str) -> None:
        self.height = height
        self.title = title
        self._parts = [f"<title>{escape(title)}</title><desc>{escape(described)}</desc>"]
        self._parts.append(
            f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        )
        self.text(20, 30, title, "ink title")

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str = "") -> None:
        """A filled box, with a text in its middle where one is given."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )
        if text:
            dark = kind != "e"
            self.text(x + width / 2, y + height / 2 + 4.5, text, "on" if dark else "ink", "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(
            f'<line class="line" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(f'<line class="line" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>')

    def legend(self, y: float, entries: Sequence[tuple[str, str]]) -> None:
        x = 20.0
        for kind, text in entries:
            self.box(x, y - 10, 12, 12, kind)
            self.text(x + 18, y, text, "soft")
            x += 34 + 7.2 * len(text)

    def svg(self) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
        )
        inside = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">'
            f"<style>{STYLE}</style>{head}\n{inside}\n</svg>\n"
        )
