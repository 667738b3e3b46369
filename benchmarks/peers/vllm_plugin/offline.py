"""vLLM's offline `LLM.chat` over folders of clips. It runs in vLLM's environment: `benchmarks.peers.offline` starts it.

Each line of standard input names a folder; a line of JSON with the seconds and the tokens of its clips comes back.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def main(model: str, dtype: str, rate: float, root: str, question: str, new_tokens: int) -> None:
    """As VllmServer's flags: see there."""
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=8192,
        max_num_seqs=64,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 0, "video": 1},
        mm_processor_kwargs={"do_sample_frames": False},
        skip_mm_profiling=True,
        enable_prefix_caching=False,
        allowed_local_media_path=root,
        **({"video_pruning_rate": rate, "enable_chunked_prefill": False} if rate else {}),
    )
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for line in sys.stdin:
        conversations = []
        for path in sorted(Path(line.strip()).glob("*.mp4")):
            video = {"type": "video_url", "video_url": {"url": path.as_uri()}}
            conversations.append([{"role": "user", "content": [video, {"type": "text", "text": question}]}])
        start = time.perf_counter()
        outputs = llm.chat(conversations, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        told = {
            "seconds": seconds,
            "answered": len(outputs),
            "prompt_tokens": sum(len(each.prompt_token_ids) for each in outputs),
            "completion_tokens": sum(len(each.outputs[0].token_ids) for each in outputs),
        }
        print(f"measured {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    # The engine is a process that imports this file.
    model, dtype, rate, root, question, new_tokens = sys.argv[1:]
    main(model, dtype, float(rate), root, question, int(new_tokens))
