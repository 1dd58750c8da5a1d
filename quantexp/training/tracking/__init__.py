"""Who is told about a run beside its own folder: TensorBoard, Weights & Biases, MLflow.

One module for each, with the same names in all: `NAME`, `REMOTE`, `enabled`, `destination`, `start`.
`trackers` is the list of them; `told` is what they are told, in the same words. TensorBoard's files are written by the
worker itself. What may have to wait for a network has a process of its own (`courier`), which reads the run folder as
it grows: it can neither hold a training up nor end it. `attached` is what the worker holds of all of them.
"""
