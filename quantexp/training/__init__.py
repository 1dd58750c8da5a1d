"""The training process: worker, observer, saver, the Megatron loop and the trackers."""
