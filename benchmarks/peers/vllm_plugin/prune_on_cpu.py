"""A plugin that lets vLLM 0.32 prune videos on a CPU. Runs in vLLM's environment, which finds it by PYTHONPATH.

vLLM's CPU runner overrides `load_model` without the line that notes whether the model prunes. Its embeddings then keep
the columns that hold positions, and the first pruned video ends the engine.
"""

import functools


def register() -> None:
    from vllm.model_executor.models.interfaces import supports_multimodal_pruning
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    @functools.wraps(load)
    def load_model(runner, *args, **kwargs):
        loaded = load(runner, *args, **kwargs)
        multimodal = runner.model_config.multimodal_config
        runner.is_multimodal_pruning_enabled = (
            multimodal is not None
            and multimodal.is_multimodal_pruning_enabled()
            and supports_multimodal_pruning(runner.get_model())
        )
        return loaded

    CPUModelRunner.load_model = load_model
