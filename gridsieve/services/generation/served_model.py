"""What the RPCs know of the model that the engine runs: one object, made at startup, that never changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from gridsieve.common.chat_templates import chat_templates
from gridsieve.common.checkpoint import Checkpoint, Task
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.wire import completed, pruning_message
from gridsieve.services.generation.model.adapters import Adapters
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.reading import Reading
from gridsieve.services.generation.request.prompt_limit import PromptLimit
from gridsieve.services.generation.sampling.banned import Spelling, spellings
from gridsieve.services.generation.sampling.call_forms import CallForm, form_of
from gridsieve.services.generation.sampling.defaults import SamplingDefaults
from gridsieve.services.generation.sampling.detokenizer import Detokenizer, Tokenizer
from gridsieve.services.generation.sampling.moments import Notation, moments_rules, schema_with_times
from gridsieve.services.generation.sampling.params import SamplingRequest
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.sampling.structured import Grammar, Grammars
from gridsieve.services.generation.sampling.thoughts import Thought, thinks, thought_after
from gridsieve.services.generation.sampling.tool_calls import ToolUse
from gridsieve.services.generation.upstream.arriving_item import ModelInput
from gridsieve.v1 import prompt_pb2

_METHODS: Mapping[Task, str] = {
    "generate": "Generate and Live, over HTTP /v1/chat/completions, /v1/responses and /v1/realtime",
    "embed": "Embed, over HTTP /v1/embeddings",
    "score": "Score, over HTTP /v1/rerank and /v1/score",
}


@dataclass(frozen=True, slots=True)
class LiveModel:
    """What live sessions need to know. tokens: of the KV cache, those that all of them may hold together, in blocks of
    `block_tokens`. positions: that the model was trained on. recurrent: whether it has states, which cannot forget."""

    tokens: int
    block_tokens: int
    positions: int
    recurrent: bool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model.

    names: under which it is served.
    input: what its language model takes, and peers therefore must send.
    tokenizer, grammars: of its checkpoint.
    defaults: for sampling fields that a request leaves unset; they hold the size of the vocabulary and the end tokens.
    limit: on a prompt and its answer together.
    adapters: those that requests may name.
    call_form: in which it writes tool calls; None: in none that is read here. thinks: whether it knows thoughts.
    pruning: of videos for which a request names none. pruning_methods: those that a request may name. usual_method: of
        a rate without a method.
    notation: of times in videos.
    reads: how prompts are read; None of a model that generates.
    live: None of families that are not served in live sessions.
    sounds: whether prompts may have sounds.
    """

    names: Sequence[str]
    input: ModelInput
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    limit: PromptLimit
    grammars: Grammars
    adapters: Adapters
    call_form: CallForm | None
    thinks: bool
    pruning: ItemPruning
    pruning_methods: Sequence[str]
    usual_method: str
    live: LiveModel | None = None
    sounds: bool = False
    reads: Reading | None = None
    notation: Notation = field(default_factory=Notation)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        names: Sequence[str],
        tokenizer: Tokenizer,
        defaults: SamplingDefaults,
        model: LanguageModel,
        limit_tokens: int,
        pruning: ItemPruning,
        pruning_methods: Sequence[str],
        usual_method: str,
        live: LiveModel | None = None,
        sounds: bool = False,
    ) -> Self:
        """tokenizer, defaults: of the checkpoint. limit_tokens: of a prompt after pruning and its answer."""
        templates = chat_templates(checkpoint).for_tools
        call_form = form_of(templates)
        context_tokens = model.context_tokens if model.position_axes == 1 else None
        return cls(
            names,
            ModelInput(
                checkpoint.fingerprint,
                model.embed_tokens.num_embeddings,
                model.hidden_size,
                model.embed_levels,
                model.dtype,
                model.device,
            ),
            tokenizer,
            defaults,
            PromptLimit(limit_tokens, context_tokens),
            Grammars(checkpoint.folder, defaults.vocab_size, defaults.eos_ids, call_form),
            model.adapters,
            call_form,
            thinks(templates),
            pruning,
            pruning_methods,
            usual_method,
            live,
            sounds,
            model.reads,
            Notation(model.clock_times),
        )

    @property
    def task(self) -> Task:
        return self.reads.task if self.reads else "generate"

    def check_task(self, task: Task) -> None:
        """Raises InvalidRequest, with the methods that it has, if the model does something else."""
        if task != self.task:
            name = self.names[0] if self.names else "this model"
            raise InvalidRequest(f"{name} does not {task}: it is served by {_METHODS[self.task]}", field="model")

    def reading(self, task: Task) -> Reading:
        """Raises InvalidRequest if the model does something else."""
        self.check_task(task)
        assert self.reads is not None
        return self.reads

    def completed(self, pruning: prompt_pb2.Pruning) -> prompt_pb2.Pruning:
        """The pruning of a request, with what it does not say. The usual method stays unset: it is another one for
        embeddings (`prunings_of`)."""
        default = pruning_message(self.pruning)
        if default.method == self.usual_method:
            default.ClearField("method")
        return completed(pruning, default)

    async def constraints(self, wanted: SamplingRequest) -> tuple[Grammar | None, Sequence[Spelling]]:
        """The grammar of a request's answers, if they have one, and the spellings of its bad words; in a thread."""
        grammar = None if wanted.needs_times else await self.grammar_after(None, wanted)
        bad_words: Sequence[Spelling] = ()
        if wanted.bad_words:
            bad_words = await asyncio.to_thread(spellings, self.tokenizer, wanted.bad_words)
        return grammar, bad_words

    async def grammar_after(
        self, thought: Thought | None, wanted: SamplingRequest, plan: PromptPlan | None = None
    ) -> Grammar | None:
        """The grammar of a request's answers and their thought, if they have one; in a thread.

        plan: of the prompt, where the request needs the times of its videos.
        """
        budget = wanted.max_thinking_tokens if thought else None
        if not wanted.is_constrained and budget is None:
            return None
        use = wanted.tool_use if wanted.is_constrained else None
        return await asyncio.to_thread(self._compiled, wanted, plan, use, thought, budget)

    def _compiled(
        self,
        wanted: SamplingRequest,
        plan: PromptPlan | None,
        use: ToolUse | None,
        thought: Thought | None,
        budget: int | None,
    ) -> Grammar:
        schema, rules = wanted.json_schema, list[str]()
        if wanted.needs_times:
            assert plan
            if wanted.moments:
                rules = moments_rules(plan, wanted.moments, self.notation)
            else:
                assert schema is not None
                schema = schema_with_times(schema, plan, self.notation)
        return self.grammars.compile(schema, use, thought, budget, tuple(rules))

    def thought_after(self, plan: PromptPlan) -> Thought | None:
        """The thought of an answer to a prompt; None: it has none."""
        return thought_after(plan.input_ids, self.tokenizer) if self.thinks else None

    def stop_finder(self, sampling: SamplingParams) -> Detokenizer | None:
        """For the engine, which must find stop strings in the text; None: there are none to find."""
        return Detokenizer(self.tokenizer, sampling.stop, sampling.min_new_tokens) if sampling.stop else None
