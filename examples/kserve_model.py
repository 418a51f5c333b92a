"""A model container of KServe that is live while it loads: `python examples/kserve_model.py --checkpoint PATH`.

`GET /v2/health/live` answers from the start, `GET /v2/models/scores/ready` says whether the model is loaded, and
`POST /v1/models/scores:predict {"instances": [...]}` asks it. Needs kserve; options of its server may follow.
"""

import argparse
from typing import Any

import kserve
import torch
from kserve.errors import ModelNotReady
from torch import nn

import stio


def make_model() -> nn.Module:
    """Return your module, on `meta`: without memory."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


class Scores(kserve.Model):
    def __init__(self, name: str, checkpoint: str) -> None:
        super().__init__(name)
        self.checkpoint = checkpoint
        self.model: nn.Module | None = None
        self.engine = True  # the server runs start_engine beside its requests
        self.ready = True  # the server does not start with a model that is not; `healthy` says when it is loaded

    async def start_engine(self) -> None:
        model = make_model()
        await stio.load_into(model, self.checkpoint, assign=True)
        self.model = model

    async def healthy(self) -> bool:
        return self.model is not None

    async def predict(self, payload: dict[str, Any], headers: Any = None, response_headers: Any = None) -> Any:
        if self.model is None:
            raise ModelNotReady(self.name)
        return {"predictions": self.model(torch.tensor(payload["instances"], dtype=torch.float32)).squeeze(-1).tolist()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[kserve.model_server.parser], conflict_handler="resolve"
    )
    parser.add_argument("--checkpoint", required=True)
    arguments, _ = parser.parse_known_args()
    kserve.ModelServer().start([Scores("scores", arguments.checkpoint)])
