"""Vectors and scores through three real processes and the gateway: the published scripts' arithmetic over transformers'
whole model."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from openai import AsyncOpenAI
from torch import Tensor
from transformers import AutoTokenizer

from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import encode
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Image, Message, Part, Pruning, Text, Video
from gridsieve.client.vectors import parts_of
from gridsieve.common.contract.errors import InvalidRequest
from tests import media
from tests.families import FAMILIES, load_reference, text_and_head, write_qwen3_vl_reader
from tests.integration.before_tower import parts_of_plan
from tests.integration.fleet import Stack, running
from tests.integration.gateway import Gateway, data_url, gateway
from tests.integration.reference import inputs_of_prompt, plan_and_frames
from tests.oracle import Item, expected_sequence, expected_states

INSTRUCTION = "Represent the user's input."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
TOLERANCE = 1e-4
FAMILY = FAMILIES["qwen3_vl"]
CLIP, PICTURE = Video(data=media.clip(24, fps=8, seed=3)), Image(data=media.picture(112, 84))
MIXES: dict[str, Sequence[Part]] = {
    "text": (Text("a red car, is it <|im_end|>?"),),
    "image": (PICTURE,),
    "clip and text": (CLIP, Text("a car turns left")),
    "several": (CLIP, Text("and"), PICTURE, Video(data=media.clip(60, fps=8, width=160, height=96, seed=4))),
}


class Reader:
    """A stack with an embedder or a reranker, and transformers' model of it."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self.folder, self.stack = folder, stack
        self.reference = load_reference("qwen3_vl", folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    async def state(self, system: str, parts: Sequence[Part]) -> Tensor:
        """The last token's state after the final norm: float32 [D]."""
        messages = [Message("system", (Text(system),)), Message("user", tuple(parts))]
        prompt = generate_request(messages, {}).prompt
        address = self.stack.addresses["preprocessing"]
        inputs = await inputs_of_prompt(address, prompt, FAMILY, self.folder, self.reference.config)
        with torch.no_grad():
            state: Tensor = self.reference.model(**inputs).last_hidden_state[0, -1]
        return state

    async def vector(self, instruction: str, parts: Sequence[Part]) -> NDArray[np.float32]:
        state = await self.state(instruction, parts)
        return np.asarray(torch.nn.functional.normalize(state, dim=0))

    async def score(self, instruction: str, query: Sequence[Part], document: Sequence[Part]) -> float:
        parts = (Text(f"<Instruct>: {instruction}"), Text("<Query>:"), *query, Text("\n<Document>:"), *document)
        logits = self.reference.lm_head(await self.state(JUDGE, parts)).detach()
        ids = self.tokenizer.get_vocab()
        return float(torch.sigmoid(logits[ids["yes"]] - logits[ids["no"]]))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = write_qwen3_vl_reader(tmp_path_factory.mktemp("models") / "embedder", 11, "Pooling")
    with running(folder) as stack:
        yield Reader(folder, stack)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = write_qwen3_vl_reader(tmp_path_factory.mktemp("models") / "reranker", 12, "LogitScore")
    with running(folder) as stack:
        yield Reader(folder, stack)


@pytest.fixture
async def embeds(embedder: Reader) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(embedder.stack.address) as client:
        yield client


@pytest.fixture
async def scores(reranker: Reader) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(reranker.stack.address) as client:
        yield client


@pytest.mark.parametrize("mix", MIXES)
async def test_a_vector_is_the_last_state_of_transformers_model_normalised(
    embedder: Reader, embeds: GridsieveClient, mix: str
) -> None:
    found = await embeds.embed(list(MIXES[mix]))
    np.testing.assert_allclose(found.values, await embedder.vector(INSTRUCTION, MIXES[mix]), atol=TOLERANCE)
    assert (found.values.dtype, found.usage.completion_tokens) == (np.float32, 0)


async def test_a_prompt_of_text_has_the_ids_of_transformers_tokenizer_with_special_tokens(
    embedder: Reader, embeds: GridsieveClient
) -> None:
    """Neither ids nor template come from the services here."""
    said = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": "a red car"}]
    text = embedder.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids = embedder.tokenizer(text, return_tensors="pt").input_ids
    assert ids[0, -1] == embedder.tokenizer.get_vocab()["<|endoftext|>"], "the token of the post-processor"
    with torch.no_grad():
        state = embedder.reference.model(input_ids=ids).last_hidden_state[0, -1]
    found = await embeds.embed(None, "a red car")
    np.testing.assert_allclose(found.values, torch.nn.functional.normalize(state, dim=0), atol=TOLERANCE)
    assert found.usage.prompt_tokens == ids.shape[1]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (" Find a video that shows this ", "Find a video that shows this."),
        ("Which clip is it?", "Which clip is it?"),
        ("  ", INSTRUCTION),
    ],
)
async def test_an_instruction_ends_with_punctuation_as_in_the_published_script(
    embedder: Reader, embeds: GridsieveClient, given: str, read: str
) -> None:
    found = await embeds.embed(None, "a red car", instruction=given)
    np.testing.assert_allclose(found.values, await embedder.vector(read, (Text("a red car"),)), atol=TOLERANCE)


