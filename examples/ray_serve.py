"""A model behind Ray Serve that changes its weights while it answers: `python examples/ray_serve.py CHECKPOINT`.

Each replica loads in its own process, and answers Ray's health checks meanwhile. A new checkpoint is loaded beside the
old one, which answers until the new one is complete; if the load fails, the old one stays. Needs `ray[serve]`.
"""

import argparse

import torch
from ray import serve
from starlette.requests import Request
from torch import nn

import stio


def make_model() -> nn.Module:
    """Return your module, on `meta`: without memory."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


@serve.deployment
class Scores:
    async def reconfigure(self, config: dict[str, str]) -> None:
        """Load the checkpoint of a configuration; Ray calls this at the start of a replica too."""
        model = make_model()
        await stio.load_into(model, config["checkpoint"], assign=True)
        self.model = model

    async def __call__(self, request: Request) -> list[float]:
        rows = torch.tensor(await request.json(), dtype=torch.float32)
        return self.model(rows).squeeze(-1).tolist()


def application(checkpoint: str) -> serve.Application:
    return Scores.options(user_config={"checkpoint": checkpoint}).bind()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    serve.run(application(arguments.checkpoint), blocking=True)
