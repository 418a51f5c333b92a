"""FSDP2 under Ray Train, with checkpoints that stio saves on all workers: `python examples/ray_train.py STORAGE`.

STORAGE is a directory that all workers see. Run it again with more `--steps`, or after a failure: the training goes on
from the newest checkpoint, also with another number of `--workers`.
"""

import argparse
import os

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import stio


def train(config):
    worker = ray.train.get_context()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    for module in [*model, model]:
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, under_way = 0, None

    def state_at(step):
        weights, moments = get_state_dict(model, optimizer)
        return {"step": step, "model": weights, "optimizer": moments}

    if found := ray.train.get_checkpoint():
        state = state_at(step)
        stio.sync.distributed.load_into(state, found.path)  # each worker reads its part
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts)
        step, rank = state["step"], worker.get_world_rank()
        print(f"worker {rank} of {worker.get_world_size()} goes on from step {step}")

    def report(step, loss, path, pending):
        pending.result()  # durable, on all workers
        checkpoint, mode = Checkpoint.from_directory(path), CheckpointUploadMode.NO_UPLOAD
        ray.train.report({"step": step, "loss": loss}, checkpoint, checkpoint_upload_mode=mode)

    folder = worker.get_storage().experiment_fs_path
    with stio.sync.distributed.Saver() as saver:
        while step < config["steps"]:
            step += 1
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(24, 16, generator=generator)  # of all workers
            own = batch.chunk(worker.get_world_size())[worker.get_world_rank()]
            loss = (model(own) - own.mean(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                if under_way:
                    report(*under_way)
                path = f"{folder}/step-{step}"
                pending = saver.save_state(state_at(step), path)  # the training goes on
                under_way = step, loss.item(), path, pending
        if under_way:
            report(*under_way)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("storage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": given.steps},
        scaling_config=ScalingConfig(num_workers=given.workers),
        run_config=RunConfig(
            name="run",
            storage_path=os.path.abspath(given.storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print("last checkpoint:", os.path.basename(result.checkpoint.path), "loss:", round(result.metrics["loss"], 4))
