"""The trackers that receive a copy of a run while it runs: TensorBoard, Weights & Biases, MLflow.

Each has a module with the same names: `NAME`, `REMOTE`, `destination`, `start`. `trackers` lists them, `events` has
what they receive, `clients` calls them in rank 0. The rank writes TensorBoard's files itself. A tracker that may wait
for a network is called from a thread (`upload`), which reads the run folder: it can neither delay nor end a training.
"""
