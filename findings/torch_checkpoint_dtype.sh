#!/usr/bin/env bash
# torch 2.13.0: loading a checkpoint converts to the dtype of the tensor that is there, without a word.
#
# Guess: torch.distributed.checkpoint raises an error if the dtype of a tensor is not that of the checkpoint.
# Seen: a float32 checkpoint with 1.6 and 1000 loads into float8_e4m3fn as 1.625 and 448, and into int32 as 1 and 1000.
#       Module.load_state_dict does the same for float8.
# Why it matters: a quantised parameter that is filled from a high-precision checkpoint is cast without a scale, and
#       saturates.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import tempfile

import torch
import torch.distributed.checkpoint as dcp

values = torch.tensor([1.6, 1000.0])
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"x": values}, checkpoint_id=folder)
    for dtype, expected in ((torch.float8_e4m3fn, [1.625, 448.0]), (torch.int32, [1.0, 1000.0])):
        state = {"x": torch.zeros(2).to(dtype)}
        dcp.load(state, checkpoint_id=folder)
        print(dtype, state["x"].float().tolist())
        assert state["x"].dtype == dtype
        assert state["x"].float().tolist() == expected
module = torch.nn.Module()
module.x = torch.nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
module.load_state_dict({"x": values})
assert module.x.float().tolist() == [1.625, 448.0]
END
