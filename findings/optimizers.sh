#!/usr/bin/env bash
# torch 2.13.0 (CPU), transformers 5.23.0, 2026-11-29.
#
# Two ways in which saving or resuming an optimizer changes the training, without a word.
#
# 1. `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)` of an optimizer that has made no
#    step yet makes one, with gradients of zero and a learning rate of zero, so that there is a state to return. The
#    weights stay, but the optimizer's counters are 1 afterwards. AdamW then corrects the bias of its moments as if the
#    first step were the second one.
#    Expected: a function that returns the state leaves the training as it is.
#    Seen: a run that saves before its first step ends with other weights than the same run without that save.
# 2. `Optimizer.load_state_dict` casts each floating-point tensor of the state to the dtype of its parameter, except `step`.
#    The Adafactor of transformers keeps its moments in float32 also for parameters in bfloat16.
#    Expected: a resumed run continues as the first one would have.
#    Seen: the moments are bfloat16 after the load, and the weights differ after three more steps. AdamW, whose moments have
#    the dtype of the parameters, continues bit for bit.
#
# Exits 0 while both are as seen, 1 if one changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat > "$work/run.py" <<'PY'
import io
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers.optimization import Adafactor


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(8, 64, generator=generator).to(model.weight.dtype)
    model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def new(make, dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(dtype)
    return model, make(model.parameters())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def adafactor(parameters):
    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


def run(asks_for_state):
    model, optimizer = new(adamw, torch.float32)
    if asks_for_state:
        get_optimizer_state_dict(model, optimizer)
    steps = [float(state["step"]) for state in optimizer.state.values()]
    for seed in range(3):
        step(model, optimizer, seed)
    return model.weight.detach().clone(), steps


def resumed(make):
    """Return the dtypes of the moments before and after, and the number of weights that differ three steps later."""
    model, optimizer = new(make, torch.bfloat16)
    for seed in range(3):
        step(model, optimizer, seed)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    other, again = new(make, torch.bfloat16)
    other.load_state_dict(weights)
    again.load_state_dict(state)

    def dtypes(one):
        return {str(t.dtype) for s in one.state.values() for k, t in s.items() if torch.is_tensor(t) and k != "step"}

    before, after = dtypes(optimizer), dtypes(again)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, again, seed)
    return sorted(before), sorted(after), int((model.weight != other.weight).sum())


(plain, none), (asked, ones) = run(False), run(True)
print("steps after asking for the state:", ones, "- without:", none, "- weights differ:", int((plain != asked).sum()))
fresh = ones == [1.0, 1.0] and none == [] and not torch.equal(plain, asked)
factored, same = resumed(adafactor), resumed(adamw)
print("Adafactor:", *factored)
print("AdamW:", *same)
cast = "torch.float32" in factored[0] and factored[1] == ["torch.bfloat16"] and factored[2] > 0 and same[2] == 0
sys.exit(0 if fresh and cast else 1)
PY
"$work/venv/bin/python" "$work/run.py"
