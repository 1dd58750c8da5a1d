"""The process that trains: worker, observer, saver; Megatron and the trackers."""
