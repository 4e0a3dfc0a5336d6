"""The page at `/`: a chat with the model, and live metrics. `page.html` is all of it, and uses the API like any other client."""

import base64
import hashlib
import re
from functools import cache
from html import escape
from pathlib import Path

from minirt.server.exchange import Exchange
from minirt.server.front import Front


@cache
def content(root: str) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The page and its headers. `root`: see `Exchange`; the page's calls are relative to it.

    The browser runs no script and applies no style but the page's own, which it knows by their hashes. It connects to this server
    alone. With `require-trusted-types-for` it refuses to make markup of texts.
    """
    data, base = Path(__file__).with_name("page.html").read_bytes(), "'none'"
    if root:
        data, base = data.replace(b"<head>", f'<head>\n<base href="{escape(root)}/">'.encode(), 1), "'self'"

    def allowed(tag: bytes) -> str:
        (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), data, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {allowed(b'script')}; style-src {allowed(b'style')}; connect-src 'self'; img-src data:; "
        f"base-uri {base}; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return data, [
        (b"content-security-policy", policy.encode()), (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-cache"),
    ]  # fmt: skip


async def page(front: Front, exchange: Exchange) -> None:
    data, headers = content(exchange.root)
    await exchange.answer(data, headers=headers, content_type=b"text/html; charset=utf-8")


ROUTES = {"GET /": page}
