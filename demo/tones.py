"""Trains a model of the demo's line that also hears: `python -m demo.tones`.

It learns which tone is heard while an object moves, so that another track of the same clip changes the answer
(`demo.tracks`). The demo model's vision tower stays as it is (`demo.thinker`). A new sound tower learns to tell high
tones from low ones by itself, for a short time, then together with the language model. Features come from
preprocessing's `LogMel`, positions from preprocessing's layout of a clip with its sound. Tokens of pictures are dropped
at random, at a rate drawn uniformly; sounds keep all of theirs. Some steps have sounds without clips, or clips without
sounds and the demo's own questions.

A second loss asks the states of sound tokens, after the language model's second layer, for the tone and for what moves
at the time, through a head that is discarded afterwards: there, picture and sound meet.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from demo.checkpoint import DEMO
from demo.clips import TRAINING_SEEDS, VALIDATION_SEEDS, cached_clips, scene_of
from demo.draft import Encoded, encoded
from demo.flags import training_flags
from demo.lessons import Lessons
from demo.model import UNSUPERVISED, Media, Mixed, Prompt, PromptWriter, answer_logits, embed, use_uniform_windows
from demo.questions import Question, questions_about
from demo.scenes import DURATION_S, Motion, Scene, Thing
from demo.stage import steps
from demo.thinker import (
    AUDIO_BOS,
    AUDIO_EOS,
    CHUNK_S,
    LOG_MEL,
    POSITIONS_PER_SECOND,
    SLICE_STEP,
    make_model,
    make_tokenizer,
    save,
)
from demo.tracks import Track, heard_questions, random_track, samples_of, tone_questions
from demo.train import VIDEO, Schedule, optimisers
from demo.wordings import COLOURS, SHAPES
from gridsieve.common.checkpoint import DEMO_MODEL, DEMO_TONES
from gridsieve.common.contract.retention import RANDOM, ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.preprocessing.prompt.positions import GridSpan, LinearSpan, PartSpan, SharedSpan, clip_parts

CLIPS, VIEWS, VALIDATED_CLIPS = 600, 1, 80
CLIPS_A_STEP, QUESTIONS_A_CLIP, DEMO_QUESTIONS = 8, 5, 1
# Of all the time, for the sound tower alone.
TOWER_SHARE = 0.04
HIGHEST_RATE = 0.85
# Every so many steps one has sounds alone, one has clips alone.
ALONE_EVERY = 10
SHORTEST_SOUND_S = 2
# The layer before which picture and sound have met; of the second loss its classes and share.
MEETING = 2
DENSE_CLASSES = (2, 1 + len(COLOURS), 1 + len(SHAPES))
DENSE_SHARE = 1.0
# Of the class that no object moves, which most tokens have.
STILL_WEIGHT = 0.3
UNCERTAIN_S = 0.6
VALIDATED_RATES = (0.0, 0.75)
KINDS = ("tone", "moves_while", "does_move_while", "tone_while")


class Hearer:
    """A model and its inputs: clips with their tracks, tracks alone, clips alone."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model
        self.writer = PromptWriter(tokenizer, "<|vision_bos|>", "<|vision_eos|>")
        self.of_sound = PromptWriter(tokenizer, AUDIO_BOS, AUDIO_EOS)
        self._around = [tokenizer.get_vocab()[each] for each in (AUDIO_BOS, AUDIO_EOS)]
        self._met: list[Tensor] = []
        model.model.language_model.layers[MEETING].register_forward_pre_hook(
            lambda _, given: self._met.append(given[0])
        )

    def sounds(self, tracks: Sequence[Track]) -> Tensor:
        """The sound tower's tokens of tracks of one length: [B, n, D]."""
        features = [torch.from_numpy(LOG_MEL.of(samples_of(track))) for track in tracks]
        lengths = torch.tensor([each.shape[1] for each in features])
        tower = self.model.model.audio_tower
        found: Tensor = tower(torch.cat(features, dim=1), feature_lens=lengths).last_hidden_state
        return found.view(len(tracks), -1, found.shape[-1])

    def heard(
        self, embeds: Tensor, kept: Tensor, tracks: Sequence[Track], prompts: Sequence[Prompt]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and labels, as of `answer_logits`, about clips with their tracks, and what the layer `MEETING` gets of
        the sounds' tokens, [B, n, D]. kept: int64 [B, K], of the clips. prompts: without a system message."""
        sounds = self.sounds(tracks)
        parts = clip_parts(GridSpan(VIDEO, SLICE_STEP), LinearSpan(sounds.shape[1]), CHUNK_S * POSITIONS_PER_SECOND)
        order = torch.cat([torch.arange(each.begin, each.end) + VIDEO.tokens * each.of_sound for each in parts])
        taken = torch.ones(len(embeds), len(order), dtype=torch.bool)
        taken[:, : VIDEO.tokens] = torch.zeros(len(embeds), VIDEO.tokens, dtype=torch.bool).scatter(1, kept, True)
        both = torch.cat((embeds, sounds), dim=1)[:, order]
        places = taken[:, order].nonzero()[:, 1].view(len(embeds), -1)
        self._met.clear()
        logits, labels = self._told(both, places, self._clip(parts), prompts, self.writer)
        # The text before and <|audio_bos|> come first.
        rows, at = (order[places] >= VIDEO.tokens).nonzero(as_tuple=True)
        met = self._met[0][rows, len(prompts[0].before) + 1 + at].view(sounds.shape)
        return logits, labels, met

    def told(self, tracks: Sequence[Track], prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """About tracks alone."""
        sounds = self.sounds(tracks)
        places = torch.arange(sounds.shape[1]).expand(len(tracks), -1)
        media = Mixed((LinearSpan(sounds.shape[1]),), (-1,) * sounds.shape[1])
        return self._told(sounds, places, media, prompts, self.of_sound)

    def seen(self, embeds: Tensor, kept: Tensor, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """About clips alone."""
        return self._told(embeds, kept, GridSpan(VIDEO, SLICE_STEP), prompts, self.writer)

    def _clip(self, parts: Sequence[PartSpan]) -> Mixed:
        begin, end = self._around
        ids = [begin, *[-1] * sum(each.tokens for each in parts), end]
        return Mixed((SharedSpan(before=True), *parts, SharedSpan(before=False)), tuple(ids))

    def _told(
        self, embeds: Tensor, kept: Tensor, media: Media, prompts: Sequence[Prompt], writer: PromptWriter
    ) -> tuple[Tensor, Tensor]:
        return answer_logits(self.model, embeds, kept, media, prompts, writer.vision_end)


class Teacher:
    """Draws steps. Clips in which more moves are drawn more often."""

    def __init__(self, hearer: Hearer, video: Encoded, rng: Random) -> None:
        self._hearer, self._video, self._rng = hearer, video, rng
        self.tone = nn.Linear(DEMO.hidden, DENSE_CLASSES[0])
        self.dense = nn.Linear(DEMO.hidden, sum(DENSE_CLASSES))
        self._shares = [(0.1, 1.0, 3.0, 3.0)[len(scene.movers)] for scene in video.scenes]
        self._step = 0

    def tower_loss(self, progress: float) -> Tensor:
        """Of the tone at each of the sound tower's tokens."""
        tracks = [random_track((), self._rng) for _ in range(CLIPS_A_STEP)]
        told = self.tone(self._hearer.sounds(tracks))
        labels = torch.stack([dense_labels((), track, told.shape[1])[:, 0] for track in tracks])
        return F.cross_entropy(told.flatten(0, 1), labels.flatten())

    def loss(self, progress: float) -> Tensor:
        self._step += 1
        dense = torch.zeros(())
        drawn = self._rng.choices(range(len(self._video.scenes)), self._shares, k=CLIPS_A_STEP)
        scenes = [self._video.scenes[index] for index in drawn]
        embeds = self._video.embeds[torch.tensor(drawn)].float()
        kept = kept_of(embeds, round(self._rng.uniform(0, HIGHEST_RATE), 3), self._rng)
        match self._step % ALONE_EVERY:
            case 0:
                lasts_s = self._rng.randint(SHORTEST_SOUND_S, DURATION_S)
                tracks = [random_track((), self._rng, lasts_s) for _ in scenes]
                prompts = [self._hearer.of_sound.asked(tone_questions(track)) for track in tracks]
                logits, labels = self._hearer.told(tracks, prompts)
            case 1:
                asked = [self._some(questions_about(scene, self._rng), QUESTIONS_A_CLIP) for scene in scenes]
                logits, labels = self._hearer.seen(embeds, kept, [self._hearer.writer.asked(each) for each in asked])
            case _:
                tracks = [random_track(scene.movers, self._rng) for scene in scenes]
                prompts = [self._about(*each) for each in zip(scenes, tracks, strict=True)]
                logits, labels, met = self._hearer.heard(embeds, kept, tracks, prompts)
                dense = self._dense_loss(met, scenes, tracks)
        asked_for = labels != UNSUPERVISED
        return F.cross_entropy(logits[asked_for], labels[asked_for]) + DENSE_SHARE * dense

    def _dense_loss(self, met: Tensor, scenes: Sequence[Scene], tracks: Sequence[Track]) -> Tensor:
        pairs = zip(scenes, tracks, strict=True)
        labels = torch.stack([dense_labels(scene.movers, track, met.shape[1]) for scene, track in pairs])
        told = self.dense(met.flatten(0, 1)).split(DENSE_CLASSES, dim=-1)
        wanted = labels.view(-1, len(DENSE_CLASSES)).unbind(-1)
        losses = []
        for logits, labels in zip(told, wanted, strict=True):
            weight = torch.ones(logits.shape[-1])
            weight[0] = STILL_WEIGHT
            losses.append(F.cross_entropy(logits, labels, weight, ignore_index=UNSUPERVISED))
        return torch.stack(losses).sum()

    def _about(self, scene: Scene, track: Track) -> Prompt:
        asked = self._some(heard_questions(scene, track), QUESTIONS_A_CLIP) + self._some(tone_questions(track), 1)
        return self._hearer.writer.asked(asked + self._some(questions_about(scene, self._rng), DEMO_QUESTIONS))

    def _some(self, asked: list[Question], count: int) -> list[Question]:
        return self._rng.sample(asked, min(count, len(asked)))


def dense_labels(movers: Sequence[Thing], track: Track, tokens: int) -> Tensor:
    """Tone, and colour and shape of what moves, at the time of each of a sound's tokens: int64 [tokens, 3].

    UNSUPERVISED shortly before and after a motion and where several objects move.
    """
    labels = torch.zeros(tokens, len(DENSE_CLASSES), dtype=torch.long)
    for number in range(tokens):
        time_s = (number + 0.5) / POSITIONS_PER_SECOND
        labels[number, 0] = int(track.tone_at(time_s) == "high")
        near = [each for each in movers if each.motion and _gap_s(each.motion, time_s) < UNCERTAIN_S]
        if len(near) == 1 and near[0].motion and _gap_s(near[0].motion, time_s) == 0:
            labels[number, 1] = 1 + COLOURS.index(near[0].colour)
            labels[number, 2] = 1 + SHAPES.index(near[0].shape)
        elif near:
            labels[number, 1:] = UNSUPERVISED
    return labels


def _gap_s(motion: Motion, time_s: float) -> float:
    return max(0.0, motion.start_s - time_s, time_s - motion.stop_s)


def kept_of(embeds: Tensor, rate: float, rng: Random) -> Tensor:
    """int64 [B, K], of each clip other tokens."""
    prunings = [ItemPruning(rate, RANDOM, rng.randrange(2**31)) for _ in embeds]
    kept = [keep_tokens(clip, VIDEO, pruning) for clip, pruning in zip(embeds, prunings, strict=True)]
    return torch.stack(kept).long()


@torch.no_grad()
def validate(hearer: Hearer, held_out: Encoded) -> None:
    """Prints the share of answers that are right in full, of each kind of question, about clips that no step sees."""
    for rate in VALIDATED_RATES:
        rng, right = Random(0), defaultdict[str, list[bool]](list)
        for start in range(0, len(held_out.scenes), CLIPS_A_STEP):
            scenes = held_out.scenes[start : start + CLIPS_A_STEP]
            embeds = held_out.embeds[start : start + CLIPS_A_STEP].float()
            tracks = [random_track(scene.movers, rng) for scene in scenes]
            asked = [
                heard_questions(scene, track) + tone_questions(track) + rng.sample(questions_about(scene, rng), 3)
                for scene, track in zip(scenes, tracks, strict=True)
            ]
            prompts = [hearer.writer.asked(each) for each in asked]
            logits, labels, _ = hearer.heard(embeds, kept_of(embeds, rate, rng), tracks, prompts)
            found = (logits.argmax(-1) == labels) | (labels == UNSUPERVISED)
            for row, track, questions, prompt in zip(found, tracks, asked, prompts, strict=True):
                at = 1
                for question, branch in zip(questions, prompt.branches, strict=True):
                    kind = question.kind if question.kind in KINDS else "demo"
                    kind += " of several tones" if kind != "demo" and len(track.tones) > 1 else ""
                    right[kind].append(bool(row[at : at + len(branch.ids)].all()))
                    at += len(branch.ids)
        told = ", ".join(f"{kind} {sum(each) / len(each):.3f} of {len(each)}" for kind, each in sorted(right.items()))
        print(f"  rate {rate}: {told}", flush=True)


def train(output: Path, cache: Path, clips: int, start_from: Path | None, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    rng, schedule = Random(seed), Schedule(minutes * (1 - TOWER_SHARE), tower_rate=2e-3, text_rate=1.5e-3)
    demo = Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    use_uniform_windows(demo)
    tokenizer = make_tokenizer()
    hearer = Hearer(make_model(tokenizer), tokenizer)
    seeds = range(TRAINING_SEEDS, TRAINING_SEEDS + clips)
    unseen = range(VALIDATION_SEEDS, VALIDATION_SEEDS + VALIDATED_CLIPS)
    lessons = Lessons([scene_of(each) for each in seeds], cached_clips(cache, seeds), hearer.writer, seed)
    held_out = _as_they_are(demo, unseen, cached_clips(cache, unseen))
    began = time.monotonic()
    video = encoded(demo, lessons, VIEWS * clips)
    print(f"encoded {len(video.scenes)} clips, {time.monotonic() - began:.0f} s", flush=True)
    thinker = hearer.model.model
    if start_from:
        begun = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(start_from, dtype=torch.float32)
        thinker.load_state_dict(begun.model.state_dict())
    teacher = Teacher(hearer, video, rng)
    tower, text = list(thinker.audio_tower.parameters()), list(thinker.language_model.parameters())
    alone, shorter = [*tower, *teacher.tone.parameters()], replace(schedule, minutes=minutes * TOWER_SHARE)
    for _ in steps("tower", shorter, alone, optimisers(shorter, alone, []), teacher.tower_loss):
        pass
    tower += teacher.dense.parameters()
    for _ in steps("tones", schedule, [*tower, *text], optimisers(schedule, tower, text), teacher.loss):
        validate(hearer, held_out)
        save(output, hearer.model, tokenizer)


@torch.no_grad()
def _as_they_are(demo: Any, seeds: Sequence[int], clips: Any) -> Encoded:
    parts = [embed(demo, torch.from_numpy(clips[[index]].copy())).half() for index in range(len(seeds))]
    return Encoded([scene_of(each) for each in seeds], torch.cat(parts), VIDEO)


def main() -> None:
    parser = training_flags(__doc__, DEMO_TONES, CLIPS)
    parser.add_argument("--from", dest="start_from", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    train(args.output, args.cache, args.clips, args.start_from, args.minutes, args.seed)


if __name__ == "__main__":
    main()
