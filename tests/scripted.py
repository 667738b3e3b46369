"""A tiny checkpoint whose model says a given script, so that tests can have it call tools.

    assistant → 'Let me look.\\n' → '<tool' → '_call>\\n{"name": "weat' → … → 'yoto"}}\\n</tool' → … → <|im_end|>

Each piece of the script is a token of its own, and is followed by the next whatever precedes it: attention and MLPs add
nothing, so the last hidden state is the token's embedding, and the output layer knows its successor. Every prompt ends
with a line break. It imports no service.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AddedToken, Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import TINY, make_config, make_tokenizer, randomise, save_checkpoint

# Marks, names and arguments are cut, as tokens of other vocabularies cut them.
LOOK = "Let me look."
WEATHER = (
    "<tool",
    '_call>\n{"name": "weat',
    'her", "arguments": {"city": "K',
    'yoto"}}\n</tool',
    "_call>\n<tool_call>",
)
CLOCK = ('\n{"name": "clock", "arguments": {}}\n</tool_', "call>")
SCRIPT = (f"{LOOK}\n", *WEATHER, *CLOCK)
TEMPLATE = """\
{%- macro content(turn) -%}
{%- for part in turn.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}
<|vision_start|>{{ '<|image_pad|>' if part.type == 'image' else '<|video_pad|>' }}<|vision_end|>
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": "…", "arguments": {}}</tool_call><|im_end|>
{% endif -%}
{%- for turn in messages -%}
<|im_start|>{{ turn.role }}
{% if turn.role == 'tool' %}<tool_response>{{ content(turn) }}</tool_response>{% else %}{{ content(turn) }}{% endif -%}
{%- for call in turn.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
<|im_start|>{{ 'assistant\\n' }}
"""


@torch.no_grad()
def write_scripted(folder: Path, script: Sequence[str] = SCRIPT, template: str = TEMPLATE) -> Path:
    """A Qwen2.5-VL checkpoint that answers any prompt with the script. Its pieces are distinct, and no other tokens."""
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in script])
    tokenizer.chat_template = template
    model = Qwen2_5_VLForConditionalGeneration(make_config(TINY, tokenizer))
    randomise(model, TINY.init_range, seed=1)
    for name, parameter in model.named_parameters():
        if name.startswith("model.language_model.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    (start,) = tokenizer.encode("\n")
    said = [start, *(tokenizer.convert_tokens_to_ids(piece) for piece in script), tokenizer.eos_token_id]
    for place, (before, after) in enumerate(pairwise(said)):
        model.model.language_model.embed_tokens.weight[before] = 10 * torch.eye(TINY.hidden)[place]
        model.lm_head.weight[after] = 10 * torch.eye(TINY.hidden)[place]
    save_checkpoint(folder, model, tokenizer, TINY)
    return folder
