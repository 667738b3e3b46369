"""The moments of answers: read from their text, and added to the messages that end them."""

from __future__ import annotations

from collections import defaultdict

from gridsieve.services.generation.answers.text import Ended, Said, Told
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.sampling.moments import MomentsFormat, MomentsReader, Notation
from gridsieve.v1 import generation_pb2


class ToldMoments:
    """Those of the answers to one prompt, whose grammar has times."""

    def __init__(self, prompt: PrunedPrompt, wanted: MomentsFormat, notation: Notation) -> None:
        self._prompt = prompt
        self._reader = MomentsReader(prompt.plan, wanted, notation)
        self._texts: defaultdict[int, list[str]] = defaultdict(list)

    def add(self, part: Told, response: generation_pb2.GenerateResponse) -> None:
        """part: the next of an answer. response: of this part."""
        match part:
            case Said():
                self._texts[part.index].append(part.delta.text)
            case Ended():
                found = self._reader.read("".join(self._texts[part.index]), self._prompt.kept_tokens())
                response.finished.moments.extend(
                    generation_pb2.Moment(
                        media_index=moment.media_index,
                        start_s=moment.start_s,
                        end_s=moment.end_s,
                        description=moment.description,
                        first_slice=moment.first_slice,
                        last_slice=moment.last_slice,
                        kept=moment.kept,
                    )
                    for moment in found
                )
