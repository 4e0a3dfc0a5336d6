"""A chat template with what Qwen3.5's, 3.6's and 3.8's do.

The template is our own. As theirs, it opens `<think>` for the answer, asks for calls in XML, shows reasoning since the last
question, groups results of tools in a user's turn, and refuses conversations without a question or with a late system message.
"""


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
