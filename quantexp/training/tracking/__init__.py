"""The trackers that receive a copy of a run while it runs: TensorBoard, Weights & Biases, MLflow.

Each has a module with the same names: `NAME`, `REMOTE`, `destination`, `start`. `trackers` lists them, `events` has
what they receive, `clients` is the worker's side. The worker writes TensorBoard's files itself. A tracker that may wait
for a network gets its own process (`upload`), which follows the run folder: it can neither delay nor end a training.
"""
