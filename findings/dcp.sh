#!/bin/bash
# torch's distributed checkpoint (DCP) turns the keys of a state into text, without a word.
#
# Version: torch 2.13.0 (CPU).
# Expected: `dcp.save({"optim": optimizer.state_dict()})`, then torch's own converter `dcp_to_torch_save`, then
#   `optimizer.load_state_dict` restores the optimizer, or something raises. `dcp.load` into {0: "new"} replaces the value.
# Seen: the converted state has keys '0' and '1' in place of 0 and 1; `load_state_dict` takes it and restores no moment.
#   `dcp.load` leaves {0: "new"} as it is and adds '0': "old". Empty dicts are not saved at all.
# Exits 1 if this behaviour changes.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" numpy 2>"$work/pip.log" || { tail -5 "$work/pip.log"; exit 2; }
cat > "$work/run.py" <<'PY'
import tempfile, warnings, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")
folder = tempfile.mkdtemp()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
state = {"optim": optimizer.state_dict(), "of": {0: "old"}, "empty": {}}
dcp.save(state, checkpoint_id=folder + "/dcp", no_dist=True)
dcp_to_torch_save(folder + "/dcp", folder + "/a.pt")
loaded = torch.load(folder + "/a.pt")
again = torch.optim.AdamW(model.parameters())
again.load_state_dict(loaded["optim"])
restored = sum("exp_avg" in again.state.get(one, {}) for one in model.parameters())
target = {"of": {0: "new"}}
dcp.load(target, checkpoint_id=folder + "/dcp", no_dist=True)
print("torch", torch.__version__)
print("keys:", list(loaded), list(loaded["optim"]["state"]))
print("parameters with moments after load_state_dict:", restored, "of 2")
print("dcp.load:", target)
as_seen = (
    list(loaded["optim"]["state"]) == ["0", "1"]
    and "empty" not in loaded
    and restored == 0
    and target == {"of": {0: "new", "0": "old"}}
)
raise SystemExit(0 if as_seen else 1)
PY
"$work/venv/bin/python" "$work/run.py"
