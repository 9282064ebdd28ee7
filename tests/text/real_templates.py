"""Chat templates in the manner of those of real models, and what each makes of `TALK` with an open turn."""

from __future__ import annotations

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2 < 3?"},
]

REAL = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n2 < 3?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama-2": (
        """{%- if messages[0].role == 'system' -%}
    {%- set rules = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set rules = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for m in turns -%}
    {%- if (m.role == 'user') != (loop.index0 is even) -%}
        {{- raise_exception('user and assistant must take turns') -}}
    {%- endif -%}
    {%- if m.role == 'user' -%}
        {{- bos_token + '[INST] ' + (rules if loop.first else '') + m.content.strip() + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + m.content | trim + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}""",
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] 2 < 3? [/INST]",
    ),
    "llama-3": (
        """{%- for m in messages %}
    {%- set head = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' %}
    {{- (bos_token if loop.index0 == 0 else '') + head + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2 < 3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        """{{ bos_token }}{% set ns = namespace(rules='') %}
{% for m in messages %}
{% if m.role == 'system' %}{% set ns.rules = m.content + '\\n\\n' %}{% continue %}{% endif %}
{% if m.role == 'user' %}{{ '[INST] ' ~ (ns.rules if loop.last else '') ~ m.content ~ '[/INST]' }}
{%- else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}
{% endfor %}""",
        "<s>[INST] Hi[/INST] Hello!</s>[INST] Be kind.\n\n2 < 3?[/INST]",
    ),
    "gemma": (
        """{{ bos_token }}
{%- set first = '' %}{%- if messages[0]['role'] == 'system' %}
{%- set first = messages[0]['content'] ~ '\\n\\n' %}{% set messages = messages[1:] %}{% endif -%}
{% for m in messages %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}
{{- (first if loop.first else '') ~ m['content'] | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
        "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\n2 < 3?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi-3": (
        "{% for m in messages if m.content %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
        "{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}",
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n<|user|>\n2 < 3?<|end|>\n"
        "<|assistant|>\n",
    ),
    "qwen": (
        """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {{- '<tool_call>' ~ m.tool_calls[0].function | tojson ~ '</tool_call>\\n' }}
    {%- else %}
        {{- '<|im_start|>%s\\n%s<|im_end|>\\n' | format(m.role, m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n2 < 3?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "zephyr": (
        """{% for m in messages %}
{% if m['role'] in ['system', 'user', 'assistant'] %}
{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
        "<|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello!</s>\n<|user|>\n2 < 3?</s>\n<|assistant|>\n",
    ),
    "vicuna": (
        "{% set seen = namespace(any=false) %}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}"
        "{% elif m.role == 'user' %}{% set seen.any = true %}{{ 'USER: ' + m.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and seen.any %}{{ 'ASSISTANT:' }}{% endif %}",
        "Be kind. USER: Hi ASSISTANT: Hello!</s>USER: 2 < 3? ASSISTANT:",
    ),
    "alpaca": (
        """{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}

{% elif m.role == 'user' %}### Instruction:
{{ m.content }}

{% else %}### Response:
{{ m.content }}

{% endif %}
{%- endfor %}
{% if add_generation_prompt %}### Response:
{% endif %}""",
        "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nHello!\n\n### Instruction:\n2 < 3?\n\n### Response:\n",
    ),
    "deepseek": (
        """{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'user' %}{{- '<｜User｜>' ~ m.content -}}
    {%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end｜>' -}}
    {%- else %}{{- m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' -}}{% endif %}""",
        "<s>Be kind.<｜User｜>Hi<｜Assistant｜>Hello!<｜end｜><｜User｜>2 < 3?<｜Assistant｜><think>\n",
    ),
    "falcon": (
        "{% for m in messages %}{{ '\\n\\n' if not loop.first }}{{ {'user': 'User: ', 'assistant': 'Falcon: '}"
        ".get(m.role, '') ~ m.content | replace('\\r\\n', '\\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\n\\nFalcon:' }}{% endif %}",
        "Be kind.\n\nUser: Hi\n\nFalcon: Hello!\n\nUser: 2 < 3?\n\nFalcon:",
    ),
    "command-r": (
        """{{ bos_token }}
{%- macro turn(name, body) -%}<|START_OF_TURN|><|{{ name | upper }}|>{{ body }}<|END_OF_TURN|>{%- endmacro -%}
{%- for m in messages -%}
{{ turn({'assistant': 'chatbot'}[m.role] or m.role, m.content) }}
{%- endfor -%}
{% if add_generation_prompt %}<|START_OF_TURN|><|CHATBOT|>{% endif %}""",
        "<s><|START_OF_TURN|><|SYSTEM|>Be kind.<|END_OF_TURN|><|START_OF_TURN|><|USER|>Hi<|END_OF_TURN|>"
        "<|START_OF_TURN|><|CHATBOT|>Hello!<|END_OF_TURN|><|START_OF_TURN|><|USER|>2 < 3?<|END_OF_TURN|>"
        "<|START_OF_TURN|><|CHATBOT|>",
    ),
    "tulu": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{% generation %}"
        "{{ m.content + (eos_token if not loop.last else '') }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '\\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}",
        "<|system|>\nBe kind.\n<|user|>\nHi\n<|assistant|>\nHello!</s>\n<|user|>\n2 < 3?\n<|assistant|>\n",
    ),
    "smollm": (
        "{%- set know = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}"
        "{{- '<|im_start|>system\\n' ~ (know | join('\\n') or 'You are a small helper.') ~ '<|im_end|>\\n' -}}"
        "{%- for m in messages | rejectattr('role', 'equalto', 'system') -%}"
        "{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n2 < 3?<|im_end|>\n<|im_start|>assistant\n",
    ),
}
