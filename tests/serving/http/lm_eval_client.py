# SPDX-License-Identifier: Apache-2.0
"""What lm-eval makes of a server: `python lm_eval_client.py URL MODEL RUNS` prints it as one JSON object.

`RUNS` is a JSON object of the harness's arguments by name of run. A process of its own, in the directory of the tasks.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

PATHS = {"local-completions": "/v1/completions", "local-chat-completions": "/v1/chat/completions"}


def sample(one):
    arguments = [list(each) if isinstance(each, list | tuple) else [each] for each in one["arguments"]]
    return {"doc": one["doc"], "arguments": arguments, "answers": one["resps"], "kept": one["filtered_resps"]}


def evaluated(url, model, asked):
    found = simple_evaluate(
        model=asked["api"],
        model_args={"base_url": url + PATHS[asked["api"]], "model": model, "max_retries": 1, **asked.get("args", {})},
        tasks=asked["tasks"],
        task_manager=TaskManager(include_path=".", include_defaults=False),
        apply_chat_template=asked.get("chat", False),
        limit=asked.get("limit"),
        bootstrap_iters=0,
    )
    samples = {task: [sample(one) for one in found["samples"][task]] for task in asked["tasks"]}
    return {"results": found["results"], "samples": samples}


def main(url, model, runs):
    told = {name: evaluated(url, model, asked) for name, asked in json.loads(runs).items()}
    told["imported"] = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps(told, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
