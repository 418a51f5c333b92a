"""A process that starts engines of vLLM, one after the other, and answers each line of its input with a line.

    python tests/engines/engine.py
    ["start", [{"model": "model/", "load_format": "stio"}]]
    ["generate", []]
    ["reload", ["other-model/"]]
    ["update", ["run/step-6"]]
    ["stop", []]

An answer begins with `ANSWER`; all else on the output is vLLM's. Each engine has processes of its own, which are new
ones, but this one imports vLLM once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import models  # by this name the processes of the engine find it too
import vllm._custom_ops
from vllm import LLM, SamplingParams

if os.environ.get("STIO_TEST_UNPACKED"):  # the processes of the engine begin with this module too
    vllm._custom_ops._supports_onednn = False  # linear layers keep their weights, as on a GPU

ANSWER = "answer: "
PROMPTS = [[1, 17, 3, 201, 44], [9, 9, 120], [77]]
"""Tokens: no tokenizer takes part."""


class Commands:
    llm: LLM

    def start(self, options: dict[str, Any]) -> None:
        settings = {"enforce_eager": True, "max_model_len": 64, "enable_prefix_caching": False, "seed": 0}
        self.llm = LLM(**{**settings, "skip_tokenizer_init": True, **options})

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm

    def generate(self) -> list[list[tuple[int, float]]]:
        """Return tokens and their logarithmic probabilities: they show a difference that the tokens alone may not."""
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = [found.outputs[0] for found in self.llm.generate(prompts, sampling, use_tqdm=False)]
        return [
            [(token, chosen[token].logprob) for token, chosen in zip(one.token_ids, one.logprobs, strict=True)]
            for one in answers
        ]

    def reload(self, path: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def update(self, path: str) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"path": path}})
        self.llm.finish_weight_update()

    def digest(self) -> list[str]:
        """Return the digest of all weights, for each rank."""
        return self.llm.apply_model(models.digest_of)


def main() -> None:
    commands = Commands()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"result": getattr(commands, command)(*arguments)}
        except Exception as error:  # the test looks at it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