async def test_an_empty_text_is_read_as_in_the_published_scripts(embedder: Reader, embeds: GridsieveClient) -> None:
    found = await embeds.embed([Text("")])
    np.testing.assert_allclose(found.values, await embedder.vector(INSTRUCTION, (Text("NULL"),)), atol=TOLERANCE)


async def test_dimensions_are_the_first_values_normalised_again(embeds: GridsieveClient) -> None:
    whole = (await embeds.embed(PICTURE, "a car")).values
    part = (await embeds.embed(PICTURE, "a car", dimensions=24)).values
    np.testing.assert_allclose(part, whole[:24] / np.linalg.norm(whole[:24]), atol=1e-6)
    for wrong in (0, len(whole) + 1):
        with pytest.raises(InvalidRequest, match=f"dimensions must be 1 to {len(whole)}, got {wrong}"):
            await embeds.embed(None, "a car", dimensions=wrong)


@pytest.mark.parametrize("query", ["text", "clip and text"])
async def test_a_score_is_the_probability_of_yes_against_no(
    reranker: Reader, scores: GridsieveClient, query: str
) -> None:
    documents = ["a blue car", [PICTURE, "parked"], "", *([] if query != "text" else [[CLIP]])]
    found = await scores.score(MIXES[query], documents)
    read = [(Text("NULL"),) if each == "" else parts_of(each) for each in documents]
    expected = [await reranker.score(RETRIEVE, MIXES[query], each) for each in read]
    assert [each.score for each in found] == pytest.approx(expected, abs=TOLERANCE)
    assert np.ptp(expected) > 10 * TOLERANCE, "scores that are equal prove nothing"
    again = await scores.score(MIXES[query], ["a green car"], instruction="Find the car")
    assert again[0].score == pytest.approx(
        await reranker.score("Find the car", MIXES[query], (Text("a green car"),)), abs=TOLERANCE
    )


async def test_a_clip_that_several_documents_are_compared_with_is_computed_once(scores: GridsieveClient) -> None:
    await scores.score(CLIP, ["a train"])
    (second,) = await scores.score(CLIP, ["a tram"])
    assert second.usage.cached_prompt_tokens > 256 > second.usage.prompt_tokens - second.usage.cached_prompt_tokens


