"""Chat templates that write calls of tools as today's model families do, and no more than that."""

ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools><|im_end|>\n{% endif %}"
NAME, ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
ITEMS = "{% for key, value in call.function.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"


def turns(call: str) -> str:
    """Turns in Qwen's marks. `call`: one call of several."""
    calls = "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}"
    message = "<|im_start|>{{ message.role }}\n{{ message.content or '' }}" + calls + "<|im_end|>\n"
    return TOOLS + "{% for message in messages %}" + message + "{% endfor %}" + ASKS


HERMES = turns(f'\n<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>')
# One call, without a mark, and no content beside it.
LLAMA = (
    TOOLS
    + "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.tool_calls %}"
    + "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    + "{% set call = message.tool_calls[0] %}"
    + f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}'
    + "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + ASKS
)
# One list, ids of nine characters, tools before the last question.
MISTRAL = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}{% if tools %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    f'{{"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ call.id }}}}"}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
NAMES_OUTSIDE = turns(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}")
# Arguments as text, one mark around all calls.
DEEPSEEK = turns(
    "{{ '<calls_begin>' if loop.first else '\n' }}<call_begin>function<sep>"
    + NAME
    + "\n```json\n{{ '' + call.function.arguments }}\n```<call_end>{{ '<calls_end>' if loop.last }}"
)
QWEN_CODER = turns(
    f"\n<tool_call>\n<function={NAME}>\n{ITEMS}<parameter={{{{ key }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}"
    "</function>\n</tool_call>"
)
GLM = turns(
    f"\n<tool_call>{NAME}\n{ITEMS}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{{% endfor %}}"
    "</tool_call>"
)
MINIMAX = turns(
    "{{ '\n<calls>\n' if loop.first }}"
    f'<invoke name="{NAME}">\n{ITEMS}<parameter name="{{{{ key }}}}">{VALUE}</parameter>\n{{% endfor %}}</invoke>\n'
    "{{ '</calls>' if loop.last }}"
)
NESTED = turns("<|call|>{{ call | tojson }}<|/call|>")

# The id between name and arguments, as Mistral Small 3.2 has it.
WITH_IDS = turns(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ call.id }}}}[ARGS]{ARGUMENTS}")
# Several in one mark.
LINES = turns(
    "{{ '<calls>' if loop.first }}"
    + f'\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
    + "{{ '\n</calls>' if loop.last }}"
)

ALL = {
    "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "names outside": NAMES_OUTSIDE, "deepseek": DEEPSEEK,
    "qwen coder": QWEN_CODER, "glm": GLM, "minimax": MINIMAX, "nested": NESTED,
    "with ids": WITH_IDS, "lines": LINES,
}  # fmt: skip
OF_PAIRS = {"qwen coder", "glm", "minimax"}
# Strings in marks that numbers do not have.
GEMMA = turns(
    f"<call>{NAME}:{ITEMS}{{{{ key }}}}={{{{ '<q>' + value + '<q>' if value is string else value }}}},{{% endfor %}}"
)
# The turn goes on in another channel, behind a mark of its end.
HARMONY = turns(f"<|im_end|><|im_start|>assistant to={NAME}<|message|>{ARGUMENTS}")
NUMBERED = turns(f"<call>{NAME}:{{{{ loop.index0 }}}}<args>{ARGUMENTS}</call>")
WITHOUT_TOOLS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}" + ASKS
