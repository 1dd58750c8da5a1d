#!/usr/bin/env bash
# mlflow 3.17.2 (mlflow-skinny) with a SQLite store: a metric that is infinite is stored as the largest float64.
#
# Guess: what is logged is read back: inf, -inf and nan.
# Seen: inf comes back as 1.797e308, -inf as -1.797e308, without a warning; nan stays nan.
# Why it matters: a loss that overflowed looks finite to whoever reads the store, and passes math.isfinite.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'mlflow-skinny==3.17.2' 'sqlalchemy==2.1.9' 'alembic==1.20.1'
"$environment/bin/python" -W ignore - <<'END'
import math
import sys
import tempfile

import mlflow
from mlflow.tracking import MlflowClient

with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"sqlite:///{folder}/store.db")
    with mlflow.start_run() as run:
        for step, value in enumerate((math.inf, -math.inf, math.nan)):
            mlflow.log_metric("loss", value, step=step)
    history = MlflowClient().get_metric_history(run.info.run_id, "loss")
values = [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
print("inf, -inf, nan are read back as", values)
assert values[:2] == [sys.float_info.max, -sys.float_info.max]
assert math.isnan(values[2])
END