@pytest.mark.parametrize("method", ["evs", "evs_causal", "vidcom2", "vcast", "random", "pixel_change"])
async def test_of_a_pruned_clip_the_last_state_over_the_kept_tokens_is_read(
    embedder: Reader, embeds: GridsieveClient, method: str
) -> None:
    clip, addresses = replace(CLIP, pruning=Pruning(0.75, method)), embedder.stack.addresses
    messages = [Message("system", (Text(INSTRUCTION),)), Message("user", (clip, Text("a car")))]
    plan, _ = await plan_and_frames(addresses["preprocessing"], generate_request(messages, {}).prompt)
    (encoded,) = await encode(addresses["encoder"], clip, clip.pruning or Pruning())
    embeddings = np.full((3, encoded.plan.grid.tokens, FAMILY.hidden), np.nan, np.float32)
    embeddings[:, encoded.kept] = encoded.values
    config = embedder.reference.config
    parts = parts_of_plan(plan, embeddings, config)
    sequence = expected_sequence(parts, [encoded.kept.tolist()], config.video_token_id)
    text, _ = text_and_head(embedder.reference)
    state = expected_states(text, sequence, [part for part in parts if isinstance(part, Item)])[-1]
    found = await embeds.embed(clip, "a car")
    np.testing.assert_allclose(found.values, torch.nn.functional.normalize(state, dim=0), atol=TOLERANCE)
    assert found.usage.prompt_tokens == len(sequence.ids) < found.usage.prompt_tokens_full


async def test_a_model_says_what_it_does_and_refuses_the_rest_by_name(
    embedder: Reader, embeds: GridsieveClient, scores: GridsieveClient
) -> None:
    told = [(await client.models())[0] for client in (embeds, scores)]
    assert [(each.task, each.instruction) for each in told] == [("embed", INSTRUCTION), ("score", RETRIEVE)]
    with pytest.raises(InvalidRequest, match="embedder does not generate: it is served by Embed, over HTTP /v1/embed"):
        await embeds.ask(None, "What moves?")
    with pytest.raises(InvalidRequest, match="embedder does not generate"):
        async with embeds.live():
            pass
    with pytest.raises(InvalidRequest, match="embedder does not score"):
        await embeds.score("a", ["b"])
    with pytest.raises(InvalidRequest, match="reranker does not embed: it is served by Score"):
        await scores.embed(None, "a")


