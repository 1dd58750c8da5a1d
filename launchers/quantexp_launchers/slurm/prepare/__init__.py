"""`quantexp prepare launcher=slurm`: an array of tasks makes the outputs of the inputs, a last job joins them."""
