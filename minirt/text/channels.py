"""Gemma 4's answers: reasoning in a channel, then text and calls whose arguments have bare keys and marks around strings.

    <|channel>thought
    REASONING<channel|>CONTENT<|tool_call>call:NAME{key:<|"|>text<|"|>,list:[1,{k:true}]}<tool_call|>

The template writes `<|think|>` into the system turn if thinking is on, and an empty channel before the answer if it is off.
"""

from typing import Any

CHANNEL = ("<|channel>thought", "<channel|>")
_CALL, _QUOTE, _THINKS, _TURN = "<|tool_call>call:", '<|"|>', "<|think|>", "<turn|>"
# In the form of tokenizer_config.json. A file that declares one takes precedence.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": CHANNEL[0], "close": CHANNEL[1], "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{}]+)", "close": "<tool_call|>", "repeats": True, "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [[_QUOTE, _QUOTE]]},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        "content": {"close": [_TURN, "<|tool_response>"], "content": "text"},
    },
}  # fmt: skip


def is_channeled(template: str | None) -> bool:
    """Whether a chat template writes calls in this form."""
    return template is not None and _CALL in template


def reasons_first(prompt: str) -> bool:
    """Whether an answer to this prompt begins with a channel of reasoning: thinking is on, and no channel was closed just now."""
    return _THINKS in prompt.partition(_TURN)[0] and not prompt.rstrip().endswith(CHANNEL[1])