async def test_errors_name_the_fields_of_the_caller(embeds: GridsieveClient, scores: GridsieveClient) -> None:
    broken = Video(data=b"no video")
    for asked, field in (
        (embeds.embed([Text("a"), broken]), "prompt.messages[0].parts[1].video"),
        (scores.score("a", [["b", broken]]), "document[1].video"),
        (scores.score([broken], ["b"]), "query[0].video"),
        (scores.score([], ["b"]), "query"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await asked
        assert refused.value.field == field


# --- HTTP ---------------------------------------------------------------------------------------------------------

VIDEO = {"type": "video_url", "video_url": {"url": data_url("video/mp4", CLIP.data or b"")}}


@pytest.fixture(scope="module")
def embedding_door(embedder: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(embedder.stack.address, tmp_path_factory.mktemp("door")) as started:
        yield started


@pytest.fixture(scope="module")
def ranking_door(reranker: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(reranker.stack.address, tmp_path_factory.mktemp("door")) as started:
        yield started


async def posted(door: Gateway, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=door.url, timeout=60) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_openais_client_gets_vectors_of_texts(embedding_door: Gateway, embeds: GridsieveClient) -> None:
    """It asks for base64 unless told otherwise."""
    texts = ["a red car", "", *(f"car {number}" for number in range(40))]
    expected = [(await embeds.embed([Text(each)], dimensions=16)).values for each in texts[:3]]
    async with AsyncOpenAI(base_url=f"{embedding_door.url}/v1", api_key="none") as client:
        several = await client.embeddings.create(model="embedder", input=texts, dimensions=16)
        one = await client.embeddings.create(model="embedder", input=texts[0], dimensions=16, encoding_format="float")
    assert [each.index for each in several.data] == list(range(len(texts)))
    np.testing.assert_allclose([each.embedding for each in several.data[:3]], expected, atol=1e-6)
    np.testing.assert_allclose(one.data[0].embedding, expected[0], atol=1e-6)
    assert several.usage.prompt_tokens == several.usage.total_tokens > one.usage.prompt_tokens > 10


MESSAGES: dict[str, Any] = {
    "as the client sends them": {},
    "with vLLM's end": {"continue_final_message": True, "add_special_tokens": True},
}


@pytest.mark.parametrize("form", MESSAGES)
async def test_vllms_messages_have_the_vector_of_their_clip(
    embedder: Reader, embedding_door: Gateway, form: str
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Find the video."}]},
        {"role": "user", "content": [VIDEO, {"type": "text", "text": "a car"}]},
    ]
    if form != "as the client sends them":
        messages.append({"role": "assistant", "content": [{"type": "text", "text": ""}]})
    body = MESSAGES[form] | {"messages": messages, "encoding_format": "base64"}
    told = await posted(embedding_door, "/v1/embeddings", **body)
    values = np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4")
    expected = await embedder.vector("Find the video.", (CLIP, Text("a car")))
    np.testing.assert_allclose(values, expected, atol=TOLERANCE)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_as_cohere_and_vllm_rank_them(
    ranking_door: Gateway, scores: GridsieveClient, path: str
) -> None:
    documents = ["a blue car", {"text": "a tram"}, {"content": [VIDEO]}, {"content": [{"type": "text", "text": "x"}]}]
    found = await scores.score("a car", ["a blue car", "a tram", CLIP, "x"], instruction="Find it.")
    expected = [each.score for each in found]
    best = sorted(range(4), key=lambda index: -expected[index])
    asked = {"query": "a car", "documents": documents, "instruction": "Find it."}
    told = await posted(ranking_door, path, **asked, top_n=3, return_documents=True)
    assert [each["index"] for each in told["results"]] == best[:3]
    assert [each["relevance_score"] for each in told["results"]] == pytest.approx([expected[each] for each in best[:3]])
    shown = {0: {"text": "a blue car"}}.get(best[0], documents[best[0]])
    assert told["results"][0]["document"] == shown
    assert told["usage"]["total_tokens"] == sum(each.usage.prompt_tokens for each in found)
    plain = await posted(ranking_door, path, **asked)
    assert [set(each) for each in plain["results"]] == [{"index", "relevance_score"}] * 4


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_vllms_scores_are_of_one_query_or_of_one_for_each_document(
    ranking_door: Gateway, scores: GridsieveClient, names: tuple[str, str]
) -> None:
    first, second = names
    expected = [each.score for each in await scores.score("a", ["b", "c"])]
    told = await posted(ranking_door, "/v1/score", **{first: "a", second: ["b", "c"]})
    assert [each["score"] for each in told["data"]] == pytest.approx(expected)
    each = await posted(ranking_door, "/v1/score", **{first: ["a", "a"], second: ["b", "c"]})
    assert [one["score"] for one in each["data"]] == pytest.approx(expected)


BROKEN = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": [1, 2]}, "input[0]"),
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": [BROKEN]}]}, "messages[0].content[0].video_url.url"),
    (
        "/v1/embeddings",
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
        "continue_final_message",
    ),
    (
        "/v1/embeddings",
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}], "instruction": "b"},
        "instruction",
    ),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
    ("/v1/score", {"queries": "a"}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"content": [BROKEN]}]}, "documents[1].content[0].video_url.url"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(
    embedding_door: Gateway, ranking_door: Gateway, path: str, body: dict[str, Any], field: str
) -> None:
    door = embedding_door if path == "/v1/embeddings" else ranking_door
    with door.http() as http:
        response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


def test_models_say_what_they_do_and_a_question_to_one_that_embeds_is_refused(embedding_door: Gateway) -> None:
    with embedding_door.http() as http:
        told = http.get("/v1/models/embedder").json()
        assert (told["task"], told["instruction"]) == ("embed", INSTRUCTION)
        asked = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "What moves?"}]})
    assert asked.status_code == 400
    assert "embedder does not generate: it is served by Embed, over HTTP /v1/embeddings" in asked.text
