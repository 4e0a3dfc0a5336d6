"""A chat template with what Qwen3.5's, 3.6's and 3.8's do.

The template is our own. As theirs, it opens `<think>` for the answer, asks for calls in XML, shows reasoning since the last
question, groups results of tools in a user's turn, and refuses conversations without a question or with a late system message.
"""

from pathlib import Path

# `THINKS`: whether an answer begins inside a block of reasoning, if the request does not say it. Small models do not think.
_TEMPLATE = Path(__file__).with_name("templates").joinpath("qwen3_5.jinja").read_text(encoding="utf-8")[:-1]
TEMPLATE, SMALL_TEMPLATE = (_TEMPLATE.replace("THINKS", thinks) for thinks in ("true", "false"))
