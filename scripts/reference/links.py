"""Links between the rendered pages that pdoc gets wrong or misses."""

from __future__ import annotations

import re
from types import ModuleType

from pdoc.render_helpers import relative_link

from reference.pages import Links


def mended(pages: dict[str, str], modules: dict[str, ModuleType], links: Links) -> dict[str, str]:
    """Returns the HTML of each page, with links to inherited members and to other pages.

    pdoc links an inherited member to the class that does not show it. It does not link a name
    without its module to another page.
    """
    ids = {page: set(re.findall(r'\bid="([\w.]+)"', html)) for page, html in pages.items()}

    def link(page: str, target: str, name: str, text: str) -> str:
        return f'<a href="{relative_link(page, target)}#{name}">{text}</a>'

    def of_page(page: str, html: str) -> str:
        def inherited(match: re.Match) -> str:
            class_name, member, text = match.groups()
            if f"{class_name}.{member}" in ids[page]:
                return match[0]
            for base in getattr(modules[page], class_name).__mro__:
                target, _, name = links.get((base.__name__, id(base)), "").rpartition(".")
                if f"{name}.{member}" in ids.get(target, ()):
                    return link(page, target, f"{name}.{member}", text)
            return text

        def elsewhere(match: re.Match) -> str:
            module, _, name = match[1].rpartition(".")
            targets = [f"attention_jax.{module}"] if module else [page, *ids]
            target = next((target for target in targets if name in ids.get(target, ())), None)
            return f"<code>{link(page, target, name, match[1])}</code>" if target else match[0]

        html = re.sub(r'<a href="#(\w+)\.(\w+)">([^<]*)</a>', inherited, html)
        return re.sub(r"<code>((?:[a-z_]+\.)*[A-Z]\w*)</code>", elsewhere, html)

    return {page: of_page(page, html) for page, html in pages.items()}
