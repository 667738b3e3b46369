"""The forward of the demo's recurrent line over branches agrees with transformers' model, one prompt at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5TextModel

from demo.draft import Answers, Attention
from demo.model import UNSUPERVISED, Prompt, PromptWriter, answer_logits
from demo.mtp import make_head, weights_of
from demo.recurrent import branched_states, make_model, media_of, save
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.loading.mtp import load_mtp

GRID = Grid(16, 4, 4)


@torch.no_grad()
def test_each_branch_has_the_logits_that_transformers_gives_it_alone() -> None:
    tokenizer, model = make_model(seed=1)
    plain = Qwen3_5ForConditionalGeneration(model.config)
    plain.load_state_dict(model.state_dict())
    text: Qwen3_5TextModel = plain.train(False).model.language_model
    writer = PromptWriter(tokenizer)
    embeds, kept = torch.randn(2, GRID.tokens, 192), torch.stack([torch.randperm(256)[:40].sort().values for _ in "ab"])
    asked = [[("What moves?", "nothing"), ("Is there a cut?", "no")], [("How many objects are there?", "two")]]
    befores = writer.before(), writer.before("You are a helpful assistant.")
    prompts = [
        Prompt(before, tuple(writer.branch(*each) for each in some))
        for before, some in zip(befores, asked, strict=True)
    ]
    media = media_of(GRID, tokenizer)
    logits, labels = answer_logits(model, embeds, kept, media, prompts, writer.vision_end, branched_states)
    for row, prompt in enumerate(prompts):
        told = logits[row][labels[row] != UNSUPERVISED]
        expected = []
        for branch in prompt.branches:
            inputs, positions = _alone(text, embeds[row], kept[row], media, prompt.before, writer, branch.ids)
            states = text(inputs_embeds=inputs[None], position_ids=positions[:, None], use_cache=False)
            answer = len(branch.ids) - branch.answer_at
            expected.append(plain.lm_head(states.last_hidden_state[0, -answer - 1 : -1]))
        torch.testing.assert_close(told, torch.cat(expected), rtol=1e-4, atol=1e-4)


def _alone(text, embeds, kept, media, before, writer, ids):  # type: ignore[no-untyped-def]
    """Inputs [N, D] and positions [3, N] of a prompt with one question, counted token by token."""
    rows, places, at, seen = [], [], 0, 0

    def say(tokens):  # type: ignore[no-untyped-def]
        nonlocal at
        for token in tokens:
            rows.append(text.embed_tokens.weight[token])
            places.append((at, at, at))
            at += 1

    say(before)
    for part in media:
        if isinstance(part, tuple):
            say(part)
            continue
        for row in range(4):
            for column in range(4):
                if seen in kept:
                    rows.append(embeds[seen])
                    places.append((at, at + row, at + column))
                seen += 1
        at += 4
    say([writer.vision_end, *ids])
    return torch.stack(rows), torch.tensor(places).T


@torch.no_grad()
def test_generation_reads_the_layer_that_drafts_as_it_was_trained(tmp_path: Path) -> None:
    tokenizer, model = make_model(seed=2)
    head = make_head(model)
    save(tmp_path, model, tokenizer, weights_of(head))
    checkpoint = Checkpoint(tmp_path)
    loaded = load_mtp(checkpoint, load_language_model(checkpoint, torch.float32, torch.device("cpu")))
    rows = 12
    embeds, hidden = torch.randn(2, rows, 192)
    positions = torch.arange(rows).expand(3, rows)
    outputs = []
    for each in (head, loaded):
        answers = Answers(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
        attention = Attention(torch.ones(1, rows, rows, dtype=torch.bool).tril(), answers)
        outputs.append(each(embeds, hidden, each.turns(positions), attention))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
