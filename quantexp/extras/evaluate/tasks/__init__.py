"""Tasks of lm-evaluation-harness under a scheme and in bf16, in `quantexp evaluate` (`evaluate.tasks`)."""
